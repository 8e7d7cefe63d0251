"""The timeline file: JSON lines, a header first, then one event per line.

::

    {"delta_timeline": 2, "policy": "delta", "device": "cpu", "budget": {}, "torch": "2.13.0", "started": "..."}
    {"t_ns": 120, "ev": "saved", "record": 3, "nbytes": 4096, "op": "aten.gelu", "module": "blocks.0.act"}

``t_ns`` is when the event was known; events that took time also carry ``start_ns`` and ``end_ns`` on the same clock. A
reader of version 2 refuses kinds and fields it does not know, so a new field means a new version.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

VERSION = 2
VERSION_KEY = "delta_timeline"

Header = Mapping[str, Any]
"""The first line as a dict: `VERSION_KEY`, policy, device, budget, torch, started; more keys are allowed."""


class Event(NamedTuple):
    """One line: when, what, and the fields `EVENTS` lists for that kind."""

    t_ns: int
    ev: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """The fields of one kind of event and their types. An optional field may be absent or ``None``."""

    required: Mapping[str, type]
    optional: Mapping[str, type] = field(default_factory=lambda: MappingProxyType({}))

    def problems(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with ``fields``, in words; nothing when all is well."""
        for name in self.required:
            if name not in fields:
                yield f"field {name!r} is missing"
        for name, value in fields.items():
            yield from self._problem_of(name, value)
        if not self._ends_after_start(fields):
            yield "'end_ns' lies before 'start_ns'"

    def _problem_of(self, name: str, value: object) -> Iterator[str]:
        wanted = self.required.get(name) or self.optional.get(name)
        if wanted is None:
            yield f"field {name!r} is unknown, allowed are {', '.join([*self.required, *self.optional])}"
        elif value is None and name in self.optional:
            return
        elif not isinstance(value, wanted) or isinstance(value, bool):  # True is an int, too
            yield f"field {name!r} is {value!r}, must be {'a whole number' if wanted is int else 'a text'}"
        elif name.endswith("bytes") and value < 0:  # type: ignore[operator]  # an int here
            yield f"field {name!r} is {value}, must not be negative"
        elif name in _CHOICES and value not in _CHOICES[name]:
            yield f"field {name!r} is {value!r}, must be {' or '.join(map(repr, _CHOICES[name]))}"

    @staticmethod
    def _ends_after_start(fields: Mapping[str, Any]) -> bool:
        start, end = fields.get("start_ns"), fields.get("end_ns")
        return not (type(start) is int and type(end) is int) or end >= start


def _kind(required: str, optional: str = "") -> Kind:
    return Kind(_fields(required), _fields(optional))


def _fields(names: str) -> Mapping[str, type]:
    return MappingProxyType({name: _TYPES.get(name, int) for name in names.split()})


_TYPES = dict.fromkeys(("op", "module", "action", "direction", "why", "mode"), str)  # every other field is an int
_CHOICES = {"direction": ("out", "in"), "action": ("swap", "recompute", "encode")}

EVENTS: Mapping[str, Kind] = MappingProxyType(
    {
        "saved": _kind("record nbytes", "op module"),
        "evicted": _kind("record nbytes action"),
        "copied": _kind("record nbytes direction start_ns end_ns"),
        "recomputed": _kind("record nbytes start_ns end_ns", "op"),
        "waited": _kind("start_ns end_ns", "record why"),
        "freed": _kind("record nbytes"),
        "step": _kind("index mode start_ns end_ns peak_bytes", "unevicted_peak_bytes"),
        "memory": _kind("resident_bytes", "unevicted_bytes device_bytes host_bytes limit_bytes"),
    }
)
"""Kind of event -> its fields. `memory` holds bytes of saved activations (resident; unevicted: had nothing been
evicted; limit: the budget for them), bytes in use on the device, and bytes of host room."""
