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

from collections.abc import Iterable
from dataclasses import replace

from delta.lineage import Lineage
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


class Ledger(Lineage):
    """All records, with running totals that `validate` re-derives."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}  # the records Delta holds, in the order of their last uses, and its numbers
        self.copied: set[int] = set()  # records with a host copy, whole or under way
        self.left_on_host: list[int] = []  # records whose host copies have been given up, until somebody frees them
        self.moved: set[int] = set()  # what others cost may have changed by these since somebody last cleared this
        self.touched: set[int] = set()  # these may go or stay now, or have been used, since somebody last cleared this
        self.replay_ns = 0  # what each op that is replayed takes beside its own time
        self.resident_bytes = 0
        self.unevicted_bytes = 0
        self.leaving_bytes = 0
        self.handles = 0
        self.left_over = 0  # of them, those on records that were saved in earlier steps only
        self.peak_resident_bytes = 0
        self.peak_unevicted_bytes = 0
        self.counted_bytes = self._counted_handles = 0  # of storages that have no record: see `keeping.py`
        self._counted_unevicted_bytes = 0
        self._successors: dict[int, int] = {}
        self._uses = 0

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
        self._link(op)
        for output in op.outputs:
            self._went_or_came(self.records[output])

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
        self.counted_bytes += resident_bytes
        self._counted_unevicted_bytes += unevicted_bytes
        self.resident_bytes += resident_bytes
        self.unevicted_bytes += unevicted_bytes
        if self.resident_bytes > self.peak_resident_bytes:
            self.peak_resident_bytes = self.resident_bytes
        if self.unevicted_bytes > self.peak_unevicted_bytes:
            self.peak_unevicted_bytes = self.unevicted_bytes
        if self._counted_handles < 0 or self.counted_bytes < 0 or self._counted_unevicted_bytes < 0:
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
    def not_counted_bytes(self, records: Iterable[int]) -> int:
        """What is there of these, and counts as soon as it is held."""
        found = (self.records[record] for record in records)
        return sum(rec.nbytes for rec in found if rec.kind is not Kind.PARAMETER and not rec.counted)

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
        self._drop_recipes()
        superseded = [old for old in self._successors if not self._saved(self.resolve(old))]
        for old in superseded:
            del self._successors[old]
        self.left_over = self.handles
        self.moved.clear()
        self.touched.clear()
        for rec in self.records.values():
            rec.saved_at = -1
        return self.forget_dead(list(self.records))

    def _saved(self, record: int) -> bool:
        return record in self.records and self.records[record].handles > 0

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
            "resident_bytes": self.counted_bytes + sum(r.resident_bytes for r in records),
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
            if rec.handles < 0 or rec.pins < 0:
                raise LedgerError(f"record {rec.id} has {rec.handles} handles and {rec.pins} pins")
        if set(self.held) != {r.id for r in records if r.held}:
            raise LedgerError("the list of held records differs from what the records say")
        super().validate()

    def _went_or_came(self, rec: Record) -> None:
        record = rec.id
        self.moved.add(record)
        self.touched.add(record)
        if rec.users or self.dead_ends:
            self._look_for_dead_end(rec)
        if rec.op is not None and not rec.available and (rec.handles or record not in self._unread):
            self._may_be_read(rec)

    # -- inside ---------------------------------------------------------------------------------------------------
    def _change(self, *records: int) -> None:
        """What these records cost, and what others cost by them, may have changed."""
        self.moved.update(records)
        self.touched.update(records)

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
