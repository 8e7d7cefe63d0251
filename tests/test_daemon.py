"""The background thread."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import delta
from delta.runtime import session
from delta.runtime.core import Core
from delta.runtime.daemon import Daemon

LONG_S, SHORT_S = 3600.0, 0.001  # never within a test, and many times


class Owner:
    """Counts its ticks, and raises what it is told to."""

    def __init__(self) -> None:
        self.ticks = threading.Semaphore(0)
        self.error: str | None = None

    def tick(self) -> None:
        self.ticks.release()
        if self.error is not None:
            raise KeyError(self.error)

    def ticked(self, times: int = 1) -> bool:
        return all(self.ticks.acquire(timeout=5) for _ in range(times))


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], None], float], Daemon]]:
    daemons: list[Daemon] = []

    def start(tick: Callable[[], None], period_s: float) -> Daemon:
        daemons.append(Daemon(tick, period_s, "delta-test"))
        daemons[-1].start()
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.stop()


Start = Callable[[Callable[[], None], float], Daemon]


def test_it_ticks_by_itself(owner: Owner, start: Start) -> None:
    start(owner.tick, 0.001)
    assert owner.ticked(5)


def test_stop_ends_the_thread_and_may_be_called_again(owner: Owner, start: Start) -> None:
    daemon = start(owner.tick, LONG_S)
    daemon.stop()
    assert not daemon.is_alive()
    daemon.stop()
    assert not owner.ticks.acquire(blocking=False)


def test_stop_waits_for_a_tick_under_way(start: Start) -> None:
    inside, leave, left = threading.Event(), threading.Event(), threading.Event()

    def tick() -> None:
        inside.set()
        leave.wait(5)
        left.set()

    daemon = start(tick, SHORT_S)
    assert inside.wait(5)
    stopper = threading.Thread(target=daemon.stop)
    stopper.start()
    assert not left.is_set()
    leave.set()
    stopper.join()
    assert left.is_set()


def test_stop_before_start_and_from_inside(start: Start) -> None:
    Daemon(lambda: None, LONG_S, "delta-test").stop()
    daemons: list[Daemon] = []
    told = threading.Event()

    def tick() -> None:
        told.wait(5)
        daemons[0].stop()

    daemons.append(start(tick, SHORT_S))
    told.set()
    daemons[0]._thread.join(5)
    assert not daemons[0].is_alive()


def test_the_first_exception_is_raised_once_and_ticking_goes_on(owner: Owner, start: Start) -> None:
    Daemon(owner.tick, LONG_S, "delta-test").check()
    owner.error = "first"
    daemon = start(owner.tick, SHORT_S)
    assert owner.ticked()
    owner.error = "second"
    assert owner.ticked(3)
    owner.error = None
    assert owner.ticked(3)
    with pytest.raises(KeyError, match="first") as caught:
        daemon.check()
    assert "in tick" in caught.value.__notes__[0]  # where it came from
    daemon.check()


@pytest.mark.parametrize("error", [None, "kept in the daemon"])
def test_a_forgotten_owner_goes_and_the_thread_with_it(start: Start, error: str | None) -> None:
    owner = Owner()  # not the fixture, which pytest holds on to
    owner.error = error
    daemon = start(owner.tick, 0.001)
    assert owner.ticked(2)
    alive = weakref.ref(owner)
    del owner
    end = time.monotonic() + 5
    while alive() is not None and time.monotonic() < end:
        gc.collect()
    daemon._thread.join(5)
    assert not daemon.is_alive()


def test_a_forgotten_daemon_ends_its_thread(owner: Owner) -> None:
    daemon = Daemon(owner.tick, LONG_S, "delta-test")
    daemon.start()
    thread = daemon._thread
    del daemon
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_the_process_can_end_while_it_runs() -> None:
    code = "from delta.runtime.daemon import Daemon; d = Daemon(lambda: None, 3600.0, 'delta-test'); d.start()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_it_costs_next_to_nothing_when_idle(start: Start) -> None:
    spent_ns: list[int] = []

    def tick() -> None:
        spent_ns.append(time.thread_time_ns())

    start(tick, 0.01)  # five times as often as it will be at most
    time.sleep(0.3)
    assert len(spent_ns) > 2
    # 1 % would be enough here for 0.2 % there; a busy machine gets some slack
    assert (spent_ns[-1] - spent_ns[0]) / 0.3e9 < 0.05


@pytest.mark.parametrize("period_s", [0.0, -1.0, float("nan")])
def test_a_period_must_be_above_zero(period_s: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Daemon(lambda: None, period_s, "delta-test")


@pytest.mark.parametrize("failed", [False, True])
def test_a_session_whose_samples_fail_says_so_at_its_end(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    """Unless the program itself has failed."""
    sampled = threading.Event()

    def sample(_: Core) -> None:
        sampled.set()
        raise KeyError("no sample")

    monkeypatch.setattr(Core, "sample", sample)
    monkeypatch.setattr(session, "IDLE_S", SHORT_S)
    with pytest.raises(ValueError if failed else KeyError), delta.evict(device="cpu"):
        assert sampled.wait(5)
        if failed:
            raise ValueError("of the program")


@pytest.mark.parametrize("written", [False, True])
def test_samples_are_taken_often_only_for_a_timeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: bool
) -> None:
    periods_s: list[float] = []
    made = session.Daemon

    def daemon(tick: Callable[[], None], period_s: float, name: str) -> Daemon:
        periods_s.append(period_s)
        return made(tick, period_s, name)

    monkeypatch.setattr(session, "Daemon", daemon)
    with delta.evict(device="cpu", timeline=tmp_path / "timeline.jsonl" if written else None):
        pass
    assert periods_s == [session.SAMPLE_S if written else session.IDLE_S]


def test_memory_is_looked_at_when_backward_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "IDLE_S", LONG_S)
    weight = torch.randn(64, 64, requires_grad=True)
    with delta.evict(device="cpu") as run:
        before = run.report().peak_device_bytes
        weight.sin().sum().backward()
        assert before == 0 < run.report().peak_device_bytes
