"""A timeline as a text table: one line per step, one for what came after the last step's end, one with the totals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from delta.text import aligned
from delta.timeline.format import Event, Header
from delta.timeline.steps import by_step
from delta.units import format_bytes, format_ns

_COLUMNS = (
    *("step", "mode", "time", "peak", "unevicted"),
    *("swapped out", "swapped in", "recomputed", "stalled", "evictions"),
)
_LEGEND = (
    "peak: saved activations resident at most; unevicted: had nothing been evicted;\n"
    "recomputed, stalled: time spent on replaying ops and on waiting for transfers."
)


@dataclass(slots=True)
class _Row:
    """The sums of one step."""

    label: str
    mode: str = ""
    time_ns: int = 0
    peak_bytes: int = 0
    unevicted_peak_bytes: int | None = None
    out_bytes: int = 0
    in_bytes: int = 0
    recompute_ns: int = 0
    stall_ns: int = 0
    evictions: Counter[str] = field(default_factory=Counter)

    def add(self, event: Event) -> None:
        fields = event.fields
        match event.ev:
            case "copied" if fields["direction"] == "out":
                self.out_bytes += fields["nbytes"]
            case "copied":
                self.in_bytes += fields["nbytes"]
            case "recomputed":
                self.recompute_ns += fields["end_ns"] - fields["start_ns"]
            case "waited":
                self.stall_ns += fields["end_ns"] - fields["start_ns"]
            case "evicted":
                self.evictions[fields["action"]] += 1

    def include(self, other: "_Row") -> None:
        """Add another row's sums to a totals row; of peaks, the larger."""
        self.time_ns += other.time_ns
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        if other.unevicted_peak_bytes is not None:
            self.unevicted_peak_bytes = max(self.unevicted_peak_bytes or 0, other.unevicted_peak_bytes)
        self.out_bytes += other.out_bytes
        self.in_bytes += other.in_bytes
        self.recompute_ns += other.recompute_ns
        self.stall_ns += other.stall_ns
        self.evictions += other.evictions

    def cells(self) -> tuple[str, ...]:
        return (
            self.label,
            self.mode,
            format_ns(self.time_ns),
            format_bytes(self.peak_bytes),
            "-" if self.unevicted_peak_bytes is None else format_bytes(self.unevicted_peak_bytes),
            format_bytes(self.out_bytes),
            format_bytes(self.in_bytes),
            format_ns(self.recompute_ns),
            format_ns(self.stall_ns),
            ", ".join(f"{action} {count}" for action, count in sorted(self.evictions.items())) or "-",
        )


def to_table(header: Header, events: Sequence[Event]) -> str:
    """The table with a title line and a legend."""
    steps, parts = by_step(events)
    rows = [*map(_step_row, steps), _Row("after")]
    for row, part in zip(rows, parts, strict=True):
        for event in part:
            row.add(event)
    total = _Row("total")
    for row in rows:
        total.include(row)
    if rows[-1] == _Row("after"):
        rows.pop()
    cells = [_COLUMNS, *(row.cells() for row in [*rows, total])]
    run = f"policy {header.get('policy', '?')} on {header.get('device', '?')}"
    title = f"{run}, {len(steps)} steps, {len(events)} events"
    return "\n".join([title, "", aligned(cells, right=range(2, 9), rule=True), "", _LEGEND])


def _step_row(event: Event) -> _Row:
    fields = event.fields
    return _Row(
        label=str(fields["index"]),
        mode=fields["mode"],
        time_ns=fields["end_ns"] - fields["start_ns"],
        peak_bytes=fields["peak_bytes"],
        unevicted_peak_bytes=fields.get("unevicted_peak_bytes"),
    )
