"""The pinned pool, with plain memory in place of pinned."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from delta.errors import HostFullError, SwapError
from delta.runtime import pinned
from delta.runtime.host import PAGE_BYTES, PinnedPool, Slab, live_slab_bytes

SLAB = 16 * PAGE_BYTES


class Memory:
    """A slab source that counts. ``most_bytes``: what the system is willing to pin."""

    def __init__(self, most_bytes: int = 2**40) -> None:
        self.most_bytes = most_bytes
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> Slab:
        if sum(self.sizes) + nbytes > self.most_bytes:
            raise RuntimeError("cudaHostRegister says error 2")
        self.sizes.append(nbytes)
        return Slab(torch.zeros(nbytes, dtype=torch.uint8), lambda: self.sizes.remove(nbytes))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def pool(memory: Memory) -> Iterator[PinnedPool]:
    pool = PinnedPool(memory, limit_bytes=4 * SLAB, slab_bytes=SLAB)
    yield pool
    pool.close()


def test_pieces_share_a_slab_and_have_their_exact_size(pool: PinnedPool, memory: Memory) -> None:
    pieces = [pool.take(nbytes) for nbytes in (1, 1000, 513)]
    assert [piece.memory.numel() for piece in pieces] == [1, 1000, 513]
    assert memory.sizes == [SLAB]
    assert pool.used_bytes == 512 + 1024 + 1024
    for value, piece in enumerate(pieces):
        piece.memory.fill_(value)
    assert [int(piece.memory.unique()) for piece in pieces] == [0, 1, 2]


def test_waste_is_an_alignment_not_a_power_of_two(pool: PinnedPool) -> None:
    pool.take(SLAB // 2 + 1)
    pool.take(SLAB // 2 - 512)
    assert pool.slab_bytes == SLAB


def test_a_large_request_gets_a_slab_of_its_own_size(pool: PinnedPool, memory: Memory) -> None:
    pool.take(2 * SLAB + 1)
    assert memory.sizes == [2 * SLAB + PAGE_BYTES]


def test_given_back_room_is_used_again(pool: PinnedPool, memory: Memory) -> None:
    first = pool.take(SLAB)
    pool.give_back(first)
    assert pool.used_bytes == 0
    pool.take(SLAB)
    assert memory.sizes == [SLAB]


def test_the_limit_counts_slabs(pool: PinnedPool) -> None:
    pieces = [pool.take(SLAB) for _ in range(4)]
    with pytest.raises(HostFullError, match=r"256 KiB of 256 KiB are pinned.*host\.limit"):
        pool.take(1)
    pool.give_back(pieces[0])
    pool.take(1)


def test_a_limit_that_is_no_multiple_of_slabs_is_used_up(memory: Memory) -> None:
    pool = PinnedPool(memory, limit_bytes=SLAB + 3 * PAGE_BYTES + 1, slab_bytes=SLAB)
    pool.take(SLAB)
    pool.take(1)
    assert memory.sizes == [SLAB, 3 * PAGE_BYTES]
    pool.close()


def test_empty_slabs_make_room_for_one_of_another_size(pool: PinnedPool, memory: Memory) -> None:
    for piece in [pool.take(SLAB) for _ in range(3)]:
        pool.give_back(piece)
    pool.take(3 * SLAB)
    assert memory.sizes == [3 * SLAB]


def test_trim_gives_back_what_is_empty(pool: PinnedPool, memory: Memory) -> None:
    kept, gone = pool.take(SLAB), pool.take(SLAB)
    pool.give_back(gone)
    assert pool.trim() == SLAB
    assert memory.sizes == [SLAB]
    assert kept.memory.numel() == SLAB


def test_what_is_idle_goes_after_nothing_was_taken_from_it_for_a_while(pool: PinnedPool, memory: Memory) -> None:
    for piece in [pool.take(SLAB) for _ in range(3)]:
        pool.give_back(piece)
    assert pool.trim_idle() == 0, "each has been of use since there is one"
    kept = pool.take(SLAB)
    pool.give_back(pool.take(SLAB))
    assert pool.trim_idle() == SLAB
    assert memory.sizes == [SLAB, SLAB]
    assert (pool.trim_idle(), kept.memory.numel()) == (SLAB, SLAB), "a piece of the other one is out"
    pool.give_back(kept)
    assert pool.trim_idle() == SLAB


def test_room_that_is_handed_on_keeps_its_slab_until_it_is_given_back(pool: PinnedPool, memory: Memory) -> None:
    first = pool.take(SLAB)
    pool.hand_on(first)
    pool.hand_on(first)
    assert (pool.used_bytes, pool.trim(), pool.trim_idle(), pool.trim_idle()) == (0, 0, 0, 0)
    with pytest.raises(HostFullError):
        pool.take(4 * SLAB)
    second = pool.take(SLAB)
    assert second.memory.data_ptr() == first.memory.data_ptr()
    pool.give_back(second)
    assert pool.trim() == 0, "whoever was there first is there still"
    pool.give_back(first)
    pool.hand_on(first)  # too late
    assert (pool.trim(), memory.sizes) == (SLAB, [])


def test_memory_that_cannot_be_pinned_is_a_full_host() -> None:
    pool = PinnedPool(Memory(most_bytes=SLAB), limit_bytes=4 * SLAB, slab_bytes=SLAB)
    pool.take(SLAB)
    with pytest.raises(HostFullError, match=r"error 2.*lower host\.limit"):
        pool.take(1)
    assert pool.slab_bytes == SLAB
    pool.close()


def test_live_slabs_are_counted_over_all_pools(memory: Memory) -> None:
    pools = [PinnedPool(memory, SLAB, SLAB) for _ in range(2)]
    pieces = [pool.take(1) for pool in pools]
    assert live_slab_bytes() == 2 * SLAB
    pools[0].close()
    assert live_slab_bytes() == SLAB
    pools[1].close()
    assert live_slab_bytes() == 0
    pools[0].give_back(pieces[0])
    del pools
    gc.collect()
    assert live_slab_bytes() == 0


def test_a_closed_pool_refuses(pool: PinnedPool, memory: Memory) -> None:
    pool.take(1)
    pool.close()
    pool.close()
    assert memory.sizes == []
    with pytest.raises(SwapError, match="closed"):
        pool.take(1)


def test_slabs_come_from_the_cards_node(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    monkeypatch.setattr(pinned, "node_cpus", lambda node: frozenset({max(cpus)} if node == 1 else ()))
    monkeypatch.setattr(pinned, "_registered_slab", lambda nbytes: seen.append(os.sched_getaffinity(0)))
    for node in (1, 0, None):
        pinned.slab_source(node)(4096)
    assert seen == [{max(cpus)}, cpus, cpus]
    assert os.sched_getaffinity(0) == cpus


@pytest.mark.parametrize("installed", [True, False])
def test_where_nothing_can_be_registered_cupy_pins_if_it_is_there_else_torch(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    def refused(nbytes: int) -> Slab:
        raise RuntimeError("cudaHostRegister says error 801")

    of_cupy, empty = Slab(torch.zeros(4096, dtype=torch.uint8), lambda: None), torch.empty
    monkeypatch.setattr(pinned, "_registered_slab", refused)
    monkeypatch.setattr(pinned, "_cupy_slab", lambda nbytes: of_cupy)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "empty", lambda nbytes, **how: asked.append(how) or empty(nbytes, dtype=how["dtype"]))
    slab = pinned.slab_source(None)(4096)
    assert (slab is of_cupy) is installed and slab.nbytes == 4096
    assert asked == ([] if installed else [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}])


def test_cuda_forgets_that_nothing_could_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next launch of a kernel says so, and the program's op fails."""
    asked: list[str] = []

    def asks(cycles: int) -> None:
        asked.append("launch")
        raise RuntimeError("CUDA error: operation not supported")

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: asked.append("register") or 801)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_sleep", asks, raising=False)
    with pytest.raises(RuntimeError, match="error 801"):
        pinned._registered_slab(4096)
    assert asked == ["register", "launch"]


@pytest.mark.cuda
def test_a_slab_is_really_pinned() -> None:
    slab = pinned.slab_source(None)(SLAB)
    assert slab.memory.is_pinned()
    slab.release()
