"""A timeline in the Chrome trace format, which https://ui.perfetto.dev and chrome://tracing open.

Counters for memory, slices for steps, replays, transfers and stalls, instants for evictions and frees. Times are
microseconds from the first event. Format: "Trace Event Format" (Google, 2016).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from delta.timeline.format import Event, Header

_PID = 1
_COUNTERS = {
    "resident_bytes": "resident",
    "unevicted_bytes": "unevicted",
    "limit_bytes": "limit",
    "host_bytes": "host",
    "device_bytes": "device",
}
_INSTANTS = {"evicted": "evictions", "freed": "frees"}
_TRACKS = ("steps", "compute: recompute", "link out", "link in", "stalls", "evictions", "frees")
_LANES = 1000  # thread ids between one track and the next: room for lanes of slices that overlap

_JsonObject = dict[str, Any]


def to_chrome(header: Header, events: Sequence[Event]) -> _JsonObject:
    """The trace as a JSON-ready dict."""
    origin_ns = min((min(event.t_ns, event.fields.get("start_ns", event.t_ns)) for event in events), default=0)
    lanes = _Lanes()
    body = [item for event in sorted(events, key=_start) for item in _items(event, origin_ns, lanes)]
    return {"traceEvents": [*_names(lanes), *body], "displayTimeUnit": "ms", "otherData": dict(header)}


def _start(event: Event) -> int:
    return int(event.fields.get("start_ns", event.t_ns))


class _Lanes:
    """Thread ids. Viewers drop one of two slices that overlap on a thread, so the later one gets a lane of its own."""

    def __init__(self) -> None:
        self._ends: dict[str, list[int]] = {track: [0] for track in _TRACKS}

    def place(self, track: str, start_ns: int, end_ns: int) -> int:
        """The thread id for a slice. Slices must come sorted by start."""
        ends = self._ends[track]
        lane = next((index for index, end in enumerate(ends) if end <= start_ns), len(ends))
        ends[lane:] = [end_ns, *ends[lane + 1 :]]
        return self.base(track) + lane

    def base(self, track: str) -> int:
        return (_TRACKS.index(track) + 1) * _LANES

    def named(self) -> Iterator[tuple[int, str]]:
        for track, ends in self._ends.items():
            for lane in range(len(ends)):
                yield self.base(track) + lane, track if lane == 0 else f"{track} ({lane + 1})"


def _names(lanes: _Lanes) -> Iterator[_JsonObject]:
    yield {"ph": "M", "pid": _PID, "name": "process_name", "args": {"name": "delta"}}
    for tid, name in lanes.named():
        yield {"ph": "M", "pid": _PID, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": _PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _items(event: Event, origin_ns: int, lanes: _Lanes) -> Iterator[_JsonObject]:
    ts = (event.t_ns - origin_ns) / 1000
    if event.ev == "memory":
        for field, name in _COUNTERS.items():
            if event.fields.get(field) is not None:
                yield {"ph": "C", "pid": _PID, "ts": ts, "name": name, "args": {"bytes": event.fields[field]}}
    elif event.ev in _INSTANTS:
        place = {"pid": _PID, "tid": lanes.base(_INSTANTS[event.ev]), "ts": ts}
        yield {"ph": "i", "s": "t", **place, "name": _title(event), "args": dict(event.fields)}
    elif "start_ns" in event.fields:
        yield _slice(event, origin_ns, lanes)


def _slice(event: Event, origin_ns: int, lanes: _Lanes) -> _JsonObject:
    start_ns, end_ns = event.fields["start_ns"], event.fields["end_ns"]
    return {
        "ph": "X",
        "pid": _PID,
        "tid": lanes.place(_track(event), start_ns, end_ns),
        "ts": (start_ns - origin_ns) / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "name": _title(event),
        "args": {name: value for name, value in event.fields.items() if name not in ("start_ns", "end_ns")},
    }


def _track(event: Event) -> str:
    match event.ev:
        case "step":
            return "steps"
        case "recomputed":
            return "compute: recompute"
        case "copied":
            return f"link {event.fields['direction']}"
        case _:
            return "stalls"


def _title(event: Event) -> str:
    fields = event.fields
    match event.ev:
        case "step":
            return f"step {fields['index']} ({fields['mode']})"
        case "recomputed":
            return fields.get("op") or f"record {fields['record']}"
        case "waited":
            return fields.get("why") or "wait"
        case "evicted":
            return f"{fields['action']} record {fields['record']}"
        case _:
            return f"record {fields['record']}"
