"""One training in several ways, a process for each, every timed step beside a plain one of the same process.

What is compared is fixed here: the median of the ratios of steps, each to the plain step beside it in its process; the
peak of saved activations, counted in the process itself and not by Delta; the bits of every gradient of every step,
against those of a process that trains plainly and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from delta.errors import DeltaError
from delta.policies.loader import load
from delta.runtime.bench.options import PLAIN, RIVALS, BenchOptions, Way
from delta.runtime.bench.result import DELTA, DIFFERENT, IDENTICAL, ModelResult, Row
from delta.runtime.demo_worker import Spec
from delta.runtime.side_by_side import ROWS, Answer, Trained, train
from delta.runtime.tracing import plain_spec, record
from delta.runtime.ways import unavailable
from delta.runtime.zoo import ZOO
from delta.simulate.floor import floors
from delta.units import parse_size

_MARGIN = 0.01  # of what a rival takes, by which Delta aims below it
_AIMS = 3  # what is allocated beside activations changes with the budget: aimed again from what the last one took


def measure(
    options: BenchOptions,
    model: str,
    timeline: Path | None = None,
    so_far: Callable[[ModelResult], object] = lambda result: None,
) -> ModelResult:
    """Train a model in every way. Delta under the last budget writes a ``timeline``, if one is asked for; ``so_far``
    gets the result as it stands after each way.

    Raises DeltaError if plain fails; of another way that fails, and of floors, the result has the reason.
    """
    spec = replace(
        plain_spec(model, options.sizes(model), threads=options.threads, device=options.device, seed=options.seed),
        policy=options.policy,
        autocast=options.autocast,
        overrides=options.overrides,
    )
    missing = {way.name: why for way in options.compared() if (why := unavailable(way.mode, options.device))}
    ways = [way for way in options.compared() if way.name not in missing]
    failed: dict[str, str] = {}
    watched = Way("delta", options.budgets[-1])

    def told(way: Way) -> Spec:
        to = str(timeline) if timeline is not None and way == watched else None
        return replace(spec, mode=way.mode, activations=way.budget, timeline=to)

    rounds = ROWS if options.device != "cpu" else 0  # a CPU has done what it was given when it is given more
    plain = train(told(ways[0]), options.steps, rounds)
    rows = [_row(PLAIN, plain, plain)]

    def result(floors: Mapping[str, float]) -> ModelResult:
        found = tuple(replace(row, floor_ratio=floors.get(row.way)) for row in rows)
        return ModelResult(model=model, sizes=spec.sizes, rows=found, missing=missing, failed=dict(failed))

    def compare(way: Way) -> None:
        try:
            rows.append(_row(way.name, train(told(way), options.steps, rounds), plain))
        except DeltaError as error:
            failed[way.name] = str(error)
        so_far(result({}))

    for way in ways[1:]:
        compare(way)
    budgets = list(options.budgets)
    for _ in range(_AIMS):
        for way in level_with_rivals(rows):
            if way.budget is not None and way.budget not in budgets:
                compare(way)
                budgets.append(way.budget)
    try:
        return result(dict(_floors(options, spec, plain, budgets)))
    except DeltaError as error:
        failed["floors"] = str(error)
    return result({})


def level_with_rivals(rows: Sequence[Row]) -> list[Way]:
    """For each rival that takes less memory than Delta under any budget so far: Delta under the budget, in whole MiB,
    with which it should take no more if a saved byte less than under the smallest is a byte less of all that is
    allocated. Under that one it may take more than under a larger one: what replays need comes on top."""
    deltas = [row for row in rows if row.way.startswith(DELTA) and row.peak_allocated_bytes and row.budget_bytes]
    if not deltas:
        return []
    budget_bytes, taken_bytes = min((row.budget_bytes or 0, row.peak_allocated_bytes or 0) for row in deltas)
    least_bytes = min(row.peak_allocated_bytes or 0 for row in deltas)
    rivals_bytes = [row.peak_allocated_bytes for row in rows if row.way in RIVALS and row.peak_allocated_bytes]
    over_bytes = (taken_bytes - (1 - _MARGIN) * nbytes for nbytes in rivals_bytes if nbytes < least_bytes)
    budgets_mib = dict.fromkeys(int(budget_bytes - nbytes) // 2**20 for nbytes in over_bytes)
    return [Way("delta", f"{mib}MiB") for mib in budgets_mib if mib > 0]


def _floors(options: BenchOptions, spec: Spec, plain: Trained, budgets: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The floor of each of Delta's rows. What a trace covers is forward and backward, and both times are its own; of a
    whole step, optimizer included, that is a part which plain's steps tell."""
    if "delta" not in options.ways or not ZOO[spec.model].steady:
        return
    trace, policy = record(spec).trace, load(options.policy, options.overrides)
    part = median(step["passes_ns"] for step in plain.timed) / median(_times(plain.timed))
    wanted = [parse_size(budget, what="budgets") for budget in budgets]
    for budget, floor in zip(budgets, floors(trace, policy, wanted, trace.link), strict=True):
        if floor.fits:
            yield Way("delta", budget).name, 1 + part * floor.extra_ns / floor.base_ns


def _row(name: str, way: Trained, plain: Trained) -> Row:
    """The figures of a way: times against the plain steps beside its own, the rest against those of plain's process."""
    ratios = way.ratios("time_ns") if way.beside else [1.0]
    report = way.end["report"]
    counted, allocated, rss = way.counted_peak_bytes, _allocated(way), way.end["peak_rss_bytes"]
    return Row(
        way=name,
        step_time_ns=int(median(_times(way.timed))),
        time_ratio=median(ratios),
        time_ratio_least=min(ratios),
        time_ratio_most=max(ratios),
        row_ratio=_row_ratio(way),
        gradients=IDENTICAL if _bits(way) == _bits(plain) else DIFFERENT,
        peak_rss_bytes=rss,
        rss_ratio=rss / plain.end["peak_rss_bytes"],
        counted_peak_bytes=counted,
        activation_ratio=_over(counted, plain.counted_peak_bytes),
        peak_allocated_bytes=allocated,
        allocated_ratio=_over(allocated, _allocated(plain)),
        peak_reserved_bytes=way.end["peak_reserved_bytes"],
        host_bytes=way.end["host_peak_bytes"],
        host_time_ns=int(median(step["host_ns"] for step in way.timed)) if "host_ns" in way.timed[0] else None,
        moved_bytes=_moved(name, report),
        recomputed_bytes=None if report is None else int(report["recomputed_bytes"]),
        reported_peak_bytes=None if report is None else int(report["peak_activation_bytes"]),
        budget_bytes=None if report is None else report["budget_bytes"],
        modes=None if report is None else report["modes"],
        warnings=() if report is None else tuple(report["warnings"]),
    )


def _row_ratio(way: Trained) -> float | None:
    """None where no rows were asked for."""
    if not way.rows:
        return None
    return median(way.row_ratios) if way.beside else 1.0


def _times(steps: Sequence[Answer]) -> list[int]:
    return [step["time_ns"] for step in steps]


def _bits(trained: Trained) -> tuple[list[str], str]:
    """Digests of all gradients of every step, and of the parameters at the end."""
    return [step["gradients"] for step in trained.steps], trained.end["parameters"]


def _allocated(trained: Trained) -> int | None:
    """By the device's allocator, or by PyTorch's profiler on a CPU."""
    nbytes: int | None = trained.end["peak_device_bytes"] or trained.allocated_peak_bytes
    return nbytes


def _over(figure: int | None, plain: int | None) -> float | None:
    return figure / plain if figure is not None and plain else None


def _moved(name: str, report: Mapping[str, Any] | None) -> int | None:
    if report is not None:
        return int(report["swapped_out_bytes"]) + int(report["swapped_in_bytes"])
    return None if name in ("save_on_cpu", "offloader") else 0
