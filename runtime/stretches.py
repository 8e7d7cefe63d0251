"""Stretches of forward in which autograd keeps what it saves, and no hook is called.

The routine of a known step says where (`delta/alone.py`). The recorder hears of every op all the same: of a write, and
of an op that the routine does not expect. With that one the hooks are back on, and what the step has saved meanwhile is
not known; it is autograd's until it has been used, and cannot be evicted.

Hooks are taken off only where the block's own are on top, and come back below those that somebody has put there since,
as a checkpoint does that keeps what it needs in hooks of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from delta.runtime.core import Core

_hooks: Any = torch._C._autograd
Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Stretches:
    """Takes the hooks of a block off and puts them on, in the thread that entered it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._pair: Pair | None = None
        self._below: Pair | None = None  # who was under ours while they are off
        self._thread = 0
        self.off = False
        self.allowed = True

    def open(self, pair: Pair) -> None:
        """The block's hooks go on."""
        self._pair, self._thread = pair, threading.get_ident()
        _hooks._push_saved_tensors_default_hooks(*pair)

    def close(self) -> None:
        """... and off, for good."""
        if not self.off:
            _hooks._pop_saved_tensors_default_hooks()
            return
        self.off = False  # and others may be on top
        with self._core:
            self._core.engine.expected.left_alone(None, time.perf_counter_ns())

    def turn(self, off: bool, calls: int) -> None:
        """After so many calls of its step the routine has the hooks off, or on again."""
        if not off:
            if self.off:
                self._back(calls)
        elif not self.off:
            if self._may(calls):
                self._take_off()
            else:
                self._core.engine.expected.hear_all()

    def end(self) -> None:
        """Forward is over, or may be: hooks are on from here on."""
        if self.off:
            self._back(None)

    def lost(self) -> None:
        """An op came that the routine does not expect."""
        if self.off:
            with self._core:
                self._core.engine.expected.lose_track(time.perf_counter_ns())
            self._put_on()

    def forbid(self) -> None:
        """Not in this block any more."""
        self.end()
        self.allowed = False

    def _may(self, calls: int) -> bool:
        core = self._core
        if not self.allowed or core.oom_rescues or core.timeline.active or not core.may_watch or core.noted.given:
            return False
        if _hooks._top_saved_tensors_default_hooks(True) != self._pair:
            return False
        if core.engine.minds_backward:
            return False
        with core.lock:
            return core.engine.expected.may_leave_alone(calls)

    def _take_off(self) -> None:
        _hooks._pop_saved_tensors_default_hooks()
        self._below = _hooks._top_saved_tensors_default_hooks(True)
        self.off = True

    def _put_on(self) -> bool:
        if threading.get_ident() != self._thread:
            self.allowed = False
            return False
        above: list[Pair] = []
        while (top := _hooks._top_saved_tensors_default_hooks(True)) not in (self._below, None):
            above.append(top)
            _hooks._pop_saved_tensors_default_hooks()
        assert self._pair is not None
        for pair in (self._pair, *reversed(above)):
            _hooks._push_saved_tensors_default_hooks(*pair)
        self.off, self._below = False, None
        return True

    def _back(self, calls: int | None) -> None:
        expected = self._core.engine.expected
        with self._core:
            if self._put_on():
                expected.left_alone(calls, time.perf_counter_ns())
            else:
                expected.lose_track(time.perf_counter_ns())
