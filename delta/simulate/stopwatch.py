"""How long an engine takes over its decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delta.engine import Engine


class Stopwatch:
    """Looks like the engine, and adds up the time that its events take by `clock`, in ns: also those of replays and of
    copies, which are told to parts of it."""

    def __init__(self, engine: Engine, clock: Callable[[], int]) -> None:
        self._engine, self._clock = engine, clock
        self.spent_ns = 0
        self._timed = _Timed(engine, self)
        self.replays, self.transfers = _Timed(engine.replays, self), _Timed(engine.transfers, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timed, name)

    def time(self, found: Callable[..., Any]) -> Callable[..., Any]:
        """The same, with the time that it takes added up."""

        def timed(*args: Any) -> Any:
            began_ns = self._clock()
            try:
                return found(*args)
            finally:
                self.spent_ns += self._clock() - began_ns

        return timed


class _Timed:
    """Looks like `part`, whose methods are timed."""

    def __init__(self, part: object, watch: Stopwatch) -> None:
        self._part, self._watch = part, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not callable(found):
            return found
        timed = self._watch.time(found)
        setattr(self, name, timed)  # found at once from now on
        return timed
