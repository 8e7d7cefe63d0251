"""Programs that go one of several ways: a step that goes otherwise than expected goes on by the routine of that way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from covering import in_pairs
from test_learner import plan_of
from torch import Tensor, nn

import delta
from delta.branches import LONGEST, OVERRUN, WIDER, Branching, Fork, done_by, fork_of, read_by_trunk, trunk_of
from delta.learner import WATCHFUL, Learner
from delta.planner.steplog import StepLog, build_graph
from delta.planning import Planning
from delta.profile import Profile
from delta.revising import Ended, Outcome, Revising
from delta.routine import Routine, Way
from delta.types import Action

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]
P, R, N = Way.PASS, Way.RECORD, Way.NOTE


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A better plan, found beside the training in its own time, has its kind of step learned anew."""
    monkeypatch.setattr(Planning, "open_tasks", [])


# -- one routine for another -------------------------------------------------------------------------------------------
def routine(calls: str = "abcd", ways: str = "prnp", aside: Iterable[object] | None = "", **more: object) -> Routine:
    taken = [{"p": P, "r": R, "n": N}[way] for way in ways]
    given: dict[str, object] = {"orders": (0, 1, 2), "dropped": {1}, "read": {0}, "noted": {1}, **more}
    named = None if aside is None else frozenset(aside)
    return Routine([(call, op) for op, call in enumerate(calls)], taken, aside=named, **given)  # type: ignore[arg-type]


def test_a_call_for_nothing_that_is_saved_may_come_anywhere() -> None:
    way = routine(aside="x")
    assert [way.way(call) for call in "xaxxb"] == [P, P, P, P, R]
    assert way.calls == 2
    assert way.way("x") is P and way.cost_ns is None
    way.passed()
    assert way.passing == [None] * 5, "what comes next is c"
    assert way.way("y") is None


def after(calls: str, of: Routine) -> Routine:
    for call in calls:
        of.way(call)
    return of


@pytest.mark.parametrize(
    ("other", "goes_on"),
    [
        (routine("abxy"), True),
        (routine("abxy", "prpr"), True),
        (routine("abxy", orders=(0, 1, 5), dropped={1, 5}, read={0, 5}, noted={1, 5}), True),  # later ones
        (routine("abc"), False),  # another call comes next
        (routine("ab", "pr"), False),
        (routine("aex"), False),
        (routine("abxy", "ppnp"), False),  # b has no recipe
        (routine("abxy", orders=(0, 0)), False),
        (routine("abxy", dropped={0, 1}), False),
        (routine("abxy", read=()), True),
        (routine("abxy", read={0, 1}), False),
        (routine("abxy", read={0, 2, 5}), True),  # of what is saved later
        (routine("abxy", noted=()), False),
        (routine("abxy", before=1), False),
        (routine("abxy", aside=None), False),
    ],
)
def test_a_step_goes_on_by_a_routine_that_has_done_the_same(other: Routine, goes_on: bool) -> None:
    left = after("ab", routine())
    assert other.go_on_from(left, "x", packs=2) == goes_on
    assert other.calls == (2 if goes_on else 0)


def test_where_a_save_differs_no_call_is_asked_about() -> None:
    assert routine("ab", "pr").go_on_from(after("ab", routine()), None, packs=2)
    assert not routine("aex").go_on_from(after("ab", routine()), None, packs=2)


# -- trainings ---------------------------------------------------------------------------------------------------------
class Loop(nn.Module):
    """A block so many times, then a head; or the blocks that chance leaves."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, times: int | None) -> Tensor:
        for _ in range(6 if times is None else times):
            if times is None and torch.rand(()) < 0.2:
                continue
            x = x + self.block(x)
        head: Tensor = self.head(x)
        return head


def train(ways: Iterable[int | None], device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    model, found = Loop().to(device), list[Tensor]()
    for times in ways:
        model.zero_grad()
        loss = model(torch.randn(32, 16, device=device), times).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@dataclass
class Seen:
    """Of each step: the limit, the peak, and whether it was recorded whole or followed routines to its end."""

    limits: list[int | None] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    recorded: list[bool] = field(default_factory=list)
    followed: list[bool] = field(default_factory=list)
    learner: Learner | None = None

    @property
    def profiles(self) -> list[Profile]:
        assert self.learner is not None
        return self.learner.profiles


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    found, learn = Seen(), Learner._learn

    def noting(learner: Learner, outcome: Outcome) -> None:
        found.learner = learner
        found.limits.append(outcome.limit_bytes)
        found.peaks.append(outcome.peak_bytes)
        found.recorded.append(learner.recorded)
        found.followed.append(learner.routine is not None)
        learn(learner, outcome)

    monkeypatch.setattr(Learner, "_learn", noting)
    yield found


def by_chance(steps: int, most: int = 6, seed: int = 0) -> list[int | None]:
    return [random.Random(f"{seed} {step}").randint(1, most) for step in range(steps)]


def evicting(
    ways: Iterable[int | None], limit: str | None, policy: str = "delta", device: str = "cpu", **more: object
) -> delta.Report:
    ways, on = list(ways), "cuda" if device == "cuda" else "cpu"
    plain = train(ways, on)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 256, "budget.reserve": 0})
    with delta.evict(activations=limit, policy=chosen, device=device, **more) as run:  # type: ignore[arg-type]
        assert all(map(torch.equal, train(ways, on), plain))
    return run.report()


@in_pairs(
    what=["loops", "dropped layers"],
    policy=["delta", "recompute", "swap"],
    device=["cpu", "chaos", pytest.param("cuda", marks=pytest.mark.cuda)],
)
def test_most_steps_follow_routines_once_the_ways_are_known(what: str, policy: str, device: str, seen: Seen) -> None:
    ways = [None] * 90 if what == "dropped layers" else by_chance(90)
    evicting(ways, "20KiB", policy, device)
    if device == "cuda":  # which ways are worth a plan is another matter there
        return
    assert sum(seen.followed[45:]) > 15
    assert sum(seen.recorded[45:]) < 25


@pytest.mark.parametrize("policy", ["delta", "recompute"])
def test_limits_hold_once_the_ways_are_known(policy: str, seen: Seen) -> None:
    report = evicting(by_chance(90), "20KiB", policy)
    assert report.evictions
    assert sum(peak > 20 * 1024 for peak in seen.peaks[45:]) <= 2, "but for a step that leaves its routine"


@pytest.mark.parametrize("policy", ["delta", "recompute"])
def test_under_a_budget_too(policy: str, measured: int, seen: Seen) -> None:
    budget_bytes = measured + 24 * 1024
    assert evicting(by_chance(90), None, policy, budget=budget_bytes).evictions
    assert set(seen.limits) == {budget_bytes}
    assert sum(seen.followed[45:]) > 40
    assert sum(peak > budget_bytes for peak in seen.peaks[45:]) <= 2, "but for a step that leaves its routine"


def test_plans_agree_up_to_where_the_ways_part(seen: Seen) -> None:
    evicting(by_chance(60), "20KiB")
    largest = max(seen.profiles, key=lambda profile: profile.unevicted_peak_bytes)
    assert largest.trunk is None and largest.plan is not None
    others = [profile for profile in seen.profiles if profile.trunk is largest and profile.trunk_plan is largest.plan]
    assert others
    for other in others:
        fork = fork_of(other, largest)
        assert other.plan is not None and fork is not None
        saved = len(set(other.course.orders[: fork.packs]))
        assert saved > 1 and other.plan.actions[:saved] == largest.plan.actions[:saved]
        assert other.fixed == done_by(largest, fork, other)


def test_a_share_is_one_of_the_largest_way(seen: Seen) -> None:
    """Nobody knows at the first save which it will be."""
    report = evicting(by_chance(60), "50%")
    late = seen.limits[30:]
    assert late and set(late) == {report.budget_bytes}
    assert max(seen.peaks[30:]) <= (report.budget_bytes or 0)


def test_a_way_of_one_step_in_sixteen_changes_no_plan(seen: Seen) -> None:
    evicting([3, 5, 5, 5, *(5 if step % 16 == 8 else 3 for step in range(70))], "10KiB")
    assert len(seen.profiles) == 2 and not any(profile.fixed for profile in seen.profiles)
    assert sum(seen.followed) > 50


@pytest.mark.parametrize(("left", "peak_bytes", "wary"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_what_leaves_all_known_ways_and_is_over_its_limit_has_the_next_steps_recorded(
    left: bool, peak_bytes: int, wary: bool
) -> None:
    learner = Learner(Revising(0, None, plan_on=lambda *asked: None))
    for _ in range(3):
        learner._branching.ended(otherwise=True)
    learner._left_midway = left
    learner.end(0, Outcome(peak_bytes=peak_bytes, unevicted_peak_bytes=2, limit_bytes=1, evicted=False, forced={}))
    assert learner._branching.wary == (OVERRUN - 1 if wary else 0)


@pytest.mark.parametrize(("branching", "left"), [(True, True), (True, False), (False, True)])
def test_a_step_that_left_its_routine_says_nothing_of_the_plan_for_the_way_that_it_went(
    branching: bool, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    revised: list[Profile] = []
    monkeypatch.setattr(Revising, "revise", lambda revising, profile, ended: revised.append(profile))
    learner = Learner(Revising(0, None, plan_on=lambda *asked: None))
    learner.profiles = [Profile((), build_graph(StepLog(), 0), 0, {}, 1.0)]
    for _ in range(3):
        learner._branching.ended(otherwise=branching)
    learner._left_midway = left
    learner.end(0, Outcome(peak_bytes=1, unevicted_peak_bytes=1, limit_bytes=1, evicted=False, forced={}))
    assert revised == ([] if branching and left else learner.profiles)


def test_after_a_larger_way_was_learned_so_are_the_next_ones(seen: Seen) -> None:
    known = by_chance(60, most=3)
    evicting([*known, *[5] * (1 + WATCHFUL), *known[:WIDER]], "8KiB")
    learned = seen.recorded.index(True, 60)
    assert sum(seen.recorded[learned : learned + WIDER]) > WIDER // 2


def test_how_long_steps_are_recorded_after_one_that_was_over_its_limit() -> None:
    branching, found = Branching(possible=True), list[int]()
    for _ in range(8):
        branching.overran()
        found.append(branching.wary)
    assert found == [8, 16, 32, 64, 128, 256, 256, 256] and (OVERRUN, LONGEST) == (8, 256)
    branching.came(1.5)
    assert branching.wary == 256
    for _ in range(256):
        branching.ended(otherwise=False)
    assert branching.wary == 0
    branching.came(1.009)
    assert branching.wary == 0
    branching.came(1.02)
    assert branching.wary == WIDER


def test_a_program_goes_several_ways_when_an_eighth_of_its_steps_went_otherwise() -> None:
    branching, never = Branching(possible=True), Branching(possible=False)
    for step in range(20):
        assert branching.on == (3 <= step <= 24)
        branching.ended(otherwise=step < 3)
        never.ended(otherwise=True)
    for _ in range(5):
        branching.ended(otherwise=False)
    assert not branching.on and not never.on


# -- which way is like which -------------------------------------------------------------------------------------------
@pytest.fixture
def ways(seen: Seen) -> Callable[[int], Profile]:
    """The profiles of 1 to 4 times, by that number."""
    evicting(by_chance(50, most=4), "8KiB")
    found = sorted(seen.profiles, key=lambda profile: profile.unevicted_peak_bytes)
    assert len(found) == 4
    return lambda times: found[times - 1]


def test_ways_part_where_their_calls_do(ways: Callable[[int], Profile]) -> None:
    one, two, four = ways(1), ways(2), ways(4)
    found = fork_of(two, four)
    assert found is not None and found == fork_of(four, two)
    shorter = fork_of(one, four)
    assert shorter is not None and shorter.calls < found.calls and shorter.packs < found.packs
    assert found.calls < len(two.bare.log.calls)
    assert fork_of(two, two) == Fork(len(two.bare.log.calls), len(two.signatures))
    other = Profile((0, *four.signatures[1:]), four.graph, 0, {}, 1.0, course=four.course)
    assert fork_of(two, other) is None


def test_the_trunk_is_a_larger_way_with_most_in_common(ways: Callable[[int], Profile]) -> None:
    every = [ways(times) for times in (1, 2, 3, 4)]
    assert trunk_of(ways(4), every) is None
    found = trunk_of(ways(1), every)
    assert found is not None and found[0] is ways(4), "of those that are as alike, the largest"
    unplanned = [Profile(p.signatures, p.graph, p.unevicted_peak_bytes, {}, 1.0, course=p.course) for p in every]
    assert trunk_of(ways(1), unplanned) is None


def test_what_the_trunk_does_not_save_is_kept(ways: Callable[[int], Profile]) -> None:
    two, four = ways(2), ways(4)
    fork = fork_of(two, four)
    assert fork is not None and four.plan is not None
    done = done_by(four, fork, two)
    shared = len(set(two.course.orders[: fork.packs]))
    assert [done.get(order) for order in range(shared)] == list(four.plan.actions[:shared])
    assert max(done) >= shared - 1
    fewer = replace(four.graph, saved=four.graph.saved[:2])
    plan = replace(four.plan, actions=(Action.SWAP, Action.SWAP))
    trunk = Profile(four.signatures, fewer, 0, {}, 1.0, plan, course=four.course, _bare=four.bare)
    found = done_by(trunk, Fork(fork.calls, 1), two)
    assert found[0] is Action.SWAP and len(found) > 2
    assert {found[order] for order in found if order > 1} == {Action.KEEP}


def ended(recorded: bool = False, followed: bool = False, strays: dict[int, Action] | None = None) -> Ended:
    outcome = Outcome(
        peak_bytes=1, unevicted_peak_bytes=1, limit_bytes=8192, evicted=True, forced={}, strays=strays or {}
    )
    return Ended(log=StepLog(), recorded=recorded, followed=followed, late=(), standing_bytes=0, outcome=outcome)


def test_a_way_is_planned_anew_when_its_trunk_was(ways: Callable[[int], Profile], seen: Seen) -> None:
    two, four = ways(2), ways(4)
    assert seen.learner is not None and four.plan is not None
    revising = seen.learner.revising
    revising.align(two, seen.profiles, ended(recorded=True))
    assert two.trunk is four and two.trunk_plan is four.plan
    known = two.plan
    revising.align(two, seen.profiles, ended())
    assert two.plan is known
    other = Action.KEEP if four.plan.actions[1] is not Action.KEEP else Action.RECOMPUTE
    four.plan = replace(four.plan, actions=(four.plan.actions[0], other, *four.plan.actions[2:]))
    revising.align(two, seen.profiles, ended())
    assert two.plan is not None and two.plan is not known
    assert two.plan.actions[1] is other and two.trunk_plan is four.plan


def test_what_the_trunk_s_replays_read_is_looked_after_in_the_other_way_too(
    ways: Callable[[int], Profile], seen: Seen
) -> None:
    two, four, revising = ways(2), ways(4), seen.learner and seen.learner.revising
    assert revising is not None and two.trunk is four and two.routine is not None
    shared = len(set(two.course.orders[: two.trunk_packs]))
    own = two.routine.read
    four.routine = routine(read={1, shared - 1, shared})
    revising.align(two, seen.profiles, ended())
    assert two.routine.read == own | {1, shared - 1}
    known = two.routine
    revising.align(two, seen.profiles, ended())
    assert two.routine is known
    four.routine = None
    assert read_by_trunk(two) == set()
    two.trunk = None
    assert read_by_trunk(two) == set()


def test_a_way_follows_its_routine_at_once_but_after_a_step_that_did_not_go_by_it(
    ways: Callable[[int], Profile], seen: Seen
) -> None:
    two, revising = ways(2), seen.learner and seen.learner.revising
    assert revising is not None
    for step, follows in (
        (ended(followed=True, strays={1: Action.SWAP}), False),
        (ended(strays={1: Action.SWAP}), True),
        (ended(followed=True), True),
    ):
        two.routine = None
        revising.align(two, seen.profiles, step)
        assert (two.routine is not None) == follows
    revising.release(two, ended())
    assert two.routine is None and not two.fixed and two.trunk is None


def test_no_more_is_planned_to_go_if_what_the_trunk_does_is_enough(
    ways: Callable[[int], Profile], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, plan_on = ways(2), seen.learner and seen.learner.revising.plan_on
    assert plan_on is not None
    fixed = {1: Action.RECOMPUTE}
    tight = plan_on(two.graph, 0, {}, fixed)
    assert tight is not None and tight.actions[1] is Action.RECOMPUTE and len(set(tight.actions)) > 2
    monkeypatch.setattr(Planning, "plan_once", None)
    enough = plan_on(two.graph, 1 << 20, {}, fixed)
    assert enough is not None
    assert [order for order, action in enumerate(enough.actions) if action is not Action.KEEP] == [1]


@pytest.mark.parametrize(("actions", "goes_on"), [([Action.SWAP] * 3, True), ([Action.ENCODE] * 3, False)])
def test_what_has_been_saved_has_to_have_gone_the_same_way(actions: list[Action], goes_on: bool) -> None:
    """Of either a routine knows only that more has to be done for it."""
    learner = Learner(Revising(0, None, plan_on=lambda *asked: None))
    for _ in range(3):
        learner._branching.ended(otherwise=True)
    graph = build_graph(StepLog(), 0)
    expected = Profile((7, 8), graph, 0, {}, 1.0, plan_of([Action.SWAP] * 3), routine=after("ab", routine()))
    other = Profile((7, 9), graph, 0, {}, 1.0, plan_of(actions), routine=routine("abxy"))
    learner.profiles, learner.current, learner.routine = [expected, other], expected, expected.routine
    learner.packs, learner.log.signatures, learner.log.saves = 1, [7], [0]
    assert learner.swerve("x") is (other.routine if goes_on else None)
    assert learner.current is (other if goes_on else expected)


def test_calls_for_nothing_that_is_saved_are_left_out(seen: Seen) -> None:
    evicting([None] * 50, "12KiB")
    profile = seen.profiles[0]
    names = {str(call) for call, _ in profile.course.calls} - {str(call) for call, _ in profile.bare.log.calls}
    assert "aten.rand.default" in names and "aten.native_layer_norm.default" not in names
    assert {str(call) for call in profile.bare.aside} == names
    assert profile.bare.log.calls_at[-1] <= len(profile.bare.log.calls) < len(profile.course.calls)
