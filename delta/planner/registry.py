"""The planners by the name that a policy gives them (`planner.kind`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from delta.planner.assemble import assemble, best
from delta.planner.capuchin import capuchin, sooner
from delta.planner.greedy import plan_step
from delta.planner.monet import monet, whole_steps
from delta.planner.optimal_checkpoint import optimal_checkpoint
from delta.planner.responsive import respond
from delta.planner.steplog import Plan
from delta.planner.task import Feedback, Planner, Task
from delta.types import Action

# The integer program may take this long where it guides a search.
BRIEF_S = 4.0
# For policy `delta` it may take this long beside the training, until its plan is this close to the best one.
ASIDE_S = 10.0
ASIDE_GAP = 0.01


def profile(task: Task) -> Plan:
    """The planned form of policy `delta`, at once: the greedy plan, or the one in use where that is better."""
    if task.everything:
        from delta.planner.search import rehearse  # needs numpy

        return rehearse(task, _covers(task))
    plan = plan_step(task.graph, task.limit_bytes, task.link, task.allowed, task.forced)
    return best(task, (plan, assemble(task, task.known))) if task.known else plan


def profile_thoroughly(task: Task) -> Plan:
    """As `profile`, with the time to solve the integer program: never a worse plan."""
    if Action.RECOMPUTE not in task.allowed:
        return profile(task)
    limits = {"time_limit_s": ASIDE_S, "gap": min(ASIDE_GAP, task.options.gap)}
    return monet(replace(task, options=task.options.model_copy(update=limits)))


def _covers(task: Task) -> Iterator[Sequence[Action]]:
    """What the integer program would keep if nothing were swapped."""
    without = tuple(action for action in task.allowed if action is not Action.SWAP)
    yield from whole_steps(_briefly(replace(task, allowed=without)))


def _briefly(task: Task) -> Task:
    limit_s = min(BRIEF_S, task.options.time_limit_s)
    return replace(task, options=task.options.model_copy(update={"time_limit_s": limit_s}))


PLANNERS: dict[str, Planner] = {
    "profile": profile,
    "mimose": respond,
    "monet": monet,
    "optimal-checkpoint": optimal_checkpoint,
    "capuchin": capuchin,
}
# What takes too long to be waited for between two steps: searched beside the training for the plan to follow the first.
BESIDE: dict[str, Planner] = {"profile": profile_thoroughly}
FEEDBACK: dict[str, Feedback] = {"capuchin": sooner}
