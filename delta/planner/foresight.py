"""Foresight: a plan that decides nothing ahead and knows when everything is needed next.

Where the device tells of every allocation and every access beforehand, the filter can decide at the moment room is
needed and still know the future: what goes is cheap to make again, large, and not needed for long. It cannot miss the
limit the way a forecast can, and a step that goes differently costs time and nothing else.
"""

from __future__ import annotations

from delta.planner.assemble import without_actions
from delta.planner.steplog import Plan, StepGraph


def foresee(graph: StepGraph) -> Plan:
    """The next uses of every saved storage of a step like `graph`; every action is left to the filter."""
    return without_actions(graph)
