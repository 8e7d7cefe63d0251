"""What autograd keeps alone in a known step: which it is, that it counts all the same, and that hooks are on wherever a
step goes otherwise. Units: bytes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import a_log, an_op
from covering import in_pairs
from models import CASES, train
from test_card_training import LateCard
from test_kept import Net, assert_same, fresh, gradients
from test_learner import plan_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import delta
from delta.alone import Alone, left_alone
from delta.expected import Expected
from delta.learner import Learner
from delta.planner import PLANNERS, Plan, Task
from delta.planner.assemble import plan_of as assembled
from delta.planner.steplog import StepGraph, StepLog, build_graph
from delta.revising import Outcome
from delta.routine import Routine, Way, routine_of
from delta.runtime import session
from delta.runtime.core import Core
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.cuda import CudaDevice
from delta.runtime.hooks import Hooks
from delta.runtime.stretches import Stretches
from delta.types import Action, Kind

STEADY = 10
Between = Callable[[int, Tensor], Tensor]


# -- which ------------------------------------------------------------------------------------------------------------
def graph(count: int, needs_before: int = 0) -> StepGraph:
    """Storage i + 1 is made out of storage i, by op i, is saved, and takes 10 * (i + 1)."""
    ops = [an_op(100 + i, [i], [i + 1]) for i in range(count)]
    saves = [(i + 1, 10 * i, i + 1) for i in range(count)]
    needs = [(order, 100 + order) for order in reversed(range(count))]
    releases = [(order, count - order) for order in range(count)]
    sizes = {i: 10 * i for i in range(count + 1)}
    log = a_log(ops, sizes, saves, needs, releases, 300, {0: Kind.SOURCE})
    log.needs_before[:] = [0] * (count - 1) + [needs_before]
    return build_graph(log, 0)


def alone(orders: list[int], calls_at: list[int], looked_after: set[int], before: int = 0) -> Alone | None:
    return left_alone(graph(max(orders) + 1, before), calls_at, orders, orders, looked_after)


def test_where_all_is_kept_nobody_hears_of_it() -> None:
    found = alone([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], {3})
    assert found is not None
    assert found.turns == {2: True, 4: False, 5: True}
    assert found.nbytes == {1: 20, 2: 30, 4: 50, 5: 60}
    assert found.until == {1: 5, 2: 4, 4: 2, 5: 1}
    assert found.rises == {2: 20 + 30 + 40, 5: 50 + 60}
    assert [found.saves_before(calls) for calls in (1, 2, 4, 7, None)] == [0, 1, 3, 6, 6]


def test_there_is_room_for_what_comes_next_whatever_becomes_of_it() -> None:
    found = left_alone(graph(4), [1, 2, 3, 4], [0, 1, 2, 3], [0, 1, -1, 3], set())
    assert found is not None and found.rises == {2: 20 + 30, 4: 40}


def test_the_first_save_begins_the_step() -> None:
    found = alone([0, 1], [1, 2], set())
    assert found is not None and set(found.nbytes) == {1}
    assert alone([0], [1], set()) is None


@pytest.mark.parametrize(
    ("orders", "calls_at", "looked_after", "expected"),
    [
        ([0, 1, 2], [1, 2, 2], {1}, set()),  # saved beside it
        ([0, 1, -1, 2], [1, 2, 2, 3], set(), {2}),  # beside what comes and goes
        ([0, 1, 2, 1], [1, 2, 3, 3], {2}, set()),  # ... later
        ([0, 1, 2, 3, 2, 1], [1, 2, 3, 4, 4, 3], {3}, set()),  # ... by way of another
        ([0, 1, 2, 1], [1, 2, 3, 4], {2}, {1}),
    ],
)
def test_a_storage_is_left_alone_always_or_never(orders, calls_at, looked_after, expected) -> None:
    ordered = sorted(zip(calls_at, orders, strict=True), key=lambda pair: pair[0])
    found = alone([order for _, order in ordered], [calls for calls, _ in ordered], looked_after)
    assert (set(found.nbytes) if found is not None else set()) == expected


@pytest.mark.parametrize(
    ("moves", "expected"),
    [({}, {1, 2, 3}), ({"prefetch": {1: (0,)}}, {1, 3}), ({"evictions": {2: ((0, Action.SWAP),)}}, {2, 3})],
)
def test_where_something_comes_back_or_goes_the_need_is_heard_of(moves: dict[str, Any], expected: set[int]) -> None:
    step, plan = graph(4), replace(plan_of([Action.KEEP] * 4), saved_bytes=step_bytes(4), forward_bytes=step_bytes(4))
    log = StepLog(orders=[0, 1, 2, 3], calls_at=[1, 2, 3, 4], releases=[(order, 0) for order in range(4)])
    log.calls[:] = [(i, i) for i in range(4)]
    log.ops_before[:] = [1, 2, 3, 4]
    assert step.needs == (3, 2, 1, 0)
    routine = routine_of(log, step, replace(plan, **moves))
    assert routine.alone is not None and set(routine.alone.nbytes) == expected


def step_bytes(count: int) -> tuple[int, ...]:
    return tuple(10 * (i + 1) for i in range(count))


def test_calls_after_the_last_save_need_not_have_come() -> None:
    """As `backward` makes a first gradient, and a second one where it is called twice."""
    routine = Routine([(call, -1) for call in "abcd"], [Way.PASS] * 4, alone=alone([0, 1, 2], [1, 2, 3], set()))
    found = []
    for call in "abcd":
        routine.way(call)
        found.append(routine.all_saved)
    assert found == [False, False, True, True]


def test_nothing_is_where_backward_asks_before_the_end_or_a_call_is_missing() -> None:
    assert alone([0, 1, 2], [1, 2, 3], set(), before=1) is None
    assert left_alone(graph(3), [1, 2], [0, 1, 2], [0, 1, 2], set()) is None


# -- in a training ----------------------------------------------------------------------------------------------------
def loss_of(net: Net, between: Between | None = None) -> Tensor:
    torch.manual_seed(3)
    return net(torch.randn(16, 24), between).square().sum()


def plain(between: Between | None = None) -> list[Tensor]:
    net = fresh()
    loss_of(net, between).backward()
    return gradients(net)


@contextmanager
def steady(net: Net, policy: str = "recompute", share: str = "60%", **more: Any) -> Iterator[Core]:
    """A block in whose next step hooks are off in stretches."""
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations=share, policy=chosen, **more) as run:
        core = run._core
        assert core is not None
        for _ in range(STEADY):
            loss_of(net).backward()
            net.zero_grad()
            core.planning.wait()
        assert core.engine.routine is not None and core.engine.routine.alone is not None
        yield core


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each tensor that the hooks have heard of."""
    heard, pack = list[int](), Hooks.pack

    def noted(hooks: Hooks, tensor: Tensor) -> Any:
        heard.append(tensor.numel())
        return pack(hooks, tensor)

    monkeypatch.setattr(Hooks, "pack", noted)
    return heard


def ended(core: Core) -> None:
    """Nothing of the step is left."""
    ledger = core.engine.ledger
    ledger.validate()
    assert not core.stretches.off and not core.engine.learner.alone
    assert (ledger.handles, ledger.resident_bytes, ledger.unevicted_bytes) == (0, 0, 0)


pytestmark = [
    pytest.mark.usefixtures("one_thread", "searched_here"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]


@pytest.mark.parametrize("policy", ["recompute", "delta", "swap"])
def test_a_known_step_is_heard_of_in_part(policy: str, packed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "copy_ns", 0)  # else `delta` would make so little again, as `recompute` does
    expected, net = plain(), fresh()
    with steady(net, policy) as core:
        routine, steps = core.engine.routine, core.engine.totals.steps
        assert routine is not None and routine.alone is not None
        packed.clear()
        loss_of(net).backward()
        ended(core)
        heard = len(packed)
        assert core.engine.routine is routine and core.engine.totals.steps == steps + 1
        with monkeypatch.context() as all_heard:
            all_heard.setattr(Expected, "may_leave_alone", lambda *args: False)
            packed.clear()
            net.zero_grad()
            loss_of(net).backward()
        left_alone = sum(order in routine.alone.nbytes for order in routine.orders)
        least = left_alone if policy != "recompute" else 1  # by its plan not each stretch has the room
        assert 0 < least <= len(packed) - heard
    assert_same(gradients(net), expected)


class Turned(nn.Module):
    """Tables that every layer reads, as rotary embeddings do: they are saved once more in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        tables = [torch.linspace(0.5, 1, 24 + at)[at:] for at in range(4)]
        for layer in self.layers:
            x = torch.tanh(layer(x))
            for table in tables:
                x = x * table
        return x


@dataclass
class Went:
    """A step that followed its routine: by saved tensor and by need the storage's save order, and the most there was
    of all that is saved."""

    orders: list[int]
    needs: list[int]
    unevicted_peak_bytes: int
    left_alone: int


@pytest.fixture
def went(monkeypatch: pytest.MonkeyPatch) -> list[Went]:
    steps, end = list[Went](), Learner.end

    def ended(learner: Learner, now_ns: int, outcome: Outcome) -> None:
        log = learner.log
        if learner.routine is not None:
            needs = [order for order, _ in log.needs]
            steps.append(Went(list(log.orders), needs, outcome.unevicted_peak_bytes, len(learner.alone)))
        end(learner, now_ns, outcome)

    monkeypatch.setattr(Learner, "end", ended)
    return steps


@pytest.mark.parametrize("policy", ["swap", "delta", "recompute"])
def test_where_a_stretch_finds_no_room_the_step_is_the_same(
    policy: str, went: list[Went], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left alone before is known where it is saved again and heard of; what is heard of is in later saves."""
    may, denied, asked = Expected.may_leave_alone, set[int](), list[int]()

    def may_leave_alone(expected: Expected, calls: int) -> bool:
        asked.append(calls)
        return len(asked) not in denied and may(expected, calls)

    def step(net: nn.Module) -> list[Tensor]:
        asked.clear()
        net.zero_grad()
        torch.manual_seed(3)
        net(torch.randn(16, 24)).square().sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]

    torch.manual_seed(1)
    net = Turned()
    expected = step(net)
    monkeypatch.setattr(Expected, "may_leave_alone", may_leave_alone)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations="70%", policy=chosen) as run:
        core = run._core
        assert core is not None
        for _ in range(STEADY):
            step(net)
            core.planning.wait()
        routine = core.engine.routine
        assert routine is not None and routine.alone is not None
        left_alone = went[-1].left_alone
        saved = Counter(routine.orders)
        assert left_alone > 3 and any(saved[order] == len(net.layers) for order in routine.alone.nbytes)
        for first in range(1, len(asked) + 1):
            denied = {first}
            went.clear()
            assert_same(step(net), expected)
            ended(core)
            assert core.engine.routine is routine
            (found,) = went
            pairs = zip(found.orders, routine.orders, strict=True)
            assert all(here == order for here, order in pairs if order >= 0)  # of what comes and goes it has none
            assert found.left_alone < len(routine.alone.nbytes)
            if first == 1:
                usual = found
            assert (found.needs, found.unevicted_peak_bytes) == (usual.needs, usual.unevicted_peak_bytes)
        denied = set()
        step(net)
        assert went[-1].left_alone == left_alone, "the next step is as it was"


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_what_is_left_alone_counts(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are those of steps in which all is heard of."""
    net = fresh()
    with steady(net, policy) as core:
        found = []
        for alone in (True, False):
            if not alone:
                monkeypatch.setattr(Expected, "may_leave_alone", lambda *args: False)
            loss = loss_of(net)
            core.stretches.end()
            with core:
                at_the_end = core.engine.ledger.resident_bytes, core.engine.ledger.unevicted_bytes
            loss.backward()
            found.append((at_the_end, core.engine.totals.peak_bytes, core.engine.totals.unevicted_peak_bytes))
        assert found[0] == found[1]


def test_the_last_stretch_ends_with_forward() -> None:
    expected, net = plain(), fresh()
    with steady(net, "swap", share="92%") as core:
        steps = core.engine.totals.steps
        loss = loss_of(net)
        assert core.stretches.off
        loss.register_hook(lambda _: off.append(core.stretches.off))
        off: list[bool] = []
        loss.backward()
        assert off == [False]
        ended(core)
        assert core.engine.routine is not None and core.engine.totals.steps == steps + 1
    assert_same(gradients(net), expected)


def do_at(index: int, do: Callable[[Tensor], Tensor]) -> Between:
    return lambda at, x: do(x) if at == index else x


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "one op more": lambda x: x.sigmoid() * 1.01,
    "another size": lambda x: x[:8],
    "written": lambda x: x.add_(0.25),
    "other hooks": lambda x: under_other_hooks(x),
    "checkpointed": lambda x: checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False),
    "checkpointed, reentrant": lambda x: checkpoint(lambda y: y.sin().exp(), x, use_reentrant=True),
    "a gradient meanwhile": lambda x: x + torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0],
    "without gradients": lambda x: x + no_grad(x),
}


def under_other_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return x.sin()


def no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.cos().mul_(2)


@in_pairs(odd=ODD, at=[0, 3, 7], policy=["recompute", "delta", "swap"])
def test_a_step_that_goes_otherwise_has_plain_s_bits(odd: str, at: int, policy: str) -> None:
    between = do_at(at, ODD[odd])
    expected, usual, net = plain(between), plain(), fresh()
    with steady(net, policy) as core:
        loss_of(net, between).backward()
        ended(core)
        assert_same(gradients(net), expected)
        for _ in range(STEADY):  # and so has each one after it
            loss_of(net).backward()
            ended(core)
            assert_same(gradients(net), usual)
        assert core.engine.routine is not None


class Stop(Exception):
    """Of the program's own."""


def stopped(net: Net, core: Core, at: int) -> bool:
    """Stops a forward after that layer. Whether hooks were off there, as they are after the first four by `swap`."""
    found: list[bool] = []

    def fail(x: Tensor) -> Tensor:
        found.append(core.stretches.off)
        raise Stop

    with pytest.raises(Stop):
        loss_of(net, do_at(at, fail))
    return found[0]


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_forward_that_fails_leaves_no_hooks_off(at: int) -> None:
    usual, net = plain(), fresh()
    with steady(net, "swap") as core:
        assert stopped(net, core, at) is (at < 4)
        for _ in range(STEADY):
            loss_of(net).backward()
            assert_same(gradients(net), usual)
            ended(core)
        assert stopped(net, core, at) is (at < 4), "a step later all is as it was"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_block_that_ends_in_forward_takes_its_hooks_along(at: int) -> None:
    net = fresh()
    with steady(net, "swap") as core:
        assert stopped(net, core, at) is (at < 4)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    loss_of(net).backward()
    assert_same(gradients(net), plain())


def test_a_block_that_ends_under_other_hooks_leaves_them_on() -> None:
    others = (lambda t: t), (lambda t: t)
    net = fresh()
    with steady(net, "swap") as core:
        assert stopped(net, core, 2)
        torch._C._autograd._push_saved_tensors_default_hooks(*others)
    try:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == others
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_forward_without_backward_ends_nothing() -> None:
    usual, net = plain(), fresh()
    with steady(net) as core:
        loss = loss_of(net)
        del loss
        for _ in range(3):
            loss_of(net).backward()
            assert_same(gradients(net), usual)
            ended(core)


def test_backward_may_come_twice() -> None:
    net, other = fresh(), fresh()
    loss = loss_of(other)
    loss.backward(retain_graph=True)
    loss.backward()
    with steady(net) as core:
        loss = loss_of(net)
        loss.backward(retain_graph=True)
        loss.backward()
        ended(core)
    assert_same(gradients(net), gradients(other))


def steady_still(core: Core, step: Callable[[], object]) -> bool:
    """Whether each of some steps follows the routine of the one before, with hooks off in part of it."""
    routine, taken = core.engine.routine, list[bool]()
    assert routine is not None
    for _ in range(3):
        step()
        taken.append(routine is core.engine.routine)
        ended(core)
    return all(taken)


class Checkpointed(Net):
    """A checkpoint keeps what it needs in hooks of its own, which are on top while its ops run."""

    def forward(self, x: Tensor, between: Between | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = checkpoint(self.act, layer, x, use_reentrant=False) if index in (2, 5) else self.act(layer, x)
        return x

    def act(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(layer(x)) * 1.5 + x.tanh()


def test_hooks_come_back_below_those_of_others() -> None:
    torch.manual_seed(1)
    net = Checkpointed()
    with steady(net) as core:
        assert steady_still(core, lambda: loss_of(net).backward())


def test_backward_of_another_model_in_another_thread_is_none_of_the_step_s() -> None:
    net, other = fresh(), nn.Linear(2, 2)

    def between(at: int, x: Tensor) -> Tensor:
        if at == 3:
            in_thread(lambda: other(torch.ones(1, 2)).sum().backward())
        return x

    with steady(net, "swap", share="92%") as core:
        assert steady_still(core, lambda: loss_of(net, between).backward())


def test_backward_may_come_in_another_thread() -> None:
    usual, net = plain(), fresh()
    with steady(net, "swap", share="92%") as core:
        for _ in range(4):
            loss = loss_of(net)
            in_thread(loss.backward)
            assert_same(gradients(net), usual)
        assert not core.stretches.off and not core.stretches.allowed


def in_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("at", [0, 3, 7])
def test_what_was_left_alone_counts_when_track_is_lost(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, found = fresh(), list[int]()
    with steady(net, "swap", share="92%") as core:
        for alone in (True, False):
            if not alone:
                for _ in range(STEADY):
                    loss_of(net).backward()
                monkeypatch.setattr(Expected, "may_leave_alone", lambda *args: False)
            loss = loss_of(net, do_at(at, ODD["one op more"]))
            assert core.engine.learner.given_up is alone
            with core:
                found.append(core.engine.ledger.unevicted_bytes)
            loss.backward()
            ended(core)
    assert found[1] <= found[0] <= found[1] + 16 * 24 * 4  # and what the next op would have saved, had it come


class Sized(Net):
    """The same ops may be of other sizes in the middle of a step."""

    rows = 16

    def forward(self, x: Tensor, between: Between | None = None) -> Tensor:
        def beside(at: int, x: Tensor) -> Tensor:
            if at != 5:
                return x
            return x + (torch.linspace(0, 1, self.rows).unsqueeze(1) * self.layers[at].bias).tanh().exp().mean()

        return super().forward(x, beside)


def test_the_same_ops_of_other_sizes_are_others() -> None:
    torch.manual_seed(1)
    net, other = Sized(), Sized()
    other.load_state_dict(net.state_dict())
    other.rows = 400
    loss_of(other).backward()
    with steady(net, "swap", share="92%") as core:
        net.rows = 400
        loss = loss_of(net)
        assert core.engine.learner.given_up and not core.stretches.off
        loss.backward()
        ended(core)
    assert_same(gradients(net), gradients(other))


class Products(Net):
    """The backward of a product computes otherwise while a dispatch mode is on the stack."""

    def forward(self, x: Tensor, between: Between | None = None) -> Tensor:
        def multiplied(at: int, x: Tensor) -> Tensor:
            x = x.tanh() * (1.5 + x.sigmoid()).prod(1, keepdim=True).log()
            return x if between is None else between(at, x)

        return super().forward(x, multiplied)


@pytest.mark.parametrize("why", ["a hook", "a late hook", "one op more"])
def test_nobody_sees_the_backward_of_what_was_left_alone(why: str) -> None:
    def step(net: Net) -> list[Tensor]:
        if why == "a hook":
            net.layers[0].weight.register_hook(torch.neg)
        loss = loss_of(net, do_at(5, ODD[why]) if why in ODD else None)
        if why == "a late hook":
            net.layers[0].weight.register_hook(torch.neg)
        loss.backward()
        return gradients(net)

    torch.manual_seed(1)
    expected = step(Products())
    torch.manual_seed(1)
    net = Products()
    with steady(net, "swap", share="92%"):
        assert_same(step(net), expected)


def test_what_is_written_is_told_by_autograd() -> None:
    net = fresh()
    with steady(net):
        kept: list[Tensor] = []
        loss = loss_of(net, lambda index, x: (kept.append(x), x)[1])
        for x in kept[:-1]:
            with torch.no_grad():
                x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("why", ["", "timeline", "rescue", "records", "compiled", "device budget"])
def test_every_save_is_heard_of_where_more_may_have_to_be_done(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, net, taken, take_off = plain(), fresh(), list[int](), Stretches._take_off
    with steady(net, "swap", timeline=tmp_path / "t.jsonl" if why == "timeline" else None) as core:
        monkeypatch.setattr(Stretches, "_take_off", lambda self: taken.append(1) or take_off(self))
        if why == "rescue":
            core.oom_rescues = 1
        if why == "records":
            core.noted.given = True
        if why == "compiled":
            core.stretches.forbid()
        if why == "device budget":
            monkeypatch.setattr(core.engine.expected, "_headroom", SimpleNamespace(saved=int, needed=int))
        loss_of(net).backward()
        assert bool(taken) is (not why)
    assert_same(gradients(net), usual)


# -- under plans of all kinds -----------------------------------------------------------------------------------------
WAYS = (Action.SWAP, Action.RECOMPUTE, Action.KEEP)


def at_random(task: Task, seed: int) -> Plan:
    """What becomes of each storage is drawn, as far as it can be and as the limit allows."""
    random = Random(seed)
    weights, actions = [random.random() ** 2 for _ in WAYS], []
    for node in (task.graph.nodes[node] for node in task.graph.saved):
        way = random.choices(WAYS, weights)[0] if node.evictable else Action.KEEP
        replayable = node.op is not None and task.graph.ops[node.op].replayable
        actions.append(Action.SWAP if way is Action.RECOMPUTE and not replayable else way)
    kept = [order for order, action in enumerate(actions) if action is Action.KEEP]
    while (plan := assembled(task.graph, task.link, actions)).peak_bytes > task.limit_bytes and kept:
        if task.graph.nodes[task.graph.saved[order := kept.pop()]].evictable:
            actions[order] = Action.SWAP
    return plan


@in_pairs(seed=range(3), case=["gpt", "encoder"], where=["cpu", "chaos:0", "chaos:3", "late"], share=["40%", "75%"])
def test_steps_hold_their_limit(case: str, where: str, share: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies may be late, and the program may have let go of what goes long before anybody hears of a save."""
    steps, fits, peaks = STEADY, list[bool](), list[tuple[int, int]]()
    plain = train(CASES[case], steps)

    def planned(task: Task) -> Plan:
        plan = at_random(task, seed)
        fits.append(plan.peak_bytes <= task.limit_bytes)
        return plan

    monkeypatch.setitem(PLANNERS, "profile", planned)
    if where == "late":
        card = LateCard()
        monkeypatch.setattr(session, "make_device", lambda name, host: CudaDevice(card, host))
    policy = delta.load_policy("delta", {"filter.min_bytes": 0, "planner.kind": "profile"})
    with delta.evict(activations=share, policy=policy, device="cuda" if where == "late" else where) as run:
        assert run._core is not None
        run._core.planning.close()  # nobody looks for a better plan
        engine = run._core.engine
        finish = engine._finish_step
        monkeypatch.setattr(
            engine, "_finish_step", lambda *args: peaks.append((args[1], engine.limit_bytes or 0)) or finish(*args)
        )
        evicted = train(CASES[case], steps)
    assert plain.differences(evicted) == []
    assert not all(fits) or all(peak_bytes <= limit_bytes for peak_bytes, limit_bytes in peaks[4:])
