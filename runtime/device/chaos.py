"""The CPU as the worst device that is still legal: no threads, transfers that end early, late and out of order,
poison everywhere.

A copy out may read its source when it is asked for, in any later call of the device, or only in `wait`; until then the
host copy is 0xFF bytes. A copy in delivers as late as that, and its destination is 0xFF (NaN, for floats) before. A
storage that is released while nobody shares it, and host room that is given back, become 0xFF too. So a use before
completion, or after release, turns into a wrong number that a test sees, on any machine and, for one seed and one order
of calls, every time.

Not covered: two threads inside a copy at once. `cpu` does that.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from delta.config import HostConfig
from delta.errors import SwapError
from delta.runtime.device.base import Bandwidth, HostBlock, OpClock, R, Ticket
from delta.runtime.device.parts import BlockBook, WallClock, host_full, limit_bytes, part_bytes
from delta.runtime.monitor import host_facts
from delta.runtime.rawmem import ResidentMeter, as_bytes, sole_owner

POISON = 0xFF
_BANDWIDTH = Bandwidth(2e9, 2e9)  # a constant, so that decisions repeat
_INTERFERENCE = 0.3
_EARLY = 0.25  # share of transfers that end when they are asked for
_STUBBORN = 0.4  # share of the others that end only in wait()
_PROGRESS = 0.3  # chance that a call ends a given pending transfer


@dataclass(slots=True, eq=False)
class ChaosTicket(Ticket):
    """A transfer that ends when chance says so. ``stubborn``: not before `wait`. ``doomed``: it will fail."""

    stubborn: bool = False
    doomed: bool = False


class ChaosDevice:
    """See the module docstring and `delta.runtime.device.base.Device`.

    ``fail_out_every=3`` lets every third copy out fail (``fail_in_every`` likewise); ``limit_bytes`` replaces the
    policy's host limit.
    """

    kind = "chaos"
    hoards = False
    kept_bytes = 0
    copy_ns = 0
    replay_ns = 0
    spill_directory: str | None = None
    in_order = False
    torch_device = torch.device("cpu")

    def __init__(
        self,
        host: HostConfig,
        seed: int = 0,
        *,
        fail_out_every: int | None = None,
        fail_in_every: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._fail_every = {"out": fail_out_every, "in": fail_in_every}
        self._asked = {"out": 0, "in": 0}
        self._limit_bytes = _limit(host) if limit_bytes is None else limit_bytes
        self._lock = threading.RLock()
        self._book = BlockBook(self._give_back)
        self._pending: list[ChaosTicket] = []
        self._clock = WallClock()
        self._meter = ResidentMeter()
        self._host_bytes = 0
        self._stopped = self._closed = False

    def capacity_bytes(self) -> int:
        return part_bytes(host_facts().total_bytes)

    def used_bytes(self) -> int:
        return self._meter.read_bytes()

    def in_use(self) -> tuple[int, int]:
        used = self.used_bytes()
        return used, used

    def watch_peaks(self, on: bool) -> None:
        """What is resident beside the pretended device is not its own."""

    def refusals(self) -> int:
        return 0

    def memory_blocks(self) -> None:
        """The heap is not ours to look into."""

    def copy_out(self, storage: torch.UntypedStorage) -> Ticket:
        self._let_some_end()
        with self._lock:
            self._refuse_if_closed()
            nbytes = storage.nbytes()
            if self._host_bytes + nbytes > self._limit_bytes:
                raise host_full(nbytes, self._host_bytes, self._limit_bytes, "of host memory")
            block = HostBlock(nbytes, "memory", _poisoned(nbytes))
            self._host_bytes += nbytes
            ticket = ChaosTicket(nbytes, "out", block, storage, time.perf_counter_ns())
            block.writer = ticket
            return self._begin(ticket)

    def copy_in(self, block: HostBlock) -> Ticket:
        self._let_some_end()
        with self._lock:
            self._refuse_if_closed()
            storage = _poisoned(block.nbytes)
            return self._begin(ChaosTicket(block.nbytes, "in", block, storage, time.perf_counter_ns()))

    def ready(self, ticket: Ticket) -> bool:
        self._let_some_end()
        if ticket.finished_ns is None:
            return False
        ticket.raise_failure()
        return True

    def wait(self, ticket: Ticket) -> None:
        self._let_some_end()
        self._end(_own(ticket))
        ticket.raise_failure()

    def let_go_after(self, ticket: Ticket) -> None:
        self.wait(ticket)

    def free(self, block: HostBlock) -> None:
        self._book.free(block)
        self._let_some_end()

    def release(self, storage: torch.UntypedStorage, tensors: int = 0) -> None:
        # Before anything else can end: a copy out that was not waited for must go wrong.
        if sole_owner(storage, tensors):
            as_bytes(storage).fill_(POISON)
        self._let_some_end()

    def computes(self) -> None:
        """There are no streams."""

    def meet(self) -> None:
        """There are no streams."""

    def share(self, storage: torch.UntypedStorage) -> None:
        """There are no streams."""

    def bandwidth(self) -> Bandwidth:
        return _BANDWIDTH

    def interference(self) -> float:
        return _INTERFERENCE

    def host_bytes(self) -> int:
        return self._host_bytes

    def clock(self) -> OpClock:
        return self._clock

    def trim(self) -> None:
        self._let_some_end()

    def trim_host(self) -> None:
        """Nothing is pinned."""

    def trim_reserved(self) -> None:
        """Nothing is reserved."""

    def expand(self, on: bool) -> None:
        """Nothing is allocated in segments here."""

    def cap(self, budget_bytes: int | None) -> None:
        """Nothing to cap: resident bytes are the session's own affair here."""

    def enforce(self, on: bool) -> None:
        """There is no budget to enforce."""

    def as_here(self, run: Callable[[], R]) -> Callable[[], R]:
        return run

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            pending = self._random.sample(self._pending, len(self._pending))
        for ticket in pending:
            self._end(ticket)

    def close(self) -> None:
        self.stop()
        self._closed = True
        self._meter.close()

    def _begin(self, ticket: ChaosTicket) -> ChaosTicket:
        self._book.begin(ticket.block)
        self._asked[ticket.direction] += 1
        every = self._fail_every[ticket.direction]
        ticket.doomed = every is not None and self._asked[ticket.direction] % every == 0
        self._pending.append(ticket)
        if self._stopped or self._random.random() < _EARLY:
            self._end(ticket)
        else:
            ticket.stubborn = self._random.random() < _STUBBORN
        return ticket

    def _let_some_end(self) -> None:
        """Chance picks which pending transfers end now, and in which order."""
        with self._lock:
            lucky = [ticket for ticket in self._pending if not ticket.stubborn and self._random.random() < _PROGRESS]
            self._random.shuffle(lucky)
        for ticket in lucky:
            self._end(ticket)

    def _end(self, ticket: ChaosTicket) -> None:
        with self._lock:
            if ticket.finished_ns is not None:
                return
            self._pending.remove(ticket)
            if ticket.direction == "out":
                self._end_out(ticket)
            else:
                self._end_in(ticket)
            ticket.finished_ns = time.perf_counter_ns()

    def _end_out(self, ticket: ChaosTicket) -> None:
        block, storage = ticket.block, ticket.storage
        assert storage is not None
        ticket.storage = block.writer = None
        if ticket.doomed:
            ticket.failure = SwapError("the copy out failed: injected")
            self._book.free(block)
        elif not block.unwanted():
            as_bytes(block.room).copy_(as_bytes(storage))
            block.complete = True
        self._book.end(block)

    def _end_in(self, ticket: ChaosTicket) -> None:
        block, storage = ticket.block, ticket.storage
        assert storage is not None
        if block.writer is not None:
            self._end(_own(block.writer))
        if ticket.doomed or not block.complete:
            reason = "injected" if ticket.doomed else "the host copy was never completed"
            ticket.failure = SwapError(f"the copy in failed: {reason}")
            ticket.storage = None
        else:
            as_bytes(storage).copy_(as_bytes(block.room))
        self._book.end(block)

    def _give_back(self, block: HostBlock) -> None:
        with self._lock:
            self._host_bytes -= block.nbytes
        as_bytes(block.room).fill_(POISON)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SwapError("the device is closed: the session it belonged to has given its host room back")


def _limit(host: HostConfig) -> int:
    return limit_bytes(host.limit, host_facts().available_bytes)


def _poisoned(nbytes: int) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(nbytes)
    as_bytes(storage).fill_(POISON)
    return storage


def _own(ticket: Ticket) -> ChaosTicket:
    if not isinstance(ticket, ChaosTicket):
        raise TypeError("this ticket belongs to another device")
    return ticket
