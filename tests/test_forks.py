"""Processes forked within a block: a data loader's workers inherit its hooks and its recorder."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import delta
from delta.errors import DeltaError
from delta.runtime.core import Core
from delta.runtime.recorder import Recorder
from delta.runtime.spill import SpillFile
from delta.timeline import read_timeline

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
PATIENCE_S = 60


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index)).mul(2).sin()


def trained(model: nn.Module, epochs: int) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for _ in range(epochs):
        for batch in DataLoader(Noise(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
            loss = model(batch).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return found


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())


@pytest.mark.parametrize("device", ["cpu", "chaos:2"])
@pytest.mark.parametrize("share", ["0%", "40%", None])
def test_a_data_loader_s_workers_train_as_plainly(device: str, share: str | None, tmp_path: Path) -> None:
    plain = trained(net(), 2)
    policy = delta.load_policy("delta", {"filter.min_bytes": 0})
    with delta.evict(activations=share, policy=policy, device=device, timeline=tmp_path / "t.jsonl"):
        evicted = trained(net(), 2)
    assert all(map(torch.equal, plain, evicted))


def in_a_child(does: Callable[[], None]) -> int:
    """What a forked process that does this ends with; 0 if all is well. One that hangs is ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        status = 1
        try:
            does()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(4, 16)).square().mean()
    return loss


@pytest.mark.parametrize("share", ["0%", None])
def test_what_is_inherited_does_nothing_though_a_lock_is_held(share: str | None) -> None:
    """Other threads do not live on in a forked process, and never let go of what they held."""
    model, held, go_on = net(), threading.Event(), threading.Event()
    step(model).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    policy = delta.load_policy("delta", {"filter.min_bytes": 0})

    with delta.evict(activations=share, policy=policy, device="cpu") as run:
        core = run._core
        assert core is not None
        saved = [step(model)]

        def holds() -> None:
            with core.lock, core.watch._lock:
                held.set()
                go_on.wait()

        thread = threading.Thread(target=holds)
        thread.start()
        held.wait()

        def trains() -> None:
            at_work: list[object] = []  # what a dying handle raises nobody would hear
            with pytest.MonkeyPatch.context() as patch:
                for kind, name in ((Recorder, "_record"), (Core, "hear")):
                    patch.setattr(kind, name, lambda *given: at_work.append(given))
                saved.clear()  # the parent's handles die
                step(model)
            assert not at_work
            model.zero_grad()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step(model).backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(map(torch.equal, found, expected))
            optimizer.step()
            with delta.evict(activations="0%", policy=policy, device="cpu") as own:
                step(model).backward()
            assert own.report().evictions

        def asks_for_the_parent_s() -> None:
            with pytest.raises(DeltaError, match="in a forked process"):
                saved[0].backward()

        try:
            assert in_a_child(trains) == 0
            assert share is None or in_a_child(asks_for_the_parent_s) == 0
        finally:
            go_on.set()
            thread.join()
        model.zero_grad()
        saved[0].backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))


@pytest.mark.parametrize("saved", [False, True])
def test_a_child_that_leaves_the_block_leaves_what_is_the_parent_s(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its I/O threads are those of the parent, and so is the file of events."""
    model, policy = net(), delta.load_policy("swap", {"filter.min_bytes": 0})
    path, begun, go_on = tmp_path / "t.jsonl.gz", threading.Event(), threading.Event()
    write = SpillFile.write

    def late(*given: Any) -> None:
        begun.set()
        go_on.wait()
        write(*given)

    with delta.evict(activations="50%", policy=policy, device="cpu", timeline=path) as run:
        core = run._core
        assert core is not None
        for _ in range(3):
            step(model).backward()
        kept = step(model) if saved else None
        with monkeypatch.context() as patch:
            patch.setattr(SpillFile, "write", late)
            core.device.copy_out(torch.UntypedStorage(2**16))
            begun.wait()
            core.sample()
            assert in_a_child(lambda: run.__exit__(None, None, None)) == 0
            go_on.set()
        if kept is not None:
            kept.backward()
        step(model).backward()
    events = list(read_timeline(path)[1])
    assert len(events) == len(set(map(str, events)))
