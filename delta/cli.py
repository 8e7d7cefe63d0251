"""``deltactl``, also ``python -m delta``: the command line.

Commands import what they need when they run, so that ``deltactl policies`` does not wait for torch. A `DeltaError` is a
message on stderr and exit code 2.
"""

import gc
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from delta.errors import BudgetError, DeltaError, PolicyError, TimelineError
from delta.files import bare_name
from delta.units import Bytes, Share, format_bytes, parse_rate, parse_size

if TYPE_CHECKING:
    from delta.simulate import Run


class _Group(TyperGroup):
    """Turns a DeltaError of any command into its text."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DeltaError as error:
            typer.echo(f"deltactl: {error}", err=True)
            raise typer.Exit(2) from None


_DEVICE = "Where it trains: cpu, cuda, cuda:1. Else the card that torchrun gives it, the first one, or the CPU."
_TRACE = "delta-trace.jsonl.gz"
_TRACES = Annotated[list[str], typer.Argument(help="Traces of Delta, or logs of DTR.")]
_POLICIES = Annotated[list[str], typer.Option("--policy", help="A shipped policy or a YAML file; may be repeated.")]
_BUDGETS = Annotated[
    list[str],
    typer.Option("--budget", help="A share of the unevicted peak (0.5, 50%) or a size; may be repeated."),
]
_LINK = Annotated[str | None, typer.Option(help="Speed of the link to the host each way, as 25GB/s; else the trace's.")]
_ALLOCATOR = Annotated[str, typer.Option(help="ideal: bytes only; caching: PyTorch's on CUDA; slab: one segment.")]
_OVERRIDES = Annotated[
    list[str] | None, typer.Option("--set", help="Replace a value of the policies: filter.cost=own; may be repeated.")
]
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
    device: Annotated[str | None, typer.Option(help=_DEVICE)] = None,
    budget: Annotated[str | None, typer.Option(help="Device memory for the whole process: 8GiB, 60%.")] = None,
    activations: Annotated[str | None, typer.Option(help="Limit for saved activations: 2GiB, 40%.")] = None,
    timeline: Annotated[str | None, typer.Option(help="Write the timeline to this file.")] = None,
    report: Annotated[str | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
) -> None:
    """Run an unmodified script under eviction. Options of deltactl go before the script."""
    from delta.runtime.script import RunOptions, run_script

    options = RunOptions(
        policy=policy, device=device, budget=budget, activations=activations, timeline=timeline, report=report
    )
    run_script(script, arguments or [], options)


@app.command(context_settings={"allow_interspersed_args": False})
def trace(
    script: Annotated[str, typer.Argument(help="A training script, run as `python script.py` would.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    output: Annotated[str, typer.Option(help="Where the trace goes; compressed if the name ends in .gz.")] = _TRACE,
    skip: Annotated[int, typer.Option(help="Steps to leave out first: the first ones run cold.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps to record: the second goes to NAME-2, and so on.")] = 1,
    policy: Annotated[str, typer.Option(help="A shipped policy or a YAML file.")] = "delta",
    device: Annotated[str | None, typer.Option(help=_DEVICE)] = None,
    budget: Annotated[str | None, typer.Option(help="Device memory for the whole process: 8GiB, 60%.")] = None,
    activations: Annotated[str | None, typer.Option(help="Limit for saved activations: 2GiB, 40%.")] = None,
) -> None:
    """Run an unmodified script and record a training step. Options of deltactl go before the script."""
    from delta.runtime.script import RunOptions, run_script
    from delta.trace import Recording

    recording = Recording(Path(output), skip=skip, steps=steps)
    options = RunOptions(policy=policy, device=device, budget=budget, activations=activations, trace=recording)
    run_script(script, arguments or [], options)


@app.command()
def simulate(
    traces: _TRACES,
    policy: _POLICIES,
    budget: _BUDGETS,
    link: _LINK = None,
    allocator: _ALLOCATOR = "ideal",
    override: _OVERRIDES = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each run.")] = False,
) -> None:
    """Play recorded steps under policies and budgets on a virtual device."""
    from delta.simulate.table import to_table

    runs = _simulated(traces, policy, budget, link, allocator, override)
    if as_json:
        for done in runs:
            typer.echo(json.dumps(done.as_dict()))
    else:
        found = list(runs)
        typer.echo(to_table(found))
        for done in found:
            if done.why:
                typer.echo(f"{done.trace}, {done.policy}, {format_bytes(done.budget_bytes)}: {done.why}")


@app.command()
def compare(
    traces: _TRACES,
    policy: _POLICIES,
    budget: _BUDGETS,
    link: _LINK = None,
    allocator: _ALLOCATOR = "ideal",
    override: _OVERRIDES = None,
    plot: Annotated[str | None, typer.Option(help="Write a page with overhead over budget (needs plotly).")] = None,
) -> None:
    """Overheads of policies by budgets, a table for each trace."""
    from delta.simulate.table import check_plot, to_grid, write_plot

    if plot is not None:
        check_plot(Path(plot))
    runs = list(_simulated(traces, policy, budget, link, allocator, override))
    typer.echo(to_grid(runs))
    if plot is not None:
        write_plot(runs, Path(plot))


def _simulated(
    traces: list[str],
    policies: list[str],
    budgets: list[str],
    link: str | None,
    allocator: str,
    override: list[str] | None,
) -> "Iterator[Run]":
    """Every trace under every policy and budget; whatever cannot be read or run is an error before the first run."""
    from delta.policies.loader import load
    from delta.simulate import ALLOCATORS, check_run, simulate
    from delta.stdout import others_to_stderr
    from delta.trace import read
    from delta.types import Link

    if allocator not in ALLOCATORS:
        raise BudgetError(f"--allocator {allocator}: allowed are {', '.join(ALLOCATORS)}")
    rate = parse_rate(link, what="--link") if link is not None else None
    way = Link(rate, rate) if rate is not None else None
    overrides = dict(_override(text) for text in override or [])
    loaded = [load(name, overrides=overrides) for name in policies]
    labels = _told_apart([policy.name for policy in loaded], policies)
    loaded = [policy.model_copy(update={"name": label}) for policy, label in zip(loaded, labels, strict=True)]
    steps = [read(path) for path in traces]
    labels = _told_apart([step.name for step in steps], traces)
    steps = [replace(step, name=label) for step, label in zip(steps, labels, strict=True)]
    wanted = list(itertools.product(steps, loaded, map(_budget, budgets)))
    for step, policy, size in wanted:
        check_run(step, policy, size, way or step.link, allocator)
    for step, policy, size in wanted:
        with others_to_stderr(), _seldom_collected():
            done = simulate(step, policy, size, way or step.link, allocator, time.perf_counter_ns)
        yield done


def _told_apart(names: list[str], given: list[str]) -> list[str]:
    """What to call each in tables, where one name may stand for several: then the argument as it was given."""
    return [argument if names.count(name) > 1 else name for name, argument in zip(names, given, strict=True)]


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Rehearsals make tuples and lists by the million and no cycles: looking for garbage took one part in fifteen."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _budget(text: str) -> Bytes | Share:
    """A size, a share such as 50%, or a share as a number up to 1."""
    try:
        share = float(text)
    except ValueError:
        return parse_size(text, what="--budget")
    if 0 < share <= 1:
        return Share(share)
    return parse_size(text, what="--budget")


def _override(text: str) -> tuple[str, Any]:
    from delta.policies.loader import parse_value

    key, equals, value = text.partition("=")
    if not equals:
        raise PolicyError(f"--set {text}: give KEY=VALUE, such as filter.cost=neighbourhood")
    return key, parse_value(value, f"--set {text}")


@policies_app.callback()
def policies(ctx: typer.Context) -> None:
    """List the shipped policies, or show one."""
    if ctx.invoked_subcommand is None:
        list_policies()


@policies_app.command("list")
def list_policies() -> None:
    """Name, summary and source of each shipped policy."""
    from delta.policies.loader import load, names

    width = max(map(len, names()))
    indent = " " * (width + 1)
    for policy in map(load, names()):
        typer.echo(f"{policy.name:<{width}} {policy.summary}")
        if policy.source:
            typer.echo(fill(policy.source, width=width + 88, initial_indent=indent, subsequent_indent=indent))


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
    by: Annotated[str | None, typer.Option(help="Who holds the memory in a step: by op or by module.")] = None,
) -> None:
    """Show a timeline as a table, or write it as a Chrome trace or a picture."""
    from delta.timeline import GROUPINGS, Series, read_timeline, to_chrome, to_holders, to_svg, to_table

    if by is not None and by not in GROUPINGS:
        raise TimelineError(f"--by {by}: allowed are {', '.join(GROUPINGS)}")
    if len(files) > 1 and (svg is None or chrome is not None or by is not None):
        raise TimelineError(f"{len(files)} timelines given: only --svg takes more than one")
    series = [Series(bare_name(Path(file)), *read_timeline(file)) for file in files]
    first = series[0]
    if chrome is not None:
        _write(chrome, json.dumps(to_chrome(first.header, first.events)))
    if svg is not None:
        _write(svg, to_svg(series))
    if by is not None:
        typer.echo(to_holders(first.header, first.events, by))
    elif chrome is None and svg is None:
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
