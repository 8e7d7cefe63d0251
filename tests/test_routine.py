"""Which calls of a known step are recorded, and what happens when a step goes otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from sys import intern

import pytest
import torch
from builders import a_log, an_op
from covering import in_pairs
from test_learner import LIMIT, Planner, plan_of
from torch import Tensor, nn
from torch.nn import functional as F

import delta
from delta.budget import Budget
from delta.config import Policy
from delta.learner import Learner
from delta.planner.assemble import plan_of as whole_plan_of
from delta.planner.steplog import Plan, StepGraph, build_graph
from delta.planning import Planning
from delta.profile import MOST_TRUST, REFINEMENTS, TIGHTENINGS
from delta.revising import Outcome, Revising
from delta.routine import Routine, Way, routine_of, ways_of
from delta.types import Action, Kind, Link

KEEP, SWAP, RECOMPUTE, ENCODE = Action.KEEP, Action.SWAP, Action.RECOMPUTE, Action.ENCODE
SHORT = 1 + REFINEMENTS + 1  # steps until one has gone as planned with all op times known


# -- which calls ------------------------------------------------------------------------------------------------------
def chain(saved: list[int]) -> StepGraph:
    """Op i makes storage i + 1 out of storage i; storage 0 is the caller's. `saved` are those that autograd saves."""
    ops = [an_op(100 + i, [i], [i + 1]) for i in range(5)]
    saves = [(record, 10 * record, record) for record in saved]
    needs = [(order, 100 + order) for order in reversed(range(len(saved)))]
    releases = [(order, len(saved)) for order in range(len(saved))]
    log = a_log(ops, dict.fromkeys(range(6), 8), saves, needs, releases, 300, {0: Kind.SOURCE})
    return build_graph(log, 0)


def ways(saved: list[int], actions: list[Action]) -> list[Way]:
    calls = [(f"call {i}", i) for i in range(5)]
    return ways_of(calls, chain(saved), plan_of(actions))


P, R = Way.PASS, Way.RECORD


@pytest.mark.parametrize(
    ("saved", "actions", "expected"),
    [
        ([1, 2, 3], [KEEP, KEEP, KEEP], [P, P, P, P, P]),
        ([1, 2, 3], [KEEP, SWAP, KEEP], [P, P, P, P, P]),
        # 3 is made again out of 2, which is kept.
        ([1, 2, 3], [KEEP, KEEP, RECOMPUTE], [P, P, R, P, P]),
        # ... out of 1, through 2, which nobody saved.
        ([1, 3], [KEEP, RECOMPUTE], [P, R, R, P, P]),
        # ... from the caller's storage on.
        ([1, 2], [RECOMPUTE, RECOMPUTE], [R, R, P, P, P]),
        # An encoded storage is there, and its maker says how it is encoded.
        ([2, 3], [ENCODE, RECOMPUTE], [P, R, R, P, P]),
        ([2], [ENCODE], [P, R, P, P, P]),
    ],
)
def test_only_what_the_plan_replays_is_recorded(saved, actions, expected):
    assert ways(saved, actions) == expected


def test_a_stand_in_wants_its_recipe_as_a_dropped_storage_does():
    """3 is made out of 1 through 2, which nobody saved. A form that decodes to the value wants only its maker named."""
    graph = chain([1, 3])
    encoded = replace(graph.nodes[graph.saved[1]], encoded_bytes=1)
    calls = [(f"call {i}", i) for i in range(5)]
    for stand_in, expected in ((False, [P, P, R, P, P]), (True, [P, R, R, P, P])):
        nodes = tuple(
            replace(encoded, stand_in=stand_in) if number == graph.saved[1] else node
            for number, node in enumerate(graph.nodes)
        )
        assert ways_of(calls, replace(graph, nodes=nodes), plan_of([KEEP, ENCODE])) == expected


def test_calls_that_made_nothing_pass():
    calls = [("made nothing", -1), ("call", 0)]
    assert ways_of(calls, chain([1]), plan_of([RECOMPUTE])) == [Way.PASS, Way.RECORD]


def test_encoding_asks_for_the_ops_whose_results_were_overwritten():
    """Noise is known by the op that wrote it last and the one before."""
    ops = [an_op(100, [0], [1]), an_op(101, [1], [2], overwrites=(1,)), an_op(102, [2], [3], overwrites=(2,))]
    log = a_log(ops, dict.fromkeys(range(4), 8), [(3, 5, 3)], [(0, 9)], [(0, 1)], 20, {0: Kind.SOURCE})
    calls = [("empty", 0), ("bernoulli", 1), ("div", 2)]
    assert ways_of(calls, build_graph(log, 0), plan_of([ENCODE])) == [R, R, R]


@pytest.mark.parametrize(
    ("actions", "expected"),
    [([KEEP, RECOMPUTE], [P, R, R, R, P]), ([RECOMPUTE, KEEP], [R, P, P, P, P]), ([KEEP, KEEP], [P, P, P, P, P])],
)
def test_what_writes_into_a_dropped_storage_after_its_save_is_recorded(actions, expected):
    """2 is saved, then overwritten twice: 4 is what a handle on it stands for."""
    graph = chain([1, 2])
    ops = [replace(op, overwrites=op.inputs if op.id in (2, 3) else ()) for op in graph.ops]
    calls = [(f"call {i}", i) for i in range(5)]
    assert ways_of(calls, replace(graph, ops=tuple(ops)), plan_of(actions)) == expected


def test_a_routine_knows_its_calls_and_no_others():
    routine = Routine([("a", 0), ("b", 1)], [Way.PASS, Way.RECORD])
    assert not routine.begun
    assert routine.way("a") is Way.PASS
    assert routine.begun
    assert routine.way("a") is None
    assert routine.way("b") is Way.RECORD
    assert routine.way("b") is None


def test_a_routine_learns_which_calls_want_no_other_look():
    routine = Routine([("a", 0), ("b", 1), ("c", -1)], [P, R, P], made_bytes=[10, 20], before=1, optional=[0])
    assert (routine.passing, routine.made_bytes) == ([None] * 4, [10, 20, 0])
    assert routine.way("b") is R and routine.way("c") is P
    routine.passed()
    assert routine.way("c") is None
    routine.passed()
    routine.restart()
    assert (routine.passing, routine.calls) == ([None, None, "c", None], 0), "the last is a call that there is not"


def test_before_the_first_save_what_is_optional_may_stay_away():
    calls = [("metric", -1), ("load", 0), ("log", -1), ("log", -1), ("layer", 1), ("log", -1)]
    routine = Routine(calls, [P, R, P, P, R, P], costs_ns=[7, 8], before=4, optional=[0, 2, 3])
    assert routine.way("load") is R and routine.cost_ns == 7
    assert routine.way("another") is None and routine.cost_ns is None
    assert routine.way("log") is P
    assert routine.way("layer") is R and routine.cost_ns == 8
    assert routine.way("layer") is None, "after the first save all come"
    routine.restart()
    assert not routine.begun
    assert [routine.way(call) for call in ("metric", "layer")] == [P, None], "something saved is made from what loads"
    assert routine.way("load") is R


def test_before_the_first_save_only_what_something_saved_is_made_from_has_to_come():
    """3 is saved: 1 and 2 are on the way to it, 4 and 5 are not."""
    ops = [an_op(100 + i, [read], [made]) for i, (read, made) in enumerate([(0, 1), (1, 4), (1, 2), (4, 5), (2, 3)])]
    log = a_log(ops, dict.fromkeys(range(6), 8), [(3, 50, 5)], [(0, 90)], [(0, 1)], 100, {0: Kind.SOURCE})
    log.signatures, log.orders = [0], [0]
    log.calls, log.calls_before = [("number", -1), *((f"call {i}", i) for i in range(5)), ("saves", -1)], 6
    for absent in range(6):
        routine = routine_of(log, build_graph(log, 0), plan_of([KEEP]))
        came = [routine.way(call) for position, (call, _) in enumerate(log.calls) if position != absent]
        assert (None not in came) is (absent in (0, 2, 4)), absent


# -- when -------------------------------------------------------------------------------------------------------------
def follow(
    learner: Learner,
    kind: str,
    *,
    strays: Mapping[int, Action] | None = None,
    peak: int = LIMIT,
    shape: str = "",
    ending: str = "",
    storages: int = 3,
) -> bool:
    """One step of three ops whose names and saves begin with `kind`, recorded as the learner wants it to be. Returns
    whether it had a routine to its end. `shape`: of what it saves; `ending`: of what it saves last;
    `storages`: that many are saved, those that come after are on them."""
    recorded = 0
    for i in range(3):
        call = intern(f"{kind}{i}")
        routine = learner.routine
        way = routine.way(call) if routine is not None else Way.RECORD
        if way is None and learner.in_step:
            learner.leave_routine()
        if way in (None, Way.RECORD):
            learner.op(an_op(i, [], [i], name=call), {i: 10}, {i: Kind.ACTIVATION})
            learner.called(call, made=True)
            recorded += 1
        if i == 0:
            learner.begin(recording=True)
        learner.packed(hash(call + shape + (ending if i == 2 else "")), 1000 + 10 * i)
        if i < storages:
            learner.saved(i, 10, Kind.ACTIVATION, 1000 + 10 * i)
    followed = learner.routine is not None
    for i in reversed(range(storages)):
        learner.needed(i, 2000 - 10 * i)
        learner.released(i)
    outcome = Outcome(
        peak_bytes=peak, unevicted_peak_bytes=100, limit_bytes=LIMIT, evicted=True, forced={}, strays=strays or {}
    )
    learner.end(3000, outcome)
    assert followed or recorded == 3 or not learner.recorded
    return followed


@pytest.fixture
def learner() -> Learner:
    return Learner(Revising(0, Planner(Action.SWAP)))


def test_a_step_has_a_routine_once_one_has_gone_as_planned(learner):
    assert [follow(learner, "a") for _ in range(SHORT + 2)] == [False] * SHORT + [True] * 2


def test_a_step_that_went_otherwise_has_none_the_next_time(learner):
    for _ in range(SHORT):
        follow(learner, "a")
    assert follow(learner, "a", peak=LIMIT + 1)
    assert [follow(learner, "a") for _ in range(3)] == [False, True, True]


def test_what_goes_beside_the_plan_now_and_then_ends_no_routine(learner):
    """It may have been late. Twice running is too often."""
    for _ in range(SHORT):
        follow(learner, "a")
    for _ in range(3):
        assert follow(learner, "a", strays={0: SWAP})
        assert follow(learner, "a")
    assert follow(learner, "a", strays={0: SWAP}) and follow(learner, "a", strays={1: SWAP})
    assert [follow(learner, "a") for _ in range(3)] == [False, True, True]
    learner.profiles[0].tightened = TIGHTENINGS  # no plan is any tighter
    assert follow(learner, "a", strays={0: SWAP}, peak=LIMIT + 1)
    assert [follow(learner, "a") for _ in range(2)] == [False, True], "once is too often where the limit was not held"


def test_once_is_too_often_in_a_step_that_left_its_routine(learner):
    for _ in range(SHORT):
        follow(learner, "a")
    learner.leave_routine()
    assert [follow(learner, "a", strays={0: SWAP}), follow(learner, "a"), follow(learner, "a")] == [False, False, True]


def test_a_routine_that_two_steps_running_leave_midway_is_learned_anew(learner):
    """The program does otherwise from now on: were the routine kept, no step would ever be recorded whole again."""
    for _ in range(SHORT):
        follow(learner, "a")
    ways: list[bool] = []
    for left in (True, False, True, True, False, False):
        known = learner.routine
        ways.append(known is not None)
        if left and known is not None:
            assert known.way(intern("a0")) is Way.PASS
            learner.leave_routine()
            learner.begin(recording=True)
        follow(learner, "a")
    assert ways == [True, True, True, True, False, True]


def test_a_step_is_timed_if_it_is_the_first_of_all_or_refines_a_plan(learner):
    """Not the first of each kind: there may be no two alike."""
    timed = []
    for kind in ["a"] * (SHORT + 1) + ["b"]:
        learner.begin(recording=True)
        learner.packed(hash(f"{kind}0"), 1000)
        timed.append(learner.is_timed)
        learner.abandon()
        follow(learner, kind)
    assert timed == [True] * (1 + REFINEMENTS) + [False] * (len(timed) - 1 - REFINEMENTS)


def amend(plan: Plan, graph: StepGraph, gone: Mapping[int, Action]) -> Plan:
    actions = tuple(gone.get(order, action) for order, action in enumerate(plan.actions))
    return plan if actions == plan.actions else replace(plan, actions=actions)


def test_what_goes_beside_the_plan_in_two_steps_running_becomes_part_of_it(learner):
    learner.revising.amend = amend
    for _ in range(SHORT):
        follow(learner, "a")
    profile = learner.profiles[0]
    before = profile.plan
    stray = {1: RECOMPUTE}
    assert follow(learner, "a", strays=stray)
    assert profile.plan is before and learner.routine is not None, "it may have been late once"
    assert follow(learner, "a", strays={1: RECOMPUTE, 2: SWAP})
    assert profile.plan is before and learner.routine is None, "another one each time"
    for _ in range(2):
        assert not follow(learner, "a", strays=stray)
    assert profile.plan is not None and profile.plan.actions[1] is RECOMPUTE
    assert learner.routine is None, "it has not been seen to go by that"
    assert [follow(learner, "a") for _ in range(2)] == [False, True]
    assert profile.routine is not None and profile.routine.ways == [P, R, P]


def test_of_what_goes_beside_the_plan_it_matters_which_and_not_how(learner):
    """Two ways may cost about the same, now one less and now the other."""
    learner.revising.amend = amend
    for _ in range(SHORT):
        follow(learner, "a")
    for action in (RECOMPUTE, SWAP):
        follow(learner, "a", strays={1: action, 2: RECOMPUTE})
    profile = learner.profiles[0]
    assert profile.plan is not None and profile.plan.actions[1:] == (SWAP, RECOMPUTE)


def test_what_went_beside_another_plan_is_forgotten(learner):
    learner.revising.amend = amend
    for _ in range(SHORT):
        follow(learner, "a")
    follow(learner, "a", strays={1: RECOMPUTE})
    profile = learner.profiles[0]
    assert profile.plan is not None
    better = replace(profile.plan)
    learner.follow(profile, better)
    assert not follow(learner, "a", strays={1: RECOMPUTE})
    assert profile.plan is better, "it went beside this one for the first time"


def test_there_is_no_routine_where_the_plan_cannot_take_what_goes_beside_it(learner):
    """Those have to go by a decision in the step, which wants all its recipes."""
    learner.revising.amend = lambda plan, graph, gone: None
    for _ in range(SHORT):
        follow(learner, "a")
    assert [follow(learner, "a", strays={1: RECOMPUTE}) for _ in range(4)] == [True, True, False, False]


def test_what_goes_again_although_the_plan_has_it_go_does_not_keep_a_routine_away(learner):
    """It comes back in backward, and has to go once more."""
    learner.revising.amend = amend
    for _ in range(SHORT):
        follow(learner, "a")
    again = {0: SWAP}
    assert [follow(learner, "a", strays=again) for _ in range(4)] == [True, True, True, True]


def test_what_is_left_over_of_another_step_is_in_no_plan(learner):
    learner.revising.amend = amend
    for _ in range(SHORT):
        follow(learner, "a")
    assert [follow(learner, "a", strays={-1: SWAP}) for _ in range(4)] == [True, True, False, False]


def test_where_the_limit_cannot_be_held_there_is_a_routine_all_the_same(learner):
    """A plan is tightened a few times; from then on another step over the limit tells nothing new."""
    over = [follow(learner, "a", peak=LIMIT + 0.5) for _ in range(SHORT + TIGHTENINGS + 3)]
    assert not any(over[: TIGHTENINGS + 1]) and all(over[-2:])


def test_a_plan_is_amended_by_what_is_not_in_it_yet():
    graph, planning = chain([1, 2, 3]), Planning(Policy(name="test"), Budget(), Link(1e9, 1e9), False)
    plan = whole_plan_of(graph, Link(1e9, 1e9), [KEEP, SWAP, KEEP])
    assert planning.amend(plan, graph, {1: RECOMPUTE}) is plan, "it goes as planned, and once more"
    amended = planning.amend(plan, graph, {0: SWAP, 1: RECOMPUTE})
    assert amended.actions == (SWAP, SWAP, KEEP)
    assert amended.swap_bytes == 16 and set(sum(amended.prefetch.values(), ())) == {0, 1}
    assert planning.amend(plan, graph, {7: SWAP}) is plan, "the step it is for had fewer"
    long = replace(chain([1, 2, 3, 4, 5]), release=(5, 4, 3, 2, 1))
    cut = whole_plan_of(long, Link(1e9, 1e9), [RECOMPUTE, RECOMPUTE, KEEP, RECOMPUTE, KEEP])
    assert planning.amend(cut, long, {2: RECOMPUTE}) is None, "all four would come back at once"
    later = replace(plan, evictions={0: ((2, SWAP),)})
    assert planning.amend(later, graph, {0: SWAP}) is later, "its actions are not all that it says"


def test_a_routine_knows_how_long_its_calls_take():
    calls = [("a", 0), ("made nothing", -1), ("b", 1), ("another", 2)]
    routine = Routine(calls, [R] * 4, costs_ns=[5, 7])
    found = []
    for call, _ in calls:
        routine.way(call)
        found.append(routine.cost_ns)
    assert found == [5, None, 7, None]


def test_without_selection_there_are_no_routines(learner):
    learner.revising.selective = False
    assert not any(follow(learner, "a") for _ in range(SHORT + 3))


def test_another_kind_of_step_ends_the_routine_and_is_learned(learner):
    for _ in range(SHORT):
        follow(learner, "a")
    found = [follow(learner, "b") for _ in range(SHORT + 1)]
    assert found == [False] * SHORT + [True]
    assert follow(learner, "a") is False  # b was expected after b


def test_the_same_calls_that_save_something_else_end_the_routine(learner):
    for _ in range(SHORT):
        follow(learner, "a")
    assert [follow(learner, "a", shape="larger"), learner.missed] == [False, True]
    assert [follow(learner, "a", shape="larger") for _ in range(SHORT + 1)] == [False] * SHORT + [True]


def test_kinds_that_take_turns_are_expected_in_turn(learner):
    for _ in range(SHORT):
        follow(learner, "a")
        follow(learner, "b")
    assert [follow(learner, kind) for kind in "abab"] == [True] * 4


def odd_among_many(learner: Learner, kind: str, ending: str = "") -> None:
    """Steps "a", and one of another kind among them now and then, both known."""
    for _ in range(SHORT):
        follow(learner, "a")
    for _ in range(SHORT):
        follow(learner, kind, ending=ending)
        follow(learner, "a")
    for _ in range(2 * MOST_TRUST):
        follow(learner, "a")


def test_an_odd_step_among_many_is_not_expected_again(learner):
    """An epoch's last batch."""
    odd_among_many(learner, "b")
    assert [follow(learner, kind) for kind in "abaaabaa"] == [True, False, True, True, True, False, True, True]


def test_what_comes_after_a_kind_is_learned_anew(learner):
    for kind in "ab":
        for _ in range(SHORT):
            follow(learner, kind)
    turns = [follow(learner, "ab"[i % 2]) for i in range(2 * MOST_TRUST + 6)]
    assert turns[-4:] == [True] * 4


def test_the_kind_that_is_expected_comes_before_others_that_begin_so(learner):
    odd_among_many(learner, "a", ending="x")
    assert not follow(learner, "a", ending="x")
    assert follow(learner, "a"), "the other one was the last"


def test_a_step_whose_calls_are_others_from_now_on_is_followed_too(learner):
    """It saves the same: what comes before it is no longer what it was when it was planned for."""
    for _ in range(SHORT):
        follow(learner, "a")
    profile = learner.profiles[0]
    follow(learner, "a", peak=LIMIT + 1)
    for recorded in (True, False):
        learner.op(an_op(7, [], [7], name="another"), {7: 10}, {7: Kind.ACTIVATION})
        learner.called("another", made=True)
        assert follow(learner, "a") is not recorded
    assert learner.profiles == [profile]


def test_no_routine_is_made_of_a_step_that_the_plan_does_not_fit(learner):
    """Other calls, and the same tensors on fewer storages."""
    for _ in range(SHORT):
        follow(learner, "a")
    follow(learner, "a", peak=LIMIT + 1)
    learner.called("another", made=False)
    follow(learner, "a", storages=2)
    assert learner.routine is None


def test_another_plan_ends_the_routine(learner):
    for _ in range(SHORT):
        follow(learner, "a")
    assert learner.routine is not None
    learner.follow(learner.profiles[0], plan_of([RECOMPUTE] * 3))
    assert learner.profiles[0].routine is None, "they are another plan's"
    assert [follow(learner, "a") for _ in range(2)] == [False, True]
    assert learner.routine is not None and learner.routine.ways == [R, R, R]


def test_a_step_that_was_left_midway_is_not_learned_from(learner):
    for _ in range(SHORT):
        follow(learner, "a")
    for i in range(2):
        assert learner.routine is not None
        assert learner.routine.way(intern(f"a{i}")) is Way.PASS
    learner.leave_routine()
    learner.begin(recording=True)
    assert not learner.recorded


# -- on the device ----------------------------------------------------------------------------------------------------
class Branching(nn.Module):
    """Dropout, normalisation, writes in place, a residual, and a branch that may be taken or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = F.dropout(F.gelu(layer(x)), 0.2)
            if branch and index == 3:
                y = torch.tanh(y) * y
            x = self.norm(x + y.mul_(0.5))
        return x


def trained(steps: list[Callable[[nn.Module], Tensor]]) -> list[Tensor]:
    torch.manual_seed(5)
    model = Branching()
    numbers = []
    for step in steps:
        loss = step(model)
        loss.backward()
        numbers += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return numbers


def of_rows(rows: int, branch: bool = False) -> Callable[[nn.Module], Tensor]:
    def step(model: nn.Module) -> Tensor:
        return model(torch.randn(rows, 24), branch).square().mean()

    return step


def alternating(count: int) -> list[Callable[[nn.Module], Tensor]]:
    return [of_rows(16, branch=bool(i % 2)) for i in range(count)]


SURPRISES = {
    "none": [of_rows(16)] * 8,
    "a branch": [*[of_rows(16)] * 6, of_rows(16, branch=True), *[of_rows(16)] * 3],
    "a larger batch": [*[of_rows(16)] * 6, of_rows(48), of_rows(16), of_rows(16)],
    "another op before the step": [
        *[of_rows(16)] * 6,
        lambda m: of_rows(16)(m) + torch.ones(3).exp().sum(),
        of_rows(16),
    ],
    "turns": alternating(12),
}


@pytest.mark.usefixtures("one_thread")
@in_pairs(surprise=SURPRISES, policy=["recompute", "delta", "monet"], device=["cpu", "chaos:2"])
@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_a_routine_changes_no_bit_whatever_comes_next(surprise, policy, device):
    steps = SURPRISES[surprise]
    plain = trained(steps)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    followed = []

    def noting(step: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
        def noted(model: nn.Module) -> Tensor:
            followed.append(run._core.engine.routine is not None)
            return step(model)

        return noted

    with delta.evict(activations="60%", policy=chosen, device=device) as run:
        evicted = trained([noting(step) for step in steps])
    assert all(torch.equal(a, b) for a, b in zip(plain, evicted, strict=True))
    if policy == "recompute" and device == "cpu":
        assert any(followed)


def steps_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def scales_gradients_and_fills_them_with_zeros(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor
) -> None:
    for p in model.parameters():
        p.grad.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def asks_for_a_number(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.item()


def computes_a_metric(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    sum(p.grad.norm() for p in model.parameters()).div(3).exp()


AFTERWARDS = [
    steps_the_optimizer,
    scales_gradients_and_fills_them_with_zeros,
    asks_for_a_number,
    computes_a_metric,
]


def looped(afterwards: Callable[..., None], turn: int, before_backward: Callable[[], object]) -> list[Tensor]:
    torch.manual_seed(5)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters())
    numbers = []
    for i in range(15):
        loss = of_rows(16)(model)
        before_backward()
        loss.backward()
        numbers += [loss.detach().clone(), *(p.grad.detach().clone() for p in model.parameters())]
        if i % 3 == turn:
            afterwards(model, optimizer, loss)
        del loss
    return numbers


@pytest.mark.usefixtures("one_thread")
@in_pairs(where=[("recompute", "cpu"), ("delta", "chaos:2")], afterwards=AFTERWARDS, turn=range(3))
def test_what_comes_between_two_steps_now_and_then_ends_no_routine(where, afterwards, turn):
    """Gradients are accumulated, something is logged: after each third step, the one that is learned from or not."""
    policy, device = where
    plain = looped(afterwards, turn, lambda: None)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    followed = []
    with delta.evict(activations="60%", policy=chosen, device=device) as run:
        evicted = looped(afterwards, turn, lambda: followed.append(run._core.engine.routine is not None))
    if policy == "recompute":  # copies of others are late now and then
        assert followed[-6:] == [True] * 6
    assert all(torch.equal(a, b) for a, b in zip(plain, evicted, strict=True))


@pytest.mark.usefixtures("one_thread", "recorded")
def test_under_a_routine_no_op_is_timed(monkeypatch):
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 0})
    with delta.evict(activations="60%", policy=chosen, device="cpu") as run:
        for _ in range(8):
            trained([of_rows(16)])
        engine, known = run._core.engine, run._core.engine.learner.profiles[0].graph.ops
        timed = []
        monkeypatch.setattr(run._core.op_times.clock, "start", lambda: timed.append(1))
        loss = of_rows(16)(Branching())
        recorded = list(engine.ledger.ops.values())
        assert engine.routine is not None and recorded and not timed
        costs = {(op.name, op.cost_ns) for op in known}
        assert all((op.name, op.cost_ns) in costs for op in recorded)
        monkeypatch.undo()
        loss.backward()


@pytest.mark.usefixtures("one_thread", "recorded")
def test_under_a_routine_few_ops_are_recorded_and_the_limit_holds():
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 0})
    with delta.evict(activations="60%", policy=chosen, device="cpu") as run:
        for _ in range(8):
            trained([of_rows(16)])
        engine = run._core.engine
        assert engine.routine is not None
        model = Branching()
        loss = of_rows(16)(model)
        assert 0 < len(engine.ledger.ops) < len(engine.routine.ways) / 2
        loss.backward()
    report = run.report()
    assert report.peak_activation_bytes <= 1.01 * report.budget_bytes


class Gated(nn.Module):
    """As an LSTM cell writes its gates: each in place, the others when the first has been saved with all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 96) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            i, f, g, o = layer(x).unsafe_chunk(4, 1)
            x = i.sigmoid_() * g.tanh_() + f.sigmoid_() * o.sigmoid_()
        return x


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # what is dropped is there again by the next write
def test_what_was_written_after_it_had_gone_can_go_again_under_a_routine(followed):
    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(torch.ones(16, 24)).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    model = Gated()
    expected = gradients()
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 4096})  # all gates of a layer may go, and nothing else
    with delta.evict(activations="70%", policy=chosen, device="cpu") as run:
        for _ in range(SHORT + TIGHTENINGS + 2):
            assert all(map(torch.equal, gradients(), expected))
    report = run.report()
    assert any(followed)
    assert report.peak_activation_bytes < 0.85 * report.unevicted_peak_activation_bytes


def test_rules_keep_the_recorder_whole():
    """A rule asks for the names of ops, so that every op has to be seen."""
    rules = [{"op": "aten.addmm", "action": "keep"}]
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 0, "rules": rules})
    with delta.evict(activations="40%", policy=chosen, device="cpu") as run:
        for _ in range(6):
            trained([of_rows(16)])
        assert run._core.engine.routine is None
