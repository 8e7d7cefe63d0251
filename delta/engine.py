"""Events in, instructions out: the state machine every device and the simulator share.

The runtime reports what happened (an op ran, a tensor was saved, a value is needed, a storage died, a copy ended) and
carries out the instructions it gets back, in order. The engine changes the ledger when it emits an instruction; an
instruction that fails is reported by an event of its own (`transfers.copy_out_failed`). Every event carries the time in
ns; the engine reads no clock.

How a value is brought back: `need` says what to do with the record itself; if it is still not available, the runtime
walks a `Descent`, and calls `replays.before` and `replays.replayed` around each op, so that room is made before every
allocation and what nobody needs goes after every op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase

from delta.budget import Budget
from delta.config import Policy
from delta.costs import LinkQueue
from delta.descent import Descent
from delta.errors import BudgetError
from delta.expected import Expected
from delta.headroom import HeadRoom
from delta.idle import Idle
from delta.keeping import Keeping, Kept
from delta.layout import Layout
from delta.ledger import Ledger
from delta.planning import Planning, learner_for
from delta.recall import Recall
from delta.record import Host, LedgerError, Record
from delta.replays import Replays
from delta.revising import Outcome
from delta.room import Room
from delta.routine import Routine, Way
from delta.ruled import Ruled
from delta.settling import Settling
from delta.step_ends import StepEnds
from delta.totals import StepSummary, Totals
from delta.transfers import Transfers
from delta.types import (
    ANY_LOOK,
    Action,
    AwaitOut,
    Drop,
    Encoding,
    Hold,
    Instruction,
    Kind,
    Link,
    Look,
    Mode,
    OpInfo,
    Preserve,
    Release,
)

# A step is said to have missed its budget when its peak was over it by more than this.
MISSED = 1.01


class Engine:
    """Decides for one session. Not thread-safe: the runtime serialises its events."""

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        link: Link,
        announced: bool = False,
        layout: Layout | None = None,
        clock: Callable[[], int] = lambda: 0,
        sees_peaks: bool = True,
    ) -> None:
        """`announced`: the device tells of every allocation beforehand (`allocating`), so none has to be guessed.
        `layout`: where storages lie, if the device can tell. `clock`: in ns, to report how long planning took; nothing
        is decided by it. `sees_peaks`: as for `HeadRoom`."""
        self.policy = policy
        self._announced = announced
        self.budget = budget
        self.ledger = Ledger()
        self.queue = LinkQueue(link)
        self.totals = Totals()
        self.finished_steps: list[StepSummary] = []
        self._clock = clock
        self.planning = Planning(policy, budget, link, announced)
        self._least_bytes = least_bytes = policy.filter.min_bytes
        self.looks = policy.planner.kind == "mimose"  # at more of a saved tensor than its signature
        self.learner = learner_for(policy, self.planning, announced)
        self._headroom = None
        if budget.device_bytes is not None:
            self._headroom = HeadRoom(budget, self.ledger, self.learner, sees_peaks)
        self._by_position = self._headroom if self.planning.by_position else None
        ledger, learner, totals = self.ledger, self.learner, self.totals
        self.keeping = keeping = Keeping(ledger, learner)
        self._room = room = Room(
            policy, budget, ledger, self.queue, learner, totals, keeping, layout, announced, self._headroom
        )
        self.idle = Idle(budget, ledger, learner, room, self._headroom)
        self._recall = recall = Recall(policy, ledger, self.queue, learner, room)
        self._descent = Descent(ledger)
        self._settling = Settling(policy, ledger, room, learner, self._descent)
        self.replays = Replays(policy, ledger, room, recall, self._descent, self._settling, totals)
        self.transfers = Transfers(ledger, room, recall, learner, self._settling, totals)
        self.step_ends = StepEnds()
        self.expected = Expected(
            ledger, learner, keeping, room, recall, self.step_ends, self._headroom, least_bytes, self._net_ns
        )
        self.replanned = False  # after the step that ended last: the next one like it goes otherwise
        self._largest_bytes = 0
        self._lost_ns = 0
        self._position = 0  # needs of this step that plans have been followed for
        self._stopped = False  # a BudgetError was raised in the step under way, which is not told again at its end
        self._recording = False
        self._backward_writes = False
        self._ruled = Ruled(policy) if policy.rules else None
        self._evicts = not budget.unlimited and set(policy.director.actions) != {Action.KEEP}

    # -- facts about now ------------------------------------------------------------------------------------------
    @property
    def limit_bytes(self) -> int | None:
        """Bytes of saved activations that may be resident now; None: as many as there are."""
        return self._room.limit_bytes

    @property
    def wants_recorder(self) -> bool:
        """Whether ops should be recorded from here on."""
        if not self._evicts:
            return False
        return self.learner.wants_recorder or (self.learner.mode is Mode.OBSERVE and self.learner.in_step)

    @property
    def minds_writes(self) -> bool:
        """Whether a write in place could spoil something: an op may be replayed, or a step is under way."""
        return bool(self.ledger.ops) or self.learner.in_step

    @property
    def minds_backward(self) -> bool:
        """Whether the ops of backward have to be seen, because they may write into what is needed still. In a step that
        goes like others before they do so only if they ever did. They must not be seen where something is left to
        autograd alone, of whose needs nobody hears: some formulas compute differently under a dispatch mode (rule 17).
        """
        if self.learner.alone:
            return False
        return self._backward_writes or self.learner.routine is None or not self.learner.in_step

    def written_unseen(self) -> None:
        """Something was written that a replay would have read, and nobody saw it: from now on backward is seen."""
        self._backward_writes = True

    @property
    def step_peak_bytes(self) -> int:
        """The most that was resident in the step under way."""
        return self.ledger.peak_resident_bytes if self.learner.in_step else 0

    @property
    def step_unevicted_peak_bytes(self) -> int:
        """The most that the step under way would have held."""
        return self.ledger.peak_unevicted_bytes if self.learner.in_step else 0

    @property
    def told_budget_bytes(self) -> int | None:
        """The budget in bytes: the whole of a device budget, else the limit for activations as far as it is known."""
        if self.budget.device_bytes is not None:
            return self.budget.device_bytes
        return self.budget.limit_bytes(max(self.totals.unevicted_peak_bytes, self.step_unevicted_peak_bytes))

    def recording(self, on: bool) -> None:
        """The recorder was turned on or off; a step it did not see whole cannot be learned from."""
        self._recording = on
        if not on or self.learner.in_step:
            self.learner.recorded = False

    def lost(self, ns: int) -> None:
        """Compute stood still this long for Delta's sake: taken out of the step's net times."""
        self._lost_ns += ns

    def _net_ns(self, now_ns: int) -> int:
        return now_ns - self._lost_ns

    @property
    def settles(self) -> bool:
        """Whether the step that has ended is the first or second that went by its routine: what earlier ones swapped
        may have been far more."""
        return 0 < self.learner.steps_alike <= 2

    # -- what the device has in use, under a budget on it -----------------------------------------------------------
    def looked(self, now_bytes: int, peak_bytes: int, uncounted_bytes: int = 0) -> None:
        """Before an event: the device has `now_bytes` in use, and had up to `peak_bytes` since the last look.
        `uncounted_bytes` of it are of what is being saved, and counts from here on."""
        if self._headroom is not None:
            self._headroom.looked(now_bytes, peak_bytes, uncounted_bytes)

    @property
    def working_bytes(self) -> int:
        """What the program may take and give back before the next look."""
        return self._headroom.working_bytes if self._headroom is not None else 0

    def settled(self, now_bytes: int, peak_bytes: int, uncounted_bytes: int = 0) -> None:
        """After Delta's own work, the device has `now_bytes` in use, and had up to `peak_bytes` meanwhile."""
        if self._headroom is not None:
            self._headroom.settled(now_bytes, peak_bytes, uncounted_bytes)

    # -- forward --------------------------------------------------------------------------------------------------
    def created(self, record: int, nbytes: int, kind: Kind, now_ns: int) -> None:
        """A storage was seen for the first time."""
        self.ledger.create(record, nbytes, kind, now_ns)

    def op_ran(self, op: OpInfo, now_ns: int) -> list[Instruction]:
        """An op was recorded; all its records have been created."""
        self.ledger.add_op(op)
        self._room.candidates.made_by(op)
        if not self.learner.in_step and self.learner.too_many(len(self.ledger.ops)):
            self.learner.forget()
            return self._cut()
        if self.learner.routine is not None:  # which is not learned from
            return []
        records = [self.ledger.records[record] for record in op.inputs + op.outputs]
        self.learner.op(op, {r.id: r.nbytes for r in records}, {r.id: r.kind for r in records})
        return self._make_for_more_of(op, now_ns)

    def op_noted(self, op: OpInfo, gone: Iterable[int]) -> None:
        """An op ran that nobody recorded, and now it has to be known. All its records have been created, and of those
        it made some have `gone` by now."""
        self.ledger.add_op(op)
        self._room.candidates.made_by(op)
        for record in gone:
            self.ledger.gone(record)
            self._room.candidates.went_missing(self.ledger.records[record])

    def list_noted(self, record: int, back: bool) -> list[int]:
        """A saved storage that went at its save, and is there again if it is `back`, has its record and all handles:
        the records that Delta has to hold from here on."""
        held = [record] if back else self.ledger.anchors(record)
        if held is None:
            raise LedgerError(f"record {record} is saved, gone, and cannot be made again")
        for each in held:
            self.ledger.hold(each)
        return held

    def bury(self, records: Iterable[int]) -> list[Instruction]:
        """Forget those of the records that nobody can ask for."""
        return self._settling.bury(records)

    def _make_for_more_of(self, op: OpInfo, now_ns: int) -> list[Instruction]:
        """Where no plan tells what comes: an op made a storage larger than any saved so far, which may be saved now,
        or be read by an op whose result of the same size is. Have room for one, before it counts."""
        return self._make_for(self._made_bytes(op), now_ns) if self.may_make_room(op) else []

    def may_make_room(self, op: OpInfo) -> bool:
        """Whether something may go as soon as an op has run. What a device has in use should be told of before."""
        if self._announced or not self.learner.in_step or self.learner.plan is not None:
            return False
        return self._made_bytes(op) > self._largest_bytes

    def _made_bytes(self, op: OpInfo) -> int:
        return max((self.ledger.records[record].nbytes for record in op.outputs), default=0)

    def _make_for(self, coming_bytes: int, now_ns: int) -> list[Instruction]:
        """Make room for what may come next; the head-room may have some for it."""
        return self._room.make(max(0, coming_bytes - self.working_bytes), now_ns, guess=True)

    def called(self, call: object, made: bool) -> None:
        """An op of forward ran, and has been recorded. `call`: what the runtime knows it by; `made`: it was the last
        one told of by `op_ran`."""
        self.learner.called(call, made)

    def known_cost_ns(self, call: object) -> int | None:
        """How long an op takes that is about to be recorded, if it need not be timed."""
        return self.learner.known_cost_ns(call)

    @property
    def routine(self) -> Routine | None:
        """Which calls need a recipe; None: all do. It is to be asked about each one, in order."""
        return self.learner.routine

    def swerve(self, call: object) -> Way | None:
        """A call has come that the routine does not expect. Its way, where the step goes on by another routine."""
        routine = self.learner.swerve(call)
        return routine.way(call) if routine is not None else None

    def unexpected(self) -> None:
        """A call was another than the routine expected. Before the first save that may be none of the step's own."""
        if self.learner.in_step:
            self.learner.leave_routine()

    def replays_take(self, replay_ns: int) -> None:
        """What an op that is replayed takes beside its own time, on this device."""
        self.ledger.replay_ns = self.learner.revising.replay_ns = replay_ns

    def op_timed(self, op: int, cost_ns: int) -> None:
        """How long an op took, where the device tells it only later."""
        self.ledger.time_op(op, cost_ns)
        self.learner.time_op(op, cost_ns)

    @property
    def encodes(self) -> bool:
        """Whether it is of use to tell which records have an encoded form."""
        return self._room.candidates.encodes

    def encodable(self, record: int, encoding: Encoding) -> None:
        """The record, which is about to be saved, can be kept in a smaller form."""
        if self._room.candidates.encodes and encoding.nbytes < self.ledger.records[record].nbytes:
            self._room.offer(self.ledger.records[record], encoding)

    def saved(self, record: int, signature: int, now_ns: int, look: Look = ANY_LOOK) -> list[Instruction]:
        """Autograd saved a tensor on `record`. The record is alive."""
        rec = self.ledger.records[record]
        begins, plans_before, began_ns = not self.learner.in_step, self.planning.made, 0
        if begins:
            began_ns = self._clock()
            self.ledger.restart_peaks()
            self.learner.begin(self._recording)
            self.learner.standing_bytes = self.ledger.resident_bytes if self.ledger.left_over else 0
        net_ns = self._net_ns(now_ns)
        self.learner.packed(signature, net_ns, look)
        if begins and self.learner.plan is not None:
            self.totals.planned(self.planning.made > plans_before, self._clock() - began_ns)
        first = rec.saved_at < 0
        alone = self.ledger.save(record, len(self._recall.by_order))
        self.learner.placed(rec.saved_at)
        rec.stretch = self.step_ends.stretch
        self.ledger.use(record, now_ns)
        if not first:
            return self._saved_again(rec, alone) + self._room.make(0, now_ns)
        if not self.learner.given_up:
            self._recall.by_order.append(record)
            if self._ruled is not None:
                self._ruled.saved(*self._room.candidates.makers.get(record, ("", "")))
        self.learner.saved(record, rec.nbytes, rec.kind, net_ns)
        if self._headroom is not None:
            self._headroom.saved()
        if rec.encoding is not None:
            self.learner.encodable(record, rec.encoding)
        if rec.kind is Kind.PARAMETER:
            return []
        self._largest_bytes = max(self._largest_bytes, rec.nbytes)
        out: list[Instruction] = []
        if not rec.held:
            self.ledger.hold(record)
            out.append(Hold(record))
        if (plan := self.learner.plan) is not None and not self._announced:
            out += self._room.following.saved(rec, plan, now_ns)
            return out + self._room.make_for_next(plan, rec.saved_at, now_ns)
        coming_bytes = 0 if self._announced else max(self._largest_bytes, self.learner.next_bytes)
        return out + self._make_for(coming_bytes, now_ns)

    def _saved_again(self, rec: Record, alone: bool) -> list[Instruction]:
        """A record that was saved before in this step: all its handles may have died, and Delta have let go of it. A
        stand-in is of no use to the new one."""
        out: list[Instruction] = []
        if rec.stood_in_for or (alone and not rec.available and rec.kind is not Kind.PARAMETER):
            self.ledger.hold(rec.id)
            self._room.candidates.back(rec)
            out.append(Hold(rec.id))
        if rec.encoding is not None and rec.encoding.stand_in:
            rec.encoding = None
            self.learner.not_encodable(rec.id)
        return out

    def unsaved_kept(self, kept: Kept, now_ns: int, read: bool = False) -> list[Instruction]:
        """A saved tensor on a kept storage died. `read`: something that is to be made again reads it."""
        if kept.recorded:
            return self.unsaved(kept.record, now_ns)
        self.keeping.released(kept, read)
        return self._end_step(now_ns) if self.ledger.own_handles == 0 and self.learner.in_step else []

    def allocating(self, nbytes: int, now_ns: int) -> list[Instruction]:
        """An op of the program is about to make storages of `nbytes` that will be saved: have room for them."""
        return self._room.make(nbytes, now_ns)

    def raise_failed(self) -> None:
        """Raise what has come since the last time of a budget that cannot be held, with `strict: true`, or of a planner
        of the program's own. To be called where the program can be told, when all that the engine asked for has been
        done."""
        failed, self.totals.failed = self.totals.failed, None
        if failed is not None:
            self._stopped = self.learner.in_step and isinstance(failed, BudgetError)
            try:
                raise failed
            finally:
                del failed  # or this frame, its traceback and all that leads here would live until a collection

    def loose(self, record: int) -> None:
        """Nobody but Delta holds the storage of a saved record any more: evicting it would free its bytes at once."""
        self._settling.loose(record)

    def before_overwrite(self, record: int, in_backward: bool = False) -> list[Instruction]:
        """An op is about to write into the storage of `record`."""
        rec = self.ledger.records[record]
        if in_backward and not self._backward_writes:
            self._backward_writes = self.ledger.leads_to_saved(record)
        out: list[Instruction] = []
        if rec.host is Host.LEAVING:
            out.append(AwaitOut(record))
        elsewhere = rec.host is not Host.NONE or (rec.encoded_bytes > 0 and not rec.stood_in_for)
        if rec.users and not elsewhere and self.ledger.supports_missing(record):
            self.ledger.preserve(record)
            out.append(Preserve(record))
        return out

    def overwritten(self, old: int, new: int, preserved: bool) -> list[Instruction]:
        """The storage of `old` now holds the version `new` (already created). `old` lives on until `version_ended`."""
        rec = self.ledger.records[old]
        if rec.handles:
            if not self.ledger.records[new].held:
                self.ledger.hold(new, soon=not preserved)  # it is the same memory
            if 0 <= rec.saved_at < len(self._recall.by_order):
                self._recall.by_order[rec.saved_at] = new
            self.ledger.supersede(old, new)
            self.ledger.records[new].stretch = rec.stretch
        out: list[Instruction] = [Hold(new)] if self.ledger.records[new].held else []
        if preserved:
            return out
        if rec.held or (rec.encoded_bytes and not self.ledger.needed(old)):
            self.ledger.let_go(old)
            out.append(Release(old))
        self.ledger.gone(old)
        self.ledger.note_peak()
        self._room.candidates.went_missing(rec)
        return out

    def version_ended(self, old: int) -> list[Instruction]:
        """The op that overwrote `old` has been recorded, if it is to be: without a reader the old version is
        forgotten."""
        return self._settling.bury([old])

    def storage_gone(self, record: int) -> list[Instruction]:
        """The storage died on the device."""
        return self._settling.gone(record)

    # -- backward -------------------------------------------------------------------------------------------------
    def still_used(self, records: Collection[int]) -> None:
        """In backward: storages that it has been given and uses still, or that the program has never let go of (a
        batch). Letting go of them would free nothing."""
        self._room.candidates.still_used(records)
        self.learner.still_used({self.ledger.records[record].saved_at for record in records if record in self.ledger})

    def given(self, record: int) -> None:
        """Backward has been given the storage of a record, and uses it until `still_used` no longer names it."""
        self._room.candidates.given(record)

    def stays(self, nbytes: int) -> bool:
        """Whether a saved storage of that size stays as it is until its last handle has died, whatever comes. Not where
        sizes change from step to step: then one that stays in this step may be evicted in the next."""
        return nbytes < self._least_bytes and not (self.looks or self.learner.asks_all)

    def asked(self, handle: int, in_backward: bool) -> None:
        """Somebody asks for the record of a handle that `stays`: there is nothing to decide."""
        rec = self.ledger.records[self.ledger.resolve(handle)]
        if in_backward:
            self.step_ends.need(rec.stretch)
        if self.learner.in_step and rec.saved_at >= 0:
            self.learner.asked(rec.saved_at if rec.kind is not Kind.PARAMETER else -1)

    def need(self, handle: int, now_ns: int, in_backward: bool = False) -> list[Instruction]:
        """Somebody asks for the record of a handle, `in_backward` or looking. It stays pinned until `served`."""
        rec = self.ledger.records[self.ledger.resolve(handle)]
        if in_backward:
            self.step_ends.need(rec.stretch)
        self.ledger.pin(rec.id, now_ns)
        if rec.kind is Kind.PARAMETER:
            return []
        if self.learner.in_step and rec.saved_at >= 0:
            self.expected.alone_until(rec.saved_at, now_ns)
            self.learner.needed(rec.saved_at, self._net_ns(now_ns))
        if self._headroom is None:
            return self._recall.bring(rec, now_ns) if not rec.held else []
        self._headroom.needed()
        return self._room.make(0, now_ns) + self._recall.bring(rec, now_ns)

    def lent(self, handle: int, now_ns: int) -> list[Instruction]:
        """A replay reads the record of a handle: it stays pinned until `served`."""
        rec = self.ledger.records[self.ledger.resolve(handle)]
        self.ledger.pin(rec.id, now_ns)
        return self._recall.bring(rec, now_ns)

    def served(self, handle: int) -> list[Instruction]:
        """The value was handed to backward."""
        record = self.ledger.resolve(handle)
        self.ledger.unpin(record)
        return self._settling.settle(record) if not self.ledger.records[record].handles else []

    def unsaved(self, handle: int, now_ns: int) -> list[Instruction]:
        """A handle died."""
        record = self.ledger.resolve(handle)
        order = self.ledger.records[record].saved_at
        if not self.ledger.unsave(record):
            return []
        self.keeping.recorded.pop(handle, None)
        if order >= 0:
            self.learner.released(order)
        out = self._settling.settle(record)
        if self.ledger.own_handles == 0 and self.learner.in_step:
            out += self._end_step(now_ns)
        return out

    def forward_again(self, now_ns: int) -> list[Instruction]:
        """Forward goes on after backward has asked for something: what is still saved may be left over from a step that
        has ended (`step_ends.py`). It goes on being counted, and can be evicted, needed and released as before."""
        if not self.learner.in_step:
            self.step_ends.ended()
            return []
        return self._end_step(now_ns, self.step_ends.whole) if self.step_ends.forward() else []

    def backward_began(self) -> None:
        """Forward is over, where its accesses are needs too."""
        self.learner.backward_began()

    def prefetch(self, now_ns: int) -> list[Instruction]:
        """Needs were served: let go of what the plan lets go of here, and start the copies back that belong here.

        An event of its own, after the instructions of the need have been carried out: only then is it known which of
        the storages let go of are still alive.
        """
        before, self._position = self._position, self.learner.position
        here = range(before, self._position)  # of the needs served since this was last asked
        if self._announced:
            self.learner.turn_ended(self._net_ns(now_ns))
            if (plan := self.learner.plan) is not None and plan.rehearsed:
                gone = self._room.following.after_turn(now_ns)
                going_bytes = sum(self.ledger.records[each.record].nbytes for each in gone if isinstance(each, Drop))
                return gone + self._recall.after_turn(going_bytes, now_ns)
        return [
            *self._room.following.needed(here, now_ns),
            *self._recall.prefetch(here, now_ns),
            *self._room.make_for_save(now_ns),
        ]

    # -- encoded forms --------------------------------------------------------------------------------------------
    def encoded(self, record: int, nbytes: int) -> None:
        """The encoded form has been made; the device copy is let go of next."""
        rec = self.ledger.records[record]
        if not rec.stood_in_for:  # that has been let go of already
            self.ledger.encoded(record, nbytes)
        self.totals.encoded_bytes += rec.nbytes - nbytes

    def encode_failed(self, record: int, now_ns: int) -> list[Instruction]:
        """The bytes do not fit the encoded form: the device copy is still the value, and something else has to go."""
        rec = self.ledger.records[record]
        missing = rec.stood_in_for
        self.ledger.encode_failed(record)
        if missing:
            self._room.candidates.back(rec)
        self.learner.not_encodable(record)
        return self._room.make(rec.nbytes, now_ns, guess=True)

    def stood_in(self, record: int) -> None:
        """A stand-in has been decoded for the one who asked: that takes memory until he has read it."""
        self.ledger.note_peak(self.ledger.records[record].nbytes)

    def decode_failed(self, record: int, nbytes: int) -> None:
        """There was no memory to decode to: the encoded form of `nbytes` is still the value."""
        self.ledger.decode_failed(record, nbytes)

    # -- room -----------------------------------------------------------------------------------------------------
    def pressure(self, now_ns: int, coming_bytes: int = 0) -> list[Instruction]:
        """The limit may have changed (a device budget follows what else is in use), or so much more is to come."""
        return self._room.make(coming_bytes, now_ns)

    @property
    def observes(self) -> bool:
        """Whether it counts to see all that is in use: where steps of the same kind will be planned by it, or no plan
        tells what comes."""
        if self._headroom is None or not self.learner.in_step:
            return False
        return self.learner.measures if self._by_position is not None else self.learner.plan is None

    @property
    def asks_ahead(self) -> bool:
        """Whether nobody knows by its position what an op takes, and there is a device budget that it may not fit."""
        return self._headroom is not None and self.learner.plan is None

    def making(self, nbytes: int, now_ns: int) -> list[Instruction]:
        """Where it `asks_ahead`: an op is about to make so much, for which what is kept free may not do."""
        more_bytes = nbytes - self._headroom.free_bytes if self._headroom is not None else 0
        return self._room.make(more_bytes, now_ns) if more_bytes > 0 else []

    def next_save(self, order: int, now_ns: int) -> list[Instruction]:
        """A storage was saved that goes by itself: have room for the next one."""
        plan = self.learner.plan
        return self._room.make_for_next(plan, order, now_ns) if plan is not None else []

    def make_place(self, nbytes: int, now_ns: int) -> list[Instruction]:
        """A request for `nbytes` found no room in one piece: let go of what is in its way. Empty if nothing can."""
        return self._room.make_place(nbytes, now_ns)

    def from_right(self, op: str) -> bool:
        """Whether what an op makes should lie at the right end of the free block it is cut from."""
        dear = self.policy.placement.left
        return bool(dear) and not any(fnmatchcase(op, pattern) for pattern in dear)

    def op_name_of(self, record: int) -> str:
        """The name of the op that made a record; "" if none is known."""
        return self._room.candidates.makers.get(record, ("", ""))[0]

    def source_of(self, record: int, order: int) -> tuple[str, str]:
        """The op that made a storage saved in that order, and the module it ran in; "" for what is not known. In a step
        that follows its routine most ops are not recorded, and are those that were when it was learned."""
        known = self._room.candidates.makers.get(record)
        if known is None and self.learner.routine is not None:
            known = self.learner.source_of(order)
        return known or ("", "")

    def rescue(self, now_ns: int) -> list[Instruction]:
        """The device is out of memory: evict everything that can go at once."""
        return self._room.rescue(now_ns)

    # -- ends -----------------------------------------------------------------------------------------------------
    def _end_step(self, now_ns: int, whole: bool = True) -> list[Instruction]:
        """`whole`: it was one step, else it was found out too late that one had ended, and nothing can be learned."""
        self.expected.alone_until(None, now_ns)
        self.keeping.end()  # what is left over is of no step, and has to be told apart from what is
        ledger, mode = self.ledger, self.learner.mode
        summary = self._finish_step(mode, ledger.peak_resident_bytes, ledger.peak_unevicted_bytes)
        self._tell_shortage(summary)
        plans_before, began_ns = self.planning.made, self._clock()
        if (headroom := self._headroom) is not None:
            self.budget.step_used(headroom.peak_bytes, headroom.need, self._room.evicted)
        if whole:
            self.learner.end(self._net_ns(now_ns), self._outcome(summary))
        else:
            self.learner.abandon()
        failed, self.planning.failed = self.planning.failed, None
        self.totals.failed = self.totals.failed or failed
        if headroom is not None:
            headroom.new_step()
        self.replanned = self.planning.made > plans_before
        if self.replanned:
            self.totals.planned(True, self._clock() - began_ns)
        self._largest_bytes = 0
        self._position = 0
        return self._cut()

    def _outcome(self, step: StepSummary) -> Outcome:
        """What there is to learn from; of the whole device where plans know by position what others need of it."""
        device, told_bytes = self._by_position, None if self._by_position is None else 0
        return Outcome(
            peak_bytes=step.peak_bytes if device is None else device.peak_bytes,
            unevicted_peak_bytes=step.unevicted_peak_bytes,
            limit_bytes=self.budget.limit_bytes(
                max(step.unevicted_peak_bytes, self.learner.widest_bytes), beside_bytes=told_bytes
            ),
            evicted=self._room.evicted,
            forced=self._forced_by_rules(),
            strays=self._room.strays,
            beside=device.found() if device is not None else None,
        )

    def _cut(self) -> list[Instruction]:
        """Recipes are of no more use, but for what is missing and left over."""
        out = self._settling.let_go_idle(*self.ledger.cut())
        self._room.new_step()
        self._recall.new_step()
        self._descent.new_step()
        if self._ruled is not None:
            self._ruled.new_step()
        return out

    def _tell_shortage(self, step: StepSummary) -> None:
        """Count it, and warn or get ready to raise, if the step that ended was over its limit by more than its
        rounding. A share is known only now; one of a step that is too small for any of it to go is no error, and leaves
        the warning to others."""
        peak_bytes = step.peak_bytes
        limit, stopped, self._stopped = self.limit_bytes, self._stopped, False
        if self._headroom is not None:
            peak_bytes, limit = self._headroom.peak_bytes, self.budget.device_bytes
        if limit is None or peak_bytes <= MISSED * limit:
            return
        self.totals.steps_over += 1
        shortage = self._room.shortage_of(limit, peak_bytes)
        tiny = self.budget.is_share and step.unevicted_peak_bytes < self.policy.filter.min_bytes
        if tiny or not self.policy.budget.strict:
            self.totals.warn("tiny" if tiny else "budget", shortage.in_step(step.index))
        elif not stopped:
            self.totals.failed = BudgetError(str(shortage))

    def watched_step(self, peak_bytes: int) -> None:
        """A step ended that was only watched (mode idle): nothing was evicted, nothing is learned."""
        self._finish_step(Mode.IDLE, peak_bytes, peak_bytes)

    def _finish_step(self, mode: Mode, peak_bytes: int, unevicted_peak_bytes: int) -> StepSummary:
        totals = self.totals
        self.step_ends.ended()
        summary = StepSummary(totals.steps, mode, peak_bytes, unevicted_peak_bytes)
        self.finished_steps.append(summary)
        totals.steps += 1
        totals.modes[mode.value] = totals.modes.get(mode.value, 0) + 1
        totals.peak_bytes = max(totals.peak_bytes, peak_bytes)
        totals.unevicted_peak_bytes = max(totals.unevicted_peak_bytes, unevicted_peak_bytes)
        return summary

    def _forced_by_rules(self) -> dict[int, Action]:
        """What the policy's rules say about single storages, by save order."""
        ruled, learner = self._ruled, self.learner
        if ruled is None:
            return {}
        if learner.recorded and learner.log.asked and (text := ruled.seen_whole()) is not None:
            self.totals.warn("rules", text)
        return ruled.forced()
