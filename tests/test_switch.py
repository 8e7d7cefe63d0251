"""When backward runs without the recorder, and that no write in it is missed for that."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_recorder import depth
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

import delta
from delta.errors import StorageModifiedError
from delta.planner import PLANNERS, Plan, Task
from delta.planner.assemble import plan_of
from delta.runtime.planning import PlanningAside
from delta.runtime.recorder import Recorder
from delta.runtime.unseen import UnseenBackward
from delta.types import Action

STEPS = 12
ODD = 9
Act = Callable[[], object]


class Shifted(nn.Module):
    """Layers that share a shift. Autograd does not save it, so backward may write into it, but replays read it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.shift = nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor, midway: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(torch.sin(layer(x) + self.shift))
            if index == 3:
                x = midway(x)
        return x


class Acting(torch.autograd.Function):
    """Does something in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Act) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return grad.clone(), None


class Training:
    """Steps of one model, and what came of each."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = Shifted()
        self.optimizer = torch.optim.SGD([self.model.shift], lr=0.5, weight_decay=0.5)
        self.at = 0

    def shift_versioned(self) -> None:
        with torch.no_grad():
            self.model.shift.add_(0.5)

    def shift_unversioned(self) -> None:
        self.model.shift.data.add_(0.5)

    def step(self, midway: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
        x = torch.randn(16, 24)
        loss = self.model(x, midway).square().mean()
        loss.backward()
        numbers = [loss.detach(), *(p.grad.clone() for p in self.model.parameters()), self.model.shift.detach().clone()]
        self.model.zero_grad(set_to_none=False)
        self.at += 1
        return numbers

    def now_and_then(self, act: Act) -> Act:
        """When steps go by a routine, and then once more."""
        return lambda: act() if self.at in (ODD, STEPS - 1) else None


Writer = Callable[[Training], Callable[[Tensor], Tensor]]


def by_a_function(training: Training) -> Callable[[Tensor], Tensor]:
    return lambda x: Acting.apply(x, training.shift_unversioned)


def by_a_hook_now_and_then(training: Training) -> Callable[[Tensor], Tensor]:
    act = training.now_and_then(training.shift_unversioned)
    training.model.layers[3].weight.register_post_accumulate_grad_hook(lambda _: act())
    return lambda x: x


def by_a_hook_of_a_gradient_now_and_then(training: Training) -> Callable[[Tensor], Tensor]:
    act = training.now_and_then(training.shift_unversioned)
    training.model.layers[3].bias.register_hook(lambda _: act())
    return lambda x: x


def by_a_late_hook(training: Training) -> Callable[[Tensor], Tensor]:
    """Of which there is no sign in the steps that are learned from."""
    weight = training.model.layers[3].weight

    def midway(x: Tensor) -> Tensor:
        if training.at == ODD:
            weight.register_post_accumulate_grad_hook(lambda _: training.shift_unversioned())
        return x

    return midway


def by_an_optimizer_now_and_then(training: Training) -> Callable[[Tensor], Tensor]:
    act = training.now_and_then(lambda: training.optimizer.step())
    edge = torch.autograd.graph.get_gradient_edge(training.model.layers[3].weight)
    edge.node.register_hook(lambda *_: act())
    training.kept = edge  # a node's hooks are there as long as somebody knows it
    return lambda x: x


@contextmanager
def seen_in_backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many ops of backward the recorder sees, by step."""
    seen: Counter[str] = Counter()
    dispatch = Recorder.__torch_dispatch__

    def counting(self: Recorder, func: Any, *given: Any) -> Any:
        seen[func._schema.name] += torch._C._current_graph_task_id() != -1
        return dispatch(self, func, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "__torch_dispatch__", counting)
        yield seen


def evict(training: Training, device: str = "cpu", share: str = "60%") -> delta.evict:
    """With a model at hand only its parameters' hooks count, not those of other tests."""
    policy = delta.load_policy("recompute", {"filter.min_bytes": 0})
    return delta.evict(activations=share, policy=policy, model=training.model, device=device)


@pytest.mark.usefixtures("one_thread")
def test_backward_is_seen_until_steps_go_by_a_routine(monkeypatch):
    training = Training()
    with evict(training) as run, seen_in_backward(monkeypatch) as seen:
        by_step = []
        for _ in range(8):
            followed, before = run._core.engine.routine is not None, seen.total()
            training.step()
            by_step.append((followed, seen.total() - before))
    assert run.report().evictions["recompute"]
    assert {followed for followed, _ in by_step} == {True, False}
    assert all((count == 0) is followed for followed, count in by_step)


WRITERS = [
    by_a_function,
    by_a_hook_now_and_then,
    by_a_hook_of_a_gradient_now_and_then,
    by_a_late_hook,
    by_an_optimizer_now_and_then,
]


def trained(training: Training, writer: Writer, began: Act = lambda: None) -> list[Tensor]:
    midway, numbers = writer(training), []
    for _ in range(STEPS):
        began()
        numbers += training.step(midway)
    return numbers


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("device", ["cpu", "chaos:2"])
def test_what_backward_writes_into_is_replayed_as_it_was(writer, device):
    plain = trained(Training(), writer)
    training, followed = Training(), []
    with evict(training, device) as run:
        evicted = trained(training, writer, lambda: followed.append(run._core.engine.routine is not None))
    assert followed[ODD - 1 : ODD + 1] == [True, True]
    assert all(torch.equal(a, b) for a, b in zip(plain, evicted, strict=True))


def four_made_again(task: Task) -> Plan:
    """A plan that holds no matter how long ops take."""
    nodes = [task.graph.nodes[node] for node in task.graph.saved]
    going = [order for order, node in enumerate(nodes) if node.evictable and node.op is not None][:4]
    actions = [Action.RECOMPUTE if order in going else Action.KEEP for order in range(len(nodes))]
    return plan_of(task.graph, task.link, actions)


def alone_when(monkeypatch: pytest.MonkeyPatch, training: Training) -> dict[int, int]:
    """By step: how many storages are left to autograd alone when its backward begins."""
    found: dict[int, int] = {}
    entered = UnseenBackward.entered

    def noted(self: UnseenBackward) -> Any:
        found[training.at] = len(self._core.engine.learner.alone)
        return entered(self)

    monkeypatch.setattr(UnseenBackward, "entered", noted)
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("writer", [by_a_late_hook, by_a_hook_now_and_then, by_a_hook_of_a_gradient_now_and_then])
def test_hooks_of_parameters_are_seen_where_something_is_left_alone(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the recorder must not be on in the rest of backward."""
    monkeypatch.setitem(PLANNERS, "profile", four_made_again)
    monkeypatch.setattr(PlanningAside, "step_begins", lambda _: None)
    plain = trained(Training(), writer)
    training = Training()
    alone = alone_when(monkeypatch, training)
    with evict(training, share="80%") as run:
        evicted = trained(training, writer)
    assert alone[ODD] > 0 and run.report().evictions["recompute"]
    assert all(torch.equal(a, b) for a, b in zip(plain, evicted, strict=True))


@pytest.mark.usefixtures("one_thread")
def test_hooks_of_parameters_are_the_program_s_own_again_after_backward() -> None:
    """... those that it has put there or taken off in backward as well; one that is called by a backward of a hook is
    seen once."""
    training, called = Training(), list[Any]()
    weight = training.model.layers[3].weight
    other = nn.Parameter(torch.ones(3))

    def hook(_: Tensor) -> None:
        called.append(len(_get_current_dispatch_mode_stack()))
        if len(called) == 1:
            handles[1].remove()
            handles.append(weight.register_post_accumulate_grad_hook(second))
            with torch.enable_grad():
                (other * other).sum().backward()

    def second(_: Tensor) -> None:
        called.append("second")

    def inner(_: Tensor) -> None:
        called.append(("inner", len(_get_current_dispatch_mode_stack())))

    other.grad = torch.zeros(3)
    training.model.register_parameter("other", other)
    with evict(training):
        for _ in range(8):
            training.step()
        other.register_hook(inner)
        handles = [weight.register_post_accumulate_grad_hook(each) for each in (hook, second)]
        training.step()
        hooks = weight._post_accumulate_grad_hooks
        assert hooks is not None and list(hooks.values()) == [hook, second]
        assert other._backward_hooks is not None and list(other._backward_hooks.values()) == [inner]
    assert called[:2] == [1, ("inner", 1)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("writer", "before"), [(by_a_function, True), (by_a_late_hook, False), (by_an_optimizer_now_and_then, False)]
)
def test_once_backward_has_written_it_is_seen(writer, before, monkeypatch):
    """An optimizer tells of itself, so nothing is amiss in the first step that has one at work in backward."""
    training, counts = Training(), []
    with evict(training), seen_in_backward(monkeypatch) as seen:
        trained(training, writer, lambda: counts.append(seen.total()))
    assert (counts[ODD - 1] < counts[ODD]) is before
    assert counts[ODD + 1] < counts[ODD + 2]


def test_hooks_of_a_parameter_are_known_after_it_was_swapped():
    training = Training()
    with evict(training) as run:
        training.step()
        bias = training.model.layers[5].bias
        torch.utils.swap_tensors(bias, nn.Parameter(bias.detach().clone()))
        assert not run._core.persistent.hooks()
        bias.register_hook(lambda _: None)
        assert run._core.persistent.hooks() == [bias._backward_hooks]


@pytest.mark.usefixtures("one_thread")
def test_a_write_that_comes_for_the_first_time_and_unseen_is_refused_once():
    """Nothing tells of it but the version counter. From then on backward is seen."""
    training = Training()
    act = training.now_and_then(training.shift_versioned)

    def writing(_: Training) -> Callable[[Tensor], Tensor]:
        return lambda x: Acting.apply(x, act)

    with evict(training):
        with pytest.raises(StorageModifiedError, match="in backward for the first time"):
            trained(training, writing)
        assert training.at == ODD
        for _ in range(3):
            training.step(writing(training))
    assert training.at == STEPS


class Refused(RuntimeError):
    pass


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # of a step that saves more than was planned for
def test_the_recorder_is_back_after_a_backward_that_failed():
    training = Training()

    def refuse() -> None:
        raise Refused

    with evict(training):
        for _ in range(8):
            training.step()
        before = depth()
        with pytest.raises(Refused):
            training.step(lambda x: Acting.apply(x, refuse))
        assert depth() == before == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # of a step that saves more than was planned for
def test_what_an_optimizer_was_about_to_write_is_forgotten_when_it_fails():
    training = Training()

    def refuse() -> None:
        raise Refused

    with evict(training) as run:
        for _ in range(8):
            training.step()
        training.optimizer.register_step_pre_hook(lambda *_: refuse())
        with pytest.raises(Refused):
            training.step(lambda x: Acting.apply(x, training.optimizer.step))
        assert run._switch._unseen._written is None


class Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_thread")
def test_below_another_mode_the_recorder_stays(monkeypatch):
    training = Training()
    with evict(training), seen_in_backward(monkeypatch) as seen:
        for _ in range(8):
            training.step()
        before = seen.total()
        with Idle() as above:
            training.step()
            assert _get_current_dispatch_mode() is above
    assert seen.total() > before


def test_autograd_is_as_it_was_after_the_block():
    run = torch.autograd._engine_run_backward
    with delta.evict(activations="50%", device="cpu"):
        assert torch.autograd._engine_run_backward is not run
    assert torch.autograd._engine_run_backward is run


class Waiting(torch.optim.SGD):
    """Steps while another thread does something."""

    def __init__(self, *given: Any, meanwhile: Act) -> None:
        super().__init__(*given, lr=0.1)
        self.meanwhile = meanwhile

    def step(self, closure: Any = None) -> Any:
        thread = threading.Thread(target=self.meanwhile)
        thread.start()
        thread.join()
        return super().step(closure)


def test_an_optimizer_in_another_thread_turns_nothing():
    """Optimizers tell of themselves in every thread; the stack of modes is one thread's."""
    model, other, depths = Shifted(), nn.Linear(4, 4), []
    others = torch.optim.SGD(other.parameters(), lr=0.1)

    def trains_elsewhere() -> None:
        other(torch.ones(2, 4)).sum().backward()
        others.step()
        depths.append(depth())

    ours = Waiting(list(model.parameters()), meanwhile=trains_elsewhere)
    off = []
    ours.register_step_pre_hook(lambda *_: off.append(depth() == 0))
    policy = delta.load_policy("recompute", {"filter.min_bytes": 0})
    with delta.evict(activations="60%", policy=policy, model=model, device="cpu"):
        for _ in range(3):
            model(torch.randn(16, 24)).square().mean().backward()
            ours.step()
            assert depth() == 1
    assert all(off) and depths == [0, 0, 0] and depth() == 0
