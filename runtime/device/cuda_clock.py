"""Times work on a card with pairs of events, which are used again: creating two for every op would cost more than
reading them.
"""

from dataclasses import dataclass

from delta.runtime.device.accelerator import Accelerator, Event


@dataclass(slots=True)
class Span:
    """Work between two events; once read, only its time."""

    start: Event | None
    end: Event | None
    duration_ns: int | None = None


class EventClock:
    """See `delta.runtime.device.base.OpClock`. Safe in several threads: list.pop and list.append are atomic."""

    late = True

    def __init__(self, card: Accelerator) -> None:
        self._card = card
        self._idle: list[Event] = []

    def start(self) -> Event:
        return self._recorded()

    def stop(self, mark: Event) -> Span:
        return Span(mark, self._recorded())

    def hold_back(self, ns: int) -> None:
        self._card.spin(ns)

    def elapsed_ns(self, token: Span) -> int | None:
        if token.start is None or token.end is None:
            return token.duration_ns
        with self._card.here():
            if not token.end.query():
                return None
        token.duration_ns = int(token.start.elapsed_time(token.end) * 1e6)
        self._idle += [token.start, token.end]
        token.start = token.end = None
        return token.duration_ns

    def wait_ns(self, token: Span) -> int:
        if token.end is not None:
            with self._card.here():
                token.end.synchronize()
        elapsed_ns = self.elapsed_ns(token)
        assert elapsed_ns is not None
        return elapsed_ns

    def _recorded(self) -> Event:
        try:
            event = self._idle.pop()
        except IndexError:
            event = self._card.new_event()
        event.record(self._card.current_stream())
        return event
