"""Pinned host memory in slabs of our own.

PyTorch's pinned allocator rounds every block up to a power of two and never gives it back (1.78 times the bytes,
measured on 2.13; pytorch #150517). Here a few large slabs are pinned once and cut up exactly; pinning is slow (about
3 ms a call), so an empty slab is kept until `PinnedPool.trim`, `PinnedPool.trim_idle` or `PinnedPool.close`.

Not covered: how memory is pinned. The pool is given a function for that, see `delta.runtime.pinned`; with plain
memory it runs anywhere.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from delta.errors import HostFullError, SwapError
from delta.runtime.extents import Extent, ExtentAllocator, round_up
from delta.units import format_bytes

SLAB_BYTES = 64 * 2**20
ALIGNMENT_BYTES = 512
PAGE_BYTES = 4096


@dataclass(slots=True, eq=False)
class Slab:
    """One pinned allocation: its bytes, and the function that unpins and frees them."""

    memory: torch.Tensor
    release: Callable[[], None]
    room: ExtentAllocator = field(init=False)
    idle: bool = False  # nothing was taken from it since `PinnedPool.trim_idle` was called last
    handed_on: int = 0  # pieces whose room is others' to have, and that are in use still

    def __post_init__(self) -> None:
        self.room = ExtentAllocator(ALIGNMENT_BYTES, self.memory.numel())

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    @property
    def unused(self) -> bool:
        return not (self.room.used_bytes or self.handed_on)


SlabSource = Callable[[int], Slab]


@dataclass(slots=True, eq=False)
class Piece:
    """Part of a slab: ``memory`` has exactly the bytes that were asked for."""

    memory: torch.Tensor
    slab: Slab
    extent: Extent
    free: bool = False  # others may have its room


class PinnedPool:
    """Pieces of slabs that ``source`` pins, all slabs together at most ``limit_bytes``."""

    def __init__(self, source: SlabSource, limit_bytes: int, slab_bytes: int = SLAB_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._source = source
        self._slab_bytes = slab_bytes
        self._slabs: list[Slab] = []
        self._lock = threading.Lock()
        self._closed = False
        _pools.add(self)

    @property
    def used_bytes(self) -> int:
        """Bytes in pieces that are out."""
        return sum(slab.room.used_bytes for slab in list(self._slabs))

    @property
    def slab_bytes(self) -> int:
        """Bytes pinned, in use or not."""
        return sum(slab.nbytes for slab in list(self._slabs))

    def find(self, nbytes: int) -> Piece | None:
        """Room for ``nbytes`` in a slab that is there; None where none has it."""
        with self._lock:
            return self._find(nbytes)

    def take(self, nbytes: int) -> Piece:
        """Room for ``nbytes``, pinning a new slab if none has it. HostFullError when the limit or the system does not
        allow that.
        """
        with self._lock:
            if (piece := self._find(nbytes)) is not None:
                return piece
            slab = self._new_slab(nbytes)
            extent = slab.room.allocate(nbytes)
            assert extent is not None
            return _piece(slab, extent, nbytes)

    def give_back(self, piece: Piece) -> None:
        """The piece is no longer used by anyone. Ignored once the pool is closed: its slab is gone."""
        with self._lock:
            if self._closed:
                return
            if piece.free:
                piece.slab.handed_on -= 1
            else:
                piece.slab.room.free(piece.extent)
                piece.free = True

    def hand_on(self, piece: Piece) -> None:
        """Others may have its room though the piece is in use until it is given back: whoever asks for room from here
        on comes after that. Its slab stays pinned."""
        with self._lock:
            if not (self._closed or piece.free):
                piece.slab.room.free(piece.extent)
                piece.free = True
                piece.slab.handed_on += 1

    def trim(self) -> int:
        """Unpin slabs that hold nothing. Returns their bytes."""
        with self._lock:
            return self._drop([slab for slab in self._slabs if slab.unused])

    def trim_idle(self) -> int:
        """Unpin slabs that hold nothing and of which nothing was taken since the last time. Returns their bytes."""
        with self._lock:
            freed_bytes = self._drop([slab for slab in self._slabs if slab.idle and slab.unused])
            for slab in self._slabs:
                slab.idle = True
            return freed_bytes

    def close(self) -> None:
        """Unpin everything, pieces that are out included. Idempotent."""
        with self._lock:
            self._closed = True
            slabs, self._slabs = self._slabs, []
        for slab in slabs:
            slab.release()

    def _find(self, nbytes: int) -> Piece | None:
        if self._closed:
            raise SwapError("the pinned pool is closed: the session it belonged to has given its host room back")
        for slab in self._slabs:
            if (extent := slab.room.allocate(nbytes)) is not None:
                slab.idle = False
                return _piece(slab, extent, nbytes)
        return None

    def _new_slab(self, nbytes: int) -> Slab:
        wanted = round_up(max(nbytes, 1), PAGE_BYTES)
        if self.slab_bytes + wanted > self.limit_bytes:
            # Slabs of the wrong size would keep the limit from being used.
            self._drop([slab for slab in self._slabs if slab.unused])
        left = self.limit_bytes - self.slab_bytes
        if wanted > left:
            raise HostFullError(
                f"no pinned host room for {format_bytes(nbytes)}: {format_bytes(self.used_bytes)} are in use, "
                f"{format_bytes(self.slab_bytes)} of {format_bytes(self.limit_bytes)} are pinned; "
                f"raise host.limit in the policy, set host.spill_dir, or allow recompute"
            )
        size = max(wanted, min(self._slab_bytes, left // PAGE_BYTES * PAGE_BYTES))
        try:
            slab = self._source(size)
        except (RuntimeError, OSError, MemoryError) as error:
            raise HostFullError(
                f"{format_bytes(size)} of host memory cannot be pinned ({error}); lower host.limit in the policy"
            ) from error
        self._slabs.append(slab)
        return slab

    def _drop(self, slabs: Sequence[Slab]) -> int:
        self._slabs = [slab for slab in self._slabs if slab not in slabs]
        for slab in slabs:
            slab.release()
        return sum(slab.nbytes for slab in slabs)


_pools: "weakref.WeakSet[PinnedPool]" = weakref.WeakSet()


def live_slab_bytes() -> int:
    """Bytes pinned by all pools of this process that are still referenced: 0 when nothing leaked."""
    return sum(pool.slab_bytes for pool in list(_pools))


def _piece(slab: Slab, extent: Extent, nbytes: int) -> Piece:
    return Piece(slab.memory[extent.offset_bytes : extent.offset_bytes + nbytes], slab, extent)
