"""The filter's first choice, found without looking at everybody: the ranking, kept in step with the ledger.

The invariant whenever it is asked: the ranking holds exactly what may go, and no worth in it is too small. Whatever may
have become worth more, or may go or stay now, is named in `Ledger.touched` and is seated again before the question.
What has only become dearer is noticed when it wins: it is seated again, and the question is asked once more. So the
answer is that of a look at all, and an eviction costs as many matches as paths to the root have changed.

Where the step is known, a score may look ahead to the next use. That is told in the plan's time, not the clock's, and
order by the one says nothing of the other: there is a ranking for each, and their winners are compared by score.
"""

from __future__ import annotations

from collections.abc import Callable

from delta.filter.lines import LINES, delta_awaited, delta_unused
from delta.filter.ranking import Line, Ranking
from delta.filter.scores import SCORES, Candidate
from delta.ledger import Ledger
from delta.nextuse import NextUse
from delta.record import Record

_NOTHING = Line(0, 0, 1)


class Victims:
    """Ranks the held records by a score. `price` gives what evicting a record costs in ns, None where it has to stay;
    a change that may lower it, or that lets a record go or stay, is told by `Ledger.touched`."""

    def __init__(
        self, score: str, ledger: Ledger, price: Callable[[Record], int | None], next_use: NextUse | None
    ) -> None:
        self._score, self._line = SCORES[score], LINES[score]
        self._ledger, self._price, self._next_use = ledger, price, next_use
        self._by_clock, self._by_plan = Ranking(), Ranking()
        self._now_ns = 0
        self.clear()

    def clear(self) -> None:
        """Everything may have changed."""
        self._by_clock.clear()
        self._by_plan.clear()
        self._ledger.touched.update(self._ledger.held)
        self._plan = self._next_use.plan if self._next_use is not None else None
        self._position = 0
        self._due: dict[int, set[int]] = {}  # position of a need -> records seated by it

    def first(self, now_ns: int) -> Record | None:
        """The record with the smallest score, among equals the one used last; None if nothing may go."""
        self._now_ns = max(now_ns, self._now_ns)
        self._look_ahead()
        touched, self._ledger.touched = self._ledger.touched, set()
        for record in touched:
            self._seat(record)
        while (leader := self._leader()) is not None and self._seat(leader):
            pass
        return self._ledger[leader] if leader is not None else None

    def _look_ahead(self) -> None:
        """What was to be used by now has another next use."""
        if self._next_use is None:
            return
        if self._next_use.plan is not self._plan:
            self.clear()
        for position in range(self._position, self._next_use.position):
            self._ledger.touched.update(self._due.pop(position, ()))
        self._position = self._next_use.position

    def _leader(self) -> int | None:
        by_clock = self._by_clock.best(self._now_ns)
        by_plan = self._by_plan.best(self._next_use.now_ns) if self._next_use is not None and self._by_plan else None
        if by_clock is None or by_plan is None:
            return by_plan if by_clock is None else by_clock
        return min((by_clock, by_plan), key=lambda record: (self._score_of(record), -self._ledger.held[record]))

    def _score_of(self, record: int) -> float:
        rec = self._ledger[record]
        until_use_ns = self._next_use.until_ns(rec) if self._next_use is not None else None
        cost_ns = self._price(rec) or 0
        return self._score(Candidate(record, rec.nbytes, cost_ns, self._now_ns - rec.used_ns, until_use_ns))

    def _seat(self, record: int) -> bool:
        """Give the record its place; whether it has another one now."""
        rec = self._ledger.records.get(record)
        cost_ns = self._price(rec) if rec is not None and rec.held else None
        if rec is None or cost_ns is None:
            return self._by_clock.discard(record) or self._by_plan.discard(record)
        order = self._ledger.held[record]
        use = self._next_use.of(rec) if self._next_use is not None else None
        if use is None:
            moved = self._by_plan.discard(record)
            return self._by_clock.add(record, self._clock_line(rec, cost_ns), order) or moved
        if use.position is None:
            line = delta_unused(rec.nbytes, cost_ns, use.at_ns)
        else:
            self._due.setdefault(use.position, set()).add(record)
            line = delta_awaited(rec.nbytes, cost_ns, use.at_ns)
        moved = self._by_clock.discard(record)
        return self._by_plan.add(record, line, order) or moved

    def _clock_line(self, rec: Record, cost_ns: int) -> Line:
        line = self._line(rec.nbytes, cost_ns, rec.used_ns)
        if not line.run and line.rise * self._now_ns + line.level <= 0:
            self._ledger.touched.add(rec.id)  # free, but worth nothing before some time has passed
            return _NOTHING
        return line
