"""Saved storages that others than Delta use still: letting go of one would free nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from delta.runtime.rawmem import sole_owner
from delta.runtime.slots import Slot

_FEW = 8


class Attached:
    """Those of the step under way. That a storage has died is noticed by itself; that only Delta has it is not."""

    def __init__(self, slots: Mapping[int, Slot], loose: Callable[[int], None]) -> None:
        """`loose` is told of a record whose storage only Delta has."""
        self._slots, self._loose = slots, loose
        self.records: list[int] = []  # the program, or backward, had them when last looked at

    def add(self, record: int) -> None:
        """Others than Delta may use the storage of a saved record."""
        self.records.append(record)

    def look(self, few: bool = False) -> None:
        """Find those that the program itself, or backward, has let go of since this was last looked at.

        ``few``: of many look at the oldest and the newest only, the others in turn. That is enough in forward of a step
        that is not learned from: most are let go of soon, and what is found a little late is not missed.
        """
        attached, looked_at = [], self.records
        if few and len(looked_at) > 2 * _FEW:
            attached = looked_at[_FEW:-_FEW]
            looked_at = looked_at[:_FEW] + looked_at[-_FEW:]
        for record in looked_at:
            slot = self._slots.get(record)
            if slot is None:
                continue
            if slot.storage is None:
                if slot.alive() is not None:
                    attached.append(record)
            elif sole_owner(slot.storage):
                self._loose(record)
            else:
                attached.append(record)
        self.records = attached

    def given_out(self, record: int) -> None:
        """Backward has been given the storage."""
        if record not in self.records:
            self.records.append(record)

    def step_ended(self) -> None:
        """None of them is of any interest."""
        self.records.clear()
