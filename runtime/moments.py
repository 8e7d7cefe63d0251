"""When a step's saves and needs came about on a device that the host works ahead of.

The host enqueues work in a fraction of the time that the device takes for it, and waits at the end. By its clock there
would be next to no time between a save and the need, and no copy would ever seem hidden. So the device notes the
moments in its own order, and they are asked for when a step is learned from. As in the host's times, what Delta adds to
the step is left out: replays, encodings, and where compute stands still for a copy.

That takes a host that works ahead, and one that records all ops does not: the device waits for it, and what it tells
are the host's times after all (the forward of GPT-2 medium, 75 ms of an H200's work, seemed to take 640). So in a step
that is timed the device is held back again and again, each time for as long as the host takes for a few moments.
"""

from __future__ import annotations

import time
from operator import sub
from typing import Any, Literal

from delta.planner.steplog import StepLog, StepTimes
from delta.runtime.device.base import OpClock

# The device is held back for about as long as the host takes for so many moments, or ops if there are more of those.
# With the events around each that is less than the 1,024 launches that a card takes before it has the host wait.
PACE, MOST_OPS = 16, 64
_LONGER = 1.25
_LONGEST_HOLD_NS = 200_000_000
_ENOUGH = 0.25  # of so many, to know how long they take
_LITTLE_LONGER, _MUCH_LONGER = 1.5, 4

_Until = Literal["save", "need", "now", "resumption"]


class Moments:
    """Of one step at a time: the one whose log was shown last. `clock` is the device's."""

    def __init__(self, clock: OpClock) -> None:
        self._clock = clock
        self._log: StepLog | None = None
        self._mark: Any = None
        self._saves = self._needs = 0
        self._spans: list[tuple[_Until, Any]] = []  # since the last moment that the device told
        self._told = StepTimes()
        self._hold: Any = None  # ends when the device goes on
        self._hold_ns = 0
        self._held: tuple[int, int, int] | None = None  # since that time of the host, after so many moments and ops
        self._seen_ns = 0  # the last moment, by the host's clock

    def saw(self, log: StepLog, timed: bool = False) -> None:
        """The engine was told of something: a save or a need, if the log has one more than it had. In a step that is
        `timed` the device is held back."""
        if log is not self._log:
            self._spans.clear()
            if not log.saves and not log.needs:  # as in a step that is followed no further, which may never end
                self._log = None
                return
            self._log, self._saves, self._needs = log, 0, 0
            self._told = StepTimes()
            self._mark = self._clock.start()
            self._hold = self._held = None
        seen = self._saves + self._needs
        while len(log.saves) > self._saves:  # more than one where the step was not thought to be of interest
            self._saves += 1
            self._span("save")
        while len(log.needs) > self._needs:
            self._needs += 1
            self._span("need")
        if seen == self._saves + self._needs:
            return
        if timed:
            self._keep_busy(log)
            self._seen_ns = time.perf_counter_ns()

    def _keep_busy(self, log: StepLog) -> None:
        """Hold the device back once it has gone on: it does what it was given meanwhile, and until it has done that it
        waits for nobody. For how long, the first few moments of the first such step have told, and then the others."""
        now = time.perf_counter_ns(), self._saves + self._needs, len(log.ops)
        if self._held is not None:
            if self._hold is not None and self._clock.elapsed_ns(self._hold) is None:
                return
            took_ns, moments, ops = map(sub, now, self._held)
            share = max(moments / PACE, ops / MOST_OPS)
            if self._hold is None and share < _ENOUGH:
                return
            if not self._has_waited(now[0], moments):
                self._hold_ns = min(round(_LONGER * took_ns / share), _LONGEST_HOLD_NS)
        self._held = now
        if self._hold_ns:
            self.interrupted(log)
            self._clock.hold_back(self._hold_ns)
            self.resumed(log)
            self._hold = self._spans[-1][1]

    def _has_waited(self, now_ns: int, moments: int) -> bool:
        """Whether the host has most likely waited for the device since the last of these moments, for a number or for
        room in its queue: by how long it took one hold would make the next one longer, and so on."""
        if self._hold is None or self._held is None:
            return False
        last_ns, others_ns = now_ns - self._seen_ns, self._seen_ns - self._held[0]
        if moments == 1:  # it came within the hold, or little later
            return last_ns < _LITTLE_LONGER * self._hold_ns
        return last_ns * (moments - 1) > _MUCH_LONGER * others_ns

    def interrupted(self, log: StepLog) -> None:
        """Delta does something that the step would do without."""
        if log is self._log:
            self._span("now")

    def resumed(self, log: StepLog) -> None:
        """It has done it."""
        if log is self._log:
            self._span("resumption")

    def so_far(self, log: StepLog) -> StepTimes:
        """Net times of the saves and needs seen, and now; none of a step that was not shown. Waits for the device."""
        if log is not self._log:
            return StepTimes()
        self._span("now")
        told, now_ns = self._told, self._told.end_ns
        save_ns, need_ns = list(told.save_ns), list(told.need_ns)
        for until, token in self._spans:
            span_ns = self._clock.wait_ns(token)
            now_ns += span_ns if until != "resumption" else 0
            if until == "save":
                save_ns.append(now_ns)
            elif until == "need":
                need_ns.append(now_ns)
        self._spans.clear()
        self._told = StepTimes(tuple(save_ns), tuple(need_ns), now_ns)
        return self._told

    def _span(self, until: _Until) -> None:
        self._spans.append((until, self._clock.stop(self._mark)))
        self._mark = self._clock.start()
