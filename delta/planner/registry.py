"""The planners by the name that a policy gives them (`planner.kind`)."""

from __future__ import annotations

from dataclasses import replace

from delta.planner.anneal import anneal
from delta.planner.assemble import assemble, best
from delta.planner.capuchin import capuchin, sooner
from delta.planner.greedy import plan_step
from delta.planner.monet import monet, whole_step
from delta.planner.optimal_checkpoint import optimal_checkpoint
from delta.planner.responsive import respond
from delta.planner.steplog import Plan
from delta.planner.task import Feedback, Planner, Task
from delta.types import Action

# The integer program may take this long where it guides a search.
BRIEF_S = 1.0
# Beside the training it goes on for this long, or until its plan is this close to the best one.
ASIDE = {"time_limit_s": 20.0, "gap": 0.01}


def profile(task: Task) -> Plan:
    """The planned form of policy `delta`, at once: the greedy plan, or the one in use where that is better."""
    if task.everything:
        from delta.planner.search import rehearse  # needs numpy

        return rehearse(task, [whole_step(_briefly(task))])
    plan = plan_step(task.graph, task.limit_bytes, task.link, task.allowed, task.forced)
    return best(task, (plan, assemble(task, task.known))) if task.known else plan


def profile_thoroughly(task: Task) -> Plan:
    """As `profile`, with the time to solve the integer program and to look around its answer: never a worse plan."""
    task = replace(task, options=task.options.model_copy(update=ASIDE))
    found = monet(task)
    if found.peak_bytes > task.limit_bytes and {Action.SWAP, Action.RECOMPUTE} <= set(task.allowed):
        # When copies begin that replays read is what the program knows least of: one kind alone may fit where both do
        # not.
        found = best(task, (found, monet(_without(Action.SWAP, task)), monet(_without(Action.RECOMPUTE, task))))
    return found if task.everything else anneal(task, found)  # plans for the one are rehearsed, not forecast


def _without(action: Action, task: Task) -> Task:
    return replace(task, allowed=tuple(other for other in task.allowed if other is not action))


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
# To these the graph tells, by position, what is beside saved storages; to one of the program's own only what is left.
BY_POSITION = frozenset(PLANNERS)
FEEDBACK: dict[str, Feedback] = {"capuchin": sooner}
