"""The events of a replay: room before each op of the walk, and what nobody needs goes after it."""

from __future__ import annotations

from collections.abc import Iterable

from delta.config import Policy
from delta.descent import Descent
from delta.ledger import Ledger
from delta.recall import Recall
from delta.record import Host
from delta.room import Room
from delta.settling import Settling
from delta.totals import Totals
from delta.types import Instruction, Kind, Leftover, OpInfo, SwapIn


class Replays:
    """One walk at a time: `descend`, `before` and `replayed` around each op, `end_descent`."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        room: Room,
        recall: Recall,
        descent: Descent,
        settling: Settling,
        totals: Totals,
    ) -> None:
        self._policy, self._ledger, self._room, self._recall = policy, ledger, room, recall
        self._descent, self._settling, self._totals = descent, settling, totals

    def descend(self, handle: int, now_ns: int) -> Descent:
        """The replays that bring back a record that `Engine.need` could not: see `Descent`."""
        self._descent.begin(self._ledger.resolve(handle), now_ns)
        return self._descent

    def before(self, op: OpInfo, now_ns: int) -> list[Instruction]:
        """Make room for what the op makes and what it reads, and bring that in."""
        out: list[Instruction] = []
        for source in dict.fromkeys(op.inputs):
            out += self._recall.bring(self._ledger.records[source], now_ns)
        out += self._room.make(self._ledger.made_bytes(op.id), now_ns)
        return sorted(out, key=lambda each: isinstance(each, SwapIn))  # all of them count already

    def made_again(self, op: OpInfo) -> list[int]:
        """The outputs of a replay that are to be taken; the others exist already."""
        ledger = self._ledger
        return [r for r in op.outputs if r in ledger and ledger[r].missing]

    def replayed(self, op: OpInfo, made: Iterable[int], stolen: Iterable[int] = ()) -> list[Instruction]:
        """The descent's op was replayed and the runtime holds the storages of `made`. It has overwritten those of the
        `stealable` inputs that were `stolen`: only their recipes are left. What nobody needs any more goes."""
        for record in made:
            rec = self._ledger.records[record]
            self._ledger.hold(record)
            self._room.candidates.back(rec)
            self._totals.recomputed_bytes += rec.nbytes
        self._descent.ran()
        out: list[Instruction] = []
        for record in stolen:  # before the walk goes on, which may want what has gone
            out += self._stolen(record)
        self._descent.go_on()
        if self._policy.replay.results is Leftover.DROP:
            for record in dict.fromkeys((*made, *op.inputs)):
                out += self._settling.settle_temporary(record)
        return out

    def end_descent(self) -> list[Instruction]:
        """The walk is over, finished or not: nothing is pinned or kept for it any more."""
        out: list[Instruction] = []
        for record in self._descent.abandon():
            out += self._settling.settle_temporary(record)
        return out

    def stealable(self, op: OpInfo) -> frozenset[int]:
        """Inputs that a replay of `op` may overwrite without a copy: nobody will read them again."""
        return frozenset(
            record
            for record in op.overwrites
            if (rec := self._ledger.records[record]).pins == op.inputs.count(record)
            and not rec.handles
            and rec.kind is Kind.ACTIVATION
            and rec.host is Host.NONE
            and self._ledger.recoverable(record)
        )

    def _stolen(self, record: int) -> list[Instruction]:
        rec = self._ledger.records.get(record)
        if rec is not None and rec.held:
            self._ledger.let_go(record)
            self._room.candidates.went_missing(rec)
        return self._settling.gone(record)
