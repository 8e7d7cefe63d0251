"""The narrow seam between `delta.runtime.device.cuda` and the card: streams, events, memory. Tests put a simulated
card behind it.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from delta.runtime import monitor
from delta.runtime.device.base import MemoryBlock, R
from delta.runtime.host import Slab, SlabSource
from delta.runtime.pinned import slab_source
from delta.runtime.rawmem import as_bytes

_EXPAND = "expandable_segments"
_HERE = nullcontext()
_CYCLES_PER_NS = 2  # an H100 at its fastest; a slower card waits longer


class Event(Protocol):
    """A place in a stream. `torch.cuda.Event` is one. It is asked and waited for `Accelerator.here`."""

    def record(self, stream: "Stream") -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        ...


class Stream(Protocol):
    """Work in order. `torch.cuda.Stream` is one."""

    def wait_event(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What the allocator has given out: now, at most since somebody last reset that, and ever, given back or not.
    `reserved_bytes`: what it has from the card. `refusals`: how often it had nothing to give.
    """

    now_bytes: int
    peak_bytes: int
    ever_bytes: int
    reserved_bytes: int = 0
    refusals: int = 0


class Accelerator(Protocol):
    """One card."""

    torch_device: torch.device

    def here(self) -> AbstractContextManager[object]:
        """The calling thread's card meanwhile. A thread begins on the first one, and whatever it asks CUDA there takes
        half a gigabyte of that for a context."""
        ...

    def new_stream(self) -> Stream: ...

    def current_stream(self) -> Stream:
        """The calling thread's stream for this card."""
        ...

    def current_handle(self) -> int:
        """What tells that stream from others, for less time than it takes to have it."""
        ...

    def new_event(self) -> Event: ...

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Enqueue a copy. One side is pinned host memory."""
        ...

    def spin(self, ns: int) -> None:
        """Enqueue a kernel that takes about that long and does nothing."""
        ...

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory that the current stream may use from now on."""
        ...

    def share_with(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """The storage will be used on a stream other than the one it was allocated on."""
        ...

    def allocated_bytes(self) -> int: ...

    def memory_use(self) -> MemoryUse: ...

    def counts(self) -> bool:
        """Whether the allocator is PyTorch's own, which counts all that `MemoryUse` has and can be capped."""
        ...

    def total_bytes(self) -> int: ...

    def memory_blocks(self) -> list[MemoryBlock]:
        """The allocator's segments, cut up, in the order of addresses."""
        ...

    def empty_cache(self) -> None: ...

    def limit(self, fraction: float) -> None:
        """Let the allocator refuse to reserve more than this part of the card."""
        ...

    def fraction(self) -> float:
        """The part that it may reserve now."""
        ...

    def expand_segments(self, on: bool) -> None:
        """Have the allocator reserve memory where it needs it next, if the card can and the program has not said
        otherwise; or leave it as it was. A budget of reserved bytes is lost on segments that nothing fits into."""
        ...

    def slab_source(self) -> SlabSource: ...

    def as_here(self, run: Callable[[], R]) -> Callable[[], R]:
        """The same call for another thread, on the calling thread's stream for this card."""
        ...


class CudaCard:
    """A card seen through `torch.cuda`."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self._settings: str | None = None  # the allocator's, while others hold
        self._streams: dict[int, Stream] = {}  # by handle

    def here(self) -> AbstractContextManager[object]:
        if torch._C._cuda_getDevice() == self.torch_device.index:
            return _HERE
        return torch.cuda.device(self.torch_device)  # which goes back to a card without a context by making none there

    def new_stream(self) -> Stream:
        return cast(Stream, torch.cuda.Stream(self.torch_device))

    def current_stream(self) -> Stream:
        """PyTorch makes a new object each time, which takes fifty times as long as the handle."""
        handle = self.current_handle()
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = cast(Stream, torch.cuda.current_stream(self.torch_device))
        return stream

    def current_handle(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.torch_device.index))

    def new_event(self) -> Event:
        return cast(Event, torch.cuda.Event(enable_timing=True))

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        with self.here():
            home = cast(torch.cuda.Stream, self.current_stream())
            # `torch.cuda.stream` asks PyTorch for the stream there is, which takes 6 µs on an H100.
            torch.cuda.set_stream(cast(torch.cuda.Stream, stream))
            try:
                to.copy_(source, non_blocking=True)
            finally:
                torch.cuda.set_stream(home)

    def spin(self, ns: int) -> None:
        with self.here():
            torch.cuda._sleep(int(ns * _CYCLES_PER_NS))

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(nbytes, device=self.torch_device)

    def share_with(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        with torch._C._DisableTorchDispatch():
            as_bytes(storage).record_stream(cast(torch.cuda.Stream, stream))

    def allocated_bytes(self) -> int:
        return self.memory_use().now_bytes

    def memory_use(self) -> MemoryUse:
        """In one question, without the flat and sorted copy that `memory_allocated` makes of the answer."""
        if not self.counts():
            return MemoryUse(0, 0, 0)
        facts = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        if not facts:  # nothing has been asked for yet
            return MemoryUse(0, 0, 0)
        allocated, reserved = facts["allocated_bytes"]["all"], facts["reserved_bytes"]["all"]
        given = allocated["current"], allocated["peak"], allocated["allocated"]
        return MemoryUse(*given, reserved["current"], facts["num_ooms"])

    def counts(self) -> bool:
        return torch.cuda.get_allocator_backend() == "native"

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def memory_blocks(self) -> list[MemoryBlock]:
        return blocks_of(torch.cuda.memory_snapshot(), self.torch_device.index)

    def empty_cache(self) -> None:
        with self.here():
            torch.cuda.empty_cache()

    def limit(self, fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def fraction(self) -> float:
        return min(1.0, float(torch.cuda.get_per_process_memory_fraction(self.torch_device)))  # unset: may be more

    def expand_segments(self, on: bool) -> None:
        """What is set replaces all settings there were, and holds for every card (PyTorch's `AllocatorConfig`)."""
        before = self._settings
        if on is (before is not None) or not self.counts():
            return
        now = torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
        if before is None:
            if _EXPAND not in now and monitor.maps_memory(self.torch_device.index):
                self._settings = now
                torch._C._accelerator_setAllocatorSettings(_expanding(now))
            return
        self._settings = None
        after = before if now == _expanding(before) else now  # the program has made others since
        if _EXPAND not in after:
            for settings in (f"{_EXPAND}:False", after):  # nothing but this one keeps its value if it is not named
                torch._C._accelerator_setAllocatorSettings(settings)

    def slab_source(self) -> SlabSource:
        card = monitor.gpu(str(torch.cuda.get_device_properties(self.torch_device).uuid))
        source = slab_source(card.numa_node if card else None)

        def pinned(nbytes: int) -> Slab:
            with self.here():
                return source(nbytes)

        return pinned

    def as_here(self, run: Callable[[], R]) -> Callable[[], R]:
        stream = cast(torch.cuda.Stream, self.current_stream())

        def there() -> R:
            with self.here(), torch.cuda.stream(stream):
                return run()

        return there


def _expanding(settings: str) -> str:
    return ",".join(filter(None, (settings, f"{_EXPAND}:True")))


def blocks_of(segments: Iterable[Mapping[str, Any]], device: int) -> list[MemoryBlock]:
    """The blocks of one card in what `torch.cuda.memory_snapshot` returns. A block that waits for another stream before
    it can be used again is not free yet."""
    found = []
    for segment in sorted((s for s in segments if s["device"] == device), key=lambda s: int(s["address"])):
        address = int(segment["address"])
        for block in segment["blocks"]:
            free = block["state"] == "inactive"
            found.append(MemoryBlock(address, int(block["size"]), int(segment["address"]), free))
            address += int(block["size"])
    return found
