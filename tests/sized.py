"""Steps without tensors whose sizes change, as a `Learner` with `Sizes` hears of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from sys import intern
from typing import Any

from builders import an_op

from delta.beside import Beside
from delta.config import PlannerConfig
from delta.learner import Learner
from delta.planner import PLANNERS, Plan, StepGraph, Task
from delta.revising import Outcome, Revising
from delta.routine import Way
from delta.sizes import Actions, Sizes
from delta.types import Action, Kind, Link, Look, Mode

ACTIONS = (Action.KEEP, Action.RECOMPUTE)
MASK = 800
WARM = [(4, 10), (4, 100), (2, 12)]


class Run:
    """Steps (b, t) under a limit in bytes, or a share: f makes 10·b·t bytes, g 4·b·t², h 6·b·t.

    `holds`: whether the peak of a plan is no higher than its limit, whatever that is."""

    def __init__(self, limit: int = 1000, share: float | None = None, least: int = 0, holds: bool = True) -> None:
        self.asked: list[tuple[StepGraph, int]] = []
        self.known: list[tuple[Actions, ...]] = []  # of recorded steps, when it was asked for a plan for another
        self.holds = holds
        self.limit: Callable[[int], int] = (lambda peak: int(share * peak)) if share else (lambda peak: limit)
        self.told: list[bool] = []  # whether a limit was that of the whole device
        self.learner = Learner(Revising(least, self._plan, aim=1.0))
        self.sizes = self.learner.sizes = Sizes(least, self._plan_like, self._limit, 1.0, self.learner.revising.data)
        self.least = least

    def _limit(self, peak_bytes: int, told: bool) -> int:
        self.told.append(told)
        return self.limit(peak_bytes)

    def _plan(self, graph: StepGraph, limit_bytes: int, forced: Any) -> Plan:
        self.asked.append((graph, limit_bytes))
        plan = PLANNERS["profile"](Task(graph, limit_bytes, Link(1e9, 1e9), ACTIONS, {}, False, PlannerConfig()))
        return replace(plan, peak_bytes=min(plan.peak_bytes, limit_bytes)) if self.holds else plan

    def _plan_like(self, graph: StepGraph, limit_bytes: int, known: Iterable[Actions]) -> Plan:
        self.known.append(tuple(known))
        return self._plan(graph, limit_bytes, {})

    def step(
        self,
        b: int,
        t: int,
        *,
        more: int = 0,
        names: str = "fgh",
        before: Iterable[str] = (),
        peak: int = 0,
        looks: str = "abc",
        recording: bool = True,
        beside: Beside | None = None,
        mask: int = 0,
        moved: int = 0,
    ) -> list[Mode]:
        """The mode after each save. `more` bytes in g, other ops by other names, calls `before` the first save; what
        the saves have of their `looks` at every size; whether the recorder was on before that; what the device used
        `beside`; bytes of a `mask` that each op reads and nobody saves; bytes that g has in place of h."""
        learner, sizes = self.learner, [10 * b * t, 4 * b * t * t + more + moved, 6 * b * t - moved]
        for k, name in enumerate(before):
            self._call(intern(name), 900 + k, [], 5)
        if mask:
            self._call("mask", MASK, [], mask)
        modes = []
        for i, (name, nbytes) in enumerate(zip(names, sizes, strict=False)):
            self._call(intern(name), i, [i - 1] * bool(i) + [MASK] * bool(mask), nbytes, b * t)
            if not i:
                learner.begin(recording)
            structure, exact = hash(looks[i]), hash((looks[i], b, t, nbytes))
            by_size = learner.foretold is not None
            learner.packed(structure if by_size else exact, 10 * i, Look(structure, (b, t) if not i else (b, t, 3)))
            learner.placed(i)
            learner.saved(i, nbytes, Kind.ACTIVATION, 10 * i)
            modes.append(learner.mode)
        self.asks_all = learner.asks_all
        self.followed = learner.routine is not None and len(modes) == len(learner.routine.orders)
        for i in reversed(range(len(modes))):
            if sizes[i] < self.least and not learner.asks_all:
                learner.asked(i)
            else:
                learner.needed(i, 100 - i)
            learner.released(i)
        evicted = peak > 0 and bool(learner.log.needs)  # nothing goes where all is too small
        whole = sum(sizes)
        outcome = Outcome(
            peak_bytes=peak,
            unevicted_peak_bytes=whole,
            limit_bytes=self.limit(whole),
            evicted=evicted,
            forced={},
            beside=beside,
        )
        learner.end(200, outcome)
        return modes

    def _call(self, call: str, record: int, read: list[int], nbytes: int, cost_ns: int = 1) -> None:
        learner, routine = self.learner, self.learner.routine
        way = routine.way(call) if routine is not None else Way.RECORD
        if way is None and learner.in_step:
            learner.leave_routine()
        if learner.routine is None:
            op = an_op(record, read, [record], name=f"aten.{call}", cost_ns=cost_ns)
            learner.op(op, {record: nbytes}, {record: Kind.ACTIVATION})
            learner.called(call, made=True)

    def warm(self) -> None:
        for b, t in WARM:
            assert self.step(b, t, peak=1) == [Mode.OBSERVE] * 3 and not self.followed
