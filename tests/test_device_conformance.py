"""One suite for every device: what `delta.runtime.device.base` promises, on each of them."""

import functools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from simulated_card import SimulatedCard
from torch.multiprocessing.reductions import StorageWeakRef

from delta.config import HostConfig
from delta.errors import HostFullError, SwapError
from delta.runtime.device import Device, Ticket, make_device
from delta.runtime.device.chaos import ChaosDevice
from delta.runtime.device.cuda import CudaDevice
from delta.runtime.host import live_slab_bytes
from delta.units import Bytes

MIB = 2**20
BIG = 256 * 1024
ROOM = 64 * MIB
KINDS = [
    "cpu",
    "chaos:0",
    "chaos:1",
    "simulated:0",
    "simulated:1",
    "simulated-spilled:0",
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("cuda-spilled", marks=pytest.mark.cuda),
]


@dataclass
class Rig:
    """A device, and how to let everything that its streams have been given happen."""

    device: Device
    settle: Callable[[], None]
    allocate: Callable[[int], torch.UntypedStorage] | None = None  # from the card, where that is simulated

    def storage(self, nbytes: int, seed: int = 0) -> torch.UntypedStorage:
        if self.allocate is not None:
            storage = self.allocate(nbytes)
        else:
            storage = torch.UntypedStorage(nbytes, device=self.device.torch_device)
        _flat(storage).copy_(pattern(nbytes, seed))
        return storage

    def bytes_in(self, ticket: Ticket) -> torch.Tensor:
        """What a copy in brought, after waiting for it."""
        self.device.wait(ticket)
        self.settle()
        assert ticket.storage is not None
        return _flat(ticket.storage).cpu()

    def out(self, nbytes: int, seed: int = 0) -> Ticket:
        """A copy out whose source nobody else holds."""
        return self.device.copy_out(self.storage(nbytes, seed))


@functools.lru_cache(maxsize=64)
def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes that differ from place to place, and from seed to seed."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def make_rig(name: str, spill_dir: Path, room_bytes: int = ROOM) -> Rig:
    kind, _, seed = name.partition(":")
    host = HostConfig(limit=Bytes(room_bytes), spill_dir=str(spill_dir) if kind == "cpu" or "spilled" in kind else None)
    if kind.endswith("-spilled"):
        host = HostConfig(limit=Bytes(0), spill_dir=str(spill_dir))
    if kind.startswith("simulated"):
        card = SimulatedCard(int(seed))
        return Rig(CudaDevice(card, host), card.settle, card.allocate)
    if kind.startswith("cuda"):
        return Rig(make_device("cuda", host), torch.cuda.synchronize)
    return Rig(make_device(name, host), lambda: None)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rig(kind: str, spill_dir: Path) -> Iterator[Rig]:
    rig = make_rig(kind, spill_dir)
    yield rig
    rig.device.close()
    assert live_slab_bytes() == 0


def test_is_a_device(rig: Rig) -> None:
    assert isinstance(rig.device, Device)
    assert rig.device.capacity_bytes() > 0
    assert rig.device.used_bytes() >= 0


def test_a_peak_is_no_less_than_what_is_in_use_whether_peaks_are_watched_or_not(rig: Rig) -> None:
    for on in (True, True, False, False):
        rig.device.watch_peaks(on)
        now, peak = rig.device.in_use()
        assert 0 <= now <= peak


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4095, 4096, 4097, 4 * MIB + 1])
def test_a_round_trip_is_exact(rig: Rig, nbytes: int) -> None:
    out = rig.out(nbytes)
    rig.device.wait(out)
    assert torch.equal(rig.bytes_in(rig.device.copy_in(out.block)), pattern(nbytes))


def test_many_in_flight_finish_in_any_order(rig: Rig) -> None:
    order = random.Random(5)
    sizes = [order.choice([1, 700, 4096, 60_000, BIG]) for _ in range(24)]
    outs = [rig.out(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    for ticket in order.sample(outs, len(outs)):
        rig.device.wait(ticket)
    ins = [(seed, rig.device.copy_in(outs[seed].block)) for seed in order.sample(range(24), 24)]
    for seed, ticket in order.sample(ins, len(ins)):
        assert torch.equal(rig.bytes_in(ticket), pattern(sizes[seed], seed))


def test_out_and_in_overlap(rig: Rig) -> None:
    first = rig.out(BIG, 1)
    rig.device.wait(first)
    back, second = rig.device.copy_in(first.block), rig.out(BIG, 2)
    assert torch.equal(rig.bytes_in(back), pattern(BIG, 1))
    rig.device.wait(second)
    assert torch.equal(rig.bytes_in(rig.device.copy_in(second.block)), pattern(BIG, 2))


def test_the_source_lives_until_the_copy_is_complete_and_no_longer(rig: Rig) -> None:
    storage = rig.storage(BIG)
    alive = StorageWeakRef(storage)
    ticket = rig.device.copy_out(storage)
    del storage
    while ticket.finished_ns is None:
        assert not alive.expired()
        if rig.device.ready(ticket):
            break
        rig.device.wait(ticket)
    assert ticket.storage is None
    rig.settle()
    assert alive.expired()


def test_a_source_may_be_dropped_before_its_copy_is_known_to_have_ended(rig: Rig) -> None:
    rig.device.computes()
    storages = [rig.storage(BIG, seed) for seed in range(6)]
    outs = [rig.device.copy_out(storage) for storage in storages]
    for ticket in outs:
        rig.device.let_go_after(ticket)
        rig.device.release(storages[0])
        del storages[0]
    for seed, ticket in enumerate(outs):
        assert torch.equal(rig.bytes_in(rig.device.copy_in(ticket.block)), pattern(BIG, seed))


def test_times_are_in_order(rig: Rig) -> None:
    ticket = rig.out(BIG)
    rig.device.wait(ticket)
    assert ticket.finished_ns is not None and ticket.started_ns <= ticket.finished_ns
    assert (ticket.nbytes, ticket.direction) == (BIG, "out")


def test_ready_after_wait(rig: Rig) -> None:
    ticket = rig.out(BIG)
    rig.device.wait(ticket)
    assert rig.device.ready(ticket)
    back = rig.device.copy_in(ticket.block)
    rig.device.wait(back)
    rig.settle()
    while not rig.device.ready(back):  # a card is asked; the others know
        rig.settle()
    assert back.finished_ns is not None


def test_waiting_twice_is_fine(rig: Rig) -> None:
    out = rig.out(4097)
    rig.device.wait(out)
    rig.device.wait(out)
    back = rig.device.copy_in(out.block)
    rig.device.wait(back)
    assert torch.equal(rig.bytes_in(back), pattern(4097))


def test_a_block_is_read_as_often_as_asked(rig: Rig) -> None:
    out = rig.out(4097)
    backs = [rig.device.copy_in(out.block) for _ in range(3)]
    assert all(torch.equal(rig.bytes_in(back), pattern(4097)) for back in backs)
    assert len({back.storage.data_ptr() for back in backs if back.storage is not None}) == 3


def test_a_copy_in_waits_for_the_copy_out_it_depends_on(rig: Rig) -> None:
    outs = [rig.out(BIG, seed) for seed in range(6)]
    back = rig.device.copy_in(outs[-1].block)  # not waited for
    assert torch.equal(rig.bytes_in(back), pattern(BIG, 5))


def test_another_thread_can_wait(rig: Rig) -> None:
    out = rig.out(BIG)
    got: list[torch.Tensor] = []

    def backward() -> None:
        rig.device.wait(out)
        got.append(rig.bytes_in(rig.device.copy_in(out.block)))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert torch.equal(got[0], pattern(BIG))


def test_many_threads_at_once(rig: Rig) -> None:
    start = threading.Barrier(4)
    wrong: list[int] = []

    def round_trips(worker: int) -> None:
        start.wait()
        for turn in range(6):
            seed, nbytes = worker * 10 + turn, 1000 * worker + 50_001 * turn + 1
            out = rig.out(nbytes, seed)
            back = rig.device.copy_in(out.block)
            rig.device.free(out.block)
            if not torch.equal(rig.bytes_in(back), pattern(nbytes, seed)):
                wrong.append(seed)

    threads = [threading.Thread(target=round_trips, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    rig.settle()
    rig.device.trim()
    assert rig.device.host_bytes() == 0


def test_a_block_that_is_freed_while_it_is_read_stays_until_then(rig: Rig) -> None:
    out = rig.out(BIG, 1)
    rig.device.wait(out)
    back = rig.device.copy_in(out.block)
    rig.device.free(out.block)
    others = [rig.out(BIG, seed) for seed in range(2, 8)]  # they would get its room
    assert torch.equal(rig.bytes_in(back), pattern(BIG, 1))
    for other in others:
        rig.device.wait(other)


def test_a_block_that_is_freed_while_it_is_written(rig: Rig) -> None:
    outs = [rig.out(BIG, seed) for seed in range(4)]
    for out in outs:
        rig.device.free(out.block)
    later = rig.out(BIG, 9)
    for out in outs:
        rig.device.wait(out)
    assert torch.equal(rig.bytes_in(rig.device.copy_in(later.block)), pattern(BIG, 9))


def test_a_freed_block_cannot_be_read(rig: Rig) -> None:
    out = rig.out(4096)
    rig.device.wait(out)
    rig.device.free(out.block)
    rig.device.free(out.block)
    with pytest.raises(SwapError, match="given back"):
        rig.device.copy_in(out.block)


def test_host_room_is_counted_and_given_back(rig: Rig) -> None:
    assert rig.device.host_bytes() == 0
    outs = [rig.out(BIG, seed) for seed in range(4)]
    assert rig.device.host_bytes() == 4 * BIG
    for out in outs:
        rig.device.wait(out)
        rig.device.free(out.block)
    assert rig.device.host_bytes() == 0


def test_dropped_tickets_do_no_harm(rig: Rig) -> None:
    """Nobody waits: a destination that its owner forgot must not be written after its memory went to somebody else."""
    keep = rig.out(BIG, 3)
    for seed in range(8):
        out = rig.out(BIG, seed)
        rig.device.copy_in(out.block)
        rig.device.free(out.block)
        del out
    assert torch.equal(rig.bytes_in(rig.device.copy_in(keep.block)), pattern(BIG, 3))
    rig.device.free(keep.block)
    rig.settle()
    rig.device.stop()
    assert rig.device.host_bytes() == 0


def test_a_shared_storage_is_left_alone_when_released(rig: Rig) -> None:
    tensor = pattern(BIG).to(rig.device.torch_device)
    rig.device.cap(rig.device.capacity_bytes())
    rig.device.release(tensor.untyped_storage())
    rig.device.cap(None)
    assert torch.equal(tensor.cpu(), pattern(BIG))


def test_after_stop_copies_still_work(rig: Rig) -> None:
    before = rig.out(BIG, 1)
    rig.device.stop()
    assert rig.device.ready(before)
    after = rig.out(BIG, 2)
    rig.device.wait(after)
    assert torch.equal(rig.bytes_in(rig.device.copy_in(before.block)), pattern(BIG, 1))
    assert torch.equal(rig.bytes_in(rig.device.copy_in(after.block)), pattern(BIG, 2))
    rig.device.stop()


def test_close_with_transfers_under_way(rig: Rig) -> None:
    outs = [rig.out(BIG, seed) for seed in range(5)]
    back = rig.device.copy_in(outs[0].block)
    rig.device.close()
    rig.device.close()
    assert live_slab_bytes() == 0
    assert torch.equal(rig.bytes_in(back), pattern(BIG))
    rig.device.free(outs[1].block)
    with pytest.raises(SwapError, match="closed"):
        rig.out(1)


def test_bandwidth_is_positive(rig: Rig) -> None:
    speed = rig.device.bandwidth()
    assert speed.out_bytes_per_s > 0 and speed.in_bytes_per_s > 0
    assert rig.device.host_bytes() == 0


def test_interference_is_a_share(rig: Rig) -> None:
    assert 0 <= rig.device.interference() <= 1
    assert rig.device.host_bytes() == 0


def test_the_clock_counts(rig: Rig) -> None:
    clock = rig.device.clock()
    outer = clock.start()
    inner = clock.start()
    tokens = [clock.stop(inner), clock.stop(outer)]
    rig.settle()
    short_ns, long_ns = [clock.elapsed_ns(token) for token in tokens]
    assert short_ns is not None and long_ns is not None
    assert 0 <= short_ns <= long_ns
    assert clock.elapsed_ns(tokens[0]) == short_ns  # asked twice


@pytest.mark.parametrize("name", ["cpu", "chaos:0", "simulated:0", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_full_host_changes_nothing(name: str, spill_dir: Path) -> None:
    rig = make_rig(name, spill_dir, room_bytes=2 * BIG)
    assert rig.device._limit_bytes == 2 * BIG
    first, second = rig.out(BIG, 1), rig.out(BIG, 2)
    storage = rig.storage(4096, 3)
    with pytest.raises(HostFullError, match=r"host\.limit"):
        rig.device.copy_out(storage)
    assert torch.equal(_flat(storage).cpu(), pattern(4096, 3))
    assert rig.device.host_bytes() == 2 * BIG
    rig.device.wait(first)
    rig.device.free(first.block)
    third = rig.device.copy_out(storage)
    assert torch.equal(rig.bytes_in(rig.device.copy_in(third.block)), pattern(4096, 3))
    assert torch.equal(rig.bytes_in(rig.device.copy_in(second.block)), pattern(BIG, 2))
    rig.device.close()


@pytest.mark.parametrize("seed", range(12))
def test_chaos_never_lies(seed: int, spill_dir: Path) -> None:
    """Random legal use of the worst device, checked against a plain dictionary."""
    choose, rig = random.Random(seed), make_rig(f"chaos:{seed}", spill_dir)
    truth: dict[Ticket, tuple[int, int]] = {}
    reads: dict[Ticket, tuple[int, int]] = {}
    for turn in range(60):
        if choose.random() < 0.5:
            nbytes = choose.randrange(1, 5000)
            truth[rig.out(nbytes, turn)] = (nbytes, turn)
        elif truth:
            out = choose.choice(list(truth))
            reads[rig.device.copy_in(out.block)] = truth[out]
            if choose.random() < 0.5:
                rig.device.free(out.block)
                del truth[out]
        if reads and choose.random() < 0.5:
            back = choose.choice(list(reads))
            nbytes, made = reads.pop(back)
            assert torch.equal(rig.bytes_in(back), pattern(nbytes, made))
    assert isinstance(rig.device, ChaosDevice)
    rig.device.close()
