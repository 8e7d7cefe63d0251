"""What Delta sets out to reach on each device, computed from a result, with what is missed beside what is met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from delta.runtime.bench.options import RIVALS, BenchOptions
from delta.runtime.bench.result import DELTA, IDENTICAL, BenchResult, ModelResult, Row
from delta.runtime.device.reserve import RESERVED_RATIO
from delta.units import format_bytes, parse_size

IDLE_RATIO = 1.01
SHORT_STEP_NS = 50_000_000  # on CUDA a shorter step is not held to `IDLE_RATIO`: launches are what it waits for

_TRANSFORMER = {"50%": 1.03, "30%": 1.12}
_RESNET = {"50%": 1.08, "30%": 1.20}
TIME_RATIOS: Mapping[str, Mapping[str, Mapping[str, float]]] = {  # device -> model -> budget -> at most
    "cpu": {
        "byte-gpt": {"50%": 1.05, "30%": 1.10},
        "gpt": {"50%": 1.05, "30%": 1.10},
        "bert": {"50%": 1.05, "30%": 1.10},
        "vit": {"50%": 1.06, "30%": 1.12},
        "resnet50": {"50%": 1.06, "30%": 1.15},
    },
    "cuda": {
        **dict.fromkeys(
            ("byte-gpt", "gpt", "bert", "vit", "swin", "gpt2-medium", "gpt2-large", "llama-1b"), _TRANSFORMER
        ),
        "resnet50": _RESNET,
        "resnet101": _RESNET,
    },
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What was set out to be reached, what was measured, and whether that is enough; None where nobody knows."""

    model: str
    text: str
    measured: str
    met: bool | None


def goals(result: BenchResult) -> list[Goal]:
    """All goals that a result can tell of; those for times not where it was quick, since times mean nothing there."""
    return [goal for model in result.models for goal in _of_model(model, result.options)]


def _of_model(model: ModelResult, options: BenchOptions) -> Iterator[Goal]:
    for way in model.failed_deltas:
        yield Goal(model.model, f"{way} trains", model.failed[way].partition("\n")[0], False)
    if not model.rows:
        return
    if not options.quick:
        yield from _times(model, options.device)
        for rival in RIVALS:
            if (row := model.row(rival)) is not None and model.deltas:
                yield _beside(model, row)
    if (idle := model.delta("100%")) is not None:
        yield Goal(model.model, "100%: no byte moved", format_bytes(idle.moved_bytes or 0), idle.moved_bytes == 0)
    yield from _budgets(model)
    if model.deltas:
        alike = all(row.gradients == IDENTICAL for row in model.deltas)
        yield Goal(model.model, "gradients are plain's, bit for bit", "identical" if alike else "different", alike)


def _times(model: ModelResult, device: str) -> Iterator[Goal]:
    most = dict(TIME_RATIOS[device.partition(":")[0]].get(model.model, {}))
    if device == "cpu" or model.plain.step_time_ns > SHORT_STEP_NS:
        most = {"100%": IDLE_RATIO, **most}
    for budget, ratio in most.items():
        if (row := model.delta(budget)) is not None:
            text = f"{budget}: step time at most {ratio:.2f} of plain"
            yield Goal(model.model, text, f"{row.time_ratio:.3f}", row.time_ratio <= ratio)


def _beside(model: ModelResult, rival: Row) -> Goal:
    """Of Delta's rows that take no more memory the fastest counts."""
    text = f"faster than {rival.way} at no more memory"
    peak_bytes = rival.peak_allocated_bytes
    rows = [row for row in model.deltas if row.peak_allocated_bytes is not None]
    if peak_bytes is None or not rows:
        return Goal(model.model, text, "not measured", None)
    no_more = [row for row in rows if (row.peak_allocated_bytes or 0) <= peak_bytes]
    if not no_more:
        more_bytes = min(row.peak_allocated_bytes or 0 for row in rows) - peak_bytes
        return Goal(model.model, text, f"takes {format_bytes(more_bytes)} more than {format_bytes(peak_bytes)}", False)
    best = min(no_more, key=lambda row: row.time_ratio)
    measured = f"{best.way}: {best.time_ratio:.3f} against {rival.time_ratio:.3f}"
    return Goal(model.model, text, measured, best.time_ratio < rival.time_ratio)


def _budgets(model: ModelResult) -> Iterator[Goal]:
    """The limit is what Delta was told, or the share of what plain was counted to hold. Held to it is the larger of
    what was counted, in two of the steps, and of what Delta reports of all of them."""
    shares = [(row, limit) for row in model.deltas if (limit := _limit_bytes(model, row)) is not None]
    if shares:
        worst, limit = max(shares, key=lambda pair: _peak_bytes(pair[0]) / pair[1])
        over = _peak_bytes(worst) / limit
        yield Goal(model.model, "saved activations within every budget", f"{worst.way}: {over:.3f} of it", over <= 1)
    reserved = [ratio for row in model.deltas if (ratio := _reserved_ratio(row)) is not None]
    if reserved:
        most = max(RESERVED_RATIO, _reserved_ratio(model.plain) or 0.0)  # nobody caps them under `activations=`
        text = f"reserved at most {RESERVED_RATIO:.2f} of allocated, or as much of it as plain's"
        yield Goal(model.model, text, f"{max(reserved):.3f} ({most:.3f})", max(reserved) <= most)


def _peak_bytes(row: Row) -> int:
    return max(row.counted_peak_bytes or 0, row.reported_peak_bytes or 0)


def _reserved_ratio(row: Row) -> float | None:
    if row.peak_reserved_bytes is None or not row.peak_allocated_bytes:
        return None
    return row.peak_reserved_bytes / row.peak_allocated_bytes


def _limit_bytes(model: ModelResult, row: Row) -> int | None:
    if row.counted_peak_bytes is None or not model.plain.counted_peak_bytes:
        return None
    wanted = parse_size(row.way.removeprefix(DELTA), what="budgets")
    return wanted.of(model.plain.counted_peak_bytes)
