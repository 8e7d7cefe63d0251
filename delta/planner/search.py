"""Which guide is best: a few that are known to be good, then changes to the best, each rehearsed.

A rehearsal tells the whole cost of a guide, so the search may change whatever it likes: how much a single storage is
worth, what is copied out ahead of need, how the time to the next use counts. It looks where the cost is: a storage
that was replayed for long, or waited for, or that went. Every change that is not worse is kept. The same step is
searched the same way each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from delta.planner.foresight import foresee
from delta.planner.rehearsal import Failed, Guide, Rehearsal
from delta.planner.steplog import Plan
from delta.planner.task import Task
from delta.planner.timetable import Timetable
from delta.types import Action

IDLE_WEIGHTS = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)  # of what the link can carry in forward
LEADS = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0)
PATIENCES = (0.0, 0.15, 0.3, 0.6, 1.0)
NUDGES = (0.5, 1.0, 2.0, 4.0)
WORTH_KEEPING = 3.0
# Changes to the best guide are tried in runs of so many, each from the same beginning, until this effort is spent.
RUNS, CHANGES, EFFORT = 3, 300, 200_000


def rehearse(task: Task, choices: Iterable[Sequence[Action]] = ()) -> Plan:
    """The plan that did best in rehearsal; `choices` (an action for each storage, by save order) are tried, too. Where
    none came through, or a policy does not recompute, one that knows the next uses and leaves every action to the
    filter."""
    if not _can_be_rehearsed(task):
        return foresee(task.graph)
    search = _Search(task)
    search.try_choices(choices)
    return _plan(task, search.run())


def rehearse_along(task: Task, choices: Iterable[Sequence[Action]]) -> Plan | None:
    """The plan that did best in rehearsal among those that keep and swap what one of the `choices` does. None where
    none came through."""
    if not _can_be_rehearsed(task):
        return None
    search = _Search(task)
    search.try_choices(choices)
    return _plan(task, search.best) if search.best is not None else None


def _can_be_rehearsed(task: Task) -> bool:
    """Rules may keep storages, but not say how they go."""
    ruled = any(action is not Action.KEEP for action in task.forced.values())
    return Action.RECOMPUTE in task.allowed and not ruled and bool(task.graph.turns)


def _plan(task: Task, best: Rehearsal | None) -> Plan:
    plan = foresee(task.graph)
    if best is None:
        return plan
    moves = best.moves()
    swap_bytes = sum(plan.saved_bytes[order] for each in moves.values() for order in each.leaving)
    return replace(plan, moves=moves, replay_ns=best.replay_ns, stall_ns=best.stall_ns, swap_bytes=swap_bytes)


class _Search:
    def __init__(self, task: Task) -> None:
        self.table, self.limit_bytes = Timetable(task.graph, kept=task.forced), task.limit_bytes
        self.link = task.link if Action.SWAP in task.allowed else None
        self.best: Rehearsal | None = None
        self._held_over = task.graph.held_over
        self._random = random.Random(0)
        self._spent = 0

    def try_choices(self, choices: Iterable[Sequence[Action]]) -> None:
        for actions in choices:
            kept = {v: WORTH_KEEPING for v in self._held_over if actions[v] is Action.KEEP}
            swapped = frozenset(v for v, action in enumerate(actions) if action is Action.SWAP)
            for idle_weight in IDLE_WEIGHTS:
                self.attempt(Guide(idle_weight, False, kept, swapped))
            if swapped and self.best is not None:
                for lead, patience in ((1.5, 0.0), (3.0, 0.3), (3.0, 0.0), (3.0, 1.0)):
                    self.attempt(replace(self.best.guide, lead=lead, patience=patience))

    def run(self) -> Rehearsal | None:
        for idle_weight in IDLE_WEIGHTS:
            for both_sides in (False, True):
                self.attempt(Guide(idle_weight, both_sides))
        self._try_swaps()
        begun, found = self.best, self.best
        for _ in range(RUNS):
            self.best = begun
            for _ in range(CHANGES):
                if self.best is None or not self.best.cost_ns or self._spent > EFFORT:
                    break
                self.attempt(self._changed(self.best))
            if self.best is not None and found is not None and self.best.cost_ns < found.cost_ns:
                found = self.best
        return found

    def attempt(self, guide: Guide) -> None:
        """Rehearse under a guide, and remember it if it is the best so far. Once the effort is spent, only if there is
        none yet."""
        best = self.best
        if best is not None and self._spent > EFFORT:
            return
        rehearsal = Rehearsal(self.table, self.limit_bytes, self.link, guide) if best is None else best.under(guide)
        before = rehearsal.effort
        with suppress(Failed):
            self.best = rehearsal.run()
        self._spent += rehearsal.effort - before

    def _try_swaps(self) -> None:
        """Copy out what took the most replay time for its bytes, as much as the link can carry in forward."""
        if self.link is None:
            return
        if self.best is None:
            best, replayed_ns = Guide(), dict.fromkeys(range(self.table.count), 1)
        else:
            best, replayed_ns = self.best.guide, self.best.replayed_ns
        nbytes = self.table.nbytes
        dearest = sorted((v for v in replayed_ns if nbytes[v]), key=lambda v: (-replayed_ns[v] / nbytes[v], v))
        forward_ns = self.table.start_ns[self.table.backward]
        for share in SHARES:
            left_ns = share * forward_ns
            swapped = set()
            for storage in dearest:
                took_ns = self.link.out_ns(nbytes[storage])
                if took_ns <= left_ns:
                    left_ns -= took_ns
                    swapped.add(storage)
            for idle_weight in sorted({best.idle_weight, 0.3, 0.75}):
                self.attempt(replace(best, idle_weight=idle_weight, swapped=frozenset(swapped)))

    def _changed(self, best: Rehearsal) -> Guide:
        """The best guide with a few changes."""
        draw, guide = self._random, best.guide
        weights, swapped = dict(guide.weights), set(guide.swapped)
        replayed = list(best.replayed_ns)
        dear_ns = list(best.replayed_ns.values())
        for _ in range(draw.choice((1, 1, 2, 4, 8))):
            kind = draw.random()
            if self.link is not None and kind < 0.3:
                if replayed and self.table.uses[storage := draw.choices(replayed, dear_ns)[0]]:
                    swapped.add(storage)
            elif self.link is not None and kind < 0.5:
                late = [storage for storage in best.waited_ns if storage in swapped]
                if some := late if late and draw.random() < 0.5 else sorted(swapped):
                    swapped.discard(draw.choice(some))
            elif kind < 0.75 and replayed:
                storage = draw.choices(replayed, dear_ns)[0]
                weights[storage] = weights.get(storage, 0.0) + draw.choice(NUDGES)
            else:
                some_went = best.went and draw.random() < 0.4
                storage = draw.choice(best.went) if some_went else draw.randrange(self.table.count)
                weights[storage] = weights.get(storage, 0.0) - draw.choice(NUDGES)
        return Guide(
            max(0.0, min(1.2, guide.idle_weight + draw.choice((-0.2, -0.1, 0.1, 0.2))))
            if draw.random() < 0.15
            else guide.idle_weight,
            guide.both_sides is not (draw.random() < 0.05),
            weights,
            frozenset(swapped),
            draw.choice(LEADS) if draw.random() < 0.1 else guide.lead,
            draw.choice(PATIENCES) if self.link is not None and draw.random() < 0.1 else guide.patience,
        )
