"""Notes become recipes, and what they make becomes records: as if the calls had been recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta.runtime.handle import Handle
from delta.runtime.note import Made, Note, NotedTensor, Read
from delta.runtime.recompute import Input, Product, Recipe
from delta.runtime.slots import Slot
from delta.runtime.versions import counter_of, within_op
from delta.runtime.view import View
from delta.types import Kind, OpInfo

if TYPE_CHECKING:
    from delta.runtime.core import Core


class NoteRecords:
    """For one `give`. What is only counted of kept storages has its records by then."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._engine = core.engine
        self._records: dict[Made, int] = {}

    def give(self, notes: Sequence[Note], tensors: Sequence[NotedTensor]) -> None:
        """`notes`: those that live, in the order of the calls; `tensors`: the saved ones that live."""
        core, engine, records = self._core, self._engine, self._records
        for note in notes:
            self._give_recipe(note)
        back = {made for made in records if made.value is not None and core.slots[records[made]].alive() is not None}
        with within_op():
            for packed in tensors:
                self._take(packed)
        saved = [made for made in records if engine.ledger[records[made]].handles and not self._is_held(made)]
        for made in sorted(saved, key=lambda made: made not in back):
            for record in engine.list_noted(records[made], back=made in back):
                core.carrier.hold(record)
        for note in notes:
            core.inbox.handles_died(note.records)
            note.records = []
        for made in records:
            made.value = None
        core.carrier.carry_out(engine.bury(records.values()))

    def _is_held(self, made: Made) -> bool:
        return self._engine.ledger[self._records[made]].held

    def _give_recipe(self, note: Note) -> None:
        inputs, products = [], []
        for read in note.reads:
            if read.made is not None:
                inputs.append(Input(self._records[read.made], read.view or read.made.view))
            elif read.tensor is not None:
                inputs.append(Input(self._record_read(read, read.tensor), View.of(read.tensor)))
            else:
                assert read.view is not None
                inputs.append(Input(self._engine.ledger.resolve(read.record), read.view))
        for index, made in enumerate(note.results):
            if made is not None:
                self._records[made] = record = self._record_made(made)
                result = index if note.overwrites is None else None
                products.append(Product(record, made.nbytes, made.view, result=result, written=note.overwrites))
        if not products:
            return
        again_ns = note.again_ns if len(products) == len(note.made) else None
        recipe = Recipe(
            note.func, note.facts, note.args, note.kwargs, tuple(inputs), tuple(products), note.generator, note.state,
            again_ns, note.settings,
        )  # fmt: skip
        read_by = tuple(dict.fromkeys([entry.record for entry in inputs]))
        outputs = tuple([product.record for product in products])
        overwrites = () if note.overwrites is None else (inputs[note.overwrites].record,)
        op = OpInfo(note.number, note.facts.name, read_by, outputs, note.cost_ns, True, overwrites, note.module)
        slots = self._core.slots
        self._engine.op_noted(op, [record for record in outputs if slots[record].alive() is None])
        for record in outputs:
            slots[record].recipe = recipe

    def _record_read(self, read: Read, tensor: Tensor) -> int:
        """The record of what a note keeps alive by `tensor`."""
        core, given = self._core, read.given() if read.given is not None else None
        record = core.storages.by_key.get(tensor.untyped_storage()._cdata)
        if record is None:
            record = core.storages.create(tensor, Kind.PARAMETER if core.persistent.holds(tensor) else Kind.ACTIVATION)
        slot = core.slots[record]
        if slot.seen is None or tensor._version != read.version:
            slot.look_at(tensor if given is None else given)  # the note's own does not live on
            slot.version = read.version
        return record

    def _record_made(self, made: Made) -> int:
        """The record of what a note makes: that of its storage, if that has one by now and no op has read it. Where
        nothing would tell of writes, the storage has gone."""
        core, records, found = self._core, self._engine.ledger.records, made.found()
        storage = found.untyped_storage() if found is not None else None
        known = core.storages.by_key.get(storage._cdata) if storage is not None else None
        if known is not None:
            if records[known].op is None and not records[known].users:
                if made.kept is not None:  # its saved tensors are on that one, too
                    made.kept.record = known
                return known
            storage = None
        record = made.kept.record if made.kept is not None else core.next_id()
        core.slots[record] = Slot(core.storages.track(storage, record) if storage is not None else None)
        self._engine.created(record, made.nbytes, Kind.ACTIVATION, time.perf_counter_ns())
        return record

    def _take(self, packed: NotedTensor) -> None:
        core, made, kept = self._core, packed.made, packed.kept
        assert made is not None and kept is not None
        record, tensor, version = self._records[made], made.tensor(), packed.version
        if made.value is not None:
            tensor, version = made.value, made.value_version
            core.attached.given_out(record)
        elif tensor is None:  # nobody can write into it
            tensor, version = torch.empty(0, device=core.device.torch_device), 0
        self._engine.keeping.list_tensor(kept, packed.stretch)
        packed.take(Handle(core, record, packed.view or made.view, counter_of(tensor), version, stays=False))
