"""A budget on the device, of which what ops need beside saved activations is kept free where they need it."""

import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from device_budget_worker import WORKING_BYTES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy

import delta
from delta import engine, planning
from delta.beside import Beside, Track
from delta.budget import LATELY, Budget, Need
from delta.config import PlannerConfig
from delta.engine import Engine
from delta.errors import BudgetError
from delta.headroom import HeadRoom
from delta.learner import Learner
from delta.ledger import Ledger
from delta.planner import BY_POSITION, PLANNERS, StepGraph, StepLog, Task, plan_step
from delta.planner.assemble import plan_of
from delta.planner.steplog import build_graph
from delta.profile import Profile
from delta.revising import Outcome, Revising
from delta.routine import Routine
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.peak_watch import PeakWatch
from delta.runtime.gauge import Gauge
from delta.runtime.rawmem import ResidentMeter, heap_bytes
from delta.types import Action, Kind, Link, Mode, SwapIn

BASE = 1000  # parameters and the like
LINK, KEPT = Link(1e9, 1e9), (Action.KEEP, Action.KEEP)
SIZE = 100
MIB = 2**20


class Machine(Toy):
    """A toy whose device is measured: all that the program or Delta holds, and what ops take while they run."""

    def __init__(self, budget_bytes: int, sees_peaks: bool = True, **sections: object) -> None:
        self.sizes: dict[int, int] = {}
        self.since_bytes = self.peak_bytes = BASE
        super().__init__(Budget(device_bytes=budget_bytes), ("keep", "recompute"), sees_peaks=sees_peaks, **sections)
        self._next = 0

    def used(self) -> int:
        return BASE + sum(self.sizes[record] for record in self.program | self.mine)

    def took(self, working_bytes: int = 0) -> None:
        self.since_bytes = max(self.since_bytes, self.used() + working_bytes)
        self.peak_bytes = max(self.peak_bytes, self.since_bytes)

    def source(self, record: int, nbytes: int, kind: Kind = Kind.SOURCE) -> None:
        self.sizes[record] = nbytes
        super().source(record, nbytes, kind)
        self.took()

    def _do(self, instructions):
        self.took()
        return super()._do(instructions)

    def look(self, own: bool = False, saved_bytes: int = 0) -> None:
        now = self.used()
        if own:
            self.engine.settled(now, now)
        else:
            self.engine.looked(now, self.since_bytes, saved_bytes)
        self.since_bytes = now

    def step(
        self, sizes: list[int], forward: Mapping[int, int], backward: Mapping[int, int], at: int, appears: int = 0
    ) -> int:
        """A chain of ops, each result saved. `forward`, `backward`: what an op takes while it runs, by its number.
        Returns the peak of the device in this step; where `appears` bytes do before backward, from the first need on.
        """
        self.peak_bytes = self.since_bytes = self.used()
        first, self._next = self._next, self._next + len(sizes) + 1
        self.now = at
        self.source(first, 10)
        for k, nbytes in enumerate(sizes, 1):
            self.now += 10
            self.op(first + k, nbytes, [first + k - 1])
            self.took(forward.get(k, 0))
            self.look(saved_bytes=nbytes)
            self._do(self.engine.saved(first + k, k, self.now))
            if k > 1:
                self.let_go(first + k - 1)
        self.let_go(first + len(sizes))
        if appears:
            self.source(-2, appears)
        for k in range(len(sizes), 0, -1):
            self.now += 10
            self.look()
            self.need(first + k, self.now)
            self.look(own=True)
            if appears and k == len(sizes):
                self.peak_bytes = self.used()
            self.took(backward.get(k, 0))
            self.unsave(first + k)
        self.let_go(first)
        return self.peak_bytes

    def steps(self, count: int, *step: object) -> list[int]:
        return [self.step(*step, at=10_000 * index) for index in range(count)]


# One op in the middle needs 300 bytes for a moment. Nothing evicted, the step peaks at 2300.
MIDDLE = ([SIZE] * 12, {6: 300}, {6: 300})


def evictions(machine: Machine) -> int:
    return machine.engine.totals.evictions.get(Action.RECOMPUTE, 0)


@pytest.mark.parametrize(("made", "gone", "left"), [(500, 0, 2000), (501, 1, 2000), (601, 2, 2000), (299, 0, 1400)])
def test_an_op_that_will_make_more_than_is_kept_free_has_room_first(made, gone, left):
    """After five saves 1,500 bytes are in use, and an op before took 300 for a moment, which is kept free. The last
    one: to make less is no reason to look for what may go, where much is over the budget already."""
    machine = Machine(2000)
    machine.source(0, 10)
    for k in range(1, 6):
        machine.op(k, SIZE, [k - 1])
        machine.took({3: 300}.get(k, 0))
        machine.look(saved_bytes=SIZE)
        machine.save(k, 10 * k)
        machine.let_go(k - 1)
    machine.let_go(5)
    machine.look()
    assert machine.used() == BASE + 5 * SIZE
    machine.engine.budget.device_bytes = left
    machine._do(machine.engine.making(made, 100))
    assert machine.engine.totals.evictions.get(Action.RECOMPUTE, 0) == gone


def test_where_the_device_has_no_budget_no_op_wants_room():
    toy = Toy(3 * SIZE)
    toy.source(0, 10)
    toy.op(1, SIZE, [0])
    toy.save(1, 10)
    toy.let_go(1)
    assert toy.mine and not toy.engine.asks_ahead
    assert toy._do(toy.engine.making(10 * SIZE, 20)) == []


def uniform(monkeypatch: pytest.MonkeyPatch, budget_bytes: int) -> Machine:
    """A machine that keeps as much free everywhere as the neediest op needs."""
    monkeypatch.setattr(planning, "BY_POSITION", frozenset())
    return Machine(budget_bytes)


def test_one_large_working_set_does_not_make_the_whole_step_evict(monkeypatch):
    by_position = Machine(1900)
    peaks = by_position.steps(2, *MIDDLE)
    before = evictions(by_position)
    peaks += by_position.steps(2, *MIDDLE)
    here = evictions(by_position) - before
    assert max(peaks[1:]) <= 1900 < peaks[0] <= engine.MISSED * 1900
    assert by_position.engine.totals.warnings == []

    everywhere = uniform(monkeypatch, 1900)
    everywhere.steps(2, *MIDDLE)
    before = evictions(everywhere)
    peaks = everywhere.steps(2, *MIDDLE)
    assert max(peaks) <= 1900
    assert 0 < here < evictions(everywhere) - before


def test_the_room_is_there_before_the_op_that_needs_it():
    """At 1700 the op in the middle leaves room for 200 of the 600 bytes saved before it: all goes before it runs."""
    machine = Machine(1700)
    peaks = machine.steps(4, *MIDDLE)
    assert peaks[0] > 1700  # nobody knew
    assert max(peaks[1:]) <= 1700
    assert len(machine.engine.totals.warnings) == 1


def test_what_grows_between_two_steps_is_followed_at_once():
    """Memory that appears (an optimizer's) takes room in the step in which it appears, without a new plan first."""
    machine = Machine(1900)
    machine.steps(3, *MIDDLE)
    machine.source(-1, 320)
    assert machine.step(*MIDDLE, at=90_000) <= 1900
    assert machine.step(*MIDDLE, at=100_000) <= 1900
    assert machine.engine.learner.profiles[0].graph.beside_saves[0] >= BASE + 320


def test_room_is_made_in_backward_too():
    """Nothing has to be brought back for the last op, but what has appeared by then takes the room of the others."""
    machine = Machine(1900)
    machine.steps(3, [SIZE] * 12, {}, {})
    assert machine.step([SIZE] * 12, {}, {}, at=90_000, appears=300) <= 1900


@pytest.mark.parametrize(
    ("peak_bytes", "strays", "late", "grown"),
    [
        pytest.param(1001, {}, [], True, id="over its limit"),
        pytest.param(900, {0: Action.RECOMPUTE}, [], True, id="more had to go"),
        pytest.param(900, {}, [0], True, id="a copy was waited for"),
        pytest.param(900, {}, [], False, id="there was room for it"),
    ],
)
def test_a_plan_is_made_again_when_what_is_beside_has_moved(peak_bytes, strays, late, grown):
    """Three times while op times are refined; then when it has grown by 2 % and the step felt it, and when it has
    fallen by 6 %."""
    planned: list[tuple[int, ...]] = []

    def make_plan(graph, limit_bytes, forced):
        planned.append(graph.beside_saves + graph.beside_needs)
        return plan_step(graph, limit_bytes, Link(1e9, 1e9), (Action.KEEP,), forced)

    learner = Learner(Revising(0, make_plan, aim=1.0))
    for level in (500, 500, 500, 500, 505, 520, 515, 440):
        learner.recorded = True
        learner.packed(1, 0)
        learner.saved(7, SIZE, Kind.ACTIVATION, 1)
        learner.needed(0, 2)
        learner.released(0)
        beside = Beside(Track([level], [10]), Track([level], [0]))
        at = {"unevicted_peak_bytes": SIZE, "limit_bytes": 1000, "forced": {}, "beside": beside, "evicted": True}
        if level == 520:
            learner.late.update(late)
            at |= {"strays": strays}
        learner.end(3, Outcome(peak_bytes=peak_bytes if level == 520 else 900, **at))
    assert planned == [(510, 500)] * 3 + [(530, 520)] * grown + [(450, 440)]


@pytest.mark.parametrize(
    ("taken_bytes", "peak_bytes", "needs", "plans", "squeeze"),
    [
        pytest.param(300, 1100, 1, [(510, 800)], 1.0, id="over"),
        pytest.param(300, 900, 1, [], 1.0, id="within"),
        pytest.param(300, 1100, 2, [(510, 500)], pytest.approx(1000 / 1100), id="of other places"),
        pytest.param(0, 1100, 1, [(510, 500)], pytest.approx(1000 / 1100), id="nowhere"),
    ],
)
def test_a_step_over_its_budget_tells_where_it_took_more_even_if_nobody_recorded_it(
    taken_bytes, peak_bytes, needs, plans, squeeze
):
    """Known steps have 500 bytes beside and took 10 more at the save. Where that does not tell why it was over, the
    plan aims lower."""
    planned: list[tuple[int, ...]] = []

    def make_plan(graph, limit_bytes, forced):
        planned.append(graph.beside_saves + graph.beside_needs)
        return plan_step(graph, limit_bytes, Link(1e9, 1e9), (Action.KEEP,), forced)

    def end(peak_bytes: int, beside: Beside) -> None:
        learner.packed(1, 0)
        learner.saved(7, SIZE, Kind.ACTIVATION, 1)
        learner.needed(0, 2)
        learner.released(0)
        at = {"peak_bytes": peak_bytes, "unevicted_peak_bytes": SIZE, "limit_bytes": 1000, "beside": beside}
        learner.end(3, Outcome(**at, evicted=True, forced={}))

    learner = Learner(Revising(0, make_plan, aim=1.0))
    learner.recorded = True
    end(900, Beside(Track([500], [10]), Track([500], [0])))
    planned.clear()
    learner.recorded = False
    end(peak_bytes, Beside(Track([500], [10]), Track([500] * needs, [taken_bytes] * needs)))
    assert planned == plans
    (profile,) = learner.profiles
    assert profile.squeeze == squeeze
    assert profile.beside.places == (1, 1)


def test_copies_back_leave_the_room_that_an_op_before_their_use_needs(monkeypatch):
    """Swapped storages come back ahead of their use, unless an op on the way needs the room."""

    def copies_ahead() -> int:
        machine = Machine(1900, director={"actions": ["keep", "swap"]}, planner={"kind": "profile"})
        machine.steps(3, [SIZE] * 12, {}, {})
        ahead = []
        prefetch = machine.engine.prefetch
        monkeypatch.setattr(machine.engine, "prefetch", lambda now: ahead.append(prefetch(now)) or ahead[-1])
        machine.step([SIZE] * 12, {}, {}, at=90_000)
        return sum(isinstance(instruction, SwapIn) for said in ahead for instruction in said)

    assert copies_ahead() > 0
    monkeypatch.setattr(HeadRoom, "until_need", lambda self, position: 1900)
    assert copies_ahead() == 0


def test_the_most_until_a_need_is_that_of_the_ops_before_it():
    """Positions 0 to 3 take 400, 700, 500 and 450; at the first one 20 more are in use than was learned."""
    headroom, _, _ = a_headroom()
    learner = headroom._learner
    graph = replace(build_graph(StepLog(), 0), beside_saves=(400,), beside_needs=(400, 700, 500, 450))
    known = Beside(Track([400], [0]), Track([400, 400, 400, 400], [0, 300, 100, 50]))
    plan = plan_step(replace(graph, beside_saves=(), beside_needs=()), 1000, Link(1e9, 1e9), ())
    learner.current = Profile((), graph, 0, {}, 1.0, plan=plan, beside=known)
    learner.mode = Mode.PLANNED
    headroom.looked(420, 420)
    headroom.needed()
    assert [headroom.until_need(position) for position in range(4)] == [420, 720, 720, 720]
    assert (headroom.here_bytes, headroom.working_bytes) == (420, 300)
    headroom.looked(400, 400)
    headroom.needed()
    headroom.needed()
    assert [headroom.until_need(position) for position in (2, 3)] == [500, 500]


def test_what_has_appeared_is_still_there_at_places_that_nobody_looks_at():
    """At position 1 the level is 300 higher than at 0, and nobody looks: 20 more than that are in use."""
    headroom, _, _ = a_headroom()
    learner = headroom._learner
    graph = replace(build_graph(StepLog(), 0), beside_saves=(400,), beside_needs=(400, 700, 700, 500))
    plan = plan_step(replace(graph, beside_saves=(), beside_needs=()), 1000, Link(1e9, 1e9), ())
    known = Beside(Track([400], [0]), Track([400, 700, 700, 500], [0] * 4))
    learner.current = Profile((), graph, 0, {}, 1.0, plan=plan, beside=known)
    learner.mode = Mode.PLANNED
    headroom.looked(420, 420)
    headroom.needed()
    headroom.settled(420, 420)
    headroom.needed()
    assert headroom.here_bytes == 720
    headroom.needed()
    assert headroom.here_bytes == 720
    headroom.looked(490, 490)
    headroom.needed()
    assert headroom.here_bytes == 500, "it has gone again"


def test_without_a_plan_the_most_counts_that_is_known_of_a_place_or_was_seen():
    """Steps like this one took 250 and 600 bytes at the needs; it has 450 beside, and had 100 more for a moment."""
    headroom, _, budget = a_headroom()
    learner = headroom._learner
    learner._guessed = Beside(Track([400], [0]), Track([400, 400, 400], [50, 200, 0]))
    learner._guessed_most = learner._guessed.saves.most_bytes, learner._guessed.needs.most_bytes
    headroom.looked(450, 450)
    headroom.needed()
    assert (headroom.here_bytes, headroom.working_bytes) == (500, 200)
    headroom.looked(450, 700)
    headroom.needed()
    assert (headroom.here_bytes, headroom.working_bytes) == (700, 250), "650 are known"
    headroom.looked(400, 400)
    headroom.needed()
    assert headroom.here_bytes == 650, "250 have been seen"
    budget.other_bytes = 660
    assert headroom.here_bytes == 660


def at_first_save(beside_bytes: tuple[int, int], counts: bool = True) -> Toy:
    """100 bytes are resident, and the step has come to the first of two saves of a plan, which `counts` or is about to:
    60 more at the second one."""
    toy = Toy(Budget(device_bytes=1000))
    graph = replace(build_graph(StepLog(), 0), beside_saves=beside_bytes, beside_needs=(0, 0))
    plan = replace(plan_step(build_graph(StepLog(), 0), 1000, Link(1e9, 1e9), ()), forward_bytes=(40, 100))
    known = Beside(Track(list(beside_bytes), [0, 0]), Track([0, 0], [0, 0]))
    learner = toy.engine.learner
    learner.current = Profile((), graph, 0, {}, 1.0, plan=replace(plan, saved_bytes=(60, 60)), beside=known)
    learner.mode, learner.routine = Mode.PLANNED, Routine([], [], coming_bytes=[60, 0])
    toy.engine.ledger.resident_bytes = 100
    headroom = toy.engine._headroom
    now_bytes = 100 + beside_bytes[0] - (0 if counts else 50)  # other places take other bytes
    headroom.looked(now_bytes, now_bytes)
    if counts:
        headroom.saved()
    return toy


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(
    ("beside_bytes", "most", "coming"),
    [
        ((400, 700), 1000 - 100 - 700 - 60, 300 + 60),
        ((700, 400), 1000 - 100 - 700, 0),
        ((500, 480), 1000 - 100 - 480 - 60, 60 - 20),
    ],
)
def test_a_save_and_the_next_one_each_have_room_beside_what_their_own_place_takes(beside_bytes, most, coming, counts):
    toy = at_first_save(beside_bytes, counts)
    room, learner = toy.engine._room, toy.engine.learner
    assert room.has_for(learner.routine, 0, most)
    assert not room.has_for(learner.routine, 0, most + 1)
    if not counts:
        return
    learner.routine, asked, over = None, [], []
    room.make = lambda nbytes, *_, **__: asked.append(nbytes) or []
    room.await_out = lambda nbytes, *_: over.append(nbytes) or ([], nbytes)
    room.make_for_next(learner.plan, 0, 0)
    assert (asked, over) == ([coming], [100 + 60 - (1000 - beside_bytes[1])])


def test_a_copy_out_that_is_late_is_waited_for_only_where_the_next_save_would_not_fit(monkeypatch):
    toy, over = at_first_save((400, 700)), []
    monkeypatch.setattr(toy.engine._room, "await_out", lambda nbytes, *_: over.append(nbytes) or ([], nbytes))
    toy.engine.expected.await_for_save(0, 150)
    assert over == [10], "150 would, and then 60"


def test_what_a_plan_says_is_resident_is_what_was_saved():
    """What is beside has its place in the head-room."""
    graph, plain = tiny_graph((300, 200)), tiny_graph(())
    made = plan_step(graph, 10_000, Link(1e9, 1e9), (Action.KEEP,))
    assert made.peak_bytes == 400
    assert made.forward_bytes == plan_step(plain, 10_000, Link(1e9, 1e9), (Action.KEEP,)).forward_bytes != (0, 0)


def tiny_graph(beside_saves: tuple[int, ...], count: int = 2) -> StepGraph:
    machine = Machine(10_000)
    machine.steps(1, [SIZE] * count, {}, {})
    return replace(machine.engine.learner.profiles[0].graph, beside_saves=beside_saves, beside_needs=())


@pytest.mark.parametrize("kind", ["mimose", "profile"])
@pytest.mark.parametrize(("told", "limit_bytes"), [(True, 5000), (False, 4700)])
def test_a_step_that_has_just_begun_is_planned_for_the_whole_or_for_what_is_left(told, limit_bytes, kind, monkeypatch):
    """By whether its graph has what is beside; what is left of it is taken off once."""
    asked = []
    monkeypatch.setitem(PLANNERS, kind, lambda task: asked.append(task.limit_bytes) or plan_of(task.graph, LINK, KEPT))
    machine = Machine(5000, planner={"kind": kind})
    planning, machine.engine.budget.other_bytes = machine.engine.planning, 300
    limit = planning.learner.limit if kind == "mimose" else planning.learner.sizes._limit
    assert limit(700, told) == limit_bytes
    if kind == "mimose":
        planning.learner.revising.make_plan(tiny_graph((300, 200) if told else ()), limit_bytes, {})
    else:
        planning.learner.sizes._plan_like(tiny_graph((300, 200) if told else ()), limit_bytes, ())
    assert asked == [limit_bytes]


@pytest.mark.parametrize("kind", sorted(BY_POSITION))
def test_a_plan_by_position_evicts_where_the_place_itself_takes_too_much(kind):
    """Of 1,250 bytes 700 are taken beside the third of twelve storages: those all fit. Or beside the last one."""
    for at, fits in ((2, True), (11, False)):
        graph = tiny_graph(tuple(700 if order == at else 0 for order in range(12)), 12)
        task = Task(graph, 1250, Link(1e9, 1e9), (Action.KEEP, Action.RECOMPUTE), {}, False, PlannerConfig())
        plan = PLANNERS[kind](task)
        assert plan.idle is fits
        assert plan.peak_bytes <= 1250


@pytest.mark.parametrize("seed", range(40))
def test_a_budget_is_held_or_a_warning_says_that_it_was_not(seed):
    chance = random.Random(seed)
    count = chance.randint(3, 14)
    sizes = [chance.randint(1, 200) for _ in range(count)]
    forward = {chance.randint(1, count): chance.randint(0, 600) for _ in range(3)}
    backward = {chance.randint(1, count): chance.randint(0, 600) for _ in range(3)}
    floor = BASE + 2 * max(sizes) + max(*forward.values(), *backward.values()) + 10
    machine = Machine(int(floor * chance.uniform(1.0, 1.6)))
    budget_bytes = machine.engine.budget.device_bytes
    for index in range(6):
        peak_bytes = machine.step(sizes, forward, backward, at=10_000 * index)
        told = bool(machine.engine.totals.warnings)
        assert told or peak_bytes <= engine.MISSED * budget_bytes
    profile = machine.engine.learner.profiles[0]
    if profile.plan is not None and profile.plan.peak_bytes <= 0.99 * budget_bytes:
        assert peak_bytes <= engine.MISSED * budget_bytes


# -- the parts --------------------------------------------------------------------------------------------------------
def test_a_track_keeps_the_newest_levels_and_the_largest_working_sets():
    earlier, later = Track([10, 20], [5, 0]), Track([11, 18], [2, 7])
    assert later.after(earlier) == Track([11, 18], [5, 7])
    assert later.after(earlier).most_bytes == (16, 25)
    assert later.after(Track([1], [9])) == later


def a_headroom(resident_bytes: int = 0) -> tuple[HeadRoom, Ledger, Budget]:
    ledger, budget = Ledger(), Budget(device_bytes=1000, reserve_bytes=100)
    ledger.resident_bytes = resident_bytes
    return HeadRoom(budget, ledger, Learner(Revising(0, None))), ledger, budget


def test_levels_and_working_sets_are_what_is_beside_counted_activations():
    headroom, ledger, _ = a_headroom()
    headroom.looked(300, 350)  # before the first save there is no position
    headroom.saved()
    ledger.resident_bytes = 100
    headroom.looked(450, 600)  # after it: 450 - 100 at the second save, and 600 - 100 on the way
    headroom.saved()
    assert headroom.measured.saves == Track([300, 350], [200, 0])
    headroom.looked(450, 450)
    headroom.needed()
    ledger.resident_bytes = 180
    headroom.settled(530, 530)  # 80 came back
    ledger.resident_bytes = 0
    headroom.looked(400, 700)  # the peak was before what backward read has died
    assert headroom.measured.needs == Track([350], [170])
    assert headroom.peak_bytes == 700


def test_where_nothing_is_known_room_is_kept_for_what_is_in_use_and_for_the_largest_working_set_so_far():
    headroom, ledger, budget = a_headroom(resident_bytes=200)
    headroom.looked(600, 600)
    assert headroom.here_bytes == 400
    headroom.saved()
    headroom.looked(650, 700)
    assert headroom.here_bytes == headroom.from_save(1) == 450 + 100
    headroom.saved()
    headroom.looked(500, 520)
    assert headroom.here_bytes == 300 + 100
    ledger.resident_bytes = 250  # by Delta's own work
    headroom.settled(560, 560)
    assert headroom.here_bytes == 310 + 100
    assert budget.other_bytes == 0
    headroom.new_step()
    assert (headroom.here_bytes, headroom.largest_bytes) == (310, 100), "the step's own, and that of all steps"


def test_what_was_in_use_when_the_budget_was_passed_is_kept_free_until_it_is_given_back():
    headroom, _, budget = a_headroom(resident_bytes=200)
    headroom.looked(890, 900)
    assert budget.other_bytes == 0
    headroom.looked(900, 950)
    headroom.looked(300, 300)
    assert headroom.here_bytes == budget.other_bytes == 750


def test_what_is_being_saved_is_not_beside_counted_activations():
    headroom, ledger, budget = a_headroom(resident_bytes=200)
    headroom.looked(500, 500, 200)
    headroom.saved()
    ledger.resident_bytes = 400
    headroom.looked(800, 850, 300)
    headroom.saved()
    assert headroom.measured.saves == Track([100, 100], [350, 0])
    assert headroom.here_bytes == 100 + 350, "the next one may take as much before it counts"
    headroom.settled(950, 950, 400)
    assert headroom.here_bytes == 150 + 350
    assert budget.other_bytes == 150


def test_in_backward_a_peak_was_there_beside_what_has_died_since():
    headroom, ledger, budget = a_headroom(resident_bytes=500)
    headroom.looked(700, 700)
    headroom.needed()
    ledger.resident_bytes = 100
    headroom.looked(300, 950)
    assert budget.other_bytes == 950 - 500


def a_device(**facts: object) -> SimpleNamespace:
    """What a gauge asks of one; by default a process, of which nobody has to watch the peaks."""
    return SimpleNamespace(**{"hoards": True, "kept_bytes": 0, "watch_peaks": lambda on: None} | facts)


@pytest.mark.parametrize(("hoards", "peak_bytes"), [(True, 900), (False, 700)])
def test_a_peak_between_two_looks_is_in_the_report_where_the_device_is_sure_of_it(hoards, peak_bytes):
    """What a card tells is the most that can have been."""
    engine = Toy(Budget(device_bytes=800)).engine
    device = a_device(hoards=hoards, in_use=lambda: (700, 900), used_bytes=lambda: 700)
    gauge = Gauge(engine, device)
    gauge.look()
    assert gauge.peak_bytes == peak_bytes


@pytest.mark.parametrize(
    ("hoards", "own", "used", "after_trim", "told"),
    [
        pytest.param(True, False, 700, 700, (600, 900), id="what the heap keeps is in no use"),
        pytest.param(True, False, 820, 820, (820, 900), id="over the budget all counts"),
        pytest.param(True, False, 820, 610, (600, 900), id="unless that can be trimmed away"),
        pytest.param(True, True, 700, 700, (600, 900), id="a peak of Delta's own work"),
        pytest.param(False, True, 700, 700, (600, 600), id="a card's may be that of before"),
    ],
)
def test_what_the_engine_is_told_to_be_in_use(monkeypatch, hoards, own, used, after_trim, told):
    """The budget is 800 MiB; the device says that 600 are in use, and 900 were."""
    engine, heard, trimmed = Toy(Budget(device_bytes=800 * MIB)).engine, [], []
    monkeypatch.setattr(Engine, "settled" if own else "looked", lambda engine, *told: heard.append(told))
    device = a_device(
        hoards=hoards,
        kept_bytes=(used - 600) * MIB if hoards else 0,
        in_use=lambda: (600 * MIB, 900 * MIB),
        used_bytes=lambda: (after_trim if trimmed else used) * MIB,
        trim=lambda: trimmed.append(1),
    )
    Gauge(engine, device).look(own, 7)
    assert heard == [(told[0] * MIB, told[1] * MIB, 7)]


@pytest.mark.parametrize(
    ("hoards", "used_mib", "kept_mib", "made_mib", "trims"),
    [
        pytest.param(True, 790, 90, 20, 1, id="no room beside what is kept"),
        pytest.param(True, 770, 90, 20, 0, id="room beside it"),
        pytest.param(True, 790, 4, 20, 0, id="hardly anything is kept"),
        pytest.param(False, 790, 90, 20, 0, id="a card"),
    ],
)
def test_what_the_heap_keeps_makes_way_for_what_is_made_again(hoards, used_mib, kept_mib, made_mib, trims):
    """Under 800 MiB, of which nothing is known that the program takes. Once trimmed nothing more is there to be."""
    engine = Toy(Budget(device_bytes=800 * MIB)).engine
    now, trimmed = (used_mib - kept_mib) * MIB, []

    def trim() -> None:
        trimmed.append(1)
        device.kept_bytes = 0

    device = a_device(
        hoards=hoards,
        kept_bytes=kept_mib * MIB if hoards else 0,
        in_use=lambda: (now, now),
        used_bytes=lambda: used_mib * MIB,
        trim=trim,
    )
    gauge = Gauge(engine, device)
    gauge.look()
    for _ in range(2):
        gauge.make_way(made_mib * MIB)
    assert len(trimmed) == trims


@pytest.mark.parametrize(
    ("observes", "kept_mib", "working_mib", "trims"),
    [
        pytest.param(True, 90, 0, 1, id="what is seen next is to be all that the op takes"),
        pytest.param(True, 4, 0, 0, id="hardly anything is kept"),
        pytest.param(False, 90, 0, 0, id="known by now"),
        pytest.param(False, 90, 20, 1, id="and may not fit"),
    ],
)
def test_what_the_heap_keeps_goes_before_an_op_is_measured(monkeypatch, observes, kept_mib, working_mib, trims):
    engine, now, trimmed = Toy(Budget(device_bytes=800 * MIB)).engine, (790 - kept_mib) * MIB, []
    monkeypatch.setattr(Engine, "observes", observes)
    monkeypatch.setattr(Engine, "working_bytes", working_mib * MIB)
    device = a_device(
        kept_bytes=kept_mib * MIB,
        in_use=lambda: (now, now),
        used_bytes=lambda: now if trimmed else 790 * MIB,
        trim=lambda: trimmed.append(1),
    )
    Gauge(engine, device).look()
    assert len(trimmed) == trims


def observed(machine: Machine, at: int) -> set[bool]:
    """Whether a step was, at the looks after its first save."""
    seen, look = set(), machine.look

    def looked(*args, **kwargs):
        look(*args, **kwargs)
        if machine.engine.learner.in_step:
            seen.add(machine.engine.observes)
        else:
            assert not machine.engine.observes

    machine.look = looked
    machine.step([SIZE] * 12, {}, {}, at=at)
    del machine.look
    return seen


def test_the_first_steps_of_a_kind_are_observed(monkeypatch):
    """Those that op times are taken from as well; where a plan does not tell places apart, those before there is one,
    and where there are no plans, all."""
    machine = Machine(1900)
    assert [observed(machine, 10_000 * k) for k in range(5)] == [{True}] * 3 + [{False}] * 2
    machine = uniform(monkeypatch, 1900)
    assert [observed(machine, 10_000 * k) for k in range(5)] == [{True}] + [{False}] * 4
    machine = Machine(1900, planner={"kind": "none"})
    assert [observed(machine, 10_000 * k) for k in range(5)] == [{True}] * 5


@pytest.mark.parametrize(
    ("timed", "known", "sizes", "measures"),
    [(True, True, True, True), (False, False, False, True), (False, False, True, False), (False, True, False, False)],
)
def test_what_steps_use_is_measured_until_it_is_known_or_can_be_foretold(timed, known, sizes, measures):
    learner = SimpleNamespace(is_timed=timed, current=object() if known else None, sizes=object() if sizes else None)
    assert Learner.measures.fget(learner) is measures


@pytest.mark.parametrize(("hoards", "told"), [(True, [900, 950]), (False, [900, 890])])
def test_what_a_process_had_in_use_during_delta_s_own_work_is_told(monkeypatch, hoards, told):
    """Of a card, of which a peak is the most that can have been, only what there is after it."""
    engine, heard = Toy(Budget(device_bytes=1000)).engine, []
    monkeypatch.setattr(Engine, "looked", lambda _, now, peak, uncounted=0: heard.append(peak))
    monkeypatch.setattr(Engine, "settled", lambda _, now, peak, uncounted=0: heard.append(peak))
    uses = iter([(880, 900), (890, 950)])
    device = a_device(hoards=hoards, in_use=lambda: next(uses), used_bytes=lambda: 880)
    gauge = Gauge(engine, device)
    gauge.look()
    gauge.look(own=True)
    assert heard == told


def test_what_a_replay_takes_is_beside_all_that_counts_by_then():
    """A replay makes 300 bytes and takes 100 for it, after which 50 more have gone: the next one may take as much. Of
    the place it tells nothing."""
    headroom, ledger, budget = a_headroom()
    headroom.looked(300, 300)
    headroom.needed()
    ledger.resident_bytes = 300
    headroom.settled(600, 700)
    assert (headroom.peak_bytes, headroom.here_bytes) == (700, 400)
    ledger.resident_bytes = 0
    headroom.settled(350, 690)  # they were there, too
    assert headroom.here_bytes == 350 + 100
    headroom.settled(350, 470)
    assert headroom.here_bytes == 350 + 170
    assert headroom.measured.needs == Track([300], [50])
    ledger.resident_bytes = 500
    headroom.settled(850, 1000)
    assert budget.other_bytes == 500, "over the budget"


def test_in_forward_a_peak_was_there_beside_what_was_let_go_of_and_has_died_since():
    headroom, ledger, _ = a_headroom(resident_bytes=500)
    headroom.looked(700, 700)
    headroom.saved()
    ledger.resident_bytes = 100
    headroom.looked(350, 800)
    assert headroom.measured.saves == Track([200], [100])
    assert headroom.here_bytes == 250 + 100
    ledger.resident_bytes = 0
    headroom.looked(360, 370)
    assert headroom.measured.saves == Track([200], [160]), "by now it has died"


def test_peaks_are_watched_in_steps_that_follow_no_routine(monkeypatch):
    """From the first look at one to its end."""
    engine, switched, routines = Toy(Budget(device_bytes=800)).engine, [], [None, None, object(), None, object()]
    monkeypatch.setattr(Engine, "routine", property(lambda _: routines[0]))
    device = a_device(in_use=lambda: (700, 700), used_bytes=lambda: 700, watch_peaks=switched.append)
    gauge, seen = Gauge(engine, device), []
    while routines:
        gauge.look()
        gauge.look(own=True)
        gauge.step_ended()
        seen.append(switched[:])
        switched.clear()
        del routines[0]
    assert seen == [[True, False], [True, False], [], [True, False], []]


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("policy", ["recompute", "dtr"])
def test_nobody_watches_between_two_steps(monkeypatch, policy):
    net, switched = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), []
    monkeypatch.setattr(CpuDevice, "watch_peaks", lambda device, on: switched.append((device, on)))
    chosen = delta.load_policy(policy, {"filter.min_bytes": 4096})
    with delta.evict(net, budget="1MiB", policy=chosen, device="cpu") as run:
        for _ in range(4):
            net(torch.randn(256, 64)).square().mean().backward()
            assert [on for device, on in switched if device is run._core.device] == [True, False]
            switched.clear()


def test_nobody_watches_where_activations_are_limited(monkeypatch):
    net, watched = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), []
    monkeypatch.setattr(CpuDevice, "watch_peaks", lambda device, _: watched.append(device))
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 4096})
    with delta.evict(net, activations="50%", policy=chosen, device="cpu") as run:
        net(torch.randn(256, 64)).square().mean().backward()
    assert run._core.device not in watched


class Works(torch.autograd.Function):
    """Its backward has 24 MiB for a moment, until a whole look has seen them."""

    watch: PeakWatch

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        work, end_s = torch.ones(6 * MIB), time.monotonic() + 10
        for _ in range(2):  # one look may have begun before all of it was written
            Works.watch._most_bytes[1] = 0  # a look ends with this one
            while not Works.watch._most_bytes[1] and time.monotonic() < end_s:
                time.sleep(1e-3)
        del work
        return grad + ctx.saved_tensors[0] * 0


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.skipif(heap_bytes() is None, reason="the C library does not say")
def test_what_backward_takes_is_known_after_one_step_of_a_process_that_had_more_in_use_before():
    """By the need before it runs: its tensor is asked for at its end."""
    gc.collect()
    del (loading := [torch.ones(64 * MIB)])[0]  # 256 MiB: Linux keeps no other peak
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(4)])
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 4096})
    with delta.evict(net, budget=ResidentMeter().read_bytes() + 4 * MIB, policy=chosen, device="cpu") as run:
        Works.watch = run._core.device._memory._peak_watch
        net[2:](Works.apply(net[:2](torch.randn(1024, 64)))).square().mean().backward()
        (profile,) = run._core.engine.learner.profiles
        working = profile.beside.needs.working
    assert 12 * MIB < max(working) < 30 * MIB
    assert sum(nbytes > 10 * MIB for nbytes in working) == 1
    del loading


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_what_the_heap_keeps_makes_way_for_every_copy_back_and_replay(monkeypatch, policy):
    """Those of observed steps, and those of steps that follow their routine. None is made in the place of another."""
    net, asked = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.Softmax(1))]), []
    monkeypatch.setattr(Gauge, "make_way", lambda gauge, nbytes: asked.append(nbytes))
    chosen = delta.load_policy(policy, {"filter.min_bytes": 4096})
    back_bytes = 0
    with delta.evict(net, activations="60%", policy=chosen, device="cpu") as run:
        for _ in range(8):
            net(torch.randn(256, 64)).square().mean().backward()
            net.zero_grad()
            report, before_bytes = run.report(), back_bytes
            back_bytes = report.swapped_in_bytes + report.recomputed_bytes
            assert sum(asked) >= back_bytes - before_bytes > 0
            asked.clear()
    assert report.modes["planned"] >= 3


def test_what_a_replay_makes_in_the_place_of_another_needs_no_way(monkeypatch):
    """A routine's step: nobody but the sigmoid asks for twice the product, which is made again where that was."""
    layers, asked = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), []
    monkeypatch.setattr(Gauge, "make_way", lambda gauge, nbytes: asked.append(nbytes))
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 4096})
    with delta.evict(layers, activations="60%", policy=chosen, device="cpu") as run:
        for _ in range(8):
            asked.clear()
            before_bytes, found = run.report().recomputed_bytes, torch.randn(256, 64)
            for layer in layers:
                found = torch.sigmoid(2 * layer(found))
            found.square().mean().backward()
            run._core.planning.wait()  # a plan that came later would be a step's that is recorded
        again_bytes = run.report().recomputed_bytes - before_bytes
    assert 0 in asked
    assert sum(asked) + asked.count(0) * 64 * 1024 == again_bytes


def test_beside_of_two_steps():
    one, two = Beside(Track([1], [3]), Track([2], [0]), [7]), Beside(Track([4], [1]), Track([5], [6]), [2])
    assert two.after(one) == Beside(Track([4], [3]), Track([5], [6]), [7])
    assert replace(two, making=[]).after(one).making == [], "other places"
    assert one.after(replace(two, making=[9, 9])).making == [7]
    assert one.towards(two, Fraction(1, 4)) == Beside(Track([2], [3]), Track([3], [2]), [6])
    assert two.scaled(Fraction(3)).making == [6]
    assert two.raised(100) == Beside(Track([104], [1]), Track([105], [6]), [2])


def test_where_nobody_sees_it_backward_of_an_op_takes_what_the_op_did():
    """The op between the first two saves took 90 bytes, 40 of which were saved, the last one 30. So a replay of what
    was saved second takes 50 beside it."""
    beside = Beside(Track([10, 20, 30], [90, 5, 30]), Track([40, 50, 60, 70], [0, 60, 1, 2]))
    found = beside.as_in_forward([90, 5, 30], [7, 40, 8], [2, 1, 0, 0])
    assert found == Beside(beside.saves, Track(beside.needs.levels, [30, 60, 50, 50]), [0, 50, 0])
    assert beside.as_in_forward([90, 5, 30], [7, 40, 8], [2, 1]) == beside, "not all of it was measured"


@pytest.mark.parametrize(("sees_peaks", "taken_bytes"), [(True, 0), (False, 300)])
def test_what_backward_takes_is_taken_from_forward_only_where_peaks_are_not_seen(sees_peaks, taken_bytes):
    machine = Machine(1900, sees_peaks=sees_peaks)
    machine.step([SIZE] * 12, {6: 300}, {}, at=0)
    (profile,) = machine.engine.learner.profiles
    assert max(profile.beside.needs.working) == taken_bytes


# -- a real process -----------------------------------------------------------------------------------
@pytest.mark.slow  # and to be run alone: see below
@pytest.mark.skipif(heap_bytes() is None or not Path("/proc/self/clear_refs").exists(), reason="needs Linux and glibc")
def test_a_process_stays_within_its_budget_from_the_first_step_on():
    """Measured by Linux. The first step meets an op that makes 48 MiB at once.

    Alone on the machine: beside other tests whole runs were up to 7 % over the budget, for a reason that is not known.
    Backward of that op makes two such temporaries, one after the other. Where the first one fills a hole of the heap,
    the second may not fit in again, and lies beside what the heap keeps, which a warning tells of: in 26 of 169
    runs of twelve steps one was over by that much, and for that in all 19 that were looked into. The plan leaves room
    for it from then on."""
    command = [sys.executable, str(Path(__file__).with_name("device_budget_worker.py")), str(230 * 2**20), "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    told = json.loads(done.stdout)
    assert told["evictions"] > 0
    assert median(told["peaks"]) <= told["budget"]
    assert told["peaks"][0] <= told["budget"]
    over = [peak - told["budget"] for peak in told["peaks"] if peak > engine.MISSED * told["budget"]]
    assert len(over) <= 1
    assert max(over, default=0) <= WORKING_BYTES
    assert told["warnings"] or not over


@pytest.mark.skipif(heap_bytes() is None or not Path("/proc/self/clear_refs").exists(), reason="needs Linux and glibc")
def test_an_evaluation_between_two_steps_does_not_lie_beside_what_the_heap_keeps():
    """Measured by Linux. Nobody looked at its ops, which save nothing: most were 10 to 60 MiB over the budget."""
    command = [sys.executable, str(Path(__file__).with_name("evaluating_worker.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    told = json.loads(done.stdout)
    assert median(told["peaks"]) <= told["budget"]
    assert sorted(told["peaks"])[-2] <= told["budget"]


# -- what others take, where it is not known by position ---------------------------------------------------------------
def a_need(anywhere_bytes: int) -> Need:
    return Need(0, 0, anywhere_bytes, 1000)


def test_what_was_taken_for_others_is_given_back_when_the_last_limited_steps_needed_less():
    budget = Budget(device_bytes=1000, other_bytes=600)
    budget.step_used(700, a_need(600), limited=True)
    assert budget.other_bytes == 600
    for _ in range(LATELY - 1):
        budget.step_used(700, a_need(300), limited=True)
        assert budget.other_bytes == 600, "the next step may need as much"
    budget.step_used(700, a_need(300), limited=True)
    assert budget.other_bytes == 600 - int(0.7 * 300)
    budget.step_used(900, a_need(300), limited=True)
    assert budget.other_bytes == 390 - 70
    budget.step_used(700, a_need(310), limited=True)
    assert budget.other_bytes == 310
    budget.step_used(700, a_need(350), limited=True)
    assert budget.other_bytes == 310, "there was room for it"


def test_a_step_that_had_no_use_for_the_room_says_nothing_of_it():
    budget = Budget(device_bytes=1000, other_bytes=600)
    for _ in range(2 * LATELY):
        budget.step_used(700, a_need(300), limited=False)
        budget.step_used(0, a_need(0), limited=True)
    assert budget.other_bytes == 600
    unlimited = Budget()
    unlimited.step_used(700, a_need(300), limited=True)
    assert unlimited.other_bytes == unlimited.beside_bytes(1000) == 0


def test_a_plan_leaves_what_the_last_steps_needed_for_as_much_as_is_saved():
    budget = Budget(device_bytes=1000, other_bytes=600)
    budget.step_used(900, Need(100, 500, 0, 1000), limited=True)
    assert [budget.beside_bytes(saved_bytes) for saved_bytes in (0, 500, 1000, 2000)] == [100, 300, 500, 900]
    assert budget.limit_bytes(500) == 1000 - 300
    for _ in range(LATELY):
        assert budget.beside_bytes(1000) == 500
        budget.step_used(900, Need(200, 300, 0, 1000), limited=True)
    assert [budget.beside_bytes(saved_bytes) for saved_bytes in (0, 1000)] == [200, 300]


def test_a_step_needs_what_leaves_room_for_its_share_at_each_place():
    """Of 900 bytes 200 are taken as the step begins. At another place 400 are, where 600 would be resident: five sixths
    of them fit, and so do five sixths of the 800 that there are at most."""
    headroom, ledger, _ = a_headroom(resident_bytes=100)
    ledger.unevicted_bytes, ledger.peak_unevicted_bytes, ledger.peak_resident_bytes = 100, 800, 400
    headroom.looked(300, 300)
    headroom.saved()
    assert headroom.need == Need(200, 200, 0, 800)
    ledger.resident_bytes, ledger.unevicted_bytes = 250, 500
    headroom.looked(650, 650)
    assert headroom.need == Need(200, 200, 0, 800), "400 and 500 fit"
    ledger.unevicted_bytes = 600
    headroom.settled(650, 650)
    assert headroom.need == Need(200, 900 - 800 * 5 // 6, 400, 800)
    headroom.new_step()
    assert headroom.need == Need(0, 0, 0, 800)


def test_where_the_budget_was_passed_so_much_less_would_have_fitted():
    """300 are resident, and there is room for 200: for two thirds of the 400 that were resident at most."""
    headroom, ledger, _ = a_headroom(resident_bytes=300)
    ledger.unevicted_bytes, ledger.peak_unevicted_bytes, ledger.peak_resident_bytes = 300, 800, 400
    headroom.looked(1000, 1000)
    assert headroom.need == Need(0, 900 - 400 * 2 // 3, 700, 800)
    ledger.resident_bytes = ledger.unevicted_bytes = 0
    headroom.looked(950, 950)
    assert headroom.need == Need(0, 900, 950, 800), "there is no room at all"


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # of the first steps
@pytest.mark.parametrize("policy", ["delta", "recompute", "mimose"])
def test_batches_of_changing_sizes_hold_the_budget_whatever_ops_take(policy, heap_card, device_peaks):
    """Those at the end take six times what each of the others saves."""
    rows = [1024, 768, 896, 640, 1024, 512, 896, 960, 1024, 704, 832, 1024, 1024]
    plain, peaks = list(deep(rows, head=True)), []
    chosen = delta.load_policy(policy, {"budget.reserve": 0, "filter.min_bytes": 1024})
    gc.collect()
    budget_bytes = (heap_bytes() or 0) + 24 * MIB
    with heap_card, delta.evict(budget=budget_bytes, policy=chosen, device="cpu") as run:
        evicted, heap_card.peak_bytes = [], 0
        for found in deep(rows, head=True):
            evicted.append(found)
            peaks.append(heap_card.peak_bytes - budget_bytes)
            heap_card.peak_bytes = 0
    assert evicted == plain and run.report().evictions
    assert peaks[0] <= 3 * MIB // 2  # what backward takes is not known before
    assert max(peaks[1:]) <= MIB // 4


def test_steps_that_fit_take_no_room_from_the_one_that_comes_after_them():
    machine = Machine(1900, planner={"kind": "none"})
    assert machine.steps(4, *MIDDLE)[-1] <= 1900 < BASE + 10 + 12 * SIZE
    known = evictions(machine)
    machine.steps(2 * LATELY, [SIZE] * 2, {}, {})
    assert evictions(machine) == known
    assert machine.step(*MIDDLE, at=10**6) <= 1900


def trained(batches: Iterable[int]) -> Iterator[list[Tensor]]:
    """Trains a small net on batches of so many rows; loss and gradients of each step."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)]
    model = nn.Sequential(*parts)
    for rows in batches:
        model.zero_grad()
        loss = model(torch.randn(rows, 16)).square().mean()
        loss.backward()
        yield [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(found: Iterable[list[Tensor]], plain: Iterable[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, two in zip(found, plain, strict=True) for a, b in zip(one, two, strict=True))


@pytest.fixture
def device_peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each step that was looked at."""
    peaks, end = list[int](), HeadRoom.new_step
    monkeypatch.setattr(HeadRoom, "new_step", lambda room: (peaks.append(getattr(room, "peak_bytes", 0)), end(room)))
    monkeypatch.setattr(planning.Planning, "open_tasks", [])
    return peaks


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["delta", "recompute", "swap", "mimose", "dtr", "capuchin"])
def test_batches_that_fit_leave_no_less_room_for_those_that_do_not(policy, measured, device_peaks):
    draw = random.Random(3)
    batches = [draw.randint(20, 60) for _ in range(60)]
    chosen = delta.load_policy(policy, {"filter.min_bytes": 256, "budget.reserve": 0})
    with delta.evict(budget=measured + 50 * 1024, policy=chosen, device="cpu") as run:
        evicted = list(trained(batches))
    assert same(evicted, trained(batches))
    assert run.report().evictions
    assert max(device_peaks) <= measured + 50 * 1024, "from the first step on"


# -- the heap in place of a card's allocator --------------------------------------------------------------------------
class HeapCard(TorchDispatchMode):
    """The memory that the heap gives out is the device's, and its peaks are told, as after each op."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.peak_bytes = self.since_bytes = 0
        monkeypatch.setattr(CpuDevice, "hoards", False)
        monkeypatch.setattr(CpuDevice, "used_bytes", lambda _: heap_bytes())
        monkeypatch.setattr(CpuDevice, "in_use", lambda _: self.in_use())

    def in_use(self) -> tuple[int, int]:
        now, peak = heap_bytes() or 0, self.since_bytes
        self.since_bytes = now
        return now, max(now, peak)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        now = heap_bytes() or 0
        self.peak_bytes, self.since_bytes = max(self.peak_bytes, now), max(self.since_bytes, now)
        return found


@pytest.fixture
def heap_card(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> HeapCard:
    if heap_bytes() is None:
        pytest.skip("needs glibc")
    with delta.evict(policy="swap", activations="50%", device="cpu"):  # what is tried once in a process takes memory
        list(deep([1024] * 2))
    return HeapCard(monkeypatch)


def deep(rows: Iterable[int], large: bool = False, head: bool = False) -> Iterator[float]:
    """Trains twelve layers that each save a MiB for 1,024 rows, twice; `large`: and an op between that takes 6; `head`:
    and one at the end that saves 3, of 3 others."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for count in rows:
        layers.zero_grad(set_to_none=False)
        x = torch.randn(count, 256)
        for number, layer in enumerate(layers):
            x = nn.functional.gelu(layer(x))
            if large and number == 6:
                x = x + x.detach().repeat(1, 6).sum() * 1e-6
        if head:
            x = nn.functional.log_softmax(torch.cat([x] * 3, 1), 1)
        x.square().mean().backward()
        yield float(x.detach().sum())


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("policy", ["delta", "recompute", "swap", "dtr"])
def test_of_a_card_no_more_is_used_than_the_budget_from_the_first_step_on(policy, large, heap_card, device_peaks):
    plain = list(deep([1024] * 6, large))
    chosen = delta.load_policy(policy, {"budget.reserve": 0})
    gc.collect()
    peaks, budget_bytes = [], (heap_bytes() or 0) + 20 * MIB
    with heap_card, delta.evict(budget=budget_bytes, policy=chosen, device="cpu") as run:
        evicted, heap_card.peak_bytes = [], 0  # the link has been tried
        for found in deep([1024] * 6, large):
            evicted.append(found)
            peaks.append(heap_card.peak_bytes - budget_bytes)
            heap_card.peak_bytes = 0
    assert evicted == plain and run.report().evictions
    assert peaks[0] <= MIB + MIB // 4  # what backward takes is not known before
    assert max(peaks[1:]) <= MIB // 4


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_what_goes_for_an_op_that_has_run_was_not_taken_by_it(heap_card, device_peaks):
    """One op takes 7 MiB with its result, all others one or two."""
    gc.collect()
    with heap_card, delta.evict(budget=(heap_bytes() or 0) + 20 * MIB, policy="recompute", device="cpu") as run:
        list(deep([1024] * 3, large=True))
    assert run._core is not None
    (profile,) = run._core.engine.learner.profiles
    assert max(profile.beside.saves.working) < 9 * MIB


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_what_is_being_saved_takes_its_room_once(heap_card, device_peaks, monkeypatch):
    """It is no part of the level by which a policy without plans goes."""
    levels, saved = list[int](), HeadRoom.saved
    monkeypatch.setattr(HeadRoom, "saved", lambda room: (levels.append(room._level_bytes), saved(room)))
    gc.collect()
    before_bytes = heap_bytes() or 0
    with heap_card, delta.evict(budget=before_bytes + 20 * MIB, policy="dtr", device="cpu"):
        list(deep([1024]))
    beside = sorted(nbytes - before_bytes - 6 * MIB for nbytes in levels)  # weights and gradients take 6
    assert beside[len(beside) // 2] < MIB // 2


@pytest.mark.parametrize("policy", ["delta", "recompute", "swap"])
def test_a_batch_that_does_not_fit_takes_nothing_from_those_that_do(policy, heap_card, device_peaks):
    """What is only watched and then looked after is not beside counted activations while it is handed over."""
    rows = [512, 512, 512, 1024, 512, 512, 512]
    plain, evictions = list(deep(rows)), []
    chosen = delta.load_policy(policy, {"budget.reserve": 0})
    gc.collect()
    with heap_card, delta.evict(budget=(heap_bytes() or 0) + 28 * MIB, policy=chosen, device="cpu") as run:
        evicted = []
        for found in deep(rows):
            evicted.append(found)
            evictions.append(sum(run.report().evictions.values()))
    assert evicted == plain
    assert evictions[:3] == [0] * 3
    assert 0 < evictions[3] <= 10, "of 25 storages"
    assert evictions[4:] == [evictions[3]] * 3
    assert run.report().modes == {"observe": 2, "idle": 5}


@pytest.mark.parametrize("hoards", [True, False])
def test_a_process_is_known_not_to_tell_its_peaks(hoards, monkeypatch):
    monkeypatch.setattr(CpuDevice, "hoards", hoards)
    with delta.evict(budget="64GiB", device="cpu") as run:
        assert run._core is not None and run._core.engine._headroom is not None
        assert run._core.engine._headroom._sees_peaks is not hoards


@pytest.mark.parametrize("reserve", ["2GiB", "100%"])
def test_a_reserve_that_leaves_nothing_is_refused(reserve):
    chosen = delta.load_policy("delta", {"budget.reserve": reserve})
    block = delta.evict(budget="1GiB", policy=chosen, device="cpu")
    with pytest.raises(BudgetError, match=r"the budget is 1 GiB, of which \d GiB .* leaves nothing"):
        block.__enter__()
