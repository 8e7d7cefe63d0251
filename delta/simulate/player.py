"""Plays a trace against the engine: the counterpart of `delta.runtime.core` on a virtual device.

The engine, its filter, director and planner are the ones that run on real devices. The player reports the events of the
trace to it and carries its instructions out on the `Machine`; it decides nothing. Time is the machine's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from delta.engine import Engine
from delta.planner import BESIDE
from delta.routine import Way
from delta.simulate.allocator import OutOfMemory
from delta.simulate.machine import Machine
from delta.trace.events import FREE, Backward, Constant, Evictable, Free, Need, Op, Result, Save, Trace, Unsave
from delta.types import (
    AwaitIn,
    AwaitOut,
    Decode,
    Drop,
    Encode,
    Encoding,
    Forget,
    FreeHost,
    Hold,
    Instruction,
    Kind,
    Look,
    OpInfo,
    Preserve,
    Release,
    SwapIn,
    SwapOut,
)

COUNTED = 0.25  # of what an event takes, where its storage is only counted: 12 and 8 µs of 38 and 47 (docs/overhead.md)


class Thrash(Exception):
    """Replays took more time than the step itself: given up."""


class Infeasible(Exception):
    """A storage does not fit, and nothing more can go."""


class Player:
    """One engine on one machine, over any number of steps of one trace."""

    def __init__(self, trace: Trace, engine: Engine, machine: Machine) -> None:
        self.engine, self.machine = engine, machine
        self.replay_ns = 0  # in the step at hand
        self.encoding_ns = 0  # encoding and decoding, in the step at hand
        self.bookkeeping_ns = 0  # Delta's own work, in the step at hand
        self._trace = trace
        self._all = trace.evictable is Evictable.ALL
        self._record: dict[int, int] = {}  # storage of the trace -> record
        self._ids, self._op_ids = count(), count()
        self._program: set[int] = set()  # records the program itself keeps alive
        self._asked: set[int] = set()  # records backward has asked for and will still read
        self._lets_go = _last_reads(trace)
        self._known = _known(trace)
        self._constants: dict[int, int] = {}
        self._going: dict[int, int] = {}  # record -> when its copy out ends
        self._coming: dict[int, int] = {}
        self._encoded: dict[int, int] = {}  # record -> its encoded form on the machine
        self._results: list[int] = []
        self._backward = False
        self._own = FREE
        self._ways: Sequence[Way] | None = None  # how the recorder takes the ops of forward
        self._kept: set[int] = set()  # save orders of what is only counted
        self._order: dict[int, int] = {}  # by record, in this step
        self._told = 0  # of them so far
        self._limit_ns = 0  # of replays: the step at hand takes as long without them
        self._saved_constants = {event.storage for event in trace.events if isinstance(event, Save)}
        self.fragmented: list[float] = []  # free share of the device, each time something had to go

    def step(self, timed: Trace | None = None) -> None:
        """Play the trace once, with the times of `timed` if that is given: the same step, as it went another time.

        Infeasible or Thrash where it cannot be done."""
        planning = self.engine.planning
        while tasks := planning.open_tasks:  # a device searches meanwhile; here it takes no time
            planning.search_ended(tasks[0], BESIDE[tasks[0].options.kind](tasks[0]))
        self.engine.recording(True)
        for record in self._constants.values():
            self._keep(record)
        self._record = dict(self._constants)
        self._results.clear()
        self._backward = False
        self.replay_ns = self.encoding_ns = self.bookkeeping_ns = 0
        own = self._own = self._trace.bookkeeping if not self.engine.idle.expected else FREE
        self._ways, self._told = self.engine.learner.steady_ways() if own != FREE else None, 0
        self._kept, self._order = self.engine.learner.steady_kept() if own != FREE else set(), {}
        played = timed or self._trace
        self._limit_ns = played.base_ns
        for position, event in enumerate(played.events):
            self._poll()
            match event:
                case Constant(storage, nbytes):
                    self._constant(storage, nbytes)
                case Op():
                    self._op(event)
                case Save(storage, encoded_bytes, encode_ns, decode_ns):
                    if encoded_bytes:
                        self.engine.encodable(self._record[storage], Encoding(encoded_bytes, encode_ns, decode_ns))
                    self._order.setdefault(self._record[storage], len(self._order))
                    self._pause(self._counted(own.save_ns, storage))
                    self._save(self._record[storage])
                case Need(storage):
                    self._pause(self._counted(own.need_ns, storage))
                    self._need(self._record[storage])
                case Unsave(storage):
                    self._pause(self._counted(own.release_ns, storage))
                    self._do(self.engine.unsaved(self._record[storage], self._now))
                case Free(storage):
                    self._free(self._record[storage])
                case Result(storage):
                    self._result(self._record[storage])
                case Backward():
                    self._backward = True
                    self.engine.backward_began()
            for storage in self._lets_go.get(position, ()):
                self._read(self._record[storage])
            self.engine.raise_failed()
        self._end()
        self.engine.raise_failed()

    def _counted(self, ns: int, storage: int) -> int:
        """What an event takes where the storage of a known step is only counted; else all of `ns`."""
        kept = self._order.get(self._record[storage]) in self._kept
        return round(ns * COUNTED) if kept else ns

    def _pause(self, ns: int) -> None:
        """Delta's own work takes this long."""
        self.bookkeeping_ns += ns
        self.machine.pause(ns)

    @property
    def _now(self) -> int:
        return self.machine.now_ns

    # -- the trace ------------------------------------------------------------------------------------------------
    def _constant(self, storage: int, nbytes: int) -> None:
        if storage in self._constants:
            return
        record = self._constants[storage] = self._record[storage] = next(self._ids)
        self._allocate(record, nbytes)
        self.machine.run(0, (), (record,))
        self._program.add(record)
        kind = Kind.SOURCE if storage in self._saved_constants else Kind.PARAMETER
        self.engine.created(record, nbytes, kind, self._now)
        self._keep(record)

    def _keep(self, record: int) -> None:
        """The device has its constants to the end of the step, whatever happens."""
        rec = self.engine.ledger[record]
        if rec.kind is Kind.PARAMETER and not rec.held:
            self.engine.ledger.hold(record)

    def _op(self, op: Op) -> None:
        reads = tuple(self._record[storage] for storage in op.inputs)
        known = self._all or not self._backward or not self._known.isdisjoint(op.outputs)
        if self._all:
            self._bring(reads)
            self._do(self.engine.allocating(sum(op.nbytes) + op.workspace_bytes, self._now))
        makes = tuple(next(self._ids) for _ in op.outputs)
        replaced = tuple(self._record[storage] for storage in op.overwrites)
        olds = () if self._all else replaced  # where everything may go, a write in place makes a copy, as in DTR
        preserved = {old: self._preserve(old) for old in olds if old in self.engine.ledger}
        for made, nbytes in list(zip(makes, op.nbytes, strict=True))[len(olds) :]:
            self._allocate(made, nbytes, self.engine.from_right(op.name))
        with self._workspace(op.workspace_bytes):
            self.machine.run(op.cost_ns, reads, makes[len(olds) :])
        self._program.update(makes)
        self._record.update(zip(op.outputs, makes, strict=True))
        for old, new in zip(olds, makes, strict=False):
            self._overwrite(old, new, preserved.get(old))
        if known and makes:
            for made, nbytes in list(zip(makes, op.nbytes, strict=True))[len(olds) :]:
                self.engine.created(made, nbytes, Kind.ACTIVATION, self._now)
            self._tell(op, reads, makes, olds)
        for old in preserved:
            self._do(self.engine.version_ended(old))
        if self._all:
            for made in makes:
                self._save(made)
                self._program.discard(made)  # its references are the handles
            self._served(reads)
            for old in replaced:
                if old not in self._constants.values():
                    self._free(old)

    def _tell(self, op: Op, reads: tuple[int, ...], makes: tuple[int, ...], olds: tuple[int, ...]) -> None:
        """Report the op; one without a recipe reads nothing, so it keeps nothing alive."""
        ledger = self.engine.ledger
        made = tuple(record for record in makes if record in ledger and ledger[record].op is None)
        read = tuple(dict.fromkeys(reads))
        replayable = op.replayable and all(record in ledger for record in read)
        if not replayable:
            read = olds = ()
        if made:
            self._pause(self._recording_ns())
            told = OpInfo(next(self._op_ids), op.name, read, made, op.replay_ns, replayable, olds)
            self._do(self.engine.op_ran(told, self._now))

    def _recording_ns(self) -> int:
        """What the recorder takes over the next op that is told of."""
        self._told += 1
        if self._ways is None or self._told > len(self._ways) or self._ways[self._told - 1] != Way.PASS:
            return self._own.op_ns
        return self._own.passed_ns

    def _preserve(self, old: int) -> int | None:
        """Before `old` is written in place; a clone of it, if a recipe still reads it."""
        clone = None
        for instruction in self.engine.before_overwrite(old):
            self._do([instruction])
            if isinstance(instruction, Preserve):
                clone = next(self._ids)
                self._allocate(clone, self.machine.nbytes[old])
                self.machine.run(0, (old,), (clone,))
        return clone

    def _overwrite(self, old: int, new: int, clone: int | None) -> None:
        """The memory of `old` holds `new`; the clone, if there is one, is `old` from here on."""
        self.machine.become(old, new)
        if clone is not None:
            self.machine.become(clone, old)
        self._program.discard(old)
        self._asked.discard(old)
        self._constants.update({storage: new for storage, record in self._constants.items() if record == old})
        if old in self.engine.ledger:
            kind = self.engine.ledger[old].kind
            kind = Kind.ACTIVATION if kind is Kind.SOURCE else kind
            self.engine.created(new, self.machine.nbytes[new], kind, self._now)
            self._do(self.engine.overwritten(old, new, clone is not None))

    def _save(self, record: int) -> None:
        nbytes = self.engine.ledger[record].nbytes  # a trace knows no shapes: bytes are all there is of a size
        self._do(self.engine.saved(record, nbytes, self._now, Look(sizes=(nbytes,))))

    def _need(self, record: int) -> None:
        """Backward has the value from here to its last read, whatever Delta does with its own reference."""
        ledger = self.engine.ledger
        used = (each for each in self._program | self._asked if each in ledger and ledger[each].saved_at >= 0)
        self.engine.still_used(list(used))
        self._bring([record])
        self._asked.add(record)
        self._served([record])
        self.engine.given(record)

    def _read(self, record: int) -> None:
        """Backward has read for the last time what it asked for."""
        self._asked.discard(record)
        self._do(self._died(record))

    def _free(self, record: int) -> None:
        """The program's last reference is gone: in a trace where everything may go, that is the handle."""
        if self._all:
            self._do(self.engine.unsaved(record, self._now))
            return
        self._program.discard(record)
        if record in self.engine.ledger and self.engine.ledger[record].held:
            self.engine.loose(record)
        self._do(self._died(record))

    def _result(self, record: int) -> None:
        if record not in self._constants.values():  # a constant written in place is there in the next step too
            self._results.append(record)

    def _end(self) -> None:
        """What the program still refers to has to be there, where it may have gone; then the step is over."""
        if self._all:
            for record in self._results:
                self._bring([record])
            for record in self._results:
                self._do(self.engine.served(record))
        for record in self._results:
            self._free(record)

    # -- bringing back --------------------------------------------------------------------------------------------
    def _bring(self, records: Sequence[int]) -> None:
        """All of these are resident and pinned afterwards; those that are there already are pinned first."""
        ledger = self.engine.ledger
        records = [record for record in records if ledger[record].kind is not Kind.PARAMETER]
        records.sort(key=lambda record: not ledger[record].held)
        for record in records:
            self._do(self.engine.need(record, self._now))
        for record in records:
            if not ledger[record].held:
                self._replay(record)
            self._ready(record)

    def _served(self, records: Iterable[int]) -> None:
        for record in records:
            if self.engine.ledger[record].kind is not Kind.PARAMETER:
                self._do(self.engine.served(record))
        self._poll()
        self._do(self.engine.prefetch(self._now))

    def _replay(self, record: int) -> None:
        walk = self.engine.replays.descend(record, self._now)
        try:
            while (op := walk.next(self._now)) is not None:
                self._replay_op(op)
        finally:
            self._do(self.engine.replays.end_descent())

    def _replay_op(self, op: OpInfo) -> None:
        engine, machine = self.engine, self.machine
        self._do(engine.replays.before(op, self._now))
        for source in op.inputs:
            self._ready(source)
        made, stolen = engine.replays.made_again(op), engine.replays.stealable(op)
        twins = {record: next(self._ids) for record in op.outputs if record not in made}  # made once more, for nothing
        for record in op.outputs:
            self._allocate(twins.get(record, record), machine.nbytes[record], engine.from_right(op.name))
        machine.run(op.cost_ns, op.inputs, tuple(twins.get(record, record) for record in op.outputs))
        for twin in twins.values():
            machine.free(twin)
        self._pause(self._own.need_ns + self._own.op_ns)  # looked after as a need is, put together as an op is recorded
        engine.lost(op.cost_ns)
        self.replay_ns += op.cost_ns
        if self.replay_ns > self._limit_ns:
            raise Thrash
        self._do(engine.replays.replayed(op, made, stolen))
        for source in filter(machine.holds, stolen):
            self._do(self._died(source))

    def _ready(self, record: int) -> None:
        """Wait for the copy back, if the record is on its way."""
        if record in self._coming:
            self.engine.transfers.late(self.engine.ledger[record].saved_at)
            self._wait(self._coming[record])
            self._poll()

    # -- the machine ----------------------------------------------------------------------------------------------
    def _wait(self, then_ns: int) -> None:
        before_ns = self._now
        self.machine.wait_until(then_ns)
        self.engine.lost(self._now - before_ns)

    def _poll(self) -> None:
        """Tell the engine of the copies that have ended by now. Those of one direction end as they began."""
        transfers = self.engine.transfers
        for under_way, ended in ((self._going, transfers.copied_out), (self._coming, transfers.copied_in)):
            while under_way and under_way[record := next(iter(under_way))] <= self._now:
                del under_way[record]
                self._do(ended(record))

    def _allocate(self, record: int, nbytes: int, from_right: bool = False) -> None:
        """Memory for a storage. Where it is there but not in one piece, more has to go."""
        while True:
            try:
                return self.machine.allocate(record, nbytes, from_right)
            except OutOfMemory as full:
                instructions = self.engine.make_place(nbytes, self._now)
                if not instructions:
                    raise Infeasible(str(full)) from None
                self._do(instructions)

    @contextmanager
    def _workspace(self, nbytes: int) -> Iterator[None]:
        """Memory that an op has while it runs."""
        if not nbytes:
            yield
            return
        room = next(self._ids)
        self._allocate(room, nbytes)
        yield
        self.machine.free(room)

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Drop(record, _):
                    allocator = self.machine.allocator
                    self.fragmented.append(allocator.free_bytes / allocator.capacity_bytes)
                    self._pause(self._own.release_ns)
                    self._do(self._died(record))
                case Release(record):
                    self._discard_encoded(record)
                    self._do(self._died(record))
                case Encode(record):
                    self._encode(record)
                case Decode(record):
                    self._decode(record)
                case SwapOut(record, wait):
                    self._going[record] = self.machine.copy_out(record)
                    if wait:
                        self._await_out(record)
                case AwaitOut(record):
                    self._await_out(record)
                case AwaitIn(record):
                    if record in self._coming:
                        self._wait(self._coming[record])
                        self._poll()
                case SwapIn(record):
                    from_right = self.engine.from_right(self.engine.op_name_of(record))
                    self._allocate(record, self.machine.nbytes[record], from_right)
                    self._coming[record] = self.machine.copy_in(record)
                    self.engine.transfers.coming()
                case Hold(record) | Forget(record) | FreeHost(record):
                    self._discard_encoded(record)
                case Preserve(_):
                    pass  # the machine's storages have no owner, and old versions are storages of their own

    def _encode(self, record: int) -> None:
        encoding = self.engine.ledger[record].encoding
        assert encoding is not None
        form = self._encoded[record] = next(self._ids)
        self._allocate(form, encoding.nbytes)
        self.machine.encode(record, form, encoding.encode_ns)
        self._encoding_took(encoding.encode_ns)
        self.engine.encoded(record, encoding.nbytes)
        self._do(self._died(record))

    def _decode(self, record: int) -> None:
        encoding = self.engine.ledger[record].encoding
        assert encoding is not None
        self._allocate(record, self.engine.ledger[record].nbytes)
        self.machine.decode(self._encoded[record], record, encoding.decode_ns)
        self._encoding_took(encoding.decode_ns)
        self._discard_encoded(record)

    def _encoding_took(self, ns: int) -> None:
        self.encoding_ns += ns
        self.engine.lost(ns)

    def _discard_encoded(self, record: int) -> None:
        form = self._encoded.pop(record, None)
        if form is not None:
            self.machine.free(form)

    def _await_out(self, record: int) -> None:
        if record in self._going:
            self._wait(self._going[record])
            self._poll()

    def _died(self, record: int) -> list[Instruction]:
        """Delta let go of a storage, or the program did: without either it is free."""
        rec = self.engine.ledger.records.get(record)
        owned = (rec is not None and rec.held) or record in self._program or record in self._asked
        if owned or not self.machine.holds(record):
            return []
        self.machine.free(record)
        return self.engine.storage_gone(record)


def _known(trace: Trace) -> set[int]:
    """The storages that the engine hears of whenever they are made: those that autograd saves, under this number or
    after writes in place, and what they are replayed from. Of others it hears in forward alone: what backward makes is
    saved where a gradient gets a graph of its own, or where forward goes on between two backwards."""
    known: set[int] = set()
    for event in reversed(trace.events):
        match event:
            case Save(storage):
                known.add(storage)
            case Op() if not known.isdisjoint(event.outputs):
                known.update(event.inputs if event.replayable else event.overwrites)
    return known


def _last_reads(trace: Trace) -> dict[int, list[int]]:
    """Event -> the storages that backward asked for and lets go of after it: it is the last op that reads them before
    they are asked for again; `Need` itself where no op does."""
    last: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for position, event in enumerate(trace.events):
        match event:
            case Need(storage):
                if storage in last:
                    found.setdefault(last[storage], []).append(storage)
                last[storage] = position
            case Op():
                last.update({storage: position for storage in event.inputs if storage in last})
    for storage, position in last.items():
        found.setdefault(position, []).append(storage)
    return found
