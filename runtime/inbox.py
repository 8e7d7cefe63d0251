"""What happened at times when the engine could not be told: a storage or a saved tensor died, which may be anywhere.

Whoever dies leaves a note, without raising or waiting. The notes are taken in when somebody enters the core, or at once
where they are of use soon, there are many, or the step may have ended by them.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from delta.keeping import Kept
from delta.runtime.note import Made, Readers
from delta.types import Instruction

if TYPE_CHECKING:
    from delta.runtime.core import Core

_MANY = 16  # of small storages that are needed no more, until they are let go of


class Inbox:
    """One session's notes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.notes: deque[tuple[Callable[..., None], *tuple[Any, ...]]] = deque()  # what to do about each, with what
        self.emptying = False

    # -- from anywhere --------------------------------------------------------------------------------------------
    def storage_died(self, record: int) -> None:
        """The storage of a record has gone."""
        self.notes.append((self._gone, record))

    def made_died(self, made: weakref.ref[Made]) -> None:
        """The storage has gone that a noted call had made the first time."""
        self.notes.append((self._core.noted.went, made))

    def handle_died(self, record: int, soon: bool = True) -> None:
        """A handle has died. Unless it is of use `soon` the engine hears of it with what comes next, or when the step
        may have ended by it."""
        self.notes.append((self._unsaved, record))
        if soon or self._many():
            self._take_in()

    def handles_died(self, records: Iterable[int]) -> None:
        """These have, and nobody waits for it."""
        self.notes.extend([(self._unsaved, record) for record in records])

    def kept_died(self, kept: Kept, soon: bool = False) -> None:
        """A saved tensor has died that was kept. Without a record, its bytes go by themselves."""
        self.notes.append((self._unsaved_kept, kept))
        if soon or self._many():
            self._take_in()

    def noted_died(self, kept: Kept, made: weakref.ref[Made]) -> None:
        """A saved tensor has died on something that a noted call makes."""
        self.notes.append((self._unsaved_noted, kept, made))
        if self._many():
            self._take_in()

    def note_died(self, readers: Readers, keys: Sequence[int], records: Sequence[int]) -> None:
        """A note has died: see there."""
        self.notes.append((self._core.noted.note_died, readers, keys))
        self.handles_died(records)
        if self._many():
            self._take_in()

    def watched_step_ended(self, peak_bytes: int, began_ns: int) -> None:
        """A step that was only watched has ended with the death of its last saved tensor."""
        self.notes.append((self._core.watched_step, peak_bytes, began_ns))
        self._take_in()

    def _many(self) -> bool:
        core = self._core
        return len(self.notes) >= min(_MANY, core.engine.ledger.own_handles) or core.closing

    def _take_in(self) -> None:
        """Unless another thread is at work in the core, which will, or this one."""
        core = self._core
        if core.abandoned:
            return
        if not core.lock._is_owned() and core.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                core.hear()
            finally:
                core.lock.release()

    # -- inside of the core -----------------------------------------------------------------------------------------
    def empty(self) -> None:
        """Tell the engine of all, and carry out what it says."""
        self.emptying = True
        try:
            while self.notes:
                take_in, *what = self.notes.popleft()
                take_in(*what)
        finally:
            self.emptying = False

    def _gone(self, record: int) -> None:
        if gone := self._core.engine.storage_gone(record):
            self._core.run(gone)

    def _unsaved(self, record: int) -> None:
        self._before_unsaved()
        self._after_unsaved(self._core.engine.unsaved(record, time.perf_counter_ns()))

    def _unsaved_kept(self, kept: Kept) -> None:
        """A note may read its storage still."""
        self._before_unsaved()
        self._after_unsaved(self._released(kept, read=self._core.noted.keeps(kept.key)))

    def _unsaved_noted(self, kept: Kept, made: weakref.ref[Made]) -> None:
        self._before_unsaved()
        out = self._released(kept, read=False)
        self._core.noted.released(kept, made)
        self._after_unsaved(out)

    def _before_unsaved(self) -> None:
        core = self._core
        if core.op_times.missing:
            core.op_times.tell(wait=core.engine.ledger.own_handles == 1)  # the step is about to be learned from

    def _after_unsaved(self, out: list[Instruction]) -> None:
        core = self._core
        if out:
            core.run(out)
        if core.engine.finished_steps:
            core.step_ended()

    def _released(self, kept: Kept, read: bool) -> list[Instruction]:
        """A saved tensor on a kept storage has died. `read`: a note reads that still."""
        core, there = self._core, kept.there
        out = core.engine.unsaved_kept(kept, time.perf_counter_ns(), read)
        if core.timeline.active and there and not kept.there:
            core.emit("freed", record=kept.record, nbytes=kept.nbytes)
        return out
