"""Rehearsed plans: what a rehearsal says happens, whatever a plan says nothing breaks, and known steps go best."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from builders import a_policy
from logs import Log, chain, random_net, residual_net

from delta.engine import Engine
from delta.planner import registry
from delta.planner.away import Away
from delta.planner.foresight import foresee
from delta.planner.rehearsal import Failed, Guide, Rehearsal
from delta.planner.search import rehearse
from delta.planner.steplog import Moves
from delta.planner.timetable import Timetable
from delta.planner.turns import Turn, turns_of
from delta.recall import Recall
from delta.simulate.player import Player
from delta.simulate.simulation import simulate
from delta.trace import read
from delta.types import Action, Link, SwapIn
from delta.units import Bytes, Share

LINKS = [None, Link(2e9, 2e9), Link(20e9, 5e9), Link(0.2e9, 0.5e9)]
DELTA = a_policy(filter={"min_bytes": 0})


def nets(tmp_path):
    even = residual_net(20, sizes=[100] * 20, costs_ns=[50] * 20)
    uneven = residual_net(18, sizes=[300, 50, 700] * 6, costs_ns=[900, 10, 80] * 6, skip=2)
    logs = [even, uneven, *(random_net(30, seed) for seed in range(2))]
    return [read(log.write(tmp_path / f"{number}.log")) for number, log in enumerate(logs)]


@pytest.fixture(autouse=True)
def a_short_search(monkeypatch):
    """What holds for a plan holds after a few tries."""
    monkeypatch.setattr("delta.planner.search.CHANGES", 40)


@pytest.fixture
def planned(monkeypatch):
    """Every task that was planned, and its plan."""
    found = []

    def noted(task, choices):
        plan = rehearse(task, list(choices))
        found.append((task, plan))
        return plan

    monkeypatch.setattr("delta.planner.search.rehearse", noted)
    return found


# -- turns ------------------------------------------------------------------------------------------------------------
def test_turns_are_what_lies_between_two_ends():
    ends = [(0, 1, 10), (2, 1, 15), (3, 2, 40)]
    turns = list(turns_of(ends, needs=[4, 4, 5, 6], releases=[(4, 2), (5, 3), (6, 3)], end_ns=50))
    assert turns == [
        Turn((), 0, 0, 10, ()),
        Turn((4,), None, 10, 15, (4,)),
        Turn((5,), 1, 15, 40, ()),
        Turn((6,), None, 40, 50, (5, 6)),
    ]


def test_a_step_without_turns_has_none():
    assert list(turns_of([], needs=[1], releases=[], end_ns=5)) == []


def test_a_copy_leaves_before_the_longest_rest(tmp_path, planned):
    simulate(read(chain(6).write(tmp_path / "chain.log")), DELTA, Share(0.6))
    table = Timetable(planned[0][0].graph, kept={})
    for storage in range(table.count):
        turns = [table.made_in[storage], *table.uses[storage]]
        rests = [table.start_ns[b] - table.start_ns[a] for a, b in pairwise(turns)]
        if rests:
            assert table.before_longest_rest(storage) == turns[rests.index(max(rests))]


# -- a rehearsal and the real play ------------------------------------------------------------------------------------
@pytest.mark.parametrize("link", LINKS, ids=str)
def test_what_was_rehearsed_happens(link, tmp_path, planned):
    """The engine, on the simulated device, does the very thing: the same replays, the same waits."""
    rehearsed = 0
    for trace in nets(tmp_path):
        for share in (0.75, 0.5):
            planned.clear()
            run = simulate(trace, DELTA, Share(share), link)
            if run.status != "ok" or not planned or not planned[-1][1].moves:
                continue
            plan = planned[-1][1]
            rehearsed += 1
            assert run.recomputed_ns == plan.replay_ns
            assert run.swapped_bytes == plan.swap_bytes
            assert run.stall_ns == plan.stall_ns
    assert rehearsed >= 6


def test_the_prefetch_window_holds_in_rehearsed_steps_too(tmp_path, monkeypatch):
    """Storages of 100 bytes: a window that is smaller lets none come back before it is asked for."""
    began = []
    after_turn = Recall.after_turn

    def noted(recall, going_bytes, now_ns):
        out = after_turn(recall, going_bytes, now_ns)
        began.extend(each for each in out if isinstance(each, SwapIn))
        return out

    monkeypatch.setattr(Recall, "after_turn", noted)
    trace, found = nets(tmp_path)[0], {}
    for window in ("auto", "1GiB", 99, 0):
        began.clear()
        run = simulate(trace, a_policy(filter={"min_bytes": 0}, prefetch={"window": window}), Share(0.5), LINKS[3])
        assert run.status == "ok"
        found[window] = len(began), run.stall_ns
    assert found["auto"] == found["1GiB"]
    assert found["auto"][0] > 0
    assert found[99] == found[0]
    assert found[0][0] == 0
    assert found[0][1] > found["auto"][1]


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_a_rehearsed_step_is_no_slower_than_the_observed_one(link, tmp_path):
    """But for what is left where next to nothing is: a link that hides all."""
    for trace in nets(tmp_path):
        for share in (0.8, 0.6):
            run = simulate(trace, DELTA, Share(share), link)
            if run.status == "ok":
                assert run.overhead <= run.first_overhead + 0.02


def test_the_same_step_is_planned_the_same_way(tmp_path, planned):
    simulate(nets(tmp_path)[1], DELTA, Share(0.6), LINKS[1])
    task, plan = planned[0]
    assert registry.PLANNERS["profile"](task) == plan


def test_what_a_rule_keeps_stays(tmp_path, planned):
    simulate(nets(tmp_path)[0], DELTA, Share(0.6))
    task, plan = planned[0]
    went = {order for moves in plan.moves.values() for order in (*moves.victims, *moves.dropped)}
    kept = dict.fromkeys(sorted(went)[:2], Action.KEEP)
    again = rehearse(replace(task, forced=kept))
    assert not kept.keys() & {order for moves in again.moves.values() for order in (*moves.victims, *moves.dropped)}


def test_other_rules_leave_it_to_the_filter(tmp_path, planned):
    simulate(nets(tmp_path)[0], DELTA, Share(0.6))
    task, _ = planned[0]
    assert rehearse(replace(task, forced={3: Action.RECOMPUTE})) == foresee(task.graph)
    assert rehearse(replace(task, allowed=(Action.KEEP, Action.SWAP))) == foresee(task.graph)


def test_a_plan_that_names_the_wrong_storages_breaks_nothing(tmp_path, monkeypatch):
    """Moves drawn at random, of storages that are not there, in use, or gone: the limit holds (the simulator checks
    the schedule), and the step ends."""
    draw = Random(3)

    def at_random(task):
        count, orders = len(task.graph.turns), range(-2, len(task.graph.saved) + 5)

        def some() -> tuple[int, ...]:
            return tuple(order for order in draw.choices(orders, k=4) if order >= 0)

        moves = {turn: Moves(some(), some(), some(), some()) for turn in range(count)}
        return replace(foresee(task.graph), moves=moves)

    monkeypatch.setitem(registry.PLANNERS, "profile", at_random)
    ended = 0
    for trace in nets(tmp_path):
        for link in LINKS:
            run = simulate(trace, DELTA, Share(0.8), link)
            ended += run.status == "ok"
            assert run.peak_bytes <= run.budget_bytes
    assert ended > 5


# -- a rehearsal alone ------------------------------------------------------------------------------------------------
def two_ways(cheap_ns: int, dear_ns: int) -> Log:
    """Two storages of 100 bytes, one cheap and one dear to make, both needed at the end; an op of 100 bytes between."""
    log = Log()
    log.constant("w", 10)
    log.start()
    log.call("cheap", ["w"], cheap_ns, a=100)
    log.call("dear", ["w"], dear_ns, b=100)
    log.call("between", ["w"], 1_000, c=100)
    log.release("c")
    log.backward()
    log.call("end", ["a", "b"], 10, d=1)
    log.release("a", "b")
    return log


def tabled(log: Log, path, planned, budget_bytes: int) -> Timetable:
    simulate(read(log.write(path / "made.log")), DELTA, Bytes(budget_bytes))
    return Timetable(planned[0][0].graph, kept={})


def test_the_cheap_one_goes(tmp_path, planned):
    table = tabled(two_ways(5, 500), tmp_path, planned, 215)
    played = Rehearsal(table, 205, None, Guide()).run()
    assert (played.replay_ns, played.stall_ns, played.went) == (5, 0, [0])
    weighed = Rehearsal(table, 205, None, Guide(weights={0: 20.0})).run()
    assert (weighed.replay_ns, weighed.went) == (500, [1])


def test_what_is_swapped_costs_the_wait_that_is_left(tmp_path, planned):
    """The copy of b out takes 100 ns, and the op after it needs its room at once: 100 ns of waiting. It is back in time
    only if the op is long enough, which one of 1,000 ns is."""
    table = tabled(two_ways(400, 500), tmp_path, planned, 215)
    guide = Guide(swapped=frozenset({1}))
    played = Rehearsal(table, 205, Link(1e9, 1e9), guide).run()
    assert played.replay_ns == 0
    assert played.moves()[1].leaving == (1,)
    assert played.moves()[2].victims == (1,), "the copy out is waited for"
    assert 100 <= played.stall_ns <= 200


def test_patience_says_how_long_a_copy_out_is_waited_for(tmp_path, planned):
    """The wait is 100 ns; letting a go instead would be 400 ns of replay."""
    table = tabled(two_ways(400, 500), tmp_path, planned, 215)
    found = {}
    for patience in (0.2, 0.3):
        guide = Guide(swapped=frozenset({1}), patience=patience)
        found[patience] = Rehearsal(table, 205, Link(1e9, 1e9), guide).run().replay_ns
    assert found == {0.2: 400, 0.3: 0}


def test_it_gives_up_when_it_is_dearer_than_is_known(tmp_path, planned):
    table = tabled(two_ways(5, 500), tmp_path, planned, 215)
    with pytest.raises(Failed):
        Rehearsal(table, 205, None, Guide(weights={0: 20.0}), at_most_ns=499).run()
    assert Rehearsal(table, 205, None, Guide(weights={0: 20.0}), at_most_ns=500).run().cost_ns == 500


def test_one_that_goes_on_from_another_ends_as_one_from_the_start(tmp_path, planned):
    draw, begun, ended = Random(5), 0, 0
    for trace in nets(tmp_path):
        planned.clear()
        simulate(trace, DELTA, Share(0.5), LINKS[1])
        if not planned:
            continue
        task = planned[0][0]
        table = Timetable(task.graph, kept={})
        first = Rehearsal(table, task.limit_bytes, task.link, Guide()).run()
        for _ in range(100):
            weights = {draw.randrange(table.count): draw.choice((-2.0, 2.0)) for _ in range(draw.randrange(3))}
            swapped = frozenset(draw.choices(range(table.count), k=draw.randrange(3)))
            guide = Guide(draw.choice((0.3, 0.3, 0.5)), draw.random() < 0.1, weights, swapped, draw.choice((1.5, 3.0)))
            begun += 1
            ended += same_end(first, Rehearsal(table, task.limit_bytes, task.link, guide, first.cost_ns), guide)
    assert 20 < ended < begun


def same_end(first: Rehearsal, alone: Rehearsal, guide: Guide) -> bool:
    try:
        alone.run()
    except Failed:
        with pytest.raises(Failed):
            first.under(guide).run()
        return False
    onward = first.under(guide).run()
    assert (onward.replay_ns, onward.stall_ns, onward.went) == (alone.replay_ns, alone.stall_ns, alone.went)
    assert onward.moves() == alone.moves()
    return True


def test_it_gives_up_when_nothing_more_can_go(tmp_path, planned):
    table = tabled(two_ways(5, 500), tmp_path, planned, 215)
    with pytest.raises(Failed):
        Rehearsal(table, 150, None, Guide()).run()


# -- what is away ------------------------------------------------------------------------------------------------------
def test_what_is_away_is_told_by_its_next_use():
    away = Away()
    for storage, use_ns in ((7, 30.0), (3, 10.0), (5, 20.0), (3, 40.0)):
        away.set(storage, use_ns)
    assert (len(away), away.soonest(2)) == (3, [(20.0, 5), (30.0, 7)])
    assert away.is_used_after(3, 30.0)
    assert not away.is_used_after(3, 40.0)
    assert not away.is_used_after(4, 0.0), "it is here"
    away.remove(7)
    assert away.soonest(9) == [(20.0, 5), (40.0, 3)]


def test_the_engine_knows_of_every_copy_that_has_ended_when_the_next_ones_begin(tmp_path, monkeypatch):
    """Else a copy that has ended would still take room, and a copy back would wait for nothing."""
    ended, prefetch = [], Engine.prefetch
    play = Player.step

    def watched(player, timed):
        def checked(now_ns):
            ended.append([each for each in (*player._going.values(), *player._coming.values()) if each <= now_ns])
            return prefetch(player.engine, now_ns)

        with monkeypatch.context() as patch:
            patch.setattr(player.engine, "prefetch", checked)
            play(player, timed)

    monkeypatch.setattr(Player, "step", watched)
    for trace in nets(tmp_path):
        simulate(trace, DELTA, Share(0.5), LINKS[1])
    assert len(ended) > 100 and not any(ended)


def test_a_search_ends_when_its_effort_is_spent(planned, tmp_path, monkeypatch):
    """Then nothing is rehearsed any more but for want of a plan; a step of any length is given no more than that."""
    played, run = [], Rehearsal.run

    def noted(rehearsal):
        before = rehearsal.effort
        try:
            return run(rehearsal)
        finally:
            played.append(rehearsal.effort - before)

    simulate(nets(tmp_path)[0], DELTA, Share(0.5), LINKS[1])
    task, _ = planned[0]
    monkeypatch.setattr(Rehearsal, "run", noted)
    for effort in (0, 2000):
        monkeypatch.setattr("delta.planner.search.EFFORT", effort)
        played.clear()
        assert rehearse(task).moves
        assert sum(played[:-1]) <= effort < sum(played)
