"""Carries out what the engine decides, on real storages.

`Core` owns the engine, the device, one `Slot` per record, and what does each part of the work: which record a storage
has (`storages.py`), instructions (`carrier.py`), copies (`swap.py`), replays (`rematerialise.py`), and so on. Hooks,
recorder, daemon and weak-reference callbacks may come in from any thread (`entrance.py`): calls that may be interrupted
anywhere (a storage or a handle dies) only leave a note in the inbox, which is emptied at the next safe point. A
session's handles keep the core alive, so backward works after the block has ended.

It decides nothing: what to evict, when and how is the engine's.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from delta.engine import Engine
from delta.errors import DeltaError, StorageModifiedError
from delta.record import Host
from delta.runtime.asker import runs_the_program_s_code
from delta.runtime.attached import Attached
from delta.runtime.batch_norm import Trials
from delta.runtime.carrier import Carrier
from delta.runtime.device.base import Device
from delta.runtime.encode import Encoder
from delta.runtime.entrance import Entrance
from delta.runtime.gauge import Gauge
from delta.runtime.generators import set_back
from delta.runtime.handle import Handle
from delta.runtime.inbox import Inbox
from delta.runtime.kept import KeptTensors, look_of
from delta.runtime.landing import is_landing
from delta.runtime.moments import Moments
from delta.runtime.noted import Noted
from delta.runtime.op_times import OpTimes
from delta.runtime.persistent import Persistent
from delta.runtime.planning import PlanningAside
from delta.runtime.recompute import Recipe
from delta.runtime.rematerialise import Rematerialiser
from delta.runtime.slots import Slot
from delta.runtime.storages import Storages
from delta.runtime.stretches import Stretches
from delta.runtime.swap import Swap
from delta.runtime.versions import over
from delta.runtime.watch import Watch
from delta.runtime.writes import Writes, filled_unseen
from delta.timeline import Timeline
from delta.types import Instruction, Kind, Look, OpInfo
from delta.warned import warn


def _nothing(*_: object) -> None:
    """Stands for the recorder's switch where no recorder is."""


def _refuse_in_child() -> None:
    raise DeltaError(
        "backward runs in a forked process, and forward ran in the process that it was forked from: run both in one"
    )


_living: weakref.WeakSet[Core] = weakref.WeakSet()


def _abandon_all() -> None:
    for core in list(_living):
        core.abandon()


os.register_at_fork(after_in_child=_abandon_all)


class Core(Entrance):
    """One session's mechanism. It is entered (`with core:`) around everything that reports events; around one that no
    instruction follows the lock is enough, and notes that come in meanwhile wait until it is entered next."""

    def __init__(self, engine: Engine, device: Device, persistent: Persistent, timeline: Timeline) -> None:
        super().__init__()
        self.engine = engine
        self.device = device
        self.persistent = persistent
        self.timeline = timeline
        clock = device.clock()
        self.op_times = OpTimes(engine, clock)
        plans = engine.learner.revising.make_plan is not None  # else nobody asks when something came about
        self.moments = Moments(clock) if clock.late and plans else None
        if self.moments is not None:
            engine.learner.revising.device_times = self.moments.so_far
        engine.replays_take(device.replay_ns)
        self.slots: dict[int, Slot] = {}
        self.storages = Storages(self)
        self.carrier = Carrier(self)
        self.watch = Watch(self)
        self.kept = KeptTensors(self)
        self.noted = Noted(self)
        engine.keeping.give_records = self.kept.give_records
        engine.keeping.find_used = self.find_used
        self.stretches = Stretches(self)
        self.swap = Swap(self)
        self.encoder = Encoder(self)
        self.rematerialiser = Rematerialiser(self)
        self.writes = Writes(self)
        self.trials = Trials(self.begins, self.spent)
        self.planning = PlanningAside(engine.planning)
        self.gauge = Gauge(engine, device)
        self.attached = Attached(self.slots, engine.loose)
        self.stall_ns = 0
        self.oom_rescues = 0
        self.module = ""  # qualified name of the module now running, where the session knows it
        self.at_pack: Callable[[FrameType | None], None] = _nothing  # turns the recorder on and off, in the caller's op
        self.at_unpack: Callable[[], None] = _nothing  # takes it out of backward's way
        self.may_watch = True  # while steps are traced, every saved tensor is looked after
        self.modes_below = 0  # dispatch modes that were there before the recorder
        self.closing = False
        self.abandoned = False  # this is a process forked from the one that the block belongs to
        self.capturing = False  # a CUDA graph is captured (`capture.py`)
        self.passes = False  # hooks and recorder do nothing now
        self._passes_for_ever = False
        self.next_id: Callable[[], int] = itertools.count().__next__
        self.inbox = Inbox(self)
        self._step_began_ns = 0
        self._warned = 0
        _living.add(self)

    def abandon(self) -> None:
        """In a forked process, such as a data loader's worker: what it has inherited of the block does nothing there.
        The threads behind it are gone, a card cannot be used, and a lock may be held for ever."""
        self.open_in_child()
        self.timeline.abandon()
        self.abandoned = True
        self.pass_for_ever()
        self.at_unpack = _refuse_in_child

    def pass_for_ever(self) -> None:
        """Hooks and recorder do nothing from here on, where nobody can take them off."""
        self.passes = self._passes_for_ever = True

    def capture(self, on: bool) -> None:
        """A CUDA graph is captured from here on, or no longer."""
        self.capturing, self.passes = on, on or self._passes_for_ever
        if on:
            self.device.enforce(False)  # nobody hears of an op that finds no memory

    # -- entering -------------------------------------------------------------------------------------------------
    def _entered(self) -> None:
        self._drain()

    def _leaves(self) -> None:
        if self.inbox.notes or self.closing:
            self._drain()

    def _drain(self) -> None:
        """Take in transfers that have ended, and what happened at times when the engine could not be told."""
        if self.capturing:  # no event may be asked about
            return
        inbox = self.inbox
        inbox.emptying = True  # what comes of a transfer waits for its turn
        try:
            if self.swap.busy:
                self.swap.poll()
        finally:
            inbox.emptying = False
        if inbox.notes:
            inbox.empty()
        if self.closing and self.engine.ledger.handles == 0:
            self._finish()

    # -- ops --------------------------------------------------------------------------------------------------------
    @property
    def has_recipes(self) -> bool:
        """Whether something may be made again, which a write could spoil."""
        return bool(self.engine.ledger.ops) or self.noted.any

    def recorded(self, op: OpInfo, recipe: Recipe | None, untimed: Any) -> None:
        """An op ran. `untimed`: the token that will say later how long that took; None if that is known."""
        for record in op.outputs:
            self.slots[record].recipe = recipe
        gauge, engine = self.gauge, self.engine
        if gauge.closely or (gauge.on and engine.may_make_room(op)):
            gauge.look()
        instructions = engine.op_ran(op, time.perf_counter_ns())
        self.run(instructions)
        if untimed is not None:
            self.op_times.told_later(op.id, untimed)
        if instructions and gauge.on:
            gauge.look(own=True)

    def room_for(self, made_bytes: int) -> None:
        """An op without gradients is about to make so much. What those of an evaluation make and drop is merely kept
        soon, and no save is there to look."""
        if self.gauge.lacks(made_bytes):
            with self:
                self.gauge.look()
                self.gauge.make_way(made_bytes)

    # -- idle steps -------------------------------------------------------------------------------------------------
    def watching(self) -> bool:
        """Whether a tensor saved now is only watched. Never changes while a step has begun in the other way."""
        if self.watch.count:
            return True
        return not self.engine.learner.in_step and self.may_watch and self.engine.idle.expected

    def watched_too_much(self, tensor: Tensor) -> bool:
        """Whether what is watched, that tensor last, is over the limit, will be, or may be for all that is known."""
        idle, watch, used_bytes = self.engine.idle, self.watch, self.device.used_bytes
        if watch.count == 1 and not idle.goes_on(look_of(tensor)):
            return True
        return idle.is_over(watch.resident_bytes, used_bytes) or idle.will_be_over(
            watch.storages, watch.step_bytes, used_bytes
        )

    def watched_step(self, peak_bytes: int, began_ns: int) -> None:
        """A step that was only watched has ended."""
        with self:
            self._step_began_ns = began_ns
            self.engine.watched_step(peak_bytes)
            self.step_ended()

    def forward_again(self) -> None:
        """Backward has asked for something, and now something is made or saved: if outside of backward, what is still
        saved may be left over from a step that has ended."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self.watch.count:
            self.watch.forward_again()
            return
        with self:
            self.op_times.tell(wait=True)  # the step may be about to be learned from
            self.run(self.engine.forward_again(time.perf_counter_ns()))
            self.step_ended()

    # -- saving and bringing back -----------------------------------------------------------------------------------
    def go_on(self) -> None:
        """A need was served: what the plan puts after it."""
        if instructions := self.engine.prefetch(time.perf_counter_ns()):
            self.run(instructions)
        if self.gauge.on:
            self.gauge.look(own=True)

    def saved(self, tensor: Tensor, signature: int, look: Look, stays: bool, uncounted_bytes: int | None = None) -> int:
        """Autograd saved a tensor; returns its record. `stays`: it is too small to be evicted, and when the program
        lets go of it is of no interest. `uncounted_bytes`: of all that counts from now on; None: of its storage."""
        self.device.computes()
        record = self.storages.known(tensor)
        if record is not None and (self.filled_unseen(record, tensor) or self._copied_before(record)):
            self.writes.settle(self.writes.end([tensor], self.writes.begin([tensor])))
            record = self.storages.known(tensor)
        if record is None:
            record = self.storages.create(tensor, Kind.ACTIVATION)
        engine = self.engine
        begins = not engine.learner.in_step
        if begins:
            self.planning.step_begins()
            if engine.replanned:  # now that the program has let go of gradients, most of the time
                self.device.trim_reserved()
        now_ns = time.perf_counter_ns()
        if begins:
            self._step_began_ns = now_ns
        rec = engine.ledger.records[record]
        if self.gauge.on:
            if uncounted_bytes is None:
                self.gauge.look(uncounted_bytes=engine.ledger.not_counted_bytes([record]))
            else:
                self.gauge.look(own=True, uncounted_bytes=uncounted_bytes)
        if self.op_times.missing:
            self.op_times.tell(wait=False)
        if not stays:
            self.attached.look(few=not engine.learner.recorded)
        if rec.saved_at < 0 and not stays:
            self.attached.add(record)
            if engine.encodes:
                self.encoder.offer(record, tensor)
        instructions = engine.saved(record, signature, now_ns, look)
        try:
            self._note_moment()
            if self.timeline.active:  # before it is told that the record has gone
                self.emit_saved(record, rec.nbytes, rec.saved_at)
            self.run(instructions)
        except BaseException:  # Ctrl-C: no handle comes of it that could die
            self.inbox.handles_died([record])
            raise
        return record

    def filled_unseen(self, record: int, tensor: Tensor) -> bool:
        """Whether the recipe of a record that is saved may not give what is there."""
        recipe = self.slots[record].recipe
        return recipe is not None and filled_unseen(recipe.facts, tensor)

    def _copied_before(self, record: int) -> bool:
        """Whether a copy of what is saved once more may be older than what is there. A formula of backward that is
        differentiated writes between its saves into what it has made (that of `nn.LSTM`), and nobody sees its ops."""
        if torch._C._current_graph_task_id() == -1 or torch._C._len_torch_dispatch_stack() != self.modes_below:
            return False
        rec = self.engine.ledger.records[record]
        return rec.host is not Host.NONE or rec.encoded_bytes > 0 or rec.being_encoded

    def _note_moment(self) -> None:
        """The engine was told of a save or a need; when that is on the device is of interest where the step may be
        learned from."""
        learner = self.engine.learner
        if self.moments is not None and learner.recorded:
            self.moments.saw(learner.log, learner.is_timed)

    def fetch(self, packed: Handle, told: bool = False) -> Tensor:
        """What a handle stands for, brought back if need be and ready for the current stream. `told`: the engine has
        heard of the need.

        The tensor is made while the record is pinned. A storage that only Delta refers to is free to be wiped the
        moment it is let go of, and the end of a copy out that was under way all along lets go of it.
        """
        self.device.meet()
        if self.gauge.on:
            self.gauge.look()
        if not self.engine.keeping.any:  # else it is looked up when somebody asks what may go
            self.find_used()
        now_ns = time.perf_counter_ns()
        if told:
            needs = self.engine.lent(packed.record, now_ns)
        else:
            needs = self.engine.need(packed.record, now_ns, torch._C._current_graph_task_id() != -1)
        self._note_moment()
        record = self.engine.ledger.resolve(packed.record)
        try:
            if needs:
                self.run(needs)
            if not self.engine.ledger.records[record].held:
                if (signs := self.encoder.stand_in(record)) is not None:
                    return over(packed.counter, packed.view.over(signs))
                self.rematerialiser.bring_back(record)
            storage = self.ready(record)
            if is_landing(storage) and runs_the_program_s_code():
                storage = self._resizable(record, storage)
            self.device.share(storage)
            return over(packed.counter, packed.view.over(storage))
        finally:
            if done := self.engine.served(packed.record):
                self.run(done)
            self.attached.given_out(record)
            self.engine.given(record)
            self.go_on()

    def _resizable(self, record: int, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy in place of a storage that cannot be resized, which the program's own code may do."""
        slot = self.slots[record]
        assert slot.ref is not None
        self.run(self.engine.pressure(time.perf_counter_ns(), storage.nbytes()))  # both are there for a moment
        self.engine.ledger.note_peak(storage.nbytes())
        self.storages.untrack(slot.ref)
        slot.storage = storage.clone()
        slot.ref = self.storages.track(slot.storage, record)
        return slot.storage

    def lend(self, record: int) -> None:
        """Have what a replay reads at hand; `Engine.served` ends that."""
        self.run(self.engine.lent(record, time.perf_counter_ns()))
        record = self.engine.ledger.resolve(record)
        if not self.engine.ledger.records[record].held:
            self.rematerialiser.bring_back(record)

    def find_used(self) -> None:
        """Tell the engine which saved storages the program, or backward, uses still."""
        self.attached.look()
        self.engine.still_used(self.attached.records)

    def fetch_small(self, handle: int) -> torch.UntypedStorage:
        """The storage of a handle that stays."""
        self.engine.asked(handle, torch._C._current_graph_task_id() != -1)
        return self.ready(self.engine.ledger.resolve(handle))

    def ready(self, record: int) -> torch.UntypedStorage:
        slot = self.slots[record]
        storage = slot.alive()
        if slot.coming is not None or (storage is None and self.engine.ledger.records[record].host is Host.WHOLE):
            self.swap.await_back(record)
            storage = slot.alive()
        if storage is None:
            raise DeltaError(f"record {record} was not brought back: this is a defect in Delta, please report it")
        if storage.nbytes() < self.engine.ledger.records[record].nbytes:
            raise StorageModifiedError(
                f"a tensor that backward needs had {self.engine.ledger.records[record].nbytes} bytes and has "
                f"{storage.nbytes()}: its storage was resized after forward. Do that after backward, or outside of the "
                "block."
            )
        return storage

    def rescued(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        generator: torch.Generator | None,
        state: Tensor | None,
    ) -> Any:
        """Run the user's op; out of device memory, evict all that can go and run it once more (rule 13), drawing from
        its generator what it drew."""
        try:
            return self.outside(func, args, kwargs)
        except torch.OutOfMemoryError:
            self.outside(gc.collect)
            self.rescue()
        set_back(generator, state)
        return self.outside(func, args, kwargs)

    def rescue(self) -> None:
        """An op of the user's, a replay or a copy back found no device memory: evict all that can go. What is missing
        even then is not refused for the budget's sake: that cannot be held, which is told at the end of the step."""
        if not self.inside():
            gc.collect()  # what only cycles of Python's keep alive may be gigabytes
        with self:
            self.oom_rescues += 1
            self.run(self.engine.rescue(time.perf_counter_ns()))
            self.device.trim()
            self.device.enforce(False)
            self.gauge.look(own=True)

    # -- instructions ---------------------------------------------------------------------------------------------
    def run(self, instructions: Sequence[Instruction]) -> None:
        """Carry them out, and take in what came of it."""
        if instructions:
            self.carrier.carry_out(instructions)
        if self.inbox.notes and not self.inbox.emptying:
            self._drain()

    # -- bookkeeping ----------------------------------------------------------------------------------------------
    def begins(self) -> int:
        """What begins now is not the step's own work; `spent` or `resumes` tells of its end. Returns the time."""
        if self.moments is not None:
            self.moments.interrupted(self.engine.learner.log)
        return time.perf_counter_ns()

    def resumes(self) -> None:
        """What began then has ended."""
        if self.moments is not None:
            self.moments.resumed(self.engine.learner.log)

    def spent(self, ns: int) -> None:
        """It took this long, and is not Delta's own overhead either."""
        self.resumes()
        self.own_time(ns)
        self.engine.lost(ns)

    def waited(self, record: int, began_ns: int, why: str) -> None:
        ended_ns = time.perf_counter_ns()
        self.stall_ns += ended_ns - began_ns
        self.spent(ended_ns - began_ns)
        self.emit("waited", record=record, start_ns=began_ns, end_ns=ended_ns, why=why)

    def step_ended(self) -> None:
        finished = self.engine.finished_steps
        if not finished:
            return
        ended_ns = time.perf_counter_ns()
        records = self.engine.ledger.records
        for record, slot in self.slots.items():
            if records[record].op is None:
                slot.recipe = None
            if not records[record].users:
                slot.seen = None
        for step in finished:
            self.emit(
                "step",
                index=step.index,
                mode=str(step.mode),
                start_ns=self._step_began_ns,
                end_ns=ended_ns,
                peak_bytes=step.peak_bytes,
                unevicted_peak_bytes=step.unevicted_peak_bytes,
            )
        finished.clear()
        self.attached.step_ended()
        self.kept.step_ended()
        self.noted.step_ended()
        self.gauge.step_ended()
        if self.engine.settles:
            self.device.trim_host()
        self.timeline.flush()

    def sample(self) -> None:
        """One point of the memory timeline; also keeps the device's peak."""
        with self:
            ledger = self.engine.ledger
            self.emit(
                "memory",
                resident_bytes=ledger.resident_bytes + self.watch.resident_bytes,
                unevicted_bytes=ledger.unevicted_bytes + self.watch.resident_bytes,
                device_bytes=self.gauge.sample_bytes(),
                host_bytes=self.device.host_bytes(),
                limit_bytes=self.engine.limit_bytes,
            )

    def emit(self, ev: str, **fields: Any) -> None:
        if self.timeline.active:
            self.timeline.emit(ev, time.perf_counter_ns(), **fields)

    def emit_saved(self, record: int, nbytes: int, order: int) -> None:
        """A tensor was saved on a storage whose first save has that order."""
        op, module = self.engine.source_of(record, order)
        known = {name: value for name, value in (("op", op), ("module", module)) if value}
        self.emit("saved", record=record, nbytes=nbytes, **known)

    def raise_warnings(self) -> None:
        """Tell the user what the engine wants to warn of, or makes an error. Only from the user's own calls, when what
        the engine asked for has been done: a warning may be an error, too, and training may go on after it."""
        totals = self.engine.totals
        told = totals.warnings
        while self._warned < len(told):
            self._warned += 1
            warn(told[self._warned - 1])
        if totals.failed is not None:
            self.engine.raise_failed()

    # -- the end --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """The block has ended: no thread stays. What handles still need stays until the last of them dies. All of it
        is the other process's where this one was forked from it."""
        if self.abandoned:
            return
        self.at_pack = self.at_unpack = _nothing
        self.device.stop()
        self.planning.close()
        self.closing = True
        self.hear()

    def _finish(self) -> None:
        """No handle is left after the block has ended: give everything back."""
        self.closing = False
        for slot in self.slots.values():
            slot.storage = slot.ref = slot.recipe = slot.form = None
            if slot.block is not None:
                self.device.free(slot.block)
        self.slots.clear()
        self.storages.by_key.clear()
        self.inbox.notes.clear()  # storages that died of this are nobody's business any more
        self.swap.clear()
        self.device.close()
        self.timeline.close()
