"""The planners by the name that a policy gives them (`planner.kind`)."""

from __future__ import annotations

from delta.planner.capuchin import capuchin, sooner
from delta.planner.greedy import plan_step
from delta.planner.monet import monet
from delta.planner.optimal_checkpoint import optimal_checkpoint
from delta.planner.responsive import respond
from delta.planner.steplog import Plan
from delta.planner.task import Feedback, Planner, Task


def profile(task: Task) -> Plan:
    """The planned form of policy `delta`."""
    if task.everything:
        from delta.planner.search import rehearse  # needs numpy

        return rehearse(task)
    return plan_step(task.graph, task.limit_bytes, task.link, task.allowed, task.forced)


PLANNERS: dict[str, Planner] = {
    "profile": profile,
    "mimose": respond,
    "monet": monet,
    "optimal-checkpoint": optimal_checkpoint,
    "capuchin": capuchin,
}
FEEDBACK: dict[str, Feedback] = {"capuchin": sooner}
