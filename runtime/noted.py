"""Calls that a plan replays and the ledger need not know: what they make goes at its save, and is made again here.

In a step that follows its routine most of what goes is made by such calls (`noted_ops` in `delta/routine.py`), and each
gets a `Note` in place of a recipe and records. Their bytes are counted (`delta/keeping.py`); nothing else is asked of
the engine. When more has to be known, each note that lives becomes a recipe with records (`note_records.py`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta.keeping import Kept
from delta.runtime import batch_norm
from delta.runtime.made_again import MadeAgain
from delta.runtime.note import Made, MadeRef, Note, NotedTensor, Read, Readers
from delta.runtime.note_records import NoteRecords
from delta.runtime.versions import alias_of, over, within_op, without_graph
from delta.runtime.view import View, is_plain, is_shared
from delta.runtime.writes import filled_unseen
from delta.types import Action, Kind

if TYPE_CHECKING:
    from delta.runtime.core import Core


class Noted:
    """The notes of the step under way."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._engine = core.engine
        self._again = MadeAgain(core)
        self._notes: list[weakref.ref[Note]] = []
        self._tensors: list[weakref.ref[NotedTensor]] = []
        self.made: dict[int, Made] = {}  # by key of its storage, what forward may still read or save
        self.readers: Readers = {}  # of the notes of this step
        self.records: set[int] = set()  # that they read
        self.given = False  # in this step they have got their records already

    @property
    def on(self) -> bool:
        """Whether calls may be noted. While steps are traced the engine has to hear of everything."""
        return not self.given and self._core.may_watch

    @property
    def any(self) -> bool:
        """Whether a write in place could spoil something."""
        return bool(self.made or self.readers or self.records)

    def knows(self, key: int) -> bool:
        """Whether notes make or read that storage."""
        return self.counts(key) or self._core.storages.by_key.get(key) in self.records

    def counts(self, key: int) -> bool:
        """Whether they do without a record."""
        return key in self.made or key in self.readers

    def keeps(self, key: int) -> bool:
        """Whether a note keeps that storage alive."""
        return key in self.readers

    def step_ended(self) -> None:
        """What is noted from here on belongs to the next one."""
        self._notes.clear()
        self._tensors.clear()
        self.made.clear()
        self.records.clear()
        self.given = False

    # -- forward ---------------------------------------------------------------------------------------------------
    def reads(self, tensors: Sequence[Tensor]) -> list[Read] | None:
        """What a call with these arguments reads; None where something of it may not be had again (compare
        `Core.record_of`)."""
        found: list[Read] = []
        core = self._core
        for tensor in tensors:
            if not is_plain(tensor):
                return None
            key = tensor.untyped_storage()._cdata
            if (made := self.made.get(key)) is not None:
                if not made.is_seen_through(tensor) or is_shared(tensor):
                    return None
                found.append(Read(made=made, view=None if made.tensor() is tensor else View.of(tensor)))
            elif (record := core.storages.by_key.get(key)) is not None and self._is_saved(record):
                slot = core.slots[record]
                if slot.written_unseen or is_shared(tensor):
                    return None
                if slot.seen is None:
                    slot.look_at(tensor)
                found.append(Read(record=record, view=View.of(tensor)))
            elif core.persistent.holds(tensor):
                if core.persistent.refilled(tensor):
                    return None
                found.append(_kept_alive(tensor))
            elif tensor.device != core.device.torch_device or is_shared(tensor):
                return None
            else:
                found.append(_kept_alive(tensor))
        return found

    def _is_saved(self, record: int) -> bool:
        rec = self._engine.ledger.records[record]
        return rec.handles > 0 and rec.kind is not Kind.PARAMETER

    def overwrites(self, written: Sequence[Tensor], tensors: Sequence[Tensor]) -> int | None:
        """Which of its arguments a call may write into though it is only noted: the one result of a noted call, which
        nobody has saved. None if there is no such."""
        if len(written) != 1:
            return None
        tensor = written[0]
        made = self.made.get(tensor.untyped_storage()._cdata)
        if made is None or made.kept is not None or made.tensor() is not tensor or not made.is_seen_through(tensor):
            return None  # of an alias the version counter may be another one, which tells of no write
        return next(index for index, each in enumerate(tensors) if each is tensor)

    def add(self, note: Note, results: Sequence[Tensor]) -> None:
        """The call has run, and gave these."""
        core, made_by, readers, ledger = self._core, self.made, self.readers, self._engine.ledger
        with core.lock:
            for key in note.held:
                readers[key] = readers.get(key, 0) + 1
            for record in note.records:
                ledger.save(record, ledger.records[record].saved_at)
            self.records.update(note.records)
            overwritten = note.overwritten
            for tensor in results:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if overwritten is not None:  # no more bytes than there were
                    made_by[key] = made = Made(note, tensor, storage, self._storage_died, written=True)
                    note.made.append(weakref.ref(made))
                    break
                known = key in made_by or key in readers or core.storages.by_key.get(key) is not None
                if known or not storage.nbytes() or tensor.device != core.device.torch_device:
                    note.made.append(None)
                    continue
                made_by[key] = made = Made(note, tensor, storage, self._storage_died)
                note.made.append(weakref.ref(made))
                note.nbytes += made.nbytes
            self._notes.append(weakref.ref(note))

    def by_statistics(self, note: Note, again_ns: int | None) -> None:
        """How long a batch norm's output takes to be made from its statistics; None where it is not."""
        made = [each for each in note.results if each is not None]
        if again_ns is not None and len(made) == len(note.made):
            note.again_ns = again_ns
            note.statistics = [
                (made[index].storage, made[index].view) for index in (batch_norm.MEAN, batch_norm.INVSTD)
            ]

    def pack(
        self, order: int, key: int, storage: torch.UntypedStorage, tensor: Tensor, signature: int
    ) -> NotedTensor | None:
        """What autograd gets in place of a tensor that goes; None if more has to be done. `storage`: the tensor's,
        known by `key`."""
        core, engine = self._core, self._engine
        made = self.made.get(key)
        if made is None or not made.is_seen_through(tensor) or filled_unseen(made.note.facts, tensor):
            return None
        now_ns = time.perf_counter_ns()
        with core.lock:
            first = made.kept is None
            if made.kept is None:
                made.kept = engine.expected.keep(order, key, signature, made.nbytes, core.next_id, now_ns, noted=True)
            elif not made.kept.users or not engine.expected.again(made.kept, order, signature):
                return None
        if (kept := made.kept) is None:
            return None
        packed = NotedTensor(core, made, kept, tensor, engine.step_ends.stretch)
        self._tensors.append(weakref.ref(packed))
        if core.timeline.active:
            core.emit_saved(kept.record, made.nbytes, order)
        if first:
            if core.timeline.active:
                core.emit("evicted", record=kept.record, nbytes=made.nbytes, action=str(Action.RECOMPUTE))
            with core.lock:  # the device may lock itself and run an op, for which the recorder wants the core
                core.device.release(storage)  # autograd would have kept it: other streams may rely on that
            if engine.expected.short_for_next(order):
                with core:
                    core.attached.look()  # what the program has let go of goes when its copy is whole
                    core.run(engine.next_save(order, now_ns))
        return packed

    # -- backward --------------------------------------------------------------------------------------------------
    def fetch(self, packed: NotedTensor, made: Made, kept: Kept) -> Tensor:
        """What a saved tensor stands for, made again if need be. Called while the core is entered."""
        core, engine = self._core, self._engine
        core.device.meet()
        core.gauge.look()
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self.made.clear()
        now_ns = time.perf_counter_ns()
        more = engine.expected.need(kept, packed.stretch, False, now_ns, in_backward)
        found = made.found()
        if found is None:
            if not self._again.bring_back(made.note):
                engine.learner.cramped()
                core.kept.give_records()
                return self._fetch_taken(packed)
            found = made.value
            assert found is not None
        elif found is not made.value:
            found = without_graph(found)
        storage = found.untyped_storage()
        core.device.share(storage)
        if packed.view is not None:
            found = over(found, packed.view.over(storage))
        if more:
            core.run(engine.pressure(now_ns))
            core.go_on()
        elif core.gauge.on:
            core.gauge.look(own=True)
        return found

    def _fetch_taken(self, packed: NotedTensor) -> Tensor:
        handle = packed.taken
        assert handle is not None
        return self._core.fetch(handle, told=True)

    # -- ends ------------------------------------------------------------------------------------------------------
    def note_died(self, readers: Readers, keys: Sequence[int]) -> None:
        """It kept these alive."""
        for key in keys:
            readers[key] -= 1
            if not readers[key]:
                del readers[key]
                if readers is self.readers:  # else they have records by now
                    gone = self._engine.keeping.unread(key)
                    if gone is not None and self._core.timeline.active:
                        self._core.emit("freed", record=gone.record, nbytes=gone.nbytes)

    def released(self, kept: Kept, made: weakref.ref[Made]) -> None:
        """A saved tensor has died."""
        alive = made()
        if alive is not None and not kept.users:
            alive.value = None

    def went(self, made: weakref.ref[Made]) -> None:
        """A storage has died that was made the first time."""
        alive = made()
        if alive is not None and alive.kept is not None and alive.value is None:
            self._engine.keeping.went(alive.kept)

    def _storage_died(self, ref: MadeRef) -> None:
        known = self.made.get(ref.key)
        if known is not None and known.storage is ref:
            self.made.pop(ref.key, None)  # backward, in another thread, may have cleared all
        made = ref.made()
        if made is not None and made.kept is not None:
            self._core.inbox.made_died(ref.made)

    def give_records(self) -> None:
        """Each that lives gets its recipe, and what it makes its record, as if all had been recorded."""
        notes = [note for ref in self._notes if (note := ref()) is not None]
        tensors = [packed for ref in self._tensors if (packed := ref()) is not None]
        if not notes:
            return
        made = list(self.made.values())  # what nobody has saved yet lives by it alone
        self.step_ended()
        self.given, self.readers = True, {}
        NoteRecords(self._core).give(notes, [packed for packed in tensors if packed.made is not None])
        del made


def _kept_alive(tensor: Tensor) -> Read:
    with within_op():  # it goes on telling of writes
        return Read(alias_of(tensor), tensor._version, weakref.ref(tensor))
