"""What copies take from compute on a CPU: as it is reckoned, with made-up times, and as the device measures it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from delta.config import HostConfig
from delta.errors import SwapError
from delta.runtime.device import contention, cpu
from delta.runtime.device.base import Direction
from delta.runtime.device.contention import share_taken
from delta.runtime.device.cpu import CpuDevice

ROUND_NS = 10_000
COPY_NS: dict[Direction, float] = {"out": 4_000_000, "in": 6_000_000}


class Machine:
    """A clock, compute that takes `ROUND_NS`, or more while copies are under way, and a thread to do them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, taken: dict[Direction, float]) -> None:
        self.now_ns, self.copying_to_ns, self.taken, self.share = 0.0, 0.0, taken, 0.0
        monkeypatch.setattr(contention.time, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(contention.threading, "Thread", self.thread)
        monkeypatch.setattr(contention, "_work", lambda: self.compute)

    def compute(self) -> None:
        share = self.share if self.now_ns < self.copying_to_ns else 0.0
        self.now_ns += ROUND_NS / (1 - share)

    def copy(self, direction: Direction) -> Callable[[], None]:
        def run() -> None:
            """Lasts as long as alone; of that, `taken` is lost to compute."""
            self.share = self.taken[direction]
            self.copying_to_ns = max(self.copying_to_ns, self.now_ns) + COPY_NS[direction]

        return run

    def thread(self, target: Callable[[], None], **_: Any) -> Any:
        machine = self

        class Thread:
            def start(self) -> None:
                target()

            def is_alive(self) -> bool:
                return machine.now_ns < machine.copying_to_ns

            def join(self) -> None:
                assert not self.is_alive()

        return Thread()

    def share_taken(self) -> float:
        return share_taken({"out": self.copy("out"), "in": self.copy("in")}, COPY_NS)


@pytest.mark.parametrize(
    ("out", "back", "share"),
    [(0.0, 0.0, 0.0), (0.5, 0.0, 0.2), (0.0, 0.5, 0.3), (0.5, 0.25, 0.35), (0.9, 0.9, 0.9)],
)
def test_both_directions_count_by_their_time(
    out: float, back: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, {"out": out, "in": back})
    assert machine.share_taken() == pytest.approx(share, abs=0.002)


def test_copies_that_take_longer_than_alone_count_no_more_than_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"out": 0.99, "in": 0.99})
    slow = {"out": machine.copy("out"), "in": machine.copy("in")}
    assert share_taken(slow, {"out": COPY_NS["out"] / 3, "in": COPY_NS["in"] / 3}) == 1.0


def test_one_round_beside_something_else_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"out": 0.2, "in": 0.2})
    lost_ns, rounds = contention._lost_ns, iter(range(100))

    def lost(*given: Any) -> float:
        return lost_ns(*given) + (1e9 if next(rounds) in (0, 3) else 0)

    monkeypatch.setattr(contention, "_lost_ns", lost)
    assert machine.share_taken() == pytest.approx(0.2, abs=0.002)


def test_a_copy_that_fails_is_told() -> None:
    def fail() -> None:
        raise SwapError("broken")

    with pytest.raises(SwapError, match="broken"):
        share_taken({"out": fail}, {"out": 1e6})


def test_no_copy_is_under_way_any_more_when_compute_is_interrupted() -> None:
    """Its room is given back then."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert go_on.wait(5)
        ended.set()

    def compute() -> None:
        assert begun.wait(5)
        threading.Timer(0.01, go_on.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contention._lost_ns(copy, 1, compute, 1.0)
    assert ended.is_set()


class Seen(TorchDispatchMode):
    """A mode of the program's, which counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuDevice]:
    monkeypatch.setattr(cpu, "_interference", {})
    device = CpuDevice(HostConfig(spill_dir=str(spill_dir)))
    yield device
    device.close()


def test_the_program_notices_nothing(device: CpuDevice) -> None:
    before, graph = torch.get_rng_state(), torch.is_grad_enabled()
    with Seen() as seen:
        assert 0 <= device.interference() <= 1
    assert seen.ops == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled() == graph
    assert device.host_bytes() == 0


def test_it_is_measured_once_for_each_number_of_threads(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, spill_dir: Path
) -> None:
    found = iter((0.25, 0.5))
    monkeypatch.setattr(CpuDevice, "_contend", lambda _: next(found))
    other = CpuDevice(HostConfig(spill_dir=str(spill_dir)))
    assert [device.interference(), other.interference()] == [0.25, 0.25]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert [device.interference(), other.interference()] == [0.5, 0.5]
    finally:
        torch.set_num_threads(threads)
    assert other.interference() == 0.25
    other.close()


def test_a_file_system_that_fails_is_told(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.bandwidth()
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(SwapError, match="broken"):
        device.interference()
    assert device.host_bytes() == 0
