"""What copies take from compute on a CPU, where I/O threads share cores, caches and memory bandwidth with the ops.

Measured, because machines differ widely in it: where two threads compute on two cores, copies to the spill file took as
long from it as they lasted on one machine, and 0.4 to 0.7 of that on another. What is timed beside the copies is mostly
a product of matrices, and some sums: of what is bound by memory copies take more.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping

import torch

from delta.runtime.device.base import Direction

_ROUNDS = 9  # the median of them counts, and short ones: a machine may be busy with something else for a while
_COPYING_NS = 13_000_000  # per round and direction
_ALONE_NS = 7_000_000
_SIDE = 512
_ELEMENTS = 2**20

Copy = Callable[[], None]


def share_taken(copies: Mapping[Direction, Copy], copy_ns: Mapping[Direction, float]) -> float:
    """The part of a copy's time that compute loses beside it, for as many copies out as back: from 0 to 1.

    `copies`: one of each direction; may raise SwapError. `copy_ns`: how long each takes alone. Takes a third of a
    second.
    """
    compute = _work()
    compute()
    lost_ns: dict[Direction, list[float]] = {direction: [] for direction in copies}
    for _ in range(_ROUNDS):
        alone_ns = _alone_ns(compute)
        for direction, copy in copies.items():
            count = max(1, int(_COPYING_NS / copy_ns[direction]))
            lost_ns[direction].append(_lost_ns(copy, count, compute, alone_ns) / count)
    lost = sum(statistics.median(each) for each in lost_ns.values())
    return min(1.0, max(0.0, lost / sum(copy_ns.values())))


def _work() -> Callable[[], None]:
    """A millisecond or so of ops on all of torch's threads. Nothing of it is seen by modes of the program's."""
    with torch._C._DisableTorchDispatch():
        square, row = (torch.ones(size, dtype=torch.float32, device="cpu") for size in ((_SIDE, _SIDE), (_ELEMENTS,)))
        product, total = torch.empty_like(square), torch.empty_like(row)

    def compute() -> None:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            torch.mm(square, square, out=product)
            for _ in range(4):
                torch.add(row, row, out=total)

    return compute


def _alone_ns(compute: Callable[[], None]) -> float:
    took_ns: list[int] = []
    while sum(took_ns) < _ALONE_NS:
        began_ns = time.perf_counter_ns()
        compute()
        took_ns.append(time.perf_counter_ns() - began_ns)
    return statistics.median(took_ns)


def _lost_ns(copy: Copy, count: int, compute: Callable[[], None], alone_ns: float) -> float:
    """How much longer compute takes beside so many copies."""
    failed: list[BaseException] = []

    def all_copies() -> None:
        try:
            for _ in range(count):
                copy()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=all_copies, name="delta-contention", daemon=True)
    began_ns, done = time.perf_counter_ns(), 0
    thread.start()
    try:
        while thread.is_alive():
            compute()
            done += 1
        took_ns = time.perf_counter_ns() - began_ns
    finally:
        thread.join()  # what it writes to is given back next
    if failed:
        raise failed[0]
    return took_ns - done * alone_ns
