"""The planner: step graphs, forecasts position by position, and plans, all by hand. Units: bytes, ns."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from builders import a_log, an_op
from hypothesis import given, settings
from hypothesis import strategies as st

from delta.beside import Beside, Track
from delta.config import PlannerConfig
from delta.planner import BESIDE, PLANNERS, StepGraph, Task, forecast, plan_step
from delta.planner.choices import without_wide_replays
from delta.planner.prices import GROUPS, Prices
from delta.planner.steplog import build_graph
from delta.profile import with_beside
from delta.types import Action, Kind, Link

KEEP, SWAP, RECOMPUTE = Action.KEEP, Action.SWAP, Action.RECOMPUTE
ALL = (KEEP, SWAP, RECOMPUTE)
LINK = Link(10e9, 5e9)  # 10 bytes a ns out, 5 bytes a ns in
FAST = Link(1e15, 1e15)


def chain_log(kinds=None):
    """s -f-> a (100 B) -g-> b (200 B) -h-> c (300 B) -k-> d; backward needs c, b, a.

    Record ids are as scattered as a ledger's. The input of an op is saved before the op runs.
    """
    s, a, b, c, d = 7, 20, 30, 40, 50
    ops = [
        an_op(5, [s], [a], cost_ns=3, name="aten.f"),
        an_op(6, [a], [b], cost_ns=4, name="aten.g"),
        an_op(8, [b], [c], cost_ns=5, name="aten.h"),
        an_op(9, [c], [d], cost_ns=6, name="aten.k"),
    ]
    return a_log(
        ops,
        {s: 10, a: 100, b: 200, c: 300, d: 400},
        saves=[(a, 10, 1), (b, 20, 2), (c, 30, 3)],
        needs=[(2, 40), (1, 60), (0, 80)],
        releases=[(2, 1), (1, 2), (0, 3)],
        end_ns=100,
        kinds={s: Kind.SOURCE} | (kinds or {}),
    )


def chain(min_bytes=0, kinds=None) -> StepGraph:
    return build_graph(chain_log(kinds), min_bytes)


# -- build_graph ------------------------------------------------------------------------------------------------------
def test_a_graph_is_numbered_by_first_appearance():
    graph = chain()
    assert [op.inputs for op in graph.ops] == [(0,), (1,), (2,), (3,)]
    assert [op.outputs for op in graph.ops] == [(1,), (2,), (3,), (4,)]
    assert [op.id for op in graph.ops] == [0, 1, 2, 3]
    assert graph.saved == (1, 2, 3)
    assert [node.order for node in graph.nodes] == [-1, 0, 1, 2, -1]
    assert [node.op for node in graph.nodes] == [None, 0, 1, 2, 3]


def test_a_graph_knows_when_values_are_needed_and_released():
    graph = chain()
    assert graph.needs == (2, 1, 0)
    assert graph.need_ns == (40, 60, 80)
    assert graph.first_need == (2, 1, 0)
    assert graph.release == (3, 2, 1)
    assert (graph.save_ns, graph.end_ns) == ((10, 20, 30), 100)
    assert graph.unevicted_bytes == 600


def test_the_first_of_several_needs_and_the_last_release_count():
    log = chain_log()
    log.needs = [(2, 40), (1, 60), (2, 70), (0, 80)]
    log.releases = [(1, 2), (2, 3), (0, 4)]
    graph = build_graph(log, 0)
    assert graph.first_need == (3, 1, 0)
    assert graph.release == (4, 2, 3)


def test_what_is_never_needed_or_released_lasts_to_the_end():
    log = chain_log()
    log.needs, log.releases = [(2, 40)], [(2, 1)]
    graph = build_graph(log, 0)
    assert graph.first_need == (1, 1, 0)
    assert graph.release == (1, 1, 1)


def test_a_value_floats_until_its_last_reader_in_forward_has_ended():
    """a is read by op 1 and saved at save 0 (one op before it): it is still there at save 1, gone at save 2.

    b, read by op 2, is there at save 2; c, read by op 3, outlives the last save.
    """
    assert chain().floats_to == (1, 2, 2)


def test_what_may_be_evicted():
    # s is a source, f is under min_bytes
    graph = chain(min_bytes=150)
    assert [node.evictable for node in graph.nodes] == [False, False, True, True, True]
    assert [node.rooted for node in graph.nodes] == [True, False, False, False, False]
    assert [node.nbytes for node in graph.nodes] == [10, 100, 200, 300, 400]


def test_parameters_weigh_nothing_and_are_always_there():
    node = chain(kinds={20: Kind.PARAMETER}).nodes[1]
    assert (node.nbytes, node.rooted, node.evictable) == (0, True, False)


def test_what_an_earlier_step_made_is_there_unless_it_is_saved_too():
    """A cached mask or table: op 1 reads one that this step has neither made nor saved, op 2 one that it saves."""
    ops = [an_op(1, [0], [1]), an_op(2, [1, 5], [2]), an_op(3, [2, 6], [3])]
    log = a_log(ops, dict.fromkeys((0, 1, 2, 3, 5, 6), 8), [(6, 5, 2), (3, 9, 3)], [(1, 20), (0, 21)], [], 30)
    nodes = build_graph(log, 0).nodes
    assert [node.rooted for node in nodes if node.op is None and node.order < 0] == [True, True], "0 and 5"
    assert [node.rooted for node in nodes if node.order == 0] == [False]


# -- what would have no room to be replayed ---------------------------------------------------------------------------
def can_be_replayed(graph: StepGraph) -> list[str]:
    return [op.name[-1] for op in graph.ops if op.replayable]


@pytest.mark.parametrize(("limit", "replayable"), [(700, "fghk"), (699, "fgh"), (500, "fgh"), (499, "fg"), (109, "")])
def test_an_op_that_reads_and_makes_more_than_the_limit_is_not_replayed(limit, replayable):
    """f reads and makes 110 bytes, g 300, h 500 and k 700."""
    graph = chain()
    narrowed = without_wide_replays(graph, limit)
    assert can_be_replayed(narrowed) == list(replayable)
    assert (narrowed is graph) is (limit == 700)
    assert replace(narrowed, ops=graph.ops) == graph


@pytest.mark.parametrize(("released", "least"), [(1, 500), (2, 600)])
def test_what_is_needed_before_and_after_is_there_in_any_case(released, least):
    """a is needed first, and goes before c is asked for, or after that."""
    log = chain_log()
    log.needs, log.releases = [(0, 40), (2, 60), (1, 80)], [(0, released), (2, 2), (1, 3)]
    graph = build_graph(log, 0)
    assert "h" in can_be_replayed(without_wide_replays(graph, least))
    assert "h" not in can_be_replayed(without_wide_replays(graph, least - 1))


def test_what_never_goes_is_there_in_any_case():
    """a is too small to go, and stays until after c has been asked for."""
    graph = chain(min_bytes=150)
    assert "h" in can_be_replayed(without_wide_replays(graph, 600))
    assert "h" not in can_be_replayed(without_wide_replays(graph, 599))


def test_what_the_op_reads_counts_once():
    """b is read by h, and needed before c and after it; a goes last, but need not be there."""
    log = chain_log()
    log.needs, log.releases = [(1, 40), (2, 60), (1, 70), (0, 80)], [(2, 2), (1, 3), (0, 4)]
    graph = build_graph(log, 0)
    assert "h" in can_be_replayed(without_wide_replays(graph, 500))
    assert "h" not in can_be_replayed(without_wide_replays(graph, 499))


def test_the_first_need_of_a_result_that_may_go_counts():
    """g makes two storages of 100 bytes and one of 10, out of 100 bytes. It is replayed at the third need: then what
    has been needed first has gone again, which was there at the second one, that of the small result; and what stays to
    the end from the fourth need on has not come yet. What is never needed is never there."""
    source, early, late, one, two, small, idle = 1, 2, 3, 4, 5, 6, 7
    ops = [an_op(number, [], [made]) for number, made in enumerate((source, early, late), 1)]
    log = a_log(
        [*ops, an_op(4, [source], [one, two, small], name="aten.g")],
        {source: 100, early: 150, late: 150, one: 100, two: 100, small: 10, idle: 150},
        saves=[(record, 10 * record, min(record, 4)) for record in range(source, idle + 1)],
        needs=[(1, 70), (5, 80), (4, 90), (2, 100), (3, 110), (0, 120)],
        releases=[(1, 2), (5, 2), (4, 6), (2, 6), (3, 6), (0, 6), (6, 1)],
        end_ns=130,
    )
    graph = build_graph(log, 100)
    assert "g" in can_be_replayed(without_wide_replays(graph, 310))
    assert "g" not in can_be_replayed(without_wide_replays(graph, 309))


# -- forecast ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("actions", "forward", "backward", "replay_ns", "back_at"),
    [
        # everything stays: 100, +200, +300; backward gives back c, then b
        ((KEEP, KEEP, KEEP), (100, 300, 600), (600, 300, 100), 0, (0, 0, 0)),
        # a dropped: there at save 1 (g still reads it), gone at save 2. Replayed for its own need: f = 3 ns.
        ((RECOMPUTE, KEEP, KEEP), (100, 300, 500), (500, 200, 100), 3, (2, 0, 0)),
        # a and b dropped: need 1 (b) replays f and g = 7 ns; a stays for need 2
        ((RECOMPUTE, RECOMPUTE, KEEP), (100, 300, 500), (300, 300, 100), 7, (1, 1, 0)),
        # all dropped: need 0 (c) replays f, g, h = 12 ns with 100 + 200 + 300 resident
        ((RECOMPUTE, RECOMPUTE, RECOMPUTE), (100, 300, 500), (600, 300, 100), 12, (0, 0, 0)),
        # b dropped alone, made from a, which is kept: g = 4 ns; at need 0 are a and c, at need 1 a and b
        ((KEEP, RECOMPUTE, KEEP), (100, 300, 600), (400, 300, 100), 4, (0, 1, 0)),
    ],
)
def test_forecasts_of_recomputing(actions, forward, backward, replay_ns, back_at):
    found = forecast(chain(), actions, LINK)
    assert found.forward_bytes == forward
    assert found.resident_bytes == backward
    assert found.replay_ns == replay_ns
    assert found.back_at == back_at
    assert found.peak_bytes == max(*forward, *backward)
    assert (found.swap_bytes, found.stall_ns, found.prefetch) == (0, 0, {})


def test_an_unsaved_link_of_a_chain_is_there_only_while_it_is_read():
    """s -> t (50 B, not saved) -> a (100 B): replaying a needs both for a moment, and t again each time."""
    ops = [an_op(1, [0], [1], cost_ns=3), an_op(2, [1], [2], cost_ns=4), an_op(3, [2], [3])]
    log = a_log(
        ops,
        {0: 10, 1: 50, 2: 100, 3: 5},
        saves=[(2, 10, 2), (3, 20, 3)],
        needs=[(1, 30), (0, 40)],
        releases=[(1, 1), (0, 2)],
        end_ns=50,
        kinds={0: Kind.SOURCE},
    )
    found = forecast(build_graph(log, 0), (RECOMPUTE, KEEP), LINK)
    assert found.resident_bytes == (5, 150)
    assert found.replay_ns == 7


def test_all_that_a_replay_makes_is_there_for_a_moment():
    """Also a result that nobody asks for."""
    source, wanted, unwanted = 0, 1, 2
    ops = [an_op(9, [source], [wanted, unwanted])]
    log = a_log(
        ops, {source: 10, wanted: 100, unwanted: 70}, [(wanted, 5, 1)], [(0, 10)], [(0, 1)], 20, {source: Kind.SOURCE}
    )
    assert forecast(build_graph(log, 0), (RECOMPUTE,), LINK).resident_bytes == (170,)


@pytest.mark.parametrize(
    ("making", "working", "resident"),
    [
        pytest.param((), (), 600, id="nobody has measured it"),
        pytest.param((0, 250, 0), (0, 0, 0), 600, id="no more than what comes next"),
        pytest.param((0, 350, 0), (0, 0, 0), 650, id="more"),
        pytest.param((0, 350, 0), (30, 900, 900), 620, id="of which the op of backward after it takes some as well"),
        pytest.param((0, 350, 20), (340, 0, 0), 600, id="and nearly all"),
        pytest.param((900, 0, 20), (0, 0, 0), 620, id="of an op that is not replayed"),
    ],
)
def test_what_a_replayed_op_has_for_a_moment_is_beside_what_it_makes(making, working, resident):
    """b and c are made again for the first need, where 1000 bytes are beside: 300 and then 600 are there."""
    graph = replace(chain(), beside_saves=(0, 0, 0), beside_needs=(1000, 0, 0))
    graph = replace(graph, making=making, working_needs=working)
    assert forecast(graph, (KEEP, RECOMPUTE, RECOMPUTE), LINK).resident_bytes[0] == 1000 + resident


def test_what_backward_takes_itself_is_that_of_the_need_that_is_replayed_for():
    graph = replace(chain(), beside_saves=(0, 0, 0), beside_needs=(0, 0, 0), making=(0, 350, 0))
    for working, resident in (((900, 0, 0), 650), ((0, 900, 0), 300)):
        found = forecast(replace(graph, working_needs=working), (KEEP, RECOMPUTE, KEEP), LINK)
        assert found.resident_bytes[1] == resident


def test_an_op_makes_what_it_makes_however_little_it_has_beside_that():
    """Of the two storages that g makes nobody asks for the larger one."""
    log = chain_log()
    log.ops[1] = an_op(6, [20], [30, 60], cost_ns=4, name="aten.g")
    log.nbytes[60], log.kinds[60] = 500, Kind.ACTIVATION
    graph = replace(build_graph(log, 0), beside_saves=(0, 0, 0), beside_needs=(0, 0, 0))
    graph = replace(graph, making=(0, 100, 0), working_needs=(0, 900, 0))
    assert forecast(graph, (KEEP, RECOMPUTE, KEEP), LINK).resident_bytes[1] == 800


def test_a_graph_is_told_what_its_step_used_beside_saved_storages():
    used = Beside(Track([1, 2, 3], [10, 20, 30]), Track([4, 5, 6], [7, 8, 9]), [40, 50, 60])
    graph = with_beside(chain(), used)
    assert (graph.beside_saves, graph.beside_needs) == ((11, 22, 33), (11, 13, 15))
    assert (graph.working_needs, graph.making) == ((7, 8, 9), (40, 50, 60))
    assert with_beside(chain(), replace(used, saves=Track([1], [10]))) == chain(), "of another step"


def test_a_swapped_storage_is_copied_back_in_time_and_no_earlier():
    """a (100 B) is needed at 80. At 50 bytes a ns it takes 2 ns: early enough at need 1 (60). At 5 bytes a ns it takes
    20 ns, and with the margin need 1 is too late: need 0."""
    graph = chain()
    fast = forecast(graph, (SWAP, KEEP, KEEP), Link(10e9, 50e9))
    assert fast.prefetch == {1: (0,)}
    assert fast.back_at == (1, 0, 0)
    # out: saved at 10, takes 10 ns; g reads it until save 1
    assert fast.forward_bytes == (100, 300, 500)
    assert fast.resident_bytes == (500, 300, 100)
    assert (fast.swap_bytes, fast.replay_ns, fast.stall_ns) == (100, 0, 0)
    slow = forecast(graph, (SWAP, KEEP, KEEP), LINK)
    assert slow.prefetch == {0: (0,)}
    assert slow.resident_bytes == (600, 300, 100)


def test_copies_back_queue_one_after_the_other():
    """At 10 bytes a ns a takes 10 ns and b 20: a from 70 to 80, so asked for at need 1 (60); b from 40 to 60, at need 0
    (40), which is when backward begins: no stall."""
    graph = chain()
    found = forecast(graph, (SWAP, SWAP, KEEP), Link(10e9, 10e9))
    assert found.prefetch == {0: (1,), 1: (0,)}
    assert found.stall_ns == 0
    # a: 60 to 80; b: 20 to 60; backward begins at 40
    assert forecast(graph, (SWAP, SWAP, KEEP), Link(10e9, 5e9)).stall_ns == 20


def test_a_copy_out_that_has_not_ended_counts_in_forward():
    """One byte a ns: a (saved at 10, 100 ns) and b behind it are still leaving when c is saved at 30."""
    assert forecast(chain(), (SWAP, SWAP, KEEP), Link(1e9, 1e12)).forward_bytes == (100, 300, 600)


def test_a_copy_out_that_has_not_ended_counts_in_backward():
    """c: saved at 30, 25 ns out at 12 bytes a ns: there until 55 beside what comes back, so at need 0 (40) only."""
    kept = forecast(chain(), (KEEP, KEEP, KEEP), LINK)
    found = forecast(chain(), (KEEP, KEEP, SWAP), Link(12e9, 5e9))
    assert kept.resident_bytes == (600, 300, 100)
    assert found.resident_bytes == (900, 300, 100)


def test_a_link_that_is_too_slow_shows_as_stall():
    slow = forecast(chain(), (SWAP, SWAP, SWAP), Link(1e9, 1e9, interference=0.5))
    # back: a 100 ns until 80, b 200 ns before that, c 300 ns before that: from -520 on, 560 ns before backward begins
    # and half of the 600 ns out and 600 ns in is taken from compute
    assert slow.stall_ns == 560 + 600


def test_a_swapped_ancestor_is_copied_back_instead_of_replayed():
    found = forecast(chain(), (SWAP, RECOMPUTE, KEEP), FAST)
    assert found.replay_ns == 4, "g only"


# -- plans ------------------------------------------------------------------------------------------------------------
def plan(graph, limit, allowed=ALL, forced=None, link=LINK):
    return plan_step(graph, limit, link, allowed, forced)


def test_a_step_that_fits_is_left_alone():
    made = plan(chain(), 600)
    assert made.actions == (KEEP, KEEP, KEEP)
    assert made.idle
    assert RECOMPUTE not in made.actions
    assert (made.peak_bytes, made.replay_ns, made.swap_bytes) == (600, 0, 0)


def test_one_byte_too_many_is_evicted_where_it_is_cheapest():
    """At the worst position (need 0: 600 B) only a and b are not needed yet: a costs 3 ns for 100 B, b 4 ns for 200 B
    and is the cheaper per byte, but stays until save 2 (h reads it), where 600 B are resident. Only a helps there."""
    made = plan(chain(), 599, (KEEP, RECOMPUTE))
    assert made.actions[0] is RECOMPUTE
    assert made.actions[2] is KEEP
    assert made.peak_bytes <= 599


def test_a_plan_lists_the_needs_of_each_storage():
    assert plan(chain(), 599).next_needs == ((2,), (1,), (0,))
    assert plan(chain(), 599).need_ns == (40, 60, 80)


def test_a_plan_carries_the_forecast_of_its_actions():
    graph = chain()
    made = plan(graph, 520)
    found = forecast(graph, made.actions, LINK)
    assert (made.forward_bytes, made.prefetch) == (found.forward_bytes, found.prefetch)
    assert (made.peak_bytes, made.replay_ns, made.swap_bytes) == (found.peak_bytes, found.replay_ns, found.swap_bytes)


def test_the_director_s_actions_are_respected():
    assert SWAP not in plan(chain(), 0, (KEEP, RECOMPUTE)).actions
    assert RECOMPUTE not in plan(chain(), 0, (KEEP, SWAP)).actions
    assert set(plan(chain(), 0, (KEEP,)).actions) == {KEEP}


def test_small_storages_stay_whatever_the_limit():
    assert plan(chain(min_bytes=150), 0).actions[0] is KEEP
    assert set(plan(chain(min_bytes=1000), 0).actions) == {KEEP}


def test_a_storage_without_a_recipe_is_not_recomputed():
    log = chain_log()
    log.ops[0] = an_op(5, [], [20], replayable=False)
    assert plan(build_graph(log, 0), 0, (KEEP, RECOMPUTE)).actions[0] is KEEP


def test_forced_actions_are_respected():
    graph = chain()
    assert plan(graph, 0, forced={0: KEEP, 1: KEEP}).actions[:2] == (KEEP, KEEP)
    assert plan(graph, 500, forced={0: SWAP, 1: KEEP}).actions[0] is SWAP
    slow = Link(1e6, 1e6)
    assert plan(graph, 500, link=slow).actions[0] is RECOMPUTE
    assert plan(graph, 500, forced={0: SWAP}, link=slow).actions[0] is not RECOMPUTE


def test_what_is_swapped_is_what_there_is_time_to_copy_back():
    """Ten alike, and a copy takes as long as from one need to the next. The one needed first cannot be back in time."""
    ops = [an_op(100 + record, [], [record], replayable=False) for record in range(10)]
    saves = [(record, 1000 * record, record + 1) for record in range(10)]
    needs = [(order, 20_000 + 100 * (9 - order)) for order in reversed(range(10))]
    log = a_log(ops, dict.fromkeys(range(10), 100), saves, needs, [(v, 10 - v) for v in range(10)], 30_000)
    graph, link = build_graph(log, 0), Link(1e9, 1e9)
    made = plan(graph, 800, (KEEP, SWAP), link=link)
    assert (made.actions.count(SWAP), made.actions[9], made.peak_bytes) == (2, KEEP, 800)
    assert forecast(graph, made.actions, link).late_ns == 0
    assert forecast(graph, [*[KEEP] * 8, SWAP, SWAP], link).late_ns == 100


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 300), st.booleans()), min_size=1, max_size=200))
def test_prices_of_swaps_add_up_to_what_the_forecast_says_is_late(each):
    """Sizes, times from one need to the next, and what is swapped. Where needs are taken together, they say more."""
    count, link = len(each), Link(1e9, 1e9)
    at_ns = list(accumulate((gap_ns for _, gap_ns, _ in each), initial=10**6))
    sizes = {record: nbytes for record, (nbytes, _, _) in enumerate(each)}
    needs = [(count - 1 - position, at_ns[position]) for position in range(count)]
    log = a_log([], sizes, [(v, v, 0) for v in range(count)], needs, [(v, count - v) for v in range(count)], 10**7)
    graph, actions = build_graph(log, 0), [KEEP] * count
    prices, told_ns = Prices(graph, link, (KEEP, SWAP), {}, actions), 0
    for v in (v for v in range(count) if each[v][2]):
        option = prices[v]
        told_ns += round(option.per_byte * option.nbytes)
        actions[v] = SWAP
        prices.taken(option)
    late_ns = forecast(graph, actions, link).late_ns
    assert told_ns == late_ns if count < GROUPS else told_ns >= late_ns


def read_by_replays(c_ns: int = 50) -> StepGraph:
    """x, which nothing makes again, c in `c_ns`, and b1 to b3, each made of x in 1 ns; needed in reverse."""
    ops = [an_op(101, [9], [1], cost_ns=c_ns), *(an_op(102 + i, [0], [2 + i]) for i in range(3))]
    sizes = dict.fromkeys(range(5), 100) | {9: 0}
    saves = [(record, 10 * record, min(record, 4)) for record in range(5)]
    needs = [(order, 1000 + 10 * (4 - order)) for order in reversed(range(5))]
    log = a_log(ops, sizes, saves, needs, [(v, 5 - v) for v in range(5)], 2000, {9: Kind.PARAMETER})
    return build_graph(log, 0)


def test_where_replays_would_wait_for_copies_nothing_is_swapped():
    """The price of swapping x is nothing, since it is needed last; but what b2 is made of is needed second."""
    graph, link = read_by_replays(), Link(1e9, 1e9)
    made = plan(graph, 250, link=link)
    assert made.actions == (KEEP, RECOMPUTE, RECOMPUTE, RECOMPUTE, KEEP)
    assert forecast(graph, made.actions, link).cost_ns == 52
    assert plan(graph, 250, link=Link(1e11, 1e11)).actions[0] is SWAP, "a fast link is in time"


@pytest.mark.parametrize(
    ("parents", "costs_ns", "sizes", "limit", "swaps", "without_ns"),
    [
        ((None, 0, 0, 0, None, 3, 1), (0, 20, 1, 20, 0, 1, 20), (50, 50, 100, 20, 50, 20, 50), 204, False, 22),
        ((None, 0, 1, 0, 3), (0, 60, 20, 1, 200), (20, 100, 20, 100, 50), 174, True, 80),
    ],
    ids=["less without", "less with"],
)
def test_where_copies_come_late_and_both_fit_the_cheaper_plan_counts(
    parents, costs_ns, sizes, limit, swaps, without_ns
):
    """Of what each is made, in how long, and its size; needed in reverse, 10 ns apart. Both plans replay."""
    ops = [
        an_op(100 + v, [99 if made_of is None else made_of], [v], cost_ns=costs_ns[v], replayable=made_of is not None)
        for v, made_of in enumerate(parents)
    ]
    count = len(parents)
    saves, needs = [(v, 10 * v, v + 1) for v in range(count)], [(count - 1 - p, 1000 + 10 * p) for p in range(count)]
    releases, kinds = [(v, count - v) for v in range(count)], {99: Kind.PARAMETER}
    graph = build_graph(a_log(ops, dict(enumerate(sizes)) | {99: 0}, saves, needs, releases, 3000, kinds), 0)
    link = Link(1e9, 1e9)
    made = plan(graph, limit, link=link)
    found = forecast(graph, made.actions, link)
    without = forecast(graph, plan(graph, limit, (KEEP, RECOMPUTE), link=link).actions, link)
    assert without.cost_ns == without_ns
    assert max(found.peak_bytes, without.peak_bytes) <= limit
    assert (SWAP in made.actions, found.late_ns > 0) == (swaps, swaps)
    assert found.cost_ns < without_ns if swaps else found.cost_ns == without_ns


def test_a_plan_without_swaps_that_fits_counts_more_than_a_cheaper_one_that_does_not():
    graph, link = read_by_replays(c_ns=500), Link(1e9, 1e9)
    made = plan(graph, 210, link=link)
    assert SWAP not in made.actions
    assert (made.peak_bytes, made.replay_ns) == (200, 502)


def one_large_and_ten_small() -> StepGraph:
    """One of 100 bytes is saved before ten of 10."""
    ops = [an_op(100 + i, [i], [i + 1]) for i in range(11)]
    sizes = {0: 0, 1: 100} | dict.fromkeys(range(2, 12), 10)
    saves = [(record, 1000 * record, record) for record in range(1, 12)]
    needs = [(order, 20_000 + 1000 * (10 - order)) for order in reversed(range(11))]
    log = a_log(ops, sizes, saves, needs, [(v, 11 - v) for v in range(11)], 40_000, {0: Kind.SOURCE})
    return build_graph(log, 0)


@pytest.mark.parametrize("planner", [PLANNERS["profile"], BESIDE["profile"]], ids=["greedy", "exact"])
def test_where_a_copy_has_its_price_few_large_storages_are_swapped(planner):
    graph, link = one_large_and_ten_small(), Link(1e9, 1e9, 0.5, copy_ns=50)
    made = planner(Task(graph, 111, link, (KEEP, SWAP), {}, False, PlannerConfig()))
    assert made.actions == (SWAP, *[KEEP] * 10)
    assert forecast(graph, made.actions, link).stall_ns == 0.5 * 200 + 2 * 50


@pytest.mark.parametrize("planner", [PLANNERS["profile"], BESIDE["profile"]], ids=["greedy", "exact"])
def test_where_a_replay_has_its_price_few_large_storages_are_recomputed(planner):
    ops = [an_op(100 + i, [0], [i + 1], cost_ns=100 if i == 0 else 5) for i in range(11)]
    sizes = {0: 0, 1: 100} | dict.fromkeys(range(2, 12), 10)
    saves = [(record, 1000 * record, record) for record in range(1, 12)]
    needs = [(order, 20_000 + 1000 * (10 - order)) for order in reversed(range(11))]
    log = a_log(ops, sizes, saves, needs, [(v, 11 - v) for v in range(11)], 40_000, {0: Kind.SOURCE})

    def made(replay_ns: int) -> Sequence[Action]:
        graph = build_graph(log, 0, replay_ns)
        return planner(Task(graph, 111, FAST, (KEEP, RECOMPUTE), {}, False, PlannerConfig())).actions

    assert made(0) == (KEEP, *[RECOMPUTE] * 9, KEEP)
    assert made(50) == (RECOMPUTE, *[KEEP] * 10)


def test_a_copy_s_price_is_dearer_for_what_is_small():
    graph = one_large_and_ten_small()

    def per_byte(copy_ns: float, v: int) -> float:
        option = Prices(graph, Link(1e9, 1e9, 0.5, copy_ns), (KEEP, SWAP), {}, [KEEP] * 11)[v]
        assert option is not None
        return option.per_byte

    assert per_byte(0, 0) == per_byte(0, 5) == 1
    assert (per_byte(50, 0), per_byte(50, 5)) == (2, 11)


def test_a_slow_link_is_not_used_and_a_dear_chain_not_replayed():
    assert plan(chain(), 500, link=Link(1e6, 1e6)).swap_bytes == 0
    log = chain_log()
    log.ops[:] = [an_op(op.id, op.inputs, op.outputs, cost_ns=10**9) for op in log.ops]
    made = plan(build_graph(log, 0), 500, link=FAST)
    assert made.replay_ns == 0
    assert made.peak_bytes <= 500


# -- any step ---------------------------------------------------------------------------------------------------------
@st.composite
def step_logs(draw):
    """Forward: ops over earlier values, some saved. Backward: each saved value is needed, the last saved first."""
    count = draw(st.integers(2, 10))
    ops, saves, now = [], [], 0
    nbytes, kinds = {0: draw(st.integers(1, 50))}, {0: Kind.SOURCE}
    for number in range(1, count + 1):
        inputs = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=2, unique=True))
        replayable = draw(st.integers(0, 5)) > 0
        cost = draw(st.integers(1, 1000))
        ops.append(an_op(number, inputs if replayable else [], [number], cost_ns=cost, replayable=replayable))
        nbytes[number] = draw(st.integers(1, 1000))
        now += cost
        if number == 1 or draw(st.integers(0, 3)):
            saves.append((number, now, number))
    order = list(reversed(range(len(saves))))
    if len(order) > 2 and draw(st.booleans()):
        order.insert(draw(st.integers(0, len(order))), draw(st.sampled_from(order)))
    needs = []
    for saved in order:
        now += draw(st.integers(1, 1000))
        needs.append((saved, now))
    releases = [(saved, len(order) - order[::-1].index(saved)) for saved in range(len(saves))]
    releases.sort(key=lambda entry: entry[1])
    return a_log(ops, nbytes, saves, needs, releases, now + 1, kinds)


links = st.builds(Link, st.sampled_from([1e8, 1e9, 1e12]), st.sampled_from([1e8, 1e9, 1e12]), st.sampled_from([0, 0.3]))
relaxed = settings(derandomize=True, deadline=None, max_examples=150, database=None)


def evict_all(graph: StepGraph, action: Action, link: Link) -> int:
    """Peak when everything that may go goes the same way."""
    return forecast(graph, [action if may_go(graph, node, action) else KEEP for node in graph.saved], link).peak_bytes


def may_go(graph: StepGraph, number: int, action: Action) -> bool:
    node = graph.nodes[number]
    return node.evictable and (action is SWAP or (node.op is not None and graph.ops[node.op].replayable))


@relaxed
@given(step_logs(), links, st.integers(0, 120), st.sampled_from([0, 300]), st.sampled_from([ALL, (KEEP, SWAP)]))
def test_plans_fit_wherever_swapping_everything_would(log, link, percent, min_bytes, allowed):
    graph = build_graph(log, min_bytes)
    kept = forecast(graph, [KEEP] * len(graph.saved), link).peak_bytes
    limit = kept * percent // 100
    made = plan(graph, limit, allowed, link=link)
    if min(kept, evict_all(graph, SWAP, link)) <= limit:
        assert made.peak_bytes <= limit
    if kept <= limit:
        assert made.idle


@relaxed
@given(step_logs(), links, st.integers(0, 100), st.sampled_from([0, 300]))
def test_plans_repeat_and_keep_to_what_is_allowed(log, link, percent, min_bytes):
    graph = build_graph(log, min_bytes)
    limit = graph.unevicted_bytes * percent // 100
    forced = {0: KEEP}
    made = plan(graph, limit, forced=forced, link=link)
    assert made == plan(build_graph(log, min_bytes), limit, forced=forced, link=link)
    assert made.actions[0] is KEEP
    assert made.peak_bytes == forecast(graph, made.actions, link).peak_bytes
    for order, action in enumerate(made.actions):
        node = graph.nodes[graph.saved[order]]
        assert action is KEEP or node.evictable
        assert action is not RECOMPUTE or graph.ops[node.op].replayable
