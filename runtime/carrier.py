"""The engine's instructions, carried out one after the other on real storages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from delta.runtime.slots import Slot
from delta.types import (
    AwaitIn,
    AwaitOut,
    Decode,
    Drop,
    Encode,
    Forget,
    FreeHost,
    Hold,
    Instruction,
    Preserve,
    Release,
    SwapIn,
    SwapOut,
)

if TYPE_CHECKING:
    from delta.runtime.core import Core


class Carrier:
    """Does what an instruction says, or has swap and encoder do it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._slots = core.slots

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        core = self._core
        for instruction in instructions:
            match instruction:
                case Hold(record):
                    self.hold(record)
                case Drop(record, action):
                    self.let_go(record)
                    if core.timeline.active:
                        nbytes = core.engine.ledger.records[record].nbytes
                        core.emit("evicted", record=record, nbytes=nbytes, action=str(action))
                case Release(record):
                    self.let_go(record)
                    if core.timeline.active and record in core.engine.ledger:  # else it was only an encoded form
                        core.emit("freed", record=record, nbytes=core.engine.ledger.records[record].nbytes)
                case SwapOut(record, wait):
                    core.swap.out(record, wait)
                case SwapIn(record):
                    core.swap.back(record)
                case AwaitOut(record):
                    core.swap.await_out(record)
                case AwaitIn(record):
                    core.swap.await_in(record)
                case Encode(record):
                    core.encoder.encode(record)
                case Decode(record):
                    core.encoder.decode(record)
                case Preserve(record):
                    self._preserve(record)
                case Forget(record):
                    self._free_host(self._slots.pop(record))
                case FreeHost(record):
                    if (slot := self._slots.get(record)) is not None:  # else it died of being let go of just now
                        self._free_host(slot)

    def hold(self, record: int) -> None:
        """Take a reference to a storage that is alive."""
        slot = self._slots[record]
        slot.storage = slot.alive()
        slot.form = None
        assert slot.storage is not None, f"record {record} is dead and cannot be held"

    def let_go(self, record: int) -> None:
        """Give up the storage, or its smaller form."""
        slot = self._slots[record]
        slot.form = None
        if slot.storage is not None:
            self._core.device.release(slot.storage)
            slot.storage = None

    def _preserve(self, record: int) -> None:
        slot, storages = self._slots[record], self._core.storages
        storage = slot.alive()
        assert storage is not None
        self._core.device.meet()
        slot.storage = storage.clone()
        kept = storages.by_key.get(storage._cdata)
        slot.ref = storages.track(slot.storage, record)
        if kept is not None:
            storages.by_key[storage._cdata] = kept  # the new version is looked up through the old storage

    def _free_host(self, slot: Slot) -> None:
        block, slot.block = slot.block, None
        if block is not None:
            self._core.device.free(block)
            self._core.engine.transfers.host_room()
