"""The benchmark's result for people: tables for a terminal and in Markdown, and the sentence of the README."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from delta.runtime import pages
from delta.runtime.bench.goals import Goal, goals
from delta.runtime.bench.result import DELTA, BenchResult, ModelResult, Row
from delta.runtime.side_by_side import STEPS_BEFORE
from delta.text import aligned
from delta.units import Share, format_bytes, format_ns, parse_size

HEADLINE = "byte-gpt"  # the model of the README's sentence: everybody has it
_LEGEND = {
    "step": "median step time, Delta's replays and waits included, after the warm-up",
    "/ plain": "after step: median of the ratios of single steps, each to the plain step beside it",
    "range": "of these ratios",
    "in a row": "the ratio for steps in a row, the card waited for at their end only",
    "floor": "the step time over plain's that this model and budget need at least, by the best plan known",
    "launched": "how long the host takes for forward and backward: if as long as a step, the card has waited for it",
    "activations": "most bytes of saved activations on the device, counted outside of Delta; -: cannot be counted",
    "allocated": "most bytes allocated at once, parameters and optimizer included",
    "reserved": "most bytes that PyTorch's caching allocator held",
    "resident": "most resident memory of the process",
    "host": "most bytes moved to the host that were there at once",
    "moved": "bytes copied to the host and back, all steps",
    "gradients": "whether all gradients of all steps have the bits of plain PyTorch's",
}


def text(result: BenchResult) -> str:
    """The whole result for a terminal."""
    names, cells = table(result)
    lines = [setting(result), "", aligned([names, *cells], right=range(2, len(names)), rule=True), ""]
    lines += [f"{name}: {meaning}" for name, meaning in _LEGEND.items() if name in names]
    if found := goals(result):
        lines += ["", aligned([_goal(goal) for goal in found])]
    return "\n".join([*lines, *_warnings(result)])


def table(result: BenchResult) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings, and a row of cells for each way of each model. A column nobody has a figure for is left out."""
    rows = [row for model in result.models for row in model.rows]
    kept = [(name, cell) for name, cell in _COLUMNS if any(map(cell, rows))] or [_COLUMNS[-1]]
    cells: list[tuple[str, ...]] = []
    for model in result.models:
        for row in model.rows:
            cells.append((model.model, row.way, *(cell(row) or "-" for _, cell in kept)))
        for way, why in _reasons(model):
            cells.append((model.model, way, *["-"] * (len(kept) - 1), why))
    return ("model", "way", *(name for name, _ in kept)), cells


def _reasons(model: ModelResult) -> Iterator[tuple[str, str]]:
    """Why a way has no row."""
    for way, why in model.missing.items():
        yield way, _first_line(why)
    for way, why in model.failed.items():
        yield way, f"failed: {_first_line(why)}"


def setting(result: BenchResult) -> str:
    """What was trained, in one line."""
    options = result.options
    precision = "bfloat16 autocast" if options.autocast else "float32"
    models = "; ".join(f"{model.model} ({_sizes(model.sizes)})" for model in result.models)
    return (
        f"{models}: on {options.device} with {options.threads} threads, {precision}, AdamW; {options.steps} timed "
        f"steps after {STEPS_BEFORE} others; policy {options.policy}"
    )


def markdown_setting(result: BenchResult) -> str:
    """What was trained, where, and with which command."""
    return pages.facts_list({"training": setting(result), **result.machine, "command": f"`{result.command}`"})


def markdown_table(result: BenchResult) -> str:
    return pages.table(*table(result))


def markdown_goals(result: BenchResult) -> str:
    """The goals and what was measured."""
    return pages.table(("model", "goal", "measured", ""), map(_goal, goals(result)))


def headline(result: BenchResult) -> str | None:
    """One measured result in a sentence or two: Delta's row nearest to a half. None without such a row."""
    model = result.model(HEADLINE)
    limited = [row for row in model.deltas if _share(row) < 1] if model is not None else []
    if model is None or not limited:
        return None
    row = min(limited, key=lambda row: abs(_share(row) - 0.5))
    options, sizes = result.options, model.sizes
    counted = "" if row.activation_ratio is None else f"saved activations peak at **{row.activation_ratio:.1%}** and "
    checkpoint = model.row("checkpoint")
    beside = f"; `torch.utils.checkpoint` on every block takes {checkpoint.time_ratio:.2f} times" if checkpoint else ""
    same = "All gradients have" if result.gradients_identical else "Not all gradients have"
    return (
        f"A byte-level GPT ({sizes['layers']} layers of width {sizes['width']}, {sizes['batch']} sequences of "
        f"{sizes['seq']} bytes, {options.device}, {options.threads} threads) with "
        f'`activations="{row.way.removeprefix(DELTA)}"`: {counted}resident memory at **{row.rss_ratio:.1%}** of '
        f"plain PyTorch's, in **{row.time_ratio:.2f}** times its step time{beside}. {same} the same bits."
    )


def _share(row: Row) -> float:
    wanted = parse_size(row.way.removeprefix(DELTA), what="budgets")
    return wanted.fraction if isinstance(wanted, Share) else 1.0


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _goal(goal: Goal) -> Sequence[str]:
    return goal.model, goal.text, goal.measured, {True: "met", False: "missed", None: "-"}[goal.met]


def _warnings(result: BenchResult) -> Iterator[str]:
    for model in result.models:
        for row in model.rows:
            for warning in row.warnings:
                yield f"warning, {model.model}, {row.way}: {warning}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("step", lambda row: format_ns(row.step_time_ns)),
    ("/ plain", lambda row: _ratio(row.time_ratio)),
    ("range", lambda row: f"{row.time_ratio_least:.2f} to {row.time_ratio_most:.2f}"),
    ("in a row", lambda row: _ratio(row.row_ratio)),
    ("floor", lambda row: _ratio(row.floor_ratio)),
    ("launched", lambda row: "" if row.host_time_ns is None else format_ns(row.host_time_ns)),
    ("activations", lambda row: _bytes(row.counted_peak_bytes)),
    ("/ plain", lambda row: _ratio(row.activation_ratio)),
    ("allocated", lambda row: _bytes(row.peak_allocated_bytes)),
    ("/ plain", lambda row: _ratio(row.allocated_ratio)),
    ("reserved", lambda row: _bytes(row.peak_reserved_bytes)),
    ("resident", lambda row: _bytes(row.peak_rss_bytes)),
    ("/ plain", lambda row: _ratio(row.rss_ratio)),
    ("host", lambda row: _bytes(row.host_bytes)),
    ("moved", lambda row: _bytes(row.moved_bytes)),
    ("gradients", lambda row: row.gradients),
)
