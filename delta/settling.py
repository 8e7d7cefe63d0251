"""Letting go of what nobody needs, and forgetting what that leaves without a reader."""

from __future__ import annotations

from collections.abc import Iterable

from delta.config import Policy
from delta.descent import Descent
from delta.learner import Learner
from delta.ledger import Ledger
from delta.record import Host, Record
from delta.room import Room
from delta.types import Forget, FreeHost, Instruction, Kind, Leftover, Release


class Settling:
    """Asked after every event that may have been a record's last use."""

    def __init__(self, policy: Policy, ledger: Ledger, room: Room, learner: Learner, descent: Descent) -> None:
        self._policy, self._ledger, self._learner, self._descent = policy, ledger, learner, descent
        self._candidates = room.candidates

    def settle(self, record: int) -> list[Instruction]:
        """Let go of a record nobody needs, and forget what that leaves without a reader."""
        rec = self._ledger.records.get(record)
        if rec is None or rec.handles or rec.pins:
            return []
        if rec.host in (Host.LEAVING, Host.COMING):
            return []
        lets_go = rec.held or rec.encoded_bytes > 0
        lets_go &= rec.stood_in_for or not self._ledger.supports_missing(record) or self._drops_source(rec)
        if lets_go:
            self._ledger.let_go(record)
            self._candidates.went_missing(rec)
        buried = self.bury([record]) if not lets_go or not rec.alive else []  # it may die of the release
        if lets_go and record in self._ledger:  # what was only an encoded form is forgotten at once
            return [Release(record), *buried]
        return buried

    def _drops_source(self, rec: Record) -> bool:
        """Whether a record without handles goes although the recipe of a missing one reads it."""
        plan = self._learner.plan
        drops = self._policy.replay.sources is Leftover.DROP or (plan is not None and plan.rehearsed)
        return drops and self._ledger.recoverable(rec.id)

    def settle_temporary(self, record: int) -> list[Instruction]:
        """After a replay: what has no handle and no further reader in the chain goes at once."""
        rec = self._ledger.records.get(record)
        if rec is None or rec.handles or rec.pins or not rec.held or rec.kind is not Kind.ACTIVATION:
            return []
        if self._descent.wants(record) or rec.host in (Host.LEAVING, Host.COMING):
            return []
        if not self._ledger.recoverable(record):
            return []
        self._ledger.let_go(record)
        self._candidates.went_missing(rec)
        return [Release(record)]

    def loose(self, record: int) -> None:
        """Nobody but Delta holds the storage of a saved record any more."""
        order = self._ledger.records[record].saved_at
        if order >= 0:
            self._learner.loose(order)

    def gone(self, record: int) -> list[Instruction]:
        """The storage died on the device."""
        if record not in self._ledger or not self._ledger.records[record].alive or self._ledger.records[record].held:
            return []
        self.loose(record)
        self._ledger.gone(record)
        self._candidates.went_missing(self._ledger.records[record])
        return self.bury([record])

    def bury(self, records: Iterable[int]) -> list[Instruction]:
        """Forget those of the records that are dead and that no recipe reads, and what only they were kept for."""
        forgotten, idle = self._ledger.forget_dead(records)
        return self.let_go_idle(forgotten, idle) if forgotten or idle or self._ledger.left_on_host else []

    def let_go_idle(self, forgotten: list[int], idle: list[int]) -> list[Instruction]:
        """What the ledger has forgotten, and what nobody needs since."""
        left, self._ledger.left_on_host = self._ledger.left_on_host, []
        out: list[Instruction] = [*map(FreeHost, left), *map(Forget, forgotten)]
        for record in forgotten:
            self._candidates.makers.pop(record, None)
        for record in idle:
            self._ledger.let_go(record)
            out.append(Release(record))
        return out
