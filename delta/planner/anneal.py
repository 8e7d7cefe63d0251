"""Looks for a better plan around one that is there, by simulated annealing on the forecast.

The covering program knows little of what a chain brings back on its way, and the greedy planner looks at one storage at
a time. Mostly that is enough; but where chains are long and little of a step is saved, an adapter's above layers that
are frozen, the best plan may be several changes away from theirs, with none on the way that fits or costs less. So now
and then a change for the worse is made, less and less often, and the best that was met is kept.

From: Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220 (1983). Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from delta.planner.assemble import assemble
from delta.planner.choices import choices_of
from delta.planner.forecast import Forecaster
from delta.planner.steplog import Plan
from delta.planner.task import Task
from delta.types import Action

# As many forecasts as pass this many ops and storages, and no more than so many.
PASSED = 1_000_000
MOST = 3_000
HOTTEST = 0.15  # at first a change is likely that costs this share of forward's ops
OVER = 2.0  # the price of a peak over the limit by as much as the limit is, in forward's ops
EVERYWHERE = 0.1  # ... and of being over it at any one position, in that of the peak


def anneal(task: Task, plan: Plan) -> Plan:
    """A plan with no higher a peak over the limit than this one and, with the same, no higher a cost by forecast. For
    steps in which backward alone needs what was saved. One so large that not every storage would have its turn is left
    as it is."""
    free = ((v, ways) for v, ways in enumerate(choices_of(task)) if ways and v not in task.forced)
    choices = [(v, (Action.KEEP, *ways)) for v, ways in free]
    rounds = min(MOST, PASSED // (1 + len(task.graph.ops) + len(choices)))
    if not choices or rounds < len(choices):
        return plan
    random, scene = Random(0), _Scene(task)
    actions = list(plan.actions)
    energy, rank = scene.look_at(actions)
    best_rank, best = rank, actions
    for number in range(rounds):
        heat_ns = 1 + HOTTEST * scene.forward_ns * (1 - number / rounds) ** 2
        other = list(actions)
        for v, ways in random.choices(choices, k=random.choice((1, 2))):
            other[v] = random.choice([action for action in ways if action is not other[v]])
        other_energy, other_rank = scene.look_at(other)
        if other_energy < energy or random.random() < math.exp((energy - other_energy) / heat_ns):
            actions, energy = other, other_energy
            if other_rank < best_rank:
                best_rank, best = other_rank, other
    return assemble(task, best)


class _Scene:
    """What a choice of actions is worth."""

    def __init__(self, task: Task) -> None:
        self._limit_bytes = task.limit_bytes
        self._forecaster = Forecaster(task.graph, task.link)
        self.forward_ns = sum(op.cost_ns for op in task.graph.ops)
        self._over_ns = OVER * self.forward_ns / max(1, task.limit_bytes)

    def look_at(self, actions: Sequence[Action]) -> tuple[float, tuple[int, int]]:
        """Its energy in ns: its cost, and more for being over the limit, also at other positions than the worst one, so
        that what brings it down there counts. And its rank: the peak over the limit, then the cost."""
        found = self._forecaster.forecast(actions)
        limit = self._limit_bytes
        over_bytes = sum(
            nbytes - limit for row in (found.forward_bytes, found.resident_bytes) for nbytes in row if nbytes > limit
        )
        worst_bytes = max(0, found.peak_bytes - limit)
        energy = found.cost_ns + self._over_ns * (worst_bytes + EVERYWHERE * over_bytes)
        return energy, (worst_bytes, found.cost_ns)
