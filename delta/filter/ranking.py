"""Who goes first, without looking at everybody: a kinetic tournament over what is evictable.

The published scores divide by the time since the last use, so the order changes while nothing happens, and a heap
does not help. But the *worth* of evicting a storage, the reciprocal of its score, is a straight line in time:

    score, smallest first                    worth, largest first             Line(rise, level, run)
    DTR: cost / (bytes * (now - used))       bytes * (now - used) / cost      (bytes, -bytes * used, cost)
    next use: cost / (bytes * (use - now))   bytes * (use - now) / cost       (-bytes, bytes * use, cost)
    MSPS (Capuchin): cost / bytes            bytes / cost                     (0, bytes, cost)
    least recently used: used                now - used                       (1, -used, 1)
    largest: -bytes                          bytes                            (0, bytes, 1)

`delta.filter.lines` has them all, and how a score that weighs time otherwise becomes one.

Of two lines the steeper one, once ahead, stays ahead. A tournament tree notes in each node who wins now, and the first
moment at which that, or anything below, is no longer true (Basch, Guibas, Hershberger, *Data Structures for Mobile
Data*, SODA 1997). Asking plays only those matches again whose moment has come or that have a changed player below.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_NEVER, _STALE = math.inf, -math.inf


class Line(NamedTuple):
    """The worth (rise * now + level) / run. `run` is not negative; if it is 0, evicting is free: infinite worth.

    Whole numbers, so that every comparison and every moment is exact, whatever the size of clock and storages.
    """

    rise: int
    level: int
    run: int


_FREE = Line(0, 1, 0)  # compared by cross-multiplication it beats every line with a run, and ties with itself


class _Player(NamedTuple):
    rise: int
    level: int
    run: int
    order: int  # decides between equals
    key: int


class Ranking:
    """Keys, each with a line; `best(now_ns)` is the key whose worth is largest then.

    Among equals the key with the greatest `order` wins: with the order of their last uses, as in the simulator of DTR
    (Kirisame et al., ICLR 2021). No two keys have the same. `now_ns` never goes back.

    With n the most keys there have been, `add` and `discard` mark at most log2(n) nodes, and the next `best` plays each
    marked node once, however many changes it had. Besides, `best` plays again log2(n) nodes for each time the lead has
    changed hands in a node. Such a change is a corner in the upper envelope of the lines below, each cut to its time in
    the ranking, so in all there are O(log n) for each line ever added (times the inverse of Ackermann's function).
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all keys, and the time."""
        self._slots: dict[int, int] = {}
        self._spare = [0]
        self._now_ns: float = -math.inf
        # A complete binary tree: node i has the children 2i and 2i + 1, slot s is the leaf self._leaves + s.
        self._leaves = 1
        self._winner: list[_Player | None] = [None, None]
        self._until: list[float] = [_NEVER, _NEVER]

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def add(self, key: int, line: Line, order: int) -> bool:
        """Add a key, or give it another line and place; whether that changed anything."""
        player = _Player(*(line if line.run else _FREE), order, key)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._take_slot()
        elif self._winner[self._leaves + slot] == player:
            return False
        self._seat(slot, player)
        return True

    def discard(self, key: int) -> bool:
        """Take a key out; whether it was there."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return False
        self._seat(slot, None)
        self._spare.append(slot)
        return True

    def best(self, now_ns: int) -> int | None:
        """The key that is worth most at `now_ns`; None if there is none."""
        if now_ns < self._now_ns:
            raise ValueError(f"the clock of a ranking cannot go back from {self._now_ns} to {now_ns}")
        self._now_ns = now_ns
        if self._until[1] <= now_ns:
            self._play(1, now_ns)
        winner = self._winner[1]
        return None if winner is None else winner.key

    def _take_slot(self) -> int:
        if not self._spare:
            leaves = self._leaves
            self._winner = [None] * (2 * leaves) + self._winner[leaves:] + [None] * leaves
            self._until = [_STALE] * (2 * leaves) + [_NEVER] * (2 * leaves)
            self._spare = list(reversed(range(leaves, 2 * leaves)))
            self._leaves = 2 * leaves
        return self._spare.pop()

    def _seat(self, slot: int, player: _Player | None) -> None:
        """Change a leaf. What is above a stale node is stale."""
        node = self._leaves + slot
        self._winner[node] = player
        node //= 2
        while node and self._until[node] != _STALE:
            self._until[node] = _STALE
            node //= 2

    def _play(self, node: int, now_ns: int) -> None:
        """Make the node true at `now_ns`, and note until when it will be."""
        left, right = 2 * node, 2 * node + 1
        winner, until = self._winner, self._until
        for child in (left, right):
            if until[child] <= now_ns:
                self._play(child, now_ns)
        winner[node], since_ns = _match(winner[left], winner[right], now_ns)
        until[node] = min(since_ns, until[left], until[right])


def _match(a: _Player | None, b: _Player | None, now_ns: int) -> tuple[_Player | None, float]:
    """Who is ahead at `now_ns`, and the first ns, if any, at which the other one will be."""
    if a is None or b is None:
        return (b if a is None else a), _NEVER
    rise_a, level_a, run_a, order_a, _ = a
    rise_b, level_b, run_b, order_b, _ = b
    # b is ahead of a when gain * now > lead.
    gain = rise_b * run_a - rise_a * run_b
    lead = level_a * run_b - level_b * run_a
    b_is_last = order_b > order_a
    if gain == 0:
        return (b if lead < 0 or (lead == 0 and b_is_last) else a), _NEVER
    # They meet at lead / gain; from there on the steeper one is ahead, at the moment itself if it is the last.
    steeper, other = (b, a) if gain > 0 else (a, b)
    since_ns = -(-lead // gain) if b_is_last == (gain > 0) else lead // gain + 1
    return (steeper, _NEVER) if now_ns >= since_ns else (other, since_ns)
