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


class Watched:
    """A saved tensor that is only counted, until `taken` says that the core looks after it."""

    __slots__ = ("__weakref__", "counted", "key", "nbytes", "stretch", "taken", "tensor", "version", "watch")

    def __init__(self, watch: Watch, tensor: Tensor, key: int, nbytes: int, stretch: int) -> None:
        self.watch = watch
        self.tensor: Tensor | None = without_graph(tensor)
        self.version = tensor._version
        self.key = key
        self.nbytes = nbytes
        self.stretch = stretch
        self.taken: Handle | None = None
        self.counted = False

    def __del__(self) -> None:
        if self.counted:
            self.watch.died(self)


class Watch:
    """Counts bytes of unique storages with a live saved tensor, one step after the other."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ends = core.engine.step_ends
        self._first = 0  # stretch of the step under way
        self._lock = threading.RLock()
        self._users: dict[int, int] = {}  # storage -> live saved tensors on it
        self._handles: list[weakref.ref[Watched]] = []
        self._most_handles = _MANY  # then the dead are forgotten: no step may ever end
        self._began_ns = 0
        self.resident_bytes = 0
        self.peak_bytes = 0
        self.count = 0  # saved tensors of the step under way

    def pack(self, tensor: Tensor) -> Watched:
        """Count a saved tensor."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        watched = Watched(self, tensor, key, nbytes, self._ends.stretch)
        with self._lock:
            if not self.count:
                self._began_ns = time.perf_counter_ns()
                self.peak_bytes = self.resident_bytes
            self.count += 1
            watched.counted = True
            users = self._users.get(key, 0)
            self._users[key] = users + 1
            if not users:
                self.resident_bytes += nbytes
                if self.resident_bytes > self.peak_bytes:
                    self.peak_bytes = self.resident_bytes
            if len(self._handles) == self._most_handles:
                self._forget_dead()
                self._most_handles = max(_MANY, 2 * len(self._handles))
            self._handles.append(weakref.ref(watched))
        return watched

    def died(self, watched: Watched) -> None:
        """Called by a dying tensor, from anywhere. The step ends with the last one."""
        if self._core.abandoned:
            return
        with self._lock:
            ended = self._uncount(watched) and self.count == 0
            if ended:
                self._forget_dead()
        if ended:  # not under the lock: the core takes its own first and this one second
            self._core.watched_step(self.peak_bytes, self._began_ns)

    def need(self, watched: Watched) -> None:
        """Somebody asks for a saved tensor."""
        if torch._C._current_graph_task_id() != -1:
            self._ends.need(watched.stretch)

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
                self._uncount(watched)
        return alive

    def _forget_dead(self) -> None:
        self._handles = [ref for ref in self._handles if ref() is not None] if self._users else []

    def _uncount(self, watched: Watched) -> bool:
        """Whether it was saved in the step under way."""
        watched.counted = False
        own = watched.stretch >= self._first
        self.count -= own
        users = self._users[watched.key] - 1
        if users:
            self._users[watched.key] = users
        else:
            del self._users[watched.key]
            self.resident_bytes -= watched.nbytes
        return own
