"""Which step this is, how it is run, and what is learned from it. Units: bytes, ns."""

from dataclasses import dataclass, field, replace

import pytest
from builders import an_op

from delta.learner import Learner
from delta.planner import Plan, StepGraph
from delta.planner.steplog import Moves, StepTimes
from delta.planner.turns import Turn
from delta.profile import REFINEMENTS, TIGHTENINGS, refine
from delta.revising import AIM, Outcome, Revising
from delta.types import Action, Kind, Mode

OBSERVE, IDLE, PLANNED = Mode.OBSERVE, Mode.IDLE, Mode.PLANNED
LIMIT = 60
UNEVICTED = 100  # over the limit: something has to go
OVERFULL = Outcome(peak_bytes=LIMIT, unevicted_peak_bytes=UNEVICTED, limit_bytes=LIMIT, evicted=True, forced={})


@dataclass
class Planner:
    """Evicts everything; notes what it was asked."""

    action: Action = Action.SWAP
    asked: list[tuple[StepGraph, int, dict]] = field(default_factory=list)

    def __call__(self, graph, limit_bytes, forced):
        self.asked.append((graph, limit_bytes, forced))
        count = len(graph.saved)
        return plan_of([self.action] * count)


def plan_of(actions) -> Plan:
    count = len(actions)
    values = dict.fromkeys(Plan.__dataclass_fields__, (0,) * count)
    scalars = {"peak_bytes": 0, "replay_ns": 0, "swap_bytes": 0}
    maps = {"prefetch": {}, "evictions": {}, "moves": {}}
    return Plan(**values | scalars | maps | {"actions": tuple(actions), "next_needs": ((),) * count})


@pytest.fixture
def planner():
    return Planner()


@pytest.fixture
def learner(planner):
    return Learner(Revising(0, planner))


def step(learner, signatures, *, peak=LIMIT, unevicted=UNEVICTED, limit=LIMIT, recorded=True, cost_ns=5, forced=()):
    """One step that saves a tensor per signature and needs them in reverse; returns the mode after each pack."""
    fits = limit is None or unevicted <= limit
    learner.recorded = recorded
    modes = []
    for i, signature in enumerate(signatures):
        learner.packed(signature, 1000 + 10 * i)
        if recorded:
            op = an_op(i, [], [i], cost_ns=cost_ns, name=f"aten.op{signature}")
            learner.op(op, {i: 10}, {i: Kind.ACTIVATION})
        learner.saved(i, 10, Kind.ACTIVATION, 1000 + 10 * i)
        modes.append(learner.mode)
    for i in reversed(range(len(signatures))):
        learner.needed(i, 2000 - 10 * i)
        learner.released(i)
    outcome = Outcome(
        peak_bytes=peak, unevicted_peak_bytes=unevicted, limit_bytes=limit, evicted=not fits, forced=dict(forced)
    )
    learner.end(3000, outcome)
    return modes


# -- from one step to the next ----------------------------------------------------------------------------------------
def test_an_observed_step_is_planned_the_next_time(learner, planner):
    assert step(learner, "abc") == [OBSERVE] * 3
    assert step(learner, "abc") == [PLANNED] * 3
    graph, limit, _ = planner.asked[0]
    assert limit == int(LIMIT * AIM)
    assert graph.saved == (0, 1, 2)
    assert graph.needs == (2, 1, 0)


def test_the_plan_is_at_hand_in_a_planned_step_only(learner):
    step(learner, "abc")
    assert learner.plan is None
    learner.packed("a", 0)
    assert learner.plan is not None
    learner.packed("x", 1)
    assert learner.plan is None


def test_times_count_from_the_first_save(learner, planner):
    step(learner, "abc")
    graph = planner.asked[0][0]
    assert graph.save_ns == (0, 10, 20)
    assert graph.need_ns == (980, 990, 1000)
    assert graph.end_ns == 2000


def test_the_forced_actions_reach_the_planner(learner, planner):
    step(learner, "abc", forced={1: Action.KEEP})
    assert planner.asked[0][2] == {1: Action.KEEP}


@pytest.mark.parametrize(("unevicted", "limit"), [(50, LIMIT), (LIMIT, LIMIT), (UNEVICTED, None)])
def test_a_step_that_fits_is_idle_the_next_time(learner, planner, unevicted, limit):
    assert step(learner, "abc", unevicted=unevicted, limit=limit) == [OBSERVE] * 3
    assert step(learner, "abc", unevicted=unevicted, limit=limit) == [IDLE] * 3
    assert planner.asked == []
    assert learner.plan is None


def test_a_step_that_fits_is_learned_unrecorded(learner):
    step(learner, "abc", unevicted=50, recorded=False)
    assert step(learner, "abc", unevicted=50, recorded=False) == [IDLE] * 3


def test_a_step_that_does_not_fit_and_was_not_recorded_teaches_nothing(learner, planner):
    step(learner, "abc", recorded=False)
    assert step(learner, "abc") == [OBSERVE] * 3
    assert len(planner.asked) == 1


def test_a_step_without_backward_teaches_nothing(learner):
    for i, signature in enumerate("abc"):
        learner.packed(signature, i)
        learner.saved(i, 10, Kind.ACTIVATION, i)
        learner.released(i)
    learner.end(10, OVERFULL)
    assert learner.profiles == []
    assert not learner.in_step


def test_without_a_planner_every_step_is_observed():
    learner = Learner(Revising(0, None))
    for _ in range(3):
        assert step(learner, "abc") == [OBSERVE] * 3


# -- other steps ------------------------------------------------------------------------------------------------------
def test_another_step_falls_back_and_is_learned(learner):
    step(learner, "abc")
    assert step(learner, "xyz") == [OBSERVE] * 3
    assert step(learner, "xyz") == [PLANNED] * 3
    assert step(learner, "abc") == [PLANNED] * 3, "the first is not forgotten"


def test_a_step_that_leaves_its_profile_falls_back_there(learner):
    step(learner, "abc")
    assert step(learner, "abz") == [PLANNED, PLANNED, OBSERVE]
    assert step(learner, "abz") == [PLANNED] * 3


def test_a_longer_step_falls_back_where_the_known_one_ended(learner):
    step(learner, "abc")
    assert step(learner, "abcd") == [PLANNED] * 3 + [OBSERVE]
    assert step(learner, "abcd") == [PLANNED] * 4


def test_a_shorter_step_is_learned_as_one_of_its_own(learner):
    step(learner, "abc")
    assert step(learner, "ab") == [PLANNED] * 2
    assert [len(profile.signatures) for profile in learner.profiles] == [2, 3]


def test_a_save_that_differs_switches_to_the_profile_with_the_same_beginning(learner, planner):
    step(learner, "abc")
    step(learner, "abz")
    learner.packed("a", 0)
    assert learner.current.signatures == tuple("abz"), "the one used last is followed first"
    learner.packed("b", 1)
    learner.packed("c", 2)
    assert learner.current.signatures == tuple("abc")
    assert learner.mode is PLANNED


def test_switching_may_lead_from_idle_to_planned(learner):
    step(learner, "abc")
    step(learner, "abz", unevicted=50)
    assert step(learner, "abc") == [IDLE, IDLE, PLANNED]


@pytest.mark.parametrize(
    ("steps", "expected"), [(["abc", "abz"], "abz"), (["abc", "abz", "abc"], "abz"), (["abz", "abc", "abz"], "abc")]
)
def test_the_profile_that_came_after_this_one_is_tried_first_else_the_one_used_last(learner, steps, expected):
    for kind in steps:
        step(learner, kind)
    learner.packed("a", 0)
    assert learner.current.signatures == tuple(expected)


def test_the_known_peak_is_that_of_the_step_under_way(learner):
    step(learner, "abc", unevicted=100)
    assert learner.known_peak_bytes == 0
    learner.packed("a", 0)
    assert learner.known_peak_bytes == 100


# -- surprises --------------------------------------------------------------------------------------------------------
def test_a_surprise_turns_an_idle_step_into_an_observed_one(learner):
    step(learner, "abc", unevicted=50)
    learner.packed("a", 0)
    assert learner.mode is IDLE
    learner.surprise()
    assert learner.mode is OBSERVE
    assert not learner.profiles[0].idle


def test_a_surprise_leaves_a_planned_step_to_its_plan(learner):
    step(learner, "abc")
    learner.packed("a", 0)
    learner.surprise()
    assert learner.mode is PLANNED


# -- the recorder -----------------------------------------------------------------------------------------------------
def test_the_recorder_is_wanted_until_a_step_is_known(learner):
    assert learner.wants_recorder
    step(learner, "abc", unevicted=50)
    assert not learner.wants_recorder


def test_a_plan_that_swaps_is_refined_and_stays_under_the_recorders_eye(learner):
    step(learner, "abc")
    for _ in range(REFINEMENTS):
        assert learner.wants_recorder
        step(learner, "abc")
    assert learner.wants_recorder


def test_a_plan_that_recomputes_always_needs_the_recorder(learner, planner):
    planner.action = Action.RECOMPUTE
    for _ in range(REFINEMENTS + 3):
        step(learner, "abc")
        assert learner.wants_recorder


# -- better plans -----------------------------------------------------------------------------------------------------
def test_op_times_are_the_least_seen(learner, planner):
    step(learner, "abc", cost_ns=50)
    step(learner, "abc", cost_ns=5)
    step(learner, "abc", cost_ns=20)
    costs = [{op.cost_ns for op in graph.ops} for graph, _, _ in planner.asked]
    assert costs == [{50}, {5}, {5}]


def test_a_replay_takes_what_it_does_beside_the_op_s_own_time(learner, planner):
    learner.revising.replay_ns = 7
    step(learner, "a", cost_ns=5)
    step(learner, "a", cost_ns=3)
    assert [[op.cost_ns for op in graph.ops] for graph, _, _ in planner.asked] == [[12], [10]]


def test_a_profile_is_refined_so_often_and_no_more(learner, planner):
    for _ in range(REFINEMENTS + 4):
        step(learner, "abc")
    assert len(planner.asked) == 1 + REFINEMENTS


def test_a_rehearsed_plan_is_made_again_only_for_other_ops(learner):
    """A rehearsal takes long, and what it says happens: with the same ops it would say the same."""
    asked = []

    def rehearse(graph, limit_bytes, forced):
        asked.append(graph.ops)
        return replace(plan_of([Action.SWAP] * len(graph.saved)), moves={0: Moves()})

    learner.revising.make_plan = rehearse
    step(learner, "abc", cost_ns=5)
    step(learner, "abc", cost_ns=5)
    assert len(asked) == 1
    step(learner, "abc", cost_ns=4)
    assert [op.cost_ns for op in asked[-1]] == [4, 4, 4] and len(asked) == 2


def test_only_recorded_steps_refine(learner, planner):
    step(learner, "abc")
    step(learner, "abc", recorded=False)
    assert len(planner.asked) == 1


def test_a_peak_over_the_limit_tightens_the_plan(learner, planner):
    step(learner, "abc")
    step(learner, "abc", peak=63, recorded=False)
    step(learner, "abc", peak=LIMIT, recorded=False)
    limits = [limit for _, limit, _ in planner.asked]
    assert len(limits) == 2
    assert limits[1] < limits[0]


def test_tightening_ends(learner, planner):
    step(learner, "abc")
    for _ in range(TIGHTENINGS + 4):
        step(learner, "abc", peak=LIMIT + 0.5, recorded=False)
    assert len(planner.asked) == 1 + TIGHTENINGS


def test_a_plan_as_tight_as_may_be_is_not_made_again(learner, planner):
    step(learner, "abc")
    for _ in range(4):
        step(learner, "abc", peak=10 * LIMIT, recorded=False)
    assert len(planner.asked) == 2
    assert min(limit for _, limit, _ in planner.asked) >= int(0.9 * LIMIT), "never so tight that training crawls"


def test_refine_keeps_the_newer_step_with_the_least_costs(learner, planner):
    step(learner, "abc", cost_ns=5)
    old = planner.asked[0][0]
    newer = replace(old, ops=tuple(replace(op, cost_ns=4 + op.id) for op in old.ops), end_ns=7777)
    found = refine(old, newer, late=False)
    assert [op.cost_ns for op in found.ops] == [4, 5, 5], "of 4, 5, 6 and 5, 5, 5"
    assert replace(found, ops=newer.ops) == newer
    other = replace(newer, ops=newer.ops[:2])
    assert refine(old, other, late=True) is other
    fewer = replace(newer, saved=newer.saved[:-1], floats_to=newer.floats_to[:-1])
    assert refine(old, fewer, late=True) is fewer, "positions of the longer one would lie behind its end"


def test_between_saves_and_needs_of_a_late_device_it_is_the_least_time_that_counts(learner, planner):
    """In the order in which they come: here a save, a need, two saves, and their needs."""
    step(learner, "abc")
    came = {"needs": (0, 2, 1), "needs_before": (0, 1, 1)}
    old = replace(planner.asked[0][0], **came, save_ns=(0, 30, 40), need_ns=(20, 90, 91), end_ns=100)
    newer = replace(old, save_ns=(1, 12, 92), need_ns=(11, 102, 122), end_ns=123)
    found = refine(old, newer, late=True)
    assert found.save_ns == (0, 11, 21)
    assert found.need_ns == (10, 31, 32)
    assert found.end_ns == 33
    for other in (replace(newer, needs=(0, 1, 2)), replace(newer, needs_before=(0, 0, 1))):
        assert refine(old, other, late=True) == other, "they came in another order"
    told = replace(newer, turns=(Turn((0,), None, 0, 1, ()),))
    assert refine(old, told, late=True) == told, "turns have times of their own"


@pytest.mark.parametrize("late", [True, False])
def test_ops_are_not_timed_in_the_last_step_whose_moments_count(learner, planner, late):
    """On a device that tells times later: there each op is between two events, which take time themselves."""
    if late:
        learner.revising.device_times = lambda log: StepTimes()
    learner.revising.replay_ns = 100
    known = [calls_in_step(learner, "xabyc", unmade="xy") for _ in range(2)]
    assert known == [[None] * 5] * 2
    assert [op.cost_ns for op in planner.asked[-1][0].ops] == [107, 107, 107]
    expected = [0, 7, 7, None, None] if late else [None] * 5
    assert calls_in_step(learner, "xabcy", unmade="xy") == expected, "from where the calls differ, they are timed"


def calls_in_step(learner, calls, unmade) -> list[int | None]:
    """A step that is recorded whole, each op of which takes 7 ns and makes something unless it is `unmade`; what was
    known of each before it ran."""
    known, made = [], 0
    for call in calls:
        known.append(learner.known_cost_ns(call))
        if call not in unmade:
            learner.op(an_op(made, [], [made], cost_ns=7), {made: 10}, {made: Kind.ACTIVATION})
            made += 1
        learner.called(call, call not in unmade)
    learner.begin(True)
    for record in range(made):
        learner.packed(record, record)
        learner.saved(record, 10, Kind.ACTIVATION, record)
    learner.needed(0, 9)
    learner.end(10, OVERFULL)
    return known


# -- a step without an end --------------------------------------------------------------------------------------------
def test_a_step_that_never_ends_is_followed_only_so_far(learner, planner, monkeypatch):
    """Something keeps one saved tensor for ever: the log must not grow with it, and the next step is learned again."""
    monkeypatch.setattr("delta.learner.LONGEST", 10)
    learner.recorded = True
    for i in range(25):
        learner.packed("x", i)
        learner.op(an_op(i, [], [i]), {i: 10}, {i: Kind.ACTIVATION})
        learner.saved(i, 10, Kind.ACTIVATION, i)
        learner.loose(i)
        learner.needed(i, i)
        learner.released(i)
    log = learner.log
    assert not (log.signatures or log.ops or log.saves or log.needs or log.releases or log.nbytes or log.loose_at)
    assert learner.mode is OBSERVE and learner.in_step
    learner.end(100, OVERFULL)
    assert not learner.profiles and not learner.in_step
    assert step(learner, "abc") == [OBSERVE] * 3
    assert step(learner, "abc") == [PLANNED] * 3
