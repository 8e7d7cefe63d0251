"""A rehearsal: one step of turns, played in numbers alone, under a guide that says who goes first.

It does what engine and device do in a planned step, in the same order: storages that a turn reads are pinned and
brought back, by a copy or by a depth-first walk along the missing ops (`delta.descent`), room is made before every
allocation, copies take turns on the two directions of the link, and what the program has let go of goes at once. It
knows all of the step, so the idle time of a storage is the time to its next use. It takes milliseconds, so that a
planner can rehearse a step hundreds of times, each time under another guide, and hand the moves of the best to the
engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from delta.planner.away import Away
from delta.planner.steplog import Moves
from delta.planner.timetable import NEVER_NS, Timetable
from delta.types import Link

_SOON = 64  # copies back that are looked at together
_DEAR = 3  # turns: what a replay takes, and finding who goes
_SCENES = 20  # of a rehearsal are remembered, for others to go on from there
# Attributes of a rehearsal that its scenes share; all others change from turn to turn.
_GIVEN = frozenset(
    {"table", "limit_bytes", "link", "guide", "at_most_ns", "_worth", "_dearness", "_leaves_after", "_in_ns", "_scenes"}
)


@dataclass(frozen=True, slots=True)
class Guide:
    """Who goes first, and what is copied out ahead of need.

    The storage with the least `(replay time + 1) * exp(weight) / (bytes * idle ** idle_weight)` goes. The replay time
    is that of its op and all missing ancestors; with `both_sides` of the missing descendants, too. `swapped` are copied
    out in their longest rest, and their copies back begin `lead` copy lengths before they are used. Where room is short
    while one is on its way out, that is waited for up to `patience` times as long as its bytes would take to replay.
    """

    idle_weight: float = 0.3
    both_sides: bool = False
    weights: Mapping[int, float] = field(default_factory=dict)
    swapped: frozenset[int] = frozenset()
    lead: float = 1.5
    patience: float = 0.3


# Ops that are replayed one after the other: their time, and a bit for each of them.
_Chain = tuple[int, int]


class Failed(Exception):
    """No way through under this guide, or none that is better than what is known."""


class Rehearsal:
    """Play `table` once with `limit_bytes` for all storages. `cost_ns`: what the step is longer by."""

    def __init__(
        self, table: Timetable, limit_bytes: int, link: Link | None, guide: Guide, at_most_ns: float = inf
    ) -> None:
        """`at_most_ns`: give up (Failed) when the step is longer by more. Without a link nothing is swapped."""
        count = table.count
        self.table, self.limit_bytes, self.link = table, limit_bytes, link
        self._in_ns = [link.in_ns(n) if link is not None else 0 for n in table.nbytes]
        self._scenes: list[dict[str, Any]] = []
        self.at_most_ns = min(at_most_ns, table.end_ns)
        self.replay_ns = self.stall_ns = 0
        self.now_ns = 0
        self.used_bytes = 0
        self._replays = 0
        self._owed: set[int] = set()  # ops that have to be replayed once more at least
        self._owed_ns = 0
        self.replayed_ns: dict[int, int] = {}  # by storage: time of the replays that made it again
        self.waited_ns: dict[int, int] = {}  # by storage: time compute stood still for its copy back
        self.went: list[int] = []  # everything that went for want of room
        self._victims: dict[int, list[int]] = {}
        self._leaving: dict[int, list[int]] = {}
        self._dropped: dict[int, list[int]] = {}
        self._coming: dict[int, list[int]] = {}
        self._turn = 0
        self._exists = bytearray(count)  # flags, which are copied in no time
        self._wanted = bytearray(count)  # the program still refers to it
        self._there = bytearray(count)
        self._in_reach = bytearray(count)  # there, or whole on the host
        self._on_host = bytearray(count)
        self._moving = bytearray(count)
        self._ready_ns = [0] * count
        self._pins = [0] * count
        self._moved: list[int] = []  # got into reach or out of it since costs were last looked at
        self._stale: set[int] = set()
        self._chains: dict[int, _Chain] = {}  # by op, as far as they are known
        self._may_go = np.zeros(count, bool)
        self._cost_ns = [0.0] * count
        self._next_ns = np.full(count, NEVER_NS)
        self._going: deque[int] = deque()
        self._arriving: deque[int] = deque()
        self._out_free_ns = self._in_free_ns = 0
        self._away = Away()  # whole on the host and not here
        self._queue: list[tuple[float, float, int]] | None = None  # see `_latest_starts`; None: look again
        self._due_ns: float | None = None  # of the first in it
        self._short_since: float = inf  # the first turn in which room was short
        self._follow(guide)

    def _follow(self, guide: Guide) -> None:
        self.guide, table = guide, self.table
        weights = np.zeros(table.count)
        weights[list(guide.weights)] = list(guide.weights.values())
        worth = np.exp(weights) / np.maximum(1, table.nbytes)
        self._worth: list[float] = worth.tolist()
        self._dearness = (np.array(self._cost_ns) + 1) * worth  # what the score is without the time to the next use
        self._leaves_after: dict[int, list[int]] = {}
        for storage in sorted(guide.swapped) if self.link is not None else ():
            self._leaves_after.setdefault(table.before_longest_rest(storage), []).append(storage)

    @property
    def cost_ns(self) -> int:
        return self.replay_ns + self.stall_ns

    @property
    def effort(self) -> int:
        """What it took to play so far, in turns."""
        return self._turn + _DEAR * (self._replays + len(self.went))

    def run(self) -> Rehearsal:
        """Failed where it cannot be done, or costs more than `at_most_ns`."""
        turns, reads_next_ns, makes_next_ns = self.table.turns, self.table.reads_next_ns, self.table.makes_next_ns
        every = -(-len(turns) // _SCENES)
        for number in range(self._turn, len(turns)):
            turn, self._turn = turns[number], number
            if number % every == 0:
                self._remember()
            if self._going or self._arriving:
                self._poll()
            self._read(reads_next_ns[number])
            if turn.op is not None:
                self._make_room(self.table.op_bytes[turn.op])
            self.now_ns += turn.end_ns - turn.start_ns
            for made, next_ns in makes_next_ns[number]:
                self._exists[made] = self._wanted[made] = True
                self._next_ns[made] = next_ns
                self._arrive(made)
            for read in turn.reads:
                self._unpin(read)
            if self.link is not None:
                self._after_turn()
            for storage in turn.freed:
                self._free(storage)
        self._turn = len(turns)
        self._remember()
        return self

    def under(self, guide: Guide) -> Rehearsal:
        """Another one under `guide`, at most as dear: up to some turn it goes as this one did, and it begins there."""
        alike_to = self._alike_to(guide)
        other = copy(self)
        other._scenes = [scene for scene in self._scenes if scene["_turn"] <= alike_to]
        vars(other).update(_copies(other._scenes.pop()))
        other.at_most_ns = self.cost_ns
        other._follow(guide)
        return other

    def moves(self) -> dict[int, Moves]:
        """What the engine has to do in each turn for the same to happen."""
        parts = (self._victims, self._leaving, self._dropped, self._coming)
        turns = sorted({turn for part in parts for turn in part})
        return {turn: Moves(*(tuple(part.get(turn, ())) for part in parts)) for turn in turns}

    # -- scenes -------------------------------------------------------------------------------------------------------
    def _remember(self) -> None:
        self._scenes.append(_copies({name: value for name, value in vars(self).items() if name not in _GIVEN}))

    def _alike_to(self, guide: Guide) -> float:
        """The first turn that may go differently under `guide`."""
        mine, turns = self.guide, [inf]
        if (mine.idle_weight, mine.both_sides, mine.patience) != (guide.idle_weight, guide.both_sides, guide.patience):
            turns.append(self._short_since)
        if mine.lead != guide.lead:
            turns += self._leaving
        turns += map(self.table.before_longest_rest, mine.swapped ^ guide.swapped)
        for storage in mine.weights.keys() | guide.weights.keys():
            change = guide.weights.get(storage, 0.0) - mine.weights.get(storage, 0.0)
            if change > 0:
                turns += self._went_in(storage)
            elif change < 0 and self.table.evictable[storage]:
                turns.append(max(self._short_since, self.table.made_in[storage]))
        return min(turns)

    def _went_in(self, storage: int) -> Iterable[int]:
        """Turns in which the storage made room."""
        return (turn for part in (self._victims, self._dropped) for turn, went in part.items() if storage in went)

    # -- a turn -------------------------------------------------------------------------------------------------------
    def _read(self, reads: Sequence[tuple[int, float]]) -> None:
        """`reads`: storages, and when each is used next after this turn."""
        there, pins, may_go, next_uses_ns = self._there, self._pins, self._may_go, self._next_ns
        all_there = all([there[read] for read, _ in reads])
        if not all_there:
            reads = sorted(reads, key=lambda each: not there[each[0]])
        for read, next_ns in reads:
            pins[read] += 1
            may_go[read] = False
            next_uses_ns[read] = next_ns
            if not there[read] and self._on_host[read]:
                self._fetch(read)
        if not all_there or self._arriving:
            self._bring(reads)
        self._give_up_if_dear()

    def _bring(self, reads: Sequence[tuple[int, float]]) -> None:
        for read, _ in reads:
            if not self._in_reach[read]:
                self._replay(read)
            elif not self._there[read]:
                self._fetch(read)
            self._wait_for(read)

    def _give_up_if_dear(self) -> None:
        """What is out of reach and used again, and what its replay misses, costs that much at least."""
        if self.replay_ns + self.stall_ns + self._owed_ns > self.at_most_ns:
            raise Failed

    def _after_turn(self) -> None:
        if self._going or self._arriving:
            self._poll()
        for storage in self._leaves_after.get(self._turn, ()):
            if self._there[storage] and not (self._on_host[storage] or self._moving[storage] or self._pins[storage]):
                self._leave(storage)
        if self._away:
            self._prefetch()

    def _free(self, storage: int) -> None:
        self._wanted[storage] = False
        if self._is_left_over(storage):
            self._bury(storage)

    # -- what is where ------------------------------------------------------------------------------------------------
    def _arrive(self, storage: int) -> None:
        self._there[storage] = True
        self.used_bytes += self.table.nbytes[storage]
        if not self._in_reach[storage]:
            self._in_reach[storage] = True
            self._moved.append(storage)
        self._stale.add(storage)
        self._seat(storage)

    def _seat(self, storage: int) -> None:
        """Whether the storage may go, from here on."""
        if self.table.evictable[storage]:
            self._may_go[storage] = (
                self._there[storage]
                and not self._pins[storage]
                and not self._moving[storage]
                and (self.table.replayable[storage] or self._on_host[storage])
            )

    def _depart(self, storage: int) -> None:
        self._there[storage] = self._may_go[storage] = False
        self.used_bytes -= self.table.nbytes[storage]
        if self._on_host[storage]:
            self._away.set(storage, self._needed_ns(storage))
            self._queue = self._due_ns = None
            return
        self._in_reach[storage] = False
        self._moved.append(storage)
        if self._next_ns[storage] < NEVER_NS or self._is_owed_for(storage):
            self._owe(self.table.maker[storage])
        if self._away and self._wanted[storage]:
            self._need_what_it_is_made_of(storage)

    def _is_owed_for(self, storage: int) -> bool:
        """Whether something that has to be replayed reads the storage."""
        maker, owed = self.table.maker, self._owed
        return any(maker[child] in owed for child in self.table.children[storage])

    def _owe(self, op: int) -> None:
        owed, todo = self._owed, [op]
        while todo:
            if (op := todo.pop()) not in owed:
                owed.add(op)
                self._owed_ns += self.table.op_ns[op]
                todo += self._missing_below(op)

    def _go(self, storage: int, moves: dict[int, list[int]]) -> None:
        """A storage goes for want of room."""
        moves.setdefault(self._turn, []).append(storage)
        self.went.append(storage)
        self._depart(storage)

    def _bury(self, storage: int) -> None:
        """Nobody refers to the storage any more: it goes, if a recipe or a host copy would bring it back."""
        if self.table.replayable[storage] or self._on_host[storage]:
            self._depart(storage)

    def _unpin(self, storage: int) -> None:
        self._pins[storage] -= 1
        if not self._pins[storage]:
            self._seat(storage)

    # -- room ---------------------------------------------------------------------------------------------------------
    def _make_room(self, nbytes: int) -> None:
        """Let storages go until `nbytes` more fit. A copy out under way is waited for where that is cheaper."""
        while self.used_bytes + nbytes > self.limit_bytes:
            victim = self._first_to_go()
            if self._going and (victim is None or self._rather_wait(self._going[0], victim)):
                victim = self._going[0]
                self._victims.setdefault(self._turn, []).append(victim)
                self._wait_until(self._ready_ns[victim])
                continue
            if victim is None:
                raise Failed
            self._go(victim, self._victims)

    def _rather_wait(self, leaving: int, victim: int) -> bool:
        share = min(1.0, self.table.nbytes[leaving] / self.table.nbytes[victim])
        return bool(self._ready_ns[leaving] - self.now_ns < self.guide.patience * self._cost_ns[victim] * share)

    def _first_to_go(self, after_ns: float | None = None) -> int | None:
        """Who goes first, among those next used later than `after_ns` if that is given."""
        self._short_since = min(self._short_since, self._turn)
        self._count_costs()
        candidates = self._may_go if after_ns is None else self._may_go & (self._next_ns > after_ns)
        storages = candidates.nonzero()[0]
        if not storages.size:
            return None
        scores = self._dearness.take(storages)
        if self.guide.idle_weight:
            idle_ns = self._next_ns.take(storages) - (self.table.start_ns[self._turn] - 1)
            scores *= idle_ns**-self.guide.idle_weight
        return int(storages[scores.argmin()])

    def _count_costs(self) -> None:
        """Bring the costs of all that may go up to date."""
        if self._moved:
            touched = self._touched()
            self._stale |= touched
            for storage in touched:
                self._chains.pop(self.table.maker[storage], None)
            self._moved.clear()
        may_go, there, evictable, later = self._may_go, self._there, self.table.evictable, set()
        for storage in self._stale:
            if evictable[storage] and there[storage]:
                if may_go[storage]:
                    cost_ns = self._cost_ns[storage] = self._replay_cost_ns(storage)
                    self._dearness[storage] = (cost_ns + 1) * self._worth[storage]
                else:
                    later.add(storage)
        self._stale = later

    def _touched(self) -> set[int]:
        """Whose cost may have changed by what moved: all that is made out of it through what is out of reach."""
        exists, in_reach, children = self._exists, self._in_reach, self.table.children
        moved = set(self._moved)
        touched, todo = set(moved), list(moved)
        while todo:
            for child in children[todo.pop()]:
                if child not in touched and exists[child]:
                    touched.add(child)
                    if not in_reach[child]:
                        todo.append(child)
        if self.guide.both_sides:
            op_reads, maker = self.table.op_reads, self.table.maker
            above, todo = set(moved), list(moved)
            while todo:
                made_by = maker[todo.pop()]
                for parent in op_reads[made_by] if made_by >= 0 else ():
                    if parent not in above:
                        above.add(parent)
                        if not in_reach[parent]:
                            todo.append(parent)
            touched |= above
        return touched

    def _replay_cost_ns(self, storage: int) -> float:
        if self._on_host[storage]:
            return 0.05 * self._in_ns[storage]  # the copy back is mostly hidden, and takes room and the link
        maker = self.table.maker[storage]
        total_ns = (self._chains.get(maker) or self._chain_of(maker))[0]
        return total_ns + self._below_ns(storage) if self.guide.both_sides else total_ns

    def _chain_of(self, op: int) -> _Chain:
        """An op and all that it misses. Found once, until something moves that matters to it."""
        known, todo = self._chains, [op]
        while todo:
            below = self._missing_below(last := todo[-1])
            if unknown := [each for each in below if each not in known]:
                todo += unknown
                continue
            known[last] = _joined(last, self.table.op_ns, [known[each] for each in below])
            todo.pop()
        return known[op]

    def _missing_below(self, op: int) -> set[int]:
        """The ops that make what an op misses."""
        maker, in_reach = self.table.maker, self._in_reach
        return {maker[read] for read in self.table.op_reads[op] if not in_reach[read]}

    def _below_ns(self, storage: int) -> int:
        table, seen, todo, total_ns = self.table, {storage}, [storage], 0
        while todo:
            for child in table.children[todo.pop()]:
                if child not in seen and self._exists[child] and not self._in_reach[child]:
                    seen.add(child)
                    todo.append(child)
                    total_ns += table.op_ns[table.maker[child]]
        return total_ns

    # -- replays ------------------------------------------------------------------------------------------------------
    def _replay(self, target: int) -> None:
        """Depth first from the target, as `delta.descent` walks."""
        table = self.table
        pending = self._missing_ops(table.maker[target])
        readers: dict[int, int] = {}
        for op in pending:
            for read in table.op_reads[op]:
                readers[read] = readers.get(read, 0) + 1
        stack: list[int] = []
        self._enter(table.maker[target], stack)
        while stack:
            op = stack[-1]
            missing = next((read for read in table.op_reads[op] if not self._in_reach[read]), None)
            if missing is not None:
                below = table.maker[missing]
                if below not in pending:
                    pending.add(below)
                    for read in table.op_reads[below]:
                        readers[read] = readers.get(read, 0) + 1
                self._enter(below, stack)
                continue
            made = self._replay_op(op)
            stack.pop()
            pending.discard(op)
            for read in table.op_reads[op]:
                self._unpin(read)
                readers[read] -= 1
            for storage in (*made, *table.op_reads[op]):
                if self._is_left_over(storage) and not readers.get(storage):
                    self._bury(storage)

    def _replay_op(self, op: int) -> list[int]:
        table = self.table
        for read in table.op_reads[op]:
            if not self._there[read]:
                self._fetch(read)
        self._make_room(table.op_bytes[op])
        for read in table.op_reads[op]:
            self._wait_for(read)
        self._replays += 1
        self.replay_ns += table.op_ns[op]
        self.now_ns += table.op_ns[op]
        made = [storage for storage in table.op_makes[op] if self._exists[storage] and not self._in_reach[storage]]
        for storage in made:
            self._arrive(storage)
            self.replayed_ns[storage] = self.replayed_ns.get(storage, 0) + table.op_ns[op]
        if op in self._owed:
            self._owed.remove(op)
            self._owed_ns -= table.op_ns[op]
        self._give_up_if_dear()
        return made

    def _is_left_over(self, storage: int) -> bool:
        used = self._wanted[storage] or self._pins[storage] or self._moving[storage]
        return not used and self._there[storage] == 1

    def _enter(self, op: int, stack: list[int]) -> None:
        if op in stack or op < 0:
            raise Failed
        stack.append(op)
        for read in self.table.op_reads[op]:
            self._pins[read] += 1
            self._may_go[read] = False

    def _missing_ops(self, op: int) -> set[int]:
        """All that have to run for an op to run, itself among them."""
        missing, todo = {op}, [op]
        maker, op_reads, in_reach = self.table.maker, self.table.op_reads, self._in_reach
        while todo:
            for read in op_reads[todo.pop()]:
                if not in_reach[read] and (below := maker[read]) not in missing:
                    missing.add(below)
                    todo.append(below)
        return missing

    # -- the link -----------------------------------------------------------------------------------------------------
    def _leave(self, storage: int) -> None:
        assert self.link is not None
        self._moving[storage] = True
        self._may_go[storage] = False
        self._out_free_ns = max(self.now_ns, self._out_free_ns) + self.link.out_ns(self.table.nbytes[storage])
        self._ready_ns[storage] = self._out_free_ns
        self._going.append(storage)
        self._leaving.setdefault(self._turn, []).append(storage)

    def _fetch(self, storage: int) -> None:
        self._make_room(self.table.nbytes[storage])
        self._come_back(storage)

    def _come_back(self, storage: int) -> None:
        self._away.remove(storage)
        self._queue = self._due_ns = None
        self._moving[storage] = True
        self._in_free_ns = max(self.now_ns, self._in_free_ns) + self._in_ns[storage]
        self._ready_ns[storage] = self._in_free_ns
        self._arriving.append(storage)
        self._arrive(storage)

    def _poll(self) -> None:
        """Take note of the copies that have ended by now."""
        while self._going and self._ready_ns[self._going[0]] <= self.now_ns:
            storage = self._going.popleft()
            self._moving[storage] = False
            self._on_host[storage] = True
            if not self._pins[storage]:
                self._depart(storage)
            else:
                self._stale.add(storage)
        while self._arriving and self._ready_ns[self._arriving[0]] <= self.now_ns:
            storage = self._arriving.popleft()
            self._moving[storage] = False
            self._stale.add(storage)
            self._seat(storage)
            if self._is_left_over(storage):
                self._bury(storage)

    def _wait_for(self, storage: int) -> None:
        """Stand still until the copy back has ended, if one is under way."""
        if self._moving[storage] and self._on_host[storage]:
            waits_ns = self._ready_ns[storage] - self.now_ns
            if waits_ns > 0:
                self.waited_ns[storage] = self.waited_ns.get(storage, 0) + waits_ns
            self._wait_until(self._ready_ns[storage])

    def _wait_until(self, then_ns: int) -> None:
        if then_ns > self.now_ns:
            self.stall_ns += then_ns - self.now_ns
            self.now_ns = then_ns
        self._poll()

    def _prefetch(self) -> None:
        """Begin the copies back that are due, the one used first before the others; what is used later makes room."""
        now_ns = self.table.turns[self._turn].end_ns + max(0, self._in_free_ns - self.now_ns)
        if self._due_ns is None:
            self._due_ns = self._first_start_ns()
        if self._due_ns > now_ns:
            return
        if self._queue is None:
            self._queue = self._latest_starts()
        for due_ns, use_ns, storage in self._queue:
            if due_ns > now_ns:
                return
            if (later_ns := self._needed_ns(storage)) > use_ns:  # what would have read it sooner is there again
                self._away.set(storage, later_ns)
                self._queue = self._due_ns = None
                continue
            nbytes = self.table.nbytes[storage]
            while self.used_bytes + nbytes > self.limit_bytes:
                victim = self._first_to_go(after_ns=use_ns)
                if victim is None:
                    return
                self._go(victim, self._dropped)
            self._coming.setdefault(self._turn, []).append(storage)
            self._come_back(storage)
            now_ns += self._in_ns[storage]

    def _first_start_ns(self) -> float:
        """When the first copy back has to begin at the latest: see `_latest_starts`."""
        in_ns, copied_ns, latest_ns = self._in_ns, 0, inf
        waiting = self._away.soonest(_SOON)
        for use_ns, storage in waiting:
            if use_ns >= NEVER_NS:
                break
            copied_ns += in_ns[storage]
            if use_ns - copied_ns < latest_ns:
                latest_ns = use_ns - copied_ns
        return latest_ns - (self.guide.lead - 1) * in_ns[waiting[0][1]]

    def _latest_starts(self) -> list[tuple[float, float, int]]:
        """When each copy back has to begin at the latest, what is needed after it considered; when it is used; of what.
        The soonest, in the order of their uses."""
        queue, latest_ns = [], inf
        waiting = (each for each in reversed(self._away.soonest(_SOON)) if each[0] < NEVER_NS)
        for use_ns, storage in waiting:
            latest_ns = min(latest_ns, use_ns) - self._in_ns[storage]
            queue.append((latest_ns - (self.guide.lead - 1) * self._in_ns[storage], use_ns, storage))
        return queue[::-1]

    def _need_what_it_is_made_of(self, gone: int) -> None:
        """A storage went: what is away and its replay would read is needed when it is."""
        use_ns = float(self._next_ns[gone])
        seen, todo = {gone}, [gone]
        while todo:
            for read in self.table.op_reads[self.table.maker[todo.pop()]]:
                if read in seen or self._there[read]:
                    continue
                seen.add(read)
                if not self._in_reach[read]:
                    todo.append(read)
                elif self._away.is_used_after(read, use_ns):
                    self._away.set(read, use_ns)
                    self._queue = self._due_ns = None

    def _needed_ns(self, storage: int) -> float:
        """The next use of a storage that is away, by the program or by a replay of what is made out of it."""
        children, exists, in_reach, wanted = self.table.children, self._exists, self._in_reach, self._wanted
        users, seen, todo = [storage], {storage}, [storage]
        while todo:
            for child in children[todo.pop()]:
                if child not in seen and exists[child] and not in_reach[child]:
                    seen.add(child)
                    todo.append(child)
                    if wanted[child]:
                        users.append(child)
        return float(self._next_ns[users].min())


def _copies(scene: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if hasattr(value, "copy") else value for name, value in scene.items()}


def _joined(op: int, op_ns: Sequence[int], chains: list[_Chain]) -> _Chain:
    """An op after chains, which may have ops in common: the longest is taken whole, and what others have beside it."""
    if not chains:
        return op_ns[op], 1 << op
    total_ns, ops = chains[0] if len(chains) == 1 else max(chains)
    for _, others in chains:
        new = others & ~ops
        ops |= new
        while new:
            last = new.bit_length() - 1
            total_ns += op_ns[last]
            new ^= 1 << last
    return total_ns + op_ns[op], ops | 1 << op
