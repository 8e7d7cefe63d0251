"""The planners by the name that a policy gives them (`planner.kind`)."""

from __future__ import annotations

from delta.planner.foresight import foresee
from delta.planner.greedy import plan_step
from delta.planner.monet import monet
from delta.planner.steplog import Plan
from delta.planner.task import Planner, Task


def profile(task: Task) -> Plan:
    """The planned form of policy `delta`."""
    if task.everything:
        return foresee(task.graph)
    return plan_step(task.graph, task.limit_bytes, task.link, task.allowed, task.forced)


PLANNERS: dict[str, Planner] = {"profile": profile, "monet": monet}
