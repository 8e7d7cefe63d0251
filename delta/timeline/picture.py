"""Memory over time as a standalone SVG: no script, no font, no dependency.

One timeline: resident bytes filled, what would have been resident without eviction as a line above it, the budget
dashed. Several timelines (a run with Delta and one without, say): the resident bytes of each, and the budgets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

from delta.errors import TimelineError
from delta.timeline.axis import Scale, bytes_scale, seconds_scale
from delta.timeline.format import Event, Header
from delta.units import format_bytes

_WIDTH, _HEIGHT = 860, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 74, 48
_INK, _MUTED, _GRID, _LIMIT = "#1f2933", "#66727f", "#e4e8ec", "#c2410c"
_COLOURS = ("#0f766e", "#94a3b8", "#4f46e5", "#b45309", "#be185d")

_Curve = list[tuple[int, int]]  # (t_ns, nbytes), each value holding until the next


@dataclass(frozen=True, slots=True)
class Series:
    """One timeline in the picture and the name the legend gives it."""

    label: str
    header: Header
    events: Sequence[Event]

    def curve(self, field: str) -> _Curve:
        """The samples of a field of `memory` events from the origin on, times from there."""
        origin_ns = self._origin_ns()
        samples = (event for event in self.events if event.ev == "memory" and event.fields.get(field) is not None)
        return sorted((event.t_ns - origin_ns, event.fields[field]) for event in samples if event.t_ns >= origin_ns)

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """Index, start and end of each step, times from the origin."""
        origin_ns = self._origin_ns()
        for event in self.events:
            if event.ev == "step":
                yield event.fields["index"], event.fields["start_ns"] - origin_ns, event.fields["end_ns"] - origin_ns

    def _origin_ns(self) -> int:
        """The start of the first step, so that loading data before it takes no room; without steps, the first event."""
        starts = [event.fields["start_ns"] for event in self.events if event.ev == "step"]
        return min(starts or [event.t_ns for event in self.events], default=0)


@dataclass(frozen=True, slots=True)
class _Plot:
    """Both scales: where a sample lies on the page."""

    time: Scale
    size: Scale

    def x(self, t_ns: float) -> float:
        return _LEFT + self.time.share(t_ns) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, nbytes: float) -> float:
        return _HEIGHT - _BOTTOM - self.size.share(nbytes) * (_HEIGHT - _TOP - _BOTTOM)


def to_svg(series: Sequence[Series], *, title: str = "Saved activations over time") -> str:
    """The picture. Raises TimelineError when a timeline holds no memory samples."""
    for one in series:
        if not one.curve("resident_bytes"):
            raise TimelineError(f"timeline {one.label!r} holds no memory events of a step, so there is nothing to draw")
    lines = list(_curves(series))
    plot = _Plot(
        seconds_scale(max(t_ns for line in lines for t_ns, _ in line.curve)),
        bytes_scale(max(nbytes for line in lines for _, nbytes in line.curve)),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>',
        _text(_LEFT, 24, title, size=15, weight=600),
        *_axes(plot),
        *_steps(plot, series[0]),
        *(part for line in lines for part in line.drawn(plot)),
        *_legend(lines),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _Line:
    """One curve and how it is drawn."""

    label: str
    curve: _Curve
    colour: str
    filled: bool = False
    dashed: bool = False

    def drawn(self, plot: _Plot) -> Iterator[str]:
        (x, y), *rest = _thinned([(plot.x(t_ns), plot.y(nbytes)) for t_ns, nbytes in self.curve])
        # A value holds until the next sample, so the path is stairs: across, then up or down.
        path = f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.0f}" for x, y in rest)
        fill = "none"
        if self.filled:
            floor, fill = plot.y(0), f'{self.colour}" fill-opacity="0.22'
            path = f"M{x:.1f} {floor:.0f}V{path.partition(' ')[2]}V{floor:.0f}"
        dash = ' stroke-dasharray="6 4"' if self.dashed else ""
        yield f'<path d="{path}" fill="{fill}" stroke="{self.colour}" stroke-width="1.2"{dash}/>'


def _curves(series: Sequence[Series]) -> Iterator[_Line]:
    """What to draw, from the back to the front: the tallest first, budgets last."""
    drawn = []
    if len(series) == 1 and (unevicted := series[0].curve("unevicted_bytes")):
        drawn.append(_Line(_with_peak("without eviction", unevicted), unevicted, _COLOURS[1]))
    for one, colour in zip(series, cycle(_COLOURS)):
        resident = one.curve("resident_bytes")
        drawn.append(_Line(_with_peak(one.label, resident), resident, colour, filled=True))
    yield from sorted(drawn, key=lambda line: -_top(line.curve))
    yield from (_limit(curve) for one in series if (curve := one.curve("limit_bytes")))


def _limit(curve: _Curve) -> _Line:
    return _Line(f"budget ({format_bytes(curve[-1][1])})", curve, _LIMIT, dashed=True)


def _with_peak(label: str, curve: _Curve) -> str:
    return f"{label} (peak {format_bytes(_top(curve))})"


def _top(curve: _Curve) -> int:
    return max(nbytes for _, nbytes in curve)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of each column of pixels only the first, highest, lowest and last value, so that a timeline of a million events
    stays a small picture and no peak is lost."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    return [point for column in columns.values() for point in _outline(column)]


def _outline(column: list[tuple[float, float]]) -> list[tuple[float, float]]:
    indices = range(len(column))
    wanted = {0, len(column) - 1, min(indices, key=lambda i: column[i][1]), max(indices, key=lambda i: column[i][1])}
    return [column[index] for index in sorted(wanted)]


def _axes(plot: _Plot) -> Iterator[str]:
    for value, label in plot.size.ticks:
        y = plot.y(value)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>'
        yield _text(_LEFT - 8, y + 4, label, anchor="end", colour=_MUTED)
    for value, label in plot.time.ticks:
        yield _text(plot.x(value), _HEIGHT - _BOTTOM + 18, label, anchor="middle", colour=_MUTED)
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, f"time [{plot.time.unit}]", anchor="middle", colour=_MUTED)
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield _text(20, middle, f"saved activations [{plot.size.unit}]", anchor="middle", colour=_MUTED, turned=True)


def _steps(plot: _Plot, series: Series) -> Iterator[str]:
    for index, start_ns, end_ns in series.steps():
        x = plot.x(end_ns)
        ends = f'x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"'
        yield f'<line {ends} stroke="{_MUTED}" stroke-width="0.7" stroke-dasharray="1 3"/>'
        if x - plot.x(start_ns) > 40:
            yield _text((x + plot.x(start_ns)) / 2, _TOP - 5, f"step {index}", anchor="middle", colour=_MUTED, size=10)


def _legend(lines: Sequence[_Line]) -> Iterator[str]:
    x = float(_LEFT)
    for line in lines:
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        yield f'<line x1="{x:.1f}" y1="44" x2="{x + 20:.1f}" y2="44" stroke="{line.colour}" stroke-width="3"{dash}/>'
        yield _text(x + 26, 48, line.label)
        x += 26 + 6.3 * len(line.label) + 22  # 6.3: mean width of a letter at this size


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = _INK,
    size: int = 12,
    weight: int = 400,
    turned: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    look = f'fill="{colour}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"{turn}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
