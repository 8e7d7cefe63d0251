"""A recorded training step: read, written, summed up. Who recorded it, Delta or somebody else, makes no difference.

::

    events     what happens in a step, as instructions over storages
    inventory  what exists as a trace goes on: checks the events, counts bytes
    source     the lines of a file
    format     Delta's own file         dtr  logs of DTR
    recording  which steps to record
    summary    the figures of a step
"""

from __future__ import annotations

import os

from delta.trace import dtr
from delta.trace.events import Evictable, Trace
from delta.trace.format import VERSION, VERSION_KEY, read_own, write
from delta.trace.recording import Recording
from delta.trace.source import Source
from delta.trace.summary import Summary, summary

__all__ = ["VERSION", "Evictable", "Recording", "Summary", "Trace", "read", "summary", "write"]


def read(path: str | os.PathLike[str]) -> Trace:
    """A trace, or a log of DTR, recognised by its content, compressed or not.

    Raises TraceError, with file and line, for a file that is neither, is damaged, or says what cannot be.
    """
    with Source(path) as source:
        first = next(source, None)
        if first is None:
            raise source.cut_off("the file is empty")
        if VERSION_KEY in first:
            return read_own(first, source)
        if dtr.KEY in first:
            return dtr.read_log(first, source)
        if "delta_timeline" in first:
            raise source.error("this is a timeline, for `deltactl timeline`; `deltactl trace` records a trace")
        raise source.error(
            f"neither a trace of Delta, whose first line has {VERSION_KEY!r}, nor a log of DTR, whose lines have "
            f"{dtr.KEY!r}"
        )
