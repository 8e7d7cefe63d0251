"""Where to cut chains of dropped storages that would come back all at once.

One need may ask for the end of a chain that goes through the whole step: a residual stream, each link cheap to make out
of the one before. Everything on it is then back early and stays. A chain ends at what is kept; so some links are, at
places in forward where few bytes lead from one side to the other, and so many that what lies between two cuts fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate

from delta.planner.steplog import StepGraph

NARROW = 0.5  # the narrowest place is looked for in this part of what would fit between two cuts
PARTS = 8  # the room is shared in that many ways between the cuts and what lies between two of them


def cut_links(graph: StepGraph, links: Sequence[int], replayed: Collection[int], room_bytes: int) -> list[int]:
    """Which of the dropped `links` (save orders) to keep, so that those between two cuts and the cuts themselves fit
    into `room_bytes`, or come close to it. `replayed`: the ops that drops make run again. Empty where there is no room
    at all, and where nothing has to be cut."""
    places = _Places(graph, links, replayed)
    found: list[tuple[int, list[int]]] = []
    for part in range(PARTS, 0, -1):
        between_bytes = room_bytes * part // PARTS
        kept = places.cuts(between_bytes) if between_bytes > 0 else []
        if not kept:
            break  # nothing has to be cut, or nothing can be so that so little lies between
        taken_bytes = between_bytes + sum(places.sizes[v] for v in kept)
        if taken_bytes <= room_bytes:
            return kept
        found.append((taken_bytes, kept))
    return min(found, key=lambda each: each[0], default=(0, []))[1]


class _Places:
    """Forward as a row of ops, with the bytes of links that are made on the way, and that cross each place."""

    def __init__(self, graph: StepGraph, links: Sequence[int], replayed: Collection[int]) -> None:
        count = len(graph.ops)
        self.sizes = {v: graph.nodes[graph.saved[v]].nbytes for v in links}
        last_use = _last_uses(graph, replayed)
        change, made = [0] * (count + 2), [0] * (count + 1)
        self._spans: list[tuple[int, int, int]] = []
        for v in links:
            node = graph.nodes[graph.saved[v]]
            if node.op is None:
                continue
            until = last_use[graph.saved[v]]
            self._spans.append((node.op, until, v))
            made[node.op] += node.nbytes
            if until > node.op:
                change[node.op + 1] += node.nbytes
                change[until + 1] -= node.nbytes
        self._crossing = list(accumulate(change[: count + 1]))  # by op: what it and later ones read of earlier ones
        self._made = [0, *accumulate(made)]  # by op: bytes of links made before it

    def cuts(self, between_bytes: int) -> list[int]:
        """The links that cross the cuts, from the end of forward on."""
        found: set[int] = set()
        end = len(self._made) - 1
        while self._made[end] > between_bytes:
            first = bisect_left(self._made, self._made[end] - between_bytes)
            last = bisect_left(self._made, self._made[end] - int(between_bytes * NARROW), hi=end)
            at = min(range(first, min(last, end - 1) + 1), key=lambda op: self._crossing[op], default=end)
            if at >= end:
                break
            found.update(v for made, until, v in self._spans if made < at <= until)
            end = at
        return sorted(found)


def _last_uses(graph: StepGraph, replayed: Collection[int]) -> list[int]:
    """By node: the last replayed op that reads it, directly or through what nothing has saved."""
    last = [-1] * len(graph.nodes)
    for op in reversed(range(len(graph.ops))):
        if op not in replayed:
            continue
        through = [last[node] for node in graph.ops[op].outputs if graph.nodes[node].order < 0]
        until = max([op, *through])
        for node in graph.ops[op].inputs:
            last[node] = max(last[node], until)
    return last
