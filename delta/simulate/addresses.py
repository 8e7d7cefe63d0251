"""The layout of a virtual device: its allocator's blocks, told by the storages that lie in them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from delta.layout import Area, Place
from delta.simulate.allocator import Block, Caching, Slab
from delta.simulate.machine import Machine


class Addresses:
    """See `delta.layout.Layout`. Blocks are looked up anew for each request."""

    def __init__(self, machine: Machine, allocator: Caching | Slab, bounded: bool) -> None:
        self.bounded = bounded
        self._machine, self._allocator = machine, allocator

    def areas(self, nbytes: int) -> list[Area]:
        """Neighbours in the segments that serve such a request; and segments as a whole, where there can be others."""
        holders = self._machine.holders()
        demand = self._allocator.demand(nbytes)
        found = [Area(demand.block_bytes, _blocks(demand.blocks, holders))]
        if demand.segment_bytes is not None:
            unreserved_bytes = self._allocator.capacity_bytes - self._allocator.reserved_bytes
            segments = _segments(self._allocator.blocks(), holders)
            found.append(Area(demand.segment_bytes, [Place(unreserved_bytes, -1), *segments], pages=True))
        return found


def _blocks(blocks: Iterable[Block], holders: dict[int, int]) -> list[Place]:
    return [Place(block.nbytes, block.segment, _held(block, holders)) for block in blocks]


def _segments(blocks: Iterable[Block], holders: dict[int, int]) -> list[Place]:
    found = []
    for segment, inside in groupby(blocks, key=lambda block: block.segment):
        places = _blocks(inside, holders)
        records = tuple(record for place in places for record in place.records)
        found.append(Place(sum(place.nbytes for place in places), segment, records))
    return found


def _held(block: Block, holders: dict[int, int]) -> tuple[int, ...]:
    return () if block.id is None else (holders[block.id],)
