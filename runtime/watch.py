"""Idle mode: a step that fits is only watched, so that it costs next to nothing (promise P2).

Saved tensors are kept as they are; all that is noted is how many bytes of unique storages they make. When that goes
over the limit (a larger batch than any before), every tensor watched so far is handed over to the core, which goes on
as if it had looked after them from the start.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta.runtime.versions import without_graph

if TYPE_CHECKING:
    from delta.runtime.core import Core
    from delta.runtime.handle import Handle


_MANY = 4096

Saved = tuple[int, int, int]
"""A storage, its bytes, and the stretch of forward in which a tensor on it was saved."""


class Watched:
    """A saved tensor that is only counted, until `taken` says that the core looks after it."""

    __slots__ = ("__weakref__", "saved", "taken", "tensor", "version", "watch")

    def __init__(self, tensor: Tensor, saved: Saved) -> None:
        self.watch: Watch | None = None  # that counts it
        self.tensor: Tensor | None = without_graph(tensor)
        self.version = tensor._version
        self.saved = saved
        self.taken: Handle | None = None

    def __del__(self) -> None:
        if self.watch is not None:
            self.watch.died(self.saved)


class Watch:
    """Counts bytes of unique storages with a live saved tensor, one step after the other.

    Tensors die anywhere, in any thread, and mostly in backward: they are counted out together, when somebody asks for
    the bytes, or when the step may have ended with them.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ends = core.engine.step_ends
        self._first = 0  # stretch of the step under way
        self._lock = threading.RLock()
        self._enter, self._leave = self._lock.acquire, self._lock.release  # a `with` takes twice as long
        self._users: dict[int, int] = {}  # storage -> live saved tensors on it
        self._dead: list[Saved] = []  # of them, those that are dead by now
        self._handles: list[weakref.ref[Watched]] = []
        self._most_handles = _MANY  # then the dead are forgotten: no step may ever end
        self._began_ns = 0
        self._resident_bytes = 0
        self._left_bytes = 0  # of steps before, when the step under way began
        self.storages = 0  # that it has saved tensors on
        self.peak_bytes = 0
        self.count = 0  # saved tensors of the step under way, but for those that have been counted out
        self.doubtful = False  # whether it fits should be asked: so much is there, or twice as many as last time
        self._unasked_bytes = 0.0

    @property
    def resident_bytes(self) -> int:
        if self._dead:
            self._count_out()
        return self._resident_bytes

    @property
    def step_bytes(self) -> int:
        """What the step under way has added."""
        return self.resident_bytes - self._left_bytes

    def pack(self, tensor: Tensor, storage: torch.UntypedStorage) -> Watched:
        """Count a saved tensor, on that storage."""
        if self._dead:
            self._count_out()
        key, nbytes = storage._cdata, storage.nbytes()
        watched = Watched(tensor, (key, nbytes, self._ends.stretch))
        self._enter()
        try:
            if not self.count:
                self._began_ns = time.perf_counter_ns()
                self._unasked_bytes = self._core.engine.idle.unasked_bytes
                self.peak_bytes = self._left_bytes = self._resident_bytes
                self.storages = 0
            self.count += 1
            watched.watch = self
            users = self._users
            if key in users:
                users[key] += 1
            else:
                users[key] = 1
                self.storages += 1
                self._resident_bytes += nbytes
                if self._resident_bytes > self.peak_bytes:
                    self.peak_bytes = self._resident_bytes
            storages = self.storages
            self.doubtful = self._resident_bytes > self._unasked_bytes or not storages & (storages - 1)
            if len(self._handles) == self._most_handles:
                self._forget_dead()
                self._most_handles = max(_MANY, 2 * len(self._handles))
            self._handles.append(weakref.ref(watched))
        finally:
            self._leave()
        return watched

    def died(self, saved: Saved) -> None:
        """Called by a dying tensor, from anywhere. The step ends with the last one."""
        dead = self._dead
        dead.append(saved)
        if len(dead) >= self.count:
            self._count_out()

    def need(self, stretch: int) -> None:
        """Somebody asks for a saved tensor of that stretch."""
        if torch._C._current_graph_task_id() != -1:
            self._ends.need(stretch)

    def forward_again(self) -> None:
        """Forward goes on after backward has asked for something: what is still saved may be left over."""
        with self._lock:
            if not self._ends.forward():
                return
            self._first, self.count = self._ends.stretch, 0
            self._forget_dead()
        self._core.watched_step(self.peak_bytes, self._began_ns)

    def hand_over(self) -> list[Watched]:
        """All that is watched now, in the order it was saved; it is counted here no longer."""
        with self._lock:
            alive = [watched for ref in self._handles if (watched := ref()) is not None]
            self._handles.clear()
            for watched in alive:
                watched.watch = None
                self._dead.append(watched.saved)
            self._take_out()
        return alive

    def _count_out(self) -> None:
        if self._core.abandoned or self._lock._is_owned():  # type: ignore[attr-defined]
            return  # in a forked process; or while another tensor is counted, with which the step goes on
        with self._lock:
            ended = self._take_out()
            if ended:
                self._forget_dead()
        if ended:  # not under the lock: the core takes its own first and this one second
            self._core.inbox.watched_step_ended(self.peak_bytes, self._began_ns)

    def _take_out(self) -> bool:
        """Whether the step under way has ended by it."""
        dead, users, own = self._dead, self._users, 0
        gone = dead[:]  # others may die meanwhile
        del dead[: len(gone)]
        for key, nbytes, stretch in gone:
            own += stretch >= self._first
            left = users[key] - 1
            if left:
                users[key] = left
            else:
                del users[key]
                self._resident_bytes -= nbytes
        self.count -= own
        return own > 0 and self.count == 0

    def _forget_dead(self) -> None:
        self._handles = [ref for ref in self._handles if ref() is not None] if self._users else []
