"""The worth of every registered score as a line in time, for the ranking: see `delta.filter.ranking`.

Largest worth is smallest score (`delta.filter.scores`). A score may be raised to any power without changing who is
first: so `delta`, which weighs idle time by the power 0.3, is ranked by (bytes / cost) ** (1 / 0.3) * idle time.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pow

from delta.filter.ranking import Line
from delta.filter.scores import IDLE_WEIGHT

LineOf = Callable[[int, int, int], Line]
"""The line for (bytes, cost in ns, time of the last use in ns), in the time of the clock."""


def _delta(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    rise, run = _weight(nbytes, cost_ns)
    return Line(rise, rise * (1 - used_ns), run)


def delta_awaited(nbytes: int, cost_ns: int, use_ns: int) -> Line:
    """As `delta` has it where the next use is known. Here time is the one in which `use_ns` is told."""
    rise, run = _weight(nbytes, cost_ns)
    return Line(-rise, rise * (use_ns + 1), run)


def delta_unused(nbytes: int, cost_ns: int, idle_ns: int) -> Line:
    """As `delta` has it for what is not used again: idle for a time that stays the same."""
    rise, run = _weight(nbytes, cost_ns)
    return Line(0, rise * (idle_ns + 1), run)


def _weight(nbytes: int, cost_ns: int) -> tuple[int, int]:
    """Rounded as the score is, and from there on exact."""
    return pow(nbytes / (cost_ns + 1), 1 / IDLE_WEIGHT).as_integer_ratio()


def _delta_paper(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    return Line(nbytes, nbytes * (1 - used_ns), cost_ns + 1)


def _dtr(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    return Line(nbytes, -nbytes * used_ns, cost_ns)


def _coop(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    return Line(1, 1 - used_ns, cost_ns)


def _msps(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    return Line(0, nbytes, cost_ns)


def _size_staleness(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    return Line(nbytes, nbytes * (1 - used_ns), 1)


def _lru(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    return Line(1, -used_ns, 1)


def _size(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    return Line(0, nbytes, 1)


LINES: dict[str, LineOf] = {
    "delta": _delta,
    "delta-paper": _delta_paper,
    "dtr": _dtr,
    "coop": _coop,
    "msps": _msps,
    "size-staleness": _size_staleness,
    "lru": _lru,
    "size": _size,
}

COSTLESS = frozenset({"size-staleness", "lru", "size"})  # scores that do not ask what an eviction costs
