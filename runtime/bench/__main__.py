"""The command line of ``scripts/bench``.

Run by hand on a quiet machine: it prints ratios and asserts nothing but that Delta's gradients are the same bits.
"""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from delta.errors import DeltaError
from delta.runtime.bench import hot_path as hot
from delta.runtime.bench import largest_view, plans, view
from delta.runtime.bench.decisions import lines
from delta.runtime.bench.largest import STEPS as LARGEST_STEPS
from delta.runtime.bench.largest import LargestOptions, LargestResult, Trial, search
from delta.runtime.bench.measure import measure
from delta.runtime.bench.options import (
    BUDGETS,
    CPU_WAYS,
    CUDA_WAYS,
    QUICK_BUDGETS,
    QUICK_STEPS,
    STEPS,
    BenchOptions,
    default_models,
    left_out,
)
from delta.runtime.bench.pages import page, read_bench, read_largest, write_bench, write_largest
from delta.runtime.bench.picture import draw_two_runs
from delta.runtime.bench.result import BenchResult, ModelResult
from delta.runtime.command import run_app
from delta.runtime.demo import DemoOptions
from delta.runtime.facts import machine_facts
from delta.runtime.pages import check_file, read_page, to_json, write_file
from delta.runtime.zoo import ZOO
from delta.units import at_least_one

_NAME = "scripts/bench"
_FEWEST = 10  # storages
_LARGEST_MODELS = ("resnet50", "resnet101")

Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[int, typer.Option(help="Threads of PyTorch in each process.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few small models, few steps: to see that all works.")]
Autocast = Annotated[bool | None, typer.Option(help="bfloat16 autocast; by default on CUDA only.")]
Save = Annotated[Path | None, typer.Option(help="Write the result to this file, as JSON.")]
Result = Annotated[Path | None, typer.Option(help="Show this saved result instead of measuring.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON in the last line.")]
WriteDocs = Annotated[
    bool, typer.Option("--write-docs", help="Fill the figures of README.md and docs/, in the current directory.")
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def compare(
    context: typer.Context,
    models: Annotated[str, typer.Option(help=f"Of {', '.join(ZOO)}; by default those for the device.")] = "",
    ways: Annotated[str, typer.Option(help=f"Of {', '.join(CUDA_WAYS)}; by default those for the device.")] = "",
    budgets: Annotated[str, typer.Option(help=f"For delta and compile. By default {','.join(BUDGETS)}.")] = "",
    steps: Annotated[int, typer.Option(help=f"Timed steps of each way; 0: {STEPS}, {QUICK_STEPS} if quick.")] = 0,
    threads: Threads = 2,
    device: Device = "cpu",
    policy: Annotated[str, typer.Option(help="Delta's policy: a shipped one or a YAML file.")] = "delta",
    autocast: Autocast = None,
    quick: Quick = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the timeline of the first model under the last budget to this file.")
    ] = None,
    save: Save = None,
    result: Annotated[
        list[Path] | None,
        typer.Option(help="Show this saved result instead of measuring; given again, one of several runs' models."),
    ] = None,
    as_json: AsJson = False,
    write_docs: WriteDocs = False,
    picture: Annotated[
        Path | None, typer.Option(help="Only draw the README's picture: the demo with and without a limit, as SVG.")
    ] = None,
) -> None:
    """Train models in several ways, in turn with plain steps; compare times, memory and every bit of the gradients."""
    if context.invoked_subcommand is not None:
        return
    if picture is not None:
        check_file(picture)
        write_file(picture, draw_two_runs(DemoOptions(steps=steps or QUICK_STEPS, threads=threads, device=device)))
        return
    if result:
        measured = BenchResult.joined([read_bench(path) for path in result])
    else:
        on_cuda = device != "cpu"
        options = BenchOptions(
            models=_names(models) or default_models(device, quick),
            ways=_names(ways) or (CUDA_WAYS if on_cuda else CPU_WAYS),
            budgets=_names(budgets) or (QUICK_BUDGETS if quick else BUDGETS),
            steps=steps or (QUICK_STEPS if quick else STEPS),
            threads=threads,
            device=device,
            policy=policy,
            quick=quick,
            autocast=on_cuda if autocast is None else autocast,
        )
        if not models:
            for name in left_out(device, quick):
                _say(f"{name} is left out: pip install {ZOO[name].package}")
        _check_places(save, write_docs, options)
        measured = _measured(options, timeline, save)
    typer.echo(view.text(measured))
    if as_json:
        typer.echo(_line(measured.as_dict()))
    _keep(save, measured)
    if write_docs:
        _refuse_quick(measured.options.quick)
        _say(f"written: {', '.join(map(str, write_bench(measured, Path())))}")
    if not measured.succeeded:
        raise typer.Exit(1)


def _check_places(save: Path | None, write_docs: bool, options: BenchOptions | LargestOptions) -> None:
    """What cannot be written in the end is told before the first process."""
    if save is not None:
        check_file(save)
    if write_docs:
        _refuse_quick(options.quick)
        read_page(Path(page(options.device)))


def _refuse_quick(quick: bool) -> None:
    if quick:
        raise DeltaError("--write-docs with --quick: the times of tiny models mean nothing; measure without --quick")


def _measured(options: BenchOptions, timeline: Path | None, save: Path | None) -> BenchResult:
    """Model by model. One that fails has no rows; what is known so far is saved after each way."""
    facts = machine_facts(options.device, options.policy)  # before there are other processes: it measures the link
    found: list[ModelResult] = []

    def with_one_more(model: ModelResult) -> BenchResult:
        measured = BenchResult(options=options, machine=facts, command=_command(), models=(*found, model))
        _keep_so_far(save, measured)
        return measured

    for number, model in enumerate(options.models):
        _say(f"{model}: {len(options.compared())} ways")
        try:
            done = measure(options, model, timeline=None if number else timeline, so_far=with_one_more)
        except DeltaError as error:
            _say(f"{model}: {error}")
            done = ModelResult(model=model, sizes=options.sizes(model), rows=(), failed={"plain": str(error)})
        measured = with_one_more(done)
        found.append(done)
    return measured


@app.command("max-batch")
def max_batch(
    limit: Annotated[
        str, typer.Option(help="The allocator's bytes on CUDA, bytes of saved activations on a CPU.")
    ] = "",
    models: Annotated[str, typer.Option(help="By default the ResNets.")] = "",
    policies: Annotated[str, typer.Option(help="Delta's policies.")] = "delta",
    ways: Annotated[str, typer.Option(help="Ways of today beside them (CUDA): checkpoint, sac, ...")] = "",
    steps: Annotated[int, typer.Option(help="Timed steps of each speed.")] = LARGEST_STEPS,
    most: Annotated[int, typer.Option(help="No batch above this one is tried.")] = 65536,
    precision: Annotated[float, typer.Option(help="How close to the largest batch is close enough.")] = 0.03,
    threads: Threads = 2,
    device: Device = "cpu",
    autocast: Annotated[bool, typer.Option(help="bfloat16 autocast; the papers' table has float32.")] = False,
    quick: Quick = False,
    save: Save = None,
    result: Result = None,
    as_json: AsJson = False,
    write_docs: WriteDocs = False,
) -> None:
    """Find the largest batch that trains under a limit, plain and under policies, and what it still gets done."""
    if result is not None:
        found = read_largest(result)
    else:
        options = LargestOptions(
            models=_names(models) or _LARGEST_MODELS,
            limit=limit,
            policies=_names(policies),
            ways=_names(ways),
            steps=steps,
            most=most,
            precision=precision,
            threads=threads,
            device=device,
            quick=quick,
            autocast=autocast,
        )
        _check_places(save, write_docs, options)
        found = search(options, machine_facts(device), _command(), done=_tell, so_far=partial(_keep_so_far, save))
    typer.echo(largest_view.text(found))
    if as_json:
        typer.echo(_line(found.as_dict()))
    _keep(save, found)
    if write_docs:
        _refuse_quick(found.options.quick)
        _say(f"written: {', '.join(map(str, write_largest(found, Path())))}")
    if found.failed:
        raise typer.Exit(1)


def _keep(save: Path | None, measured: BenchResult | LargestResult) -> None:
    """In a file, if there is to be one."""
    if save is not None:
        write_file(save, to_json(measured.as_dict()))


def _keep_so_far(save: Path | None, measured: BenchResult | LargestResult) -> None:
    """The same while more is to come: a disk that is full now may not be in the end."""
    try:
        _keep(save, measured)
    except DeltaError as error:
        _say(f"warning: {error}")


def _tell(model: str, way: str, trial: Trial) -> None:
    outcome = trial.why or ("fits" if trial.samples_per_s is None else f"{trial.samples_per_s:.2f} samples/s")
    _say(f"{model}, {way}, batch {trial.batch}: {outcome}")


@app.command("hot-path")
def hot_path(
    ops: Annotated[int, typer.Option(help="Tiny ops in a step.")] = 300,
    rounds: Annotated[int, typer.Option(help="Rounds, of which medians are taken.")] = 7,
    as_json: AsJson = False,
) -> None:
    """What Delta's Python costs for each op, each pack and unpack, and each decision to evict."""
    at_least_one(ops=ops, rounds=rounds)
    measured = hot.measure(ops, rounds)
    typer.echo(str(measured))
    if as_json:
        typer.echo(_line(measured.as_dict()))


@app.command()
def decisions(
    live: Annotated[str, typer.Option(help="Numbers of live storages.")] = "1000,3000,10000,30000,100000",
    evictions: Annotated[int, typer.Option(help="For each number.")] = 2000,
) -> None:
    """What an eviction costs the engine, by how many storages are live, for each score and each way to count costs."""
    at_least_one(evictions=evictions)
    for line in lines(_numbers(live, "live"), evictions):
        typer.echo(line)


@app.command()
def planning(
    storages: Annotated[str, typer.Option(help="Numbers of storages that a step saves.")] = "200,1000,5000",
    policy: Annotated[str, typer.Option(help="A policy whose actions may be planned.")] = "delta",
) -> None:
    """How long a plan takes, at once and searched, and what it costs the step, by how many storages that saves."""
    for line in plans.table(_numbers(storages, "storages"), policy):
        typer.echo(line)


def _numbers(text: str, name: str) -> list[int]:
    found = _names(text)
    if wrong := [number for number in found if not number.isdecimal() or int(number) < _FEWEST]:
        raise DeltaError(f"{name}={wrong[0]!r}: give numbers from {_FEWEST} on, such as 1000,3000")
    return [int(number) for number in found]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _command() -> str:
    return shlex.join([_NAME, *sys.argv[1:]])


def _line(values: object) -> str:
    return to_json(values, indent=None).rstrip("\n")


def _say(text: str) -> None:
    typer.echo(text, err=True)


if __name__ == "__main__":
    run_app(app, _NAME)
