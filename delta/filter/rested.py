"""Who has rested longest, of each size: where a swap is hidden, only these can be the first to be swapped.

What a hidden swap costs is what compute would wait for it. That changes with the queue on the link, for all records at
once, so it has no line in a ranking. But of two records of the same size it never costs more for the one that is used
later; where the step is not known, that is taken to be the one that was used less recently. So one of each size is
enough to look at, and a model has few sizes, however many storages it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from delta.ledger import Ledger
from delta.nextuse import NextUse
from delta.record import Host, Record

SIGNIFICANT_BITS = 5  # of a size: what is less than a sixteenth apart may count as one, so there are never many
_FEW = 64  # seats that were left, which are not worth being forgotten

_Kind = tuple[int, bool, bool]
"""Size; whether it is on the host already, so that it has to come back only; whether its next use is known."""
_Seat = tuple[int, int, int]
"""The smallest first: what tells the rest, the order of uses, and the record."""


class Rested:
    """Sorts the held records. `swappable`: whether a record may go by a swap; a change is told by `Ledger.touched`,
    which somebody else empties."""

    def __init__(self, ledger: Ledger, swappable: Callable[[Record], bool], next_use: NextUse) -> None:
        self._ledger, self._swappable, self._next_use = ledger, swappable, next_use
        self.clear()

    def clear(self) -> None:
        """Everything may have changed."""
        self._seats: dict[int, tuple[_Kind, _Seat]] = {}
        self._heaps: dict[_Kind, list[_Seat]] = {}  # also of seats that were left since
        self._taken = 0  # seats in the heaps
        self._plan = self._next_use.plan
        self._ledger.touched.update(self._ledger.held)

    def first(self) -> Iterator[int]:
        """Of each size, the record that would cost least to swap; among equals the one used last."""
        if self._next_use.plan is not self._plan:
            self.clear()
        for record in self._ledger.touched:
            self._seat(record)
        if self._taken > 2 * len(self._seats) + _FEW:
            self._forget_left()
        for kind, heap in list(self._heaps.items()):
            while heap and not self._is_seated(kind, heap[0]):
                heappop(heap)
                self._taken -= 1
            if heap:
                yield heap[0][2]
            else:
                del self._heaps[kind]

    def _is_seated(self, kind: _Kind, seat: _Seat) -> bool:
        """Whether the record sits there still. What was forgotten went without a word."""
        record = seat[2]
        if record not in self._ledger.held:
            self._seats.pop(record, None)
        return self._seats.get(record) == (kind, seat)

    def _seat(self, record: int) -> None:
        rec = self._ledger.records.get(record)
        if rec is None or not rec.held or not self._swappable(rec):
            self._seats.pop(record, None)
            return
        use = self._next_use.of(rec)
        rest = rec.used_ns if use is None else -use.at_ns
        kind = (_rounded(rec.nbytes), rec.host is Host.WHOLE, use is not None)
        seated = (kind, (rest, -self._ledger.held[record], record))
        if self._seats.get(record) != seated:
            self._seats[record] = seated
            heappush(self._heaps.setdefault(kind, []), seated[1])
            self._taken += 1

    def _forget_left(self) -> None:
        """Else a step that never ends would be remembered whole."""
        self._heaps = {}
        for kind, seat in self._seats.values():
            self._heaps.setdefault(kind, []).append(seat)
        for heap in self._heaps.values():
            heapify(heap)
        self._taken = len(self._seats)


def _rounded(nbytes: int) -> int:
    insignificant = max(0, nbytes.bit_length() - SIGNIFICANT_BITS)
    return nbytes >> insignificant << insignificant
