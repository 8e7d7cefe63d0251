"""Mimose's responsive scheduler on chains s -> 0 -> 1 -> ..., all saved and needed in reverse. Units: bytes, ns."""

from dataclasses import replace

import pytest
from builders import a_log, an_op
from hypothesis import given
from hypothesis import strategies as st

from delta.config import PlannerConfig
from delta.planner import Task, forecast
from delta.planner.responsive import CHAIN, _Scheduler, respond
from delta.planner.steplog import build_graph
from delta.types import Action, Kind, Link

KEEP, RECOMPUTE = Action.KEEP, Action.RECOMPUTE
LINK = Link(1e9, 1e9)


def a_task(sizes, limit, *, fixed=(), forced=None, min_bytes=0):
    """Op i makes storage i, and cannot be replayed where i is in `fixed`."""
    count = len(sizes)
    source = 99
    ops = [an_op(i, [i - 1 if i else source], [i], cost_ns=10, replayable=i not in fixed) for i in range(count)]
    log = a_log(
        ops,
        dict(enumerate(sizes)) | {source: 1},
        saves=[(i, 10 * i, i + 1) for i in range(count)],
        needs=[(i, 1000 + 10 * (count - i)) for i in reversed(range(count))],
        releases=[(i, count - i) for i in reversed(range(count))],
        end_ns=3000,
        kinds={source: Kind.SOURCE},
    )
    graph = build_graph(log, min_bytes)
    return Task(graph, limit, LINK, (KEEP, RECOMPUTE), forced or {}, False, PlannerConfig(kind="mimose"))


def dropped(task):
    return [v for v, action in enumerate(respond(task).actions) if action is RECOMPUTE]


def test_what_fits_stays():
    assert dropped(a_task([100, 100, 100], 300)) == []


def test_the_smallest_that_covers_it_alone_goes():
    """90 over: 100 goes, and not 120 or more."""
    assert dropped(a_task([400, 100, 300, 120, 50], 880)) == [1]


def test_the_earliest_of_about_equal_bytes_goes():
    """95 and 100 are in one bucket; 10 would not do. 960 - 870 = 90 over."""
    assert dropped(a_task([10, 400, 95, 350, 100, 5], 870)) == [2]


def test_where_none_covers_it_one_of_the_largest_goes_first():
    """160 over: 100, the earliest of its bucket, then the smallest that covers the other 60."""
    assert dropped(a_task([20, 100, 20, 70, 20, 95, 20], 185)) == [1, 3]


@pytest.mark.parametrize("options", [{"fixed": {1}}, {"forced": {1: KEEP}}, {"min_bytes": 101}])
def test_what_may_not_go_stays(options):
    assert 1 not in dropped(a_task([100, 100, 100, 400], 500, **options))


def test_chains_are_kept_short():
    """16 of 100 bytes under 1000: a chain brings back at most an eighth of it, so no two neighbours go."""
    task = a_task([100] * 16, 1000)
    gone = dropped(task)
    assert gone
    assert 1000 // CHAIN < 200
    assert all(v + 1 not in gone for v in gone)


def test_chains_stay_short_where_longer_ones_would_be_of_no_use():
    """Nothing of what may go is there at one moment; then more has to go at another."""
    scheduler = _Scheduler(a_task([100] * 16, 1000))
    assert scheduler.drop(500, range(16))
    assert not scheduler.drop(100, ())
    assert scheduler.drop(200, range(16))
    gone = [v for v, action in enumerate(scheduler.actions) if action is RECOMPUTE]
    assert len(gone) == 7 and all(v + 1 not in gone for v in gone)


def test_chains_grow_where_short_ones_do_not_suffice():
    gone = dropped(a_task([100] * 16, 500))
    assert any(v + 1 in gone for v in gone)


def beside(task, saves=(), needs=()):
    """With so much beside what is saved, by save order and by need."""
    count = len(task.graph.saved)
    saves, needs = ([dict(each).get(at, 0) for at in range(count)] for each in (saves, needs))
    return replace(task, graph=replace(task.graph, beside_saves=tuple(saves), beside_needs=tuple(needs)))


@pytest.mark.parametrize(
    ("place", "gone"),
    [
        ({"saves": [(3, 490)]}, [0, 1]),  # of those that the program has let go of by then
        ({"needs": [(5, 530)]}, [0, 1]),  # of those that are needed after that, in one chain if it has to be
        ({"saves": [(7, 140)]}, [4]),
    ],
)
def test_what_goes_is_there_where_too_much_is(place, gone):
    """One of the larger ones would cover it alone, but that is of use at the end only."""
    task = beside(a_task([40] * 4 + [100] * 4, 600), **place)
    assert dropped(task) == gone
    assert forecast(task.graph, (KEEP,) * 8, LINK).peak_bytes > 600
    assert respond(task).peak_bytes <= 600


def test_where_nothing_can_go_at_the_worst_moment_the_others_are_still_lowered():
    task = beside(a_task([100] * 8, 700, fixed={0, 1}), needs=[(6, 900)])
    plan = respond(task)
    assert plan.peak_bytes == 1100 and max(plan.forward_bytes) <= 700


@given(st.lists(st.integers(1, 500), min_size=1, max_size=25), st.floats(0.05, 1.0), st.sets(st.integers(0, 25)))
def test_enough_goes_unless_what_is_left_would_come_back_in_too_long_a_chain(sizes, share, fixed):
    task = a_task(sizes, int(share * sum(sizes)), fixed=fixed)
    plan = respond(task)
    gone = {v for v, action in enumerate(plan.actions) if action is RECOMPUTE}
    assert not gone & fixed
    assert plan.peak_bytes == forecast(task.graph, plan.actions, LINK).peak_bytes
    kept = set(range(len(sizes))) - gone
    if sum(sizes[v] for v in kept) > task.limit_bytes:
        last = len(sizes) - 1  # which is needed at once: to drop it would be of no use
        without = [*plan.actions[:last], RECOMPUTE]
        assert last in fixed or forecast(task.graph, without, LINK).peak_bytes >= plan.peak_bytes
        for v in kept - fixed - {last}:
            chain = [v, *_run(gone, v, -1), *_run(gone, v, 1)]
            assert sum(sizes[u] for u in chain) > task.limit_bytes


def _run(gone, v, way):
    """The dropped storages next to one, in a row."""
    while (v := v + way) in gone:
        yield v
