"""The events of a timeline, step by step."""

from bisect import bisect_left
from collections.abc import Sequence

from delta.timeline.format import Event


def by_step(events: Sequence[Event]) -> tuple[list[Event], list[list[Event]]]:
    """The steps in the order of their ends, and all other events: those of each step, and last those after all steps.

    An event belongs to the first step that had not ended before it."""
    steps = sorted((event for event in events if event.ev == "step"), key=lambda event: int(event.fields["end_ns"]))
    ends = [event.fields["end_ns"] for event in steps]
    parts: list[list[Event]] = [[] for _ in range(len(steps) + 1)]
    for event in events:
        if event.ev != "step":
            parts[bisect_left(ends, event.t_ns)].append(event)
    return steps, parts
