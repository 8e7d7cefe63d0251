"""Between a card and the spill file, in chunks through a small pinned buffer for each direction.

The slow way, for what no longer fits into pinned memory. When a chunk is handed on, the card's part of it is done:
nobody has to wait for an event afterwards.
"""

import threading
from collections.abc import Callable, Iterator

import torch

from delta.runtime.device.accelerator import Accelerator, Stream
from delta.runtime.device.base import Direction
from delta.runtime.device.streams import ComputeStreams
from delta.runtime.host import PinnedPool
from delta.runtime.rawmem import as_bytes
from delta.runtime.spill import CHUNK_BYTES, FileRoom, SpillFile


class StagedMover:
    """A `delta.runtime.device.lane.Mover` for cards. Its pinned buffers, one chunk each, come on top of the host
    limit.
    """

    def __init__(
        self, card: Accelerator, spill: SpillFile, streams: dict[Direction, Stream], computing: ComputeStreams
    ) -> None:
        self._card = card
        self._spill = spill
        self._streams = streams
        self._computing = computing
        self._pool = PinnedPool(card.slab_source(), 2 * CHUNK_BYTES, 2 * CHUNK_BYTES)
        self._in_use: dict[Direction, threading.Lock] = {"out": threading.Lock(), "in": threading.Lock()}

    def order(self, direction: Direction) -> None:
        self._computing.lead(self._streams[direction])

    def phase_bytes(self, storage: torch.UntypedStorage) -> int:
        """What the file is given lies in the pinned buffers, which begin at a page."""
        return 0

    def write(self, storage: torch.UntypedStorage, room: FileRoom) -> None:
        data = as_bytes(storage)

        def move(chunk: torch.Tensor, start: int) -> None:
            self._copy(chunk, data[start : start + chunk.numel()], "out")
            self._spill.write(room, chunk.data_ptr(), chunk.numel(), start)

        self._each_chunk("out", data.numel(), move)

    def read(self, room: FileRoom, storage: torch.UntypedStorage) -> None:
        data = as_bytes(storage)

        def move(chunk: torch.Tensor, start: int) -> None:
            self._spill.read(room, chunk.data_ptr(), chunk.numel(), start)
            self._copy(data[start : start + chunk.numel()], chunk, "in")

        self._each_chunk("in", data.numel(), move)

    def close(self) -> None:
        self._pool.close()

    def _each_chunk(self, direction: Direction, nbytes: int, move: Callable[[torch.Tensor, int], None]) -> None:
        with self._in_use[direction]:
            piece = self._pool.take(CHUNK_BYTES)
            try:
                for start, size in _chunks(nbytes):
                    move(piece.memory[:size], start)
            finally:
                self._pool.give_back(piece)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, direction: Direction) -> None:
        done = self._card.new_event()
        self._card.copy(to, source, self._streams[direction])
        done.record(self._streams[direction])
        with self._card.here():
            done.synchronize()


def _chunks(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, CHUNK_BYTES):
        yield start, min(CHUNK_BYTES, nbytes - start)
