"""What a run did, event by event: written while it trains, read back as a table, a Chrome trace or a picture.

::

    format    the kinds of event and the fields of each (`EVENTS`), the version of the file
    writer    `Timeline`, the cheap sink a session emits into
    reader    `read_timeline`, which refuses anything damaged
    chrome    `to_chrome`, for https://ui.perfetto.dev
    table     `to_table`, one line per step
    holders   `to_holders`, one line per op or module that made what a step saved
    picture   `to_svg`, memory over time

Not covered: clocks and threads. Every time is passed in as ``t_ns``, nanoseconds on any clock that only goes forward.
"""

from delta.timeline.chrome import to_chrome
from delta.timeline.format import EVENTS, VERSION, Event, Header, Kind
from delta.timeline.holders import GROUPINGS, to_holders
from delta.timeline.picture import Series, to_svg
from delta.timeline.reader import read_timeline
from delta.timeline.table import to_table
from delta.timeline.writer import Timeline

__all__ = [
    "EVENTS",
    "GROUPINGS",
    "VERSION",
    "Event",
    "Header",
    "Kind",
    "Series",
    "Timeline",
    "read_timeline",
    "to_chrome",
    "to_holders",
    "to_svg",
    "to_table",
]
