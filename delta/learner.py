"""What is known of the steps: which one this is, how it goes, and what is planned for it.

Steps are told apart by the metadata of what they save, as a prefix: the first save picks the profile that is expected
next if it begins so, else the one used last that does; a save that differs moves on to another profile with the same
beginning, or to observing (design, section 5).
A profile is learned from a step that was recorded from its first op to its last release. Op times are taken as the
least over the recorded steps: a first run pays page faults and cold caches that a replay does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from delta.headroom import Beside
from delta.planner.common import keep_common
from delta.planner.steplog import Plan, StepGraph, StepLog, StepTimes, build_graph
from delta.profile import CRAMPED, MOVED, REFINEMENTS, ROOMIER, TIGHTENINGS, TIGHTEST, Profile, refine, with_beside
from delta.routine import Routine, Way, routine_of, settled, ways_of
from delta.sizes import OBSERVED, Foretold, Sizes
from delta.types import ANY_LOOK, Action, Encoding, Kind, Look, Mode, OpInfo

KINDS = 64  # kinds of step remembered, the least recently used forgotten first
LONGEST = 100_000  # saved tensors in a step that is still followed; something keeps a longer one from ever ending
MOST_OPS = 3 * LONGEST  # ops of a step that is still followed, or between two steps
AIM = 0.99  # plans leave this much of the limit unused: copies are never exactly on time
NOTHING = Beside()
NO_STRAYS: Mapping[int, Action] = {}
OFTEN = 2  # so many steps running that leave their routine are no accident: the next one is recorded whole
WATCHFUL = 4  # after a step that was new and not recorded whole: one like it may come again soon
NOBODY_S = -1  # in place of the record of what nobody was told of

MakePlan = Callable[[StepGraph, int, Mapping[int, Action]], Plan | None]
HeedLate = Callable[[Plan, StepGraph, Collection[int]], Plan]
Amend = Callable[[Plan, StepGraph, Mapping[int, Action]], Plan | None]


@dataclass(slots=True)
class Learner:
    """Follows one step at a time. `make_plan(graph, limit_bytes, forced)` is None for policies that do not plan."""

    min_bytes: int
    make_plan: MakePlan | None
    aim: float = AIM  # plans aim at this share of the limit at first
    replay_ns: int = 0  # what a replay takes beside the op's own time
    profiles: list[Profile] = field(default_factory=list)  # last used first
    current: Profile | None = None
    mode: Mode = Mode.OBSERVE
    log: StepLog = field(default_factory=StepLog)
    packs: int = 0
    recorded: bool = False  # the recorder was on from this step's first op
    missed: bool = False  # a step was new but not recorded whole, and no new one has been learned since
    began_ns: int | None = None
    standing_bytes: int = 0  # resident when the step began: left over from another
    given_up: bool = False  # this step is too long to be learned from
    heed_late: HeedLate | None = None  # for planners that learn from copies back that came late
    amend: Amend | None = None  # a plan, so that some more go as planned
    device_times: Callable[[StepLog], StepTimes] | None = None  # of a step, where the host works ahead of the device
    late: set[int] = field(default_factory=set)  # save orders that backward waited for in this step
    routine: Routine | None = None  # of the step under way, or of the one expected next; None: all is recorded
    selective: bool = True  # whether routines are followed at all
    alone: set[int] = field(default_factory=set)  # save orders of this step that nobody was told of
    sizes: Sizes | None = None  # for planners that can plan for a step that was never seen
    foretold: Foretold | None = None  # what is known of the step under way by its size alone
    asks_all: bool = False  # small storages are asked for like others, or may be: it is not known yet how the step goes
    _following: Profile | None = None
    _whole: int = 0  # steps to come that are recorded whole, whatever is known of them
    _left_midway: bool = False  # the routine of this step was left after some calls
    _recorded_so_far: bool = False  # at the first save of this step, if the routine has let no call pass since
    _before: Profile | None = None  # the kind of step that ended last
    _look: Look = ANY_LOOK  # of the first saved tensor
    _costs: Iterator[tuple[object, int]] | None = None  # of the calls to come, where these are not timed once more

    @property
    def position(self) -> int:
        """Number of needs so far."""
        return len(self.log.needs)

    @property
    def turn(self) -> int:
        """Number of turns that have ended."""
        return len(self.log.turn_ends)

    @property
    def in_step(self) -> bool:
        return self.began_ns is not None

    @property
    def plan(self) -> Plan | None:
        return self.current.plan if self.current is not None and self.mode is Mode.PLANNED else None

    @property
    def beside(self) -> Beside:
        """What steps of this kind used beside counted activations, as far as it is known."""
        return self.current.beside if self.current is not None else NOTHING

    @property
    def beside_saves(self) -> tuple[int, ...]:
        """The most of it, by save order."""
        return self.current.graph.beside_saves if self.current is not None else ()

    @property
    def beside_needs(self) -> tuple[int, ...]:
        """... by need."""
        return self.current.graph.beside_needs if self.current is not None else ()

    @property
    def known_peak_bytes(self) -> int:
        if self.foretold is not None:
            return self.foretold.peak_bytes
        return self.current.unevicted_peak_bytes if self.current is not None else 0

    @property
    def next_bytes(self) -> int:
        """What the next storage to be saved takes, where that is known without a plan; else 0."""
        return 0

    @property
    def is_timed(self) -> bool:
        """Whether the step under way is recorded for its times: one of the first that others are foretold by, or once
        more for a better plan. (Were each new kind timed, a program without two equal steps would do nothing else.)"""
        if self.make_plan is None or not self.recorded:
            return False
        profile = self.current
        if profile is None:
            return len(self.profiles) < (OBSERVED if self.sizes is not None else 1)
        return not profile.idle and profile.refined < REFINEMENTS

    @property
    def all_idle(self) -> bool:
        """Whether every kind of step seen so far fitted."""
        return bool(self.profiles) and not self.missed and all(profile.idle for profile in self.profiles)

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
        key = self._key(signature, look)
        self.log.signatures.append(key)
        self.log.structures.append(look.structure)
        self.log.calls_at.append(len(self.log.calls))
        self.packs += 1
        follows = self.current
        if self.packs == 1 or (
            follows is not None and (self.packs > len(follows.signatures) or follows.signatures[self.packs - 1] != key)
        ):
            self._match()
            if self.routine is not None and self.current is not self._following:
                self.leave_routine()
            if self.packs == 1:
                self._join()

    def _join(self) -> None:
        """Where sizes change, a step is recorded until its first save tells which routine it follows."""
        self.asks_all = False
        if self.sizes is None or not self.foretells or not self.recorded or self._whole:
            return
        if self.current is None or self.current.routine is None:
            self.foretold = self.sizes.foretell(self._look, self.standing_bytes)
            if self.foretold is not None:
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
        if not at or routine is None or profile is None or at >= len(routine.orders):
            return -1
        if profile.signatures[at] != signature:
            return -1
        order = routine.orders[at]
        return order if order < 0 or not routine.most_bytes or nbytes <= routine.most_bytes[order] else -1

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
        for other in islice(needs, len(log.needs), None):
            if other == order or other not in self.alone:
                break
            self.needed(other, now_ns)

    def placed(self, order: int) -> None:
        """The tensor packed last is on the storage of this save order."""
        if not self.given_up:
            self.log.orders.append(order)

    def called(self, call: object, made: bool) -> None:
        """An op of forward ran that `call` stands for; `made`: the last one told of by `op`."""
        if self.given_up:
            return
        self.log.calls.append((call, len(self.log.ops) - 1 if made else -1))
        if self.too_many(len(self.log.calls)):
            self.forget()

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
        if self.alone:  # which nobody has told of
            self._give_up()
        elif routine is not None and routine.begun:
            self._left_midway, self.recorded = True, False
        elif routine is not None and self.in_step:
            self.recorded = self._recorded_so_far

    def lose_track(self) -> None:
        """Some of what this step has saved is not known."""
        self._give_up()

    def _give_up(self) -> None:
        """Follow this step no further: its log would grow for as long as the program runs."""
        self.routine = None
        self.log, self.current, self.mode, self.given_up = StepLog(), None, Mode.OBSERVE, True

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

    @staticmethod
    def too_many(ops: int) -> bool:
        """Whether so many ops are more than are followed."""
        return ops >= MOST_OPS

    def forget(self) -> None:
        """Forget the ops so far, or the log would grow for as long as the program runs. A step under way is followed no
        further; the next one is not taken for recorded whole."""
        if self.in_step:
            self._give_up()
        else:
            self.log, self._left_midway = StepLog(), True

    def op(self, op: OpInfo, nbytes: Mapping[int, int], kinds: Mapping[int, Kind]) -> None:
        if self.given_up:
            return
        self.log.ops.append(op)
        self.log.nbytes.update(nbytes)
        self.log.kinds.update(kinds)

    def time_op(self, op: int, cost_ns: int) -> None:
        """The device has told how long an op took, after the fact."""
        ops = self.log.ops
        position = bisect_left(ops, op, key=lambda known: known.id)
        if position < len(ops) and ops[position].id == op:
            ops[position] = replace(ops[position], cost_ns=cost_ns)

    def saved(self, record: int, nbytes: int, kind: Kind, now_ns: int) -> None:
        """First save of a record in this step."""
        if self.given_up:
            return
        log = self.log
        if kind is not Kind.PARAMETER:
            self._check_size(len(log.saves), nbytes)
        log.saves.append(record)
        log.save_ns.append(now_ns - (self.began_ns or 0))
        log.ops_before.append(len(log.ops))
        log.needs_before.append(len(log.needs))
        log.nbytes[record] = nbytes
        log.kinds[record] = kind

    def _check_size(self, order: int, nbytes: int) -> None:
        """A step that was foretold goes otherwise where a storage is larger than it can be."""
        routine = self.current.routine if self.current is not None else None
        most_bytes = routine.most_bytes if routine is not None else ()
        if most_bytes and (order >= len(most_bytes) or nbytes > most_bytes[order]):
            self.leave_routine()
            self.current, self.mode = None, Mode.OBSERVE

    def encodable(self, record: int, encoding: Encoding) -> None:
        """A record just saved can be kept in a smaller form."""
        if not self.given_up:
            self.log.encodings[record] = encoding

    def not_encodable(self, record: int) -> None:
        """It could not after all."""
        self.log.encodings.pop(record, None)

    def loose(self, order: int) -> None:
        """The program holds the storage no longer: only Delta, or nobody, does."""
        if not self.log.needs and not self.given_up:
            self.log.loose_at.setdefault(order, len(self.log.saves))

    def still_used(self, orders: set[int]) -> None:
        """Before a need: the program or backward uses the storages of these save orders."""
        log = self.log
        log.kept = orders if not log.needs else log.kept & orders

    def asked(self, order: int = -1) -> None:
        """Somebody asks for a saved storage that always stays; `order`: its save order, where that may be learned."""
        log = self.log
        log.asked = True
        if self.recorded and order >= 0 and not self.given_up:
            log.asked_small.append((order, len(log.needs), len(log.saves)))

    def needed(self, order: int, now_ns: int) -> None:
        """Somebody asks for one that may have gone."""
        log = self.log
        log.asked = True
        if not self.given_up:
            log.needs.append((order, now_ns - (self.began_ns or 0)))

    def cramped(self) -> None:
        """What the runtime alone was to make again found no room. Such a step is followed by one that is recorded
        whole, so when it is no accident the ledger has to know of all replays."""
        if self.current is not None:
            self.current.cramped += 1

    def waited_for(self, order: int) -> None:
        """The copy back of this save order was still under way, or not even begun, when its value was needed."""
        if self.mode is Mode.PLANNED:
            self.late.add(order)

    def backward_began(self) -> None:
        self.log.forward_needs = len(self.log.needs)

    def released(self, order: int) -> None:
        if self.given_up:
            return
        self.log.releases.append((order, len(self.log.needs)))
        self.log.small_before.append(len(self.log.asked_small))
        self.log.released_in.append(len(self.log.turn_ends))

    def turn_ended(self, now_ns: int) -> None:
        """What an op of the program needed has been served, and the op has run."""
        if not self.given_up:
            self.log.turn_ends.append((len(self.log.needs), len(self.log.ops), now_ns - (self.began_ns or 0)))

    # -- its end --------------------------------------------------------------------------------------------------
    def end(
        self,
        now_ns: int,
        peak_bytes: int,
        unevicted_peak_bytes: int,
        limit: Callable[[int], int | None],
        evicted: bool,
        forced: Mapping[int, Action],
        strays: Mapping[int, Action] = NO_STRAYS,
        beside: Beside = NOTHING,
    ) -> None:
        """The last handle died. Learns from the step and plans the next one like it. `strays`: what was evicted that
        the plan had not named, by save order, and how. With what it used `beside` counted activations, peak and limit
        are those of the device."""
        if self.given_up:
            self._reset()
            return
        self.log.end_ns = now_ns - (self.began_ns or 0)
        limit_bytes = limit(unevicted_peak_bytes)
        fitted = limit_bytes is None or (not evicted and max(unevicted_peak_bytes, peak_bytes) <= limit_bytes)
        self._learn(peak_bytes, unevicted_peak_bytes, limit_bytes, fitted, forced, strays, beside)
        self._reset()

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
        log = self.log
        if self.foretold is not None and self.sizes is not None:
            as_told = self.routine is not None and self.packs == len(self.foretold.profile.signatures)
            # What a device has in use beside counted activations lowers the limit by itself.
            self.sizes.ended(self.foretold, as_told, peak_bytes, limit_bytes if beside is NOTHING else None)
            self._whole = 0 if as_told else WATCHFUL
            self._expect(None)
            return
        self._whole = max(0, self._whole - 1)
        profile = self._profile_of_step()
        if profile is None and log.asked and (fitted or (self.recorded and log.needs)):
            graph = with_beside(self._graph(), beside)
            profile = Profile(tuple(log.signatures), graph, unevicted_peak_bytes, forced, self.aim, beside=beside)
            profile.calls = tuple(log.calls)
            self.profiles.insert(0, profile)
            del self.profiles[KINDS:]
            self._plan(profile, limit_bytes, fitted)
            self.missed, self._whole = False, 0
        elif profile is None and log.asked:
            self.missed, self._whole = True, WATCHFUL
        elif profile is not None:
            self.profiles.remove(profile)
            self.profiles.insert(0, profile)
            known = profile.plan
            self._review(profile, peak_bytes, limit_bytes, beside)
            over = limit_bytes is not None and peak_bytes > limit_bytes
            settled = profile.plan is known and self._settled(profile, strays, over)
            profile.routine = self._routine(profile) if settled and not (over and profile.can_tighten) else None
        if self.sizes is not None and self.recorded and log.asked:
            self.sizes.learn(log, self._look.sizes, self.replay_ns)
        self._expect(profile)

    def _settled(self, profile: Profile, strays: Mapping[int, Action], over: bool) -> bool:
        """Whether all that went in a step that followed the plan is the plan's. What has to go beside it in two steps
        running will have to in every step, so from then on it is part of the plan, if the plan can take it. Something
        may be late once in a step that held its limit: to record the whole next one for that would take several times
        as long as the step."""
        before, profile.strays = profile.strays, dict(strays)
        if not strays or not (before or over or self.routine is None):
            return True
        if before.keys() != strays.keys() or min(strays) < 0 or profile.plan is None or self.amend is None:
            return False
        known, amended = profile.plan, self.amend(profile.plan, profile.graph, strays)
        if amended is not None:
            profile.plan = amended
        return amended is known

    def _routine(self, profile: Profile) -> Routine | None:
        """How steps of this kind go after one that went as planned."""
        notes = profile.cramped < CRAMPED
        if not self.recorded:
            known = profile.routine
            if known is None or (known.noted and not notes):
                return None
            if self.routine is None:
                known.left += 1
                return known if known.left < OFTEN else None
            known.followed += 1
            known.left = 0
            return known
        if not self.selective or profile.refined < REFINEMENTS or profile.plan is None:
            return None
        graph = profile.graph if tuple(self.log.calls) == profile.calls else self._graph()
        if len(graph.saved) != len(profile.plan.actions):
            return None
        return routine_of(self.log, graph, profile.plan, notes)

    def _expect(self, profile: Profile | None) -> None:
        """A step of this kind has ended: the next one will be of the kind that comes after it most of the time."""
        if self._before is not None:
            self._before.came_before(profile)
        self._before = profile
        following = profile and (profile.then or profile)
        self._following, self.routine, self._costs = following, None, None
        if self.device_times is not None and following is not None and following.refined == REFINEMENTS - 1:
            # The last step whose moments count: events around each op would have it seem longer than it is.
            self._costs = following.costs_ns(self.replay_ns)
        if following is not None and following.routine is not None and not self._whole and not self.foretells:
            self.routine = following.routine
            self.routine.restart()

    def steady_ways(self) -> list[Way] | None:
        """How the ops told of are recorded in a step like the last one, once such steps go as planned; None: all are in
        full."""
        profile = self._before
        if profile is None or profile.plan is None or not self.selective:
            return None
        return ways_of([(None, op) for op in range(len(profile.graph.ops))], profile.graph, profile.plan)

    def steady_kept(self) -> set[int]:
        """The save orders of what is kept in such steps."""
        profile = self._before
        if profile is None or profile.plan is None or not self.selective:
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
        profile.plan, profile.routine, profile.cramped, profile.strays = plan, None, 0, {}
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
        self.log = StepLog()
        self.packs = 0
        self.current = None
        self.mode = Mode.OBSERVE
        self.began_ns = None
        self.given_up = False
        self._left_midway = False
        self.foretold = None
        self.asks_all = self.foretells
        self.alone.clear()
        self.late.clear()

    def _graph(self) -> StepGraph:
        """The step that has ended, with what stays in it for the sake of replays. Where no routine is followed, nothing
        does."""
        return keep_common(self._observed()) if self.selective else self._observed()

    def _observed(self) -> StepGraph:
        """The step that has ended."""
        if self.device_times is not None:
            self.log.timed(self.device_times(self.log))
        return build_graph(self.log, self.min_bytes, self.replay_ns)

    def _profile_of_step(self) -> Profile | None:
        whole = tuple(self.log.signatures)
        return next((p for p in self.profiles if p.signatures == whole), None)

    def _plan(self, profile: Profile, limit_bytes: int | None, fitted: bool) -> None:
        if limit_bytes is None or (fitted and profile.unevicted_peak_bytes <= limit_bytes):
            profile.idle = True
        elif self.make_plan is not None:
            profile.planned_for_bytes = limit_bytes
            standing_bytes = self.standing_bytes + profile.graph.common_bytes
            profile.aim_bytes = int(max(0, limit_bytes - standing_bytes) * profile.squeeze)
            profile.planned_graph = profile.graph
            profile.planned_beside = profile.graph.beside_saves + profile.graph.beside_needs
            profile.plan = self.make_plan(profile.graph, profile.aim_bytes, profile.forced)
            profile.cramped = 0

    def _review(self, profile: Profile, peak_bytes: int, limit_bytes: int | None, beside: Beside) -> None:
        """A step like one before: better op times, and a tighter plan if its peak was over the limit."""
        if profile.idle or limit_bytes is None:
            return
        exact = profile.plan is not None and profile.plan.rehearsed
        again = False
        if self.recorded and profile.refined < REFINEMENTS:
            profile.refined += 1
            late = self.device_times is not None
            known, profile.graph = profile.graph, refine(profile.graph, self._graph(), late)
            profile.calls = tuple(self.log.calls)
            again = not exact or profile.graph.ops != known.ops
        rise_bytes, fall_bytes = self._beside_moved(profile, beside)
        if rise_bytes > MOVED * limit_bytes and profile.tightened < TIGHTENINGS:
            profile.tightened += 1
            again = True
        elif peak_bytes > limit_bytes and not exact and profile.can_tighten:
            profile.tightened += 1
            profile.squeeze = max(TIGHTEST, profile.squeeze * limit_bytes / peak_bytes)
            again = True
        room_bytes = limit_bytes + fall_bytes
        if room_bytes > ROOMIER * profile.planned_for_bytes and profile.relaxed < TIGHTENINGS:
            profile.relaxed += 1
            again = True
        if again:
            self._plan(profile, limit_bytes, fitted=False)
        if self.late and self.heed_late is not None and profile.plan is not None:
            profile.plan = self.heed_late(profile.plan, profile.graph, self.late)

    def _beside_moved(self, profile: Profile, beside: Beside) -> tuple[int, int]:
        """Take in what the step used beside counted activations; by how much that is more than at the last planning at
        any position, and less at its worst one."""
        if self.recorded and beside.needs.levels:
            profile.beside = beside.after(profile.beside)
        profile.graph = with_beside(profile.graph, profile.beside)
        now, then = profile.graph.beside_saves + profile.graph.beside_needs, profile.planned_beside
        rise_bytes = max((fresh - known for fresh, known in zip(now, then, strict=False)), default=0)
        return rise_bytes, max(then, default=0) - max(now, default=0)
