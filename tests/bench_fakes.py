"""Processes of the benchmark that are none, and results made from them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from delta.errors import DeltaError
from delta.runtime import side_by_side
from delta.runtime.bench import measure as measuring
from delta.runtime.bench.measure import measure
from delta.runtime.bench.options import CUDA_WAYS, BenchOptions
from delta.runtime.bench.result import BenchResult, ModelResult, Row
from delta.runtime.demo_worker import Spec
from delta.runtime.tracing import Recorded, plain_spec
from delta.simulate.floor import Floor
from delta.trace import Trace

TINY = BenchOptions(models=("byte-gpt",), budgets=("100%", "40%"), ways=CUDA_WAYS, steps=2, threads=1, quick=True)
FACTS = {"processor": "fast", "commit": "abc"}
FACTORS = {"plain": 100, "checkpoint": 130, "delta 100%": 110, "delta 40%": 120}
ALLOCATED = {"plain": 5000, "checkpoint": 3000, "delta 40%": 2900}


class NoProcess:
    """What stands for a `WorkerProcess` and starts nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_ready(self) -> None:
        pass


class FakeWorker(NoProcess):
    """Step times are `FACTORS` per step number, those of plain steps beside as plain's. A counted step seems to take no
    time. save_on_cpu fails in step 3."""

    def __init__(self, told: Spec, settings: Mapping[str, str] | None = None) -> None:
        self.told = told
        self.name = told.mode if told.activations is None else f"{told.mode} {told.activations}"

    def wait_ready(self) -> None:
        if self.told.mode == "sac":
            raise DeltaError("no blocks")

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        delta_side = self.told.mode == "delta"
        if request["do"] == "finish":
            report = {"swapped_out_bytes": 3, "swapped_in_bytes": 4, "recomputed_bytes": 5, "peak_activation_bytes": 6}
            report |= {"modes": {"idle": 7}, "warnings": ["of budgets"], "budget_bytes": 400}
            end = {"parameters": "p", "start_rss_bytes": 1, "peak_rss_bytes": 70 if delta_side else 100}
            end |= {
                "host_peak_bytes": 3 if delta_side else None,
                "peak_device_bytes": None,
                "peak_reserved_bytes": None,
            }
            end["counted_peak_bytes"] = 1000 if self.told.mode == "plain" else None
            return end | {"rss_method": "m", "report": report if delta_side else None}
        if self.told.mode == "save_on_cpu" and request["index"] == 3:
            raise DeltaError("killed\nin pieces")
        if "row" in request["do"]:
            return {"time_ns": 100 if request["do"] == "plain row" else FACTORS.get(self.name, 100)}
        counted, plain = request.get("count"), request["do"] == "plain step"
        time_ns = 1 if counted else (100 if plain else FACTORS.get(self.name, 100)) * (request["index"] + 1)
        answer: dict[str, Any] = {"time_ns": time_ns, "passes_ns": time_ns // 2, "loss": "0x1p+0", "gradients": "g"}
        if counted:
            nbytes = {"40%": 380 + request["index"]}.get(self.told.activations or "", 1000)
            answer["counted_peak_bytes"] = nbytes if self.told.mode in ("plain", "delta") else None
        if request.get("allocated"):
            answer["allocated_peak_bytes"] = ALLOCATED.get(self.name, 5000)
        return answer


def fake_floors(trace: Trace, policy: object, budgets: list[object], link: object) -> list[Floor]:
    """Of the two budgets of `TINY`: nothing, and a fifth of forward and backward, which are half of plain's step."""
    return [Floor(extra_ns, 400, 10, 10) for extra_ns in (0, 80)]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the benchmark talk to them."""
    trace: Any = type("FakeTrace", (), {"link": None})()
    monkeypatch.setattr(side_by_side, "WorkerProcess", FakeWorker)
    monkeypatch.setattr(measuring, "record", lambda spec: Recorded(trace, trace))
    monkeypatch.setattr(measuring, "floors", fake_floors)


def measured_with_fakes() -> BenchResult:
    """What the benchmark makes of them, once they are installed."""
    model = measure(TINY, "byte-gpt")
    return BenchResult(options=TINY, machine=FACTS, command="scripts/bench --quick", models=(model,))


def with_row(result: BenchResult, way: str, **changes: Any) -> BenchResult:
    """The result with other figures in one row of its first model."""
    model = result.models[0]
    rows = tuple(replace(row, **changes) if row.way == way else row for row in model.rows)
    return replace(result, models=(replace(model, rows=rows), *result.models[1:]))


def row(way: str, **figures: Any) -> Row:
    values: dict[str, Any] = {"step_time_ns": 100_000_000, "time_ratio": 1.0, "gradients": "identical"}
    values |= {"time_ratio_least": 1.0, "time_ratio_most": 1.0, "peak_rss_bytes": 1, "rss_ratio": 1.0}
    return Row(way=way, **values | figures)


def result_of(device: str, model: str, *rows: Row) -> BenchResult:
    """A result of one model; its options are those of a CPU, with another device, and not quick."""
    options = replace(TINY, models=(model,), device=device, quick=False)
    return BenchResult(
        options=options, machine=FACTS, command="c", models=(ModelResult(model=model, sizes={"batch": 2}, rows=rows),)
    )


def spec(**changes: Any) -> Spec:
    """A tiny training of the demo's GPT."""
    return replace(plain_spec("byte-gpt", TINY.sizes("byte-gpt"), threads=1), **changes)


def names(paths: list[Path], root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in paths)
