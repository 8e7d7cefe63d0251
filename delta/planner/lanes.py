"""The two directions of the link to the host, each an exclusive lane: one copy at a time, booked ahead.

Capuchin's rule (Peng et al., ASPLOS 2020, section 4.4) and its terms: a swap goes out at the *evicted access*, comes
back before the *back access*, and what is left between the two copies is its *free time*.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

from delta.types import Link


@dataclass(slots=True)
class Lane:
    """When one direction is busy, as (start, end) in ns."""

    busy: list[tuple[int, int]] = field(default_factory=list)

    def earliest(self, from_ns: int, took_ns: int) -> int:
        """The first start at or after `from_ns` at which a copy of this length fits."""
        for began_ns, ended_ns in self.busy[max(0, bisect_right(self.busy, (from_ns,)) - 1) :]:
            if began_ns >= from_ns + took_ns:
                break
            from_ns = max(from_ns, ended_ns)
        return from_ns

    def latest(self, until_ns: int, took_ns: int) -> int:
        """The last start at which a copy of this length fits and ends by `until_ns`."""
        for began_ns, ended_ns in reversed(self.busy[: bisect_right(self.busy, (until_ns,))]):
            if ended_ns <= until_ns - took_ns:
                break
            until_ns = min(until_ns, began_ns)
        return until_ns - took_ns

    def book(self, start_ns: int, took_ns: int) -> None:
        if took_ns:
            insort(self.busy, (start_ns, start_ns + took_ns))


@dataclass(frozen=True, slots=True)
class Booking:
    """Both copies of one swap, and what compute would wait for them."""

    out_ns: int  # start
    out_took_ns: int
    in_ns: int  # start
    in_took_ns: int
    exposed_ns: int

    @property
    def free_ns(self) -> int:
        """From the end of the copy out to the start of the copy back; negative: they do not fit in between."""
        return self.in_ns - self.out_ns - self.out_took_ns


class Lanes:
    """Offers and books swaps."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._out, self._in = Lane(), Lane()

    def offer(self, nbytes: int, from_ns: int, absent_ns: tuple[int, int], until_ns: int) -> Booking:
        """A swap from the access at `from_ns` to that at `until_ns` whose bytes are gone in between, at `absent_ns`."""
        gone_by_ns, back_from_ns = absent_ns
        out_took_ns, in_took_ns = self._link.out_ns(nbytes), self._link.in_ns(nbytes)
        out_ns = self._out.earliest(from_ns, out_took_ns)
        gone_ns = out_ns + out_took_ns
        in_ns, late_ns = self._in.latest(until_ns, in_took_ns), 0
        if in_ns < max(gone_ns, back_from_ns):
            in_ns = self._in.earliest(max(gone_ns, back_from_ns), in_took_ns)
            late_ns = max(0, in_ns + in_took_ns - until_ns)
        return Booking(out_ns, out_took_ns, in_ns, in_took_ns, max(0, gone_ns - gone_by_ns) + late_ns)

    def book(self, booking: Booking) -> None:
        self._out.book(booking.out_ns, booking.out_took_ns)
        self._in.book(booking.in_ns, booking.in_took_ns)
