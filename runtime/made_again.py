"""Replays of noted calls: those missing for what is asked for, in the order in which they ran."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta.runtime import batch_norm
from delta.runtime.cudnn import by_first_choice
from delta.runtime.generators import run_seeded
from delta.runtime.modes import only_lowest
from delta.runtime.note import Made, Note, Read
from delta.runtime.recompute import FIRST, below_autograd, fill, filled, mismatch, results_of
from delta.runtime.settings import under
from delta.runtime.view import View
from delta.runtime.writes import refusal

if TYPE_CHECKING:
    from delta.runtime.core import Core


class MadeAgain:
    """Walks along notes; an explicit list, no recursion (rule 7). All calls come while the core is entered."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._engine = core.engine

    def bring_back(self, wanted: Note) -> bool:
        """Replay what is missing for what a note makes. False if that has no room: the engine has to find some.

        RecomputeMismatchError where a replay differs; StorageModifiedError where it would read what has been written.
        """
        core, engine = self._core, self._engine
        walk, known, there = [wanted], {wanted}, []
        uses: dict[Made, int] = {}  # how many of the walk are still to read it
        for note in walk:
            for made in _made_by_others(note):
                if made not in uses:
                    found = made.found()
                    if found is not None:
                        there.append(found)  # it may not die before it is read
                    elif made.note not in known:
                        known.add(made.note)
                        walk.append(made.note)
                uses[made] = uses.get(made, 0) + 1
        walk.sort(key=lambda note: note.number)
        records = list(dict.fromkeys([record for note in walk for record in note.records]))
        lent = []
        try:
            for record in records:
                lent.append(record)
                core.lend(record)
            return not core.noted.given and self._replay_all(walk, uses)
        except torch.OutOfMemoryError:
            return False
        finally:
            for made in uses:
                if not made.asked_for:
                    made.value = None
            for record in lent:
                core.run(engine.served(record))

    def _replay_all(self, walk: list[Note], uses: dict[Made, int]) -> bool:
        """Run them under the settings of the first time, which are read once for all notes in a row that had the same.
        False where there is no room for one."""
        passing_bytes = 0
        with only_lowest(self._core.modes_below), below_autograd():
            for settings, notes in groupby(walk, key=attrgetter("settings")):
                with under(settings):
                    for note in notes:
                        written = note.overwritten or _nobody_s(note, uses)
                        new_bytes = 0 if written else note.nbytes
                        if not self._has_room(passing_bytes + new_bytes):
                            return False
                        self._core.gauge.make_way(new_bytes)
                        passing_bytes = self._replay(note, uses, written, passing_bytes)
        return True

    def _has_room(self, nbytes: int) -> bool:
        """Whether so much more fits. A device that is behind the host is behind with its copies out, too: they are
        waited for first."""
        core, expected = self._core, self._engine.expected
        if expected.fits(nbytes):
            return True
        if not (awaits := expected.await_for(nbytes)):
            return False
        core.run(awaits)
        return expected.fits(nbytes) and not core.noted.given

    def _replay(self, note: Note, uses: dict[Made, int], written: Made | None, passing_bytes: int) -> int:
        """Run one, and let go of what the walk has no more use for; `passing_bytes` then, of what it still has.
        `written`: what it makes is made in the place of this."""
        core, engine = self._core, self._engine
        began_ns = core.begins()
        made_now = self._make(note, in_place=written is not None and note.overwrites is None)
        ended_ns = time.perf_counter_ns()
        core.spent(ended_ns - began_ns)
        core.rematerialiser.spent_ns += ended_ns - began_ns
        if written is not None:
            written.value = None
            passing_bytes -= written.nbytes
        nbytes = 0
        for made in made_now:
            nbytes += made.nbytes
            if made.kept is not None and made.kept.users:
                engine.keeping.came_back(made.kept)
            elif made in uses:
                passing_bytes += made.nbytes
            else:
                made.value = None
        engine.ledger.note_peak(passing_bytes)
        engine.totals.recomputed_bytes += nbytes
        for made in _made_by_others(note):
            uses[made] -= 1
            if not uses[made] and made.value is not None and not made.asked_for:
                made.value = None
                passing_bytes -= made.nbytes
        if core.timeline.active:
            saved = [made.kept.record for made in made_now if made.kept is not None]
            told = {"record": saved[0] if saved else note.number, "nbytes": nbytes, "op": note.facts.name}
            core.emit("recomputed", start_ns=began_ns, end_ns=ended_ns, **told)
        return passing_bytes

    def _make(self, note: Note, in_place: bool) -> list[Made]:
        """Run the call once more, by the algorithm of the first time; what it has made that was not there. `in_place`:
        into the first of what it reads."""
        facts = note.facts
        tensors = [self._tensor(note, read) for read in note.reads]
        for tensor in tensors:
            self._core.device.share(tensor.untyped_storage())  # it may have been made on another stream
        again = partial(self.run_again, note, tensors, in_place)
        results = by_first_choice(facts, self._core.device, again)
        made_now = []
        for made, value in zip(note.results, results, strict=False):
            if made is not None and made.found() is None:
                found = View.of(value)
                if found != made.view or value.untyped_storage().nbytes() != made.nbytes:
                    raise mismatch(facts.name, found, made.view, made.nbytes)
                made.came_back(value)
                made_now.append(made)
        return made_now

    def run_again(self, note: Note, tensors: Sequence[Tensor], in_place: bool) -> list[Tensor]:
        """What the call gives the second time, with these for what it reads."""
        statistics = [view.over(storage) for ref, view in note.statistics if (storage := ref()) is not None]
        if len(statistics) == 2:  # they are there, and give the output
            needed = [fill(arg, tensors) for arg in note.args[: batch_norm.NEEDED]]
            return [batch_norm.output(needed, *statistics)]
        args, kwargs = filled(note.args, note.kwargs, tensors)
        func = note.facts.in_place if in_place else note.func
        assert func is not None
        return results_of(run_seeded(func, note.generator, note.state, args, kwargs))

    def _tensor(self, note: Note, read: Read) -> Tensor:
        """An argument."""
        if read.tensor is not None:
            if read.tensor._version != read.version:
                self._refuse(note, read.tensor.untyped_storage().nbytes())
            return read.tensor
        if read.made is not None:
            found = read.made.found()
            assert found is not None
            return found if read.view is None else read.view.over(found.untyped_storage())
        record = self._engine.ledger.resolve(read.record)
        if self._core.slots[record].written_unseen:
            self._refuse(note, self._engine.ledger[record].nbytes)
        assert read.view is not None
        return read.view.over(self._core.ready(record))

    def _refuse(self, note: Note, nbytes: int) -> None:
        self._engine.written_unseen()
        raise refusal(note.facts.name, nbytes)


def _nobody_s(note: Note, uses: Mapping[Made, int]) -> Made | None:
    """What an element-wise call may make its result in the place of: its first argument, if the walk has made that and
    nobody reads it any more. So it takes no room a second time. Not in reduced precision: there `mul_`, for one, rounds
    a number before it multiplies, and `mul` does not."""
    if note.facts.in_place is None or not note.reads or note.args[0] is not FIRST:
        return None
    first, (made,) = note.reads[0], note.results
    read = first.made
    if read is None or made is None or first.view is not None or read.value is None or read.asked_for:
        return None
    alike = (read.view, read.nbytes) == (made.view, made.nbytes) and made.view.dtype in batch_norm.FULL_PRECISION
    return read if alike and uses[read] == 1 and read.value._version == read.value_version else None


def _made_by_others(note: Note) -> list[Made]:
    return [read.made for read in note.reads if read.made is not None]
