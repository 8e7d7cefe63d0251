"""One training in several ways, a process for each, all taking turns step by step.

What is compared is fixed here: the ratio of medians after the warm-up, over the same minutes of the same machine; the
peak of saved activations, counted in the process itself and not by Delta; the bits of every gradient of every step.

Models come one after the other. Where the processes of all ways do not fit into memory together, they come in groups,
each beside a plain one of its own, and are compared with that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from delta.errors import DeltaError
from delta.policies.loader import load
from delta.runtime import monitor
from delta.runtime.bench.options import PLAIN, RIVALS, BenchOptions, Way
from delta.runtime.bench.result import DIFFERENT, IDENTICAL, ModelResult, Row
from delta.runtime.demo import Side, side_from
from delta.runtime.demo_process import KEEPS_PAGES, SETTLING_STEPS, WARM_UP_STEPS, WorkerProcess
from delta.runtime.demo_worker import Spec
from delta.runtime.tracing import Recorded, plain_spec, record
from delta.runtime.ways import unavailable
from delta.runtime.zoo import ZOO
from delta.simulate.floor import floors
from delta.units import parse_size

T = TypeVar("T")

_MARGIN = 0.01  # of what a rival takes, by which Delta aims below it
_USED = 0.7  # of the memory that is free; the rest is left to the caches of allocators and to others


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of the processes of a group."""

    sides: Mapping[str, Side]
    allocated_bytes: Mapping[str, int | None]
    failed: Mapping[str, str]


class _Group:
    """Processes that take turns. One that fails is asked no more; plain must not fail."""

    def __init__(self, workers: Mapping[str, WorkerProcess]) -> None:
        self._workers = workers
        self.failed: dict[str, str] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for name in workers:
            self._ask(name, WorkerProcess.wait_ready)

    def ask(self, name: str, request: Mapping[str, Any]) -> None:
        """Send a request and keep the answer."""
        self._ask(name, lambda worker: self.answers[name].append(worker.ask(request)))

    def _ask(self, name: str, how: Callable[[WorkerProcess], None]) -> None:
        if name in self.failed:
            return
        try:
            how(self._workers[name])
        except DeltaError as error:
            if name == PLAIN:
                raise
            self.failed[name] = f"failed: {error}"


def measure(options: BenchOptions, model: str, timeline: Path | None = None) -> ModelResult:
    """Train a model in every way. Delta under the last budget writes a ``timeline``, if one is asked for.

    Raises DeltaError if plain fails; another way that fails is missing from the result, with the reason.
    """
    spec = replace(
        plain_spec(model, options.sizes(model), threads=options.threads, device=options.device, seed=options.seed),
        policy=options.policy,
        autocast=options.autocast,
        overrides=options.overrides,
    )
    missing = {way.name: why for way in options.compared() if (why := unavailable(way.mode, options.device))}
    ways = [way for way in options.compared() if way.name not in missing]
    recorded = record(spec)
    watched = Way("delta", options.budgets[-1])

    def told(way: Way) -> Spec:
        to = str(timeline) if timeline is not None and way == watched else None
        return replace(spec, mode=way.mode, activations=way.budget, timeline=to)

    rows: list[Row] = []

    def compare(group: Sequence[Way]) -> None:
        outcome = _train({way.name: told(way) for way in (ways[0], *group)}, options.steps)
        missing.update(outcome.failed)
        rows.extend([_row(name, outcome) for name in outcome.sides if not (rows and name == PLAIN)])

    for group in groups(ways[1:], options.at_once or fitting(recorded.process_bytes, options.device)):
        compare(group)
    level = level_with_rivals(rows)
    for way in level:
        compare([way])
    budgets = [*options.budgets, *(way.budget for way in level if way.budget is not None)]
    found = dict(_floors(options, model, recorded, rows[0], budgets))
    return ModelResult(
        model=model,
        sizes=spec.sizes,
        rows=tuple(replace(row, floor_ratio=found.get(row.way)) for row in rows),
        missing=missing,
    )


def level_with_rivals(rows: Sequence[Row]) -> list[Way]:
    """For each rival that takes less memory than Delta under any budget so far: Delta under the budget, in whole MiB,
    with which it should take no more. A saved byte less is a byte less of all that is allocated."""
    deltas = [row for row in rows if row.way.startswith("delta ") and row.peak_allocated_bytes and row.budget_bytes]
    if not deltas:
        return []
    least_bytes, budget_bytes = min((row.peak_allocated_bytes or 0, row.budget_bytes or 0) for row in deltas)
    rivals_bytes = [row.peak_allocated_bytes for row in rows if row.way in RIVALS and row.peak_allocated_bytes]
    over_bytes = (least_bytes - (1 - _MARGIN) * nbytes for nbytes in rivals_bytes if nbytes < least_bytes)
    budgets_mib = dict.fromkeys(int(budget_bytes - nbytes) // 2**20 for nbytes in over_bytes)
    return [Way("delta", f"{mib}MiB") for mib in budgets_mib if mib > 0]


def fitting(process_bytes: int, device: str) -> int:
    """How many processes of that size fit into free memory at once: two at least."""
    free_bytes = monitor.host_facts().available_bytes if device == "cpu" else torch.cuda.mem_get_info()[0]
    return max(2, int(_USED * free_bytes / process_bytes))


def groups(ways: Sequence[T], at_once: int) -> list[list[T]]:
    """Ways that run together, as many groups as needed and all about as large; plain runs beside each of them."""
    beside = at_once - 1
    count = max(1, -(-len(ways) // beside))
    return [list(ways[index::count]) for index in range(count)]


def step_count(timed_steps: int) -> int:
    """Steps that each process does in all: warm-up, timed ones, and one in which saved activations are counted."""
    return WARM_UP_STEPS + timed_steps + 1


def turns(names: Sequence[str], timed_steps: int) -> Iterator[tuple[str, int, dict[str, bool]]]:
    """Who does which step, in order, what is counted in it, and what is waited for after it: nothing in a timed one.

    Each round begins with another way: whatever the first of a round has against it, all have.
    """
    last = step_count(timed_steps) - 1
    for name, index in rounds(names, last + 1):
        settle = index in SETTLING_STEPS
        yield name, index, {"count": index in (0, last), "allocated": index == last, "settle": settle}


def rounds(names: Sequence[str], steps: int) -> Iterator[tuple[str, int]]:
    """Every name once for each step, each round beginning with another."""
    for index in range(steps):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            yield name, index


def _train(specs: Mapping[str, Spec], timed_steps: int) -> _Outcome:
    with ExitStack() as stack:
        group = _Group({name: stack.enter_context(WorkerProcess(spec, KEEPS_PAGES)) for name, spec in specs.items()})
        for name, index, counted in turns(list(specs), timed_steps):
            group.ask(name, {"do": "step", "index": index, **counted})
        for name in specs:
            group.ask(name, {"do": "finish"})
    done = {name: (answers[:-1], answers[-1]) for name, answers in group.answers.items() if name not in group.failed}
    return _Outcome(
        sides={
            name: replace(side_from(steps, end), counted_peak_bytes=_counted(steps))
            for name, (steps, end) in done.items()
        },
        allocated_bytes={name: steps[-1].get("allocated_peak_bytes") for name, (steps, _) in done.items()},
        failed=group.failed,
    )


def _floors(
    options: BenchOptions, model: str, recorded: Recorded, plain: Row, budgets: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """The floor of each of Delta's rows: the extra time over all of plain's step, optimizer included."""
    if "delta" not in options.ways or not ZOO[model].steady:
        return
    trace, policy = recorded.trace, load(options.policy, options.overrides)
    wanted = [parse_size(budget, what="budgets") for budget in budgets]
    for budget, floor in zip(budgets, floors(trace, policy, wanted, trace.link), strict=True):
        if floor.fits:
            yield Way("delta", budget).name, 1 + floor.extra_ns / plain.step_time_ns


def _row(name: str, outcome: _Outcome) -> Row:
    side, plain = outcome.sides[name], outcome.sides[PLAIN]
    times_ns, plain_ns = _timed(side), _timed(plain)
    ratios = [mine / theirs for mine, theirs in zip(times_ns, plain_ns, strict=True)]
    alike = (side.gradients, side.parameters) == (plain.gradients, plain.parameters)
    report = side.report
    allocated = side.peak_device_bytes or outcome.allocated_bytes[name]
    return Row(
        way=name,
        step_time_ns=int(median(times_ns)),
        time_ratio=median(times_ns) / median(plain_ns),
        time_ratio_least=min(ratios),
        time_ratio_most=max(ratios),
        gradients=IDENTICAL if alike else DIFFERENT,
        peak_rss_bytes=side.peak_rss_bytes,
        rss_ratio=side.peak_rss_bytes / plain.peak_rss_bytes,
        counted_peak_bytes=side.counted_peak_bytes,
        activation_ratio=_over(side.counted_peak_bytes, plain.counted_peak_bytes),
        peak_allocated_bytes=allocated,
        allocated_ratio=_over(allocated, plain.peak_device_bytes or outcome.allocated_bytes[PLAIN]),
        peak_reserved_bytes=side.peak_reserved_bytes,
        host_bytes=side.host_peak_bytes,
        moved_bytes=_moved(name, report),
        recomputed_bytes=None if report is None else int(report["recomputed_bytes"]),
        reported_peak_bytes=None if report is None else int(report["peak_activation_bytes"]),
        budget_bytes=None if report is None else report["budget_bytes"],
        modes=None if report is None else report["modes"],
        warnings=() if report is None else tuple(report["warnings"]),
    )


def _timed(side: Side) -> tuple[int, ...]:
    return side.times_ns[WARM_UP_STEPS:-1]


def _counted(answers: Sequence[Mapping[str, Any]]) -> int | None:
    found = [answer["counted_peak_bytes"] for answer in answers if answer.get("counted_peak_bytes") is not None]
    return max(found, default=None)


def _over(figure: int | None, plain: int | None) -> float | None:
    return figure / plain if figure is not None and plain else None


def _moved(name: str, report: Mapping[str, Any] | None) -> int | None:
    if report is not None:
        return int(report["swapped_out_bytes"]) + int(report["swapped_in_bytes"])
    return None if name in ("save_on_cpu", "offloader") else 0
