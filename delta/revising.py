"""What becomes of the plan for a kind of step as steps of that kind end: better op times, less or more room to aim at,
what has to go in every step, and the routine that steps follow once they go as planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from delta.beside import Beside
from delta.branches import done_by, read_by_trunk, trunk_of
from delta.planner.common import keep_common
from delta.planner.steplog import Plan, StepGraph, StepLog, StepTimes, build_graph
from delta.prepared import Preparation
from delta.profile import CRAMPED, MOVED, REFINEMENTS, ROOMIER, TIGHTENINGS, TIGHTEST, Profile, refine, with_beside
from delta.routine import Routine, routine_of
from delta.types import Action

AIM = 0.99  # plans leave this much of the limit unused: copies are never exactly on time
OFTEN = 2  # so many steps running that leave their routine are no accident: the next one is recorded whole
NOTHING = Beside()

MakePlan = Callable[[StepGraph, int, Mapping[int, Action]], Plan | None]
PlanOn = Callable[[StepGraph, int, Mapping[int, Action], Mapping[int, Action]], Plan | None]
HeedLate = Callable[[Plan, StepGraph, Collection[int]], Plan]
Amend = Callable[[Plan, StepGraph, Mapping[int, Action]], Plan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step came to. `evicted`: whether anything was, or was to be. `forced`: what rules of the policy say, by
    save order. `strays`: what was evicted that the plan had not named, by save order, and how. `beside`: what was in
    use beside counted activations; None where nobody measured that. Where it is known, peak and limit are those of the
    device."""

    peak_bytes: int
    unevicted_peak_bytes: int
    limit_bytes: int | None
    evicted: bool
    forced: Mapping[int, Action]
    strays: Mapping[int, Action] = field(default_factory=dict)
    beside: Beside | None = None

    @property
    def fitted(self) -> bool:
        if self.limit_bytes is None:
            return True
        return not self.evicted and max(self.unevicted_peak_bytes, self.peak_bytes) <= self.limit_bytes

    @property
    def over(self) -> bool:
        return self.limit_bytes is not None and self.peak_bytes > self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A step that has ended."""

    log: StepLog
    recorded: bool  # from its first op on
    followed: bool  # a routine, to its end
    late: Collection[int]  # save orders that backward waited for
    standing_bytes: int  # resident when it began: left over from another
    outcome: Outcome


@dataclass(slots=True)
class Revising:
    """`make_plan(graph, limit_bytes, forced)` is None for policies that do not plan."""

    min_bytes: int
    make_plan: MakePlan | None
    aim: float = AIM  # plans aim at this share of the limit at first
    replay_ns: int = 0  # what a replay takes beside the op's own time
    selective: bool = True  # whether routines are followed at all
    heed_late: HeedLate | None = None  # for planners that learn from copies back that came late
    amend: Amend | None = None  # a plan, so that some more go as planned
    plan_on: PlanOn | None = None  # ... that does what another one does
    device_times: Callable[[StepLog], StepTimes] | None = None  # of a step, where the host works ahead of the device
    data: Preparation = field(default_factory=Preparation)

    def new(self, ended: Ended) -> Profile:
        """What is known of a kind of step after the first one."""
        outcome = ended.outcome
        beside = outcome.beside or NOTHING
        graph = with_beside(self._graph(ended.log), beside)
        profile = Profile(
            tuple(ended.log.signatures),
            graph,
            outcome.unevicted_peak_bytes,
            outcome.forced,
            self.aim,
            course=ended.log.course,
            beside=beside,
        )
        self._plan(profile, ended)
        return profile

    def revise(self, profile: Profile, ended: Ended) -> None:
        """A step like one before."""
        known = profile.plan
        self._review(profile, ended)
        limit_bytes = ended.outcome.limit_bytes
        if profile.plan is known and limit_bytes is not None:
            profile.over_bytes = ended.outcome.peak_bytes - limit_bytes
        settled = profile.plan is known and self._settled(profile, ended)
        profile.routine = self._routine(profile, ended) if settled else None

    def align(self, profile: Profile, profiles: Iterable[Profile], ended: Ended) -> None:
        """Have a way of a branching program do what larger ones do that begin alike, and follow a routine at once."""
        limit_bytes = ended.outcome.limit_bytes
        if limit_bytes is None or not self.selective or any(profile.graph.needs_before):
            return
        if ended.recorded or profile.trunk is None or profile.trunk.plan is not profile.trunk_plan:
            self._after_trunk(profile, profiles, limit_bytes, ended)
        plan, routine = profile.plan, profile.routine
        if plan is None or len(plan.actions) != len(profile.graph.saved):
            return
        read = read_by_trunk(profile)
        if (routine is not None and not (routine.branches and routine.read >= read)) or (
            routine is None and not (ended.followed and ended.outcome.strays)
        ):
            notes = profile.cramped < CRAMPED
            profile.routine = routine_of(profile.bare.log, profile.graph, plan, notes, profile.bare.aside, read)

    def release(self, profile: Profile, ended: Ended) -> None:
        """The program goes one way nearly always: its steps are planned for themselves again."""
        if profile.routine is not None and profile.routine.branches:
            profile.routine = None
        limit_bytes, profile.trunk = ended.outcome.limit_bytes, None
        if profile.fixed and limit_bytes is not None:
            profile.fixed = {}
            self._plan_for(limit_bytes, profile, ended)

    def _after_trunk(self, profile: Profile, profiles: Iterable[Profile], limit_bytes: int, ended: Ended) -> None:
        found = trunk_of(profile, profiles)
        fixed = done_by(*found, profile) if found is not None else {}
        profile.trunk = found[0] if found is not None else None
        profile.trunk_plan = profile.trunk.plan if profile.trunk is not None else None
        profile.trunk_packs = found[1].packs if found is not None else 0
        if fixed != profile.fixed:
            profile.fixed, profile.idle = fixed, False
            self._plan_for(limit_bytes, profile, ended)

    def observed(self, log: StepLog) -> StepGraph:
        """The step that has ended."""
        if self.device_times is not None:
            log.timed(self.device_times(log))
        return build_graph(self.data.given(log), self.min_bytes, self.replay_ns)

    def _graph(self, log: StepLog) -> StepGraph:
        """... with what stays in it for the sake of replays. Where no routine is followed, nothing does."""
        return keep_common(self.observed(log)) if self.selective else self.observed(log)

    def _plan(self, profile: Profile, ended: Ended) -> None:
        limit_bytes = ended.outcome.limit_bytes
        if limit_bytes is None or (ended.outcome.fitted and profile.unevicted_peak_bytes <= limit_bytes):
            profile.idle = True
        else:
            self._plan_for(limit_bytes, profile, ended)

    def _plan_for(self, limit_bytes: int, profile: Profile, ended: Ended) -> None:
        if self.make_plan is None:
            return
        standing_bytes = ended.standing_bytes + profile.graph.common_bytes
        profile.planned_for_bytes = limit_bytes
        profile.aim_bytes = int(max(0, limit_bytes - standing_bytes) * profile.squeeze)
        profile.planned_graph = profile.graph
        profile.planned_beside = profile.all_beside
        if profile.fixed and self.plan_on is not None:
            profile.plan = self.plan_on(profile.graph, profile.aim_bytes, profile.forced, profile.fixed)
        else:
            profile.plan = self.make_plan(profile.graph, profile.aim_bytes, profile.forced)
        profile.cramped, profile.over_bytes = 0, None

    def _review(self, profile: Profile, ended: Ended) -> None:
        """Better op times, and a tighter plan if the peak was over the limit."""
        outcome, limit_bytes = ended.outcome, ended.outcome.limit_bytes
        if profile.idle or limit_bytes is None:
            return
        exact = profile.plan is not None and profile.plan.rehearsed
        again = False
        if ended.recorded and profile.refined < REFINEMENTS:
            profile.refined += 1
            late = self.device_times is not None
            known = profile.graph
            profile.went(refine(known, self._graph(ended.log), late), ended.log.course)
            again = not exact or profile.graph.ops != known.ops
        rise_bytes, fall_bytes = _beside_moved(profile, ended)
        # Where there was room for it, a better plan would be one for what is measured a little otherwise each time.
        felt = outcome.over or outcome.strays or ended.late
        if felt and rise_bytes > MOVED * limit_bytes and profile.tightened < TIGHTENINGS:
            profile.tightened += 1
            again = True
        elif outcome.over and not exact and profile.can_tighten:
            profile.tightened += 1
            profile.squeeze = max(TIGHTEST, profile.squeeze * limit_bytes / outcome.peak_bytes)
            again = True
        room_bytes = limit_bytes + fall_bytes
        if room_bytes > ROOMIER * profile.planned_for_bytes and profile.relaxed < TIGHTENINGS:
            profile.relaxed += 1
            again = True
        if again:
            self._plan_for(limit_bytes, profile, ended)
        if ended.late and self.heed_late is not None and profile.plan is not None:
            profile.plan = self.heed_late(profile.plan, profile.graph, ended.late)

    def _settled(self, profile: Profile, ended: Ended) -> bool:
        """Whether all that went in a step that followed the plan is the plan's. What has to go beside it in two steps
        running will have to in every step, so from then on it is part of the plan, if the plan can take it. Something
        may be late once in a step that held its limit: to record the whole next one for that would take several times
        as long as the step."""
        strays = ended.outcome.strays
        before, profile.strays = profile.strays, dict(strays)
        if not strays or not (before or ended.outcome.over or not ended.followed):
            return True
        if before.keys() != strays.keys() or min(strays) < 0 or profile.plan is None or self.amend is None:
            return False
        known, amended = profile.plan, self.amend(profile.plan, profile.graph, strays)
        if amended is not None:
            profile.plan = amended
        return amended is known

    def _routine(self, profile: Profile, ended: Ended) -> Routine | None:
        """How steps of this kind go after one that went as planned."""
        notes = profile.cramped < CRAMPED
        if not ended.recorded:
            known = profile.routine
            if known is None or (known.noted and not notes):
                return None
            if not ended.followed:
                known.left += 1
                return known if known.left < OFTEN else None
            known.followed += 1
            known.left = 0
            return known
        if not self.selective or profile.refined < REFINEMENTS or profile.plan is None:
            return None
        graph = profile.graph if ended.log.calls == profile.course.calls else self._graph(ended.log)
        if len(graph.saved) != len(profile.plan.actions):
            return None
        return routine_of(ended.log, graph, profile.plan, notes)


def _beside_moved(profile: Profile, ended: Ended) -> tuple[int, int]:
    """Take in what the step used beside counted activations; by how much that is more than at the last planning at any
    position, and less at its worst one."""
    beside = ended.outcome.beside or NOTHING
    # What moves a little where nobody records is no reason to plan anew. What brought a step over its budget is.
    heard = ended.recorded or (ended.outcome.over and beside.places == profile.beside.places)
    if heard and beside.needs.levels:
        profile.beside = beside.after(profile.beside)
    profile.graph = with_beside(profile.graph, profile.beside)
    now, then = profile.all_beside, profile.planned_beside
    rise_bytes = max((fresh - known for fresh, known in zip(now, then, strict=False)), default=0)
    return rise_bytes, max(then, default=0) - max(now, default=0)
