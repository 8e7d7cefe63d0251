"""Which saves of a known step are left to autograd alone.

Most of what a plan keeps is saved where the plan keeps all that is saved, and to hear of each such tensor, and of its
end, is most of what the host does in a step that goes as planned. So where everything that is saved between two calls
is kept, and read by no recorded replay, nobody hears of it (`runtime/stretches.py`): a storage is either left alone in
all of its saves, or looked after in all. Its bytes count all the same, by its place in the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from delta.planner.steplog import StepGraph


@dataclass(frozen=True, slots=True)
class Alone:
    """`turns`: after so many calls nobody hears of saves any more (True), or somebody does again. `calls_at`: how many
    calls came before each saved tensor. `nbytes` and `until`: by the save orders that are left alone, and the number of
    needs after which they are gone. `rises`: by the turns after which nobody hears, the bytes that are saved until
    somebody hears of a new storage."""

    turns: Mapping[int, bool]
    calls_at: Sequence[int]
    nbytes: Mapping[int, int]
    until: Mapping[int, int]
    rises: Mapping[int, int]

    def saves_before(self, calls: int | None) -> int:
        """How many tensors are saved until so many calls have come; all, for None."""
        return len(self.calls_at) if calls is None else bisect_left(self.calls_at, calls)


def left_alone(
    graph: StepGraph,
    calls_at: Sequence[int],
    orders: Sequence[int],
    settled: Sequence[int],
    looked_after: Collection[int],
) -> Alone | None:
    """`orders`: by saved tensor, that of its storage; `settled`: the same, with -1 for what comes and goes.
    `looked_after`: those that are told of whatever comes. None where nothing is left alone, or where backward asks for
    something before forward has ended."""
    if len(calls_at) != len(orders) or any(graph.needs_before):
        return None
    places: dict[int, set[int]] = {}  # by number of calls: what is saved there
    for calls, order in zip(calls_at, settled, strict=True):
        places.setdefault(calls, set()).add(order)
    apart = set(settled) - {-1, 0} - set(looked_after)
    while True:
        free = {calls for calls, saved in places.items() if saved <= apart}
        left = apart.difference(*(saved for calls, saved in places.items() if calls not in free))
        if left == apart:
            break
        apart = left
    if not apart:
        return None
    sizes = graph.saved_bytes
    turns = {
        later: later in free for earlier, later in pairwise(sorted(places)) if (earlier in free) != (later in free)
    }
    starts = sorted(turns)
    rises = {
        start: sum(sizes[order] for order in _first_in(orders, calls_at, start, end))
        for start, end in zip(starts, [*starts[1:], None], strict=True)
        if turns[start]
    }
    return Alone(turns, tuple(calls_at), {v: sizes[v] for v in apart}, {v: graph.release[v] for v in apart}, rises)


def _first_in(orders: Sequence[int], calls_at: Sequence[int], start: int, end: int | None) -> set[int]:
    """What is saved for the first time after `start` calls and before `end`, and the one after that: who hears of it
    sees to the room for the next."""
    first = bisect_left(calls_at, start)
    last = len(orders) if end is None else bisect_left(calls_at, end)
    known = set(orders[:first])
    new = set(orders[first:last]) - known
    after = next((order for order in orders[last:] if order not in known | new), None)
    return new if after is None else new | {after}
