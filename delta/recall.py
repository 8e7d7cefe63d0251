"""Bringing back: what has to be resident now, and what should be on its way already."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

from delta.config import Policy
from delta.costs import LinkQueue
from delta.learner import Learner
from delta.ledger import Ledger
from delta.record import Host, Record
from delta.room import Room
from delta.types import Action, Decode, Hold, Instruction, Kind, SwapIn


class Recall:
    """Holds and copies back; replays are the runtime's walk along `Ledger.missing_ops`."""

    def __init__(self, policy: Policy, ledger: Ledger, queue: LinkQueue, learner: Learner, room: Room) -> None:
        self._policy, self._ledger, self._queue, self._learner, self._room = policy, ledger, queue, learner, room
        self.by_order: list[int] = []  # records of this step in the order of their first save
        self._late: list[int] = []  # save orders whose prefetch had no room yet
        self._due: set[int] = set()  # ... that the plan has on their way back by now, or there

    def new_step(self) -> None:
        """Forget what is only true within one step."""
        self.by_order.clear()
        self._late.clear()
        self._due.clear()

    @property
    def waiting(self) -> bool:
        """Whether copies back are still to begin."""
        return bool(self._late)

    def bring(self, rec: Record, now_ns: int) -> list[Instruction]:
        """Make the record's bytes available without a replay, if that is possible."""
        if rec.held or rec.kind is Kind.PARAMETER:
            return []
        if rec.alive:  # let go of, but somebody else kept it: no need to make it again
            self._ledger.hold(rec.id)
            self._room.candidates.back(rec)
            return [Hold(rec.id)]
        if rec.encoded_bytes and not rec.stood_in_for:
            out = self._room.make(rec.nbytes, now_ns)
            self._ledger.hold(rec.id)
            rec.used_ns = now_ns
            return [*out, Decode(rec.id)]
        if rec.host is Host.WHOLE:
            out = self._room.make(rec.nbytes, now_ns)
            return [*out, self.swap_in(rec, now_ns)]
        return []

    def swap_in(self, rec: Record, now_ns: int) -> SwapIn:
        self._ledger.set_host(rec.id, Host.COMING)
        self._ledger.hold(rec.id, soon=True)
        self._queue.begin_in(rec.nbytes, now_ns)
        self._ledger.use(rec.id, now_ns)
        return SwapIn(rec.id)

    def went(self, rec: Record) -> None:
        """Its copy out has ended, and it went. Where it is to be back by now, that is a matter of room."""
        if rec.saved_at in self._due:
            self._late.append(rec.saved_at)

    def prefetch(self, here: range, now_ns: int) -> list[Instruction]:
        """Start the copies back that the plan puts at the positions `here` (or, without one, that the order of the
        saves suggests), as room allows."""
        if self._policy.prefetch.window == 0 or Action.SWAP not in self._policy.director.actions:
            return []
        plan = self._learner.plan
        if plan is None:
            self._late = []
            return self._begin(self._next_swapped(), now_ns)[0]
        for position in here:
            coming = plan.prefetch.get(position, ())
            self._late += coming
            self._due.update(coming)
            self._room.wanted.update(coming)
        out, self._late = self._begin(self._late, now_ns)
        return out

    def after_turn(self, going_bytes: int, now_ns: int) -> list[Instruction]:
        """Start the copies back that a rehearsal puts after the turn that has just ended. `going_bytes` are about to
        be let go of."""
        if self._policy.prefetch.window == 0:
            return []
        plan = self._learner.plan
        moves = plan.moves.get(self._learner.turn - 1) if plan is not None else None
        coming = moves.coming if moves is not None else ()
        out, self._late = self._begin([*self._late, *coming], now_ns, going_bytes, unsaved=True)
        return out

    def _begin(
        self, orders: Iterable[int], now_ns: int, going_bytes: int = 0, unsaved: bool = False
    ) -> tuple[list[Instruction], list[int]]:
        """Begin the copies back of these save orders, as far as there is room: what to do, and those for which there is
        none yet. `unsaved`: be it for replays alone that something is still there."""
        out: list[Instruction] = []
        waiting: list[int] = []
        for order in orders:
            rec = self._ledger.records.get(self.by_order[order]) if order < len(self.by_order) else None
            if rec is None or rec.held or rec.host is not Host.WHOLE or not (rec.handles or unsaved):
                continue
            if rec.alive:  # it has not gone yet, or somebody else still has it: nothing to copy
                out += self.bring(rec, now_ns)
            elif self._fits(order, rec.nbytes, going_bytes):
                out.append(self.swap_in(rec, now_ns))
            else:
                waiting.append(order)
        return out, waiting

    def _fits(self, order: int, nbytes: int, going_bytes: int = 0) -> bool:
        """Whether a copy back may begin: it takes no room that an op needs before it is used. `going_bytes` of what is
        resident are about to be let go of."""
        window = self._policy.prefetch.window
        if window != "auto":
            copied = (self._ledger.records[record] for record in self._ledger.copied)
            if nbytes + sum(rec.nbytes for rec in copied if rec.host is Host.COMING) > window:
                return False
        limit = self._room.limit_until(order)
        return limit is None or self._ledger.resident_bytes - going_bytes + nbytes <= limit

    def _next_swapped(self) -> list[int]:
        """Without a plan: the last saved is most likely needed next, so look at the two newest that are swapped."""
        copied = (self._ledger.records[record] for record in self._ledger.copied)
        swapped = (rec.saved_at for rec in copied if rec.host is Host.WHOLE and not rec.held and rec.saved_at >= 0)
        return nlargest(2, swapped)
