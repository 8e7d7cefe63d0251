"""What every device offers: copies of whole storages to the host and back, each followed by a ticket.

Failure contract (nothing is ever lost):

- `Device.copy_out` raises HostFullError or SwapError with nothing changed, or returns a ticket. The ticket keeps the
  source alive until the host copy is complete. If the copy fails, `ready` and `wait` raise, the source is untouched,
  and the device has already given the host room back.
- `Device.copy_in` leaves the host block as it is. If the copy fails, `ready` and `wait` raise, the destination is
  dropped, and the copy may be asked for again.
- Whoever asked for a copy out drops its own reference to the source only after `ready` returned True, or `wait` or
  `let_go_after` returned.
- A block given to `Device.free` is dead for its owner; the room itself is reused only when no transfer reads or
  writes it any more.

Not covered: which storage to move and when. A device obeys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch

from delta.errors import SwapError

R = TypeVar("R")
Direction = Literal["out", "in"]


@dataclass(slots=True, eq=False)
class HostBlock:
    """Host room for one storage. ``place`` is where it is; the other fields belong to the device that made it."""

    nbytes: int
    place: Literal["file", "pinned", "memory"]
    room: Any = None
    complete: bool = False  # the copy out has ended well: the block can be read
    writer: "Ticket | None" = field(default=None, repr=False)  # the copy out, while it is under way
    pending: int = 0  # transfers that read or write the block
    freed: bool = False

    def unwanted(self) -> bool:
        """Nobody will ever read what its copy out writes: it was given back, and no copy in was asked for before
        that.
        """
        return self.freed and self.pending <= 1


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer. ``storage`` is the source of a copy out until it has ended, or the new device storage of a copy
    in.

    ``started_ns`` is when the copying began (until then: when it was asked for), ``finished_ns`` when its end was
    noticed, both on `time.perf_counter_ns`.
    """

    nbytes: int
    direction: Direction
    block: HostBlock
    storage: torch.UntypedStorage | None
    started_ns: int
    finished_ns: int | None = None
    failure: SwapError | None = None

    def raise_failure(self) -> None:
        """SwapError if the transfer failed. A new one each time: a kept traceback would keep the storages of its
        frames alive.
        """
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What the link to the host moves, each direction alone."""

    out_bytes_per_s: float
    in_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """A piece of device memory as the allocator cuts it. Blocks of different segments are never one piece."""

    address: int
    nbytes: int
    segment: int
    free: bool


class OpClock(Protocol):
    """Times work on the device. ``start`` and ``stop`` never wait for it; marks and tokens mean nothing to anyone
    else. ``late``: the host works ahead of the device, and its own clock says little of when things happen there.
    """

    late: bool

    def start(self) -> Any: ...

    def stop(self, mark: Any) -> Any: ...

    def hold_back(self, ns: int) -> None:
        """Where the clock is late: have the device do nothing for that long before what it is given next. A host that
        is slow to give it work, as one that records is, would otherwise be what is timed.
        """
        ...

    def elapsed_ns(self, token: Any) -> int | None:
        """Time between start and stop; None while the device has not got there yet."""
        ...

    def wait_ns(self, token: Any) -> int:
        """Time between start and stop, once the device has got there."""
        ...


@runtime_checkable
class Device(Protocol):
    """A device and its host tier. All methods may be called from any thread."""

    kind: str
    torch_device: torch.device
    hoards: bool
    """Whether `used_bytes` counts memory that was freed but not given back, so that `trim` lowers it."""
    copy_ns: int
    """What a copy takes from compute beside the part of its time that `interference` tells of."""
    replay_ns: int
    """What an op that is to be replayed takes from compute beside its own time."""
    spill_directory: str | None
    """Where its spill file lies, if it has one."""
    in_order: bool
    """Whether the transfers of one direction end in the order in which they were asked for."""

    def capacity_bytes(self) -> int:
        """What the device has in all; of memory that belongs to all processes of the machine, this one's part."""
        ...

    def used_bytes(self) -> int:
        """In use now: the allocator's bytes (cuda), the process's resident set (cpu, chaos)."""
        ...

    def in_use(self) -> tuple[int, int]:
        """Of that, what is not merely kept by the allocator, now, and the most since this was last asked, as far as the
        device can tell: at least what is in use now, at most what was ever.
        """
        ...

    @property
    def kept_bytes(self) -> int:
        """Of `used_bytes`, what was merely kept when `in_use` was last asked, as far as is known; 0 after `trim`."""
        ...

    def watch_peaks(self, on: bool) -> None:
        """Whether `in_use` is to know of peaks as well as it can, which takes some of a processor's time (cpu)."""
        ...

    def refusals(self) -> int:
        """How often the allocator has found no memory, as far as it counts that: whoever asked may have gone another
        way and said nothing.
        """
        ...

    def memory_blocks(self) -> list[MemoryBlock] | None:
        """All that the allocator has reserved, in the order of addresses; None: this device has no such order."""
        ...

    def copy_out(self, storage: torch.UntypedStorage) -> Ticket:
        """Begin a copy of the whole storage to the host. HostFullError or SwapError: nothing was changed."""
        ...

    def copy_in(self, block: HostBlock) -> Ticket:
        """Allocate the destination now, on the caller's current stream, and begin to fill it. SwapError: the block
        was given back.
        """
        ...

    def ready(self, ticket: Ticket) -> bool:
        """Whether the transfer has ended, without blocking. SwapError if it failed."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Copy in: the data is there for the calling thread's current stream. Copy out: the host copy is complete. Or
        SwapError.
        """
        ...

    def let_go_after(self, ticket: Ticket) -> None:
        """Copy out: from now on its source may be dropped, though the host copy may not be complete yet: the memory
        goes to other work in the order of the stream, which comes after the copy. SwapError if the copy failed.
        """
        ...

    def free(self, block: HostBlock) -> None:
        """Give host room back; put off while a transfer uses it. A copy out that nobody waits for may be given up.
        Idempotent.
        """
        ...

    def release(self, storage: torch.UntypedStorage, tensors: int = 0) -> None:
        """The mechanism is about to drop its last own reference. Nothing happens if another handle shares the storage,
        or tensors beside those counted in `tensors`, whose bytes nobody will read.
        """
        ...

    def computes(self) -> None:
        """The program computes on the calling thread's current stream, as far as the device has streams."""
        ...

    def meet(self) -> None:
        """Besides: what is done there next, by Delta or by the program, is to come after what was enqueued on the other
        streams on which the program was seen to compute.
        """
        ...

    def share(self, storage: torch.UntypedStorage) -> None:
        """Any of those streams may be using the storage: its memory is not used again before they are done."""
        ...

    def bandwidth(self) -> Bandwidth:
        """Measured at the first call (under 0.3 s) and followed by the transfers made since. SwapError if the host
        tier fails.
        """
        ...

    def interference(self) -> float:
        """The part of a copy's time that compute loses to it, from 0 to 1. cpu: measured, once in a process (under 0.5
        s); SwapError if the host tier fails.
        """
        ...

    def host_bytes(self) -> int:
        """Host room in use now."""
        ...

    def clock(self) -> OpClock: ...

    def trim(self) -> None:
        """Give freed memory back to the system: freed heap pages (cpu), the allocator's cache, empty slabs (cuda)."""
        ...

    def trim_host(self) -> None:
        """Give back pinned memory that nothing was put into since the last time this was called (cuda)."""
        ...

    def trim_reserved(self) -> None:
        """Give back what the allocator has from the card and nobody uses, where that is more than it need be (cuda)."""
        ...

    def expand(self, on: bool) -> None:
        """Whether the allocator's segments may grow and shrink, where the program has not decided that: for as long as
        there is a limit of any kind. Else what was evicted leaves segments that nothing larger fits. cuda only.
        """
        ...

    def cap(self, budget_bytes: int | None) -> None:
        """Tell the device which budget holds (None: none). cuda: see `enforce`; cpu: released pages return at once."""
        ...

    def enforce(self, on: bool) -> None:
        """Whether the allocator is to refuse what goes far over the budget: only while somebody hears of it who makes
        room and asks again. cuda only.
        """
        ...

    def as_here(self, run: Callable[[], R]) -> Callable[[], R]:
        """The same call for another thread: there it finds this thread's current device and stream."""
        ...

    def stop(self) -> None:
        """Finish what is pending and end the I/O threads; no budget holds any more, and the allocator is as it was.
        Transfers asked for later run in the caller's thread.
        """
        ...

    def close(self) -> None:
        """`stop`, then give back all host room, the spill file and pinned memory. Later copies raise SwapError;
        idempotent.
        """
        ...
