"""How long recorded ops take, where the device tells it only later."""

from __future__ import annotations

from collections import deque
from typing import Any

from delta.engine import Engine
from delta.runtime.device.base import OpClock
from delta.runtime.recompute import Recipe

_MOST_MISSING = 4096


class OpTimes:
    """Asks the device's clock, and tells the engine."""

    def __init__(self, engine: Engine, clock: OpClock) -> None:
        self._engine = engine
        self.clock = clock
        self.missing: deque[tuple[int, Any]] = deque()  # ops, and what the clock knows each by

    def took_ns(self, recipe: Recipe | None, token: Any) -> int | None:
        """How long running an op once more takes, by what its recipe knows or by the `token` of the device's clock;
        None where that says so only later."""
        again_ns = recipe.again_ns if recipe is not None else None
        return again_ns if again_ns is not None else self.clock.elapsed_ns(token)

    def told_later(self, op: int, token: Any) -> None:
        """The op's time is not known yet."""
        self.missing.append((op, token))
        if len(self.missing) > _MOST_MISSING:  # of a program that saves nothing, and so never asks
            self.tell(wait=False)

    def tell(self, wait: bool) -> None:
        """Tell the engine the times the device has by now; with `wait`, all that are missing."""
        while self.missing:
            op, token = self.missing[0]
            cost_ns = self.clock.wait_ns(token) if wait else self.clock.elapsed_ns(token)
            if cost_ns is None:
                return
            self.missing.popleft()
            self._engine.op_timed(op, cost_ns)
