"""The demo on a terminal: progress while it runs, a table when it is done."""

import shlex
from collections.abc import Callable, Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from delta.runtime.demo import DemoOptions, DemoResult, run_demo
from delta.units import format_bytes, format_ns


def run_with_progress(options: DemoOptions) -> DemoResult:
    """`run_demo` with a progress bar on stderr; without one where stderr is not a terminal."""
    console = Console(stderr=True)
    modes = options.modes()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bars = {mode: progress.add_task(mode, total=options.steps) for mode in modes}
        return run_demo(options, on_step=lambda mode: progress.advance(bars[mode]))


def print_result(result: DemoResult, console: Console) -> None:
    """The table, the verdicts, and where the timeline is."""
    options = result.options
    console.print(
        f"Byte-level GPT, {options.layers} layers, width {options.width}, sequence {options.seq}, "
        f"batch {options.batch}, {options.steps} steps on {options.device}, {options.threads} threads; "
        f"policy {options.policy}, activations={options.activations}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(_table(result))
    console.print(f"losses identical: {_yes(result.losses_identical)}", highlight=False)
    since = "" if (step := result.first_different_step) is None else f", first in step {step}"
    console.print(f"gradients identical: {_yes(result.gradients_identical)}{since}", highlight=False)
    report = result.sides["delta"].report or {}
    for text in report.get("warnings", ()):
        console.print(f"warning: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    timeline = options.timeline
    shown = shlex.join(["deltactl", "timeline", timeline, "--chrome", "trace.json"])
    console.print(
        f"timeline: {timeline}; to look at it: {shown}, then open trace.json at https://ui.perfetto.dev",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _table(result: DemoResult) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for mode in result.sides:
        table.add_column(mode, justify="right")
        if mode != "plain":
            table.add_column("/ plain", justify="right")
    for label, figure, text in _ROWS:
        if any(getattr(side, figure) is not None for side in result.sides.values()):
            table.add_row(label, *_cells(result, figure, text))
    return table


def _cells(result: DemoResult, figure: str, text: Callable[[Any], str]) -> Iterator[str]:
    """The figure of each side, and behind all but plain its ratio."""
    for mode, side in result.sides.items():
        value = getattr(side, figure)
        yield "-" if value is None else text(value)
        if mode != "plain":
            ratio = result.ratio(figure, mode) if figure in _WITH_RATIO else None
            yield "" if ratio is None else f"{ratio:.3f}"


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("peak of saved activations", "peak_activation_bytes", format_bytes),
    ("peak resident memory", "peak_rss_bytes", format_bytes),
    ("peak device memory", "peak_device_bytes", format_bytes),
    ("step time, median", "step_time_ns", format_ns),
    ("final loss", "final_loss", "{:.6f}".format),
)
_WITH_RATIO = ("peak_activation_bytes", "peak_rss_bytes", "peak_device_bytes", "step_time_ns")


def _yes(verdict: bool) -> str:
    return "[green]yes[/]" if verdict else "[bold red]no[/]"
