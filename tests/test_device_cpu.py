"""The CPU device: threads, failures of the disk, resident memory. The rest is in the conformance suite."""

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import delta
from delta.config import HostConfig
from delta.errors import HostFullError, PolicyError, SwapError
from delta.runtime.device import make_device, process_memory
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.worker import Job, Worker
from delta.runtime.pieces import BLOCK_BYTES
from delta.runtime.rawmem import HugePages, as_bytes, heap_bytes, peak_resident_bytes
from delta.units import Share

MIB = 2**20


@pytest.fixture
def device(spill_dir: Path) -> Iterator[CpuDevice]:
    device = CpuDevice(HostConfig(spill_dir=str(spill_dir)))
    yield device
    device.close()


def filled(nbytes: int, value: int) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(nbytes)
    as_bytes(storage).fill_(value)
    return storage


def io_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("delta-copy"))


class Gate:
    """Stands before a system call: tells that it is reached, and lets it pass when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.callers: list[str] = []
        self._real = getattr(os, call)
        monkeypatch.setattr(os, call, self)

    def __call__(self, fd: int, buffers: list[Any], offset: int) -> int:
        self.callers.append(threading.current_thread().name)
        self.reached.set()
        assert self.open.wait(5)
        return int(self._real(fd, buffers, offset))


def test_threads_start_when_needed_and_end(device: CpuDevice) -> None:
    assert io_threads() == []
    ticket = device.copy_out(filled(4096, 1))
    assert io_threads() == ["delta-copy-out"]
    device.wait(ticket)
    device.wait(device.copy_in(ticket.block))
    assert io_threads() == ["delta-copy-in", "delta-copy-out"]
    device.stop()
    assert io_threads() == []
    device.wait(device.copy_out(filled(4096, 1)))
    assert io_threads() == []


@pytest.mark.parametrize("phase", [0, 64, BLOCK_BYTES - 64])
def test_a_copy_out_goes_straight_wherever_the_heap_has_put_it_and_back_by_huge_pages(
    device: CpuDevice, spill_copies: list[int], monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    roomy = torch.UntypedStorage(MIB + BLOCK_BYTES)
    as_bytes(roomy).copy_(torch.arange(MIB + BLOCK_BYTES) % 251)
    start = (phase - roomy.data_ptr()) % BLOCK_BYTES
    storage = roomy[start : start + MIB]
    out = device.copy_out(storage)
    device.wait(out)
    assert sum(spill_copies) < 2 * BLOCK_BYTES
    spill_copies.clear()
    content = as_bytes(storage).clone()
    as_bytes(storage).zero_()
    with monkeypatch.context() as heap:
        heap.setattr(torch, "UntypedStorage", {MIB: storage}.__getitem__)  # gives the same memory again
        back = device.copy_in(out.block)
    device.wait(back)
    assert sum(spill_copies) == MIB
    assert back.storage is storage and torch.equal(as_bytes(storage), content)


def test_a_forgotten_device_ends_its_threads(spill_dir: Path) -> None:
    device = CpuDevice(HostConfig(spill_dir=str(spill_dir)))
    device.wait(device.copy_out(filled(4096, 1)))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("delta-copy")]
    del device
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert io_threads() == []


def test_it_is_not_ready_before_it_is_written(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.bandwidth()  # opens the file
    gate = Gate(monkeypatch, "pwritev")
    ticket = device.copy_out(filled(4096, 1))
    assert gate.reached.wait(5)
    assert not device.ready(ticket)
    assert ticket.storage is not None
    gate.open.set()
    device.wait(ticket)
    assert ticket.storage is None


def test_who_cannot_wait_for_its_turn_does_the_work(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading thread is held at a prefetch; a read that is needed now goes past it in the caller's thread."""
    outs = [device.copy_out(filled(4096, value)) for value in range(2)]
    for out in outs:
        device.wait(out)
    gate = Gate(monkeypatch, "preadv")
    prefetch = device.copy_in(outs[0].block)
    assert gate.reached.wait(5)
    needed = device.copy_in(outs[1].block)
    threading.Timer(0.05, gate.open.set).start()
    device.wait(needed)
    device.wait(prefetch)
    assert sorted(gate.callers) == sorted(["delta-copy-in", threading.current_thread().name])


def test_the_gil_is_free_while_the_disk_works(device: CpuDevice) -> None:
    tickets = [device.copy_out(filled(4 * MIB, 1)) for _ in range(8)]
    turns = 0
    while not device.ready(tickets[-1]):
        turns += 1
    assert turns > 10


@pytest.mark.parametrize("direction", ["out", "in"])
def test_the_source_survives_a_failed_copy(device: CpuDevice, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    storage = filled(5000, 7)
    good = device.copy_out(storage)
    device.wait(good)
    used = device.host_bytes()
    with monkeypatch.context() as patch:
        call = "pwritev" if direction == "out" else "preadv"
        patch.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        bad = device.copy_out(storage) if direction == "out" else device.copy_in(good.block)
        for _ in range(2):
            with pytest.raises(SwapError, match="broken"):
                device.wait(bad)
            with pytest.raises(SwapError, match="broken"):
                device.ready(bad)
    assert bad.storage is None
    assert device.host_bytes() == used
    assert bool((as_bytes(storage) == 7).all())
    device.free(bad.block) if direction == "out" else None
    again = device.copy_in(good.block)  # asked for again
    device.wait(again)
    assert again.storage is not None and bool((as_bytes(again.storage) == 7).all())


def test_a_disk_that_fills_up_is_a_full_host(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.bandwidth()
    monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    ticket = device.copy_out(filled(5000, 7))
    with pytest.raises(HostFullError, match=r"no room.*are free"):
        device.wait(ticket)
    assert device.host_bytes() == 0


def test_a_copy_in_of_a_copy_out_that_failed(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.bandwidth()
    gate = Gate(monkeypatch, "pwritev")
    gate._real = lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
    out = device.copy_out(filled(5000, 7))
    assert gate.reached.wait(5)
    back = device.copy_in(out.block)
    gate.open.set()
    with pytest.raises(SwapError, match="never completed"):
        device.wait(back)
    with pytest.raises(SwapError, match="broken"):
        device.wait(out)
    assert device.host_bytes() == 0


def test_a_failure_nobody_thought_of_reaches_the_waiter(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise KeyError("missing")

    monkeypatch.setattr(device._spill, "write", write)
    with pytest.raises(SwapError, match="copy out failed: KeyError"):
        device.wait(device.copy_out(filled(5000, 7)))


def test_a_copy_out_that_nobody_wants_is_given_up(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.bandwidth()
    gate = Gate(monkeypatch, "pwritev")
    first, second = device.copy_out(filled(4096, 1)), device.copy_out(filled(4096, 2))
    assert gate.reached.wait(5)
    device.free(second.block)
    gate.open.set()
    device.wait(second)
    device.wait(first)
    assert len(gate.callers) == 1


def test_the_host_limit_is_a_share_of_the_disk(spill_dir: Path) -> None:
    device = CpuDevice(HostConfig(spill_dir=str(spill_dir), limit=Share(0.25)))
    assert device._limit_bytes == pytest.approx(psutil.disk_usage(str(spill_dir)).free / 4, rel=0.05)
    device.close()


def test_real_transfers_update_the_bandwidth(device: CpuDevice) -> None:
    probed = device.bandwidth()
    for _ in range(20):
        ticket = device.copy_out(filled(MIB, 1))
        device.wait(ticket)
        device.free(ticket.block)
    assert device.bandwidth().out_bytes_per_s != probed.out_bytes_per_s
    assert device.bandwidth().in_bytes_per_s == probed.in_bytes_per_s


@pytest.mark.parametrize("capped", [True, False])
def test_resident_memory_falls_at_once_only_under_a_budget(device: CpuDevice, capped: bool) -> None:
    storage = filled(32 * MIB, 1)
    device.cap(MIB if capped else None)
    before = device.used_bytes()
    device.release(storage)
    fell = before - device.used_bytes()
    assert fell > 30 * MIB if capped else fell < 2 * MIB


@pytest.mark.parametrize("capped", [True, False])
def test_only_under_a_budget_the_heap_asks_for_huge_pages(
    monkeypatch: pytest.MonkeyPatch, device: CpuDevice, capped: bool
) -> None:
    """When the block begins, and whenever something will be faulted in anew."""
    asked = []
    monkeypatch.setattr(HugePages, "ask", lambda pages: asked.append(pages))
    device.cap(MIB if capped else None)
    device.trim()
    assert len(asked) == (2 if capped else 0)


def test_release_spares_what_a_tensor_shares(device: CpuDevice) -> None:
    device.cap(1)
    tensor = torch.ones(MIB)
    device.release(tensor.untyped_storage())
    assert bool((tensor == 1).all())


def test_trim_gives_the_heap_back(device: CpuDevice) -> None:
    if not hasattr(__import__("ctypes").CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    del (raised := [torch.ones(7 * MIB)])[0]  # 28 MiB: smaller tensors go to the heap from now on
    tensors = [torch.ones(MIB) for _ in range(16)]
    del tensors[::2], raised
    device.trim()
    full = device.used_bytes()
    tensors += [torch.ones(MIB) for _ in range(8)]
    assert device.used_bytes() - full > 24 * MIB
    del tensors[::2]
    device.trim()
    assert device.used_bytes() - full < 8 * MIB


def test_what_the_heap_merely_keeps_is_not_in_use(device: CpuDevice) -> None:
    if heap_bytes() is None:
        pytest.skip("the C library does not say")
    device.cap(1)
    del (raised := [torch.ones(7 * MIB)])[0]  # 28 MiB: smaller tensors go to the heap from now on
    before = device.in_use()[0]
    tensors = [torch.ones(MIB) for _ in range(16)]
    assert 60 * MIB < device.in_use()[0] - before < 68 * MIB
    full = device.used_bytes()
    del tensors[::2], raised
    assert device.used_bytes() > full - 4 * MIB  # resident still
    assert 28 * MIB < device.in_use()[0] - before < 36 * MIB


def test_a_peak_that_was_higher_than_any_before_is_seen(device: CpuDevice) -> None:
    device.in_use()
    room = max(0, peak_resident_bytes() - device.used_bytes())
    before = device.in_use()[0]
    for nbytes in (room + 64 * MIB, MIB):
        tensor = torch.ones(nbytes // 4)
        del tensor
        now, peak = device.in_use()
        risen = peak - before
        assert now - before < 16 * MIB
        assert risen > 48 * MIB if nbytes > MIB else risen < 16 * MIB


def test_a_peak_below_an_earlier_one_is_seen_only_where_peaks_are_watched(device: CpuDevice) -> None:
    """By another thread, while an op runs: here one that waits."""
    if heap_bytes() is None:
        pytest.skip("the C library does not say")
    del (highest := [torch.ones(64 * MIB)])[0]  # the most that there will be in this test
    device.cap(1)

    def risen(watched: bool) -> int:
        device.trim()
        before = device.in_use()[0]
        tensor, end_s = torch.ones(8 * MIB), time.monotonic() + 10
        while watched and device._memory._peak_watch._most_bytes[1] < device.used_bytes() and time.monotonic() < end_s:
            time.sleep(1e-3)
        assert time.monotonic() < end_s, "the other thread has not looked"
        del tensor
        return device.in_use()[1] - before

    assert risen(False) < 8 * MIB
    device.watch_peaks(True)
    assert 30 * MIB < risen(True) < 40 * MIB
    device.watch_peaks(False)
    assert risen(False) < 8 * MIB
    del highest


# In MiB: the limit; what is resident beside the heap; what the heap had given out, and kept, at the look before; the
# most it gave out since and the most that was resident, as the watch saw them; Linux's mark, 700 before; what the heap
# has given out and keeps now; the peak.
@pytest.mark.parametrize(
    ("budget", "beside", "before", "kept", "given_out", "resident", "mark", "now", "keeps", "peak"),
    [
        pytest.param(900, 100, 200, 0, 0, 0, 700, 210, 0, 310, id="nobody watches"),
        pytest.param(900, 100, 200, 0, 260, 360, 700, 210, 0, 360, id="all that was given out was resident"),
        pytest.param(900, 100, 200, 0, 260, 390, 700, 210, 0, 390, id="and another 30 where there was no hole for it"),
        pytest.param(900, 100, 200, 50, 260, 360, 700, 210, 0, 360, id="what was kept was given out"),
        pytest.param(900, 100, 200, 50, 220, 370, 700, 210, 0, 320, id="and was kept still"),
        pytest.param(900, 100, 200, 0, 500, 310, 700, 210, 0, 310, id="what was given out was not written"),
        pytest.param(900, 100, 200, 50, 0, 0, 720, 210, 400, 670, id="nobody watches but Linux"),
        pytest.param(600, 100, 200, 50, 500, 650, 700, 210, 0, 650, id="over the budget all counts"),
        pytest.param(600, 100, 200, 50, 0, 0, 720, 210, 0, 720, id="over it, and nobody watches"),
        pytest.param(None, 100, 200, 50, 500, 650, 700, 210, 0, 600, id="no budget"),
        pytest.param(900, None, 200, 0, 260, 390, 700, 210, 0, 390, id="what is beside the heap is not known"),
    ],
)
def test_what_a_peak_is_where_the_heap_keeps_some(
    device: CpuDevice,
    monkeypatch: pytest.MonkeyPatch,
    budget: int | None,
    beside: int | None,
    before: int,
    kept: int,
    given_out: int,
    resident: int,
    mark: int,
    now: int,
    keeps: int,
    peak: int,
) -> None:
    seen = {"given_out": before, "resident": before + (beside or 100) + kept, "mark": 700, "watched": (0, 0)}
    monkeypatch.setattr(process_memory, "heap_bytes", lambda: seen["given_out"] * MIB)
    monkeypatch.setattr(process_memory, "peak_resident_bytes", lambda: seen["mark"] * MIB)
    monkeypatch.setattr(device._memory._meter, "read_bytes", lambda: seen["resident"] * MIB)
    monkeypatch.setattr(device._memory._peak_watch, "take", lambda: tuple(nbytes * MIB for nbytes in seen["watched"]))
    monkeypatch.setattr(device._memory, "budget_bytes", budget * MIB if budget is not None else None)
    monkeypatch.setattr(device._memory, "_beside_heap_bytes", beside * MIB if beside is not None else None)
    device.in_use()
    seen |= {
        "given_out": now,
        "resident": now + (beside or 100) + keeps,
        "mark": mark,
        "watched": (given_out, resident),
    }
    assert device.in_use() == ((now + (beside or 100)) * MIB, peak * MIB)


@pytest.mark.parametrize("trims", [1, 2])
def test_a_peak_before_a_trim_is_remembered_and_what_was_kept_then_is_none(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, trims: int
) -> None:
    """200 MiB are given out and 100 beside the heap. It keeps 50, and an op has 30 more for a moment, before all that
    it keeps is trimmed away; what is seen meanwhile is of before. Another op has 10 more then."""
    seen, told = (
        {"resident": 350 * MIB},
        iter([(0, 0), (0, 0), *[(0, 380), (0, 380), (0, 305), (0, 305)][: 2 * trims], (0, 310), (0, 320)]),
    )
    monkeypatch.setattr(process_memory, "heap_bytes", lambda: 200 * MIB)
    monkeypatch.setattr(process_memory, "peak_resident_bytes", lambda: 700 * MIB)
    monkeypatch.setattr(process_memory, "trim_heap", lambda: seen.update(resident=300 * MIB))
    monkeypatch.setattr(device._memory._meter, "read_bytes", lambda: seen["resident"])
    monkeypatch.setattr(device._memory._peak_watch, "take", lambda: tuple(nbytes * MIB for nbytes in next(told)))
    monkeypatch.setattr(device._memory, "_beside_heap_bytes", 100 * MIB)
    device.in_use()
    assert device.in_use() == (300 * MIB, 300 * MIB)
    for _ in range(trims):
        device.trim()
    assert device.in_use() == (300 * MIB, 330 * MIB)
    assert device.in_use() == (300 * MIB, 320 * MIB)


def test_once_trimmed_nothing_is_kept(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is resident from then on is in use."""
    device.cap(10**6 * MIB)
    del (tensors := [torch.ones(MIB) for _ in range(16)])[::2]
    device.in_use()
    device.trim()
    resident = device.used_bytes() + 50 * MIB
    monkeypatch.setattr(device._memory._peak_watch, "take", lambda: (0, resident))
    assert device.in_use()[1] == resident
    del tensors


def test_what_is_beside_the_heap_is_the_most_that_was_ever_seen(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time 30 MiB of what the heap has given out are not resident yet."""
    seen = {}
    monkeypatch.setattr(process_memory, "heap_bytes", lambda: seen["given_out"] * MIB)
    monkeypatch.setattr(process_memory, "trim_heap", lambda: None)
    monkeypatch.setattr(device._memory._meter, "read_bytes", lambda: seen["resident"] * MIB)
    monkeypatch.setattr(device._memory, "_beside_heap_bytes", None)
    for given_out, resident in ((200, 300), (250, 320)):
        seen |= {"given_out": given_out, "resident": resident}
        device.trim()
    seen["resident"] = 400
    assert device.in_use()[0] == 350 * MIB


def test_what_is_to_come_is_nothing_that_the_heap_keeps(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = device._memory
    monkeypatch.setattr(process_memory, "heap_bytes", lambda: 220 * MIB)
    monkeypatch.setattr(memory._meter, "read_bytes", lambda: 300 * MIB)
    monkeypatch.setattr(memory, "_beside_heap_bytes", 100 * MIB)
    assert memory.in_use(20 * MIB)[0] == 320 * MIB
    assert memory.kept_bytes == 0


def test_no_thread_is_left_that_watches(device: CpuDevice) -> None:
    """Who asks for it after the end gets none."""
    device.watch_peaks(True)
    device.stop()
    device.watch_peaks(True)
    assert "delta-peaks" not in [thread.name for thread in threading.enumerate()]


def test_what_is_being_read_back_is_in_use(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destination has no pages yet, and will have them whatever happens in between."""
    device.bandwidth()  # the buffers of copies are resident from the first one on
    out = device.copy_out(filled(32 * MIB, 1))
    device.wait(out)
    out.storage = None
    gate = Gate(monkeypatch, "preadv")
    device.trim()  # the heap may have kept the source's pages, and give them to the destination
    before = device.in_use()[0]
    back = device.copy_in(out.block)
    assert gate.reached.wait(5)
    assert 30 * MIB < device.in_use()[0] - before < 34 * MIB
    gate.open.set()
    device.wait(back)
    assert 30 * MIB < device.in_use()[0] - before < 34 * MIB
    back.storage = None
    device.trim()
    assert device.in_use()[0] - before < 2 * MIB


def test_a_peak_over_the_budget_counts_whatever_the_heap_keeps(device: CpuDevice) -> None:
    """An op's memory that the heap has got back and keeps was in use at the peak."""
    if heap_bytes() is None:
        pytest.skip("the C library does not say")
    del (raised := [torch.ones(7 * MIB)])[0]  # 28 MiB: smaller tensors go to the heap from now on
    device.trim()
    room = max(0, peak_resident_bytes() - device.used_bytes())
    standing = [torch.ones((room + 8 * MIB) // 4)]  # so that the peak rises with what comes next
    device.cap(device.used_bytes() + 8 * MIB)
    before = device.in_use()[0]
    tensors = [torch.ones(MIB) for _ in range(9)]
    between = torch.ones(MIB)  # the heap cannot shrink while it is there
    del tensors
    now, peak = device.in_use()
    assert now - before < 12 * MIB
    assert peak - before > 36 * MIB
    del standing, between, raised


def test_what_python_takes_for_a_copy_and_a_replay_is_part_of_their_prices() -> None:
    """In the online choice, in the link that planners are given, and in the graphs of recorded steps."""
    net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
    policy = delta.load_policy("delta", {"filter.min_bytes": 0})
    with delta.evict(activations="40%", policy=policy, device="cpu") as run:
        for _ in range(3):
            net(torch.ones(128, 64)).sum().backward()
        assert run._core is not None
        engine = run._core.engine
        assert engine.queue.link.copy_ns == CpuDevice.copy_ns > 0
        assert engine.ledger.replay_ns == CpuDevice.replay_ns > 0
        (profile,) = engine.learner.profiles
        assert len(profile.graph.ops) >= 8
        assert all(op.cost_ns >= CpuDevice.replay_ns for op in profile.graph.ops)


def test_tickets_of_another_device_are_refused(device: CpuDevice) -> None:
    chaos = make_device("chaos", HostConfig())
    for own, other in ((device, chaos), (chaos, device)):
        ticket = other.copy_out(filled(1, 1))
        with pytest.raises(TypeError, match="another device"):
            own.wait(ticket)
    chaos.close()


def test_an_unwritable_spill_directory_is_heard_of_at_once(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"missing.*host\.spill_dir"):
        make_device("cpu", HostConfig(spill_dir=str(tmp_path / "missing")))


@pytest.mark.parametrize("name", ["tpu", "cpu:1", "chaos:x", "", "cuda:x"])
def test_an_unknown_device(name: str) -> None:
    with pytest.raises(PolicyError, match=f"device='{name}' is unknown"):
        make_device(name, HostConfig())


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PolicyError, match='use device="cpu"'):
        make_device("cuda", HostConfig())
    chosen = make_device(None, HostConfig())
    assert chosen.kind == "cpu"
    chosen.close()


def test_a_card_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PolicyError, match="2 cards, cuda:0 to cuda:1"):
        make_device(torch.device("cuda:2"), HostConfig())


def test_a_job_runs_once() -> None:
    ran: list[str] = []
    job = Job(lambda: ran.append("body"))
    threads = [threading.Thread(target=job.finish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran == ["body"]


def test_a_worker_that_cannot_start_a_thread_works_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran: list[str] = []
    Worker("delta-test").submit(Job(lambda: ran.append("body")))
    assert ran == ["body"]


def test_a_worker_can_be_stopped_from_a_job() -> None:
    worker = Worker("delta-test")
    job = Job(worker.stop)
    worker.submit(job)
    job.finish()
    worker.stop()
