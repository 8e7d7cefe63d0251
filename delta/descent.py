"""Which ops to replay to bring one record back, one after the other.

Depth first from the record: what an op reads is pinned when the op is reached, missing inputs are made again first, the
earliest op first, and only then the op itself runs (DTR's materialisation: Kirisame et al., ICLR 2021, section 3). Only
the ops on the way down pin anything, so whatever else the chain makes may go again while room is short, and is made
once more if it is asked for after that.

Where next to nothing may be resident that need not end: in a recurrence whose state is read twice at each place, what
is made goes before its second reader comes, and each place doubles the replays. A walk that has replayed `PATIENCE`
times what was missing when it began pins from then on whatever it is going to read, over the limit if it must. So do
the walks after it until the step ends.

An explicit stack, no recursion (rule 7).
"""

from __future__ import annotations

from delta.ledger import Ledger
from delta.record import LedgerError
from delta.types import OpInfo

# Of the walks in DTR's logs that end within their limit, none replays more than 2.2 times what was missing.
PATIENCE = 4


class Descent:
    """The walk to one missing record at a time: `begin`, then for each op that `next` gives, replay it and call `ran`;
    `abandon` at the end, finished or not."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._stack: list[OpInfo] = []
        self._entered: set[int] = set()  # the ops on it
        self._pending: set[int] = set()
        self._readers: dict[int, int] = {}  # pending ops that read each record
        self._record = -1
        self._patience = 0  # replays until it runs out
        self._holds = False  # it has: whatever this walk is going to read is pinned
        self._hasty = False  # a walk of this step has run out of it

    def begin(self, record: int, now_ns: int) -> None:
        """Start on the way to a record. LedgerError where it is gone and cannot be replayed."""
        missing = self._ledger.missing_ops(record)
        self._record, self._patience, self._holds = record, PATIENCE * len(missing), self._hasty
        for op in missing:
            self._expect(op)
        if self._pending:
            self._enter(self._maker(record), now_ns)

    def next(self, now_ns: int) -> OpInfo | None:
        """The op to replay now: all that it reads is there. None: the record is back."""
        while self._stack:
            missing = [r for r in self._stack[-1].inputs if self._ledger.records[r].missing]
            if not missing:
                return self._stack[-1]
            self._enter(self._maker(missing[0]), now_ns)
        return None

    def ran(self) -> None:
        """The op that `next` gave has run; its inputs are not pinned for it any more. `go_on` comes next, once it is
        known what has gone by that."""
        op = self._stack.pop()
        self._entered.discard(op.id)
        self._pending.discard(op.id)
        self._unpin(op)
        for source in op.inputs:
            self._readers[source] -= 1
            if self._holds and not self._readers[source]:
                self._ledger.unpin(source)

    def go_on(self) -> None:
        """The walk goes on: where its patience has run out, with all pinned that it is going to read."""
        self._patience -= 1
        if self._patience == 0 and self._stack and not self._holds:
            self._holds = self._hasty = True
            self._start_over()

    def _start_over(self) -> None:
        """Expect all that is missing now: what was made and went again has readers that do not know yet."""
        self._pending.clear()
        self._readers.clear()
        for op in (*self._stack, *self._ledger.missing_ops(self._record)):
            self._expect(op)

    def wants(self, record: int) -> bool:
        """Whether an op of this walk is going to read the record."""
        return self._readers.get(record, 0) > 0

    def new_step(self) -> None:
        """What was found out about the walks of a step is forgotten; one under way goes on as it is."""
        self._hasty = False

    def abandon(self) -> list[int]:
        """The walk is over. Returns the records that were still wanted: nothing is pinned or wanted any more."""
        while self._stack:
            self._unpin(self._stack.pop())
        self._entered.clear()
        wanted = [record for record in self._readers if self.wants(record)]
        if self._holds:
            for record in wanted:
                self._ledger.unpin(record)
        self._readers.clear()
        self._pending.clear()
        return wanted

    def _maker(self, record: int) -> OpInfo:
        op = self._ledger.maker(self._ledger.records[record])
        if op is None or not op.replayable:
            raise LedgerError(f"record {record} is gone and cannot be replayed")
        return op

    def _expect(self, op: OpInfo) -> None:
        if op.id not in self._pending:
            self._pending.add(op.id)
            for source in op.inputs:
                if self._holds and not self.wants(source):
                    self._ledger.pin(source, self._ledger.records[source].used_ns)  # to be wanted is no use
                self._readers[source] = self._readers.get(source, 0) + 1

    def _enter(self, op: OpInfo, now_ns: int) -> None:
        if op.id in self._entered:
            raise LedgerError(f"op {op.id} ({op.name}) needs its own result")
        self._expect(op)
        self._stack.append(op)
        self._entered.add(op.id)
        for source in op.inputs:
            self._ledger.pin(source, now_ns)

    def _unpin(self, op: OpInfo) -> None:
        for source in op.inputs:
            self._ledger.unpin(source)
