"""Saved tensors that a plan keeps: in a step that goes as planned they are themselves.

Nothing is brought back or decided for them; their bytes are counted, and what a replay reads is held
(`delta/keeping.py`). When more has to be known of them, each becomes a `Handle` on a record.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from delta.keeping import Kept
from delta.runtime.handle import Handle, handle_of
from delta.runtime.note import NotedTensor
from delta.runtime.slots import Slot
from delta.runtime.versions import within_op, without_graph
from delta.types import Action, Kind, Look

if TYPE_CHECKING:
    from delta.routine import Routine
    from delta.runtime.core import Core


@final
class Passed:
    """A saved tensor that is none of Delta's business, or on a storage that autograd has alone by an earlier save."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = without_graph(tensor)
        self.version = -1 if tensor.is_inference() else tensor._version


class KeptTensor:
    """A saved tensor that stays itself, until `taken` says that the core looks after it."""

    __slots__ = ("__weakref__", "core", "kept", "stays", "stretch", "taken", "tensor", "version")

    def __init__(self, core: Core, kept: Kept, tensor: Tensor, stretch: int, stays: bool) -> None:
        self.core = core
        self.kept: Kept | None = kept
        self.tensor: Tensor | None = without_graph(tensor)
        self.version = tensor._version
        self.stretch = stretch
        self.stays = stays  # too small to be evicted
        self.taken: Handle | None = None

    def done(self) -> None:
        """Backward is done with it, though it still lives, and what that lets go of has gone. Nobody may ask again."""
        if self.taken is not None:
            self.taken.done()
            return
        kept, self.kept, self.tensor = self.kept, None, None
        assert kept is not None
        with self.core:
            self.core.inbox.kept_died(kept)

    def __del__(self) -> None:
        if self.taken is None and self.kept is not None:
            kept, self.kept = self.kept, None  # weak references to what is dying still find it
            self.core.inbox.kept_died(kept, soon=kept.recorded and not self.stays)


class KeptTensors:
    """Those of the step under way."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._engine = core.engine
        self._expected, self._learner = core.engine.expected, core.engine.learner
        self._step_ends = core.engine.step_ends
        self._tensors: list[weakref.ref[KeptTensor]] = []

    def pack(self, tensor: Tensor, nbytes: int, signature: int) -> KeptTensor | NotedTensor | Passed | Handle | None:
        """What autograd gets in place of a tensor that the plan keeps, or drops at once; None if more has to be done
        than that. `nbytes`: of its storage."""
        core, learner = self._core, self._learner
        if learner.routine is None or not core.may_watch:  # while steps are traced, every one is looked after
            return None
        storage = tensor.untyped_storage()
        if core.inbox.notes:
            core.hear()
        with core.lock:
            order = learner.expects(signature, nbytes)
            routine = learner.routine
            if order < 0 or routine is None:
                return None
            if learner.alone and self._expected.again_alone(order, signature):
                return Passed(tensor)
            core.device.computes()
            key = storage._cdata
            record, drops, gauge = core.storages.by_key.get(key), order in routine.dropped, core.gauge
            if record is not None and core.filled_unseen(record, tensor):
                return None
            if gauge.on and (gauge.closely or drops or record is not None):
                gauge.look(uncounted_bytes=self._expected.uncounted_bytes(order, record, nbytes))
            if not drops:
                return self._kept(routine, order, tensor, storage, record, signature)
        if order in routine.noted and (noted := core.noted.pack(order, key, storage, tensor, signature)) is not None:
            return noted
        return self._dropped(order, tensor, storage, record, signature)

    def _kept(
        self,
        routine: Routine,
        order: int,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        record: int | None,
        signature: int,
    ) -> KeptTensor | None:
        """The tensor itself; None where there is no room for it. What a replay reads or makes has a record."""
        core = self._core
        key, nbytes, now_ns = storage._cdata, storage.nbytes(), time.perf_counter_ns()
        if record is None and order in routine.read:
            record = core.storages.create(tensor, Kind.ACTIVATION)
        if record is not None:
            kept = self._expected.keep_record(order, record, key, signature, now_ns)
        else:
            kept = self._expected.keep(order, key, signature, nbytes, core.next_id, now_ns)
            if kept is None and (awaits := self._expected.await_for_save(order, nbytes)):
                with core:  # else more would have to be known of all that is noted, which takes room itself
                    core.run(awaits)
                kept = self._expected.keep(order, key, signature, nbytes, core.next_id, now_ns)
        if kept is None:
            return None
        if record is not None:
            core.slots[record].storage = storage
        packed = KeptTensor(core, kept, tensor, self._step_ends.stretch, self._engine.stays(nbytes))
        if (made := core.noted.made.get(key)) is not None and packed.tensor is not None:
            made.is_kept_as(tensor, packed.tensor)
        self._tensors.append(weakref.ref(packed))
        if core.timeline.active:
            core.emit_saved(kept.record, nbytes, order)
        return packed

    def _dropped(
        self, order: int, tensor: Tensor, storage: torch.UntypedStorage, record: int | None, signature: int
    ) -> Handle | None:
        core = self._core
        if record is None:
            return None
        with core:  # what it is made from has to live until it is held
            anchors = core.engine.expected.drop(order, record, signature, time.perf_counter_ns())
            if anchors is None:
                return None
            core.device.release(storage)  # autograd would have kept it, and another stream may rely on that
            for anchor in anchors:
                core.carrier.hold(anchor)
        if core.timeline.active:
            nbytes = core.engine.ledger[record].nbytes
            core.emit_saved(record, nbytes, order)
            core.emit("evicted", record=record, nbytes=nbytes, action=str(Action.RECOMPUTE))
        return handle_of(core, record, tensor, tensor._version, stays=False)

    def need(self, packed: KeptTensor) -> None:
        """Somebody asks for one."""
        core, kept, gauge = self._core, packed.kept, self._core.gauge
        assert kept is not None
        in_backward = torch._C._current_graph_task_id() != -1
        with core.lock:
            if gauge.on and (gauge.closely or kept.recorded):
                gauge.look()
            now_ns = time.perf_counter_ns()
            more = self._expected.need(kept, packed.stretch, packed.stays, now_ns, in_backward)
        if more:
            with core:
                core.run(self._engine.pressure(now_ns))
                core.go_on()

    def give_records(self) -> None:
        """Each that lives gets its record, as if it had been looked after from the start."""
        tensors, self._tensors = self._tensors, []
        self._engine.keeping.list_all()
        for ref in tensors:
            packed = ref()
            if packed is not None and packed.kept is not None:
                with within_op():
                    self._take(packed, packed.kept)
        self._core.noted.give_records()
        if self._core.engine.step_ends.needed:
            self._core.find_used()
        else:
            self._core.attached.look()  # most of them the program has let go of

    def _take(self, packed: KeptTensor, kept: Kept) -> None:
        core, tensor = self._core, packed.tensor
        assert tensor is not None
        storage = tensor.untyped_storage()
        if kept.recorded:
            if not packed.stays:
                core.attached.given_out(kept.record)
        elif self._engine.keeping.list_tensor(kept, packed.stretch):
            core.slots[kept.record] = slot = Slot(core.storages.track(storage, kept.record))
            slot.storage = storage
            if not packed.stays:
                core.attached.add(kept.record)
        packed.taken = handle_of(core, kept.record, tensor, packed.version, packed.stays)
        packed.tensor = None

    def step_ended(self) -> None:
        """None of them is left."""
        self._tensors.clear()


def signature_of(tensor: Tensor, nbytes: int) -> int:
    """What steps are told apart by, of a saved tensor on a storage of `nbytes`."""
    return hash((tensor.shape, tensor.stride(), tensor.dtype, nbytes))


def structure_of(tensor: Tensor) -> int:
    """... and what of it is the same at every size."""
    return hash((tensor.dim(), tensor.dtype))


def look_of(tensor: Tensor) -> Look:
    """... with its sizes."""
    return Look(structure_of(tensor), tuple(tensor.shape))
