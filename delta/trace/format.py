"""Delta's own trace file: JSON lines, a header first, then one event per line, and a line that says it is whole.

::

    {"delta_trace":1,"name":"gpt","evictable":"saved","device":"cpu","link":null,"facts":{"torch":"2.13.0"}}
    {"ev":"constant","storage":0,"nbytes":4096}
    {"ev":"op","name":"aten.gelu","inputs":[0],"outputs":[1],"nbytes":[4096],"cost_ns":5210}
    {"ev":"save","storage":1}
    {"end":3}

The fields are those of the classes in `delta.trace.events`; one that has its default is left out. A reader refuses
kinds and fields that the version of the file does not have, so a new field means a new version. A trace is written in
the first version that has all its fields.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from delta.errors import TraceError
from delta.files import replace_file
from delta.trace.events import (
    FREE,
    Backward,
    Bookkeeping,
    Constant,
    Event,
    Evictable,
    Free,
    Need,
    Op,
    Result,
    Save,
    Trace,
    Unsave,
)
from delta.trace.inventory import Inventory
from delta.trace.source import Source
from delta.types import Link

VERSION = 5
VERSION_KEY = "delta_trace"
_END = "end"

KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Constant, Op, Save, Need, Unsave, Free, Result, Backward)
}
_SINCE: dict[int, dict[type[Event], set[str]]] = {
    2: {Save: {"encoded_bytes", "encode_ns", "decode_ns"}},
    4: {Op: {"again_ns"}},
}
_TYPES = {kind: {field.name: str(field.type) for field in fields(kind)} for kind in KINDS.values()}
HEADER = {"name": "str", "evictable": "str", "device": "str", "link": "link", "facts": "dict", "bookkeeping": "dict"}
_HEADER_SINCE_3 = {"bookkeeping"}
_LINK_SINCE_5 = {"copy_ns"}
_IS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and value >= 0,
    # `isfinite` raises OverflowError for a whole number that no float can hold.
    "float": lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "dict": lambda value: isinstance(value, dict),
    "link": lambda value: value is None or isinstance(value, dict),
    "tuple[int, ...]": lambda value: isinstance(value, list) and all(_IS["int"](item) for item in value),
}
_WORDS = {
    "int": "a whole number, not negative",
    "float": "a finite number",
    "str": "a text",
    "bool": "true or false",
    "dict": "an object",
    "link": "an object or null",
    "tuple[int, ...]": "a list of whole numbers, none negative",
}
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


# -- writing ------------------------------------------------------------------------------------------------------
def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace, compressed when the name ends in ``.gz``. The file is there whole or not at all, what was there is
    replaced, and a symbolic link stays one.

    Raises TraceError if the file cannot be written, or if `read` would refuse it.
    """
    target = Path(path)
    try:
        text = "".join(line + "\n" for line in _lines(trace)).encode("utf-8")
    except ValueError as error:
        raise TraceError(f"trace {os.fspath(path)!r}: not written: {error}") from error
    data = gzip.compress(text, mtime=0) if target.name.endswith(".gz") else text
    try:
        replace_file(target, data)
    except OSError as error:
        raise TraceError(f"trace {os.fspath(path)!r}: cannot be written: {error.strerror or error}") from error


def _lines(trace: Trace) -> Iterator[str]:
    header = {
        "name": trace.name,
        "evictable": str(trace.evictable),
        "device": trace.device,
        "link": None if trace.link is None else _told(_link(asdict(trace.link), VERSION)),
        "facts": trace.facts,
    }
    if trace.bookkeeping != FREE:
        header["bookkeeping"] = _bookkeeping(asdict(trace.bookkeeping))
    yield _encode({VERSION_KEY: _version(trace), **header})
    inventory = Inventory()
    for number, event in enumerate(trace.events):
        try:
            inventory.take(event)
        except ValueError as error:
            raise ValueError(f"event {number}, {event}: {error}") from error
        yield _encode({"ev": type(event).__name__.lower(), **_given(event)})
    inventory.end()
    yield _encode({_END: len(trace.events)})


def _version(trace: Trace) -> int:
    """The first version that has all the fields of a trace."""
    found = {1}
    if trace.bookkeeping != FREE:
        found.add(3)
    if trace.link is not None and trace.link.copy_ns:
        found.add(5)
    for version, fields_of in _SINCE.items():
        if any(_given(event).keys() & fields_of[type(event)] for event in trace.events if type(event) in fields_of):
            found.add(version)
    return max(found)


def _told(link: Link) -> dict[str, Any]:
    """What the header says of the link."""
    known = asdict(link)
    return {name: value for name, value in known.items() if link.copy_ns or name not in _LINK_SINCE_5}


def _given(event: Event) -> dict[str, Any]:
    """The fields of an event that do not have their default."""
    values = {field.name: (getattr(event, field.name), field.default) for field in fields(event)}
    return {name: value for name, (value, default) in values.items() if value != default}


# -- reading ------------------------------------------------------------------------------------------------------
def read_own(header: dict[str, Any], rest: Source) -> Trace:
    """The trace of a file whose header was read already. TraceError for a damaged one."""
    version = header[VERSION_KEY]
    trace = _header(header, rest)
    events: list[Event] = []
    inventory = Inventory()
    for line in rest:
        try:
            if line.keys() == {_END}:
                _end(line[_END], len(events), inventory)
                break
            events.append(_event(line, version))
            inventory.take(events[-1])
        except ValueError as error:
            raise rest.error(str(error)) from error
    else:
        raise rest.cut_off(f"the last line of a whole trace is {_encode({_END: len(events)})}, with its own number")
    for line in rest:
        raise rest.error(f"{_encode(line)} stands after the end of the trace")
    return replace(trace, events=tuple(events))


def _header(header: dict[str, Any], source: Source) -> Trace:
    version = header.pop(VERSION_KEY)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise source.error(f"{VERSION_KEY} is {version!r}; this version of Delta reads 1 to {VERSION}")
    try:
        known = {name: kind for name, kind in HEADER.items() if version >= 3 or name not in _HEADER_SINCE_3}
        values = _checked(header, known, "the header", _HEADER_SINCE_3)
        evictable = _evictable(values["evictable"])
        link = None if values["link"] is None else _link(values["link"], version)
        if not all(isinstance(fact, str) for fact in values["facts"].values()):
            raise ValueError(f"'facts' is {values['facts']!r}, must have texts only")
        bookkeeping = Bookkeeping(**_bookkeeping(values.get("bookkeeping", {})))
    except ValueError as error:
        raise source.error(str(error)) from error
    return Trace(values["name"], evictable, (), values["device"], link, values["facts"], bookkeeping)


def _evictable(given: str) -> Evictable:
    if given not in set(Evictable):
        raise ValueError(f"'evictable' is {given!r}, must be {' or '.join(Evictable)}")
    return Evictable(given)


def _link(given: dict[str, Any], version: int) -> Link:
    known = {field.name: "float" for field in fields(Link) if version >= 5 or field.name not in _LINK_SINCE_5}
    link = Link(**_checked(given, known, "'link'", _LINK_SINCE_5))
    if not min(link.out_bytes_per_s, link.in_bytes_per_s) > 0 or not 0 <= link.interference <= 1 or link.copy_ns < 0:
        raise ValueError(
            f"'link' is {given!r}: the speeds must be above 0, the interference a share, a copy's time 0 or more"
        )
    return link


def _bookkeeping(given: dict[str, Any]) -> dict[str, int]:
    known = {field.name: "int" for field in fields(Bookkeeping)}
    return _checked(given, known, "'bookkeeping'", known)


def _event(line: dict[str, Any], version: int) -> Event:
    kind = line.pop("ev", None)
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"'ev' is {kind!r}; known are {', '.join(KINDS)}")
    newer = {name for since, of in _SINCE.items() if version < since for name in of.get(cls, ())}
    known = {name: typename for name, typename in _TYPES[cls].items() if name not in newer}
    values = _checked(line, known, kind, {field.name for field in fields(cls) if field.default is not MISSING})
    make: Callable[..., Event] = cls
    return make(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _end(count: object, events: int, inventory: Inventory) -> None:
    if count != events or type(count) is not int:
        raise ValueError(f"the trace ends with {count!r} events, {events} were read: lines are missing")
    inventory.end()


def _checked(
    given: dict[str, Any], wanted: Mapping[str, str], what: str, optional: Container[str] = ()
) -> dict[str, Any]:
    """The same fields, if all are known, none is missing and each has its type."""
    for name in given.keys() - wanted.keys():
        raise ValueError(f"{what} has {name!r}, which is unknown; known are {', '.join(wanted)}")
    for name, typename in wanted.items():
        if name in given and not _IS[typename](given[name]):
            raise ValueError(f"{what}: {name!r} is {given[name]!r}, must be {_WORDS[typename]}")
        if name not in given and name not in optional:
            raise ValueError(f"{what}: {name!r} is missing")
    return given
