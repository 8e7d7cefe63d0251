"""What was in use between two looks at a process: by another thread, while the first one is busy."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from delta.runtime.device import peak_watch
from delta.runtime.device.peak_watch import PeakWatch
from delta.runtime.rawmem import ResidentMeter, heap_bytes, trim_heap

MIB = 2**20


@pytest.fixture
def watch() -> Iterator[PeakWatch]:
    watch = PeakWatch(ResidentMeter())
    yield watch
    watch.close()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "delta-peaks"]


class Heap:
    """What is seen of the heap: whoever looks at it waits until it is told what there is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked, self._told, self._nbytes = threading.Semaphore(0), threading.Semaphore(0), 0
        self._over = False
        monkeypatch.setattr(peak_watch, "heap_bytes", self)

    def __call__(self) -> int:
        self._asked.release()
        assert self._over or self._told.acquire(timeout=10)
        return self._nbytes

    def reached(self) -> None:
        """Somebody is about to look."""
        assert self._asked.acquire(timeout=10)

    def tell(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._told.release()

    def ends(self) -> None:
        """Nobody waits any more."""
        self._over = True
        self._told.release()


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end_s
        threading.Event().wait(1e-3)


@pytest.mark.skipif(heap_bytes() is None, reason="the C library does not say")
def test_what_was_there_between_two_looks_is_seen_and_is_not_there_at_the_next_one(watch: PeakWatch) -> None:
    trim_heap()
    before, resident = heap_bytes() or 0, ResidentMeter().read_bytes()
    watch.start()
    tensor, seen = torch.ones(16 * MIB), [0, 0]

    def look() -> bool:
        seen[:] = map(max, seen, watch.take())
        return seen[0] >= before + 64 * MIB and seen[1] >= resident + 60 * MIB

    until(look)
    del tensor
    trim_heap()
    watch.take()
    until(lambda: min(watch._most_bytes) > 0)
    given_out, resident_now = watch.take()
    assert 0 < given_out < before + 16 * MIB
    assert 0 < resident_now < resident + 48 * MIB


def test_the_most_counts(watch: PeakWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    watch.start()
    for nbytes in (30, 50, 20):
        heap.reached()
        heap.tell(nbytes)
    heap.reached()
    given_out, resident = watch.take()
    assert given_out == 50
    assert resident > MIB
    heap.ends()


def test_what_is_seen_while_it_is_taken_is_no_part_of_what_comes_next(
    watch: PeakWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of an op that has ended by then."""
    heap = Heap(monkeypatch)
    watch.start()
    heap.reached()
    assert watch.take() == (0, 0)
    heap.tell(100)
    heap.reached()
    heap.tell(7)
    heap.reached()
    assert watch.take()[0] == 7
    heap.ends()


def test_nobody_looks_before_it_is_asked_and_after_it_was_stopped(watch: PeakWatch) -> None:
    assert (watch.take(), threads()) == ((0, 0), [])
    watch.start()
    watch.start()
    assert len(threads()) == 1
    until(lambda: watch._most_bytes[1] > 0)
    watch.stop()
    assert threads() == []
    watch.stop()


def test_what_was_seen_before_it_was_stopped_is_forgotten(watch: PeakWatch) -> None:
    watch.start()
    watch.stop()
    watch._most_bytes[:] = [10**15, 10**15]  # and nobody has asked for it
    watch.start()
    assert max(watch.take()) < 10**15


def test_the_thread_itself_may_stop_it(watch: PeakWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it collects a handle, the last one of a step."""
    stopped = threading.Event()

    def heap() -> int:
        watch.stop()
        stopped.set()
        return 0

    monkeypatch.setattr(peak_watch, "heap_bytes", heap)
    watch.start()
    assert stopped.wait(10)
    until(lambda: not threads())


def test_where_no_thread_can_be_started_nobody_looks(watch: PeakWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        watch.start()
    assert watch.take() == (0, 0)
    watch.stop()
    watch.start()
    assert len(threads()) == 1


def test_once_closed_it_does_not_begin_again(watch: PeakWatch) -> None:
    watch.start()
    watch.close()
    watch.start()
    assert threads() == []


def test_to_wait_for_a_look_is_not_to_take_long(watch: PeakWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the interpreter's lock is another thread's."""
    slept: list[float] = []
    monkeypatch.setattr(peak_watch.time, "sleep", slept.append)
    heap = Heap(monkeypatch)
    watch.start()
    for _ in range(3):
        heap.reached()
        threading.Event().wait(0.05)
        heap.tell(0)
    heap.reached()
    assert max(slept) < 0.5, "50 ms of work would be 2 % of 2.5 s"
    heap.ends()


def test_where_a_look_takes_long_there_are_few(watch: PeakWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a heap of many pieces."""
    slept: list[float] = []
    clock = iter(range(10**6))  # a second for each look
    monkeypatch.setattr(peak_watch.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(peak_watch.time, "sleep", slept.append)
    watch.start()
    until(lambda: len(slept) > 2)
    watch.stop()
    assert set(slept) == {50.0}
