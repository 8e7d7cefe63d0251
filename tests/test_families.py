"""Steps of one program at several sizes, without tensors. Step (b, t): f makes 10·b·t bytes, g 4·b·t², h 6·b·t."""

from sys import intern

import pytest
from builders import an_op

from delta.beside import Beside, Track
from delta.config import PlannerConfig
from delta.families import LEAST_SQUEEZE, FamilyLearner
from delta.learner import WATCHFUL
from delta.planner import PLANNERS, StepGraph, Task
from delta.planner.family import SAMPLES, round_up
from delta.profile import CRAMPED
from delta.revising import Outcome, Revising
from delta.routine import Way
from delta.types import Action, Encoding, Kind, Link, Look, Mode
from delta.units import Share

OBSERVE, IDLE, PLANNED = Mode.OBSERVE, Mode.IDLE, Mode.PLANNED
OPTIONS = PlannerConfig(kind="mimose", buffer=0)
ACTIONS = (Action.KEEP, Action.RECOMPUTE)


class Run:
    """A learner under a limit in bytes, or a share, that notes the graphs it asks plans for."""

    def __init__(self, limit=1000, share=None, options=OPTIONS, selective=False):
        self.asked: list[tuple[StepGraph, int]] = []
        self.limit = (lambda peak: int(share * peak)) if share else (lambda peak: limit)
        self.told: list[bool] = []  # whether a limit was that of the whole device
        self.learner = FamilyLearner(Revising(0, self._plan), limit=self._limit, options=options)
        self.learner.revising.selective = selective

    def _limit(self, peak_bytes, told):
        self.told.append(told)
        return self.limit(peak_bytes)

    def _plan(self, graph, limit_bytes, forced):
        self.asked.append((graph, limit_bytes))
        return PLANNERS["mimose"](Task(graph, limit_bytes, Link(1e9, 1e9), ACTIONS, forced, False, OPTIONS))

    def step(
        self,
        b,
        t,
        *,
        more=0,
        names="fgh",
        between=0,
        recorded=True,
        peak=0,
        kept=(),
        encodings=None,
        beside=None,
        evicted=True,
        needs=(2, 1, 0),
    ):
        """Returns the mode after each save. `more` bytes in g, other ops by other names, ops before the step; what the
        program has `kept` until backward, `encodings` by save order, what the device used `beside`, and what is asked
        for again."""
        learner, sizes = self.learner, [10 * b * t, 4 * b * t * t + more, 6 * b * t]
        learner.recorded = recorded
        for k in range(between):
            learner.op(
                an_op(k, [900 + k], [950 + k]),
                {900 + k: 5, 950 + k: 5},
                dict.fromkeys((950 + k,), Kind.ACTIVATION) | {900 + k: Kind.SOURCE},
            )
        modes = []
        for i, (name, nbytes) in enumerate(zip(names, sizes, strict=True)):
            look = Look(hash(name), (b, t) if i == 0 else (b, t, 3))
            learner.packed(hash((name, b, t)), 10 * i, look)
            read = i - 1 if i else 99
            op = an_op(100 + i, [read], [i], name=f"aten.{name}", cost_ns=b * t)
            learner.op(
                op,
                {read: ([1, *sizes])[i], i: nbytes},
                {read: Kind.ACTIVATION if i else Kind.SOURCE, i: Kind.ACTIVATION},
            )
            learner.saved(i, nbytes, Kind.ACTIVATION, 10 * i)
            if encodings and i in encodings:
                learner.encodable(i, encodings[i])
            modes.append(learner.mode)
        learner.still_used(set(kept))
        for i in needs:
            learner.needed(i, 100 - i)
        for i in (2, 1, 0):
            learner.released(i)
        whole = sum(sizes)
        outcome = Outcome(
            peak_bytes=peak,
            unevicted_peak_bytes=whole,
            limit_bytes=self.limit(whole),
            evicted=evicted,
            forced={},
            beside=beside,
        )
        learner.end(200, outcome)
        return modes

    def warm(self):
        return [self.step(b, t)[-1] for b, t in ((4, 10), (4, 14), (2, 12))]


@pytest.fixture
def run():
    return Run()


@pytest.mark.parametrize(
    ("peak", "unevicted", "limit", "evicted", "fitted"),
    [
        (9, 9, 9, False, True),
        (9, 9, 9, True, False),
        (10, 9, 9, False, False),
        (8, 10, 9, False, False),
        (10, 10, None, True, True),
    ],
)
def test_a_step_has_fitted_where_nothing_had_to_go_for_its_limit(
    peak: int, unevicted: int, limit: int | None, evicted: bool, fitted: bool
) -> None:
    at = Outcome(peak_bytes=peak, unevicted_peak_bytes=unevicted, limit_bytes=limit, evicted=evicted, forced={})
    assert at.fitted == fitted


def test_no_more_steps_are_timed_than_a_family_is_observed_for(run):
    """Of a program without two steps alike each would be."""
    timed = []
    for first in "abcdefgh":
        run.learner.recorded = True
        run.learner.packed(0, 0, Look(hash(first), (4, 10)))
        timed.append(run.learner.is_timed)
        run.learner.recorded = False
        assert not run.learner.is_timed
        run.learner.abandon()
        run.step(4, 10, names=f"{first}gh")
    assert timed == [True] * OPTIONS.observe + [False] * (len(timed) - OPTIONS.observe)


def bytes_of(graph):
    return [graph.nodes[node].nbytes for node in graph.saved]


def test_an_unseen_size_is_planned_before_it_runs(run):
    assert run.warm() == [OBSERVE] * 3
    assert run.step(3, 16) == [PLANNED] * 3
    graph, limit = run.asked[-1]
    assert bytes_of(graph) == [480, 4 * 3 * 256, 288]
    assert limit == 1000
    assert [op.cost_ns for op in graph.ops] == [48] * 3


def test_an_observed_size_needs_no_warm_up(run):
    run.step(4, 10)
    assert run.step(4, 10) == [PLANNED] * 3
    assert run.step(4, 11) == [OBSERVE] * 3


def test_more_sizes_may_be_observed_than_are_remembered():
    count = SAMPLES + 3
    run = Run(options=PlannerConfig(kind="mimose", buffer=0, observe=count))
    assert [run.step(4, 10 + t)[-1] for t in range(count)] == [OBSERVE] * count
    assert len(run.learner.families[0].sizes) == SAMPLES
    assert run.step(4, 11 + count) == [PLANNED] * 3


def test_what_the_program_holds_in_any_step_is_not_planned_to_go(run):
    """Storage 1 of 4·b·t² bytes alone would be enough, but letting go of it would free nothing."""
    for kept, (b, t) in zip(({1}, set(), set()), ((4, 10), (4, 14), (2, 12)), strict=True):
        run.step(b, t, kept=kept)
    run.step(3, 16)
    graph, _ = run.asked[-1]
    assert [graph.nodes[node].evictable for node in graph.saved] == [True, False, True]
    plan = PLANNERS["mimose"](Task(graph, 0, Link(1e9, 1e9), ACTIONS, {}, False, OPTIONS))
    assert plan.actions == (Action.RECOMPUTE, Action.KEEP, Action.KEEP), "and the last one is needed at once"


def test_an_encoded_form_is_as_much_larger_as_its_storage(run):
    for b, t in ((4, 10), (4, 14), (2, 12)):
        run.step(b, t, encodings={2: Encoding(6 * b * t // 8, 8 * b * t, 4 * b * t, stand_in=True)})
    run.step(3, 16)
    graph, _ = run.asked[-1]
    node = graph.nodes[graph.saved[2]]
    assert (node.nbytes, node.encoded_bytes, node.encode_ns, node.decode_ns) == (288, 36, 384, 192)
    assert node.stand_in


def test_a_size_that_fits_is_idle():
    run = Run(limit=100_000)
    run.warm()
    assert run.step(3, 16) == [IDLE] * 3
    assert run.asked == []


def test_a_size_that_was_thought_to_fit_and_did_not_is_planned_from_then_on():
    run = Run(limit=100_000)
    run.warm()
    assert run.step(3, 16) == [IDLE] * 3
    run.learner.packed(hash("f"), 0, Look(hash("f"), (3, 16)))
    run.learner.surprise()
    run.learner.abandon()
    assert run.step(3, 16) == run.step(3, 16) == [PLANNED] * 3
    assert len(run.asked) == 1


def test_while_inputs_keep_their_size_and_fit_nothing_need_be_recorded():
    run = Run(limit=100_000)
    learner = run.learner
    for _ in range(OPTIONS.observe):
        assert not learner.all_idle
        run.step(4, 10, evicted=False)
    assert learner.all_idle and not learner.wants_recorder
    looks = [Look(hash("f"), (4, 10)), Look(hash("f"), (2, 20)), Look(hash("g"), (4, 10))]
    assert [learner.goes_on(look) for look in looks] == [True, False, False]
    learner.packed(0, 0, looks[1])
    assert not learner.all_idle, "from its first save on another one is recorded"
    learner.abandon()
    idle = []
    for b, t in ((2, 20), (2, 20), (4, 10), (4, 10), (4, 10)):
        run.step(b, t, evicted=False)
        idle.append(learner.all_idle)
    assert idle == [False] * 4 + [True]


@pytest.mark.parametrize("how", [{"evicted": True}, {"peak": 100_001}, {"more": 100_000}])
def test_what_does_not_fit_is_recorded(how):
    run = Run(limit=100_000)
    for _ in range(OPTIONS.observe):
        run.step(4, 10, evicted=False)
    run.step(4, 10, **{"evicted": False, **how})
    assert not run.learner.all_idle


def test_where_data_come_in_another_way_that_begins_anew():
    run = Run(limit=100_000)
    for _ in range(OPTIONS.observe):
        run.step(4, 10, evicted=False)
    run.learner._forget_steps()
    assert not run.learner.all_idle


def test_sizes_that_round_up_to_the_same_share_a_plan(run):
    run.warm()
    assert run.step(4, 65) == run.step(4, 66) == [PLANNED] * 3
    assert len(run.asked) == 1
    assert bytes_of(run.asked[0][0])[0] == 10 * 4 * 66
    run.step(4, 67)
    assert len(run.asked) == 2


def test_the_oldest_plans_are_forgotten(run, monkeypatch):
    monkeypatch.setattr("delta.families.CACHED", 2)
    run.warm()
    for t in (16, 18, 20, 20, 18, 16):
        run.step(3, t)
    assert [bytes_of(graph)[0] // 30 for graph, _ in run.asked] == [16, 18, 20, 16]


def test_without_a_limit_nothing_is_planned():
    run = Run(limit=None)
    run.warm()
    assert run.step(3, 16) == [OBSERVE] * 3
    assert run.asked == []


def test_under_a_share_a_plan_is_not_for_a_smaller_limit():
    """Length 64 of a plan for 80: its limit, a share of its own peak, is far lower than that of 80."""
    run = Run(share=0.5, options=PlannerConfig(kind="mimose", buffer=0, rounding="25%"))
    run.warm()
    run.step(4, 80)
    run.step(4, 79)
    assert [bytes_of(graph)[0] for graph, _ in run.asked] == [3200, 3200]
    sizes = [10 * 4 * 79, 4 * 4 * 79 * 79, 6 * 4 * 79]
    assert run.asked[1][1] == sum(sizes) // 2, "of the step's own peak, not of the rounded one's"


def test_more_bytes_than_predicted_end_the_plan_there_and_are_learned(run):
    run.warm()
    assert run.step(3, 16, more=1) == [PLANNED, OBSERVE, OBSERVE]
    assert run.step(3, 16, more=1) == [PLANNED] * 3


def test_fewer_bytes_than_predicted_are_no_harm_and_are_learned(run):
    run.warm()
    assert run.step(3, 16, more=-500) == [PLANNED] * 3
    assert (3, 16) in run.learner.families[0].sizes


def test_what_was_foreseen_is_not_learned_again(run):
    run.warm()
    run.step(3, 16)
    assert (3, 16) not in run.learner.families[0].sizes


def test_another_structure_is_another_family(run):
    run.warm()
    assert run.step(3, 16, names="fgx") == [PLANNED, PLANNED, OBSERVE]
    assert len(run.learner.families) == 2
    assert run.step(3, 16, names="xyz") == [OBSERVE] * 3
    assert run.step(5, 20) == [PLANNED] * 3


def test_ops_between_two_steps_make_no_other_family(run):
    run.step(4, 10)
    run.step(4, 14, between=2)
    run.step(2, 12, between=1)
    assert len(run.learner.families) == 1
    assert run.step(3, 16) == [PLANNED] * 3


def test_a_step_that_was_not_recorded_teaches_nothing(run):
    run.step(4, 10, recorded=False)
    assert run.learner.families == []


def test_a_new_batch_is_planned_for_the_most_it_may_take(run):
    for t in (10, 14, 12):
        run.step(4, t)
    assert run.step(5, 16)[0] is PLANNED
    assert bytes_of(run.asked[-1][0])[0] == 10 * 4 * 16 * 25 / 16
    assert run.step(6, 16) == [PLANNED] * 3
    assert bytes_of(run.asked[-1][0])[0] == 10 * 6 * 16, "by now the batch has varied"


def test_the_room_for_the_next_save_is_known_while_observing(run):
    run.step(4, 10)
    run.learner.packed(0, 0, Look(hash("f"), (4, 20)))
    assert run.learner.mode is OBSERVE
    run.learner.saved(0, 800, Kind.ACTIVATION, 0)
    assert run.learner.next_bytes == 4 * 4 * 10 * 10 * 4


def test_a_missed_limit_makes_plans_tighter(run):
    run.warm()
    run.step(3, 16, peak=1100)
    run.step(3, 16)
    assert run.asked[-1][1] == int(1000 * 1000 / 1100)


def test_they_become_tighter_down_to_a_bound(run):
    run.warm()
    for _ in range(3):
        run.step(3, 16, peak=1150)
    run.step(3, 16)
    assert run.asked[-1][1] == LEAST_SQUEEZE * 1000


def test_a_forward_without_backward_teaches_nothing(run):
    run.step(4, 10, needs=())
    assert run.learner.families == []


@pytest.mark.parametrize(
    ("size", "up"), [(1, 1), (33, 33), (39, 39), (40, 40), (41, 42), (79, 80), (81, 84), (1000, 1024)]
)
def test_rounding(size, up):
    assert round_up(size, Share(0.05)) == up


def test_rounding_never_shrinks_and_is_bounded():
    for size in range(1, 3000):
        assert size <= round_up(size, Share(0.05)) <= 1.05 * size + 1e-9 or round_up(size, Share(0.05)) == size
        assert round_up(size, Share(0.05)) <= round_up(size + 1, Share(0.05))


# -- steps that follow a routine --------------------------------------------------------------------------------------
HELD = 3600  # bytes: of (3, 16) storage 1 has to go, and all is well then; of (3, 17) nothing is enough


def used(b, t):
    """What the device uses beside a step (b, t): a tenth of what it saves, and as much again at the last one."""
    tenth = (16 * b * t + 4 * b * t * t) // 10
    return Beside(Track([100, 100, 100], [0, 0, tenth]), Track([100 + tenth, 100, 100], [tenth, tenth, 0]))


@pytest.mark.parametrize("size", [(3, 16), (4, 10)])
def test_a_plan_is_told_what_the_device_uses_beside_a_step_of_that_size(size):
    run = Run(limit=9000)
    for b, t in ((4, 10), (4, 20), (2, 12)):
        run.step(b, t, beside=used(b, t))
    assert not any(run.told), "nothing was known before"
    run.step(*size)
    assert run.told[-1]
    family = run.learner.families[0]
    run.learner.packed(hash(("f", *size)), 0, Look(hash("f"), size))
    beside, graph = run.learner.beside, run.learner.current.graph
    assert beside == family.beside.at(graph.unevicted_bytes)
    rounded = sum(bytes_of(graph)) // 10
    assert [abs(found - known) <= 2 for found, known in zip(beside.needs.working, (rounded, rounded, 0), strict=True)]
    assert run.learner.beside_saves == beside.saves.most_bytes and run.learner.beside_needs == beside.needs.most_bytes


def test_before_enough_sizes_are_known_a_step_may_use_what_those_did():
    run = Run(limit=9000)
    run.step(4, 10, beside=used(4, 10))
    learner = run.learner
    learner.packed(hash(("f", 4, 20)), 0, Look(hash("f"), (4, 20)))
    assert learner.plan is None
    assert learner.beside == learner.families[0].beside.at(sum(saved.most for saved in learner._expected.saved))
    assert learner.beside_saves == learner.beside.saves.most_bytes != ()


def test_a_step_fits_that_leaves_room_for_what_is_beside_it():
    """(2, 12) saves 1,536 bytes, the largest of them 1,152; a third as much again is for what comes."""
    whole = 1536 + 1152
    for more, idle in ((0, True), (-1, False)):
        beside = Beside(Track([100, 100, 300], [0, 0, 50]), Track([100, 400, 100], [60, 0, 0]))
        run = Run(limit=whole + 400 + more)
        run.step(2, 12, beside=beside)
        assert run.step(2, 12)[-1] is (IDLE if idle else PLANNED)


class Followed(Run):
    """Calls are told of as the runtime does: those that the routine does not know, or that have to be recorded."""

    def __init__(self, limit=HELD, names="fgh", forced=(), **options):
        super().__init__(limit=limit, selective=True, **options)
        self.names, self.forced = names, dict(forced)  # of its ops; what a rule says of storages

    def step(
        self,
        b,
        t,
        *,
        more=0,
        names=None,
        before=(),
        backward_first=False,
        twice=False,
        peak=0,
        recording=True,
        mask=0,
        odd=False,
    ):
        """`backward_first`: the first storage is needed before the third is saved; `twice`: after all were saved."""
        learner, names = self.learner, names or self.names
        sizes = [10 * b * t, 4 * b * t * t + more, 6 * b * t, b * t][: len(names)]
        for k, name in enumerate(before):
            self._call(name, 900 + k, [], 5)
        if mask:
            self._call("mask", 800, [], mask)
        modes = []
        for i, (name, nbytes) in enumerate(zip(names, sizes, strict=True)):
            if odd and i == 1:
                self._call("odd", 950, [], 5)
            self._call(name, i, [i - 1] * bool(i) + [800] * bool(mask), nbytes, b * t)
            if not i:
                learner.begin(recording)
            if i == 2 and backward_first:
                learner.needed(0, 50)
            structure = hash(name)
            learner.packed(structure, 10 * i, Look(structure, (b, t) if not i else (b, t, 3)))
            learner.placed(i)
            learner.saved(i, nbytes, Kind.ACTIVATION, 10 * i)
            modes.append(learner.mode)
        self.followed = learner.routine is not None
        self.recorded = learner.recorded
        if twice:
            learner.needed(0, 50)
        for i in reversed(range(len(modes))):
            learner.needed(i, 100 - i)
            learner.released(i)
        whole = sum(sizes)
        outcome = Outcome(
            peak_bytes=peak, unevicted_peak_bytes=whole, limit_bytes=self.limit(whole), evicted=True, forced=self.forced
        )
        learner.end(200, outcome)
        return modes

    def _call(self, name, record, read, nbytes, cost_ns=1):
        learner, call = self.learner, intern(name)
        if learner.routine is not None and learner.routine.way(call) is None and learner.in_step:
            learner.leave_routine()
        if learner.routine is None:
            op = an_op(record, read, [record], name=f"aten.{name}", cost_ns=cost_ns)
            learner.op(op, {record: nbytes}, {record: Kind.ACTIVATION})
            learner.called(call, made=True)

    def warm(self):
        for b, t in ((4, 10), (4, 14), (2, 12)):
            assert self.step(b, t) == [OBSERVE] * len(self.names) and not self.followed


@pytest.fixture
def followed():
    run = Followed()
    run.warm()
    return run


def test_a_size_that_was_never_seen_goes_by_a_routine(followed):
    assert followed.step(3, 16) == [PLANNED] * 3 and followed.followed and not followed.recorded
    graph, limit_bytes = followed.asked[-1]
    assert bytes_of(graph) == [480, 4 * 3 * 256, 288] and limit_bytes == HELD
    assert followed.step(3, 16) == [PLANNED] * 3 and followed.followed
    assert len(followed.asked) == 1
    assert (3, 16) not in followed.learner.families[0].sizes, "nothing of it was recorded"


@pytest.mark.parametrize(
    ("forced", "gone", "ways"),
    [
        ({}, 0, [Way.RECORD, Way.PASS, Way.PASS, Way.PASS]),  # what begins a step has its record
        ({0: Action.KEEP}, 1, [Way.PASS, Way.NOTE, Way.PASS, Way.PASS]),
    ],
)
def test_what_the_plan_drops_is_recorded_and_the_rest_passes(forced, gone, ways):
    followed = Followed(limit=3850, names="fghi", forced=forced)
    followed.warm()
    followed.step(3, 16)
    (profile,) = followed.learner._plans.values()
    assert [v for v, action in enumerate(profile.plan.actions) if action is Action.RECOMPUTE] == [gone]
    assert profile.routine.ways == ways


def test_a_size_that_fits_goes_by_a_routine_too():
    roomy = Followed(limit=100_000)
    roomy.warm()
    assert roomy.step(3, 16) == [PLANNED] * 3 and roomy.followed, "one that fits goes by a plan that says so"
    (profile,) = roomy.learner._plans.values()
    assert profile.plan.idle and set(profile.routine.ways) == {Way.PASS}


def test_too_few_recorded_steps_are_followed_by_none():
    run = Followed()
    for _ in range(OPTIONS.observe):
        run.step(4, 10)
        assert not run.followed
    assert run.step(4, 10) == [PLANNED] * 3 and run.followed, "one size will do, if its steps are all there are"


def test_a_dim_that_never_varied_is_recorded_until_it_has():
    run = Followed()
    for t in (10, 14, 12, 11):
        run.step(4, t)
    assert run.followed
    assert run.step(6, 8) == [PLANNED] * 3 and not run.followed
    assert run.step(5, 8) == [PLANNED] * 3 and run.followed


def test_where_bytes_do_not_follow_from_the_size_steps_are_recorded():
    run = Followed(limit=100_000)
    for t, more in ((10, 0), (14, 5000), (12, 50), (11, 9000), (13, 0), (15, 7000)):
        run.learner._whole = 0
        run.step(4, t, more=more)
    run.learner._whole = 0
    assert run.step(4, 16) == [PLANNED] * 3 and not run.followed and run.recorded


def test_a_storage_larger_than_foretold_ends_the_routine_and_steps_are_recorded_for_a_while(followed):
    assert followed.step(3, 16, more=1) == [PLANNED, OBSERVE, OBSERVE] and not followed.followed
    for _ in range(WATCHFUL):
        assert not followed.followed
        assert OBSERVE not in followed.step(3, 15)
    followed.step(3, 15)
    assert followed.followed


def test_one_that_is_within_the_step_but_not_within_the_plan_for_another_ends_it_too(followed):
    """Storage 1 of size (3, 16) would be the largest that a plan for it has room for; the same plan serves (3, 16)."""
    followed.step(3, 16)
    followed.learner._plans[followed.learner.families[0], (3, 16)].routine.most_bytes = (480, 4 * 3 * 256 - 1, 288)
    assert followed.step(3, 16) == [PLANNED, OBSERVE, OBSERVE] and not followed.followed


def test_one_that_the_plan_has_room_for_but_its_size_does_not_explain_ends_it_too():
    """The plan for (4, 65) is made for (4, 66)."""
    run = Followed(limit=10**6)
    run.warm()
    assert run.step(4, 65) == [PLANNED] * 3 and run.followed
    assert run.step(4, 65, more=1) == [PLANNED, OBSERVE, OBSERVE] and not run.followed


def test_a_step_of_which_something_was_not_seen_is_followed_by_none(followed):
    assert followed.step(3, 16, recording=False) == [PLANNED] * 3 and not followed.followed


def test_nothing_is_learned_of_one_that_left_its_routine_and_then_was_larger_than_foretold(followed):
    sizes = followed.learner.families[0].sizes
    followed.step(3, 16, odd=True, more=1)
    assert not followed.recorded
    assert len(followed.learner.families) == 1 and followed.learner.families[0].sizes == sizes


def test_one_that_ends_early_is_followed_by_some_that_are_recorded(followed):
    assert followed.step(3, 16, names="fg") == [PLANNED] * 2 and followed.followed
    assert followed.step(3, 16) == [PLANNED] * 3 and not followed.followed


def test_what_many_ops_read_stays_and_counts(monkeypatch):
    monkeypatch.setattr("delta.planner.common.MANY", 3)
    run = Followed()
    for size in ((4, 10), (4, 14), (2, 12)):
        run.step(*size, mask=5)
    run.step(3, 16, mask=5)
    graph, limit_bytes = run.asked[-1]
    assert run.followed and (graph.common_bytes, limit_bytes) == (5, HELD - 5)


def test_other_calls_end_it_and_another_structure_is_learned(followed):
    followed.step(3, 16)
    assert followed.step(3, 16, names="fgx")[:2] == [PLANNED] * 2 and not followed.followed
    assert followed.step(3, 16, names="fgx")[-1] is OBSERVE, "recorded whole, and learned"
    assert len(followed.learner.families) == 2


def test_what_comes_before_the_first_save_may_stay_away_or_be_more(followed):
    followed.step(3, 16, before="xy")
    assert followed.followed
    followed.step(3, 15)
    assert followed.followed


def test_where_backward_begins_within_forward_there_is_none():
    run = Followed()
    for t in (10, 14, 12, 13, 15):
        run.step(4, t, backward_first=True)
        assert not run.followed


def test_steps_whose_backward_begins_within_forward_are_of_another_family():
    run = Followed()
    run.step(4, 10, twice=True)
    run.step(4, 13, backward_first=True)
    assert len(run.learner.families) == 2


def test_notes_that_find_no_room_twice_are_no_more():
    followed = Followed(limit=3850, names="fghi", forced={0: Action.KEEP})
    followed.warm()
    followed.step(3, 16)
    (profile,) = followed.learner._plans.values()
    noted = profile.routine.noted
    for _ in range(CRAMPED):
        assert profile.routine.noted == noted
        profile.cramped += 1
        followed.step(3, 16)
    assert noted and not profile.routine.noted and profile.routine.most_bytes


def test_a_missed_limit_makes_plans_tighter_where_routines_are_followed_too(followed):
    followed.step(3, 16, peak=HELD + 10)
    followed.step(3, 16)
    assert followed.followed and followed.asked[-1][1] == int(HELD * HELD / (HELD + 10))


def test_a_plan_that_does_not_hold_the_limit_is_no_routine(followed):
    """More can go of a step that is recorded than its plan has."""
    for _ in range(2):
        assert followed.step(3, 17) == [PLANNED] * 3 and not followed.followed and followed.recorded
    assert len(followed.asked) == 1, "and made once"


def test_the_simulator_is_told_how_ops_are_recorded_in_such_steps():
    run = Followed()
    for b, t in ((4, 10), (4, 14), (2, 12)):
        run.step(b, t, before="x")
        assert run.learner.steady_ways() is None
    run.step(3, 16, before="x")
    assert run.followed
    assert run.learner.steady_ways() == [Way.PASS, Way.RECORD, Way.PASS, Way.PASS], "the first is in no graph"
    run.learner._whole = 1
    run.step(3, 16, before="x")
    assert run.learner.steady_ways() is None


def test_forgotten_families_leave_nothing(followed, monkeypatch):
    monkeypatch.setattr("delta.families.KINDS", 2)
    for names in ("abc", "bcd", "cde"):
        followed.step(4, 10, names=names)
    assert len(followed.learner.families) == 2
    assert set(followed.learner._courses) == set(followed.learner.families)


def test_all_is_learned_anew_where_data_come_in_several_ways():
    run = Followed()
    run.warm()
    learner = run.learner
    assert learner.families and learner._courses
    learner._forget_steps()
    assert not (learner.families or learner._courses or learner._plans or learner.profiles)
