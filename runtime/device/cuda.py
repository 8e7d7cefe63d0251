"""A CUDA card as a device: one side stream for each direction, pinned slabs as its host tier, a spill file behind
them if the policy names a directory. Its logic is tested against a simulated card.

How memory stays valid without `record_stream` (which postpones reuse without bound): a flight keeps source and
destination alive until the transfer's event has passed, or until the stream that they were allocated on waits for that
event, from when on that stream's own order protects them. Destinations are allocated on the caller's
current stream, and the side stream waits for that point before it writes, since the memory may still be read by work
enqueued before. The current stream is asked for at each use: backward runs on another thread.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from delta.config import HostConfig
from delta.errors import HostFullError, SwapError
from delta.runtime import cudnn
from delta.runtime.device.accelerator import Accelerator, Event, Stream
from delta.runtime.device.base import Bandwidth, Direction, HostBlock, MemoryBlock, OpClock, R, Ticket
from delta.runtime.device.cuda_clock import EventClock
from delta.runtime.device.lane import FileLane, FileTicket
from delta.runtime.device.parts import BlockBook, Rates, limit_bytes
from delta.runtime.device.reserve import Reserve
from delta.runtime.device.staged import StagedMover
from delta.runtime.device.streams import ComputeStreams
from delta.runtime.host import Piece, PinnedPool
from delta.runtime.monitor import host_facts
from delta.runtime.rawmem import as_bytes
from delta.runtime.spill import SpillFile

_PROBE_BYTES = 16 * 2**20
_PROBE_ROUNDS = 3
_INTERFERENCE = 0.02  # copy engines do the work: an H100 lost 0 to 3 %
# The host's time counts where the host is behind, and an H200 waited for it in most of a step of GPT-2. On a CPU's core
# an op to be replayed takes 0.2 ms of it, in forward and backward, and a copy out and back 0.7; the host of that card
# took twice as long for all that could be compared. About half of that, since not all of it counts.
_COPY_NS, _REPLAY_NS = 100_000, 200_000


@dataclass(slots=True, eq=False, weakref_slot=True)
class CudaTicket(Ticket):
    """A transfer on a side stream. ``home`` is the stream that was current when it was asked for."""

    home: Stream | None = None
    flight: "_Flight | None" = None


@dataclass(slots=True, eq=False)
class _Flight:
    """What a transfer under way needs. The ticket only weakly: its owner may drop it at any time, and the storage
    with it.
    """

    ticket: "weakref.ref[CudaTicket]"
    direction: Direction
    block: HostBlock
    hold: torch.UntypedStorage | None
    begin: Event
    end: Event


class CudaDevice:
    """See the module docstring and `delta.runtime.device.base.Device`."""

    kind = "cuda"
    hoards = False
    kept_bytes = 0
    copy_ns = _COPY_NS
    replay_ns = _REPLAY_NS

    def __init__(self, card: Accelerator, host: HostConfig) -> None:
        self.torch_device = card.torch_device
        self._card = card
        self._limit_bytes = limit_bytes(host.limit, host_facts().available_bytes)
        self._source = card.slab_source()
        self._pool = PinnedPool(self._source, self._limit_bytes)
        self._computing = ComputeStreams(card)
        self._streams: dict[Direction, Stream] = {"out": card.new_stream(), "in": card.new_stream()}
        self._flights: dict[Direction, deque[_Flight]] = {"out": deque(), "in": deque()}
        self._lock = threading.RLock()
        self._book = BlockBook(lambda block: self._pool.give_back(block.room))
        self._rates = Rates()
        self._clock = EventClock(card)
        self.spill_directory = host.spill_dir
        self.in_order = host.spill_dir is None
        self._reserve = Reserve(card)
        self._closed = False
        if not card.counts():
            cudnn.note_fall_back()  # nobody would tell of one
        self._spilling = (
            None if host.spill_dir is None else _Spilling(card, host.spill_dir, self._streams, self._computing)
        )

    def capacity_bytes(self) -> int:
        return self._card.total_bytes()

    def used_bytes(self) -> int:
        return self._card.allocated_bytes()

    def in_use(self) -> tuple[int, int]:
        return self._reserve.in_use()

    def watch_peaks(self, on: bool) -> None:
        """The allocator counts them."""

    def refusals(self) -> int:
        return self._card.memory_use().refusals

    def memory_blocks(self) -> list[MemoryBlock] | None:
        return self._card.memory_blocks() if self._card.counts() else None

    def copy_out(self, storage: torch.UntypedStorage) -> Ticket:
        self._refuse_if_closed()
        self._reap()
        try:
            piece = self._room_for(storage.nbytes())
        except HostFullError:
            if self._spilling is None:
                raise
            return self._spilling.lane.copy_out(storage)
        block = HostBlock(storage.nbytes(), "pinned", piece)
        ticket = CudaTicket(block.nbytes, "out", block, storage, time.perf_counter_ns())
        try:
            with self._lock:
                self._launch(ticket, storage, piece.memory, as_bytes(storage))
                block.writer = ticket
        except BaseException:
            self._book.free(block)
            raise
        return ticket

    def copy_in(self, block: HostBlock) -> Ticket:
        self._refuse_if_closed()
        self._reap()
        storage = self._card.allocate(
            block.nbytes
        )  # an out-of-memory error goes to the caller as it is, with nothing changed
        if block.place == "file":
            assert self._spilling is not None
            return self._spilling.lane.copy_in(block, storage)
        ticket = CudaTicket(block.nbytes, "in", block, storage, time.perf_counter_ns())
        with self._lock:
            self._launch(ticket, storage, as_bytes(storage), block.room.memory)
        return ticket

    def ready(self, ticket: Ticket) -> bool:
        self._reap()
        if ticket.finished_ns is None:
            return False
        ticket.raise_failure()
        return True

    def wait(self, ticket: Ticket) -> None:
        if isinstance(ticket, FileTicket):
            ticket.finish()
        elif ticket.direction == "out":
            self._wait_out(_own(ticket))
        else:
            self._wait_in(_own(ticket))
        ticket.raise_failure()

    def let_go_after(self, ticket: Ticket) -> None:
        """The host works ahead of the card: were it to wait for the copy, the card would soon have nothing to do."""
        if isinstance(ticket, FileTicket) or not self._computing.only_here:
            self.wait(ticket)
            return
        own, current = _own(ticket), self._card.current_stream()
        with self._lock:
            if own.flight is not None and own.storage is not None:
                current.wait_event(own.flight.end)
                # It may have been allocated on another stream, and be shared with this one.
                self._card.share_with(own.storage, current)
                own.flight.hold = own.storage = None
        ticket.raise_failure()

    def free(self, block: HostBlock) -> None:
        if block.place == "file":
            assert self._spilling is not None
            self._spilling.lane.free(block)
        else:
            self._book.free(block)
        self._reap()

    def release(self, storage: torch.UntypedStorage, tensors: int = 0) -> None:
        """The caching allocator takes the memory back in the order of the stream it was allocated on."""
        self._computing.share(storage)

    def computes(self) -> None:
        self._computing.note()

    def meet(self) -> None:
        self._computing.meet()

    def share(self, storage: torch.UntypedStorage) -> None:
        if self._computing.several:
            self._computing.share(storage)

    def bandwidth(self) -> Bandwidth:
        measured = self._rates.bandwidth()
        if measured is None:
            self._probe()
            measured = self._rates.bandwidth()
            assert measured is not None
        return measured

    def interference(self) -> float:
        return _INTERFERENCE

    def host_bytes(self) -> int:
        return self._pool.used_bytes + (self._spilling.file.used_bytes if self._spilling else 0)

    def clock(self) -> OpClock:
        return self._clock

    def trim(self) -> None:
        self._reap()
        self._pool.trim()
        self._card.empty_cache()

    def trim_host(self) -> None:
        self._reap()
        self._pool.trim_idle()

    def trim_reserved(self) -> None:
        self._reserve.trim()

    def expand(self, on: bool) -> None:
        self._card.expand_segments(on)
        if on and self._card.counts():
            self._card.empty_cache()  # segments of the kind that was

    def cap(self, budget_bytes: int | None) -> None:
        self._reserve.cap(budget_bytes)

    def enforce(self, on: bool) -> None:
        self._reserve.enforce(on)

    def as_here(self, run: Callable[[], R]) -> Callable[[], R]:
        return self._card.as_here(run)

    def stop(self) -> None:
        self.cap(None)
        self.expand(False)
        if self._spilling is not None:
            self._spilling.lane.stop()
        self._land_all()

    def close(self) -> None:
        self.stop()
        self._closed = True
        if self._spilling is not None:
            self._spilling.close()
        self._pool.close()

    def _launch(self, ticket: CudaTicket, hold: torch.UntypedStorage, to: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue the copy behind what the streams that compute have been given so far. The caller holds the lock."""
        side, home = self._streams[ticket.direction], self._card.current_stream()
        self._book.begin(ticket.block)
        try:
            begin, end = self._card.new_event(), self._card.new_event()
            self._computing.lead(side)
            if ticket.block.writer is not None:  # a copy in, asked for before the copy out has ended
                writer = _own(ticket.block.writer).flight
                assert writer is not None
                side.wait_event(writer.end)
            begin.record(side)
            self._card.copy(to, source, side)
            end.record(side)
        except BaseException as error:
            self._book.end(ticket.block)
            if isinstance(error, RuntimeError):
                raise SwapError(f"the copy {ticket.direction} could not be started: {error}") from error
            raise
        ticket.home = home
        ticket.flight = _Flight(weakref.ref(ticket), ticket.direction, ticket.block, hold, begin, end)
        self._flights[ticket.direction].append(ticket.flight)

    def _room_for(self, nbytes: int) -> Piece:
        """Pinned memory for a copy out. Some that was given back may be in use by copies that the card has not come to
        yet, of a whole step where nobody waits for it: the copy out is made to come after them, and has it. To pin more
        takes the host 70 ms for 0.4 GB (H200).
        """
        if (piece := self._pool.find(nbytes)) is not None:
            return piece
        waits = [flight.block for flight in self._under_way() if flight.block.freed]
        for block in waits:
            self._order_after(block)
            self._pool.hand_on(block.room)
            if (piece := self._pool.find(nbytes)) is not None:
                return piece
        if waits:
            with suppress(HostFullError):
                return self._pool.take(nbytes)
            self._land_all()  # what is pinned for them may be what is missing
        return self._pool.take(nbytes)

    def _order_after(self, block: HostBlock) -> None:
        """What is copied out from here on comes after all copies from and to the block."""
        with self._lock:
            for flight in self._flights["in"]:
                if flight.block is block:
                    self._streams["out"].wait_event(flight.end)

    def _under_way(self) -> list[_Flight]:
        with self._lock:
            return [*self._flights["out"], *self._flights["in"]]

    def _land_all(self) -> None:
        for flight in self._under_way():
            self._await(flight)
        self._reap()

    def _reap(self) -> None:
        """Finish the flights whose event has passed. A stream works in order, so the first that has not ends the
        search.
        """
        if not self._flights["out"] and not self._flights["in"]:
            return
        with self._lock, self._card.here():
            for flights in self._flights.values():
                while flights and flights[0].end.query():
                    self._land(flights.popleft())

    def _await(self, flight: _Flight) -> None:
        with self._card.here():
            flight.end.synchronize()

    def _land(self, flight: _Flight) -> None:
        duration_ns = int(flight.begin.elapsed_time(flight.end) * 1e6)
        self._rates.note(flight.direction, flight.block.nbytes, duration_ns)
        flight.hold = None
        if flight.direction == "out":
            flight.block.complete, flight.block.writer = True, None
        if (ticket := flight.ticket()) is not None:
            ticket.finished_ns, ticket.flight = time.perf_counter_ns(), None
            ticket.started_ns = max(ticket.started_ns, ticket.finished_ns - duration_ns)
            if flight.direction == "out":
                ticket.storage = None
        self._book.end(flight.block)

    def _wait_out(self, ticket: CudaTicket) -> None:
        flight = ticket.flight
        if flight is not None:
            self._await(flight)
            self._reap()

    def _wait_in(self, ticket: CudaTicket) -> None:
        current = self._card.current_stream()
        with self._lock:
            flight = ticket.flight
            if flight is not None:
                current.wait_event(flight.end)
                if current == ticket.home:
                    flight.hold = None  # from here on this stream's order protects the destination
        if current != ticket.home and ticket.storage is not None:
            self._card.share_with(ticket.storage, current)

    def _probe(self) -> None:
        """Time a few copies each way, with a slab of their own: the pool may be full."""
        try:
            slab = self._source(_PROBE_BYTES)
        except RuntimeError as error:
            raise SwapError(f"no host memory can be pinned for {self._card.torch_device}: {error}") from error
        try:
            there = as_bytes(self._card.allocate(_PROBE_BYTES))
            for direction, to, source in (("out", slab.memory, there), ("in", there, slab.memory)):
                way: Direction = "out" if direction == "out" else "in"
                for _ in range(_PROBE_ROUNDS):
                    self._rates.note(way, _PROBE_BYTES, self._timed_copy(to, source, self._streams[way]))
        finally:
            slab.release()

    def _timed_copy(self, to: torch.Tensor, source: torch.Tensor, side: Stream) -> int:
        reached, begin, end = self._card.new_event(), self._card.new_event(), self._card.new_event()
        reached.record(self._card.current_stream())
        side.wait_event(reached)
        begin.record(side)
        self._card.copy(to, source, side)
        end.record(side)
        with self._card.here():
            end.synchronize()
        return int(begin.elapsed_time(end) * 1e6)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SwapError("the device is closed: the session it belonged to has given its host room back")


class _Spilling:
    """The second host tier: a spill file, for what does not fit into pinned memory."""

    def __init__(
        self,
        card: Accelerator,
        directory: str,
        streams: dict[Direction, Stream],
        computing: ComputeStreams,
    ) -> None:
        self.file = SpillFile(directory)
        self.file.check()
        self._mover = StagedMover(card, self.file, streams, computing)
        self.lane = FileLane(self.file, self._mover, Rates())

    def close(self) -> None:
        self.lane.stop()
        self._mover.close()
        self.file.close()


def _own(ticket: Ticket) -> CudaTicket:
    if not isinstance(ticket, CudaTicket):
        raise TypeError("this ticket belongs to another device")
    return ticket
