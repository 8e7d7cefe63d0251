"""Which neighbours go together: the sliding window of Coop.

A request needs memory in one piece, and the records that are cheapest one by one seldom lie side by side. Coop (Zhang
et al., *Coop: Memory is not a Commodity*, NeurIPS 2023) evicts the cheapest run of neighbours instead. In it, free
blocks count for nothing, and size does not matter beyond being enough; the cost of a record is that of making it again
over the time since its last use. That evicting one member makes others dearer is left out of account, as published.

Not here: where blocks lie, and what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of memory. `cost`: of evicting what is in it, 0 if it is free, None if it has to stay.

    Costs are whole and not negative: a sum that slides along blocks of very different costs is exact only so.
    """

    nbytes: int
    segment: int
    cost: int | None


@dataclass(frozen=True, slots=True)
class Window:
    """The pieces from `start` up to `stop`, without it, and what evicting all of them costs."""

    start: int
    stop: int
    cost: int


def cheapest_window(pieces: Sequence[Piece], need_bytes: int) -> Window | None:
    """The cheapest run of neighbours in one segment that has `need_bytes` (1 or more) and nothing in it that has to
    stay; among equals the first; None if there is none. `pieces` are in the order of addresses; each is looked at twice
    at most.

    For every piece it tries only the shortest run that ends there and is enough. No other can be cheaper: any run that
    is enough and ends there contains the shortest one, and what it has besides costs nothing or more.
    """
    best: Window | None = None
    start = run_bytes = run_cost = 0
    for at, piece in enumerate(pieces):
        if piece.cost is None or piece.segment != pieces[start].segment:
            start, run_bytes, run_cost = at, 0, 0
        if piece.cost is None:
            start += 1
            continue
        run_bytes += piece.nbytes
        run_cost += piece.cost
        while run_bytes - pieces[start].nbytes >= need_bytes:
            run_bytes -= pieces[start].nbytes
            run_cost -= pieces[start].cost or 0
            start += 1
        if run_bytes >= need_bytes and (best is None or run_cost < best.cost):
            best = Window(start, at + 1, run_cost)
    return best
