"""Copies of whole storages to the host tier and back, as the engine asks for them.

A copy out that fails leaves the device copy as the value. A copy back that fails, or finds no memory to go to, is asked
for once more when the value is needed, after everything that can go has gone if it was memory; only then training has
to stop with the error. The device copy goes only after the host copy is whole, or on a card in an order that comes
after it (promise P4): letting go of it is an instruction the engine gives when it has been told.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from delta.errors import HostFullError, SwapError

if TYPE_CHECKING:
    from delta.runtime.core import Core
    from delta.runtime.device.base import Ticket

_STALL_NS = 50_000  # two events with nothing between them are a few microseconds apart


class Swap:
    """The transfers under way. All calls come while the core is entered."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._going: list[int] = []
        self._coming: list[int] = []
        self._stalls: deque[tuple[int, Any]] = deque()  # the save order waited for, a token of the device's clock

    @property
    def busy(self) -> bool:
        """Whether a transfer, or a stall, has not been seen to end yet."""
        return bool(self._going or self._coming or self._stalls)

    def clear(self) -> None:
        """Forget the transfers of a session that has ended."""
        self._going.clear()
        self._coming.clear()
        self._stalls.clear()

    def out(self, record: int, wait: bool) -> None:
        slot = self._core.slots[record]
        assert slot.storage is not None
        self._core.begins()  # memory may have to be pinned for it, which takes the host longer than a step
        try:
            with torch._C._DisableTorchDispatch():  # a copy is many small steps, and in forward each would pass a mode
                slot.going = self._core.device.copy_out(slot.storage)
        except BaseException as error:  # Ctrl-C, too, may come where this thread makes the copy itself
            host_full = isinstance(error, HostFullError)
            self._core.run(self._core.engine.transfers.copy_out_failed(record, host_full))
            if not isinstance(error, SwapError):
                raise
            return
        finally:
            self._core.resumes()
        self._going.append(record)
        if wait:
            self.await_out(record)

    def await_out(self, record: int) -> None:
        ticket = self._core.slots[record].going if record in self._core.slots else None
        if ticket is None:
            return
        began_ns = self._core.begins()
        failed: type[SwapError] | None = None  # not the error: its frames would keep the program's tensors alive
        try:
            self._core.device.let_go_after(ticket)
        except SwapError as error:
            failed = type(error)
        self._core.waited(record, began_ns, "copy out")
        self._out_ended(record, failed)

    def _out_ended(self, record: int, failed: type[SwapError] | None) -> None:
        slot = self._core.slots[record]
        ticket, slot.going = slot.going, None
        self._going.remove(record)
        assert ticket is not None
        if failed is not None:
            self._core.run(self._core.engine.transfers.copy_out_failed(record, issubclass(failed, HostFullError)))
            return
        slot.block = ticket.block
        self._tell(record, ticket)
        self._core.run(self._core.engine.transfers.copied_out(record))

    def back(self, record: int) -> None:
        """Begin a copy back. If it cannot be begun, whoever needs the value asks for it again."""
        try:
            self._begin_back(record)
        except (SwapError, torch.OutOfMemoryError):
            return

    def _begin_back(self, record: int) -> None:
        slot, inbox = self._core.slots[record], self._core.inbox
        assert slot.block is not None
        if inbox.notes and not inbox.emptying:
            inbox.empty()  # what has just gone to make room for it counts no more
        self._core.gauge.make_way(slot.block.nbytes)
        try:
            with torch._C._DisableTorchDispatch():
                slot.coming = self._core.device.copy_in(slot.block)
        except BaseException:
            self._core.engine.transfers.copy_in_failed(record)
            raise
        slot.storage = slot.coming.storage
        if slot.storage is not None:  # else it has failed already, as whoever looks at it next will find
            slot.ref = self._core.storages.track(slot.storage, record)
        self._coming.append(record)
        self._core.engine.transfers.coming()

    def await_back(self, record: int) -> None:
        """The value of a pinned record is needed: wait for its copy back, and ask for it once more if it failed or was
        not even begun."""
        began_ns, clock = self._core.begins(), self._core.op_times.clock
        mark = clock.start()
        with suppress(SwapError):
            self._wait_back(record)
        if self._core.slots[record].alive() is None:
            self._back_again(record)
            self._wait_back(record)
        order, token = self._core.engine.ledger[record].saved_at, clock.stop(mark)
        if clock.late:
            self._stalls.append((order, token))
        else:
            self._core.engine.transfers.late(order)
        self._core.waited(record, began_ns, "copy in")

    def await_in(self, record: int) -> None:
        """Wait for a copy back that nobody needs yet. One that fails leaves its room."""
        if record not in self._core.slots:  # seen to end meanwhile, and forgotten
            return
        began_ns = self._core.begins()
        with suppress(SwapError):
            self._wait_back(record)
        self._core.waited(record, began_ns, "copy in")

    def _look_at_stalls(self) -> None:
        """Where the host works ahead of the device it finds every copy back under way. Whether it was late for the
        device shows there, and the host may hear of it as late as in the next step.
        """
        while self._stalls:
            order, token = self._stalls[0]
            stalled_ns = self._core.op_times.clock.elapsed_ns(token)
            if stalled_ns is None:
                return
            self._stalls.popleft()
            if stalled_ns > _STALL_NS:
                self._core.engine.transfers.late(order)

    def _back_again(self, record: int) -> None:
        """Begin the copy once more; where there is no memory for it, after everything that can go has gone."""
        core = self._core
        core.engine.transfers.swap_in_again(record, time.perf_counter_ns())
        with suppress(torch.OutOfMemoryError):
            self._begin_back(record)
            return
        core.rescue()
        core.engine.transfers.swap_in_again(record, time.perf_counter_ns())
        self._begin_back(record)

    def _wait_back(self, record: int) -> None:
        ticket = self._core.slots[record].coming
        if ticket is None:  # seen to end while it was asked for
            return
        try:
            self._core.device.wait(ticket)
        except SwapError:
            self._back_failed(record)
            raise
        self._back_ended(record)

    def _back_failed(self, record: int) -> None:
        slot = self._core.slots[record]
        self._coming.remove(record)
        if slot.ref is not None:
            self._core.storages.untrack(slot.ref)
        slot.coming = slot.storage = slot.ref = None
        self._core.engine.transfers.copy_in_failed(record)

    def _back_ended(self, record: int) -> None:
        slot = self._core.slots[record]
        ticket, slot.coming = slot.coming, None
        self._coming.remove(record)
        assert ticket is not None
        self._tell(record, ticket)
        self._core.run(self._core.engine.transfers.copied_in(record))

    def poll(self) -> None:
        """Take in the transfers that have ended. A card may be dozens of them behind the host, which comes here at each
        saved tensor: where they end in order, only the first of those under way is asked about.
        """
        device = self._core.device
        if self._stalls:
            self._look_at_stalls()
        for record in list(self._going):
            slot = self._core.slots.get(record)
            if slot is None or slot.going is None:
                continue
            try:
                if device.ready(slot.going):
                    self._out_ended(record, None)
                elif device.in_order:
                    break
            except SwapError as error:
                self._out_ended(record, type(error))
        for record in list(self._coming):
            slot = self._core.slots.get(record)
            if slot is None or slot.coming is None:
                continue
            try:
                if device.ready(slot.coming):
                    self._back_ended(record)
                elif device.in_order:
                    break
            except SwapError:
                if not self._core.engine.ledger[record].pins:  # else `await_back` is about to find it, and to ask again
                    self._back_failed(record)

    def _tell(self, record: int, ticket: Ticket) -> None:
        """A copy has ended."""
        if self._core.timeline.active:
            self._core.emit(
                "copied",
                record=record,
                nbytes=ticket.nbytes,
                direction=ticket.direction,
                start_ns=ticket.started_ns,
                end_ns=ticket.finished_ns or time.perf_counter_ns(),
            )
