"""The benchmark's result for people: a text table, the same in Markdown, the goals, and the sentence of the README."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from delta.runtime.bench_measure import WARM_UP_STEPS, BenchResult, Row
from delta.text import aligned
from delta.units import Share, format_bytes, format_ns, parse_size

MAX_TIME_RATIO = 1.15  # of a step under the limit
MAX_IDLE_TIME_RATIO = 1.02  # of a step that fits
_HEADINGS = {
    "step": "median step time, Delta's replays and waits included, after the warm-up",
    "activations": "most bytes of saved activations on the device, counted outside of Delta; -: cannot be counted",
    "resident": "most resident memory of the process, everything included",
    "device": "most bytes that PyTorch's allocator had given out",
    "moved": "bytes copied to the host and back, all steps",
    "gradients": "whether all gradients of all steps have the bits of plain PyTorch's",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What Delta sets out to reach, what was measured, and whether that is enough."""

    text: str
    measured: str
    met: bool


def goals(result: BenchResult) -> list[Goal]:
    """The goals of the demo, for this result. They were set for the default sizes on two cores."""
    limited, idle, checkpoint = result.limited, result.row("delta 100%"), result.row("checkpoint")
    limit, share = result.options.activations, limited.activation_ratio
    wanted = parse_size(limit, what="activations")
    found = []
    if isinstance(wanted, Share) and share is not None:
        text = f"saved activations under {limit}: at most {wanted.fraction:.2f} of plain"
        found.append(Goal(text, f"{share:.3f}", share <= wanted.fraction))
    return [
        *found,
        _at_most(f"step time under {limit}", limited.time_ratio, MAX_TIME_RATIO),
        _at_most(f"step time under {limit}, beside checkpointing", limited.time_ratio, checkpoint.time_ratio),
        _at_most(f"resident memory under {limit}", limited.rss_ratio, 1.0),
        _at_most("step time at 100%", idle.time_ratio, MAX_IDLE_TIME_RATIO),
        Goal("bytes moved at 100%: none", format_bytes(idle.moved_bytes or 0), idle.moved_bytes == 0),
        Goal("gradients: those of plain, bit for bit", *_verdict(result.gradients_identical)),
    ]


def _at_most(what: str, figure: float, most: float) -> Goal:
    return Goal(f"{what}: at most {most:.2f} of plain", f"{figure:.3f}", figure <= most)


def _verdict(good: bool) -> tuple[str, bool]:
    return ("identical" if good else "different"), good


def text(result: BenchResult) -> str:
    """The whole result for a terminal."""
    names, cells = _table(result)
    lines = [setting(result), "", aligned([names, *cells], right=range(1, len(names)), rule=True), ""]
    lines += [f"{name}: {meaning}" for name, meaning in _HEADINGS.items() if name in names]
    lines += ["", aligned([(goal.text, goal.measured, _met(goal)) for goal in goals(result)])]
    return "\n".join([*lines, *_warnings(result)])


def _warnings(result: BenchResult) -> Iterator[str]:
    for row in result.rows:
        for warning in row.warnings:
            yield f"warning, {row.way}: {warning}"


def setting(result: BenchResult) -> str:
    """What was trained, in one line."""
    options = result.options
    return (
        f"Byte-level GPT of {options.layers} layers, width {options.width}, {options.batch} sequences of {options.seq} "
        f"bytes, on {options.device} with {options.threads} threads; {options.steps} timed steps after {WARM_UP_STEPS} "
        f"others; policy {options.policy}"
    )


def markdown_table(result: BenchResult) -> str:
    """The table of all ways."""
    names, cells = _table(result)
    return _markdown(names, cells)


def markdown_goals(result: BenchResult) -> str:
    """The goals and what was measured."""
    return _markdown(("goal", "measured", ""), [(goal.text, goal.measured, _met(goal)) for goal in goals(result)])


def markdown_setting(result: BenchResult, command: str) -> str:
    """What was trained, where, and with which command."""
    facts = [("training", setting(result)), *result.machine.items(), ("command", f"`{command}`")]
    return "\n".join(f"- {name}: {fact}" for name, fact in facts)


def headline(result: BenchResult) -> str:
    """One measured result in a sentence or two."""
    options, row, checkpoint = result.options, result.limited, result.row("checkpoint")
    model = f"{options.layers} layers of width {options.width}, {options.batch} sequences of {options.seq} bytes"
    counted = "" if row.activation_ratio is None else f"saved activations peak at **{row.activation_ratio:.1%}** and "
    same = "All gradients have" if result.gradients_identical else "Not all gradients have"
    return (
        f"A byte-level GPT ({model}, {options.device}, {options.threads} threads) with "
        f'`activations="{options.activations}"`: {counted}resident memory at **{row.rss_ratio:.1%}** of plain '
        f"PyTorch's, in **{row.time_ratio:.2f}** times its step time; `torch.utils.checkpoint` on every block takes "
        f"{checkpoint.time_ratio:.2f} times. {same} the same bits."
    )


def _met(goal: Goal) -> str:
    return "met" if goal.met else "missed"


def _markdown(names: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    rows = [names, tuple("---" for _ in names), *cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _table(result: BenchResult) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and a row of cells for each way. A column nobody has a figure for is left out."""
    columns = [
        (name, [cell(row) for row in result.rows]) for name, cell in _COLUMNS if any(cell(row) for row in result.rows)
    ]
    names = tuple(name for name, _ in columns)
    return names, [tuple(cells[index] or "-" for _, cells in columns) for index in range(len(result.rows))]


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("way", lambda row: row.way),
    ("step", lambda row: format_ns(row.step_time_ns)),
    ("/ plain", lambda row: _ratio(row.time_ratio)),
    ("range", lambda row: f"{row.time_ratio_least:.2f} to {row.time_ratio_most:.2f}"),
    ("activations", lambda row: _bytes(row.counted_peak_bytes)),
    ("/ plain", lambda row: _ratio(row.activation_ratio)),
    ("resident", lambda row: _bytes(row.peak_rss_bytes)),
    ("/ plain", lambda row: _ratio(row.rss_ratio)),
    ("device", lambda row: _bytes(row.peak_device_bytes)),
    ("/ plain", lambda row: _ratio(row.device_ratio)),
    ("moved", lambda row: _bytes(row.moved_bytes)),
    ("gradients", lambda row: "identical" if row.gradients_identical else "different"),
)
