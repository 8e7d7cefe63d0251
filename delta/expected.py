"""Saves that a routine expects, and that need no decision: what the plan keeps, and what it drops at once.

In a step that follows its routine most saves are of these two kinds, and the host's time is what they cost. So nobody
asks filter or director for them: the plan has. Whatever is not as the plan has it is none of theirs; then the runtime
gets None, and takes the whole way (`Engine.saved`).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from delta.headroom import HeadRoom
from delta.keeping import Keeping, Kept
from delta.learner import NOBODY_S, Learner
from delta.ledger import Ledger
from delta.recall import Recall
from delta.record import Host, Record
from delta.room import Room
from delta.step_ends import StepEnds
from delta.types import AwaitOut, Kind


class Expected:
    """`keep`, `keep_record` or `drop` for a save, `need` for what was kept; `Engine.unsaved_kept` at its end."""

    def __init__(
        self,
        ledger: Ledger,
        learner: Learner,
        keeping: Keeping,
        room: Room,
        recall: Recall,
        step_ends: StepEnds,
        headroom: HeadRoom | None,
        least_bytes: int,
        net_ns: Callable[[int], int],
    ) -> None:
        """`least_bytes`: nothing smaller is ever evicted. `net_ns`: a time less what was lost until then."""
        self._ledger, self._learner, self._keeping, self._room = ledger, learner, keeping, room
        self._recall, self._step_ends, self._headroom = recall, step_ends, headroom
        self._least_bytes, self._net_ns = least_bytes, net_ns
        self._alone: list[tuple[int, int]] = []  # heap of what is left alone: needs until it has gone, and its bytes
        self._hears_all = False  # in this step, from here on

    def keep(
        self,
        order: int,
        key: int,
        signature: int,
        nbytes: int,
        new_id: Callable[[], int],
        now_ns: int,
        noted: bool = False,
    ) -> Kept | None:
        """Autograd saves a tensor on a storage that has no record, known by `key`. `order`: of `Learner.expects`. None
        if more has to be done than to count its bytes, or room be made: then that is what `saved` is for. `noted`: it
        goes at once, and whoever asks for it makes it again; this is the first tensor on it. Then `short_for_next` is
        asked about the room."""
        keeping = self._keeping
        kept = keeping.storages.get(key)
        if kept is not None:
            if kept.order != order:
                return None
            keeping.again(kept, signature)
            return kept
        routine = self._learner.routine
        if routine is None or order != len(self._recall.by_order):
            return None
        if not noted and not self._room.has_for(routine, order, nbytes):
            return None
        kept = Kept(key, new_id(), nbytes, order, now_ns, noted=noted)
        keeping.first(kept, signature, self._net_ns(now_ns))
        if noted:
            self._room.dropped_uncounted()
        self._one_more(kept.record)
        return kept

    def short_for_next(self, order: int) -> bool:
        """Whether `Engine.next_save` has something to do."""
        routine = self._learner.routine
        return routine is not None and not self._room.has_for(routine, order, 0)

    def again(self, kept: Kept, order: int, signature: int) -> bool:
        """One more tensor is saved on a storage that went at its first save; False if it is not the one expected."""
        if kept.order != order:
            return False
        self._keeping.again(kept, signature)
        return True

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for `nbytes` more, with nothing else to go."""
        return self._room.has(nbytes)

    def await_for(self, nbytes: int) -> list[AwaitOut]:
        """Where `nbytes` do not fit: wait for copies out that are late. Nothing else goes for it."""
        return self._room.await_for(nbytes)

    def await_for_save(self, order: int, nbytes: int) -> list[AwaitOut]:
        """The same for a save of so much that the plan keeps, and for the next one."""
        routine = self._learner.routine
        if routine is None or order != len(self._recall.by_order):
            return []
        return self._room.await_for_save(routine, order, nbytes)

    def keep_record(self, order: int, record: int, key: int, signature: int, now_ns: int) -> Kept | None:
        """The same of a tensor on a storage that has a record: Delta holds it from here on."""
        rec, kept, stretch = self._ledger.records[record], self._keeping.recorded.get(record), self._step_ends.stretch
        if kept is not None:
            if kept.order != order:
                return None
            self._keeping.again_recorded(kept, stretch, signature)
            return kept
        if not self._comes_first(rec, order):
            return None
        kept = Kept(key, record, rec.nbytes, order, now_ns, recorded=True)
        self._keeping.first_recorded(kept, stretch, signature, self._net_ns(now_ns))
        self._ledger.use(record, now_ns)
        self._one_more(record)
        return kept

    def drop(self, order: int, record: int, signature: int, now_ns: int) -> list[int] | None:
        """Autograd saves a tensor on a storage that the plan drops at once, known as in `keep`: it has gone, for its
        recipe. The records that Delta has to hold for that. None if that is for `saved` to see to."""
        rec, ledger = self._ledger.records[record], self._ledger
        if rec.saved_at == order and rec.handles and not rec.available:  # dropped at its first save
            ledger.save(record, order)
            self._learner.came(signature, order)
            return []
        if not self._comes_first(rec, order) or rec.held or rec.pins or rec.nbytes < self._least_bytes:
            return None
        if (anchors := ledger.anchors(record)) is None:
            return None
        if not self._has_room_for(order, rec.nbytes + ledger.not_counted_bytes(anchors)):
            return None
        self._learner.came_first(signature, order, record, rec.nbytes, self._net_ns(now_ns))
        ledger.save(record, order)
        rec.stretch = self._step_ends.stretch
        ledger.use(record, now_ns)
        for anchor in anchors:
            ledger.hold(anchor)
        self._room.dropped(rec)
        self._one_more(record)
        return anchors

    def uncounted_bytes(self, order: int, record: int | None, nbytes: int) -> int:
        """Of a storage that is saved now, by save order: what is not among counted activations yet, nor was when such a
        step was observed. It may never be, where it goes at once."""
        if order != len(self._recall.by_order):
            return 0
        return nbytes if record is None else self._ledger.not_counted_bytes([record])

    def _comes_first(self, rec: Record, order: int) -> bool:
        """Whether the record is saved for the first time, as the plan has it, and there is room."""
        routine = self._learner.routine
        fresh = rec.saved_at < 0 and not rec.handles and rec.host is Host.NONE and rec.kind is Kind.ACTIVATION
        if routine is None or not fresh or order != len(self._recall.by_order):
            return False
        return self._has_room_for(order, rec.nbytes)

    def _has_room_for(self, order: int, nbytes: int) -> bool:
        """Whether there is room for `nbytes` at that save, and for the next one."""
        routine = self._learner.routine
        return routine is not None and self._room.has_for(routine, order, nbytes)

    def _one_more(self, record: int) -> None:
        """A record has been saved for the first time."""
        self._recall.by_order.append(record)
        if self._headroom is not None:
            self._headroom.saved()

    # -- what is left to autograd -------------------------------------------------------------------------------------
    def hear_all(self) -> None:
        """Somebody hears of saves where the routine has nobody do so, and of what is saved there in later ones, too: in
        the rest of this step nothing new is left alone."""
        self._hears_all = True

    def again_alone(self, order: int, signature: int) -> bool:
        """One more tensor is saved, and heard of, on a storage that was left alone in this step: its bytes are counted,
        and until when. False if it was not."""
        if order not in self._learner.alone:
            return False
        self._learner.came(signature, order)
        return True

    def may_leave_alone(self, calls: int) -> bool:
        """Whether nobody need hear of saves after so many calls, which is where the routine has it so. Not in the first
        step that follows it, nor where what is saved meanwhile, and next, may find no room."""
        learner = self._learner
        routine, alone = learner.routine, learner.routine.alone if learner.routine is not None else None
        if routine is None or alone is None or not routine.followed or self._hears_all or self._headroom is not None:
            return False
        return learner.packs == alone.saves_before(calls) > 0 and self._room.has(alone.rises[calls])

    def left_alone(self, calls: int | None, now_ns: int) -> None:
        """Somebody hears of saves again, after so many calls, or because forward has ended (None): autograd has kept
        what was saved meanwhile. Where it has not ended after all, what that was is not known."""
        routine = self._learner.routine
        if calls is None and routine is not None and not routine.all_saved:
            self.lose_track(now_ns)
        else:
            self._count_alone(calls, now_ns)

    def lose_track(self, now_ns: int) -> None:
        """The step goes otherwise, and nobody has heard of its last saves. As far as its calls were those that the
        routine expects, so were they: until the step ends they count as what is there."""
        routine = self._learner.routine
        if routine is not None:
            self._count_alone(routine.calls + 1, now_ns)
        self._learner.lose_track()

    def _count_alone(self, calls: int | None, now_ns: int) -> None:
        """What nobody has heard of that was saved before so many calls; in all, for None."""
        learner = self._learner
        alone = learner.routine.alone if learner.routine is not None else None
        if alone is None or not learner.in_step:
            return
        for order in learner.came_alone(alone.saves_before(calls), self._net_ns(now_ns)):
            self._recall.by_order.append(NOBODY_S)
            heappush(self._alone, (alone.until[order], alone.nbytes[order]))
            self._ledger.count(0, alone.nbytes[order], alone.nbytes[order])

    def alone_until(self, order: int | None, now_ns: int) -> None:
        """Before a need of that save order, or at the end of the step (None): what was left alone has been asked for,
        and has gone, up to here."""
        if order is None:
            self._hears_all = False
        if not self._alone:
            return
        if order is not None:
            self._learner.needed_alone(order, self._net_ns(now_ns))
        while self._alone and (order is None or self._alone[0][0] <= len(self._learner.log.needs)):
            _, nbytes = heappop(self._alone)
            self._ledger.count(0, -nbytes, -nbytes)

    # -- backward -----------------------------------------------------------------------------------------------------
    def need(self, kept: Kept, stretch: int, stays: bool, now_ns: int, in_backward: bool) -> bool:
        """Somebody asks for a kept storage, which was saved in that stretch. Whether `pressure` or `prefetch` has
        something to do."""
        if in_backward:
            self._step_ends.need(stretch)
        learner, headroom = self._learner, self._headroom
        if stays:
            learner.asked()
            return False
        self.alone_until(kept.order, now_ns)
        learner.needed(kept.order, self._net_ns(now_ns))
        if headroom is not None:
            headroom.needed()
            limit = self._room.limit_bytes
            if limit is not None and self._ledger.resident_bytes > limit:
                return True
        if self._recall.waiting:
            return True
        plan, here = learner.plan, len(learner.log.needs) - 1
        return plan is not None and (here in plan.prefetch or here in plan.evictions)
