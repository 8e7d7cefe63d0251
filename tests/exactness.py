"""``scripts/exactness``: PyTorch's whole operator database plain and under Delta, and the page docs/exactness.md.

Exit code 1 if any number is wrong.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path
from typing import Annotated, NamedTuple

import opdb
import torch
import typer
from opdb import UNREPEATABLE, Handled, Outcome, Verdict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from delta.runtime.facts import machine_facts
from delta.runtime.pages import fill
from delta.runtime.settle import settle_kernels

COMMAND = "scripts/exactness --write-docs"
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/exactness.md"
RESULT = ROOT / "docs/exactness.json"
MOST_NAMES = 12  # a longer list of ops is only counted
COLUMNS = (*Verdict, *Handled)


@dataclass(frozen=True)
class Row:
    """Every sample of one dtype under one policy on one device: how many were found to be what."""

    policy: str
    device: str
    dtype: str
    counts: dict[str, int]


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep. `kept` and `passed` are (sample, dtype) pairs under one policy on one device."""

    rows: list[Row]
    samples: dict[str, int]  # by dtype
    ops: dict[str, int]  # by dtype
    left_out: list[str]  # ops without a backward in any of the dtypes
    kept: dict[str, int]  # by op: saved tensors that the policy recompute could not drop
    passed: dict[str, dict[str, int]]  # by what was saved, by op
    plain_errors: dict[str, int]  # by op and error
    wrong: list[str]
    facts: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Sweep:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "rows": [Row(**row) for row in values["rows"]]})

    def json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


# -- in the processes -------------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """One op in one dtype, by their names. `quick`: each sample under one policy, in turns."""

    op: str
    dtype: str
    quick: bool


@dataclass
class Part:
    """What one task found."""

    op: str
    dtype: str
    samples: int = 0
    found: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (policy, device, verdict or handled)
    kept: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    plain_errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, index: int, outcome: Outcome) -> None:
        self.found[outcome.policy, outcome.device, outcome.verdict] += 1
        self.found[outcome.policy, outcome.device, outcome.handled] += 1
        if outcome.verdict is Verdict.WRONG:
            where = f"{self.op} {self.dtype} sample {index}, {outcome.policy} on {outcome.device}"
            self.wrong.append(f"{where}: {'; '.join(outcome.differences)}")
        if (outcome.policy, outcome.device) != ("recompute", "cpu"):
            return
        self.kept += outcome.handled is Handled.KEPT
        self.passed.update([" and ".join(sorted(outcome.passed))] if outcome.passed else ())
        self.plain_errors.update([f"{self.op}: {outcome.error}"] if outcome.error else ())


def tasks(pattern: str = "*", quick: bool = False) -> list[Task]:
    """Each op in each of its dtypes; with `quick` in one of them, another one for the next op."""
    found: list[Task] = []
    for number, (name, op) in enumerate(opdb.ops().items()):
        if fnmatchcase(name, pattern):
            dtypes = [str(dtype).removeprefix("torch.") for dtype in opdb.dtypes_of(op)]
            chosen = [dtypes[number % len(dtypes)]] if quick and dtypes else dtypes
            found += [Task(name, dtype, quick) for dtype in chosen]
    return found


def left_out() -> list[str]:
    """Ops without a backward in any of the dtypes, on the CPU."""
    return [name for name, op in opdb.ops().items() if not opdb.dtypes_of(op)]


def start_process() -> None:
    """Numbers are compared in one thread, with the kernels settled (see `delta.runtime.settle`)."""
    torch.set_num_threads(1)
    settle_kernels()


def work(task: Task, spill_dir: str) -> Part:
    """All samples of one op in one dtype, under every policy, or one of them, on every device."""
    op, dtype = opdb.ops()[task.op], getattr(torch, task.dtype)
    part = Part(task.op, task.dtype)
    for index, sample in enumerate(opdb.samples_of(op, dtype)):
        part.samples += 1
        policies = [opdb.POLICIES[index % len(opdb.POLICIES)]] if task.quick else opdb.POLICIES
        for outcome in opdb.outcomes(op, sample, spill_dir, policies):
            part.add(index, outcome)
    return part


# -- the sweep --------------------------------------------------------------------------------------------------------
def sweep(processes: int, todo: list[Task], console: Console) -> Sweep:
    """Run these; what is wrong is printed when it is found."""
    began, facts = time.monotonic(), _facts()
    parts: list[Part] = []
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as spill_dir,
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start_process) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        futures = [pool.submit(work, task, spill_dir) for task in todo]
        bar = progress.add_task("", total=len(futures))
        for future in as_completed(futures):
            part = future.result()
            parts.append(part)
            for line in part.wrong:
                console.print(f"wrong: {line}", markup=False, highlight=False)
            progress.update(bar, advance=1, description=f"{part.op} {part.dtype}")
    return collect(parts, {**facts, "time": f"{_minutes(began)} min in {processes} processes of one thread"})


def collect(parts: list[Part], facts: dict[str, str]) -> Sweep:
    """Add up what the tasks found."""
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    samples: Counter[str] = Counter()
    passed: dict[str, Counter[str]] = {}
    for part in parts:
        samples[part.dtype] += part.samples
        for (policy, device, what), count in part.found.items():
            rows.setdefault((policy, device, part.dtype), Counter())[what] += count
        for what, count in part.passed.items():
            passed.setdefault(what, Counter())[part.op] += count
    order = [*opdb.POLICIES, *opdb.DEVICES, "float32", "float64", "bfloat16"]
    keys = sorted(rows, key=lambda key: [order.index(name) for name in key])
    return Sweep(
        rows=[Row(*key, {str(what): rows[key][what] for what in COLUMNS}) for key in keys],
        samples={dtype: samples[dtype] for dtype in order if dtype in samples},
        ops=dict(Counter(part.dtype for part in parts)),
        left_out=left_out(),
        kept=_sorted(sum((Counter({part.op: part.kept}) for part in parts), Counter())),
        passed={what: _sorted(passed[what]) for what in sorted(passed)},
        plain_errors=_sorted(sum((part.plain_errors for part in parts), Counter())),
        wrong=sorted(line for part in parts for line in part.wrong),
        facts=facts,
    )


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in sorted(counts) if counts[name]}


def _minutes(began: float) -> str:
    return f"{(time.monotonic() - began) / 60:.0f}"


def _facts() -> dict[str, str]:
    facts = machine_facts()
    return {name: facts[name] for name in ("processor", "memory", "system", "versions", "commit", "day")}


# -- showing ----------------------------------------------------------------------------------------------------------
def cells(result: Sweep) -> Iterator[tuple[str, ...]]:
    """The table: a head and a line for each row."""
    yield "policy", "device", "dtype", *COLUMNS
    for row in result.rows:
        yield row.policy, row.device, row.dtype, *(f"{row.counts[what]:,}" for what in COLUMNS)


def text(result: Sweep) -> str:
    head, *lines = cells(result)
    table = Table(*head)
    for line in lines:
        table.add_row(*line)
    out = StringIO()
    Console(file=out, width=200).print(table)
    runs = sum(row.counts[verdict] for row in result.rows for verdict in Verdict)
    return f"{out.getvalue()}{sum(result.samples.values()):,} samples, {runs:,} runs, {len(result.wrong):,} wrong"


def places(result: Sweep) -> dict[str, str]:
    """Name of each place of the page -> what belongs there."""
    head, *lines = cells(result)
    sizes = {dtype: f"{result.ops[dtype]} ops, {count:,} samples" for dtype, count in result.samples.items()}
    return {
        "setting": _list({**sizes, **result.facts, "command": f"`{COMMAND}`"}),
        "counts": "\n".join(map(_markdown_row, (head, ["---"] * len(head), *lines))),
        "wrong": "\n".join(f"- {line}" for line in result.wrong) or "None.",
        "unrepeatable": "\n".join(
            f"- {_names(entry.ops)} with {entry.when}: {entry.reason}." for entry in UNREPEATABLE
        ),
        "errors": _list(result.plain_errors) or "None.",
        "passed": _list({what: _samples_of(ops) for what, ops in result.passed.items()}),
        "kept": f"{_names(result.kept)}.",
        "left-out": f"{_names(result.left_out)}.",
    }


def _list(values: Mapping[str, object]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in values.items())


def _samples_of(ops: Mapping[str, int]) -> str:
    named = f", {_names(ops)}" if len(ops) <= MOST_NAMES else f" of {len(ops)} ops"
    return f"{sum(ops.values()):,} samples{named}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _markdown_row(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def write_page(result: Sweep) -> None:
    """Keep the result beside the page, and fill the page from it."""
    RESULT.write_text(result.json(), encoding="utf-8")
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), places(result)), encoding="utf-8")


def main(
    processes: Annotated[int, typer.Option(help="How many processes share the work.", min=1)] = 2,
    only: Annotated[str, typer.Option(help="Ops whose full name matches this pattern.")] = "*",
    quick: Annotated[
        bool,
        typer.Option(help="Each op in one dtype and each sample under one policy, in turns: an eighth of the work."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    write_docs: Annotated[bool, typer.Option("--write-docs", help="Fill docs/exactness.md and its JSON.")] = False,
) -> None:
    """Compare every sample of PyTorch's operator database, bit for bit, plain and with everything evicted."""
    if write_docs and (only != "*" or quick):
        raise typer.BadParameter("the page is about all of it: give neither --only nor --quick with it")
    result = sweep(processes, tasks(only, quick), Console(stderr=True))
    typer.echo(result.json() if as_json else text(result))
    if write_docs:
        write_page(result)
    if result.wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
