"""The CPU as a device: tensors on the heap, a spill file as its host tier, two I/O threads as its streams.

Real memory is saved: the resident set falls by what is swapped out. The host limit of the policy is a share of the
free room on the spill directory's file system, because that file is what a "host copy" is here.
"""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from delta.config import HostConfig
from delta.runtime.device.base import Bandwidth, Direction, HostBlock, OpClock, R, Ticket
from delta.runtime.device.contention import share_taken
from delta.runtime.device.lane import FileLane, FileTicket
from delta.runtime.device.parts import Rates, WallClock, limit_bytes, part_bytes
from delta.runtime.device.process_memory import ProcessMemory
from delta.runtime.landing import landing
from delta.runtime.monitor import host_facts
from delta.runtime.pieces import BLOCK_BYTES
from delta.runtime.rawmem import HugePages, drop_pages, sole_owner
from delta.runtime.spill import FileRoom, SpillFile

_PROBE_BYTES = 4 * 2**20
_PROBE_ROUNDS = 4
_MIN_STRAIGHT_BYTES = 2**20  # its room is a block more; what is smaller takes mostly the time to ask for it
_PROBE_NS = 60_000_000  # per direction; a round that is under way is finished
# Python is slow between large ops, which have swept the caches. For each copy more, or op more that was replayed,
# steps of a ResNet-50 and a vision transformer took 0.3 to 0.5 ms longer beside what bytes and ops themselves took.
_COPY_NS = _REPLAY_NS = 400_000
_interference: dict[tuple[int, int], float] = {}  # by file system and threads: measured once in a process
_MIN_DROP_BYTES = 256 * 1024  # smaller storages are reused by the allocator sooner than their pages are missed


class CpuDevice:
    """See the module docstring and `delta.runtime.device.base.Device`. SwapError when the spill directory cannot be
    used.
    """

    kind = "cpu"
    hoards = True
    copy_ns = _COPY_NS
    replay_ns = _REPLAY_NS
    in_order = False
    torch_device = torch.device("cpu")

    def __init__(self, host: HostConfig) -> None:
        self._spill = SpillFile(host.spill_dir)
        self._spill.check()
        self.spill_directory: str | None = self._spill.directory
        self._limit_bytes = limit_bytes(host.limit, self._spill.free_disk_bytes())
        self._rates = Rates()
        self._mover = _HeapMover(self._spill)
        self._lane = FileLane(self._spill, self._mover, self._rates, self._limit_bytes)
        self._clock = WallClock()
        self._memory = ProcessMemory()
        self._huge_pages: HugePages | None = None

    def capacity_bytes(self) -> int:
        return part_bytes(host_facts().total_bytes)

    @property
    def kept_bytes(self) -> int:
        return self._memory.kept_bytes

    def used_bytes(self) -> int:
        return self._memory.resident_bytes()

    def in_use(self) -> tuple[int, int]:
        """What is being read back becomes resident only as it comes."""
        return self._memory.in_use(self._lane.coming_bytes)

    def watch_peaks(self, on: bool) -> None:
        self._memory.watch_peaks(on)

    def refusals(self) -> int:
        return 0

    def memory_blocks(self) -> None:
        """The heap is not ours to look into."""

    def copy_out(self, storage: torch.UntypedStorage) -> Ticket:
        return self._lane.copy_out(storage)

    def copy_in(self, block: HostBlock) -> Ticket:
        return self._lane.copy_in(block, self._mover.destination(block.nbytes, block.room))

    def ready(self, ticket: Ticket) -> bool:
        if not _own(ticket).ended():
            return False
        if ticket.failure is not None:
            ticket.raise_failure()
        return True

    def wait(self, ticket: Ticket) -> None:
        _own(ticket).finish()
        ticket.raise_failure()

    def let_go_after(self, ticket: Ticket) -> None:
        self.wait(ticket)

    def free(self, block: HostBlock) -> None:
        self._lane.free(block)

    def release(self, storage: torch.UntypedStorage, tensors: int = 0) -> None:
        """Under a budget of resident bytes, return the storage's pages now instead of hoping for the heap to shrink.

        Without one the allocator may keep them: reusing warm pages is three times faster than faulting in new ones.
        """
        if self._memory.budget_bytes is None or storage.nbytes() < _MIN_DROP_BYTES or not sole_owner(storage, tensors):
            return
        if torch.cuda.is_initialized() and storage.is_pinned():  # a card has these pages' addresses
            return
        drop_pages(storage)

    def computes(self) -> None:
        """There are no streams."""

    def meet(self) -> None:
        """There are no streams."""

    def share(self, storage: torch.UntypedStorage) -> None:
        """There are no streams."""

    def bandwidth(self) -> Bandwidth:
        measured = self._rates.bandwidth()
        if measured is None:
            self._probe()
            measured = self._rates.bandwidth()
            assert measured is not None
        return measured

    def interference(self) -> float:
        setting = (os.stat(self._spill.directory).st_dev, torch.get_num_threads())
        if setting not in _interference:
            _interference[setting] = self._contend()
        return _interference[setting]

    def host_bytes(self) -> int:
        return self._spill.used_bytes

    def clock(self) -> OpClock:
        return self._clock

    def trim(self) -> None:
        self._memory.trim()
        if self._huge_pages is not None:
            self._huge_pages.ask()

    def trim_host(self) -> None:
        """Nothing is pinned: what leaves the device goes to the disk."""

    def trim_reserved(self) -> None:
        """What the heap merely keeps saves page faults, and is looked after under a budget."""

    def expand(self, on: bool) -> None:
        """The system's allocator has its own ways."""

    def cap(self, budget_bytes: int | None) -> None:
        self._memory.budget_bytes = budget_bytes
        if budget_bytes is not None:
            self._huge_pages = HugePages()
            self.trim()

    def enforce(self, on: bool) -> None:
        """The system's allocator refuses nothing."""

    def as_here(self, run: Callable[[], R]) -> Callable[[], R]:
        return run

    def stop(self) -> None:
        self.cap(None)
        self._memory.stop()
        self._lane.stop()

    def close(self) -> None:
        self.stop()
        self._spill.close()
        self._memory.close()

    def _probe(self) -> None:
        with self._copies() as copies:
            copies["out"]()
            self._mover.choose_way(copies["in"])
            for direction, copy in copies.items():
                self._time(direction, copy)

    def _contend(self) -> float:
        """What copies take from compute, with torch's threads as they are now."""
        speed = self.bandwidth()
        copy_ns: dict[Direction, float] = {
            "out": _PROBE_BYTES * 1e9 / speed.out_bytes_per_s,
            "in": _PROBE_BYTES * 1e9 / speed.in_bytes_per_s,
        }
        with self._copies() as copies:
            return share_taken(copies, copy_ns)

    @contextmanager
    def _copies(self) -> Iterator[dict[Direction, Callable[[], None]]]:
        """Moves a few megabytes of the heap each way, past the host limit: the room is given back before anyone can
        miss it.
        """
        storage = torch.UntypedStorage(_PROBE_BYTES)
        ctypes.memset(storage.data_ptr(), 0, _PROBE_BYTES)  # what was never written is one page of zeros, in a cache
        mover = self._mover
        room = self._spill.reserve(_PROBE_BYTES, mover.phase_bytes(storage))
        try:
            yield {"out": lambda: mover.write(storage, room), "in": lambda: mover.read(room, storage)}
        finally:
            self._spill.give_back(room)

    def _time(self, direction: Direction, copy: Callable[[], None]) -> None:
        end_ns = time.perf_counter_ns() + _PROBE_NS
        for _ in range(_PROBE_ROUNDS):
            start_ns = time.perf_counter_ns()
            copy()
            now_ns = time.perf_counter_ns()
            self._rates.note(direction, _PROBE_BYTES, now_ns - start_ns)
            if now_ns > end_ns:
                return


class _HeapMover:
    """Between heap memory and the file: straight where that takes less of a processor than a detour."""

    def __init__(self, spill: SpillFile) -> None:
        self._spill = spill
        self._detour = True  # for what is read; what is written goes straight on every machine met

    def choose_way(self, read: Callable[[], None]) -> None:
        """Try both ways of a `read` of what was written in phase. On some machines the memory's pages are what costs,
        on others the bytes that a detour copies."""
        spent_ns: dict[bool, list[int]] = {True: [], False: []}
        end_ns = time.perf_counter_ns() + _PROBE_NS
        for _ in range(_PROBE_ROUNDS):
            for detour, each_ns in spent_ns.items():
                self._detour = detour
                began_ns = time.thread_time_ns()
                read()
                each_ns.append(time.thread_time_ns() - began_ns)
            if time.perf_counter_ns() > end_ns:
                break
        self._detour = min(spent_ns[True]) <= min(spent_ns[False])

    def destination(self, nbytes: int, room: FileRoom) -> torch.UntypedStorage:
        """Where to read what is in the room."""
        if self._detour or nbytes < _MIN_STRAIGHT_BYTES or not self._spill.direct:
            return torch.UntypedStorage(nbytes)
        return landing(nbytes, room.phase_bytes, BLOCK_BYTES)

    def order(self, direction: Direction) -> None:
        """Work on the CPU is done when its call returns."""

    def phase_bytes(self, storage: torch.UntypedStorage) -> int:
        """The storage's own, so that what is written goes straight."""
        return storage.data_ptr() % BLOCK_BYTES if storage.nbytes() >= _MIN_STRAIGHT_BYTES else 0

    def write(self, storage: torch.UntypedStorage, room: FileRoom) -> None:
        self._spill.write(room, storage.data_ptr(), storage.nbytes())

    def read(self, room: FileRoom, storage: torch.UntypedStorage) -> None:
        self._spill.read(room, storage.data_ptr(), storage.nbytes(), detour=self._detour)


def _own(ticket: Ticket) -> FileTicket:
    if not isinstance(ticket, FileTicket):
        raise TypeError("this ticket belongs to another device")
    return ticket
