"""How long an engine takes over its decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delta.engine import Engine


class Stopwatch:
    """Looks like the engine, and adds up the time that its events take by `clock`, in ns."""

    def __init__(self, engine: Engine, clock: Callable[[], int]) -> None:
        self._engine, self._clock = engine, clock
        self.spent_ns = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if not callable(found):
            return found

        def timed(*args: Any) -> Any:
            began_ns = self._clock()
            try:
                return found(*args)
            finally:
                self.spent_ns += self._clock() - began_ns

        setattr(self, name, timed)  # found at once from now on
        return timed
