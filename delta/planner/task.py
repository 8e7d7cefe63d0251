"""What a planner is asked, and the form of every planner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from delta.config import PlannerConfig
from delta.planner.steplog import Plan, StepGraph
from delta.types import Action, Link


@dataclass(frozen=True, slots=True)
class Task:
    """Plan a step like `graph` under `limit_bytes` of resident storages.

    `forced`: what a rule of the policy decides for single storages, by save order: to be kept, or one of the ways in
    which they can go. `everything`: any storage may go between two uses, in forward too, and every access is a need;
    else only what autograd saved may, and backward alone needs it. `options`: the section `planner` of the policy.
    `known`: the actions of the plan in use, to be improved on; empty where there is none.
    """

    graph: StepGraph
    limit_bytes: int
    link: Link
    allowed: tuple[Action, ...]
    forced: Mapping[int, Action]
    everything: bool
    options: PlannerConfig
    known: tuple[Action, ...] = ()


Planner = Callable[[Task], Plan]

# A plan, its step, the link, and the save orders whose copies back came late: the plan for the next step.
Feedback = Callable[[Plan, StepGraph, Link, Collection[int]], Plan]
