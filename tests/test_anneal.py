"""Annealing: against every assignment there is, and where the other planners stop short."""

from __future__ import annotations

import pytest
from builders import a_log, an_op
from hypothesis import given, settings
from hypothesis import strategies as st
from test_monet import a_task, best_cost_ns
from test_planner import step_logs

from delta.planner import Task, forecast
from delta.planner.anneal import anneal
from delta.planner.assemble import assemble
from delta.planner.choices import choices_of
from delta.planner.registry import profile, profile_thoroughly
from delta.planner.steplog import Plan, StepGraph, build_graph
from delta.types import Action, Kind

KEEP, SWAP, RECOMPUTE = Action.KEEP, Action.SWAP, Action.RECOMPUTE
UNIT = 1000
LAYERS = 4


def adapters() -> StepGraph:
    """Layers with an adapter each, the first of them on frozen ones that save nothing and take long to replay.

    A layer normalises the sum before it and makes ``hidden`` out of that, activates it, draws ``noise`` of that shape,
    multiplies both into ``out``, and adds to that what the adapter makes of it: the next ``total``. What has a name
    here is saved, but for the first two of the first layer and the last sum.
    """
    ops = [an_op(0, [0], [1], cost_ns=11_000), an_op(1, [1], [2], cost_ns=350)]
    saved, below, record = [1, 2], 2, 3
    for _ in range(LAYERS - 1):
        normal, hidden, active, noise, out, total = range(record, record + 6)
        ops += [
            an_op(len(ops), [below], [normal], cost_ns=80),
            an_op(len(ops) + 1, [normal], [hidden], cost_ns=750),
            an_op(len(ops) + 2, [hidden], [active], cost_ns=120),
            an_op(len(ops) + 3, [active], [noise], cost_ns=1600),
            an_op(len(ops) + 4, [active, noise], [out], cost_ns=60),
            an_op(len(ops) + 5, [out], [total], cost_ns=300),
        ]
        saved += [hidden, noise, out, total]
        below, record = total, record + 6
    saved.pop()
    saves = [(each, 100 * at, each) for at, each in enumerate(saved)]
    needs = [(order, 30_000 + 1000 * at) for at, order in enumerate(reversed(range(len(saved))))]
    releases = [(order, len(saved) - order) for order in reversed(range(len(saved)))]
    sizes = dict.fromkeys(range(record), UNIT)
    return build_graph(a_log(ops, sizes, saves, needs, releases, 60_000, {0: Kind.SOURCE}), 0)


def cost_ns(task: Task, plan: Plan) -> float:
    """Infinite where it does not fit."""
    found = forecast(task.graph, plan.actions, task.link)
    return found.cost_ns if found.peak_bytes <= task.limit_bytes else float("inf")


def rank(task: Task, plan: Plan) -> tuple[int, int]:
    found = forecast(task.graph, plan.actions, task.link)
    return max(task.limit_bytes, found.peak_bytes), found.cost_ns


def kept(task: Task) -> Plan:
    return assemble(task, [KEEP] * len(task.graph.saved))


@pytest.mark.parametrize("units", [6, 7, 8])
def test_it_finds_what_is_several_changes_away(units):
    task = a_task(adapters(), units * UNIT)
    least = best_cost_ns(task)
    assert cost_ns(task, anneal(task, kept(task))) <= 1.05 * least
    assert cost_ns(task, anneal(task, profile(task))) <= 1.05 * least
    assert cost_ns(task, profile_thoroughly(task)) <= 1.05 * least


def test_where_the_greedy_planner_does_not():
    task = a_task(adapters(), 7 * UNIT)
    assert cost_ns(task, profile(task)) > 1.2 * best_cost_ns(task)


@pytest.mark.parametrize("units", [6, 7, 8])
def test_its_plan_fits_all_the_same_since_chains_are_cut_as_closely_as_they_can_be(units):
    task = a_task(adapters(), units * UNIT)
    assert profile(task).peak_bytes <= task.limit_bytes


@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(step_logs(), st.integers(0, 100), st.sampled_from([(KEEP, RECOMPUTE), (KEEP, SWAP, RECOMPUTE)]))
def test_no_plan_gets_worse_and_it_comes_close_to_the_best_there_is(log, percent, allowed):
    graph = build_graph(log, 0)
    task = a_task(graph, graph.unevicted_bytes * percent // 100, allowed)
    for plan in (kept(task), profile(task)):
        annealed = anneal(task, plan)
        assert rank(task, annealed) <= rank(task, plan)
        least = best_cost_ns(task)
        if least is not None:
            assert cost_ns(task, annealed) <= 1.1 * least


def test_what_a_rule_decides_stays_so():
    graph = adapters()
    task = a_task(graph, 8 * UNIT, forced={0: RECOMPUTE, 3: KEEP})
    annealed = anneal(task, assemble(task, [RECOMPUTE, *[KEEP] * (len(graph.saved) - 1)]))
    assert annealed.actions[0] is RECOMPUTE and annealed.actions[3] is KEEP


def test_it_is_the_same_each_time_and_asks_for_nothing_that_cannot_be():
    task = a_task(adapters(), 8 * UNIT)
    plan = anneal(task, kept(task))
    assert plan == anneal(task, kept(task))
    ways = choices_of(task)
    assert all(action is KEEP or action in ways[order] for order, action in enumerate(plan.actions))


def test_a_step_too_large_to_give_each_storage_a_turn_is_left_alone(monkeypatch):
    task = a_task(adapters(), 8 * UNIT)
    plan = kept(task)
    assert anneal(task, plan) is not plan
    passed = 1 + len(task.graph.ops) + len(choices_of(task))
    for turns, stays in ((len(choices_of(task)), False), (len(choices_of(task)) - 1, True)):
        monkeypatch.setattr("delta.planner.anneal.PASSED", turns * passed)
        assert (anneal(task, plan) is plan) is stays


def test_where_nothing_may_go_the_plan_stays():
    task = a_task(adapters(), UNIT, allowed=(KEEP,))
    plan = kept(task)
    assert anneal(task, plan) is plan
