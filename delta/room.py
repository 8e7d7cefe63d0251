"""Making room: lets go of what `Candidates` and the plan name until the limit holds, and says when it cannot.

`Room` is the engine's part for everything that lowers what is resident; `recall.py` is the part that raises it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from delta.budget import Budget
from delta.candidates import Candidates, Going
from delta.config import Policy
from delta.costs import LinkQueue
from delta.errors import BudgetError
from delta.following import Following
from delta.headroom import HeadRoom
from delta.keeping import Keeping
from delta.layout import Area, Layout, Place
from delta.learner import Learner
from delta.ledger import Ledger
from delta.planner import Plan
from delta.record import Host, Record
from delta.routine import Routine
from delta.shortage import Shortage, parts_of
from delta.totals import Totals
from delta.types import Action, AwaitIn, AwaitOut, Drop, Encode, Encoding, Hold, Instruction, SwapOut

# What was resident is added up anew, record by record, for a moment that is worse than the worst one known by this: in
# a step that cannot be held every save may be the worst so far.
WORSE = 1.01


class Room:
    """Keeps what is resident under the limit of `budget`."""

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        ledger: Ledger,
        queue: LinkQueue,
        learner: Learner,
        totals: Totals,
        keeping: Keeping,
        layout: Layout | None = None,
        announced: bool = False,
        headroom: HeadRoom | None = None,
    ) -> None:
        """`announced`: only Delta refers to storages, so what it lets go of is free at once. `layout`: None where the
        device has no addresses; then storages go one by one, whatever the policy says. `headroom`: where the budget is
        one on the device."""
        self._policy, self._budget, self._ledger = policy, budget, ledger
        self._queue, self._learner, self._totals = queue, learner, totals
        self._keeping = keeping
        self._announced = announced
        self._headroom = headroom
        self._layout = layout if policy.filter.choose == "window" else None
        self.candidates = Candidates(policy, ledger, queue, learner)
        self.following = Following(ledger, learner, self.candidates, self.carry_out)
        self.evicted = False  # something was evicted in this step
        self.strays: dict[int, Action] = {}  # ... that no plan had named, by save order, and how it went
        self.wanted: set[int] = set()  # save orders that the plan has come back by now, and that need not go for room
        self.turned_back: set[int] = set()  # their copies back are under way, and they go again when those end
        self._encoded_bytes = 0  # of the largest encoded form there may be in this step
        self._worst: Shortage | None = None  # of this step

    @property
    def limit_bytes(self) -> int | None:
        """Bytes of saved activations that may be resident now; None: as many as there are."""
        return self._limit(self._headroom.here_bytes if self._headroom is not None else None)

    def limit_until(self, order: int) -> int | None:
        """The limit for what stays until a storage, by save order, is used next: no op until then may want for room."""
        plan, headroom = self._learner.plan, self._headroom
        if headroom is None or plan is None:
            return self.limit_bytes
        position = self._learner.position
        return self._limit(headroom.until_need(next((need for need in plan.next_needs[order] if need >= position), 0)))

    @property
    def _firm(self) -> bool:
        """Whether the limit stays: a share of what has been saved so far is less than it will be when the step has been
        seen whole."""
        return bool(not self._budget.is_share or self._learner.known_peak_bytes or self._learner.log.needs)

    def _limit(self, beside_bytes: int | None) -> int | None:
        peak_bytes = max(self._ledger.peak_unevicted_bytes, self._learner.known_peak_bytes)
        return self._budget.limit_bytes(peak_bytes, beside_bytes)

    def new_step(self) -> None:
        """Forget what is only true within one step."""
        self.candidates.new_step()
        self.following.new_step()
        self._encoded_bytes = 0
        self.evicted, self.strays = False, {}
        self.wanted.clear()
        self._worst = None

    def offer(self, rec: Record, encoding: Encoding) -> None:
        """The record may be kept in this form."""
        rec.encoding = encoding
        self._encoded_bytes = max(self._encoded_bytes, encoding.nbytes)

    @property
    def _spare_bytes(self) -> int:
        """What is kept free online: an encoded form takes room before its making gives any. A plan counts it."""
        if not self._encoded_bytes:
            return 0
        plan = self._learner.plan
        return self._encoded_bytes if plan is None or plan.idle else 0

    def make_for_next(self, plan: Plan, order: int, now_ns: int) -> list[Instruction]:
        """Keep the next save under the limit too. The plan knows by how much it should raise what is resident; copies
        out that are late by then are waited for as if nothing else would go."""
        routine = self._learner.routine
        if routine is not None and order < len(routine.coming_bytes) and self.has_for(routine, order, 0):
            return []
        if order + 1 >= len(plan.saved_bytes):
            return self.make(0, now_ns)
        limit = self._limit_at(order + 1)
        resident_bytes = self._ledger.resident_bytes
        awaits: list[AwaitOut] = []
        if limit is not None:
            awaits, _ = self.await_out(resident_bytes + plan.saved_bytes[order + 1] - limit)
        awaited = [self._ledger[instruction.record] for instruction in awaits]
        freed_bytes = sum(rec.nbytes for rec in awaited if not self._floats(rec))
        rise = max(0, plan.forward_bytes[order + 1] - plan.forward_bytes[order])
        rise = max(rise, self._unforeseen_bytes(plan, order + 1))
        if self._headroom is not None:  # which has room for the making of it here, and there for what comes then
            rise = max(0, rise + self._headroom.from_save(order + 1) - self._headroom.here_bytes)
        # What is awaited may be what the plan counts on anyway: it brings no more than what lies over the plan now.
        over_plan_bytes = max(0, resident_bytes - plan.forward_bytes[order])
        coming_bytes = rise - min(freed_bytes, over_plan_bytes)
        return [*awaits, *self.make(coming_bytes, now_ns, beside=frozenset(rec.id for rec in awaited))]

    def make_for_save(self, now_ns: int) -> list[Instruction]:
        """A need has been served. Where the step saves again before the next one, keep that under the limit too."""
        plan, profile, log = self._learner.plan, self._learner.current, self._learner.log
        order = len(log.saves)
        if plan is None or profile is None or profile.graph.needs_before[order : order + 1] != (len(log.needs),):
            return []
        coming_bytes = self._unforeseen_bytes(plan, order)
        return self.make(coming_bytes, now_ns, guess=True) if coming_bytes else []

    def _unforeseen_bytes(self, plan: Plan, order: int) -> int:
        """What a save may add to what is resident, where a step saves after needs (backward of a backward) and its plan
        does not hold the limit: then other things go than the plan says, and what it has go by then may have gone."""
        profile, limit = self._learner.current, self._limit_at(order)
        if profile is None or not any(profile.graph.needs_before[-1:]) or limit is None or plan.peak_bytes <= limit:
            return 0
        return plan.saved_bytes[order]

    def await_out(self, over_bytes: int, beside: Collection[int] = ()) -> tuple[list[AwaitOut], int]:
        """Wait for copies out until that much less is resident, by those alone that free their bytes at once; returns
        what is over when all have. Those `beside` are waited for already."""
        out: list[AwaitOut] = []
        if over_bytes <= 0 or not self._ledger.leaving_bytes:
            return out, over_bytes
        if self._learner.log.needs and self._keeping.any:
            self._keeping.find_used()
        records = self._ledger.records.values()
        leaving = [rec for rec in records if rec.host is Host.LEAVING and rec.id not in beside]
        leaving = [rec for rec in leaving if not self.candidates.in_use(rec)]  # it would free nothing
        # What the program still uses would stay when its copy is whole: wait for the others first.
        # And what the plan has come back by now would have to at once.
        leaving.sort(key=lambda rec: (rec.saved_at in self.wanted, rec.saved_at not in self._learner.log.loose_at))
        over_now_bytes = over_bytes
        for rec in leaving:
            if over_now_bytes > 0:
                over_bytes -= rec.nbytes
                over_now_bytes -= 0 if self._floats(rec) else rec.nbytes
                self.wanted.discard(rec.saved_at)
                out.append(AwaitOut(rec.id))
        return out, over_bytes

    def await_for(self, nbytes: int) -> list[AwaitOut]:
        """Wait for copies out until `nbytes` more fit, as far as that helps."""
        limit = self.limit_bytes
        if limit is None:
            return []
        return self.await_out(self._ledger.resident_bytes + nbytes + self._spare_bytes - limit)[0]

    def await_for_save(self, routine: Routine, order: int, nbytes: int) -> list[AwaitOut]:
        """The same for a save of so much, and for the next one."""
        return self.await_out(self._over(routine, order, nbytes))[0]

    def make(
        self, extra_bytes: int, now_ns: int, guess: bool = False, beside: Collection[int] = ()
    ) -> list[Instruction]:
        """Evict until `extra_bytes` more fit; with `guess` they may never come, and nobody is told. For the copies out
        of the records `beside` somebody waits already."""
        limit = self.limit_bytes
        if limit is None or (self._layout is not None and self._layout.bounded):
            return []  # no limit, or who finds no place asks for one: `make_place`
        over = self._ledger.resident_bytes + extra_bytes - limit
        spare = self._spare_bytes
        if over + spare <= 0:
            return []
        if over > 0:
            self._learner.surprise()
        if over > extra_bytes:  # resident already
            self._note(self._ledger.resident_bytes, 0)
        out, over = self.following.in_turn(over, now_ns)
        if over + spare <= 0:
            return out
        awaited, over = self.await_out(over + spare, beside)
        out += awaited
        if over > 0:
            out += self.evict(over, now_ns, extra_bytes, guess, spare, out)
        return out

    def evict(
        self,
        over_bytes: int,
        now_ns: int,
        coming_bytes: int = 0,
        guess: bool = False,
        spare_bytes: int = 0,
        before: Sequence[Instruction] = (),
    ) -> list[Instruction]:
        """Let go of `over_bytes`, of which `coming_bytes` are not there yet and `spare_bytes` need not be free. What
        goes by the instructions `before` is taken off already."""
        out, over_bytes = self._evict(over_bytes, now_ns, coming_bytes, spare_bytes)
        coming_bytes = max(0, coming_bytes)
        lenient_bytes = spare_bytes + (coming_bytes if guess else 0)
        if over_bytes > lenient_bytes:
            turned_back, over_bytes = self._turn_back(over_bytes, lenient_bytes)
            out += turned_back
        if over_bytes > lenient_bytes:
            self._short(over_bytes - lenient_bytes, 0 if guess else coming_bytes, [*before, *out])
        return out

    def rescue(self, now_ns: int) -> list[Instruction]:
        """The device is out of memory: let go of all that can go. That something stays is no limit missed."""
        awaited, left_bytes = self.await_out(self._ledger.resident_bytes)
        gone, left_bytes = self._evict(left_bytes, now_ns)
        return [*awaited, *gone, *self._turn_back(left_bytes, 0)[0]]

    def _evict(
        self, over_bytes: int, now_ns: int, coming_bytes: int = 0, spare_bytes: int = 0
    ) -> tuple[list[Instruction], int]:
        """What goes, as in `evict`, and what is over when nothing more can."""
        self._keeping.end()  # what is only counted might go as well
        self.candidates.limit_replays(self.limit_bytes)
        self.candidates.stay(self._learner.staying)
        out: list[Instruction] = []
        room_bytes = coming_bytes + spare_bytes - over_bytes  # free by now, if what was to go has gone
        later_bytes = 0  # free when the program lets go of them too
        while over_bytes > 0 and (victims := self._next(over_bytes, room_bytes, over_bytes > spare_bytes, now_ns)):
            floating = [rec for _, rec in victims if self._floats(rec)]
            if floating and later_bytes >= over_bytes:
                self.candidates.pass_over(floating)  # more of these would not help now, and are not needed later
                continue
            gone, gone_bytes, floating_bytes = self._let_go(victims, now_ns)
            out += gone
            over_bytes -= gone_bytes
            room_bytes += gone_bytes
            later_bytes += floating_bytes
        self.candidates.unstuck()
        return out, over_bytes

    def _turn_back(self, over_bytes: int, lenient_bytes: int) -> tuple[list[AwaitIn], int]:
        """Have copies back that are under way, and that nobody has asked for yet, let go of when they end, what is
        needed last first; returns what is over then. They were begun when there was room: that they take it for so long
        no plan foresaw."""
        records = (self._ledger.records[record] for record in self._ledger.copied)
        coming = sorted((rec for rec in records if rec.host is Host.COMING and not rec.pins), key=_saved_at)
        out: list[AwaitIn] = []
        for rec in coming:
            if over_bytes <= lenient_bytes:
                break
            self.turned_back.add(rec.id)
            over_bytes -= rec.nbytes
            out.append(AwaitIn(rec.id))
        return out, over_bytes

    def came_back(self, rec: Record) -> list[Instruction]:
        """A copy back has ended: what had no room goes again, unless somebody has asked for it since."""
        if rec.id not in self.turned_back:
            return []
        self.turned_back.remove(rec.id)
        if rec.pins:
            return []
        self._count(Action.SWAP)
        self._ledger.let_go(rec.id)
        return [Drop(rec.id, Action.SWAP)]

    def has_for(self, routine: Routine, order: int, nbytes: int) -> bool:
        """Whether there is room for a save of `nbytes` by save order, and then for what comes next (`room_for_next`):
        `make_for_next` would have nothing to do."""
        return self._over(routine, order, nbytes) <= 0

    def _over(self, routine: Routine, order: int, nbytes: int) -> int:
        """By how much a save of `nbytes` by save order, or what comes next, is too much."""
        needed_bytes = self._ledger.resident_bytes + nbytes
        if self._encoded_bytes:
            needed_bytes += self._spare_bytes
        coming_bytes, limit = routine.coming_bytes[order], self._limit_at(order)
        if limit is None:
            return 0
        if self._headroom is None:
            return needed_bytes + coming_bytes - limit
        # Here the head-room has room for the making of what comes; there it counts.
        return max(needed_bytes - limit, needed_bytes + coming_bytes - (self._limit_at(order + 1) or 0))

    def _limit_at(self, order: int) -> int | None:
        """The limit from when a storage counts, by save order, to the next one."""
        return self._limit(self._headroom.from_save(order) if self._headroom is not None else None)

    def has(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit: `make` would have nothing to do."""
        limit = self.limit_bytes
        return limit is None or self._ledger.resident_bytes + nbytes + self._spare_bytes <= limit

    def make_place(self, nbytes: int, now_ns: int) -> list[Instruction]:
        """There is no room for `nbytes` in one piece: let go of the cheapest neighbours that make it, or, without
        windows, of the filter's first choice. Empty if nothing can go."""
        if self._layout is None:
            return self.evict(1, now_ns)
        out: list[Instruction] = []
        areas = self._layout.areas(nbytes)
        while not out and (victims := self.candidates.together(areas, now_ns)):
            out, _, _ = self._let_go(victims, now_ns)
        self.candidates.unstuck()
        return out

    def _next(self, over_bytes: int, room_bytes: float, short: bool, now_ns: int) -> list[Going]:
        """Who goes next for a limit in bytes: neighbours whose own bytes are enough, else the filter's first choice."""
        if self._layout is not None:
            neighbours = [area for area in self._layout.areas(over_bytes) if not area.pages]
            places = [[_taken(place) for place in area.places] for area in neighbours]
            if together := self.candidates.together([Area(over_bytes, taken) for taken in places], now_ns):
                return together
        first = self.candidates.first(now_ns, room_bytes, short)
        return [first] if first is not None else []

    def _let_go(self, victims: Sequence[Going], now_ns: int) -> tuple[list[Instruction], int, int]:
        """Evict these, up to the first that cannot be replayed after all; how many bytes went, and how many will when
        the program lets go of them."""
        out: list[Instruction] = []
        gone_bytes = floating_bytes = 0
        for choice, rec in victims:
            if self.candidates.drops(rec, choice.action) and not self._ledger.recoverable(rec.id, grasp=True):
                self.candidates.stuck(rec)
                break
            self.strays[rec.saved_at] = choice.action
            self.wanted.discard(rec.saved_at)
            out += self.carry_out(rec, choice.action, now_ns, wait=True)
            if self._floats(rec):
                floating_bytes += rec.nbytes - choice.stays_bytes
            else:
                gone_bytes += rec.nbytes - choice.stays_bytes
        return out, gone_bytes, floating_bytes

    def _floats(self, rec: Record) -> bool:
        """Whether the program still uses the storage, so that its bytes stay for now, whoever lets go of them."""
        log = self._learner.log
        saving = 0 <= rec.saved_at < len(log.saves) and log.needs_before[rec.saved_at] == len(log.needs)
        return saving and not self._announced and rec.saved_at not in log.loose_at

    def dropped(self, rec: Record) -> None:
        """A record that the plan drops has gone at its save."""
        self.dropped_uncounted()
        self.candidates.went_missing(rec)

    def dropped_uncounted(self) -> None:
        """The same of a storage that has no record."""
        self._count(Action.RECOMPUTE)

    def carry_out(self, rec: Record, action: Action, now_ns: int, wait: bool) -> list[Instruction]:
        self._count(action)
        if action is Action.SWAP and rec.host is Host.NONE:
            self._ledger.set_host(rec.id, Host.LEAVING)
            self._queue.begin_out(rec.nbytes, now_ns)
            return [SwapOut(rec.id, wait)]
        drops = self.candidates.drops(rec, action)
        if action is Action.ENCODE and not drops:
            self._ledger.encode(rec.id)
            return [Encode(rec.id)]
        out: list[Instruction] = []
        if drops:
            anchors = self._ledger.anchors(rec.id) or ()
            if counts_bytes := self._ledger.not_counted_bytes(anchors):
                out += self.await_for(counts_bytes)
            soon = bool(out)
            for anchor in anchors:
                self._ledger.hold(anchor, soon)
                out.append(Hold(anchor))
        self._ledger.let_go(rec.id)
        if drops:
            self.candidates.went_missing(rec)
        if action is Action.ENCODE:
            self._ledger.stand_in(rec.id)
            return [*out, Encode(rec.id)]
        return [*out, Drop(rec.id, action)]

    def _count(self, action: Action) -> None:
        self.evicted = True
        evictions, name = self._totals.evictions, str(action)
        evictions[name] = evictions.get(name, 0) + 1

    def _short(self, over_bytes: int, coming_bytes: int, gone: Sequence[Instruction]) -> None:
        """Nothing more can go than has `gone` and it still does not fit. What the program itself still uses may go by
        itself soon, so only the rest is an error at once; whether the budget was really missed is known when the step
        has ended."""
        limit = self.limit_bytes
        if limit is None:
            return
        self._note(limit + over_bytes, coming_bytes, gone)
        if self._firm and self._policy.budget.strict:
            records = self._ledger.records.values()
            if over_bytes > sum(rec.nbytes for rec in records if rec.counted and not rec.held):
                self._totals.failed = BudgetError(str(self._shortage(limit, limit + over_bytes, coming_bytes, gone)))

    def _note(self, needed_bytes: int, coming_bytes: int, gone: Sequence[Instruction] = ()) -> None:
        """Remember the worst moment of the step, for the case that its peak turns out to be over the limit."""
        if self._totals.has_warned("budget"):
            return  # nobody would be told again, and in a step that cannot be held every save would add up all records
        limit = self.limit_bytes or 0
        worst = self._worst
        over_bytes = needed_bytes - limit
        if worst is None or over_bytes > WORSE * worst.over_bytes or needed_bytes > WORSE * worst.needed_bytes:
            self._worst = self._shortage(limit, needed_bytes, coming_bytes, gone)

    def _shortage(
        self, limit_bytes: int, needed_bytes: int, coming_bytes: int, gone: Sequence[Instruction]
    ) -> Shortage:
        taken_off = {each.record for each in gone if isinstance(each, (AwaitIn, AwaitOut))}
        leaving = {each.record for each in gone if isinstance(each, (Drop, SwapOut))} - taken_off
        there = self._ledger.records
        taken_off |= {record for record in leaving if record in there and not self._floats(there[record])}
        records = (rec for rec in there.values() if rec.id not in taken_off)
        kept_bytes, least_bytes = self._ledger.counted_bytes, self._policy.filter.min_bytes
        parts = parts_of(records, coming_bytes, kept_bytes, least_bytes, self.candidates.evictable, self._in_use)
        shortage, budget = Shortage(limit_bytes, needed_bytes, parts), self._budget
        if self._headroom is None:
            return shortage
        return replace(
            shortage,
            device_bytes=budget.device_bytes,
            beside_bytes=self._headroom.here_bytes,
            reserve_bytes=budget.reserve_bytes,
        )

    def _in_use(self, rec: Record) -> bool:
        """Whether it is others than Delta that keep the storage there, and not the policy."""
        return self.candidates.in_use(rec) or (self._floats(rec) and self.candidates.evictable(rec))

    def shortage_of(self, limit_bytes: int, peak_bytes: int) -> Shortage:
        """What to say of a step that was over the limit: its worst moment that is known."""
        if self._budget.device_bytes is not None:
            parts = "saved activations that had to stay, and what ops made beside them"
            return self._worst or Shortage(limit_bytes, peak_bytes, parts, "the device")
        if self._worst is not None and self._worst.needed_bytes > limit_bytes:
            return replace(self._worst, limit_bytes=limit_bytes)
        return Shortage(limit_bytes, peak_bytes, "what a replay or a copy back made while something else had to stay")


def _saved_at(rec: Record) -> int:
    return rec.saved_at


def _taken(place: Place) -> Place:
    """A place as it counts for a limit in bytes: what is free already frees nothing, but does not part neighbours."""
    return place if place.records else replace(place, nbytes=0)
