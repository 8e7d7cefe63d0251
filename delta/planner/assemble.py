"""From what becomes of each storage to a plan that says when.

Where backward alone needs what was saved, a storage goes when it has been saved, and the forecast says when copies back
begin. Where everything may go, forward reads its storages too: one goes after its last need in forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from delta.planner.forecast import Forecaster, copies_back, forecast
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
    found = forecast(graph, actions, link)
    return Plan(
        tuple(actions),
        found.prefetch,
        graph.next_needs,
        graph.need_ns,
        tuple(graph.nodes[node].nbytes for node in graph.saved),
        found.forward_bytes,
        found.peak_bytes,
        found.replay_ns,
        found.swap_bytes,
    )


def _everything(task: Task, actions: Sequence[Action]) -> Plan:
    graph, began = task.graph, task.graph.forward_needs
    needs = graph.next_needs
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
    sizes = tuple(graph.nodes[node].nbytes for node in graph.saved)
    return Plan(
        (Action.KEEP,) * len(sizes),
        copies_back(graph, back, task.link)[0],
        needs,
        graph.need_ns,
        sizes,
        (0,) * len(sizes),
        0,
        0,
        sum(sizes[order] for order in back),
        {at: tuple(goes) for at, goes in evictions.items()},
    )
