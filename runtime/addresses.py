"""The layout of a real device: the blocks of its allocator, told by the records that lie in them.

A limit in bytes holds there, and the allocator may take more from the card; so a window is looked for that gives back
enough bytes side by side, not one that a certain request fits into. Where blocks lie is asked anew for each eviction.
"""

from __future__ import annotations

from collections.abc import Mapping

from delta.layout import Area, Place
from delta.runtime.device.base import Device, MemoryBlock
from delta.runtime.slots import Slot

SOMEBODY = -1  # in a block, and no record


class DeviceAddresses:
    """See `delta.layout.Layout`. Until `follow` it knows no records, and nothing is found to evict together."""

    bounded = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slots: Mapping[int, Slot] = {}

    def follow(self, slots: Mapping[int, Slot]) -> None:
        """`slots`: all records, kept up to date by their owner."""
        self._slots = slots

    def areas(self, nbytes: int) -> list[Area]:
        """All blocks; a window lies in one segment."""
        records = self._by_address()
        places = [
            Place(block.nbytes, block.segment, _held(block, records)) for block in self._device.memory_blocks() or ()
        ]
        return [Area(nbytes, places)]

    def _by_address(self) -> dict[int, int]:
        found = {}
        for record, slot in self._slots.items():
            storage = slot.alive()
            if storage is not None and storage.nbytes():
                found[storage.data_ptr()] = record
        return found


def _held(block: MemoryBlock, records: Mapping[int, int]) -> tuple[int, ...]:
    return () if block.free else (records.get(block.address, SOMEBODY),)
