"""From what becomes of each storage to a plan that says when.

Where backward alone needs what was saved, a storage goes when it has been saved, and the forecast says when copies back
begin. Where everything may go, forward reads its storages too: one goes after its last need in forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import sub

from delta.planner.forecast import Forecast, Forecaster, copies_back, forecast
from delta.planner.steplog import Plan, StepGraph
from delta.planner.task import Task
from delta.types import Action, Link


def assemble(task: Task, actions: Sequence[Action]) -> Plan:
    """The plan that gives each saved storage its action, by save order."""
    return _everything(task, actions) if task.everything else plan_of(task.graph, task.link, actions)


def best(task: Task, plans: Iterable[Plan]) -> Plan:
    """The one that costs least by forecast among those that fit, else the one that is least over the limit."""
    forecaster = Forecaster(task.graph, task.link)

    def rank(plan: Plan) -> tuple[int, int]:
        found = forecaster.forecast(plan.actions)
        return max(found.peak_bytes, task.limit_bytes), found.cost_ns

    return min(plans, key=rank)


def plan_of(graph: StepGraph, link: Link, actions: Sequence[Action]) -> Plan:
    """The same where only what autograd saved may go, and backward alone needs it."""
    return as_forecast(graph, actions, forecast(graph, actions, link))


def as_forecast(graph: StepGraph, actions: Sequence[Action], found: Forecast) -> Plan:
    """The plan of which `found` is the forecast."""
    return Plan(
        actions=tuple(actions),
        prefetch=found.prefetch,
        next_needs=graph.next_needs,
        need_ns=graph.need_ns,
        saved_bytes=graph.saved_bytes,
        forward_bytes=tuple(map(sub, found.forward_bytes, graph.beside_saves or repeat(0))),
        peak_bytes=found.peak_bytes,
        replay_ns=found.replay_ns,
        swap_bytes=found.swap_bytes,
    )


def without_actions(
    graph: StepGraph,
    prefetch: dict[int, tuple[int, ...]] | None = None,
    evictions: Mapping[int, tuple[tuple[int, Action], ...]] | None = None,
    swap_bytes: int = 0,
) -> Plan:
    """A plan by which nothing goes at its save, and of which nothing is forecast. See `Plan` for the rest."""
    count = len(graph.saved)
    return Plan(
        actions=(Action.KEEP,) * count,
        prefetch=prefetch or {},
        next_needs=graph.next_needs,
        need_ns=graph.need_ns,
        saved_bytes=graph.saved_bytes,
        forward_bytes=(0,) * count,
        peak_bytes=0,
        replay_ns=0,
        swap_bytes=swap_bytes,
        evictions=evictions or {},
    )


def _everything(task: Task, actions: Sequence[Action]) -> Plan:
    graph, began = task.graph, task.graph.forward_needs
    needs, sizes = graph.next_needs, graph.saved_bytes
    evictions: dict[int, list[tuple[int, Action]]] = {}
    back: dict[int, int] = {}  # save order -> its first need in backward
    for order, action in enumerate(actions):
        if action is Action.KEEP:
            continue
        before = [position for position in needs[order] if position < began]
        at = before[-1] if before else graph.needs_before[order] - 1
        after = needs[order][len(before) :]
        if graph.needs_before[order] > began:
            at, after = (needs[order] or (at,))[-1], ()
        evictions.setdefault(max(at, 0), []).append((order, action))
        if action is Action.SWAP and after:
            back[order] = after[0]
    return without_actions(
        graph,
        copies_back(graph, back, task.link)[0],
        {at: tuple(goes) for at, goes in evictions.items()},
        sum(sizes[order] for order in back),
    )
