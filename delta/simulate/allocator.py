"""Where storages lie in device memory: models of allocators, without any memory.

`Caching` is PyTorch's CUDA allocator with its default settings and one stream (`c10/cuda/CUDACachingAllocator.cpp`):
sizes, pools, best fit, splitting, merging, and giving whole segments back to the device when it is full. `Slab` is one
segment of the whole budget, as Coop takes it (Zhang et al., NeurIPS 2023). `Ideal` counts bytes only.

Fragmentation is memory that is free and cannot serve. When a request fails, or storages have to go for it, that is
`free_bytes / capacity_bytes`; Coop reports the mean of this over all forced evictions. `largest_free_bytes` tells how
much of it would still do for one request.

Not modelled: the time that calls take, alignment beyond the sizes, settings such as expandable segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Protocol

from delta.units import format_bytes

_MIB = 1024 * 1024
_GRAIN_BYTES = 512  # every size is a multiple
_SMALL_BYTES = 1 * _MIB  # the largest request that the small pool serves
_SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB  # for requests below _OWN_SEGMENT_BYTES
_OWN_SEGMENT_BYTES = 10 * _MIB  # from here on a segment is as large as its first request, in steps of
_SEGMENT_STEP_BYTES = 2 * _MIB


class OutOfMemory(Exception):
    """No room for a request; nothing has been allocated."""

    def __init__(self, needed_bytes: int, free_bytes: int, largest_free_bytes: int) -> None:
        super().__init__(needed_bytes, free_bytes, largest_free_bytes)
        self.needed_bytes, self.free_bytes, self.largest_free_bytes = needed_bytes, free_bytes, largest_free_bytes

    def __str__(self) -> str:
        return (
            f"no room for {format_bytes(self.needed_bytes)}: {format_bytes(self.free_bytes)} are free, "
            f"at most {format_bytes(self.largest_free_bytes)} of them in one piece"
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment. `id` is the request that holds it, None if it is free; `segment` the segment's address.
    Blocks of different segments are never one piece, even where one ends at the address at which the other begins."""

    address: int
    nbytes: int
    id: int | None
    segment: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of memory: `block_bytes` in one piece of `blocks`, or room for a new segment of
    `segment_bytes` (None: there is no other segment)."""

    block_bytes: int
    blocks: list[Block]
    segment_bytes: int | None


class Allocator(Protocol):
    """What the simulator asks of memory."""

    capacity_bytes: int
    allocated_bytes: int  # in blocks that are held, rounding included
    reserved_bytes: int  # taken from the device
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is not allocated, whether it is reserved or not."""

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that can be served now."""

    def allocate(self, nbytes: int, from_right: bool = False) -> int:
        """The id of a new block; OutOfMemory if there is no room. A request for nothing has an id, but no block.

        `from_right`: cut it from the right end of the free block, if the allocator lets one choose; only `Slab` does.
        """

    def free(self, block: int) -> None:
        """Give a block back, by its id."""

    def blocks(self) -> list[Block]:
        """All that is reserved, free or not, in the order of addresses."""


class _Books:
    """The totals, and the ids, of any allocator."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._issued = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.allocated_bytes

    def _next_id(self) -> int:
        self._issued += 1
        return self._issued

    def _count_allocated(self, nbytes: int) -> None:
        self.allocated_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def _count_reserved(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


class Ideal(_Books):
    """Bytes only: whatever fits in sum fits. Blocks lie side by side in the order in which they were allocated, as if
    memory were compacted all the time."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._sizes: dict[int, int] = {}

    @property
    def largest_free_bytes(self) -> int:
        return self.free_bytes

    def allocate(self, nbytes: int, from_right: bool = False) -> int:
        if nbytes > self.free_bytes:
            raise OutOfMemory(nbytes, self.free_bytes, self.largest_free_bytes)
        block = self._next_id()
        self._sizes[block] = nbytes
        self._count_allocated(nbytes)
        self._count_reserved(nbytes)
        return block

    def free(self, block: int) -> None:
        nbytes = self._sizes.pop(block)
        self._count_allocated(-nbytes)
        self._count_reserved(-nbytes)

    def blocks(self) -> list[Block]:
        found, address = [], 0
        for block, nbytes in self._sizes.items():
            if nbytes:
                found.append(Block(address, nbytes, block, 0))
                address += nbytes
        return found


class _Pooled(_Books):
    """What allocators share whose blocks lie in pools."""

    def __init__(self, capacity_bytes: int, *pools: _Pool) -> None:
        super().__init__(capacity_bytes)
        self._pools = pools
        self._places: dict[int, tuple[_Pool, int] | None] = {}  # of each id: pool and address, None without a block

    @property
    def largest_free_bytes(self) -> int:
        return max(pool.largest_free_bytes for pool in self._pools)

    def free(self, block: int) -> None:
        place = self._places.pop(block)
        if place is not None:
            pool, address = place
            self._count_allocated(-pool.give_back(address))

    def blocks(self) -> list[Block]:
        return sorted((block for pool in self._pools for block in pool.blocks()), key=lambda block: block.address)

    def _take(self, pool: _Pool, nbytes: int, from_right: bool = False) -> int:
        block = self._next_id()
        place = None
        if nbytes:
            taken = pool.take(_round_up(nbytes, _GRAIN_BYTES), block, from_right)
            if taken is None:
                raise OutOfMemory(nbytes, self.free_bytes, self.largest_free_bytes)
            self._count_allocated(taken.nbytes)
            place = pool, taken.address
        self._places[block] = place
        return block


class Slab(_Pooled):
    """One segment of the whole capacity, best fit.

    A block is cut from the left or the right end of the free piece that is chosen for it. With what is dear to
    recompute at the left and what is cheap at the right, each kind has neighbours of its own kind (Coop, cheap tensor
    partitioning), and a window of cheap ones is easier to find.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._pool = _Pool(smallest_rest_bytes=_GRAIN_BYTES)
        super().__init__(_round_down(capacity_bytes, _GRAIN_BYTES), self._pool)
        self._pool.add_segment(0, self.capacity_bytes)
        self._count_reserved(self.capacity_bytes)

    def allocate(self, nbytes: int, from_right: bool = False) -> int:
        return self._take(self._pool, nbytes, from_right)

    def demand(self, nbytes: int) -> Demand:
        """What a request would need."""
        return Demand(_round_up(nbytes, _GRAIN_BYTES), self._pool.blocks(), None)


class Caching(_Pooled):
    """PyTorch's caching allocator. What is freed stays reserved, until a segment that nobody uses any part of has to
    make room on the device for another one. Every segment is at an address of its own that no other ever had."""

    def __init__(self, capacity_bytes: int) -> None:
        self._small = _Pool(smallest_rest_bytes=_GRAIN_BYTES)
        self._large = _Pool(smallest_rest_bytes=_SMALL_BYTES + 1)
        super().__init__(capacity_bytes, self._small, self._large)
        self._next_segment = 0

    @property
    def largest_free_bytes(self) -> int:
        """A smaller request may still fail: 10 MiB get a segment of 10 MiB, less (down to 1 MiB) one of 20 MiB."""
        room = self.capacity_bytes - self.reserved_bytes
        room += sum(segment.nbytes for pool in self._pools for segment in pool.unused_segments())
        fresh = _round_down(room, _SEGMENT_STEP_BYTES)
        if fresh < _OWN_SEGMENT_BYTES:
            fresh = min(fresh, _SMALL_BYTES)
        return max(fresh, self._large.largest_free_bytes, min(self._small.largest_free_bytes, _SMALL_BYTES))

    def allocate(self, nbytes: int, from_right: bool = False) -> int:
        rounded = _round_up(nbytes, _GRAIN_BYTES)
        pool = self._small if rounded <= _SMALL_BYTES else self._large
        if rounded > pool.largest_free_bytes:
            self._reserve(pool, _segment_bytes(rounded))
        return self._take(pool, nbytes)

    def demand(self, nbytes: int) -> Demand:
        """What a request would need."""
        rounded = _round_up(nbytes, _GRAIN_BYTES)
        pool = self._small if rounded <= _SMALL_BYTES else self._large
        return Demand(rounded, pool.blocks(), _segment_bytes(rounded))

    def _reserve(self, pool: _Pool, nbytes: int) -> None:
        """Take a segment from the device if there is room, which may need all segments that are not in use."""
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            for cached in self._pools:
                for segment in cached.unused_segments():
                    cached.remove_segment(segment)
                    self._count_reserved(-segment.nbytes)
        if self.reserved_bytes + nbytes <= self.capacity_bytes:
            pool.add_segment(self._next_segment, nbytes)
            self._next_segment += nbytes
            self._count_reserved(nbytes)


class _Pool:
    """Segments that serve each other's requests: best fit, the lowest address among equals."""

    def __init__(self, smallest_rest_bytes: int) -> None:
        self._smallest_rest_bytes = smallest_rest_bytes  # a rest below it stays with the block
        self._segment_bytes: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}  # by address
        self._addresses: list[int] = []  # in order
        self._free: list[tuple[int, int]] = []  # (bytes, address), in order

    @property
    def largest_free_bytes(self) -> int:
        return self._free[-1][0] if self._free else 0

    def add_segment(self, address: int, nbytes: int) -> None:
        self._segment_bytes[address] = nbytes
        self._put(Block(address, nbytes, None, address))

    def unused_segments(self) -> list[Block]:
        """Segments that are one free block."""
        free = (self._blocks[address] for _, address in self._free)
        return [block for block in free if block.nbytes == self._segment_bytes[block.segment]]

    def remove_segment(self, unused: Block) -> None:
        self._pop(unused)
        del self._segment_bytes[unused.segment]

    def blocks(self) -> list[Block]:
        return [self._blocks[address] for address in self._addresses]

    def take(self, nbytes: int, holder: int, from_right: bool = False) -> Block | None:
        """The best block for a request, cut to size; None if there is none."""
        fit = bisect_left(self._free, (nbytes, 0))
        if fit == len(self._free):
            return None
        free = self._blocks[self._free[fit][1]]
        rest_bytes = free.nbytes - nbytes
        self._pop(free)
        if rest_bytes < self._smallest_rest_bytes:
            nbytes, rest_bytes = free.nbytes, 0
        taken_at, rest_at = (rest_bytes, 0) if from_right else (0, nbytes)
        if rest_bytes:
            self._put(Block(free.address + rest_at, rest_bytes, None, free.segment))
        taken = Block(free.address + taken_at, nbytes, holder, free.segment)
        self._put(taken)
        return taken

    def give_back(self, address: int) -> int:
        """Free a block and merge it with its free neighbours; how large it was."""
        block = self._blocks[address]
        at = bisect_left(self._addresses, address)
        merged = [
            near
            for near in map(self._blocks.__getitem__, self._addresses[max(0, at - 1) : at + 2])
            if near is block or (near.id is None and near.segment == block.segment)
        ]
        for piece in merged:
            self._pop(piece)
        self._put(Block(merged[0].address, sum(piece.nbytes for piece in merged), None, block.segment))
        return block.nbytes

    def _put(self, block: Block) -> None:
        self._blocks[block.address] = block
        insort(self._addresses, block.address)
        if block.id is None:
            insort(self._free, (block.nbytes, block.address))

    def _pop(self, block: Block) -> None:
        del self._blocks[block.address]
        del self._addresses[bisect_left(self._addresses, block.address)]
        if block.id is None:
            del self._free[bisect_left(self._free, (block.nbytes, block.address))]


def _segment_bytes(rounded_bytes: int) -> int:
    if rounded_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if rounded_bytes < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return _round_up(rounded_bytes, _SEGMENT_STEP_BYTES)


def _round_up(nbytes: int, step_bytes: int) -> int:
    return -(-nbytes // step_bytes) * step_bytes


def _round_down(nbytes: int, step_bytes: int) -> int:
    return nbytes // step_bytes * step_bytes
