"""What lives where: records, their legal state transitions, and the byte totals.

A record is one version of one storage. It is *alive* while the storage exists on the device, *held* while Delta itself
owns a reference to it, and its host copy is in one of the states of `Host`. Instead of being held it may be *encoded*:
Delta then owns a smaller form of it on the device. A record can be brought back if it is held or encoded, if its host
copy is whole, or if its op can be replayed from records that can be brought back; the ledger refuses every transition
that would leave a needed record without such a way (promise P4). An encoded form that is only a *stand-in* counts its
bytes and is no such way.

The ledger counts, it does not decide: `engine.py` decides. It knows nothing of tensors, threads or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from delta.record import Host, LedgerError, Record
from delta.types import Kind, OpInfo

_HOST_GOES = frozenset(
    {
        (Host.NONE, Host.LEAVING),
        (Host.LEAVING, Host.WHOLE),
        (Host.LEAVING, Host.NONE),
        (Host.WHOLE, Host.COMING),
        (Host.WHOLE, Host.NONE),
        (Host.COMING, Host.WHOLE),
    }
)
"""From and to: the ways a host copy may go."""


class Ledger:
    """All records and live ops, with running totals that `validate` re-derives."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.ops: dict[int, OpInfo] = {}
        self.held: dict[int, int] = {}  # the records Delta holds, in the order of their last uses, and its numbers
        self.copied: set[int] = set()  # records with a host copy, whole or under way
        self.left_on_host: list[int] = []  # records whose host copies have been given up, until somebody frees them
        self.dead_ends: set[int] = set()  # records that an op reads, Delta does not have and no replay makes
        self.moved: set[int] = set()  # what others cost may have changed by these since somebody last cleared this
        self.touched: set[int] = set()  # these may go or stay now, or have been used, since somebody last cleared this
        self.resident_bytes = 0
        self.unevicted_bytes = 0
        self.leaving_bytes = 0
        self.handles = 0
        self.left_over = 0  # of them, those on records that were saved in earlier steps only
        self.peak_resident_bytes = 0
        self.peak_unevicted_bytes = 0
        self._counted_bytes = self._counted_handles = 0  # of storages that have no record: see `keeping.py`
        self._counted_unevicted_bytes = 0
        self._outputs_left: dict[int, int] = {}
        self._made_bytes: dict[int, int] = {}
        self.most_op_bytes = 0  # that any op so far has read, parameters aside, and made
        self._successors: dict[int, int] = {}
        self._uses = 0
        self._unread: set[int] = set()  # no saved tensor depends on these through a recipe: see `_may_be_read`

    def __getitem__(self, record: int) -> Record:
        return self.records[record]

    def __contains__(self, record: int) -> bool:
        return record in self.records

    # -- births ---------------------------------------------------------------------------------------------------
    def create(self, record: int, nbytes: int, kind: Kind, now_ns: int = 0) -> Record:
        """A storage (or a new version of one) appeared on the device."""
        if record in self.records:
            raise LedgerError(f"record {record} exists")
        made = Record(record, nbytes, kind, used_ns=now_ns)
        self.records[record] = made
        self._went_or_came(made)
        return made

    def add_op(self, op: OpInfo) -> None:
        """An op ran whose outputs may have to be made again from its inputs; outputs are records already created.

        No record is read before it is made, so no recipe ever needs its own result.
        """
        for output in op.outputs:
            if self.records[output].op is not None:
                raise LedgerError(f"record {output} has a producer already")
            if self.records[output].users or output in op.inputs:
                raise LedgerError(f"record {output} was read before op {op.id} ({op.name}) made it")
            self.records[output].op = op.id
        for source in op.inputs:
            self.records[source].users.add(op.id)
            self._look_for_dead_end(self.records[source])
        self.ops[op.id] = op
        for output in op.outputs:
            self._went_or_came(self.records[output])
        self._outputs_left[op.id] = len(op.outputs)
        self._made_bytes[op.id] = sum(self.records[output].nbytes for output in op.outputs)
        self.most_op_bytes = max(self.most_op_bytes, self._op_bytes(op))

    def time_op(self, op: int, cost_ns: int) -> None:
        """The device has told how long an op took, after the fact."""
        if op in self.ops:
            self.ops[op] = replace(self.ops[op], cost_ns=cost_ns)
            self._change(*self.ops[op].outputs)

    # -- handles --------------------------------------------------------------------------------------------------
    @property
    def own_handles(self) -> int:
        """Handles of the step under way."""
        return self.handles - self.left_over

    def save(self, record: int, order: int) -> bool:
        """Autograd saved a tensor on this storage. True if it is the first handle on the record.

        `order`: among the first saves of this step; -1 for a handle that is left over from an earlier one.
        """
        rec = self.records[record]
        if rec.saved_at < 0 <= order:
            rec.saved_at = order
            self.left_over -= rec.handles
        rec.handles += 1
        self._account(rec)
        self.handles += 1
        if rec.saved_at < 0:
            self.left_over += 1
        if rec.handles == 1:
            self._count_unevicted(rec)
            if rec.op is not None and not rec.available:
                self._may_be_read(rec)
        self.touched.add(record)
        return rec.handles == 1

    def unsave(self, record: int) -> bool:
        """A handle died. True if it was the last one on the record."""
        rec = self.records[record]
        if rec.handles < 1:
            raise LedgerError(f"record {record} has no handle to give up")
        rec.handles -= 1
        self._account(rec)
        self.handles -= 1
        if rec.saved_at < 0:
            self.left_over -= 1
        if rec.handles == 0 and rec.kind is not Kind.PARAMETER:
            self.unevicted_bytes -= rec.nbytes
        return rec.handles == 0

    def count(self, handles: int = 0, resident_bytes: int = 0, unevicted_bytes: int = 0) -> None:
        """What storages add that get no record: saved tensors, bytes that are there, and bytes that would be there if
        nothing were evicted. Negative: they are fewer now."""
        self.handles += handles
        self._counted_handles += handles
        self._counted_bytes += resident_bytes
        self._counted_unevicted_bytes += unevicted_bytes
        self.resident_bytes += resident_bytes
        self.unevicted_bytes += unevicted_bytes
        if self.resident_bytes > self.peak_resident_bytes:
            self.peak_resident_bytes = self.resident_bytes
        if self.unevicted_bytes > self.peak_unevicted_bytes:
            self.peak_unevicted_bytes = self.unevicted_bytes
        if self._counted_handles < 0 or self._counted_bytes < 0 or self._counted_unevicted_bytes < 0:
            raise LedgerError(f"{-handles} handles and {-resident_bytes} bytes without a record are not counted")

    def supersede(self, old: int, new: int) -> None:
        """`old` was overwritten in place: its handles follow the bytes to the new version, as plain autograd's do."""
        count = self.records[old].handles
        if count == 0:
            return
        order = self.records[old].saved_at
        for _ in range(count):
            self.unsave(old)
        for _ in range(count):
            self.save(new, order)
        self._successors[old] = new

    def resolve(self, record: int) -> int:
        """The record a handle taken on `record` stands for now."""
        while record in self._successors:
            record = self._successors[record]
        return record

    # -- the device copy ------------------------------------------------------------------------------------------
    def hold(self, record: int, soon: bool = False) -> None:
        """Delta owns a reference to the storage from here on.

        `soon`: by an instruction that comes after others that give room; `note_peak` is called when it is there, or by
        what counts next.
        """
        rec = self.records[record]
        if rec.held:
            raise LedgerError(f"record {record} is held already")
        rec.held = rec.alive = True
        self._account(rec, peak=not soon)
        self._put_last(record)
        if rec.encoded_bytes:
            self._discard_encoded(rec)
        self._went_or_came(rec)

    def let_go(self, record: int) -> None:
        """Delta gives up its reference, or the encoded form; the storage stays alive while somebody else uses it."""
        rec = self.records[record]
        if not rec.held and not rec.encoded_bytes:
            raise LedgerError(f"record {record} is not held")
        if rec.host is Host.LEAVING:
            raise LedgerError(f"record {record} is being copied out: its device copy must stay")
        if rec.pins:
            raise LedgerError(f"record {record} is in use")
        if rec.host is Host.NONE and not self.recoverable(record) and self.needed(record):
            raise LedgerError(f"letting go of record {record} would lose its value")
        if rec.encoded_bytes:
            self._discard_encoded(rec)
        rec.held = rec.being_encoded = False
        self._account(rec)
        self.held.pop(record, None)
        self._went_or_came(rec)

    def gone(self, record: int) -> None:
        """The storage was freed on the device, or overwritten by a newer version."""
        rec = self.records[record]
        if rec.held:
            raise LedgerError(f"record {record} is held and cannot be gone")
        rec.alive = False
        self._account(rec)
        self._went_or_came(rec)

    def use(self, record: int, now_ns: int) -> None:
        """Somebody asks for the record, or has just made it."""
        self.records[record].used_ns = now_ns
        self.touched.add(record)

    def pin(self, record: int, now_ns: int) -> None:
        """A use of the record begins: until it ends the record stays."""
        rec = self.records[record]
        rec.pins += 1
        rec.used_ns = now_ns
        self.touched.add(record)

    def unpin(self, record: int) -> None:
        """One use of the record has ended."""
        rec = self.records[record]
        rec.pins -= 1
        if rec.held and not rec.pins:
            self._put_last(record)
            self.touched.add(record)

    def _put_last(self, record: int) -> None:
        self._uses += 1
        self.held.pop(record, None)
        self.held[record] = self._uses

    # -- the encoded form -----------------------------------------------------------------------------------------
    def encode(self, record: int) -> None:
        """The encoded form is to be made: `encoded` tells when it is there, or `encode_failed`."""
        rec = self.records[record]
        if rec.encoding is None:
            raise LedgerError(f"record {record} has no encoded form")
        if not rec.held or rec.pins or rec.host is not Host.NONE:
            raise LedgerError(f"record {record} has to be held, not in use and without a host copy to be encoded")
        rec.being_encoded = True

    def encoded(self, record: int, nbytes: int) -> None:
        """The encoded form has been made, and takes no more than was said: Delta's reference is given up."""
        rec = self.records[record]
        if not rec.being_encoded or rec.encoding is None:
            raise LedgerError(f"record {record} is not being encoded")
        if not 0 < nbytes <= rec.encoding.nbytes:
            raise LedgerError(f"record {record} takes {nbytes} bytes encoded, {rec.encoding.nbytes} were expected")
        rec.encoded_bytes = nbytes
        self._account(rec)  # both are there for a moment
        rec.held = rec.being_encoded = False
        self._account(rec)
        del self.held[record]

    def stand_in(self, record: int) -> None:
        """The record has been let go of; a stand-in is made of it before its storage goes."""
        rec = self.records[record]
        if rec.encoding is None or not rec.encoding.stand_in:
            raise LedgerError(f"record {record} has no stand-in")
        if rec.available or not rec.alive or not rec.handles:
            raise LedgerError(f"record {record} has to be let go of, alive and saved to be stood in for")
        rec.encoded_bytes = rec.encoding.nbytes
        self._account(rec)

    def encode_failed(self, record: int) -> None:
        """The encoded form cannot be made: Delta has its reference still, or again, and will not try any more."""
        rec = self.records[record]
        if rec.stood_in_for:
            self.hold(record)
        elif not rec.being_encoded:
            raise LedgerError(f"record {record} is not being encoded")
        rec.encoding, rec.being_encoded = None, False

    def decode_failed(self, record: int, nbytes: int) -> None:
        """Decoding came to nothing: its destination is gone, pinned or not; the encoded form is as whole as before."""
        rec = self.records[record]
        if not rec.held:
            raise LedgerError(f"record {record} is not held")
        rec.held = rec.alive = False
        rec.encoded_bytes = nbytes
        self._account(rec, peak=False)
        del self.held[record]

    def _discard_encoded(self, rec: Record) -> None:
        rec.encoded_bytes = 0
        self._account(rec)

    # -- the host copy --------------------------------------------------------------------------------------------
    def set_host(self, record: int, state: Host) -> None:
        rec = self.records[record]
        if (rec.host, state) not in _HOST_GOES:
            raise LedgerError(f"record {record}: host copy cannot go from {rec.host.value} to {state.value}")
        if state is Host.LEAVING and not rec.held:
            raise LedgerError(f"record {record} is not held and cannot be copied out")
        if state is Host.NONE and not rec.held and not self.recoverable(record) and self.needed(record):
            raise LedgerError(f"giving up the host copy of record {record} would lose its value")
        if rec.host is Host.LEAVING:
            self.leaving_bytes -= rec.nbytes
        if state is Host.LEAVING:
            self.leaving_bytes += rec.nbytes
        rec.host = state
        (self.copied.discard if state is Host.NONE else self.copied.add)(record)
        self._went_or_came(rec)

    def back_failed(self, record: int) -> None:
        """A copy back came to nothing: its destination is gone, pinned or not; the host copy is as whole as before."""
        rec = self.records[record]
        if rec.host is not Host.COMING:
            raise LedgerError(f"record {record} is not on its way back")
        rec.host = Host.WHOLE
        rec.held = rec.alive = False
        self._account(rec)
        del self.held[record]
        self.touched.add(record)

    # -- questions ------------------------------------------------------------------------------------------------
    def recoverable(self, record: int, grasp: bool = False) -> bool:
        """Whether replaying ops, from what Delta can have without it, would bring the record back.

        With `grasp`, what is merely alive counts too: `anchors` names what has to be held to make that lasting.
        """
        return self._roots(record, grasp) is not None

    def anchors(self, record: int) -> list[int] | None:
        """Records that nobody holds for Delta yet and that the recipe of `record` cannot do without (rule 8); None
        where they have gone, or it has no recipe."""
        return self._roots(record, grasp=True)

    def _roots(self, record: int, grasp: bool) -> list[int] | None:
        """The merely alive records a replay of `record` would start from; None where it cannot start at all."""
        if not self.dead_ends:  # every chain ends at something Delta has
            return [] if self._replayable(self.records[record]) else None
        roots: set[int] = set()
        while True:
            dead_end, readers = self._dead_end(record, grasp, roots)
            if dead_end is None:
                return [root for root in readers if root in roots]
            while dead_end != record and not (grasp and self.records[dead_end].alive):
                dead_end = readers[dead_end]
            if dead_end == record:
                return None
            roots.add(dead_end)

    def _dead_end(self, record: int, grasp: bool, roots: set[int]) -> tuple[int | None, dict[int, int]]:
        """The first record that a replay of `record` would come to which cannot be made and is not there. With `grasp`
        what is alive there is, and becomes one of `roots`, at which the way ends. And by record that it comes to: the
        one that it is read for."""
        readers = {record: record}
        todo = [record]
        while todo:
            current = todo.pop()
            if current in roots:
                continue
            rec = self.records[current]
            op = self.maker(rec)
            if op is None or not op.replayable or (current != record and rec.is_root):
                if not grasp or current == record or not rec.alive:
                    return current, readers
                roots.add(current)
                continue
            for source in op.inputs:
                if source not in readers and not self.records[source].available:
                    readers[source] = current
                    todo.append(source)
        return None, readers

    def not_counted_bytes(self, records: Iterable[int]) -> int:
        """What is there of these, and counts as soon as it is held."""
        found = (self.records[record] for record in records)
        return sum(rec.nbytes for rec in found if rec.kind is not Kind.PARAMETER and not rec.counted)

    def made_bytes(self, op: int) -> int:
        """What running the op allocates: all its outputs, also those that are there already or that nobody needs."""
        return self._made_bytes[op]

    def replay_bytes(self, record: int) -> int:
        """The most bytes that an op reads and makes, where the record goes now and is made again. What only the program
        keeps alive will be made again, too."""
        most_bytes, seen, todo = 0, {record}, [record]
        while todo:
            record = todo.pop()
            op_id = self.records[record].op
            if op_id is not None:
                op = self.ops[op_id]
                most_bytes = max(most_bytes, self._op_bytes(op))
                missing = {source for source in op.inputs if not self.records[source].available} - seen
                seen |= missing
                todo += missing
        return most_bytes

    def _op_bytes(self, op: OpInfo) -> int:
        read = (self.records[source] for source in set(op.inputs))
        return self._made_bytes[op.id] + sum(rec.nbytes for rec in read if rec.kind is not Kind.PARAMETER)

    def maker(self, rec: Record) -> OpInfo | None:
        """The op that made it, if that is known."""
        return self.ops.get(rec.op) if rec.op is not None else None

    def parents(self, record: int) -> tuple[int, ...]:
        """The records its op reads."""
        op = self.maker(self.records[record])
        return op.inputs if op is not None else ()

    def siblings(self, record: int) -> tuple[int, ...]:
        """The records its op makes, itself among them."""
        op = self.maker(self.records[record])
        return op.outputs if op is not None else ()

    def children(self, record: int) -> list[int]:
        """The records whose ops read it."""
        outputs = (output for user in self.records[record].users for output in self.ops[user].outputs)
        return [output for output in outputs if output in self.records]

    def missing_ops(self, record: int) -> list[OpInfo]:
        """The ops to replay, in their first order, to have `record` again. Empty if its bytes are there already."""
        if not self.records[record].missing:
            return []
        chain: dict[int, OpInfo] = {}
        todo = [record]
        while todo:
            current = todo.pop()
            op = self.maker(self.records[current])
            if op is None or not op.replayable:
                raise LedgerError(f"record {current} is gone and cannot be replayed")
            if op.id in chain:
                continue
            chain[op.id] = op
            todo += [source for source in op.inputs if self.records[source].missing]
        return [chain[op_id] for op_id in sorted(chain)]

    def needed(self, record: int) -> bool:
        """Whether a saved tensor depends on this record's bytes: itself, or through a recipe that would read them."""
        return self.records[record].handles > 0 or self.supports_missing(record)

    def leads_to_saved(self, record: int) -> bool:
        """Whether this record is saved, or one that is could be made again by reading it."""
        seen, todo = {record}, [record]
        while todo:
            here = todo.pop()
            if self.records[here].handles:
                return True
            todo += (child for child in self.children(here) if child not in seen)
            seen.update(todo)
        return False

    def supports_missing(self, record: int) -> bool:
        """Whether a saved record that is not available can be made again only by reading this one."""
        records, unread = self.records, self._unread
        if record in unread:
            return False
        seen = {record}
        todo = [record]
        while todo:
            for op_id in records[todo.pop()].users:
                for output in self.ops[op_id].outputs:
                    reader = records.get(output)
                    if reader is None or output in seen or reader.available:
                        continue
                    if reader.handles:
                        return True
                    seen.add(output)
                    if output not in unread:
                        todo.append(output)
        unread |= seen
        return False

    def _may_be_read(self, rec: Record) -> None:
        """A record that is not available has a handle now, or one that has readers is available no longer: what it is
        made from may be read again.

        The invariant of `_unread`: each reader of a record in it is available, or has no handle and is in it too.
        """
        todo = [rec.id]
        while todo:
            for source in self.parents(todo.pop()):
                if source in self._unread:
                    self._unread.discard(source)
                    if not self.records[source].available:
                        todo.append(source)

    # -- ends -----------------------------------------------------------------------------------------------------
    def forget_dead(self, candidates: Iterable[int]) -> tuple[list[int], list[int]]:
        """Remove those of `candidates` nobody can ask for any more, and what depended only on them.

        Returns the ids forgotten, and those of records Delta still holds although nothing can ask for them. Of those
        that the program still has, host copies are given up (`left_on_host`): it may write, and save them once more.
        """
        forgotten: list[int] = []
        idle: dict[int, None] = {}
        todo = list(candidates)
        while todo:
            rec = self.records.get(todo.pop())
            if rec is None or rec.handles or rec.users or rec.pins or rec.host in (Host.LEAVING, Host.COMING):
                continue
            if rec.alive and not rec.held and rec.host is Host.WHOLE:
                self.set_host(rec.id, Host.NONE)
                self.left_on_host.append(rec.id)
            if rec.held or (rec.alive and rec.encoded_bytes):
                idle[rec.id] = None
            elif not rec.alive:
                if rec.encoded_bytes:
                    self._discard_encoded(rec)
                self._change(*self.parents(rec.id))
                del self.records[rec.id]
                for known in (self.copied, self.dead_ends, self.moved, self.touched, self._unread):
                    known.discard(rec.id)
                forgotten.append(rec.id)
                if rec.op is not None:
                    todo += self._output_left(rec.op)
        return forgotten, list(idle)

    def cut(self) -> tuple[list[int], list[int]]:
        """A step ended: recipes are of no more use, but for what is missing and left over. Drop them; returns what
        `forget_dead` does."""
        kept = self._recipes_of_missing()
        for known in (self.ops, self._outputs_left, self._made_bytes):
            for op_id in known.keys() - kept:
                del known[op_id]
        superseded = [old for old in self._successors if not self._saved(self.resolve(old))]
        for old in superseded:
            del self._successors[old]
        self.left_over = self.handles
        self.moved.clear()
        self.touched.clear()
        self._unread.clear()
        for rec in self.records.values():
            if rec.op not in kept:
                rec.op = None
            rec.users &= kept
            rec.saved_at = -1
            self._look_for_dead_end(rec)
        return self.forget_dead(list(self.records))

    def _saved(self, record: int) -> bool:
        return record in self.records and self.records[record].handles > 0

    def _recipes_of_missing(self) -> set[int]:
        """The ops without which a saved record could not be brought back."""
        kept: set[int] = set()
        todo = [rec.id for rec in self.records.values() if rec.handles]
        while todo:
            rec = self.records[todo.pop()]
            if rec.op is None or rec.op in kept or rec.available or rec.is_root:
                continue
            kept.add(rec.op)
            todo += self.ops[rec.op].inputs
        return kept

    def preserve(self, record: int) -> None:
        """The version a record stands for is about to live on in a clone of Delta's own, which counts."""
        rec = self.records[record]
        if rec.kind is Kind.PARAMETER:
            rec.kind = Kind.ACTIVATION
            self._count_unevicted(rec)
        rec.held = True
        self._account(rec)
        if rec.encoded_bytes:
            self._discard_encoded(rec)
        self._put_last(record)
        self._went_or_came(rec)

    def restart_peaks(self) -> None:
        """Begin the peaks anew from what is there now."""
        self.peak_resident_bytes = self.resident_bytes
        self.peak_unevicted_bytes = self.unevicted_bytes

    def validate(self) -> None:
        """Derive every total and link again and compare; `LedgerError` names the first difference."""
        records = self.records.values()
        totals = {
            "resident_bytes": self._counted_bytes + sum(r.resident_bytes for r in records),
            "unevicted_bytes": self._counted_unevicted_bytes
            + sum(r.nbytes for r in records if r.handles and r.kind is not Kind.PARAMETER),
            "leaving_bytes": sum(r.nbytes for r in records if r.host is Host.LEAVING),
            "handles": self._counted_handles + sum(r.handles for r in records),
            "left_over": sum(r.handles for r in records if r.saved_at < 0),
        }
        for name, value in totals.items():
            if getattr(self, name) != value:
                raise LedgerError(f"{name} is {getattr(self, name)}, the records say {value}")
        for rec in records:
            if rec.accounted_bytes != rec.resident_bytes:
                raise LedgerError(f"record {rec.id} counts {rec.accounted_bytes} bytes for {rec.resident_bytes}")
            if rec.held and not rec.alive:
                raise LedgerError(f"record {rec.id} is held but not alive")
            if rec.host is Host.LEAVING and not rec.held:
                raise LedgerError(f"record {rec.id} is being copied out without being held")
            if rec.being_encoded and not rec.held:
                raise LedgerError(f"record {rec.id} is being encoded without being held")
            if rec.encoded_bytes and (rec.held or rec.host is not Host.NONE):
                raise LedgerError(f"record {rec.id} is encoded, and Delta has its bytes in another place too")
            if rec.stood_in_for and not rec.handles:
                raise LedgerError(f"record {rec.id} is stood in for, and nobody can ask")
            if (rec.id in self.copied) is (rec.host is Host.NONE):
                raise LedgerError(f"record {rec.id}: has no host copy and is said to, or the other way round")
            if any(op not in self.ops or rec.id not in self.ops[op].inputs for op in rec.users):
                raise LedgerError(f"record {rec.id} lists a user that does not read it")
            if rec.op is not None and (rec.op not in self.ops or rec.id not in self.ops[rec.op].outputs):
                raise LedgerError(f"record {rec.id} names a producer that does not make it")
            if rec.handles < 0 or rec.pins < 0:
                raise LedgerError(f"record {rec.id} has {rec.handles} handles and {rec.pins} pins")
            if rec.handles and rec.missing and not self.recoverable(rec.id):
                raise LedgerError(f"record {rec.id} is saved, gone, and cannot be brought back")
        for op in self.ops.values():
            if any(source not in self.records or op.id not in self.records[source].users for source in op.inputs):
                raise LedgerError(f"op {op.id} reads a record that does not list it")
        dead_ends = {r.id for r in records if r.users and not r.available and (r.is_root or not self._replayable(r))}
        if self.dead_ends != dead_ends:
            raise LedgerError("the list of dead ends differs from what the records say")
        for record in self._unread:
            readers = (self.records[child] for child in self.children(record))
            if any(not r.available and (r.handles or r.id not in self._unread) for r in readers):
                raise LedgerError(f"record {record} is noted as one that no saved tensor depends on")
        if set(self.held) != {r.id for r in records if r.held}:
            raise LedgerError("the list of held records differs from what the records say")
        for op_id, left in self._outputs_left.items():
            if left != sum(output in self.records for output in self.ops[op_id].outputs):
                raise LedgerError(f"op {op_id} counts {left} outputs wrongly")

    def _replayable(self, rec: Record) -> bool:
        op = self.maker(rec)
        return op is not None and op.replayable

    def _went_or_came(self, rec: Record) -> None:
        record = rec.id
        self.moved.add(record)
        self.touched.add(record)
        if rec.users or self.dead_ends:
            self._look_for_dead_end(rec)
        if rec.op is not None and not rec.available and (rec.handles or record not in self._unread):
            self._may_be_read(rec)

    def _look_for_dead_end(self, rec: Record) -> None:
        if rec.available or not rec.users or (self._replayable(rec) and not rec.is_root):
            self.dead_ends.discard(rec.id)
        else:
            self.dead_ends.add(rec.id)

    # -- inside ---------------------------------------------------------------------------------------------------
    def _change(self, *records: int) -> None:
        """What these records cost, and what others cost by them, may have changed."""
        self.moved.update(records)
        self.touched.update(records)

    def _output_left(self, op_id: int) -> Iterator[int]:
        """One output of an op was forgotten; when it was the last, the op goes and its inputs may follow."""
        if op_id not in self._outputs_left:
            return
        self._outputs_left[op_id] -= 1
        if self._outputs_left[op_id]:
            return
        del self._outputs_left[op_id], self._made_bytes[op_id]
        for source in set(self.ops.pop(op_id).inputs):
            self.records[source].users.discard(op_id)
            self._look_for_dead_end(self.records[source])
            yield source

    def _count_unevicted(self, rec: Record) -> None:
        """A record has got its first handle, or has handles and counts from here on."""
        if rec.handles and rec.kind is not Kind.PARAMETER:
            self.unevicted_bytes += rec.nbytes
            self.peak_unevicted_bytes = max(self.peak_unevicted_bytes, self.unevicted_bytes)

    def note_peak(self, passing_bytes: int = 0) -> None:
        """What is resident now counts for the peak, and beside it what is handed out and not kept."""
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes + passing_bytes)

    def _account(self, rec: Record, peak: bool = True) -> None:
        """A record has changed, and what it adds to what is resident may have."""
        resident_bytes = rec.encoded_bytes
        if rec.alive and (rec.handles or rec.held) and rec.kind is not Kind.PARAMETER:  # `counted`, without a call
            resident_bytes += rec.nbytes
        added_bytes = resident_bytes - rec.accounted_bytes
        if added_bytes:
            rec.accounted_bytes += added_bytes
            self.resident_bytes += added_bytes
            if peak and added_bytes > 0 and self.resident_bytes > self.peak_resident_bytes:
                self.peak_resident_bytes = self.resident_bytes
