"""The benchmark's figures, to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from delta.errors import DeltaError
from delta.runtime.bench.options import PLAIN, BenchOptions

IDENTICAL, DIFFERENT = "identical", "different"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one way. A ratio is over plain; that of times is the median of those of single steps, each to the
    plain step beside it, and ``least`` and ``most`` are their range.

    Peaks: ``counted_peak_bytes`` of saved activations on the device, counted outside of Delta in the first step and in
    a planned one; ``peak_allocated_bytes`` of all that was allocated, by CUDA's allocator in all steps before the timed
    ones, by PyTorch's profiler in that planned step on a CPU; ``host_bytes`` of what was moved to the host; None where
    they cannot be seen. ``host_time_ns``: what the host takes for forward and backward of a step, on CUDA.
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
    """All rows of one model. ``missing``: way -> why it has none."""

    model: str
    sizes: Mapping[str, int]
    rows: tuple[Row, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

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
        return tuple(row for row in self.rows if row.way.startswith("delta "))


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


def _model(values: Mapping[str, Any]) -> ModelResult:
    rows = tuple(Row(**{**row, "warnings": tuple(row["warnings"])}) for row in values["rows"])
    return ModelResult(**{**values, "rows": rows})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
