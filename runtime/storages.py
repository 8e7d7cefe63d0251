"""Which record stands for a storage, and when a storage gets one.

A storage is known by its address in C++, for as long as it lives: a weak reference on its Python object tells of its
end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from delta.runtime.slots import Slot, StorageRef
from delta.runtime.view import is_shared
from delta.types import Kind

if TYPE_CHECKING:
    from delta.runtime.core import Core


def _is_small_view(tensor: Tensor) -> bool:
    return 2 * tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


class Storages:
    """The storages of one session that have records."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._slots = core.slots
        self._engine = core.engine
        self.by_key: dict[int, int] = {}  # storage identity -> record

    # -- looking one up ---------------------------------------------------------------------------------------------
    def known(self, tensor: Tensor) -> int | None:
        """The record of a tensor's storage, if there is one. One that is only counted gets its record by being asked
        for."""
        key = tensor.untyped_storage()._cdata
        if key in self._engine.keeping.storages or self._core.noted.counts(key):
            self._core.kept.give_records()
        return self.by_key.get(key)

    def known_to_be_written(self, tensor: Tensor) -> int | None:
        """The same where that is about to be another version: whoever reads this one has to be known, too."""
        if self._core.noted.knows(tensor.untyped_storage()._cdata):
            self._core.kept.give_records()
        return self.known(tensor)

    def minds(self, tensor: Tensor) -> bool:
        """Whether a write into the tensor may have to be known: something depends on what is there now."""
        key = tensor.untyped_storage()._cdata
        if self._core.noted.knows(key):
            return True
        record = self.by_key.get(key)
        rec = self._engine.ledger.records.get(record) if record is not None else None
        return rec is not None and rec.depended_on

    def record_of(self, tensor: Tensor) -> int | None:
        """The record of an op's input; one seen for the first time is a source or a parameter.

        None for a small view of a big storage that this step has not made, because a recipe would have to hold all of
        it (rule 1), for a weight that FSDP may have freed when the recipe is replayed, and for what may be written
        unseen (rule 19).
        """
        if self._core.persistent.refilled(tensor):
            return None
        record = self.known(tensor)
        if record is not None and self._became_parameter(record, tensor):
            record = None
        if record is None:
            record = self._seen_first(tensor)
        if record is None:
            return None
        rec, slot = self._engine.ledger.records[record], self._slots[record]
        if rec.kind is not Kind.PARAMETER and is_shared(tensor):
            return None
        before = self._engine.routine is None and rec.kind is Kind.ACTIVATION and rec.op is None and not rec.handles
        if before and _is_small_view(tensor):  # of what was made before this step, as a data set is
            return None
        if slot.seen is None or not rec.depended_on:
            slot.look_at(tensor)
        elif slot.written_unseen:
            return None
        return record

    def _became_parameter(self, record: int, tensor: Tensor) -> bool:
        """Whether an activation that nobody has saved is a parameter's data by now (`p.data = p.data - ...`): then no
        recipe goes back to what it was made of."""
        rec = self._engine.ledger.records[record]
        if rec.kind is not Kind.ACTIVATION or rec.op is None or rec.handles or rec.held:
            return False
        return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)

    def _seen_first(self, tensor: Tensor) -> int | None:
        if self._core.persistent.holds(tensor):
            return self.create(tensor, Kind.PARAMETER)
        if tensor.device != self._core.device.torch_device:
            return None
        if self._engine.routine is not None:  # what it plans to replay reads what has had a record in other steps
            return self.create(tensor, Kind.ACTIVATION)
        if _is_small_view(tensor):
            return None
        return self.create(tensor, Kind.SOURCE)

    # -- beginnings and ends ----------------------------------------------------------------------------------------
    def create(self, tensor: Tensor, kind: Kind) -> int:
        """A record for a storage seen for the first time, or for the new version of one."""
        storage = tensor.untyped_storage()
        record = self._core.next_id()
        self._slots[record] = Slot(self.track(storage, record))
        self._engine.created(record, storage.nbytes(), kind, time.perf_counter_ns())
        return record

    def track(self, storage: torch.UntypedStorage, record: int) -> StorageRef:
        """From here on the storage is the record's, and its end is noticed."""
        ref = StorageRef(storage, self._died)
        ref.key, ref.record = storage._cdata, record
        self.by_key[ref.key] = record
        return ref

    def untrack(self, ref: StorageRef) -> None:
        """The storage is of no record any more."""
        if self.by_key.get(ref.key) == ref.record:
            del self.by_key[ref.key]

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """The storage has no bytes any more, though a tensor is still on it."""
        with self._core:
            record = self.by_key.pop(storage._cdata, None)
            if record is not None:
                self._core.run(self._engine.storage_gone(record))

    def _died(self, ref: StorageRef) -> None:
        self.untrack(ref)
        self._core.inbox.storage_died(ref.record)
