"""Ctrl-C in the midst of a copy that the main thread makes itself: no half of one is ever taken for the value."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import delta
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.worker import Worker

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:a copy to the host failed:RuntimeWarning"),
]


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())])


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.linspace(-1, 1, 32 * 32).reshape(32, 32)).square().mean()
    return loss


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def interrupt_once(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The next time that the main thread makes this system call."""
    real, left = getattr(os, call), [1]

    def interrupted(*args: Any) -> Any:
        if left and threading.current_thread() is threading.main_thread():
            left.clear()
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(os, call, interrupted)


@pytest.fixture
def plain() -> list[Tensor]:
    model = net()
    loss_of(model).backward()
    return gradients(model)


def swapping(model: nn.Module) -> delta.evict:
    policy = delta.load_policy("swap", {"filter.min_bytes": 0})
    return delta.evict(activations="0%", policy=policy, model=model, device="cpu")


def left_behind(run: delta.evict) -> tuple[int, int]:
    assert run._core is not None and isinstance(run._core.device, CpuDevice)
    assert run._core.device._lane.coming_bytes == 0
    return run._core.engine.ledger.handles, run._core.device.host_bytes()


def backward_twice(model: nn.Module, loss: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The first is interrupted."""
    interrupt_once(monkeypatch, "preadv")
    with pytest.raises(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return gradients(model)


def test_a_copy_back_that_no_thread_had_begun(plain: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    with swapping(model) as run, monkeypatch.context() as busy:
        loss = loss_of(model)
        busy.setattr(Worker, "submit", lambda *_: None)
        found = backward_twice(model, loss, busy)
    assert all(map(torch.equal, plain, found))
    assert left_behind(run) == (0, 0)


def test_a_copy_back_after_the_block(plain: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread is."""
    model = net()
    with swapping(model) as run:
        loss = loss_of(model)
    assert all(map(torch.equal, plain, backward_twice(model, loss, monkeypatch)))
    assert left_behind(run) == (0, 0)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_copy_out(stopped: bool, plain: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no thread had begun, or that is made as it is asked for, because no thread could be started."""
    model = net()
    with swapping(model) as run, monkeypatch.context() as busy:
        assert run._core is not None
        run._core.device.bandwidth()  # opens the file
        busy.setattr(Worker, "submit", lambda _, job: job.run() if stopped else None)
        interrupt_once(busy, "pwritev")
        with pytest.raises(KeyboardInterrupt):
            loss_of(model)
        loss_of(model).backward()
    assert all(map(torch.equal, plain, gradients(model)))
    assert left_behind(run) == (0, 0)
