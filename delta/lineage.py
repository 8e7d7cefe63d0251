"""What is made from what: which ops a replay of a record takes, and whether it can start.

The records and live ops of the ledger, linked to each other. A record *can be made again* if its op may be replayed and
all that this reads is available, or can be made again itself; where a chain comes to one that is not there and that no
op makes, it has a *dead end*.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from delta.record import LedgerError, Record
from delta.types import Kind, OpInfo


class Lineage:
    """Records and the ops between them. Whoever changes what is available says so: see `_look_for_dead_end` and
    `_may_be_read`."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.ops: dict[int, OpInfo] = {}
        self.dead_ends: set[int] = set()  # records that an op reads, Delta does not have and no replay makes
        self._op_sizes: list[int] = []  # what ops read, parameters aside, and make: each number of bytes once, in order
        self._outputs_left: dict[int, int] = {}
        self._made_bytes: dict[int, int] = {}
        self._unread: set[int] = set()  # no saved tensor depends on these through a recipe: see `_may_be_read`

    def __getitem__(self, record: int) -> Record:
        return self.records[record]

    def __contains__(self, record: int) -> bool:
        return record in self.records

    # -- can it be made again -------------------------------------------------------------------------------------
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

    def has_ops_between(self, least_bytes: float, most_bytes: float) -> bool:
        """Whether some op reads and makes more than `least_bytes`, and no more than `most_bytes`."""
        return bisect_right(self._op_sizes, least_bytes) < bisect_right(self._op_sizes, most_bytes)

    def _op_bytes(self, op: OpInfo) -> int:
        read = (self.records[source] for source in set(op.inputs))
        return self._made_bytes[op.id] + sum(rec.nbytes for rec in read if rec.kind is not Kind.PARAMETER)

    def _replayable(self, rec: Record) -> bool:
        op = self.maker(rec)
        return op is not None and op.replayable

    # -- relatives ------------------------------------------------------------------------------------------------
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

    # -- who is needed --------------------------------------------------------------------------------------------
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

    # -- links ----------------------------------------------------------------------------------------------------
    def _link(self, op: OpInfo) -> None:
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
        self._outputs_left[op.id] = len(op.outputs)
        self._made_bytes[op.id] = sum(self.records[output].nbytes for output in op.outputs)
        nbytes = self._op_bytes(op)
        at = bisect_left(self._op_sizes, nbytes)
        if self._op_sizes[at : at + 1] != [nbytes]:
            self._op_sizes.insert(at, nbytes)

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

    def _drop_recipes(self) -> None:
        """All but those without which a saved record could not be brought back."""
        kept = self._recipes_of_missing()
        for known in (self.ops, self._outputs_left, self._made_bytes):
            for op_id in known.keys() - kept:
                del known[op_id]
        self._op_sizes = sorted({self._op_bytes(op) for op in self.ops.values()})
        self._unread.clear()
        for rec in self.records.values():
            if rec.op not in kept:
                rec.op = None
            rec.users &= kept
            self._look_for_dead_end(rec)

    def _look_for_dead_end(self, rec: Record) -> None:
        if rec.available or not rec.users or (self._replayable(rec) and not rec.is_root):
            self.dead_ends.discard(rec.id)
        else:
            self.dead_ends.add(rec.id)

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

    def validate(self) -> None:
        """Derive every link again and compare; `LedgerError` names the first difference."""
        records = self.records.values()
        for rec in records:
            if any(op not in self.ops or rec.id not in self.ops[op].inputs for op in rec.users):
                raise LedgerError(f"record {rec.id} lists a user that does not read it")
            if rec.op is not None and (rec.op not in self.ops or rec.id not in self.ops[rec.op].outputs):
                raise LedgerError(f"record {rec.id} names a producer that does not make it")
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
        for op_id, left in self._outputs_left.items():
            if left != sum(output in self.records for output in self.ops[op_id].outputs):
                raise LedgerError(f"op {op_id} counts {left} outputs wrongly")
