"""``scripts/bench``, also ``python -m delta.runtime.bench``: the benchmark on the command line.

Run by hand on a quiet machine: it prints ratios and asserts nothing but that the gradients are the same bits.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from delta.errors import DeltaError
from delta.runtime.bench_measure import BenchResult, measure, step_count, ways
from delta.runtime.bench_pages import draw_two_runs, read_result, to_json, write_pages
from delta.runtime.bench_view import text
from delta.runtime.demo import DemoOptions

_DEFAULTS = DemoOptions()


def main(
    steps: Annotated[int, typer.Option(help="Timed training steps of each way.")] = 10,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = _DEFAULTS.batch,
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = _DEFAULTS.layers,
    width: Annotated[int, typer.Option(help="Width of the GPT, a multiple of 8.")] = _DEFAULTS.width,
    seq: Annotated[int, typer.Option(help="Bytes in a sequence.")] = _DEFAULTS.seq,
    activations: Annotated[str, typer.Option(help="The limit to compare with no limit.")] = _DEFAULTS.activations,
    policy: Annotated[str, typer.Option(help="A shipped policy or a YAML file.")] = _DEFAULTS.policy,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch in each process.")] = _DEFAULTS.threads,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = _DEFAULTS.device,
    timeline: Annotated[str, typer.Option(help="Write the timeline of the run under the limit to this file.")] = "",
    save: Annotated[Path | None, typer.Option(help="Write the result to this file, as JSON.")] = None,
    result: Annotated[Path | None, typer.Option(help="Show this saved result instead of measuring.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON in the last line.")] = False,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="Fill the figures of README.md and docs/, in the current directory.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Only draw: memory over --steps steps with and without the limit, as SVG.")
    ] = None,
) -> None:
    """Train the demo's GPT plain, under Delta, with checkpointing and with save_on_cpu, step by step in turn."""
    options = DemoOptions(
        steps=steps,
        batch=batch,
        layers=layers,
        width=width,
        seq=seq,
        activations=activations,
        policy=policy,
        timeline=timeline,
        threads=threads,
        device=device,
    )
    if picture is not None:
        _write(picture, draw_two_runs(options))
        return
    measured = read_result(result) if result is not None else _measure_with_progress(options)
    typer.echo(text(measured))
    if save is not None:
        _write(save, to_json(measured))
    if write_docs:
        typer.echo(f"written: {', '.join(map(str, write_pages(measured, Path())))}")
    if as_json:
        typer.echo(json.dumps(measured.as_dict()))
    if not measured.gradients_identical:
        raise typer.Exit(1)


def _measure_with_progress(options: DemoOptions) -> BenchResult:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        names = [way.name for way in ways(options.activations)]
        bars = {name: progress.add_task(name, total=step_count(options.steps)) for name in names}
        return measure(options, on_step=lambda name: progress.advance(bars[name]))


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise DeltaError(f"{path} cannot be written: {error.strerror or error}") from error


def run() -> None:
    """The command. A DeltaError is a message on stderr and exit code 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app(prog_name="scripts/bench")
    except DeltaError as error:
        typer.echo(f"scripts/bench: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    run()
