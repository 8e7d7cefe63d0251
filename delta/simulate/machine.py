"""The virtual device: a clock, two directions of a link, memory, and a log of everything that happened on it.

Nothing here decides. The log is what `delta.simulate.checker` checks a schedule by, knowing nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from delta.simulate.allocator import Allocator
from delta.types import Link

SLOWEST = 0.1  # of compute: what copies leave of it at least


@dataclass(frozen=True, slots=True)
class Entry:
    """One physical action, over storages as the device numbers them. `what`: alloc, free, become, run, out
    or in; `reads` and `storages`: what it read, and what it made or moved."""

    what: str
    began_ns: int
    ended_ns: int
    storages: tuple[int, ...]
    reads: tuple[int, ...] = ()


@dataclass(slots=True)
class Machine:
    """A device whose memory `allocator` hands out. Raises OutOfMemory where a storage does not fit."""

    allocator: Allocator
    link: Link | None = None
    now_ns: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    stall_ns: int = 0
    moved_out_bytes: int = 0
    log: list[Entry] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)  # of every storage that was ever allocated
    _blocks: dict[int, int] = field(default_factory=dict)
    _out_free_ns: int = 0
    _in_free_ns: int = 0

    def allocate(self, storage: int, nbytes: int, from_right: bool = False) -> None:
        self._blocks[storage] = self.allocator.allocate(nbytes, from_right)
        self.nbytes[storage] = nbytes
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.log.append(Entry("alloc", self.now_ns, self.now_ns, (storage,)))

    def free(self, storage: int) -> None:
        self.allocator.free(self._blocks.pop(storage))
        self.used_bytes -= self.nbytes[storage]
        self.log.append(Entry("free", self.now_ns, self.now_ns, (storage,)))

    def become(self, old: int, new: int) -> None:
        """`old` was written in place: its memory holds `new` from here on."""
        self._blocks[new] = self._blocks.pop(old)
        self.nbytes[new] = self.nbytes[old]
        self.log.append(Entry("become", self.now_ns, self.now_ns, (new,), (old,)))

    def holders(self) -> dict[int, int]:
        """Block of the allocator -> the storage in it."""
        return {block: storage for storage, block in self._blocks.items()}

    def holds(self, storage: int) -> bool:
        return storage in self._blocks

    def run(self, cost_ns: int, reads: tuple[int, ...], makes: tuple[int, ...]) -> None:
        """The compute stream is busy; what it makes has been allocated."""
        began_ns = self._compute(cost_ns)
        self.log.append(Entry("run", began_ns, self.now_ns, makes, reads))

    def encode(self, storage: int, form: int, cost_ns: int) -> None:
        """The compute stream makes the encoded form of a storage; there is room for it."""
        began_ns = self._compute(cost_ns)
        self.log.append(Entry("encode", began_ns, self.now_ns, (form,), (storage,)))

    def decode(self, form: int, storage: int, cost_ns: int) -> None:
        """The compute stream makes a storage again from its encoded form; there is room for it."""
        began_ns = self._compute(cost_ns)
        self.log.append(Entry("decode", began_ns, self.now_ns, (storage,), (form,)))

    def _compute(self, cost_ns: int) -> int:
        """The compute stream works for `cost_ns`, and longer while copies run beside it: each takes its share of that
        time. Returns when it began."""
        began_ns, left_ns = self.now_ns, float(cost_ns)
        share = self.link.interference if self.link is not None else 0.0
        for copies, until_ns in zip((2, 1), sorted((self._out_free_ns, self._in_free_ns)), strict=True):
            speed = max(SLOWEST, 1 - copies * share)
            beside_ns = min(left_ns / speed, max(0, until_ns - self.now_ns))
            self.now_ns += round(beside_ns)
            left_ns -= beside_ns * speed
        self.now_ns += round(left_ns)
        self.stall_ns += self.now_ns - began_ns - cost_ns
        return began_ns

    def copy_out(self, storage: int) -> int:
        """Queue a copy to the host; returns when it will have ended."""
        assert self.link is not None
        self._queue(self.link)
        began_ns = max(self.now_ns, self._out_free_ns)
        self._out_free_ns = began_ns + self.link.out_ns(self.nbytes[storage])
        self.moved_out_bytes += self.nbytes[storage]
        self.log.append(Entry("out", began_ns, self._out_free_ns, (storage,)))
        return self._out_free_ns

    def copy_in(self, storage: int) -> int:
        """Queue a copy back into a storage that has been allocated; returns when it will have ended."""
        assert self.link is not None
        self._queue(self.link)
        began_ns = max(self.now_ns, self._in_free_ns)
        self._in_free_ns = began_ns + self.link.in_ns(self.nbytes[storage])
        self.log.append(Entry("in", began_ns, self._in_free_ns, (storage,)))
        return self._in_free_ns

    def _queue(self, link: Link) -> None:
        """Compute stands still for what each copy takes from it, whatever its size."""
        self.wait_until(self.now_ns + round(link.copy_ns))

    def pause(self, ns: int) -> None:
        """Compute stands still because the host does something else; copies go on."""
        self.now_ns += ns

    def wait_until(self, then_ns: int) -> None:
        """Compute stands still until a copy has ended."""
        if then_ns > self.now_ns:
            self.stall_ns += then_ns - self.now_ns
            self.now_ns = then_ns
