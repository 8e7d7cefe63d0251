"""``deltactl``, also ``python -m delta``: the command line.

Commands import what they need when they run, so that ``deltactl policies`` does not wait for torch. A `DeltaError` is a
message on stderr and exit code 2.
"""

import json
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from delta.errors import DeltaError, TimelineError


class _Group(TyperGroup):
    """Turns a DeltaError of any command into its text."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DeltaError as error:
            typer.echo(f"deltactl: {error}", err=True)
            raise typer.Exit(2) from None


_TRACE = "delta-trace.jsonl.gz"
_HELP = "Train PyTorch models under a memory budget by evicting saved activations."
app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=_HELP)
policies_app = typer.Typer(cls=_Group, invoke_without_command=True)
app.add_typer(policies_app, name="policies")


def main() -> None:
    """The console script."""
    app(prog_name="deltactl")


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps on each side.")] = 10,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 12,
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = 8,
    width: Annotated[int, typer.Option(help="Width of the GPT, a multiple of 8.")] = 512,
    seq: Annotated[int, typer.Option(help="Bytes in a sequence.")] = 256,
    activations: Annotated[str, typer.Option(help="Limit for saved activations, such as 40% or 300MiB.")] = "40%",
    policy: Annotated[str, typer.Option(help="A shipped policy or a YAML file.")] = "delta",
    timeline: Annotated[str, typer.Option(help="Where the timeline goes.")] = "delta-demo.jsonl",
    threads: Annotated[int, typer.Option(help="Threads of PyTorch in each process.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of model and data.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Also run torch.utils.checkpoint per block.")
    ] = False,
    interleave: Annotated[bool, typer.Option(help="Let the processes take turns, step by step.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON in the last line.")] = False,
) -> None:
    """Train a small GPT on Python's standard library, plain and under a limit, and compare. About a minute."""
    from delta.runtime.demo import DemoOptions
    from delta.runtime.demo_view import print_result, run_with_progress

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
        seed=seed,
        device=device,
        checkpoint=checkpoint,
        interleave=interleave,
    )
    result = run_with_progress(options)
    print_result(result, Console())
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    if not result.gradients_identical:
        raise typer.Exit(1)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="A training script, run as `python script.py` would.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    policy: Annotated[str, typer.Option(help="A shipped policy or a YAML file.")] = "delta",
    budget: Annotated[str | None, typer.Option(help="Device memory for the whole process: 8GiB, 60%.")] = None,
    activations: Annotated[str | None, typer.Option(help="Limit for saved activations: 2GiB, 40%.")] = None,
    timeline: Annotated[str | None, typer.Option(help="Write the timeline to this file.")] = None,
    report: Annotated[str | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
) -> None:
    """Run an unmodified script under eviction. Options of deltactl go before the script."""
    from delta.runtime.script import RunOptions, run_script

    options = RunOptions(policy=policy, budget=budget, activations=activations, timeline=timeline, report=report)
    run_script(script, arguments or [], options)


@app.command(context_settings={"allow_interspersed_args": False})
def trace(
    script: Annotated[str, typer.Argument(help="A training script, run as `python script.py` would.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    output: Annotated[str, typer.Option(help="Where the trace goes; compressed if the name ends in .gz.")] = _TRACE,
    skip: Annotated[int, typer.Option(help="Steps to leave out first: the first ones run cold.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps to record: the second goes to NAME-2, and so on.")] = 1,
    policy: Annotated[str, typer.Option(help="A shipped policy or a YAML file.")] = "delta",
    budget: Annotated[str | None, typer.Option(help="Device memory for the whole process: 8GiB, 60%.")] = None,
    activations: Annotated[str | None, typer.Option(help="Limit for saved activations: 2GiB, 40%.")] = None,
) -> None:
    """Run an unmodified script and record a training step. Options of deltactl go before the script."""
    from delta.runtime.script import RunOptions, run_script
    from delta.trace import Recording

    recording = Recording(Path(output), skip=skip, steps=steps)
    options = RunOptions(policy=policy, budget=budget, activations=activations, trace=recording)
    run_script(script, arguments or [], options)


@policies_app.callback()
def policies(ctx: typer.Context) -> None:
    """List the shipped policies, or show one."""
    if ctx.invoked_subcommand is None:
        list_policies()


@policies_app.command("list")
def list_policies() -> None:
    """Name, summary and source of each shipped policy."""
    from delta.policies.loader import load, names

    for policy in map(load, names()):
        typer.echo(f"{policy.name:<12} {policy.summary}")
        if policy.source:
            typer.echo(fill(policy.source, width=100, initial_indent=" " * 13, subsequent_indent=" " * 13))


@policies_app.command("show")
def show_policy(name: Annotated[str, typer.Argument(help="A shipped policy or a YAML file.")]) -> None:
    """The YAML of a policy, with its comments."""
    from importlib.resources import files

    from delta.policies.loader import load, names

    load(name)  # says what is wrong with it, if anything is
    path = files("delta.policies") / f"{name}.yaml" if name in names() else Path(name)
    typer.echo(path.read_text(encoding="utf-8").rstrip("\n"))


@app.command()
def timeline(
    files: Annotated[list[str], typer.Argument(help="Timeline files; more than one for --svg only.")],
    chrome: Annotated[str | None, typer.Option(help="Write a Chrome trace, for https://ui.perfetto.dev.")] = None,
    svg: Annotated[str | None, typer.Option(help="Write a picture of memory over time.")] = None,
) -> None:
    """Show a timeline as a table, or write it as a Chrome trace or a picture."""
    from delta.timeline import Series, read_timeline, to_chrome, to_svg, to_table

    if len(files) > 1 and (svg is None or chrome is not None):
        raise TimelineError(f"{len(files)} timelines given: only --svg takes more than one")
    series = [Series(Path(file).name.partition(".")[0], *read_timeline(file)) for file in files]
    first = series[0]
    if chrome is not None:
        _write(chrome, json.dumps(to_chrome(first.header, first.events)))
    if svg is not None:
        _write(svg, to_svg(series))
    if chrome is None and svg is None:
        typer.echo(to_table(first.header, first.events))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TimelineError(f"{path!r} cannot be written: {error.strerror or error}") from error


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """Versions, devices, measured copy speed each way, what is missing and how to get it."""
    from delta.runtime.doctor import diagnose

    diagnosis = diagnose()
    typer.echo(json.dumps(diagnosis.as_dict(), indent=2) if as_json else str(diagnosis))
