"""When each record is needed next, in a step that is known.

The plan's time goes from need to need: a step that runs slower than the one that was learned, or stands still, is where
its last need puts it.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

from delta.learner import Learner
from delta.planner import Plan
from delta.record import Record

NEVER_NS = 1 << 62  # until the next use of what is not used again


class Use(NamedTuple):
    """The next use of a record: the position of that need, and its time in the plan. None: there is no more."""

    position: int | None
    at_ns: int


class NextUse:
    """Answers from the plan of the step under way."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._plan: Plan | None = None
        self._need_ns: list[int] = []

    @property
    def plan(self) -> Plan | None:
        """What is known; None if nothing is."""
        plan = self._learner.plan
        if plan is not self._plan:
            self._plan = plan
            self._need_ns = [] if plan is None else list(accumulate(plan.need_ns, max))
        return plan

    @property
    def position(self) -> int:
        return self._learner.position

    @property
    def now_ns(self) -> int:
        """The plan's time."""
        if self.plan is None or not self._need_ns:
            return 0
        return self._need_ns[min(self.position, len(self._need_ns) - 1)]

    def of(self, rec: Record) -> Use | None:
        """The next use of a record; None where the step is not known."""
        plan = self.plan
        if plan is None or not 0 <= rec.saved_at < len(plan.next_needs):
            return None
        needs = plan.next_needs[rec.saved_at]
        coming = bisect_left(needs, self.position)
        return Use(needs[coming], self._need_ns[needs[coming]]) if coming < len(needs) else Use(None, NEVER_NS)

    def until_ns(self, rec: Record) -> int | None:
        """Time to the next use of a record, `NEVER_NS` if there is none; None where the step is not known."""
        use = self.of(rec)
        if use is None or use.position is None:
            return None if use is None else NEVER_NS
        return use.at_ns - self.now_ns
