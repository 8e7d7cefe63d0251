"""The floor: the least extra time that a recorded step needs under a budget, as far as the planners know.

The step is played once with room for everything, which gives its graph; then every planner that weighs keep, encode,
recompute and swap against each other plans it, and the cheapest plan whose forecast fits counts. Its replays, encodings
and waits are all that a runtime without any cost of its own would add.

Not covered: that a better plan may exist; within the planners' model theirs is within `planner.gap` of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from delta.budget import Budget
from delta.config import Policy
from delta.engine import Engine
from delta.planner.forecast import forecast
from delta.planner.registry import PLANNERS
from delta.planner.steplog import StepGraph
from delta.planner.task import Task
from delta.simulate.allocator import Ideal
from delta.simulate.machine import Machine
from delta.simulate.player import Player
from delta.simulate.simulation import NO_LINK, base_ns, budget_bytes
from delta.trace import Trace
from delta.types import Action, Link
from delta.units import Bytes, Share

ASKED = ("profile", "monet")
_AMPLE = Bytes(1 << 62)


@dataclass(frozen=True, slots=True)
class Floor:
    """What is left to add to a step, by the best plan known. ``fits``: whether its forecast peak is under the budget;
    where no plan's is, the figures are those of the one that is least over it."""

    extra_ns: int
    base_ns: int
    peak_bytes: int
    budget_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @property
    def overhead(self) -> float:
        """Time of the step over its time without a budget: 1.0 and more."""
        return 1 + self.extra_ns / self.base_ns


def floors(trace: Trace, policy: Policy, budgets: Sequence[Bytes | Share], link: Link | None) -> list[Floor]:
    """The floor of a trace of saved activations for each budget, with the actions and limits of a policy. Without a
    link nothing is swapped. TraceError where no op takes time."""
    plain_ns = base_ns(trace)
    allowed = tuple(action for action in policy.director.actions if link is not None or action is not Action.SWAP)
    link = NO_LINK if link is None else replace(link, copy_ns=0)  # that is what a runtime itself takes for a copy
    graph = _graph(trace, policy, link)
    limits = [budget_bytes(trace, budget) for budget in budgets]
    tasks = [Task(graph, limit_bytes, link, allowed, {}, False, policy.planner) for limit_bytes in limits]
    return [_floor(task, plain_ns) for task in tasks]


def _graph(trace: Trace, policy: Policy, link: Link) -> StepGraph:
    """The step as the engine learns it, whichever planner the policy has: not each keeps the graph of a step."""
    policy = policy.model_copy(update={"planner": policy.planner.model_copy(update={"kind": "profile"})})
    machine = Machine(Ideal(_AMPLE.nbytes), link)
    engine = Engine(policy, Budget(activations=_AMPLE), link)
    Player(trace, engine, machine).step()
    return engine.learner.profiles[0].graph


def _floor(task: Task, plain_ns: int) -> Floor:
    found = [forecast(task.graph, PLANNERS[name](task).actions, task.link) for name in ASKED]
    best = min(found, key=lambda one: (max(one.peak_bytes, task.limit_bytes), one.cost_ns))
    return Floor(best.cost_ns, plain_ns, best.peak_bytes, task.limit_bytes)
