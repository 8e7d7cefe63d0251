"""`Timeline`: the sink a session emits events into while it trains.

An emit is one append to a deque, safe from any thread; the text is made at `flush`, once a step, outside the hooks. A
disk that fills up ends the timeline with one warning, never the training.
"""

import gzip
import json
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

from delta.errors import TimelineError
from delta.timeline.format import EVENTS, VERSION, VERSION_KEY, Event, Header
from delta.warned import warn

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Timeline:
    """Writes events to ``path`` (gzip when the name ends in ``.gz``); with ``path=None`` every call does nothing.

    The file is opened here, so that a path that cannot be written is a `TimelineError` before the first step. `flush`
    and `close` are for one thread at a time; what is emitted after `close` is dropped.
    """

    def __init__(self, path: str | os.PathLike[str] | None, header: Header) -> None:
        self.path = None if path is None else os.fspath(path)
        self._pending: deque[tuple[int, str, dict[str, Any]]] = deque()
        self._file: TextIO | None = None
        self.active = False  # events still reach a file: lets a caller skip the making of fields nobody will read
        if self.path is not None:
            self._file = _open(self.path)
            self.active = True
            self._write(_encode({VERSION_KEY: VERSION, **header}) + "\n")

    def emit(self, ev: str, t_ns: int, **fields: Any) -> None:
        """Note one event of a kind in `EVENTS`. The fields are checked when they are written."""
        if self._file is not None:
            self._pending.append((t_ns, ev, fields))

    def flush(self) -> None:
        """Write what was emitted so far. Call it at each step end. An event `EVENTS` does not allow: TimelineError."""
        if self._file is None:
            return
        # Others may append meanwhile: take a counted number from the left, never swap the deque under them.
        batch = [self._pending.popleft() for _ in range(len(self._pending))]
        self._write("".join(_line(*item) for item in batch))

    def close(self) -> None:
        """Write the rest and close the file. A second call does nothing."""
        try:
            self.flush()
        finally:
            try:
                self._end()
            except OSError as error:
                self._warn(error)

    def abandon(self) -> None:
        """In a forked process, which has the same file open: what waits is the other one's to write, and so is what
        closing adds to a file that is packed.
        """
        self._pending.clear()
        self.active = False
        if self._file is not None:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is still buffered fails again, and is lost with the rest
                self._end()
            self._warn(error)

    def _end(self) -> None:
        file, self._file, self.active = self._file, None, False
        self._pending.clear()
        if file is not None:
            file.close()

    def _warn(self, error: OSError) -> None:
        warn(f"timeline {self.path!r} ends here, writing failed: {error}")


def _open(path: str) -> TextIO:
    try:
        if path.endswith(".gz"):
            return cast(TextIO, gzip.open(path, "wt", encoding="utf-8", compresslevel=1))
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise TimelineError(
            f"timeline={path!r}: cannot be written: {error.strerror or error}. "
            "Give a file in a directory that exists and is writable."
        ) from error


def _line(t_ns: int, ev: str, fields: Mapping[str, Any]) -> str:
    kind = EVENTS.get(ev)
    problem = f"unknown event, known are {', '.join(EVENTS)}" if kind is None else next(kind.problems(fields), None)
    if problem is not None:
        raise TimelineError(f"timeline: cannot write {Event(t_ns, ev, fields)}: {problem}")
    return _encode({"t_ns": t_ns, "ev": ev, **fields}) + "\n"
