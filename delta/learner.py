"""What is known of the steps: which one this is, how it goes, and what is planned for it.

Steps are told apart by the metadata of what they save, as a prefix: the first save picks the profile that is expected
next if it begins so, else the one used last that does; a save that differs moves on to another profile with the same
beginning, or to observing (design, section 5).
A profile is learned from a step that was recorded from its first op to its last release. Op times are taken as the
least over the recorded steps: a first run pays page faults and cold caches that a replay does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from delta.beside import Beside
from delta.branches import Branching
from delta.planner.steplog import Plan, StepGraph
from delta.profile import REFINEMENTS, Profile
from delta.revising import NOTHING, Ended, Outcome, Revising
from delta.routine import Routine, Way, settled, ways_of
from delta.sizes import OBSERVED, Foretold, Sizes
from delta.types import ANY_LOOK, Action, Kind, Look, Mode
from delta.underway import LONGEST, Underway

KINDS = 64  # kinds of step remembered, the least recently used forgotten first
WATCHFUL = 4  # after a step that was new and not recorded whole: one like it may come again soon
NOBODY_S = -1  # in place of the record of what nobody was told of


@dataclass(slots=True)
class Learner(Underway):
    """Follows one step at a time."""

    revising: Revising
    profiles: list[Profile] = field(default_factory=list)  # last used first
    current: Profile | None = None
    mode: Mode = Mode.OBSERVE
    missed: bool = False  # a step was new but not recorded whole, and no new one has been learned since
    routine: Routine | None = None  # of the step under way, or of the one expected next; None: all is recorded
    widest_bytes: int = 0  # unevicted peak of the largest way that a program of several may go, as the step has begun
    alone: set[int] = field(default_factory=set)  # save orders of this step that nobody was told of
    sizes: Sizes | None = None  # for planners that can plan for a step that was never seen
    foretold: Foretold | None = None  # what is known of the step under way by its size alone
    asks_all: bool = False  # small storages are asked for like others, or may be: it is not known yet how the step goes
    _spare_bytes: int | None = None  # see `Foretold`; less by what storages have been larger, more by what smaller
    _following: Profile | None = None
    _whole: int = 0  # steps to come that are recorded whole, whatever is known of them
    _otherwise: bool = False  # this step has saved something, and then gone otherwise than expected
    _branching: Branching = field(init=False)
    _recorded_so_far: bool = False  # at the first save of this step, if the routine has let no call pass since
    _before: Profile | None = None  # the kind of step that ended last
    _look: Look = ANY_LOOK  # of the first saved tensor
    _guessed: Beside = field(default_factory=Beside)  # see `beside`
    _guessed_most: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # ... by save order, and by need
    _costs: Iterator[tuple[object, int]] | None = None  # of the calls to come, where these are not timed once more

    def __post_init__(self) -> None:
        self._branching = Branching(possible=self.revising.plan_on is not None)

    @property
    def plan(self) -> Plan | None:
        return self.current.plan if self.current is not None and self.mode is Mode.PLANNED else None

    @property
    def beside(self) -> Beside:
        """What steps of this kind used beside counted activations, as far as it is known; of a kind that is new, what
        such steps of other sizes did."""
        return self.current.beside if self.current is not None else self._guessed

    @property
    def beside_saves(self) -> tuple[int, ...]:
        """The most of it, by save order."""
        return self.current.graph.beside_saves if self.current is not None else self._guessed_most[0]

    @property
    def beside_needs(self) -> tuple[int, ...]:
        """... by need."""
        return self.current.graph.beside_needs if self.current is not None else self._guessed_most[1]

    def _guess_beside(self) -> Beside:
        """Of the step that has begun, of which no kind is known."""
        return self.sizes.beside(self._look) if self.sizes is not None and self._look is not ANY_LOOK else NOTHING

    @property
    def known_peak_bytes(self) -> int:
        if self.foretold is not None:
            return self.foretold.peak_bytes
        return max(self.widest_bytes, self.current.unevicted_peak_bytes if self.current is not None else 0)

    @property
    def staying(self) -> frozenset[int]:
        """While a known kind of step saves: the save orders of what may not go in it, such as what the program never
        lets go of. From its first need on the program is asked what it uses, each time."""
        return self.current.staying if self.current is not None and not self.log.asked else frozenset()

    @property
    def next_bytes(self) -> int:
        """What the next storage to be saved takes, where that is known without a plan; else 0."""
        return 0

    @property
    def is_timed(self) -> bool:
        """Whether the step under way is recorded for its times: one of the first that others are foretold by, or once
        more for a better plan. (Were each new kind timed, a program without two equal steps would do nothing else.)"""
        if self.revising.make_plan is None or not self.recorded:
            return False
        profile = self.current
        if profile is None:
            return len(self.profiles) < (OBSERVED if self.sizes is not None else 1)
        return not profile.idle and profile.refined < REFINEMENTS

    @property
    def measures(self) -> bool:
        """Whether what the step under way uses beside counted activations is still to be found out: that of the first
        steps of a kind, or by which others are foretold."""
        return self.is_timed or (self.current is None and self.sizes is None)

    @property
    def all_idle(self) -> bool:
        """Whether every kind of step seen so far fitted."""
        return bool(self.profiles) and not self.missed and all(profile.idle for profile in self.profiles)

    def goes_on(self, look: Look) -> bool:
        """Whether a step that begins with such a tensor may be like those before, all of which fitted. What is larger
        than they were is told by its bytes."""
        return True

    def nearest(self, storages: int, step_bytes: int) -> tuple[int, int]:
        """How much the first `storages` are in the kind of step where that is nearest to `step_bytes`, and what all of
        it is at most; 0 where no kind is known."""
        known = [(sum(each.graph.saved_bytes[:storages]), each.unevicted_peak_bytes) for each in self.profiles]
        return min(filter(itemgetter(0), known), key=lambda each: abs(each[0] - step_bytes), default=(0, 0))

    @property
    def by_structure(self) -> bool:
        """Whether the saved tensors of the step under way are told apart by what does not depend on sizes."""
        return self.foretold is not None

    @property
    def foretells(self) -> bool:
        """Whether sizes change from step to step, and the first save tells how a step goes."""
        return self.sizes is not None and self.sizes.ready

    @property
    def steps_alike(self) -> int:
        """How many steps have gone by the routine of the kind that ended last."""
        routine = self._before.routine if self._before is not None else None
        return routine.followed if routine is not None else 0

    @property
    def wants_recorder(self) -> bool:
        """Whether the next step should be recorded: unless every kind of step fits.

        A plan that only swaps needs no recipes, but it does need the recorder's eye: a storage may be written after its
        copy out has begun, through a view with a version counter of its own (`unsafe_chunk`, as LSTM cells use it).
        """
        return not self.all_idle

    # -- during a step --------------------------------------------------------------------------------------------
    def packed(self, signature: int, now_ns: int, look: Look = ANY_LOOK) -> None:
        """A tensor was packed; decides the mode at the first one and checks it at the others."""
        if self.began_ns is None:
            self.began_ns = now_ns
        if self.packs == LONGEST:
            self._give_up()
        if self.given_up:
            return
        if not self.packs:
            self.log.calls_before = len(self.log.calls)
            self._look = look
            self.widest_bytes = self._widest(signature) if self._branching.on else 0
        key = self._key(signature, look)
        self.log.signatures.append(key)
        self.log.structures.append(look.structure if look is not ANY_LOOK else signature)  # all that is known of it
        self.log.calls_at.append(len(self.log.calls))
        self.packs += 1
        if self.packs == 1:
            self._match_or_leave()
            self._join()
            if self.current is None:
                self._guessed = guess = self._guess_beside()
                self._guessed_most = guess.saves.most_bytes, guess.needs.most_bytes
        elif self.current is not None and self.current.signatures[self.packs - 1 : self.packs] != (key,):
            self._match_or_leave()

    def _match_or_leave(self) -> None:
        """Which kind of step this is, by what it has saved; its routine ends where that is not the kind followed."""
        self._match()
        if self.routine is not None and self.current is not self._following:
            self.leave_routine()

    def _widest(self, signature: int) -> int:
        """A share is one of that: nobody knows at the first save, with this signature, which way the step goes."""
        alike = (profile.unevicted_peak_bytes for profile in self.profiles if profile.signatures[:1] == (signature,))
        return max(alike, default=0)

    def _join(self) -> None:
        """Where sizes change, a step is recorded until its first save tells which routine it follows."""
        self.asks_all = False
        if self.sizes is None or not self.foretells or not self.recorded or self._whole:
            return
        if self.current is None or self.current.routine is None:
            self.foretold = self.sizes.foretell(self._look, self.standing_bytes)
            if self.foretold is not None:
                self._spare_bytes = self.foretold.spare_bytes
                self.current, self.mode, self.asks_all = self.foretold.profile, Mode.PLANNED, True
        self._follow()

    def _follow(self) -> None:
        """The step, which is recorded, goes on by the routine of the kind that it turned out to be, if that has one."""
        if self.current is None or self.current.routine is None:
            return
        self._following, self.routine, self.recorded = self.current, self.current.routine, False
        self.routine.restart()
        for call, _ in self.log.calls:
            self.routine.way(call)

    def expects(self, signature: int, nbytes: int) -> int:
        """The save order of the storage of `nbytes` that the next tensor is saved on, if it is the one that the routine
        expects and is kept, or dropped at once; else -1."""
        at, routine, profile = self.packs, self.routine, self.current
        if not at or routine is None or profile is None:
            return -1
        if at >= len(routine.orders) or profile.signatures[at] != signature:
            return self.expects(signature, nbytes) if self.swerve(signature=signature) is not None else -1
        order = routine.orders[at]
        if order < 0 or not routine.most_bytes or self._may_take(nbytes - routine.most_bytes[order]):
            return order
        return -1

    def came(self, signature: int, order: int) -> None:
        """That tensor was packed."""
        log = self.log
        log.signatures.append(signature)
        log.orders.append(order)
        self.packs += 1

    def came_first(self, signature: int, order: int, record: int, nbytes: int, now_ns: int) -> None:
        """... the first one on its storage, an activation with that number."""
        self.came(signature, order)
        self.saved(record, nbytes, Kind.ACTIVATION, now_ns)

    def came_alone(self, packs: int, now_ns: int) -> list[int]:
        """So many tensors have been packed by now, and nobody was told of the last ones: they were those that the
        routine expects. Returns the save orders of the storages that are new."""
        routine, profile, log = self.routine, self.current, self.log
        assert routine is not None and routine.alone is not None and profile is not None
        log.signatures += profile.signatures[self.packs : packs]
        orders = routine.orders[self.packs : packs]
        log.orders += orders
        self.packs, new = packs, []
        for order in orders:
            if order == len(log.saves):
                self.saved(NOBODY_S, routine.alone.nbytes[order], Kind.ACTIVATION, now_ns)
                new.append(order)
        self.alone.update(new)
        return new

    def needed_alone(self, order: int, now_ns: int) -> None:
        """Before a need of this storage those of others came that nobody was told of."""
        profile, log = self.current, self.log
        needs = profile.graph.needs if profile is not None and self.routine is not None else ()
        while len(log.needs) < len(needs):
            other = needs[len(log.needs)]
            if other == order or other not in self.alone:
                break
            self.needed(other, now_ns)

    def known_cost_ns(self, call: object) -> int | None:
        """How long the op takes that `call` stands for, the next one to be recorded; None: it is to be timed."""
        if self.routine is not None:
            return self.routine.cost_ns
        if self._costs is None:
            return None
        known, cost_ns = next(self._costs, (None, 0))
        if known is call:
            return cost_ns
        self._costs = None  # the step goes otherwise
        return None

    def begin(self, recording: bool) -> None:
        """The first tensor of a step is about to be packed. `recording`: the recorder has been on since the last step
        ended."""
        self._recorded_so_far = recording and not self._left_midway
        self.recorded = self._recorded_so_far and self.routine is None

    def leave_routine(self) -> None:
        """The step goes otherwise: it is recorded from here on."""
        routine, self.routine = self.routine, None
        if routine is not None and self.packs and self.current is self._following and routine.lacks_data:
            self.revising.data.differs()
        self._otherwise |= routine is not None and self.packs > 1
        if self.alone:  # which nobody has told of
            self._give_up()
        elif routine is not None and routine.begun:
            self._left_midway, self.recorded = True, False
        elif routine is not None and self.in_step:
            self.recorded = self._recorded_so_far

    def swerve(self, call: object | None = None, signature: int | None = None) -> Routine | None:
        """Another call, or save, has come than the routine expects. If the step goes like another kind up to here and
        on, and that one's routine has done the same so far, it goes on by that one, which is returned."""
        left, current, log = self.routine, self.current, self.log
        if not self._branching.on or left is None or current is None or current.plan is None:
            return None
        so_far = (*log.signatures, signature) if signature is not None else tuple(log.signatures)
        done = current.plan.actions[: len(log.saves)]
        for profile in self.profiles:
            routine, plan = profile.routine, profile.plan
            if routine is None or plan is None or profile.signatures[: len(so_far)] != so_far:
                continue
            if plan.actions[: len(done)] == done and routine.go_on_from(left, call, self.packs):
                self.current = self._following = profile
                self.mode, self.routine, self._otherwise = Mode.PLANNED, routine, True
                return routine
        return None

    def _give_up(self) -> None:
        super(Learner, self)._give_up()
        self.routine, self.current, self.mode = None, None, Mode.OBSERVE

    def _key(self, signature: int, look: Look) -> int:
        """What steps are told apart by."""
        return signature

    def _find(self, so_far: tuple[int, ...]) -> Profile | None:
        """What is known of steps that begin so: the kind that is expected now, else the one seen last."""
        kinds = self.profiles if self._following is None else [self._following, *self.profiles]
        return next((p for p in kinds if p.signatures[: self.packs] == so_far), None)

    def _match(self) -> None:
        self.current = self._find(tuple(self.log.signatures))
        if self.current is None:
            self.mode = Mode.OBSERVE
        elif self.current.idle:
            self.mode = Mode.IDLE
        else:
            self.mode = Mode.PLANNED if self.current.plan is not None else Mode.OBSERVE

    def surprise(self) -> None:
        """The budget was missed where the step was thought to fit: watch the rest of it."""
        if self.mode is Mode.IDLE:
            self.mode = Mode.OBSERVE
            if self.current is not None:
                self.current.idle = False

    def saved(self, record: int, nbytes: int, kind: Kind, now_ns: int) -> None:
        """First save of a record in this step. A step that was given up has no sizes to hold it against."""
        if kind is not Kind.PARAMETER:
            self._check_size(len(self.log.saves), nbytes)
        super(Learner, self).saved(record, nbytes, kind, now_ns)

    def _check_size(self, order: int, nbytes: int) -> None:
        """A step that was foretold goes otherwise where a storage is larger than it can be."""
        routine = self.current.routine if self.current is not None else None
        most_bytes = routine.most_bytes if routine is not None else ()
        if not most_bytes:
            return
        if order >= len(most_bytes) or not self._may_take(nbytes - most_bytes[order]):
            self.leave_routine()
            self.current, self.mode = None, Mode.OBSERVE
        elif self._spare_bytes is not None:
            self._spare_bytes -= nbytes - most_bytes[order]

    def _may_take(self, more_bytes: int) -> bool:
        """Whether a storage may be larger by so much than foretold."""
        return more_bytes <= (self._spare_bytes or 0)

    def cramped(self) -> None:
        """What the runtime alone was to make again found no room. Such a step is followed by one that is recorded
        whole, so when it is no accident the ledger has to know of all replays."""
        if self.current is not None:
            self.current.cramped += 1

    def waited_for(self, order: int) -> None:
        """The copy back of this save order was still under way, or not even begun, when its value was needed."""
        if self.mode is Mode.PLANNED:
            self.late.add(order)

    # -- its end --------------------------------------------------------------------------------------------------
    def end(self, now_ns: int, outcome: Outcome) -> None:
        """The last handle died. Learns from the step and plans the next one like it."""
        if not self.given_up:
            self.log.end_ns = now_ns - (self.began_ns or 0)
            if self.recorded and self.log.asked and self.revising.make_plan is not None:
                self.revising.data.saw(self.log)
            if self.revising.data.turned():
                self._forget_steps()
            self._learn(outcome)
        self._reset()

    def _forget_steps(self) -> None:
        """Of what is known of steps nothing is true any more."""
        self.profiles.clear()
        self._following = self._before = self.current = self.foretold = None
        if self.sizes is not None:
            self.sizes.forget()

    def _learn(self, outcome: Outcome) -> None:
        log = self.log
        if self.foretold is not None and self.sizes is not None:
            as_told = self.routine is not None and self.packs == len(self.foretold.profile.signatures)
            # A plan that is not told what a device has in use beside counted activations has a lower limit by itself.
            told = outcome.beside is None or self.foretold.profile.all_beside
            limit_bytes = outcome.limit_bytes if told else None
            self.sizes.ended(self.foretold, as_told, outcome.peak_bytes, limit_bytes)
            self._whole = 0 if as_told else WATCHFUL
            self._expect(None)
            return
        self._whole = max(0, self._whole - 1)
        profile, ended = self._profile_of_step(), self._ended(outcome)
        if profile is None and log.asked and (outcome.fitted or self.recorded):
            profile = self.revising.new(ended)
            self.profiles.insert(0, profile)
            del self.profiles[KINDS:]
            self.missed, self._whole = False, 0
        elif profile is None and log.asked:
            self.missed, self._whole = True, WATCHFUL
        elif profile is not None:
            self.profiles.remove(profile)
            self.profiles.insert(0, profile)
            if not (self._left_midway and self._branching.on):  # else it has not gone by its plan from the start
                self.revising.revise(profile, ended)
        if self.widest_bytes:
            self._branching.came(outcome.unevicted_peak_bytes / self.widest_bytes)
        if self._branching.on and self._left_midway and outcome.over:
            self._branching.overran()
        if profile is not None and self._branching.on:
            self.revising.align(profile, self.profiles, ended)
        elif profile is not None:
            self.revising.release(profile, ended)
        if self.sizes is not None and self.recorded and log.asked and profile is not None:
            self.sizes.learn(
                log,
                self._look.sizes,
                self.revising.replay_ns,
                profile,
                held=not outcome.over,
                beside=outcome.beside or NOTHING,
            )
        self._expect(profile)

    def _ended(self, outcome: Outcome) -> Ended:
        return Ended(
            log=self.log,
            recorded=self.recorded,
            followed=self.routine is not None,
            late=self.late,
            standing_bytes=self.standing_bytes,
            outcome=outcome,
        )

    def _expect(self, profile: Profile | None) -> None:
        """A step of this kind has ended: the next one will be of the kind that comes after it most of the time."""
        if self._before is not None:
            self._before.came_before(profile)
        self._before = profile
        following = profile and (profile.then or profile)
        self._following, self.routine, self._costs = following, None, None
        if self.revising.device_times is not None and following is not None and following.refined == REFINEMENTS - 1:
            # The last step whose moments count: events around each op would have it seem longer than it is.
            self._costs = following.costs_ns(self.revising.replay_ns)
        recorded = self._whole or self._branching.wary or self.foretells
        if following is not None and following.routine is not None and not recorded:
            self.routine = following.routine
            self.routine.restart()

    def steady_ways(self) -> list[Way] | None:
        """How the ops told of are recorded in a step like the last one, once such steps go as planned; None: all are in
        full."""
        profile = self._before
        if profile is None or profile.plan is None or not self.revising.selective:
            return None
        return ways_of([(None, op) for op in range(len(profile.graph.ops))], profile.graph, profile.plan)

    def steady_kept(self) -> set[int]:
        """The save orders of what is kept in such steps."""
        profile = self._before
        if profile is None or profile.plan is None or not self.revising.selective:
            return set()
        return settled(profile.graph, profile.plan, Action.KEEP)

    def actions_for(self, graph: StepGraph) -> tuple[Action, ...]:
        """Those of the plan followed so far in steps like this; empty where there is none."""
        plans = (p.plan for p in self.profiles if p.graph is graph and p.plan is not None)
        return next((plan.actions for plan in plans if len(plan.actions) == len(graph.saved)), ())

    def planned_as(self, graph: StepGraph, aim_bytes: int) -> Profile | None:
        """The kind of step that is planned for just this, if there is one still."""
        planned = (p for p in self.profiles if p.planned_graph is graph and p.aim_bytes == aim_bytes)
        return next((profile for profile in planned if profile.plan is not None), None)

    def follow(self, profile: Profile, plan: Plan) -> None:
        """Steps of this kind go by another plan from here on: what it replays has to be recorded."""
        profile.plan, profile.routine, profile.cramped, profile.strays, profile.over_bytes = plan, None, 0, {}, None
        if self._following is profile:
            self.leave_routine()

    def source_of(self, order: int) -> tuple[str, str] | None:
        """Name and module of the op that makes what is saved in that order, in steps that go like this one."""
        graph = self.current.graph if self.current is not None else None
        if graph is None or not 0 <= order < len(graph.saved):
            return None
        made = graph.nodes[graph.saved[order]].op
        return (graph.ops[made].name, graph.ops[made].module) if made is not None else None

    def abandon(self) -> None:
        """A step has ended that there is nothing to be learned from."""
        self._expect(None)
        self._reset()

    def _reset(self) -> None:
        self._branching.ended(self._otherwise)
        self._otherwise = False
        super(Learner, self)._reset()
        self.current = None
        self.mode = Mode.OBSERVE
        self.foretold = self._spare_bytes = None
        self._guessed, self._guessed_most = NOTHING, ((), ())
        self.widest_bytes = 0
        self.asks_all = self.foretells
        self.alone.clear()

    def _profile_of_step(self) -> Profile | None:
        whole = tuple(self.log.signatures)
        return next((p for p in self.profiles if p.signatures == whole), None)
