"""`read_timeline`: a timeline file back as header and events, every line checked."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any, TextIO, cast

from delta.errors import TimelineError
from delta.timeline.format import EVENTS, VERSION, VERSION_KEY, Event, Header


def read_timeline(path: str | os.PathLike[str]) -> tuple[Header, list[Event]]:
    """The header and the events in file order. Raises TimelineError, naming file and line, for a damaged file."""
    name = os.fspath(path)
    lines = _lines(name)
    header = _header(name, next(lines, (1, "")))
    return header, [_event(name, number, text) for number, text in lines]


def _lines(name: str) -> Iterator[tuple[int, str]]:
    """Numbered lines. A last line without its line end was cut off while it was written."""
    number = 0
    try:
        with _open(name) as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith("\n"):
                    raise _error(name, number, "the file is cut off in this line; remove the line to read the rest")
                yield number, text
    except EOFError as error:
        raise _error(name, number + 1, "the compressed file is cut off after this line") from error
    except UnicodeDecodeError as error:
        raise _error(name, number + 1, "not text, so not a timeline") from error
    except (OSError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise TimelineError(f"timeline {name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _open(name: str) -> TextIO:
    if name.endswith(".gz"):
        return cast(TextIO, gzip.open(name, "rt", encoding="utf-8"))
    return open(name, encoding="utf-8")


def _header(name: str, line: tuple[int, str]) -> Header:
    number, text = line
    if not text:
        raise _error(name, number, "the file is empty")
    header = _object(name, number, text)
    version = header.get(VERSION_KEY)
    if "delta_trace" in header:
        raise _error(name, number, "this is a trace, for `deltactl simulate`; timeline= writes a timeline")
    if version is None:
        raise _error(name, number, f"not a timeline: its first line must hold {VERSION_KEY!r}")
    if type(version) is not int or version != VERSION:
        raise _error(name, number, f"{VERSION_KEY} is {version!r}, this version of Delta reads {VERSION}")
    return header


def _event(name: str, number: int, text: str) -> Event:
    fields = _object(name, number, text)
    ev, t_ns = fields.pop("ev", None), fields.pop("t_ns", None)
    kind = EVENTS.get(ev) if isinstance(ev, str) else None
    if kind is None:
        raise _error(name, number, f"unknown event {ev!r}, known are {', '.join(EVENTS)}")
    if type(t_ns) is not int:
        raise _error(name, number, f"field 't_ns' is {t_ns!r}, must be a whole number")
    for problem in kind.problems(fields):
        raise _error(name, number, f"event {ev!r}: {problem}")
    return Event(t_ns, ev, fields)


def _object(name: str, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _error(name, number, f"not JSON ({error}); a timeline is one JSON object per line") from error
    if not isinstance(value, dict):
        raise _error(name, number, "not a JSON object; a timeline is one JSON object per line")
    return value


def _error(name: str, number: int, text: str) -> TimelineError:
    return TimelineError(f"timeline {name!r}, line {number}: {text}")
