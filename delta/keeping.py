"""What a step that goes as planned has decided beforehand: its bytes are counted, and little else is done.

Most saved tensors of a plan stay where they are, and most others go at their save and are made again by calls that the
runtime has noted (`noted_ops` in `routine.py`). While a step follows its routine the storages of both have no record in
the ledger, only a number in the order of the saves, their size, and how many saved tensors are on them. One that a
recorded op reads or makes when it is replayed has a record, held from its first save on, and nothing is asked of the
policy for it. More has to be known when something has to be evicted that the plan had not named, when an op that is
looked at writes or reads a storage without a record, and when one outlives its step. Then all of them are looked after
as if they had been from the start.
"""

from __future__ import annotations

from collections.abc import Callable

from delta.learner import Learner
from delta.ledger import Ledger
from delta.types import Kind


class Kept:
    """A storage that is counted, and how many live saved tensors are on it."""

    __slots__ = ("key", "listed", "nbytes", "noted", "order", "record", "recorded", "saved_ns", "there", "users")

    def __init__(
        self,
        key: int,
        record: int,
        nbytes: int,
        order: int,
        saved_ns: int,
        recorded: bool = False,
        noted: bool = False,
    ) -> None:
        self.key = key  # what the runtime knows the storage by
        self.record = record  # its number in the ledger, as soon as it is listed there
        self.recorded = recorded  # it has been there all along, and its saved tensors are counted there
        self.nbytes = nbytes
        self.order = order
        self.saved_ns = saved_ns  # when it was saved first
        self.users = 0
        self.there = True  # its bytes are on the device
        self.noted = noted  # it goes at its save, and the runtime knows how to make it again
        self.listed = False  # it has got its record: `users` is of the past


def _nobody() -> None:
    """Stands for the runtime where nothing is ever kept so."""


class Keeping:
    """The kept storages of the step under way."""

    def __init__(self, ledger: Ledger, learner: Learner) -> None:
        self._ledger, self._learner = ledger, learner
        self.storages: dict[int, Kept] = {}  # without a record, by key
        self.recorded: dict[int, Kept] = {}  # with one, by it
        self.noted: set[Kept] = set()  # those that have gone, or come back
        self.lingering: dict[int, Kept] = {}  # by key: no saved tensor is on these, and notes read them still
        self.give_records: Callable[[], None] = _nobody
        """The runtime's: calls `list_all`, and `list_tensor` for each saved tensor that lives."""
        self.find_used: Callable[[], None] = _nobody
        """The runtime's: calls `Engine.still_used`, which is not done at each need while there are kept storages."""

    @property
    def any(self) -> bool:
        """Whether `end` has anything to do."""
        return bool(self.storages or self.recorded or self.noted)

    def end(self) -> None:
        """From here on more than bytes may be asked for."""
        if self.any:
            self.give_records()

    def again(self, kept: Kept, signature: int) -> None:
        """One more tensor is saved on a kept storage."""
        kept.users += 1
        self._ledger.count(handles=1)
        self._learner.came(signature, kept.order)

    def first(self, kept: Kept, signature: int, now_ns: int) -> None:
        """A storage is saved for the first time."""
        kept.users = 1
        if kept.noted:
            self.noted.add(kept)
        else:
            self.storages[kept.key] = kept
        nbytes = kept.nbytes
        self._ledger.count(1, nbytes, nbytes)
        self._learner.came_first(signature, kept.order, kept.record, nbytes, now_ns)

    def again_recorded(self, kept: Kept, stretch: int, signature: int) -> None:
        """One more tensor is saved on a kept storage that has a record."""
        self._save(kept, stretch)
        self._learner.came(signature, kept.order)

    def first_recorded(self, kept: Kept, stretch: int, signature: int, now_ns: int) -> None:
        """A storage that has a record is saved for the first time: Delta holds it from here on."""
        self.recorded[kept.record] = kept
        self._save(kept, stretch)
        self._learner.came_first(signature, kept.order, kept.record, kept.nbytes, now_ns)
        if not self._ledger.records[kept.record].held:
            self._ledger.hold(kept.record)

    def _save(self, kept: Kept, stretch: int) -> None:
        self._ledger.save(kept.record, kept.order)
        self._ledger.records[kept.record].stretch = stretch

    def released(self, kept: Kept, read: bool = False) -> None:
        """One of the saved tensors on one without a record died. `read`: what has been noted will read it still."""
        if kept.listed:
            return
        kept.users -= 1
        if kept.users:
            self._ledger.count(handles=-1)
            return
        self._ledger.count(-1, unevicted_bytes=-kept.nbytes)
        if kept.noted:
            self.noted.remove(kept)
        else:
            del self.storages[kept.key]
        if read:
            self.lingering[kept.key] = kept
        else:
            self.went(kept)
        self._learner.released(kept.order)

    def unread(self, key: int) -> Kept | None:
        """Nothing that has been noted will read the storage any more. Returns what goes by that, if anything does."""
        kept = self.lingering.pop(key, None)
        if kept is not None:
            self.went(kept)
        return kept

    def went(self, kept: Kept) -> None:
        """The bytes are not there any more, or nobody asks for them."""
        if kept.there and not kept.listed:
            kept.there = False
            self._ledger.count(resident_bytes=-kept.nbytes)

    def came_back(self, kept: Kept) -> None:
        """They have been made again."""
        if not kept.there:
            kept.there = True
            self._ledger.count(resident_bytes=kept.nbytes)

    def list_all(self) -> None:
        """None of them is only counted any more: whoever calls gives each live saved tensor its record."""
        for kept in (*self.storages.values(), *self.noted, *self.lingering.values()):
            self._ledger.count(-kept.users, -kept.nbytes if kept.there else 0, -kept.nbytes if kept.users else 0)
            kept.listed = True
        self.storages.clear()
        self.recorded.clear()
        self.noted.clear()
        self.lingering.clear()

    def list_tensor(self, kept: Kept, stretch: int) -> bool:
        """A tensor that was only counted, saved in that stretch, is looked after from here on. True if it is the first
        one on its record: Delta holds the storage now, if it is there."""
        ledger, first = self._ledger, kept.record not in self._ledger
        if first:
            ledger.create(kept.record, kept.nbytes, Kind.ACTIVATION, kept.saved_ns)
        first |= not ledger[kept.record].handles
        ledger.save(kept.record, kept.order)
        if first and not kept.noted:
            ledger.hold(kept.record)
        ledger[kept.record].stretch = stretch
        return first
