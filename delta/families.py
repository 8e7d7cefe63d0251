"""A learner for inputs that change their size from step to step (policy `mimose`).

`Learner` knows a step again by the exact metadata of what it saves, so every new sequence length is new to it. Here a
step is known by its structure (`Look`), its input size is that of the first tensor it saves, and its plan is made
there: before the body of the forward runs, from what the family says of that size. Plans are kept by size rounded up:
what fits when everything is a little larger fits.

What turns out otherwise than expected (another structure, a larger storage) is observed from there on, as ever, and the
family learns from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from delta.config import PlannerConfig
from delta.headroom import Beside
from delta.learner import KINDS, Learner
from delta.planner.estimate import Dims
from delta.planner.family import Expectation, Family
from delta.profile import ROOMIER, Profile
from delta.types import Action, Kind, Look

CACHED = 256  # plans remembered, the oldest forgotten first
LEAST_SQUEEZE = 0.8

Limit = Callable[[int], int | None]


@dataclass(slots=True)
class FamilyLearner(Learner):
    """`limit`: the limit in bytes, given the unevicted peak of a step."""

    limit: Limit = lambda unevicted_peak_bytes: None
    options: PlannerConfig = field(default_factory=PlannerConfig)
    families: list[Family] = field(default_factory=list)  # last used first
    dims: Dims = ()  # of the step under way
    squeeze: float = 1.0  # plans aim at this share of the limit; less after a step whose peak was over it
    _family: Family | None = field(default=None, init=False)
    _expected: Expectation | None = field(default=None, init=False)
    _plans: dict[tuple[Family, Dims], Profile] = field(default_factory=dict, init=False)

    @property
    def known_peak_bytes(self) -> int:
        return self._expected.peak_bytes if self._expected is not None else 0

    @property
    def all_idle(self) -> bool:
        """Never: the next input may be larger, and nothing made before it was seen could be dropped unrecorded."""
        return False

    @property
    def is_timed(self) -> bool:
        """Those of the first steps that a family is learned from, as many as one is observed for."""
        if self.make_plan is None or not self.recorded or self._family is not None:
            return False
        return sum(family.observed for family in self.families) < self.options.observe

    # -- during a step --------------------------------------------------------------------------------------------
    def _key(self, signature: int, look: Look) -> int:
        if not self.packs:
            self.dims = look.sizes
        return look.structure

    def _find(self, so_far: tuple[int, ...]) -> Profile | None:
        self._family = self._expected = None
        for family in self.families:
            if family.structure[: len(so_far)] != so_far or len(self.dims) != len(family.sizes[0]):
                continue
            expected = family.expects(self.dims)
            if not all(expected.covers(*saved) for saved in self._saved_bytes()):
                continue
            self._expected = expected
            if self.dims in family.sizes or family.observed >= self.options.observe:
                self._family = family
                return self._profile(family)
        return None

    @property
    def next_bytes(self) -> int:
        """What the next storage to be saved takes at most, as far as a family can tell, be it enough for a plan or
        not."""
        expected, order = self._expected, len(self.log.saves)
        return expected.saved[order].most if expected is not None and order < len(expected.saved) else 0

    def saved(self, record: int, nbytes: int, kind: Kind, now_ns: int) -> None:
        """First save of a record in this step. One that is larger than expected ends the plan."""
        order = len(self.log.saves)
        super(FamilyLearner, self).saved(record, nbytes, kind, now_ns)
        if kind is Kind.PARAMETER or self._expected is None or self.given_up:
            return
        if not self._expected.covers(order, nbytes):
            self._match()

    def _saved_bytes(self) -> Iterator[tuple[int, int]]:
        """What was saved so far: orders and bytes, none for what does not count."""
        log = self.log
        for order, record in enumerate(log.saves):
            yield order, log.nbytes[record] if log.kinds[record] is not Kind.PARAMETER else 0

    def _profile(self, family: Family) -> Profile | None:
        """The plan for the size at hand: one made before for a size rounded up to the same, under no higher a limit."""
        assert self._expected is not None and self.make_plan is not None
        limit_bytes = self.limit(self._expected.peak_bytes)
        if limit_bytes is None:
            return None
        key = (family, family.rounded(self.dims, self.options.rounding))
        known = self._plans.get(key)
        surprised = False
        if known is not None:
            surprised = not known.idle and known.plan is None  # it was thought to fit
            if not surprised and known.planned_for_bytes <= limit_bytes <= ROOMIER * known.planned_for_bytes:
                return known
        graph = family.graph(key[1])
        aim_bytes = max(0, int(limit_bytes * self.squeeze) - self.options.buffer.of(limit_bytes))
        made = Profile(
            family.structure,
            graph,
            self._expected.peak_bytes,
            family.forced,
            self.squeeze,
            planned_for_bytes=limit_bytes,
        )
        largest_bytes = max(graph.saved_bytes, default=0)
        # Online, room is kept for one more of the largest.
        made.idle = not surprised and graph.unevicted_bytes + largest_bytes <= aim_bytes
        if not made.idle:
            made.plan = self.make_plan(graph, aim_bytes, family.forced)
        self._plans[key] = made
        if len(self._plans) > CACHED:
            del self._plans[next(iter(self._plans))]
        return made

    # -- its end --------------------------------------------------------------------------------------------------
    def _learn(
        self,
        peak_bytes: int,
        unevicted_peak_bytes: int,
        limit_bytes: int | None,
        fitted: bool,
        forced: Mapping[int, Action],
        strays: Mapping[int, Action],
        beside: Beside,
    ) -> None:
        family, expected = self._family, self._expected
        if not self.log.needs:
            return
        if limit_bytes is not None and peak_bytes > limit_bytes and self.plan is not None:
            self.squeeze = max(LEAST_SQUEEZE, self.squeeze * limit_bytes / peak_bytes)
            self._plans.clear()
        told = family is not None and expected is not None and expected.exact and self._foreseen(expected)
        if self.recorded and not told:
            family = self._learn_size(forced)
        if family is not None and family in self.families:
            self.families.remove(family)
            self.families.insert(0, family)

    def _foreseen(self, expected: Expectation) -> bool:
        return all(expected.foresaw(*saved) for saved in self._saved_bytes())

    def _learn_size(self, forced: Mapping[int, Action]) -> Family:
        graph = self._observed()
        structure = tuple(self.log.signatures)
        family = next((known for known in self.families if known.takes(structure, self.dims, graph)), None)
        if family is None:
            family = Family(structure, self.dims, graph, forced, self.min_bytes)
            self.families.insert(0, family)
            del self.families[KINDS:]
        else:
            family.learn(self.dims, graph, forced)
        self._plans = {key: plan for key, plan in self._plans.items() if key[0] is not family}
        return family

    def _reset(self) -> None:
        super(FamilyLearner, self)._reset()
        self._family = self._expected = None
