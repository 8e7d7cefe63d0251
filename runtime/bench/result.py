"""The benchmark's figures, to and from JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from delta.errors import DeltaError
from delta.runtime.bench.options import PLAIN, BenchOptions

IDENTICAL, DIFFERENT = "identical", "different"
DELTA = "delta "  # how the names of its ways begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one way. A ratio is over plain; that of times is the median of those of single steps, each to the
    plain step beside it, and ``least`` and ``most`` are their range; ``row_ratio`` that of rows of steps that nobody
    waits for, on CUDA.

    Peaks: ``counted_peak_bytes`` of saved activations on the device, counted outside of Delta in the first step and in
    a planned one, plain's with its largest batch, too; ``peak_allocated_bytes`` of all that was allocated, by CUDA's
    allocator in all steps before the timed ones, by PyTorch's profiler in that planned step on a CPU; ``host_bytes`` of
    what was moved to the host; None where they cannot be seen. ``host_time_ns``: what the host takes for forward and
    backward of a step, on CUDA.
    ``floor_ratio``: the step time over plain's that this model and budget need at least. ``moved_bytes``: copies out
    and back, all steps.
    """

    way: str
    step_time_ns: int
    time_ratio: float
    time_ratio_least: float
    time_ratio_most: float
    gradients: str
    peak_rss_bytes: int
    rss_ratio: float
    floor_ratio: float | None = None
    row_ratio: float | None = None
    counted_peak_bytes: int | None = None
    activation_ratio: float | None = None
    peak_allocated_bytes: int | None = None
    allocated_ratio: float | None = None
    peak_reserved_bytes: int | None = None
    host_bytes: int | None = None
    host_time_ns: int | None = None
    moved_bytes: int | None = None
    recomputed_bytes: int | None = None
    reported_peak_bytes: int | None = None
    budget_bytes: int | None = None
    modes: Mapping[str, int] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """All rows of one model. ``missing``: way -> why it cannot be taken here; ``failed``: way -> what went wrong."""

    model: str
    sizes: Mapping[str, int]
    rows: tuple[Row, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def row(self, way: str) -> Row | None:
        return next((row for row in self.rows if row.way == way), None)

    @property
    def plain(self) -> Row:
        found = self.row(PLAIN)
        assert found is not None
        return found

    def delta(self, budget: str) -> Row | None:
        """The row of Delta under a budget."""
        return self.row(f"delta {budget}")

    @property
    def deltas(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.way.startswith(DELTA))

    @property
    def failed_deltas(self) -> tuple[str, ...]:
        return tuple(way for way in self.failed if way.startswith(DELTA))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All models, and where the figures come from."""

    options: BenchOptions
    machine: Mapping[str, str]
    command: str
    models: tuple[ModelResult, ...]

    def model(self, name: str) -> ModelResult | None:
        return next((found for found in self.models if found.model == name), None)

    @property
    def gradients_identical(self) -> bool:
        """Whether Delta's gradients are those of plain PyTorch, all of them, bit for bit."""
        return all(row.gradients == IDENTICAL for model in self.models for row in model.deltas)

    @property
    def succeeded(self) -> bool:
        """Whether plain and Delta trained every model in every way that was asked for, to the same bits."""
        trained = all(model.rows and not model.failed_deltas for model in self.models)
        return trained and self.gradients_identical

    @classmethod
    def joined(cls, results: Sequence[BenchResult]) -> BenchResult:
        """One result of several that differ in their models only; of a model that is in two, the later. For machines
        that are to be had for less time than all models take. Raises DeltaError where anything else differs."""
        first, *others = results
        for other in others:
            for name, mine, its in [*_facts(first, other), *_settings(first, other)]:
                if mine != its:
                    raise DeltaError(f"results of different runs cannot be one: {name} is {mine!r} and {its!r}")
        models = tuple({model.model: model for result in results for model in result.models}.values())
        return replace(
            first,
            options=replace(first.options, models=tuple(model.model for model in models)),
            command="; ".join(dict.fromkeys(result.command for result in results)),
            models=models,
        )

    def as_dict(self) -> dict[str, Any]:
        """The result, JSON-ready."""
        return {"gradients_identical": self.gradients_identical, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> BenchResult:
        """What `as_dict` gave, also after a round through JSON. Raises DeltaError for anything else."""
        try:
            options = {name: _tuple(value) for name, value in values["options"].items()}
            return cls(
                options=BenchOptions(**options),
                machine=values["machine"],
                command=values["command"],
                models=tuple(_model(model) for model in values["models"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DeltaError(f"this is not a result of the benchmark: {error!r} in it") from error


_OF_THE_RUN = ("host tier", "day")  # measured anew each time


def _facts(one: BenchResult, other: BenchResult) -> Iterator[tuple[str, Any, Any]]:
    """What both know of their machines."""
    for name in {**one.machine, **other.machine}:
        if name not in _OF_THE_RUN:
            yield name, one.machine.get(name), other.machine.get(name)


def _settings(one: BenchResult, other: BenchResult) -> Iterator[tuple[str, Any, Any]]:
    """What was asked of both, models left out."""
    for each in fields(BenchOptions):
        if each.name != "models":
            yield each.name, getattr(one.options, each.name), getattr(other.options, each.name)


def _model(values: Mapping[str, Any]) -> ModelResult:
    rows = tuple(Row(**{**row, "warnings": tuple(row["warnings"])}) for row in values["rows"])
    return ModelResult(**{**values, "rows": rows})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
