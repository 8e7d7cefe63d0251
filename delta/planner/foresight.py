"""Foresight: a plan that decides nothing ahead and knows when everything is needed next.

Where the device tells of every allocation and every access beforehand, the filter can decide at the moment room is
needed and still know the future: what goes is cheap to make again, large, and not needed for long. It cannot miss the
limit the way a forecast can, and a step that goes differently costs time and nothing else.
"""

from __future__ import annotations

from delta.planner.steplog import Plan, StepGraph
from delta.types import Action


def foresee(graph: StepGraph) -> Plan:
    """The next uses of every saved storage of a step like `graph`; every action is left to the filter."""
    count = len(graph.saved)
    return Plan(
        actions=(Action.KEEP,) * count,
        prefetch={},
        next_needs=graph.next_needs,
        need_ns=graph.need_ns,
        saved_bytes=tuple(graph.nodes[node].nbytes for node in graph.saved),
        forward_bytes=(0,) * count,
        peak_bytes=0,
        replay_ns=0,
        swap_bytes=0,
    )
