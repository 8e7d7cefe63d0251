"""Transfers between device storages and a spill file, done by two I/O threads: one writes, one reads.

How bytes get from a storage to the file is a `Mover`'s business: straight from the heap, or from a card through
pinned memory.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from delta.errors import SwapError
from delta.runtime.device.base import Direction, HostBlock, Ticket
from delta.runtime.device.parts import BlockBook, Rates, host_full
from delta.runtime.device.worker import Job, Worker
from delta.runtime.extents import round_up
from delta.runtime.pieces import BLOCK_BYTES
from delta.runtime.spill import FileRoom, SpillFile


class Mover(Protocol):
    """Moves whole storages. ``write`` and ``read`` run in any thread, possibly two of the same kind at once, and
    raise SwapError.
    """

    def order(self, direction: Direction) -> None:
        """In the thread that asks for the copy: the copy comes after the work enqueued so far."""
        ...

    def phase_bytes(self, storage: torch.UntypedStorage) -> int:
        """How far behind the start of a block the storage's content had best begin in the file."""
        ...

    def write(self, storage: torch.UntypedStorage, room: FileRoom) -> None: ...

    def read(self, room: FileRoom, storage: torch.UntypedStorage) -> None: ...


@dataclass(slots=True, eq=False)
class FileTicket(Ticket):
    """A transfer and the job that does it."""

    job: Job | None = None

    def ended(self) -> bool:
        return self.job is not None and self.job.done

    def finish(self) -> None:
        """Wait for the end; a transfer that no thread has begun is done here and now."""
        self.the_job.finish()

    @property
    def the_job(self) -> Job:
        assert self.job is not None
        return self.job


class FileLane:
    """The spill file as a host tier of at most ``limit_bytes`` (None: as much as the disk takes)."""

    def __init__(self, spill: SpillFile, mover: Mover, rates: Rates, limit_bytes: int | None = None) -> None:
        self.spill = spill
        self._mover = mover
        self._rates = rates
        self._limit_bytes = limit_bytes
        self._book = BlockBook(lambda block: spill.give_back(block.room))
        self._workers = {"out": Worker("delta-copy-out"), "in": Worker("delta-copy-in")}
        self._reserving = threading.Lock()
        self._counting = threading.Lock()
        self._coming_bytes = 0

    @property
    def coming_bytes(self) -> int:
        """Bytes of the copies to the device that have not ended: their storages may not have been touched yet."""
        return self._coming_bytes

    def copy_out(self, storage: torch.UntypedStorage) -> FileTicket:
        nbytes = storage.nbytes()
        block = HostBlock(nbytes, "file", self._reserve(nbytes, self._mover.phase_bytes(storage)))
        ticket = FileTicket(nbytes, "out", block, storage, time.perf_counter_ns())
        block.writer = ticket
        return self._begin(ticket, self._run_out)

    def copy_in(self, block: HostBlock, storage: torch.UntypedStorage) -> FileTicket:
        return self._begin(FileTicket(block.nbytes, "in", block, storage, time.perf_counter_ns()), self._run_in)

    def free(self, block: HostBlock) -> None:
        self._book.free(block)

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()

    def _reserve(self, nbytes: int, phase_bytes: int) -> FileRoom:
        wanted_bytes = round_up(max(phase_bytes + nbytes, 1), BLOCK_BYTES)
        with self._reserving:
            used_bytes = self.spill.used_bytes
            if self._limit_bytes is not None and used_bytes + wanted_bytes > self._limit_bytes:
                raise host_full(wanted_bytes, used_bytes, self._limit_bytes, "of the spill file")
            return self.spill.reserve(nbytes, phase_bytes)

    def _begin(self, ticket: FileTicket, body: Callable[[FileTicket], None]) -> FileTicket:
        self._book.begin(ticket.block)
        self._mover.order(ticket.direction)
        ticket.job = Job(partial(body, ticket))
        if ticket.direction == "in":
            self._count_coming(ticket.nbytes)
        self._workers[ticket.direction].submit(ticket.job)
        return ticket

    def _run_out(self, ticket: FileTicket) -> None:
        try:
            self._run(ticket, self._write)
        finally:
            ticket.storage = ticket.block.writer = None
            if ticket.failure is not None:
                self._book.free(ticket.block)
            self._book.end(ticket.block)

    def _run_in(self, ticket: FileTicket) -> None:
        try:
            self._run(ticket, self._read)
        finally:
            self._count_coming(-ticket.nbytes)
            if ticket.failure is not None:
                ticket.storage = None
            self._book.end(ticket.block)

    def _count_coming(self, nbytes: int) -> None:
        with self._counting:
            self._coming_bytes += nbytes

    def _run(self, ticket: FileTicket, copy: Callable[[FileTicket], bool]) -> None:
        """Copy and keep the times; a failure goes into the ticket, for whoever waits for it. What stops the program
        (Ctrl-C comes in the main thread, which may be the one that copies) is one too, and goes on its way.
        """
        ticket.started_ns = time.perf_counter_ns()
        copied = False
        try:
            copied = copy(ticket)
        except SwapError as error:
            ticket.failure = type(error)(*error.args)
        except Exception as error:
            ticket.failure = SwapError(f"the copy {ticket.direction} failed: {type(error).__name__}: {error}")
        except BaseException:
            ticket.failure = SwapError(f"the copy {ticket.direction} was interrupted")
            raise
        ticket.finished_ns = time.perf_counter_ns()
        if copied:
            self._rates.note(ticket.direction, ticket.nbytes, ticket.finished_ns - ticket.started_ns)

    def _write(self, ticket: FileTicket) -> bool:
        """Fill the block. A block that nobody wants any more is not worth the disk's time."""
        block, storage = ticket.block, ticket.storage
        assert storage is not None
        if block.unwanted():
            return False
        self._mover.write(storage, block.room)
        block.complete = True
        return True

    def _read(self, ticket: FileTicket) -> bool:
        block, storage = ticket.block, ticket.storage
        assert storage is not None
        writer = block.writer
        if isinstance(writer, FileTicket):  # asked for before the copy out has ended
            writer.finish()
        if not block.complete:
            raise SwapError(
                "the host copy was never completed, so it cannot be read back: the device copy is the only one"
            )
        ticket.started_ns = time.perf_counter_ns()
        self._mover.read(block.room, storage)
        return True
