"""A card made of ordinary memory whose streams run as late as they may, and in any legal order.

Work is put into a stream and runs when somebody waits for it, or when chance lets it at a poll. A copy looks at its
memory only when it runs. As with a caching allocator, memory that the card gave out and that the host has dropped goes
to other work in the order of the stream it was allocated on, and after what other streams it was shared with had been
given by then: it is overwritten, and a copy that runs after that fails the test.
"""

import ctypes
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from delta.runtime.device.accelerator import Event, MemoryUse, Stream
from delta.runtime.device.base import MemoryBlock, R
from delta.runtime.host import Slab, SlabSource

Work = Callable[[], bool]  # does its thing and says True; False: not yet


@dataclass(eq=False)
class Memory:
    """Bytes that the card gave out. They outlive the storage over them, so a wrong copy fails a check and not the
    process.
    """

    content: bytearray
    address: int
    storage: StorageWeakRef
    streams: list["SimulatedStream"]  # it was allocated on the first, and shared with the others
    used: "list[Marker] | None" = None  # once dropped: when these have passed, nothing uses it any more
    reused: bool = False


@dataclass
class Marker:
    """One recording of an event."""

    passed: bool = True
    at_ms: float = 0.0


POISON = 0xEE


class SimulatedStream:
    """Work in order, which only `SimulatedCard` lets run."""

    def __init__(self, card: "SimulatedCard", name: str) -> None:
        self.card = card
        self.name = name
        self.work: deque[Work] = deque()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        marker = event.marker  # as on a card: what is recorded later does not count
        self.work.append(lambda: marker.passed)

    def step(self) -> bool:
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True


class SimulatedEvent:
    def __init__(self, card: "SimulatedCard") -> None:
        self.card = card
        self.marker = Marker()

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        marker = self.marker = Marker(passed=False)

        def passes() -> bool:
            marker.passed, marker.at_ms = True, next(self.card.ticks) * 0.01
            return True

        stream.work.append(passes)

    def query(self) -> bool:
        self.card.asked_here()
        self.card.let_some_run()
        return self.marker.passed

    def synchronize(self) -> None:
        self.card.asked_here()
        self.card.run_until(lambda: self.marker.passed)

    def elapsed_time(self, end: Event) -> float:
        assert isinstance(end, SimulatedEvent) and self.marker.passed and end.marker.passed
        return end.marker.at_ms - self.marker.at_ms


@dataclass
class SimulatedCard:
    """A `delta.runtime.device.accelerator.Accelerator`. ``ran`` lists the names of copies and kernels in the order
    they ran.
    """

    seed: int = 0
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ran: list[str] = field(default_factory=list)
    limited_to: float = 1.0
    own_allocator: bool = True
    expands: bool = False
    emptied: int = 0
    spun_ns: int = 0
    shared: list[str] = field(default_factory=list)
    slabs: int = 0
    use: tuple[int, ...] = (0, 0, 0)  # what the allocator says: bytes now, at most, ever; how often it had none

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.current = threading.local()
        self.random = random.Random(self.seed)
        self.ticks = itertools.count()
        self.streams: list[SimulatedStream] = []
        self.given_out: list[Memory] = []
        self._not_reused: list[Memory] = []  # of them
        self.compute = self.new_stream()

    @contextmanager
    def here(self) -> Iterator[None]:
        before, self.current.here = getattr(self.current, "here", False), True
        try:
            yield
        finally:
            self.current.here = before

    def asked_here(self) -> None:
        """Every thread is on another card until it says otherwise."""
        assert getattr(self.current, "here", False), "a card that is not the thread's current one was asked"

    def new_stream(self) -> SimulatedStream:
        self.streams.append(SimulatedStream(self, f"stream{len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self) -> SimulatedStream:
        return self.compute

    def current_handle(self) -> int:
        return self.streams.index(self.compute)

    def new_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def spin(self, ns: int) -> None:
        self.spun_ns += ns

    def kernel(self, name: str, work: Callable[[], object]) -> None:
        """Put work into the current stream."""

        def runs() -> bool:
            work()
            self.ran.append(name)
            return True

        self.compute.work.append(runs)

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream) and to.numel() == source.numel()
        addresses, nbytes, name = (to.data_ptr(), source.data_ptr()), to.numel(), stream.name
        checks = [self._check(tensor) for tensor in (to, source)]

        def runs() -> bool:
            assert all(check() for check in checks), "memory was freed while a copy was under way"
            ctypes.memmove(*addresses, nbytes)
            self.ran.append(name)
            return True

        stream.work.append(runs)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        content = bytearray(b"\xff" * max(nbytes, 1))
        bytes_ = torch.frombuffer(content, dtype=torch.uint8)
        storage = bytes_.untyped_storage() if nbytes else torch.UntypedStorage(0)
        memory = Memory(content, bytes_.data_ptr(), StorageWeakRef(storage), [self.compute])
        self.given_out.append(memory)
        self._not_reused.append(memory)
        return storage

    def _check(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """Whether this tensor's memory is still its own when that is asked later."""
        memory = self._memory(tensor.untyped_storage())
        if memory is not None:
            return lambda: not memory.reused
        storage = StorageWeakRef(tensor.untyped_storage())
        return lambda: not storage.expired()

    def _memory(self, storage: torch.UntypedStorage) -> Memory | None:
        """What the card gave out for this storage."""
        address = storage.data_ptr()
        return next((memory for memory in reversed(self.given_out) if memory.address == address), None)

    def _reuse_dropped(self) -> None:
        for memory in list(self._not_reused):
            if memory.used is None and memory.storage.expired():
                memory.used = [self._marker_in(stream) for stream in memory.streams]
            if memory.used is not None and all(marker.passed for marker in memory.used) and not memory.reused:
                memory.reused = True
                self._not_reused.remove(memory)
                memory.content[:] = bytes([POISON]) * len(memory.content)

    def _marker_in(self, stream: SimulatedStream) -> Marker:
        event = SimulatedEvent(self)
        event.record(stream)
        return event.marker

    def share_with(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        self.shared.append(stream.name)
        memory = self._memory(storage)
        if memory is not None and stream not in memory.streams:
            memory.streams.append(stream)

    def allocated_bytes(self) -> int:
        return self.use[0]

    def memory_use(self) -> MemoryUse:
        return MemoryUse(*self.use)

    def counts(self) -> bool:
        return self.own_allocator

    def total_bytes(self) -> int:
        return 2**30

    def memory_blocks(self) -> list[MemoryBlock]:
        """What the card gave out, each in a segment of its own."""
        return [
            MemoryBlock(memory.address, len(memory.content), memory.address, memory.used is not None)
            for memory in sorted(self.given_out, key=lambda memory: memory.address)
        ]

    def empty_cache(self) -> None:
        self.emptied += 1

    def limit(self, fraction: float) -> None:
        self.limited_to = fraction

    def fraction(self) -> float:
        return self.limited_to

    def expand_segments(self, on: bool) -> None:
        self.expands = on

    def slab_source(self) -> SlabSource:
        def source(nbytes: int) -> Slab:
            self.slabs += 1
            return Slab(torch.zeros(nbytes, dtype=torch.uint8), self._slab_released)

        return source

    def as_here(self, run: Callable[[], R]) -> Callable[[], R]:
        return run

    def _slab_released(self) -> None:
        self.slabs -= 1

    def let_some_run(self) -> None:
        with self.lock:
            self._reuse_dropped()
            for stream in self.random.sample(self.streams, len(self.streams)):
                for _ in range(self.random.randrange(4)):
                    stream.step()
                    self._reuse_dropped()

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Run work, in an order that chance picks, until something is so."""
        with self.lock:
            self._reuse_dropped()
            while not reached():
                order = self.random.sample(self.streams, len(self.streams))
                # One step of one stream: were all moved on together, no stream would ever run ahead of another.
                assert any(stream.step() for stream in order), "streams wait for each other for ever"
                self._reuse_dropped()

    def settle(self) -> None:
        """Run everything."""
        self.run_until(lambda: not any(stream.work for stream in self.streams))
