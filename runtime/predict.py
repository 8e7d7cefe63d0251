"""``scripts/predict``, also ``python -m delta.runtime.predict``: the simulator's figures beside measured ones.

Run by hand on a quiet machine. It prints a table, and fails only where gradients differ from plain PyTorch's.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from delta.errors import BudgetError
from delta.runtime.command import run_app
from delta.runtime.pages import facts_list, read_page, table, to_json, write_filled
from delta.runtime.predict_measure import Prediction, Row, base_spec, evicting, on_this_device, predict
from delta.runtime.zoo import CPU_MODELS
from delta.text import aligned
from delta.units import at_least_one, format_bytes, parse_size

_NAME = "scripts/predict"
PAGE = Path("docs/predicted.md")
RESULT = Path("docs/predicted.json")
_HEAD = (
    "policy",
    "limit",
    "peak",
    "counted",
    "predicted",
    "difference",
    "overhead",
    "predicted",
    "points",
    "gradients",
)


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CPU_MODELS)}; may be repeated.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A shipped policy; may be repeated. Default: all.")] = None,
    activations: Annotated[str, typer.Option(help="The budget, as delta.evict(activations=...) takes it.")] = "50%",
    batch: Annotated[int, typer.Option(help="Sequences or pictures in a batch.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed training steps.")] = 10,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch in each process.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON in the last line.")] = False,
    write_docs: Annotated[bool, typer.Option("--write-docs", help=f"Fill {PAGE} and write {RESULT}.")] = False,
) -> None:
    """Train each model plain and under each policy, and compare peak and overhead with what the simulator foretells."""
    policies = policy or evicting()
    _refuse(policies, activations, batch=batch, steps=steps, threads=threads)
    if write_docs:
        read_page(PAGE)
    results, command = [], shlex.join([_NAME, *sys.argv[1:]])
    for spec in [base_spec(name, batch, threads) for name in model or ("byte-gpt", "resnet50")]:
        results.append(predict(spec, policies, activations, steps, command, partial(typer.echo, err=True)))
        typer.echo(
            f"{heading(results[-1])}\n{aligned([_HEAD, *map(cells, results[-1].rows)], right=range(1, 9), rule=True)}\n"
        )
    if as_json:
        typer.echo(json.dumps([result.as_dict() for result in results]))
    if write_docs:
        write_page(results, Path())
    if not all(row.gradients_identical for result in results for row in result.rows):
        raise typer.Exit(1)


def _refuse(policies: Sequence[str], activations: str, **numbers: int) -> None:
    """What cannot be is told before the first process."""
    at_least_one(**numbers)
    parse_size(activations, what="activations", error=BudgetError)
    for name in policies:
        on_this_device(name)


def heading(result: Prediction) -> str:
    """What was trained."""
    return (
        f"{result.model}, batch {result.batch}, activations={result.activations}, {result.threads} threads, "
        f"{result.timed_steps} timed steps"
    )


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table."""
    points = row.overhead_points
    return (
        row.policy,
        format_bytes(row.limit_bytes),
        format_bytes(row.peak_bytes),
        format_bytes(row.counted_peak_bytes),
        format_bytes(row.predicted_peak_bytes),
        f"{row.peak_difference:+.1%}",
        f"{row.overhead:.3f}",
        row.status if row.predicted_overhead is None else f"{row.predicted_overhead:.3f}",
        "-" if points is None else f"{points:+.1f}",
        "identical" if row.gradients_identical and row.losses_identical else "DIFFERENT",
    )


def figures(results: list[Prediction]) -> dict[str, str]:
    """Name of a place in the page -> what belongs there."""
    one = results[0]
    setting = facts_list({**one.machine, "command": f"`{one.command}`"})
    return {"setting": setting, "tables": "\n\n".join(map(_markdown, results))}


def _markdown(result: Prediction) -> str:
    return f"{heading(result)}:\n\n{table(_HEAD, map(cells, result.rows))}"


def write_page(results: list[Prediction], root: Path) -> None:
    """Fill the page of the checkout at ``root``, and keep the results beside it."""
    write_filled(root, {str(PAGE): figures(results)})
    (root / RESULT).write_text(to_json([result.as_dict() for result in results]), encoding="utf-8")


def run() -> None:
    """The command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_app(app, _NAME)


if __name__ == "__main__":
    run()
