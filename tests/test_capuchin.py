"""Capuchin: moments and gaps, lanes, choices and triggers by hand, feedback. Units: bytes, ns; one byte a ns."""

from dataclasses import replace

import pytest
from builders import a_log, an_op
from logs import random_net

from delta import planning
from delta.budget import Budget
from delta.config import PlannerConfig
from delta.engine import Engine
from delta.planner import StepGraph, Task
from delta.planner.capuchin import capuchin, sooner
from delta.planner.lanes import Lanes
from delta.planner.moments import Moments
from delta.planner.steplog import build_graph
from delta.policies.loader import load
from delta.simulate import Status, simulate
from delta.trace import read
from delta.types import Action, Kind, Link, Mode
from delta.units import Bytes, Share

KEEP, SWAP, RECOMPUTE = Action.KEEP, Action.SWAP, Action.RECOMPUTE
LINK = Link(1e9, 1e9)


def chain(costs_ns=(50, 50, 50, 50), nbytes=100) -> StepGraph:
    """Four storages of 100 bytes, made one from the other and saved at 100, 200, ...; backward, from 1000 on, needs one
    every 100 ns, the last first."""
    ops = [an_op(10 + k, [k], [k + 1], cost_ns=cost_ns) for k, cost_ns in enumerate(costs_ns)]
    count = len(ops)
    log = a_log(
        ops,
        {k: nbytes for k in range(count + 1)},
        saves=[(k + 1, 100 * (k + 1), k + 1) for k in range(count)],
        needs=[(count - 1 - p, 1000 + 100 * p) for p in range(count)],
        releases=[(count - 1 - p, p + 1) for p in range(count)],
        end_ns=2000,
        kinds={0: Kind.SOURCE},
    )
    return build_graph(log, 0)


def a_task(graph, limit_bytes, allowed=(KEEP, SWAP, RECOMPUTE), link=LINK, forced=None, everything=False) -> Task:
    return Task(graph, limit_bytes, link, allowed, forced or {}, everything, PlannerConfig())


# -- moments ----------------------------------------------------------------------------------------------------------
def test_a_step_is_a_row_of_saves_and_needs():
    moments = Moments(a_task(chain(), 0))
    assert (moments.saves, moments.needs) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert moments.resident_bytes == [100, 200, 300, 400, 400, 300, 200, 100]
    assert [(gap.order, gap.from_ns, gap.until_ns, gap.back) for gap in moments.gaps] == [
        (0, 100, 1300, 7), (1, 200, 1200, 6), (2, 300, 1100, 5), (3, 400, 1000, 4)
    ]  # fmt: skip


def test_what_is_beside_has_its_moments():
    graph = replace(chain(), beside_saves=(10, 0, 0, 40), beside_needs=(0, 30, 0, 5))
    assert Moments(a_task(graph, 0)).resident_bytes == [110, 200, 300, 440, 400, 330, 200, 105]


def test_where_everything_may_go_there_is_a_gap_between_any_two_accesses():
    """a is read at 10 and at 40; b is made at 20 and read at 30 and 40. What an op reads stays until it has ended."""
    graph = replace(
        chain((1, 1), 10),
        needs=(0, 1, 0, 1),
        need_ns=(10, 30, 40, 40),
        save_ns=(10, 20),
        first_need=(0, 1),
        release=(4, 4),
        needs_before=(0, 1),
    )
    gaps = Moments(a_task(graph, 0, everything=True)).gaps
    assert [(gap.order, gap.after, gap.until, gap.from_ns, gap.until_ns) for gap in gaps] == [(0, 0, 2, 30, 40)]


# -- lanes ------------------------------------------------------------------------------------------------------------
def test_a_lane_takes_one_copy_at_a_time():
    lanes = Lanes(LINK)
    first = lanes.offer(100, 0, (500, 500), 1000)
    assert (first.out_ns, first.in_ns, first.free_ns, first.exposed_ns) == (0, 900, 800, 0)
    lanes.book(first)
    second = lanes.offer(100, 50, (500, 500), 950)
    assert (second.out_ns, second.in_ns, second.free_ns) == (100, 800, 600)


def test_exposed_time_is_what_compute_would_wait():
    offer = Lanes(LINK).offer
    assert offer(100, 0, (60, 60), 1000).exposed_ns == 40, "not gone yet when its room is needed"
    assert offer(100, 0, (500, 950), 1000).exposed_ns == 50, "cannot start before the worst moment is over"
    assert offer(100, 0, (100, 100), 150).exposed_ns == 50
    assert offer(100, 0, (100, 100), 150).free_ns == 0


# -- choices ----------------------------------------------------------------------------------------------------------
def test_a_step_that_fits_is_left_alone():
    assert capuchin(a_task(chain(), 400)).idle


def test_the_largest_free_time_is_swapped_first():
    """Free times 1000, 800, 600, 400."""
    assert capuchin(a_task(chain(), 300)).actions == (SWAP, KEEP, KEEP, KEEP)
    assert capuchin(a_task(chain(), 200)).actions == (SWAP, SWAP, KEEP, KEEP)


def test_the_only_need_of_a_step_may_be_that_of_a_swapped_storage():
    """No need comes before it, so its copy back begins when it is asked for."""
    ops, nbytes = [an_op(10 + k, [k], [k + 1]) for k in range(4)], dict.fromkeys(range(5), 100)
    saves, releases = [(k + 1, 100 * (k + 1), k + 1) for k in range(4)], [(k, 1) for k in range(4)]
    log = a_log(ops, nbytes, saves, [(0, 1000)], releases, 2000, kinds={0: Kind.SOURCE})
    assert capuchin(a_task(build_graph(log, 0), 300)).actions == (SWAP, KEEP, KEEP, KEEP)


def test_without_free_time_the_smaller_of_wait_and_recomputation_is_taken():
    """A copy takes 10,000 ns: nothing is hidden. The cheapest lineage per byte goes first, and lineages grow."""
    slow = Link(1e7, 1e7)
    assert capuchin(a_task(chain((90, 10, 80, 70)), 300, link=slow)).actions == (KEEP, RECOMPUTE, KEEP, KEEP)
    # with 1 gone, 2 would cost 55 + 10; 0 costs 60
    grown = capuchin(a_task(chain((60, 10, 55, 99, 99)), 300, link=slow))
    assert grown.actions == (RECOMPUTE, RECOMPUTE, KEEP, KEEP, KEEP)


def test_a_swap_costs_what_its_copies_take_from_compute_as_well():
    """A copy takes 10,000 ns: 0 is gone at 10,100 and back at 20,100, for 400 and 1300. Its replay takes 30,000."""
    slow, graph, limit_bytes = Link(1e7, 1e7), chain((30_000, 10**9, 10**9, 10**9)), 300
    assert capuchin(a_task(graph, limit_bytes, link=slow)).actions == (SWAP, KEEP, KEEP, KEEP)
    for dearer in (replace(slow, copy_ns=1_000), replace(slow, interference=0.1)):
        assert capuchin(a_task(graph, limit_bytes, link=dearer)).actions == (RECOMPUTE, KEEP, KEEP, KEEP)


def test_a_copy_out_that_is_waited_for_frees_its_room():
    """A copy takes 10,000 ns, of which none is hidden, and a replay a second: one of four makes room enough."""
    slow = Link(1e7, 1e7)
    for limit_bytes, count in ((300, 1), (200, 2)):
        actions = capuchin(a_task(chain((10**9,) * 4), limit_bytes, link=slow)).actions
        assert (actions.count(SWAP), actions.count(KEEP)) == (count, 4 - count)


def test_rules_and_allowed_actions_are_respected():
    assert capuchin(a_task(chain(), 0, allowed=(KEEP,))).idle
    assert SWAP not in capuchin(a_task(chain(), 200, allowed=(KEEP, RECOMPUTE))).actions
    assert capuchin(a_task(chain(), 300, forced={0: KEEP})).actions[0] is KEEP
    forced = capuchin(a_task(chain(), 300, forced={0: RECOMPUTE, 1: KEEP}))
    assert forced.actions == (RECOMPUTE, KEEP, KEEP, KEEP), "as they say, though a swap of 0 would be hidden"


def test_plans_hold_the_limit_where_they_can_and_repeat():
    for limit_bytes in (400, 300):
        plan = capuchin(a_task(chain(), limit_bytes))
        assert plan.peak_bytes <= limit_bytes
        assert plan == capuchin(a_task(chain(), limit_bytes))


def test_a_copy_back_starts_at_the_last_access_that_leaves_it_time():
    """0 is needed at 1300 and takes 100: at the need of 1200, position 2."""
    assert capuchin(a_task(chain(), 300)).prefetch == {2: (0,)}
    assert capuchin(a_task(chain(nbytes=150), 450)).prefetch[1] == (0,)


# -- feedback ---------------------------------------------------------------------------------------------------------
def test_a_late_copy_starts_earlier_and_the_others_do_not():
    graph = chain()
    plan = capuchin(a_task(graph, 200))
    assert plan.prefetch == {1: (1,), 2: (0,)}
    assert sooner(plan, graph, LINK, {0}).prefetch == {1: (1, 0)}
    assert sooner(plan, graph, LINK, {1}).prefetch == {0: (1,), 2: (0,)}
    assert sooner(plan, graph, LINK, set()).prefetch == plan.prefetch
    slow = Link(1e9, 1e8)  # 5 % of 1000 ns and more: still one access at a time, here 100 ns apart
    assert sooner(plan, graph, slow, {0}).prefetch == {1: (1, 0)}
    slower = Link(1e9, 2e7)  # 5 % of 5000 ns: from 1200 back to 950
    assert sooner(plan, graph, slower, {0}).prefetch == {0: (0,), 1: (1,)}


def test_a_trigger_never_comes_before_the_storage_has_gone():
    graph = chain()
    plan = replace(capuchin(a_task(graph, 300)), next_needs=((1, 3), (2,), (1,), (0,)))
    for _ in range(5):
        plan = sooner(plan, graph, LINK, {0})
    assert plan.prefetch == {2: (0,)}, "needed at position 1, goes after that"


def test_the_engine_hears_of_late_copies_in_planned_steps_only():
    engine = Engine(load("capuchin"), Budget(activations=Bytes(100)), LINK)
    engine.created(0, 10, Kind.ACTIVATION, 0)
    engine.saved(0, 1, 0)
    engine.transfers.late(0)
    assert not engine.learner.late
    engine.learner.mode = Mode.PLANNED
    engine.transfers.late(0)
    assert engine.learner.late == {0}
    assert Engine(load("delta"), Budget(activations=Bytes(100)), LINK).learner.revising.heed_late is None


def test_the_next_step_s_plan_heeds_what_was_late(monkeypatch, tmp_path):
    """In the simulator a copy back that is late is reported, and moves its trigger."""
    heard = []
    monkeypatch.setitem(
        planning.FEEDBACK,
        "capuchin",
        lambda plan, graph, link, late: heard.append(set(late)) or plan,
    )
    trace = read(random_net(20, seed=1).write(tmp_path / "net.log"))
    simulate(trace, load("capuchin", {"filter.min_bytes": 0}), Share(0.4), Link(1e7, 1e7))
    assert any(heard)


# -- whole runs -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("link", [None, Link(1e9, 1e9), Link(1e8, 1e8)])
@pytest.mark.parametrize("share", [0.6, 0.4])
def test_a_log_where_everything_may_go_runs(tmp_path, link, share):
    trace = read(random_net(30, seed=3).write(tmp_path / "net.log"))
    run = simulate(trace, load("capuchin", {"filter.min_bytes": 0}), Share(share), link)
    assert run.status is Status.OK
    assert 1 <= run.overhead < 1.6
    assert link is not None or not run.swapped_bytes


def test_a_fast_link_hides_everything(tmp_path):
    trace = read(random_net(30, seed=3).write(tmp_path / "net.log"))
    policy = load("capuchin", {"filter.min_bytes": 0})
    run = simulate(trace, policy, Share(0.5), Link(1e12, 1e12))
    assert run.swapped_bytes
    assert run.overhead < 1.01 < simulate(trace, policy, Share(0.5)).overhead
