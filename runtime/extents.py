"""Room inside something large (a spill file, a pinned slab), handed out in aligned extents.

Best fit over a free list kept sorted by offset; neighbours are joined when one is freed. Pure bookkeeping: no memory,
no file, no lock. Its owner serialises the calls.
"""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of room. ``nbytes`` is what was taken: the size asked for, rounded up to the alignment."""

    offset_bytes: int
    nbytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.nbytes


def round_up(nbytes: int, alignment_bytes: int) -> int:
    """The smallest multiple of the alignment that holds ``nbytes``."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


class ExtentAllocator:
    """Extents of ``alignment_bytes`` multiples from a room of ``capacity_bytes``, or from one that grows without end
    (None).
    """

    def __init__(self, alignment_bytes: int, capacity_bytes: int | None = None) -> None:
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.top_bytes = 0  # everything at and above it is free
        self.most_bytes = 0  # where the top was at the most: room above that was never used
        self._free: list[Extent] = []  # holes below the top, by offset, never adjacent to each other or to the top
        self._live: dict[int, Extent] = {}

    def allocate(self, nbytes: int) -> Extent | None:
        """The smallest hole that fits, else room at the top; None when the capacity does not allow it. Never an empty
        extent.
        """
        size = round_up(max(nbytes, 1), self.alignment_bytes)
        fitting = [index for index, hole in enumerate(self._free) if hole.nbytes >= size]
        if fitting:
            extent = self._take(min(fitting, key=lambda index: self._free[index].nbytes), size)
        elif self.capacity_bytes is None or self.top_bytes + size <= self.capacity_bytes:
            extent = Extent(self.top_bytes, size)
            self.top_bytes = extent.end_bytes
            self.most_bytes = max(self.most_bytes, self.top_bytes)
        else:
            return None
        self._live[extent.offset_bytes] = extent
        self.used_bytes += extent.nbytes
        return extent

    def growth_bytes(self, nbytes: int) -> int:
        """How much room that was never used it would take if ``nbytes`` were allocated now."""
        size = round_up(max(nbytes, 1), self.alignment_bytes)
        if self.top_bytes + size <= self.most_bytes or any(hole.nbytes >= size for hole in self._free):
            return 0
        return self.top_bytes + size - self.most_bytes

    def free(self, extent: Extent) -> None:
        """Give an extent back. ValueError when it is not one that is out."""
        if self._live.get(extent.offset_bytes) != extent:
            raise ValueError(f"{extent} is not allocated")
        del self._live[extent.offset_bytes]
        self.used_bytes -= extent.nbytes
        self._put_back(extent)

    def validate(self) -> None:
        """Derive everything again from the parts; AssertionError when the books are wrong."""
        parts = sorted([*self._free, *self._live.values()], key=lambda part: part.offset_bytes)
        ends = [0, *(part.end_bytes for part in parts)]
        assert [part.offset_bytes for part in parts] == ends[:-1], "extents overlap or leave a gap"
        assert ends[-1] == self.top_bytes, "the top is not the end of the last extent"
        assert self.top_bytes <= self.most_bytes, "the top was never seen so high"
        assert self.used_bytes == sum(part.nbytes for part in self._live.values())
        touching = [
            left
            for left, right in zip(self._free, self._free[1:], strict=False)
            if left.end_bytes == right.offset_bytes
        ]
        assert not touching, "neighbouring holes were not joined"
        assert not self._free or self._free[-1].end_bytes < self.top_bytes, "a hole at the top was not given up"

    def _take(self, index: int, size: int) -> Extent:
        hole = self._free[index]
        if hole.nbytes == size:
            del self._free[index]
        else:
            self._free[index] = Extent(hole.offset_bytes + size, hole.nbytes - size)
        return Extent(hole.offset_bytes, size)

    def _put_back(self, extent: Extent) -> None:
        index = bisect_left(self._free, extent.offset_bytes, key=lambda hole: hole.offset_bytes)
        first, last = index, index
        if index > 0 and self._free[index - 1].end_bytes == extent.offset_bytes:
            first -= 1
        if index < len(self._free) and self._free[index].offset_bytes == extent.end_bytes:
            last += 1
        merged = [*self._free[first:index], extent, *self._free[index:last]]
        start, end = merged[0].offset_bytes, merged[-1].end_bytes
        if end == self.top_bytes:
            self._free[first:last], self.top_bytes = [], start
        else:
            self._free[first:last] = [Extent(start, end - start)]
