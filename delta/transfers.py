"""What became of copies to the host and back."""

from __future__ import annotations

from delta.learner import Learner
from delta.ledger import Ledger
from delta.recall import Recall
from delta.record import Host
from delta.room import Room
from delta.settling import Settling
from delta.totals import Totals
from delta.types import Action, Drop, Instruction


class Transfers:
    """The events of copies that `SwapOut` and `SwapIn` have begun."""

    def __init__(
        self, ledger: Ledger, room: Room, recall: Recall, learner: Learner, settling: Settling, totals: Totals
    ) -> None:
        self._ledger, self._room, self._recall, self._learner = ledger, room, recall, learner
        self._settling, self._totals = settling, totals

    def copied_out(self, record: int) -> list[Instruction]:
        """The host copy is whole: the device copy may go, unless the plan has it come back by now."""
        rec = self._ledger.records[record]
        self._ledger.set_host(record, Host.WHOLE)
        self._totals.swapped_out_bytes += rec.nbytes
        if rec.pins or rec.saved_at in self._room.wanted or (not rec.handles and not rec.users):
            return self._settling.settle(record)
        self._ledger.let_go(record)
        self._recall.went(rec)
        return [Drop(record, Action.SWAP)]

    def copy_out_failed(self, record: int, host_full: bool) -> list[Instruction]:
        """The copy out did not happen: the device copy is still the value."""
        self._ledger.set_host(record, Host.NONE)
        if host_full:
            self._room.candidates.host_full = True
        else:
            self._totals.warn("copy", "a copy to the host failed; the tensor was kept on the device")
        return self._settling.settle(record)

    def host_room(self) -> None:
        """Host memory was given back: swapping may be tried again."""
        self._room.candidates.host_full = False

    def coming(self) -> None:
        """A copy back has begun: its destination takes memory from here on."""
        self._ledger.note_peak()

    def copied_in(self, record: int) -> list[Instruction]:
        """The device copy is whole again."""
        rec = self._ledger.records[record]
        self._ledger.set_host(record, Host.WHOLE)
        self._totals.swapped_in_bytes += rec.nbytes
        if goes := self._room.came_back(rec):
            self._recall.went(rec)
            return goes
        return self._settling.settle(record) if not rec.handles else []

    def late(self, order: int) -> None:
        """A value, by the order of its first save, was needed while its copy back was still under way."""
        if order >= 0:
            self._learner.waited_for(order)

    def copy_in_failed(self, record: int) -> None:
        """The copy back did not happen; the host copy is still whole."""
        self._ledger.back_failed(record)
        self._room.turned_back.discard(record)

    def swap_in_again(self, record: int, now_ns: int) -> None:
        """A copy back that failed is asked for once more."""
        self._recall.swap_in(self._ledger.records[record], now_ns)
