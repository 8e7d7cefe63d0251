"""Steps at sizes that were never seen, of a program whose steps differ in nothing else.

A language model that is trained on batches as long as their longest sequence hardly ever has the same step twice, and
to record each takes several times as long as the step where the host is slower than the device. But its calls are the
same ones at every size, and bytes and times follow from the size of its input (`planner/family.py`, after Mimose). So
once steps of one structure have been recorded whole at a few sizes, the next is known by the first tensor that it
saves: a plan is made for its size rounded up, which fits where everything is a little larger, and a routine, as if such
a step had been seen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from delta.beside import Beside, BesideBySize, Track
from delta.planner.common import keep_common
from delta.planner.estimate import Dims
from delta.planner.family import SAMPLES, kept_ops
from delta.planner.loose import LooseFamily
from delta.planner.steplog import Plan, StepGraph, StepLog, build_graph
from delta.prepared import Preparation
from delta.profile import CRAMPED, ROOMIER, TIGHTEST, Profile, with_beside
from delta.routine import Routine, routine_of
from delta.types import Action, Look
from delta.units import Share

OBSERVED = 3  # sizes of one structure that are recorded before others are foretold
PROGRAMS = 8  # structures remembered, the one used longest ago forgotten first
PLANS = 256  # ... and plans of each
PROFILES = 4  # of its steps that were recorded last, whose plans are tried at other sizes
ROUNDING = Share(0.05)  # a plan serves sizes that are smaller by at most this
ROUNDED = 1.2  # ... and lets go of nothing that may be too small to be evicted then: (1 / 0.95) ** 3, of b * t ** 2
# A program is learned anew, from twice as many sizes, once so many steps and this share of all went otherwise.
OFTEN, MOST_OTHERWISE = 2, 1 / 8
LARGER = 1.05  # a step is foretold if its input is not larger than any before by more than this
VAGUE = 1.1  # ... and what it saves is known this well: the most over the least
LOOSE = 1.5  # ... or this well, where data decide what it is
# ... and its size is none that comes so often, of all steps: that is worth a plan and a routine of its own.
COMMON, COMMON_SHARE = 16, 1 / 10
# A plan may be over the limit by so much of it, since more is taken for a limit that was missed; and by any number of
# bytes where so many steps running were over it that were recorded.
TOLERATED, HOPELESS = 0.01, 3
# Of the limit, plans leave this for storages that are larger than foretold, where data decide what they take, and by so
# much they may be larger, all together, at any moment: what one expert has more of, another one has less.
SPARE, EXCESS = 0.05, 0.15

Limit = Callable[[int, bool], int | None]
"""The limit in bytes, given the unevicted peak of a step; that of the whole device, if its graph is `told` what is in
use beside counted activations."""
Actions = tuple[Action, ...]  # by save order
PlanLike = Callable[[StepGraph, int, Iterable[Actions]], Plan | None]


@dataclass(slots=True, eq=False)
class Program:
    """Steps that differ in their sizes only."""

    structure: tuple[int, ...]
    aim: float  # plans aim at this share of the limit; less after a step whose peak was over it
    logs: list[tuple[Dims, StepLog, Beside]] = field(default_factory=list)  # until there are enough of them
    wanted: int = OBSERVED  # so many are enough
    family: LooseFamily | None = None
    most: Dims = ()  # of each dim
    most_numel: int = 0
    course: StepLog = field(default_factory=StepLog)  # how such a step goes, at any size
    plans: dict[Dims, Profile] = field(default_factory=dict)
    came: Counter[Dims] = field(default_factory=Counter)  # since it was known
    steps: int = 0  # that were foretold
    otherwise: int = 0  # ... and went otherwise
    profiles: list[Profile] = field(default_factory=list)  # of steps that were recorded, the last ones
    followed: list[Plan | None] = field(default_factory=list)  # their plans, when those for other sizes were made
    known: tuple[Actions, ...] = ()  # ... and what they do
    missed: int = 0  # the last ones that were over their limit

    @property
    def sizes(self) -> Collection[Dims]:
        """Those at which it is known how such a step goes."""
        return self.family.sizes if self.family is not None else [dims for dims, _, _ in self.logs]

    def is_new(self, dims: Dims, log: StepLog) -> bool:
        """Whether a step that was recorded is unlike all that are known, in its size or its bytes."""
        return all(size != dims or _saved_bytes(known) != _saved_bytes(log) for size, known, _ in self.logs)

    def saw(self, dims: Dims, profile: Profile, held: bool) -> None:
        """A step of that size was recorded. `held`: its limit was."""
        self.most = tuple(map(max, self.most, dims)) if self.most else dims
        self.most_numel = max(self.most_numel, math.prod(dims))
        self.profiles = [*(other for other in self.profiles if other is not profile), profile][-PROFILES:]
        self.missed = 0 if held else self.missed + 1

    def heed(self) -> tuple[Actions, ...]:
        """What the plans of its recorded steps do. If a better one has been found for one of these since the last time,
        those for other sizes are made anew."""
        followed = [profile.plan for profile in self.profiles]
        if followed != self.followed:
            self.followed = followed
            self.known = tuple(dict.fromkeys(plan.actions for plan in followed if plan is not None and not plan.idle))
            self.plans.clear()
        return self.known

    def reaches(self, dims: Dims) -> bool:
        """Whether it is not larger than all that was recorded. Where it is, something else may be done than ever
        before, and it is then that the limit is hardest to hold."""
        within = all(size <= most for size, most in zip(dims, self.most, strict=True))
        return within and math.prod(dims) <= LARGER * self.most_numel

    def is_common(self, dims: Dims) -> bool:
        """Whether many steps are of that size, of which one has begun."""
        self.came[dims] += 1
        return self.came[dims] >= max(COMMON, COMMON_SHARE * self.came.total())

    def away(self, dims: Dims) -> float:
        """How far that is from what is known: what a program does may depend on a size."""
        return min((math.dist(_logs(size), _logs(dims)) for size in self.sizes), default=math.inf)


class Foretold(NamedTuple):
    """A step that has begun, as it is going to be: a profile for its size rounded up, and at least how high its own
    peak would be if nothing were evicted. `spare_bytes`: by so much storages may be larger than foretold, all together;
    None: none may be."""

    program: Program
    profile: Profile
    peak_bytes: int
    spare_bytes: int | None


class Sizes:
    """The programs that are known."""

    def __init__(self, min_bytes: int, plan_like: PlanLike, limit: Limit, aim: float, data: Preparation) -> None:
        self._min_bytes, self._plan_like, self._limit, self._aim = min_bytes, plan_like, limit, aim
        self._data = data
        self._programs: list[Program] = []  # used last first
        self.ready = False  # some step may be foretold

    # -- learning ---------------------------------------------------------------------------------------------------
    def learn(self, log: StepLog, dims: Dims, replay_ns: int, profile: Profile, held: bool, beside: Beside) -> None:
        """A step was recorded from its first op to its last release; `dims` are those of the first tensor it saved.
        `replay_ns`: what a replay takes beside the op's own time. `profile`: what is known of its kind; `held`: whether
        it was within its limit; `beside`: what was in use beside counted activations, if that was measured."""
        if any(log.needs_before) or len(log.structures) != len(log.signatures) or not dims:
            return
        if any(saves < len(log.saves) for _, _, saves in log.asked_small):
            return  # backward begins before forward has ended
        structure = tuple(log.structures)
        program = self._program(structure) or Program(structure, self._aim)
        program.saw(dims, profile, held)
        if program.family is None:
            if len(program.logs) < SAMPLES and program.is_new(dims, log):
                program.logs.append((dims, log, beside))
            if len(program.logs) >= program.wanted:  # never, after that has been of no use for a few times
                self._found(program, replay_ns)
        elif program.family.loose or dims not in program.family.sizes:
            graph = self._graph(log, replay_ns)
            if program.family.takes(structure, dims, graph):
                program.family.learn(dims, graph, {})
                program.family.used(graph, with_small_needs_beside(log, beside))
                program.course = course_of(log, graph)
                program.plans.clear()
            else:
                program = Program(structure, self._aim, [(dims, log, beside)], program.wanted)
                program.saw(dims, profile, held)
        self._use(program)

    def forget(self) -> None:
        """What is known of no step any more."""
        self._programs, self.ready = [], False

    def _program(self, structure: tuple[int, ...]) -> Program | None:
        return next((known for known in self._programs if known.structure == structure), None)

    def _use(self, program: Program) -> None:
        others = [known for known in self._programs if known.structure != program.structure]
        self._programs = [program, *others][:PROGRAMS]
        self.ready = any(known.family is not None for known in self._programs)

    def _found(self, program: Program, replay_ns: int) -> None:
        """There are enough steps, if they differ in their sizes only; those that differ otherwise from the last one are
        forgotten."""
        *others, newest = program.logs
        dims, last, used = newest
        program.logs = [newest]
        graph = self._graph(last, replay_ns)
        family = LooseFamily(program.structure, dims, graph, {}, int(ROUNDED * self._min_bytes))
        for size, log, beside in reversed(others):
            other = self._graph(log, replay_ns)
            if family.takes(program.structure, size, other):
                family.learn(size, other, {})
                family.used(other, with_small_needs_beside(log, beside))
                program.logs.insert(0, (size, log, beside))
        family.used(graph, with_small_needs_beside(last, used))
        if family.guesses:
            program.wanted = max(program.wanted, 2 * OBSERVED)
        if len(program.logs) >= program.wanted:
            program.family, program.course = family, course_of(last, graph)
            program.logs.clear()

    def _graph(self, log: StepLog, replay_ns: int) -> StepGraph:
        return build_graph(self._data.given(with_small_needs(log)), self._min_bytes, replay_ns)

    # -- foretelling --------------------------------------------------------------------------------------------------
    def _nearest(self, look: Look) -> Program | None:
        alike = (program for program in self._programs if program.structure[0] == look.structure)
        return min(alike, key=lambda known: known.away(look.sizes), default=None)

    def beside(self, look: Look) -> Beside:
        """What a step whose first saved tensor looks so may use beside counted activations, be it foretold or not: by
        the sizes that are known, be they enough for a plan or not."""
        program = self._nearest(look)
        if program is None:
            return Beside()
        if (family := program.family) is not None:
            if not family.beside.told:
                return Beside()  # at once: this comes before the step goes on
            return family.beside.at(sum(saved.most for saved in family.expects(look.sizes).saved))
        known = BesideBySize()  # by the size itself
        for dims, _, beside in program.logs:
            if beside.saves.levels:
                known.saw(math.prod(dims), beside)
        return known.at(math.prod(look.sizes))

    def foretell(self, look: Look, standing_bytes: int) -> Foretold | None:
        """The step whose first saved tensor looks so; None if none like it is known. `standing_bytes`: what is resident
        already, left over from another step."""
        program = self._nearest(look)
        if program is None or program.family is None:
            return None
        family, loose, common = program.family, program.family.loose, program.is_common(look.sizes)
        if (common and not loose) or not program.reaches(look.sizes) or not family.varies_so(look.sizes):
            return None
        expected = family.expects(look.sizes)
        vague = LOOSE if loose else VAGUE
        if sum(saved.most for saved in expected.saved) > vague * sum(saved.least for saved in expected.saved):
            self._went(program, as_told=False)
            return None
        peak_bytes = expected.peak_bytes
        limit_bytes = self._limit(peak_bytes, family.beside.told)
        if limit_bytes is None:
            return None
        theirs_bytes = max(0, limit_bytes - family.beside.base_bytes)  # saved storages', and of the work on them
        room_bytes = max(0, limit_bytes - standing_bytes - (int(SPARE * theirs_bytes) if loose else 0))
        profile = self._profile(program, family, look.sizes, room_bytes)
        at_most_bytes = room_bytes if loose else room_bytes + int(TOLERATED * theirs_bytes)
        held = loose or program.missed < HOPELESS
        if profile is None or (held and not _holds(profile, at_most_bytes)):
            return None  # in a step that is recorded more can be done for the limit
        return Foretold(program, profile, peak_bytes, int(EXCESS * theirs_bytes) if loose else None)

    def _profile(self, program: Program, family: LooseFamily, dims: Dims, limit_bytes: int) -> Profile | None:
        """... for the size rounded up, as it was made before if it fits."""
        size, others = family.rounded(dims, ROUNDING), program.heed()
        known = program.plans.get(size)
        if known is not None and _serves(known, limit_bytes):
            return known
        graph = keep_common(family.graph(size))
        beside = family.beside.at(graph.unevicted_bytes)
        graph = with_beside(graph, beside)
        aim_bytes = int(max(0, limit_bytes - graph.common_bytes) * program.aim)
        plan = self._plan_like(graph, aim_bytes, [each for each in others if len(each) == len(graph.saved)])
        if plan is None:
            return None
        made = Profile(program.structure, graph, 0, {}, program.aim, plan, planned_for_bytes=limit_bytes, beside=beside)
        made.routine = routine_for(program.course, made)
        program.plans[size] = made
        if len(program.plans) > PLANS:
            del program.plans[next(iter(program.plans))]
        return made

    # -- the end of a step --------------------------------------------------------------------------------------------
    def ended(self, foretold: Foretold, as_told: bool, peak_bytes: int, limit_bytes: int | None) -> None:
        """A step that was foretold has ended. `as_told`: its calls and saves were those foretold."""
        program, profile = foretold.program, foretold.profile
        self._went(program, as_told)
        forecast_held = _holds(profile, profile.planned_for_bytes)
        if limit_bytes is not None and peak_bytes > limit_bytes and program.aim > TIGHTEST and forecast_held:
            program.aim = max(TIGHTEST, program.aim * limit_bytes / peak_bytes)
            program.plans.clear()
        elif profile.cramped >= CRAMPED and profile.routine is not None and profile.routine.noted:
            profile.routine = routine_for(program.course, profile, notes=False)

    def _went(self, program: Program, as_told: bool) -> None:
        program.steps += 1
        program.otherwise += not as_told
        if program.otherwise >= max(OFTEN, MOST_OTHERWISE * program.steps):
            program = Program(program.structure, self._aim, wanted=2 * program.wanted)
        self._use(program)


def _saved_bytes(log: StepLog) -> list[int]:
    return [log.nbytes[record] for record in log.saves]


def _logs(dims: Dims) -> list[float]:
    return [math.log(max(1, size)) for size in dims]


def _holds(profile: Profile, limit_bytes: int) -> bool:
    assert profile.plan is not None
    return profile.plan.peak_bytes + profile.graph.common_bytes <= limit_bytes


def _serves(known: Profile, limit_bytes: int) -> bool:
    """Whether a plan that was made under about this limit is within it, or no plan can be, and no better one is to be
    expected."""
    assert known.plan is not None
    then_bytes = known.planned_for_bytes
    within = _holds(known, limit_bytes) or (not _holds(known, then_bytes) and then_bytes <= ROOMIER * limit_bytes)
    return within and (known.plan.idle or limit_bytes <= ROOMIER * then_bytes)


def routine_for(course: StepLog, profile: Profile, notes: bool = True) -> Routine:
    """How a step goes by the plan of that profile, which was made for its size rounded up."""
    assert profile.plan is not None
    routine = routine_of(course, profile.graph, profile.plan, notes)
    routine.most_bytes = profile.graph.saved_bytes
    return routine


def course_of(log: StepLog, graph: StepGraph) -> StepLog:
    """How a step goes, as far as it is the same at every size: what a routine is made from, with the ops that are left
    in `graph` when it is pruned. `graph` was made from `log`."""
    kept = [op.id for op in kept_ops(graph)]
    number = {op: place for place, op in enumerate(kept)}
    return StepLog(
        calls=[(call, number.get(op, -1)) for call, op in log.calls],
        calls_before=log.calls_before,
        orders=log.orders,
        releases=log.releases,
        ops_before=[bisect_left(kept, before) for before in log.ops_before],
    )


def with_small_needs(log: StepLog) -> StepLog:
    """The log with the needs of what is too small to be evicted, of which a step has none: what is too small at one
    size is not at another."""
    needs: list[tuple[int, int]] = []
    small = [(before, order) for order, before, _ in log.asked_small]
    at = 0
    for position, need in enumerate((*log.needs, (-1, log.end_ns))):
        while at < len(small) and small[at][0] <= position:
            needs.append((small[at][1], need[1]))
            at += 1
        needs.append(need)
    releases = [(order, before + more) for (order, before), more in zip(log.releases, log.small_before, strict=True)]
    return replace(log, needs=needs[:-1], releases=releases)


def with_small_needs_beside(log: StepLog, beside: Beside) -> Beside:
    """What a step used beside counted activations, with those needs too. Nobody looked at the device when they came, so
    for each counts what was seen from the need before it on."""
    if len(beside.needs.levels) != len(log.needs) or not beside.saves.levels:
        return beside
    small = Counter(before for _, before, _ in log.asked_small)
    now, needs = (beside.saves.levels[-1], beside.saves.working[-1]), Track()
    for position in range(len(log.needs) + 1):
        found = [now] * small[position]
        if position < len(log.needs):
            now = beside.needs.levels[position], beside.needs.working[position]
            found.append(now)
        needs.levels += [level for level, _ in found]
        needs.working += [working for _, working in found]
    return Beside(beside.saves, needs, beside.making)
