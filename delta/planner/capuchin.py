"""Capuchin: free time for swaps, memory saving per second for what is left (Peng et al., ASPLOS 2020, section 4).

The measured step gives every access its time. While more is there at some moment than the limit allows, take the worst
one; what is not accessed around it may go, from its last access before to its next one after:

1. Sorted by free time, FT = t_back - t_evict - 2 * SwapTime. Where FT >= 0 and the lanes can hide both copies, it is
   swapped, from the access on (proactive eviction).
2. If that is not enough: the smaller of the exposed swap time and the recomputation of the missing lineage, largest
   memory saving per second (MSPS) first. Lineages grow with the targets chosen before.

A copy back starts at its in-trigger: the last access that leaves it time enough. `sooner` moves the trigger 5 % of the
swap time ahead after a step in which the copy came late; the lane is exclusive, so one late copy delays others.

Differences from the paper: swaps are booked on the lanes while they are chosen, the limit decides how much is saved,
not the bytes a passive first step evicted, and in 2. a swap costs what its copies take from compute as well, as a
replay costs what it takes beside its op. Deterministic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import replace
from heapq import heapify, heappop, heapreplace

from delta.planner.assemble import plan_of, without_actions
from delta.planner.lanes import Booking, Lanes
from delta.planner.moments import Gap, Moments, free
from delta.planner.steplog import Plan, StepGraph
from delta.planner.task import Task
from delta.types import Action, Link

FEEDBACK = 0.05  # of the swap time, by which a trigger moves ahead
TRIES = 4  # what replays hold on their way is seen by the forecast only: aim lower so often


def capuchin(task: Task) -> Plan:
    """Plan a step by free time and MSPS. Where the limit cannot be held, as little over it as the rules give."""
    moments = Moments(task)
    aim_bytes, plans = task.limit_bytes, list[Plan]()
    for _ in range(1 if task.everything else TRIES):
        plans.append(_Choice(task, moments, aim_bytes).plan())
        over_bytes = plans[-1].peak_bytes - task.limit_bytes
        if over_bytes <= 0:
            break
        aim_bytes = max(0, aim_bytes - over_bytes)
    return min(plans, key=lambda plan: max(plan.peak_bytes, task.limit_bytes))


def sooner(plan: Plan, graph: StepGraph, link: Link, late: Collection[int]) -> Plan:
    """The plan with earlier triggers for the save orders whose copies back were still under way when they were needed:
    5 % of the swap time, one access at least, and never before the storage went."""
    prefetch: dict[int, list[int]] = {}
    for position, orders in sorted(plan.prefetch.items()):
        for order in orders:
            at = position
            if order in late:
                swap_ns = link.in_ns(plan.saved_bytes[order])
                to_ns = plan.need_ns[position] - int(swap_ns * FEEDBACK)
                needs = plan.next_needs[order]
                went = bisect_right(needs, position) - 1
                first = max(needs[went] + 1 if went >= 0 else 0, graph.needs_before[order] if graph.needs_before else 0)
                at = min(position, max(first, min(bisect_right(plan.need_ns, to_ns), position) - 1))
            prefetch.setdefault(at, []).append(order)
    return replace(plan, prefetch={at: tuple(orders) for at, orders in sorted(prefetch.items())})


class _Choice:
    """Gaps in which storages are gone, chosen for one aim."""

    def __init__(self, task: Task, moments: Moments, aim_bytes: int) -> None:
        self.task, self.graph, self.moments, self.aim_bytes = task, task.graph, moments, aim_bytes
        self.lanes = Lanes(task.link)
        self.resident = list(moments.resident_bytes)
        self.gaps = [gap for gap in moments.gaps if self._may_go(gap)]
        self.swapped: dict[Gap, Booking] = {}
        self.dropped: dict[Gap, None] = {}
        self.missing: dict[int, list[Gap]] = {}  # save order -> its gaps that are recomputed

    def plan(self) -> Plan:
        while max(self.resident, default=0) > self.aim_bytes:
            worst = self.resident.index(max(self.resident))
            self._swap_hidden(worst)
            self._choose_dearer(worst)
            if self.resident[worst] > self.aim_bytes:
                self.resident[worst] = -1  # nothing more can go there
        return self._everything() if self.task.everything else self._saved()

    def _may_go(self, gap: Gap) -> bool:
        node = self.graph.nodes[self.graph.saved[gap.order]]
        return node.evictable and node.nbytes > 0 and self.task.forced.get(gap.order) is not Action.KEEP

    def _may(self, gap: Gap, action: Action) -> bool:
        return action in self.task.allowed and self.task.forced.get(gap.order) in (None, action)

    def _candidates(self, worst: int) -> list[Gap]:
        return [
            gap
            for gap in self.gaps
            if gap.first <= worst < gap.back and gap not in self.swapped and gap not in self.dropped
        ]

    def _free_ns(self, gap: Gap) -> int:
        """Free time on an idle link."""
        nbytes, link = self.moments.nbytes(gap.order), self.task.link
        return gap.until_ns - gap.from_ns - link.out_ns(nbytes) - link.in_ns(nbytes)

    def _offer(self, gap: Gap, worst: int) -> Booking:
        nbytes = self.moments.nbytes(gap.order)
        return self.lanes.offer(nbytes, gap.from_ns, self.moments.around(worst), gap.until_ns)

    def _swap_hidden(self, worst: int) -> None:
        able = [gap for gap in self._candidates(worst) if self._may(gap, Action.SWAP)]
        for gap in sorted(able, key=lambda gap: (-self._free_ns(gap), gap.order)):
            if self.resident[worst] <= self.aim_bytes or self._free_ns(gap) < 0:
                return
            booking = self._offer(gap, worst)
            if booking.free_ns >= 0 and not booking.exposed_ns:
                self._swap(gap, booking, worst)

    def _choose_dearer(self, worst: int) -> None:
        """Largest saving per second first. Costs only grow as more is chosen, so the first one whose cost has not
        changed since it was looked at is the best."""
        heap = [entry for gap in self._candidates(worst) if (entry := self._entry(gap, worst)) is not None]
        heapify(heap)
        while heap and self.resident[worst] > self.aim_bytes:
            known = heap[0]
            now = self._entry(known[3], worst)
            if now is None:
                heappop(heap)
            elif now[0] > known[0]:
                heapreplace(heap, now)
            else:
                heappop(heap)
                gap, how = now[3:]
                if how is None:
                    self._drop(gap)
                else:
                    self._swap(gap, how, worst)

    def _entry(self, gap: Gap, worst: int) -> tuple[float, int, int, Gap, Booking | None] | None:
        """Seconds per byte saved, and how; None where it can go in no way."""
        ways: list[tuple[int, Booking | None]] = []
        if self._may(gap, Action.RECOMPUTE) and (replay_ns := self._lineage_ns(gap)) is not None:
            ways.append((replay_ns, None))
        if self._may(gap, Action.SWAP):
            booking = self._offer(gap, worst)
            busy_ns = booking.out_took_ns + booking.in_took_ns
            ways.append((booking.exposed_ns + int(self.task.link.taken_ns(busy_ns, 2)), booking))
        if not ways:
            return None
        cost_ns, how = min(ways, key=lambda way: way[0])
        return cost_ns / self.moments.nbytes(gap.order), gap.order, gap.until, gap, how

    def _lineage_ns(self, gap: Gap) -> int | None:
        """Time to make the storage again for its back access, with all ancestors that are missing then."""
        graph, ops, todo = self.graph, set[int](), [self.graph.saved[gap.order]]
        while todo:
            op = graph.nodes[todo.pop()].op
            if op is None or not graph.ops[op].replayable:
                return None
            if op not in ops:
                ops.add(op)
                todo += [source for source in graph.ops[op].inputs if not self._there(source, gap.back)]
        return sum(graph.ops[op].cost_ns for op in ops)

    def _there(self, source: int, moment: int) -> bool:
        node = self.graph.nodes[source]
        if node.rooted or node.order < 0:
            return node.rooted or node.op is None  # what no op of the step makes was there before it
        born, dead = self.moments.lives[node.order]
        if not born < moment < dead:
            return False
        return not any(gap.first <= moment < gap.back for gap in self.missing.get(node.order, ()))

    def _swap(self, gap: Gap, booking: Booking, worst: int) -> None:
        """A copy out that has not ended by the worst moment is waited for there, which is what makes it dear."""
        self.lanes.book(booking)
        self.swapped[gap] = booking
        gone = max(gap.first, min(worst, self.moments.gone_by(booking.out_ns + booking.out_took_ns)))
        back = self.moments.needs[min(self.moments.trigger(gap, booking.in_ns) + 1, gap.until)]
        free(self.resident, gone, back, self.moments.nbytes(gap.order))

    def _drop(self, gap: Gap) -> None:
        self.dropped[gap] = None
        self.missing.setdefault(gap.order, []).append(gap)
        free(self.resident, gap.first, gap.back, self.moments.nbytes(gap.order))

    # -- as a plan ------------------------------------------------------------------------------------------------
    def _triggers(self) -> dict[int, tuple[int, ...]]:
        """Need -> save orders whose copy back starts when it has been served."""
        found: dict[int, list[int]] = {}
        for gap, booking in sorted(self.swapped.items(), key=lambda item: (item[1].in_ns, item[0].order)):
            found.setdefault(self.moments.trigger(gap, booking.in_ns), []).append(gap.order)
        return {at: tuple(orders) for at, orders in sorted(found.items())}

    def _saved(self) -> Plan:
        graph, actions = self.graph, [Action.KEEP] * len(self.graph.saved)
        for gap in self.swapped:
            actions[gap.order] = Action.SWAP
        for gap in self.dropped:
            actions[gap.order] = Action.RECOMPUTE
        return replace(plan_of(graph, self.task.link, actions), prefetch=self._triggers())

    def _everything(self) -> Plan:
        graph, evictions = self.graph, dict[int, list[tuple[int, Action]]]()
        for gaps, action in ((self.swapped, Action.SWAP), (self.dropped, Action.RECOMPUTE)):
            for gap in gaps:
                at = gap.after if gap.after >= 0 else max(0, graph.needs_before[gap.order] - 1)
                evictions.setdefault(at, []).append((gap.order, action))
        going = {at: tuple(goes) for at, goes in sorted(evictions.items())}
        swap_bytes = sum(self.moments.nbytes(gap.order) for gap in self.swapped)
        return without_actions(graph, self._triggers(), going, swap_bytes)
