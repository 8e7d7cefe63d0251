"""The planners by the name that a policy gives them (`planner.kind`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from delta.planner.capuchin import capuchin, sooner
from delta.planner.greedy import plan_step
from delta.planner.monet import monet, whole_steps
from delta.planner.optimal_checkpoint import optimal_checkpoint
from delta.planner.responsive import respond
from delta.planner.steplog import Plan
from delta.planner.task import Feedback, Planner, Task
from delta.types import Action

# The greedy planner gets stuck on chains that come back at once; the integer program may take this long to find a way.
STUCK_S = 4.0


def profile(task: Task) -> Plan:
    """The planned form of policy `delta`: greedy where that fits, the integer program where it gets stuck."""
    if task.everything:
        from delta.planner.search import rehearse  # needs numpy

        return rehearse(task, _covers(task))
    plan = plan_step(task.graph, task.limit_bytes, task.link, task.allowed, task.forced)
    if plan.peak_bytes <= task.limit_bytes or Action.RECOMPUTE not in task.allowed:
        return plan
    return monet(_briefly(task))


def _covers(task: Task) -> Iterator[Sequence[Action]]:
    """What the integer program would keep if nothing were swapped."""
    without = tuple(action for action in task.allowed if action is not Action.SWAP)
    yield from whole_steps(_briefly(replace(task, allowed=without)))


def _briefly(task: Task) -> Task:
    limit_s = min(STUCK_S, task.options.time_limit_s)
    return replace(task, options=task.options.model_copy(update={"time_limit_s": limit_s}))


PLANNERS: dict[str, Planner] = {
    "profile": profile,
    "mimose": respond,
    "monet": monet,
    "optimal-checkpoint": optimal_checkpoint,
    "capuchin": capuchin,
}
# Planners to which what is beside saved storages tells itself by position, in the graph.
BY_POSITION = frozenset({"profile", "monet"})
FEEDBACK: dict[str, Feedback] = {"capuchin": sooner}
