"""Following a plan: what it puts after a save, after needs, and into the turns of a rehearsed step.

A plan is never trusted: what cannot be done now is left, and the filter sees to the limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from delta.candidates import Candidates
from delta.learner import Learner
from delta.ledger import Ledger
from delta.planner import Plan
from delta.record import Host, Record
from delta.types import Action, AwaitOut, Instruction

CarryOut = Callable[[Record, Action, int, bool], list[Instruction]]
"""Evicts a record by an action at a time in ns; whether its room is needed at once."""


class Following:
    """Does what the plan of the step under way says, as far as it can be done."""

    def __init__(self, ledger: Ledger, learner: Learner, candidates: Candidates, carry_out: CarryOut) -> None:
        self._ledger, self._learner, self._candidates, self._carry_out = ledger, learner, candidates, carry_out
        self._turn = -1
        self._victims: deque[int] = deque()  # what is still to go in that turn

    def new_step(self) -> None:
        self._turn = -1

    def saved(self, rec: Record, plan: Plan, now_ns: int) -> list[Instruction]:
        """A record was saved for the first time."""
        return self._do(rec, plan.actions[rec.saved_at] if rec.saved_at < len(plan.actions) else Action.KEEP, now_ns)

    def needed(self, here: range, now_ns: int) -> list[Instruction]:
        """The needs at the positions `here` have been served."""
        plan = self._learner.plan
        if plan is None or not plan.evictions:
            return []
        out: list[Instruction] = []
        for position in here:
            for order, action in plan.evictions.get(position, ()):
                if (rec := self._record(order)) is not None:
                    out += self._do(rec, action, now_ns)
        return out

    def in_turn(self, over_bytes: int, now_ns: int) -> tuple[list[Instruction], int]:
        """The victims of a rehearsed turn, until that much less is resident; returns what is over still."""
        out: list[Instruction] = []
        plan, turn = self._learner.plan, self._learner.turn
        moves = plan.moves.get(turn) if plan is not None else None
        if moves is None:
            return out, over_bytes
        if self._turn != turn:
            self._turn, self._victims = turn, deque(moves.victims)
        while over_bytes > 0 and self._victims:
            rec = self._record(self._victims.popleft())
            if rec is not None and rec.host is Host.LEAVING:
                out.append(AwaitOut(rec.id))
                over_bytes -= rec.nbytes
            elif rec is not None and (gone := self._let_go(rec, now_ns)):
                out += gone
                over_bytes -= rec.nbytes
        return out, over_bytes

    def after_turn(self, now_ns: int) -> list[Instruction]:
        """What a rehearsal puts after the turn that has just ended."""
        plan = self._learner.plan
        moves = plan.moves.get(self._learner.turn - 1) if plan is not None else None
        out: list[Instruction] = []
        if moves is None:
            return out
        for order in moves.leaving:
            rec = self._record(order)
            if rec is not None and rec.host is Host.NONE:
                out += self._do(rec, Action.SWAP, now_ns)
        for order in moves.dropped:
            if (rec := self._record(order)) is not None:
                out += self._let_go(rec, now_ns)
        return out

    def _do(self, rec: Record, action: Action, now_ns: int) -> list[Instruction]:
        if action is Action.KEEP or not self._candidates.may_go(rec) or not self._candidates.allows(action):
            return []
        if action is Action.SWAP:
            return self._carry_out(rec, action, now_ns, False) if not self._candidates.host_full else []
        if self._candidates.drops(rec, action) and not self._ledger.recoverable(rec.id, grasp=True):
            return []
        if action is Action.ENCODE and (rec.encoding is None or rec.host is not Host.NONE):
            return []
        return self._carry_out(rec, action, now_ns, False)

    def _let_go(self, rec: Record, now_ns: int) -> list[Instruction]:
        """Drop a record for its host copy, if that is whole, or for its recipe; nothing where neither can be."""
        whole = rec.host is Host.WHOLE
        return self._do(rec, Action.SWAP if whole else Action.RECOMPUTE, now_ns)

    def _record(self, order: int) -> Record | None:
        """The record of a save order of this step, in the version there is now."""
        saves = self._learner.log.saves
        return self._ledger.records.get(self._ledger.resolve(saves[order])) if order < len(saves) else None
