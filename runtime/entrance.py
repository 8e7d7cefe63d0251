"""How threads get into a session's core, one at a time, and what holds while one is inside.

Not covered: what is done in there. Whoever is inside may enter again.
"""

from __future__ import annotations

import gc
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

R = TypeVar("R")


class Entrance(ABC):
    """Serialises events (`with entrance:`). Inside, no garbage is collected: between an answer of the engine and the
    last of its instructions, what they are about has to live on."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner = 0  # the thread that is in here; 0: none
        self.overhead_ns = 0  # spent inside, less what was `own_time`
        self._depth = 0
        self._collects = False
        self._entered_ns = 0
        self._excluded_ns = 0

    @abstractmethod
    def _entered(self) -> None:
        """A thread has come in that was not inside before."""

    @abstractmethod
    def _leaves(self) -> None:
        """It has done what it came for."""

    def __enter__(self) -> None:
        self.lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._collects = gc.isenabled()
            gc.disable()
            self.owner = threading.get_ident()
            self._entered_ns = time.perf_counter_ns()
            self._excluded_ns = 0
            try:
                self._entered()
            except BaseException:
                self._leave()
                raise

    def __exit__(self, *exc: object) -> None:
        try:
            if self._depth == 1:
                self._leaves()
                self.overhead_ns += time.perf_counter_ns() - self._entered_ns - self._excluded_ns
        finally:
            self._leave()

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.owner = 0
            if self._collects:
                gc.enable()
        self.lock.release()

    def hear(self) -> None:
        """Take in the notes there are, so that what has died counts no more."""
        with self:
            pass

    def inside(self) -> bool:
        """Whether the calling thread is in here: the ops it runs are Delta's own."""
        return self.owner == threading.get_ident()

    def outside(self, func: Callable[..., R], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> R:
        """From inside, run what is the program's: for it, `inside` is False, and garbage is collected as ever."""
        owner, self.owner = self.owner, 0
        if self._collects:
            gc.enable()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            gc.disable()
            self.owner = owner

    def own_time(self, ns: int) -> None:
        """What took this long while somebody was inside is not Delta's overhead: the user's own op, or the device."""
        self._excluded_ns += ns

    def open_in_child(self) -> None:
        """In a forked process: whoever was inside is not there, and the lock may be held for ever."""
        if self._depth and self._collects:  # another thread was in here
            gc.enable()
        self.lock, self._depth, self.owner = threading.RLock(), 0, 0
