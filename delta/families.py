"""A learner for inputs that change their size from step to step (policy `mimose`).

`Learner` knows a step again by the exact metadata of what it saves, so every new sequence length is new to it. Here a
step is known by its structure (`Look`), its input size is that of the first tensor it saves, and its plan is made
there: before the body of the forward runs, from what the family says of that size. Plans are kept by size rounded up:
what fits when everything is a little larger fits.

What turns out otherwise than expected (another structure, a larger storage) is observed from there on, as ever, and the
family learns from it.

Once as many steps of a family have been recorded whole as sizes are observed, the next ones follow a routine: the calls
are the same ones at every size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from delta.beside import Beside
from delta.config import PlannerConfig
from delta.learner import KINDS, WATCHFUL, Learner
from delta.planner.common import keep_common
from delta.planner.estimate import Dims
from delta.planner.family import Expectation, Family, kept_ops
from delta.planner.steplog import StepGraph, StepLog
from delta.profile import CRAMPED, ROOMIER, Profile, with_beside
from delta.revising import NOTHING, Outcome
from delta.routine import Way, ways_of
from delta.sizes import Limit, course_of, routine_for
from delta.types import ANY_LOOK, Kind, Look

CACHED = 256  # plans remembered, the oldest forgotten first
LEAST_SQUEEZE = 0.8


@dataclass(slots=True)
class _Course:
    """How the steps of a family go, as far as it is the same at every size."""

    log: StepLog
    places: list[int]  # of the ops of the step that it was learned from, in the family's graphs; -1 for one left out
    steps: int = 0  # of the family, recorded whole


@dataclass(slots=True)
class FamilyLearner(Learner):
    """`limit`: see `sizes.py`."""

    limit: Limit = lambda unevicted_peak_bytes, told: None
    options: PlannerConfig = field(default_factory=PlannerConfig)
    families: list[Family] = field(default_factory=list)  # last used first
    dims: Dims = ()  # of the step under way
    squeeze: float = 1.0  # plans aim at this share of the limit; less after a step whose peak was over it
    _family: Family | None = field(default=None, init=False)
    _near: Family | None = field(default=None, init=False)  # by which something is expected, be it enough or not
    _expected: Expectation | None = field(default=None, init=False)
    _plans: dict[tuple[Family, Dims], Profile] = field(default_factory=dict, init=False)
    _courses: dict[Family, _Course] = field(default_factory=dict, init=False)
    _begun: Family | None = field(default=None, init=False)  # as which the last step began
    _last_look: Look = field(default=ANY_LOOK, init=False)  # of the first saved tensor of the last step
    _last_bytes: list[int] = field(default_factory=list, init=False)  # that it saved, by save order
    _last_peak_bytes: int = field(default=0, init=False)  # had nothing gone
    _alike: int = field(default=0, init=False)  # so many steps running began like the last one, and fitted

    @property
    def known_peak_bytes(self) -> int:
        return self._expected.peak_bytes if self._expected is not None else 0

    @property
    def by_structure(self) -> bool:
        return True

    @property
    def all_idle(self) -> bool:
        """While inputs keep their size. Where they do not, the next one may be larger, and nothing made before it was
        seen could be dropped unrecorded."""
        return self._alike >= self.options.observe and not self.in_step

    def goes_on(self, look: Look) -> bool:
        return look == self._last_look

    def nearest(self, storages: int, step_bytes: int) -> tuple[int, int]:
        return sum(self._last_bytes[:storages]), self._last_peak_bytes

    @property
    def is_timed(self) -> bool:
        """Those of the first steps that a family is learned from, as many as one is observed for."""
        if self.revising.make_plan is None or not self.recorded or self._family is not None:
            return False
        return sum(family.observed for family in self.families) < self.options.observe

    # -- during a step --------------------------------------------------------------------------------------------
    def _key(self, signature: int, look: Look) -> int:
        if not self.packs:
            self.dims = look.sizes
        return look.structure

    def _join(self) -> None:
        """The first save tells which routine the step follows: until then it is recorded, and to its end where more is
        to be learned from it."""
        family, expected = self._family, self._expected
        known = family is not None and expected is not None and expected.exact
        if self.recorded and known and not self._whole:
            self._follow()
        self._begun = self._family

    def _find(self, so_far: tuple[int, ...]) -> Profile | None:
        self._family = self._near = self._expected = None
        for family in self.families:
            if family.structure[: len(so_far)] != so_far or len(self.dims) != len(family.sizes[0]):
                continue
            expected = family.expects(self.dims)
            if not all(expected.covers(*saved) for saved in self._saved_bytes()):
                continue
            self._near, self._expected = family, expected
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
            self._match_or_leave()

    def _guess_beside(self) -> Beside:
        if self._expected is None or self._near is None or not self._near.beside.told:
            return NOTHING
        return self._near.beside.at(sum(saved.most for saved in self._expected.saved))

    def _saved_bytes(self) -> Iterator[tuple[int, int]]:
        """What was saved so far: orders and bytes, none for what does not count."""
        log = self.log
        for order, record in enumerate(log.saves):
            yield order, log.nbytes[record] if log.kinds[record] is not Kind.PARAMETER else 0

    def _profile(self, family: Family) -> Profile | None:
        """The plan for the size at hand: one made before for a size rounded up to the same, under no higher a limit."""
        make_plan = self.revising.make_plan
        assert self._expected is not None and make_plan is not None
        limit_bytes = self.limit(self._expected.peak_bytes, family.beside.told)
        if limit_bytes is None:
            return None
        key = (family, family.rounded(self.dims, self.options.rounding))
        course = self._course(family)
        known = self._plans.get(key)
        surprised = False
        if known is not None:
            surprised = not known.idle and known.plan is None  # it was thought to fit
            if not surprised and known.planned_for_bytes <= limit_bytes <= ROOMIER * known.planned_for_bytes:
                return known
        graph = family.graph(key[1])
        if course is not None:
            graph = keep_common(graph)
        beside = family.beside.at(graph.unevicted_bytes)
        graph = with_beside(graph, beside)
        aim_bytes = int(limit_bytes * self.squeeze) - self.options.buffer.of(limit_bytes) - graph.common_bytes
        made = Profile(
            family.structure,
            graph,
            self._expected.peak_bytes,
            family.forced,
            self.squeeze,
            planned_for_bytes=limit_bytes,
            beside=beside,
        )
        largest_bytes = max(graph.saved_bytes, default=0) + max(made.all_beside, default=0)
        # Online, room is kept for one more of the largest. A routine goes by a plan, and only by one that holds the
        # limit: elsewhere all that can has to go, and what has passed unrecorded cannot.
        made.idle = course is None and not surprised and graph.unevicted_bytes + largest_bytes <= max(0, aim_bytes)
        if not made.idle:
            made.plan = make_plan(graph, max(0, aim_bytes), family.forced)
        if course is not None and made.plan is not None and made.plan.peak_bytes + graph.common_bytes <= limit_bytes:
            made.routine = routine_for(course.log, made)
        self._plans[key] = made
        if len(self._plans) > CACHED:
            del self._plans[next(iter(self._plans))]
        return made

    def _course(self, family: Family) -> _Course | None:
        """How its steps go, once that is known well enough to be followed."""
        course = self._courses.get(family)
        selective = self.revising.selective
        return course if selective and course is not None and course.steps >= self.options.observe else None

    # -- its end --------------------------------------------------------------------------------------------------
    def _forget_steps(self) -> None:
        super(FamilyLearner, self)._forget_steps()
        self._alike = 0
        self.families.clear()
        self._plans.clear()
        self._courses.clear()
        self._family = self._near = self._expected = self._begun = None

    def _learn(self, outcome: Outcome) -> None:
        family, expected = self._family, self._expected
        self._compare(outcome)
        self._went()
        if not self.log.needs:
            return
        limit_bytes = outcome.limit_bytes
        if limit_bytes is not None and outcome.over and self.plan is not None:
            self.squeeze = max(LEAST_SQUEEZE, self.squeeze * limit_bytes / outcome.peak_bytes)
            self._plans.clear()
        told = family is not None and expected is not None and expected.exact and self._foreseen(expected)
        if self.recorded and not told:
            family = self._learn_size(outcome)
        if family is not None and family in self.families:
            self.families.remove(family)
            self.families.insert(0, family)
            if self.recorded and family in self._courses:
                self._one_more(family)

    def _compare(self, outcome: Outcome) -> None:
        """A step has ended: whether it fitted, as all those before it that began so."""
        self._alike = (self._alike if self._look == self._last_look else 0) + 1 if outcome.fitted else 0
        self._last_look, self._last_peak_bytes = self._look, outcome.unevicted_peak_bytes
        self._last_bytes = [nbytes for _, nbytes in self._saved_bytes()]

    def _one_more(self, family: Family) -> None:
        """A step of the family has been recorded whole."""
        course = self._courses[family]
        course.steps += 1
        if course.steps == self.options.observe:
            self._forget_plans(family)  # which have no routines

    def _forget_plans(self, family: Family) -> None:
        self._plans = {key: plan for key, plan in self._plans.items() if key[0] is not family}

    def _went(self) -> None:
        """A step has ended that may have followed a routine."""
        self._before = profile = self._following
        if profile is None:
            self._whole = max(0, self._whole - 1)
            return
        as_told = self.routine is not None and self.packs == len(profile.signatures)
        self._whole = 0 if as_told else WATCHFUL
        course = self._courses.get(self._begun) if self._begun is not None else None
        if profile.cramped >= CRAMPED and profile.routine is not None and profile.routine.noted and course is not None:
            profile.routine = routine_for(course.log, profile, notes=False)

    def steady_ways(self) -> list[Way] | None:
        """As every learner's, by the ops of the step that the routine was learned from."""
        profile = self._before
        course = self._courses.get(self._begun) if self._begun is not None else None
        if profile is None or profile.plan is None or course is None:
            return None
        return ways_of([(None, place) for place in course.places], profile.graph, profile.plan)

    def _foreseen(self, expected: Expectation) -> bool:
        return all(expected.foresaw(*saved) for saved in self._saved_bytes())

    def _learn_size(self, outcome: Outcome) -> Family:
        forced = outcome.forced
        graph = self.revising.observed(self.log)
        structure = tuple(self.log.signatures)
        family = next((known for known in self.families if known.takes(structure, self.dims, graph)), None)
        if family is None:
            family = Family(structure, self.dims, graph, forced, self.revising.min_bytes)
            self.families.insert(0, family)
            for forgotten in self.families[KINDS:]:
                self._courses.pop(forgotten, None)
            del self.families[KINDS:]
        else:
            family.learn(self.dims, graph, forced)
        family.used(graph, outcome.beside or NOTHING)
        self._learn_course(family, graph)
        self._forget_plans(family)
        return family

    def _learn_course(self, family: Family, graph: StepGraph) -> None:
        """How such steps go, from the one that has just been recorded. None does so where backward begins before
        forward has ended."""
        if any(self.log.needs_before):
            return
        number = {op.id: place for place, op in enumerate(kept_ops(graph))}
        places = [number.get(op.id, -1) for op in graph.ops]
        known = self._courses.get(family)
        self._courses[family] = _Course(course_of(self.log, graph), places, known.steps if known is not None else 0)

    def _reset(self) -> None:
        super(FamilyLearner, self)._reset()
        self._family = self._near = self._expected = self._following = self.routine = None
