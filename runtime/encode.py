"""Encodes storages and decodes them again, as the engine asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta.runtime.codecs import Form, codec_for
from delta.runtime.relu import relu_asks, stand_in_for

if TYPE_CHECKING:
    from delta.runtime.core import Core

_POOLS = ("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")


class Encoder:
    """All calls come while the core is entered. The device copy goes only when the smaller form is whole (promise P4);
    where that cannot be made it is the value still."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def offer(self, record: int, tensor: Tensor) -> None:
        """A storage is about to be saved for the first time: tell the engine of the smaller form it may have."""
        slot = self._core.slots[record]
        made_by = tuple(self._made_by(record))
        slot.codec = codec_for(tensor, made_by, self._largest(record)) or stand_in_for(tensor, made_by)
        if slot.codec is not None:
            self._core.engine.encodable(record, slot.codec.encoding(tensor.untyped_storage().nbytes()))

    def _made_by(self, record: int | None) -> Iterator[str]:
        """The op that made a record, then the one that made what it overwrote."""
        ledger = self._core.engine.ledger
        while record is not None and (made := ledger[record].op) is not None and made in ledger.ops:
            op = ledger.ops[made]
            yield op.name
            record = next((old for old in op.overwrites if old in ledger), None)

    def _largest(self, record: int) -> int | None:
        """A bound on the values of pooling's indices: they count the elements of one plane of its input."""
        recipe = self._core.slots[record].recipe
        if recipe is None or recipe.facts.name not in _POOLS:
            return None
        spatial = 2 if recipe.facts.name == _POOLS[0] else 3
        return int(torch.Size(recipe.inputs[0].view.size[-spatial:]).numel())

    def encode(self, record: int) -> None:
        """Make the smaller form and let go of the device copy."""
        core, slot = self._core, self._core.slots.get(record)
        if slot is None or slot.storage is None:
            return  # let go of since this was decided
        rec = core.engine.ledger[record]
        if not rec.being_encoded and not rec.stood_in_for:
            return  # held again
        assert slot.codec is not None
        began_ns = core.begins()
        core.device.meet()
        try:
            with torch._C._DisableTorchDispatch():  # it takes many small ops, and each would pass the recorder
                form = slot.codec.encode(slot.storage)
        except torch.OutOfMemoryError:
            form = None
        core.waited(record, began_ns, "encode")
        if form is None:
            core.run(core.engine.encode_failed(record, time.perf_counter_ns()))
            return
        core.engine.encoded(record, form.nbytes)
        core.carrier.let_go(record)
        slot.form = form
        core.emit("evicted", record=record, nbytes=rec.nbytes, action="encode")
        if slot.alive() is None:  # known at once, so that what is encoded next does not count beside it
            core.run(core.engine.storage_gone(record))

    def decode(self, record: int) -> None:
        """Make the device copy again and let go of the smaller form."""
        core, slot = self._core, self._core.slots[record]
        assert slot.form is not None
        began_ns = core.begins()
        try:
            slot.storage = self._decoded(slot.form)
        except torch.OutOfMemoryError:
            core.engine.decode_failed(record, slot.form.nbytes)
            raise
        slot.ref = core.storages.track(slot.storage, record)
        slot.form = None
        core.waited(record, began_ns, "decode")

    def stand_in(self, record: int) -> torch.UntypedStorage | None:
        """For a record that is dropped: what its stand-in decodes to, if there is one and who asks needs no more. It is
        handed out and not kept."""
        core, slot = self._core, self._core.slots[record]
        if slot.form is None or not relu_asks():
            return None
        core.run(core.engine.allocating(core.engine.ledger[record].nbytes, time.perf_counter_ns()))
        began_ns = core.begins()
        storage = self._decoded(slot.form)
        core.engine.stood_in(record)
        core.waited(record, began_ns, "decode")
        return storage

    def _decoded(self, form: Form) -> torch.UntypedStorage:
        self._core.device.share(form.storage)  # made on one stream, and read on this one
        return form.decode()
