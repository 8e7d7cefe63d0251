"""``scripts/bench decisions``: what an eviction costs the engine, by how many storages are live, for each score.

The engine has a long net with a skip every ten layers, of which a tenth is evicted. Over and over the storage that has
been gone the longest is asked for, and comes back with all that it is made of; then as many others go. What came back
is part of what the next eviction has to take note of. Only `Engine.make_place` is timed, which here evicts one storage.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence

from delta.budget import Budget
from delta.config import Policy
from delta.engine import Engine
from delta.types import Drop, Kind, Link, OpInfo, SwapOut
from delta.units import Bytes

KINDS = [
    ("dtr", "own", "recompute"),
    ("dtr", "classes", "recompute"),
    ("dtr", "neighbourhood", "recompute"),
    ("msps", "ancestors", "recompute"),
    ("delta", "action", "recompute"),
    ("delta", "action", "swap, recompute"),
    ("delta-paper", "action", "recompute"),
    ("size-staleness", "own", "recompute"),
    ("lru", "own", "recompute"),
    ("size", "own", "recompute"),
]
TICK_NS = 50_000


class Net:
    """An engine with `live` storages of 4 KiB to 64 MiB, made in 5 us to 50 ms each, and as many more in a tenth."""

    def __init__(self, live: int, score: str, cost: str, actions: str) -> None:
        chosen = {
            "name": score,
            "filter": {"score": score, "cost": cost, "min_bytes": 0},
            "director": {"actions": ["keep", *actions.split(", ")]},
            "planner": {"kind": "none"},
        }
        self.engine = Engine(Policy.model_validate(chosen), Budget(activations=Bytes(1 << 62)), Link(25e9, 25e9), True)
        self.now_ns = 10**18
        self.gone: deque[int] = deque()
        self.missing, self._least = 0, live // 10
        rng = random.Random(live)
        self.engine.recording(True)
        for record in range(live + self._least):
            self._layer(record, int(2 ** rng.uniform(12, 26)), int(10 ** rng.uniform(3.7, 7.7)))
        while self.over:
            self.evict()

    @property
    def over(self) -> bool:
        """Whether more are live than should be."""
        return self.missing < self._least

    def _layer(self, record: int, nbytes: int, cost_ns: int) -> None:
        self.now_ns += cost_ns
        reads = tuple(record - back for back in (1, 10) if record >= back and (back == 1 or record % 10 == 0))
        self.engine.created(record, nbytes, Kind.ACTIVATION, self.now_ns)
        self.engine.op_ran(OpInfo(record, "layer", reads, (record,), cost_ns, True), self.now_ns)
        self.engine.saved(record, nbytes, self.now_ns)

    def evict(self) -> None:
        for instruction in self.engine.make_place(1, self.now_ns):
            if isinstance(instruction, SwapOut):
                self.engine.transfers.copied_out(instruction.record)
            if isinstance(instruction, Drop | SwapOut):
                self.engine.storage_gone(instruction.record)
                self.gone.append(instruction.record)
                self.missing += 1

    def bring_back(self) -> None:
        engine = self.engine
        while engine.ledger[record := self.gone.popleft()].held:
            pass
        if engine.need(record, self.now_ns):
            engine.transfers.copied_in(record)
            self.missing -= 1
        walk = engine.replays.descend(record, self.now_ns)
        while (op := walk.next(self.now_ns)) is not None:
            made = engine.replays.made_again(op)
            self.missing -= len(made)
            engine.replays.replayed(op, made)
        engine.replays.end_descent()
        engine.served(record)


def eviction_ns(live: int, kind: tuple[str, str, str], evictions: int) -> float:
    """Processor time of an eviction among ``live`` storages; ``kind`` is a score, a cost and the actions."""
    net, spent_ns, done = Net(live, *kind), 0, 0
    while done < evictions:
        net.now_ns += TICK_NS
        net.bring_back()
        while net.over:
            began_ns = time.process_time_ns()
            net.evict()
            spent_ns += time.process_time_ns() - began_ns
            done += 1
    return spent_ns / done


def lines(sizes: Sequence[int], evictions: int) -> Iterator[str]:
    """The table, a line at a time: microseconds, a column for each number of live storages."""
    yield f"{'us for each eviction':46}" + "".join(f"{size:>10,}" for size in sizes)
    for kind in KINDS:
        times_us = (eviction_ns(live, kind, evictions) / 1e3 for live in sizes)
        yield "{:15}{:15}{:16}".format(*kind) + "".join(f"{time_us:>10.1f}" for time_us in times_us)
