"""While an optimizer steps nothing is recorded, unless something recorded still lives or its step runs forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inside import different
from torch import Tensor, nn

import delta
from delta.runtime.recorder import Recorder

STEPS = 8
POLICY = delta.load_policy("recompute", {"filter.min_bytes": 0})

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the ops that came by the recorder."""
    names: list[str] = []
    dispatch = Recorder.__torch_dispatch__

    def noted(self: Recorder, func: Any, *rest: Any) -> Any:
        if not str(func).startswith("profiler."):  # PyTorch's own marks around a step
            names.append(str(func))
        return dispatch(self, func, *rest)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", noted)
    yield names


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))


def batch(index: int) -> Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(index))


def training(
    make: Callable[[nn.Module], torch.optim.Optimizer], around: Callable[[str], None] = lambda what: None
) -> list[Tensor]:
    model = net()
    optimizer = make(model)
    for index in range(STEPS):
        loss = model(batch(index)).square().mean()
        around("forward")
        loss.backward()
        around("begins")
        optimizer.step()
        around("ended")
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def test_no_op_of_an_optimizer_comes_by_the_recorder(seen: list[str]) -> None:
    plain = training(adam)
    during: list[int] = []
    with delta.evict(activations="80%", policy=POLICY) as run:
        assert run._core is not None
        engine, whole = run._core.engine, []

        def around(what: str) -> None:
            if what == "forward":
                whole.append(engine.learner.recorded or engine.routine is not None)
            else:
                during.append(len(seen))

        evicted = training(adam, around)
    assert different(plain, evicted) == []
    assert during[::2] == during[1::2], "nothing seen between the begin and the end of a step"
    assert during[0] > 0 and all(later > sooner for sooner, later in zip(during[1::2], during[2::2], strict=False))
    assert all(whole), "every step is seen from its first op, or follows a routine"
    assert run.report().modes["planned"] == STEPS - 1


def test_a_closure_is_recorded(seen: list[str]) -> None:
    """The forward of all steps is in it, and they become planned ones as others do."""

    def run_all() -> list[Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for index in range(STEPS):

            def closure(index: int = index) -> float:
                optimizer.zero_grad()
                loss = model(batch(index)).square().mean()
                loss.backward()
                return float(loss.detach())

            optimizer.step(closure)
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = run_all()
    with delta.evict(activations="40%", policy=POLICY) as run:
        evicted = run_all()
    assert different(plain, evicted) == []
    assert sum(name.startswith("aten.addmm") for name in seen) >= STEPS * 3
    assert run.report().modes["planned"] == STEPS - 1


def test_with_a_graph_alive_its_writes_are_seen(seen: list[str]) -> None:
    """The sum lives on and was made from the weight that the optimizer changes: it has to be the old one."""

    def program() -> list[Tensor]:
        torch.manual_seed(2)
        weight = torch.randn(64, 64, requires_grad=True)
        x = torch.randn(64, 64, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.5)
        found = []
        for _ in range(4):
            late = (x + weight.detach()).sin().exp()  # needed after the step; reads what the step writes
            (weight * 2).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            late.sum().backward()
            assert x.grad is not None
            found.append(x.grad.clone())
            x.grad = None
        return found

    plain = program()
    with delta.evict(activations="0%", policy=POLICY) as run:
        evicted = program()
    assert different(plain, evicted) == []
    assert run.report().recomputed_bytes > 0
    assert any(name.startswith("aten.add_") for name in seen)


def test_a_step_that_fails_leaves_a_session_that_goes_on(seen: list[str]) -> None:
    model = net()
    optimizer = adam(model)

    def fail(*given: object) -> None:
        raise ArithmeticError("no step today")

    depth = torch._C._len_torch_dispatch_stack()
    with delta.evict(activations="40%", policy=POLICY) as run:
        for index in range(STEPS):
            model(batch(index)).square().mean().backward()
            if index == STEPS // 2:
                hook = optimizer.register_step_post_hook(fail)
                with pytest.raises(ArithmeticError):
                    optimizer.step()
                hook.remove()
            else:
                optimizer.step()
            optimizer.zero_grad()
        before = len(seen)
        model(batch(0)).square().mean().backward()
        assert len(seen) > before
    assert torch._C._len_torch_dispatch_stack() == depth
    assert run.report().steps == STEPS + 1


def test_the_hooks_go_with_the_block() -> None:
    from torch.optim import optimizer as module

    before = len(module._global_optimizer_pre_hooks), len(module._global_optimizer_post_hooks)
    with delta.evict(activations="40%", policy=POLICY):
        pass
    assert (len(module._global_optimizer_pre_hooks), len(module._global_optimizer_post_hooks)) == before
