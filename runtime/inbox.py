"""What happened at times when the engine could not be told: a storage or a saved tensor died, which may be anywhere.

Whoever dies leaves a note, without raising or waiting. The notes are taken in when somebody enters the core, or at once
where they are of use soon, there are many, or the step may have ended by them.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from delta.keeping import Kept
from delta.runtime.note import Made, Readers
from delta.types import Instruction

if TYPE_CHECKING:
    from delta.runtime.core import Core

_MANY = 16  # of small storages that are needed no more, until they are let go of

_Note = (
    tuple[Literal["gone", "unsaved"], int]
    | tuple[Literal["kept"], Kept]
    | tuple[Literal["noted"], Kept, weakref.ref[Made]]
    | tuple[Literal["went"], weakref.ref[Made]]
    | tuple[Literal["note"], Readers, Sequence[int]]
    | tuple[Literal["watched"], int, int]
)


class Inbox:
    """One session's notes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.notes: deque[_Note] = deque()
        self.emptying = False

    # -- from anywhere --------------------------------------------------------------------------------------------
    def storage_died(self, record: int) -> None:
        """The storage of a record has gone."""
        self.notes.append(("gone", record))

    def made_died(self, made: weakref.ref[Made]) -> None:
        """The storage has gone that a noted call had made the first time."""
        self.notes.append(("went", made))

    def handle_died(self, record: int, soon: bool = True) -> None:
        """A handle has died. Unless it is of use `soon` the engine hears of it with what comes next, or when the step
        may have ended by it."""
        self.notes.append(("unsaved", record))
        if soon or self._many():
            self._take_in()

    def handles_died(self, records: Iterable[int]) -> None:
        """These have, and nobody waits for it."""
        self.notes.extend([("unsaved", record) for record in records])

    def kept_died(self, kept: Kept, soon: bool = False) -> None:
        """A saved tensor has died that was kept. Without a record, its bytes go by themselves."""
        self.notes.append(("kept", kept))
        if soon or self._many():
            self._take_in()

    def noted_died(self, kept: Kept, made: weakref.ref[Made]) -> None:
        """A saved tensor has died on something that a noted call makes."""
        self.notes.append(("noted", kept, made))
        if self._many():
            self._take_in()

    def note_died(self, readers: Readers, keys: Sequence[int], records: Sequence[int]) -> None:
        """A note has died: see there."""
        self.notes.append(("note", readers, keys))
        self.handles_died(records)
        if self._many():
            self._take_in()

    def watched_step_ended(self, peak_bytes: int, began_ns: int) -> None:
        """A step that was only watched has ended with the death of its last saved tensor."""
        self.notes.append(("watched", peak_bytes, began_ns))
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
        core, engine, notes = self._core, self._core.engine, self.notes
        self.emptying = True
        try:
            while notes:
                note = notes.popleft()
                if note[0] == "gone":
                    if gone := engine.storage_gone(note[1]):
                        core.run(gone)
                    continue
                if note[0] == "went":
                    core.noted.went(note[1])
                    continue
                if note[0] == "watched":
                    core.watched_step(note[1], note[2])
                    continue
                if note[0] == "note":
                    core.noted.note_died(note[1], note[2])
                    continue
                if core.op_times.missing:
                    core.op_times.tell(wait=engine.ledger.own_handles == 1)  # the step is about to be learned from
                if note[0] == "kept":
                    out = self._unsaved(note[1], read=core.noted.keeps(note[1].key))
                elif note[0] == "noted":
                    out = self._unsaved(note[1])
                    core.noted.released(note[1], note[2])
                else:
                    out = engine.unsaved(note[1], time.perf_counter_ns())
                if out:
                    core.run(out)
                if engine.finished_steps:
                    core.step_ended()
        finally:
            self.emptying = False

    def _unsaved(self, kept: Kept, read: bool = False) -> list[Instruction]:
        """A saved tensor on a kept storage has died. `read`: a note reads that still."""
        core, there = self._core, kept.there
        out = core.engine.unsaved_kept(kept, time.perf_counter_ns(), read)
        if core.timeline.active and there and not kept.there:
            core.emit("freed", record=kept.record, nbytes=kept.nbytes)
        return out
