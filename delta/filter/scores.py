"""The registered scores. Units: bytes, ns; the smallest score is evicted first.

`delta`          cost / (bytes * idle time ** IDLE_WEIGHT): the design's own rule (section 7). `cost_ns` is what the
                 director's action would really cost: the replay of the whole missing chain, or the part of the swap
                 compute waits for. Idle time is the time until the next use where it is known (a learned step), else
                 the time since the last one.
`delta-paper`    min(c_r, c_s) / (m * s) of DELTA (ACM TACO 2024): recompute cost with evicted ancestors against the
                 whole, unhidden swap out and back; s is the time since the last access. The published code divides
                 bytes per microsecond by nanoseconds, which favours swap a thousandfold; here both are ns.
`dtr`            cost / (m * s): h_DTR (Kirisame et al., ICLR 2021, section 4.2). Which cost it is, `filter.cost` says.
`coop`           cost / s: DTR's without the size, which a window of neighbours makes up for (Coop, NeurIPS 2023). 1 ns
                 is added to s, so that costs can be summed.
`msps`           cost / m: most memory saved per second of recomputation (Capuchin, ASPLOS 2020), with the cost of the
                 missing ancestors as DTR's simulator has it.
`size-staleness` 1 / (m * s): the filter of DELTA's first version (arXiv 2203.15980) as its code has it.
`lru`            least recently used first.
`size`           largest first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, pow


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a score may know of a record that could go."""

    record: int
    nbytes: int
    cost_ns: int  # as `filter.cost` says: by default, of the cheapest action as the policy's director counts it
    stale_ns: int  # since the last access
    until_use_ns: int | None  # to the next use, where the step is known


# How much the idle time weighs beside cost and bytes. The published scores have 1, Capuchin's none; on DTR's logs of
# ResNet-32, U-Net and Transformer about this is best, be it the time to the next use or the time since the last one.
IDLE_WEIGHT = 0.3

Score = Callable[[Candidate], float]


def delta(candidate: Candidate) -> float:
    idle_ns = candidate.stale_ns if candidate.until_use_ns is None else candidate.until_use_ns
    return (candidate.cost_ns + 1) / (candidate.nbytes * pow(idle_ns + 1, IDLE_WEIGHT))


def delta_paper(candidate: Candidate) -> float:
    return (candidate.cost_ns + 1) / (candidate.nbytes * (candidate.stale_ns + 1))


def dtr(candidate: Candidate) -> float:
    weight = candidate.nbytes * candidate.stale_ns
    return candidate.cost_ns / weight if weight else inf


def coop(candidate: Candidate) -> float:
    return candidate.cost_ns / (candidate.stale_ns + 1)


def msps(candidate: Candidate) -> float:
    return candidate.cost_ns / candidate.nbytes if candidate.nbytes else inf


def size_staleness(candidate: Candidate) -> float:
    return 1.0 / (candidate.nbytes * (candidate.stale_ns + 1))


def lru(candidate: Candidate) -> float:
    return -float(candidate.stale_ns)


def size(candidate: Candidate) -> float:
    return -float(candidate.nbytes)


SCORES: dict[str, Score] = {
    "delta": delta,
    "delta-paper": delta_paper,
    "dtr": dtr,
    "coop": coop,
    "msps": msps,
    "size-staleness": size_staleness,
    "lru": lru,
    "size": size,
}
