"""What the simulator foretells of a training, beside what the training really does.

A step of the plain program is traced, and simulated under each policy and the same budget. Then each policy trains in a
process of its own, in turns with a plain training there: peaks, times and bits are compared. Times are those of forward
and backward, which is what a trace covers.

Not covered: how it is shown (`predict`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from delta.config import Policy
from delta.engine import MISSED
from delta.errors import DeltaError
from delta.policies.loader import load, names
from delta.runtime import zoo
from delta.runtime.demo_worker import Spec
from delta.runtime.facts import machine_facts
from delta.runtime.side_by_side import Trained, train
from delta.runtime.tracing import plain_spec, record
from delta.simulate import Run, simulate
from delta.types import Action
from delta.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A policy. Peaks are those of saved activations: ``counted_peak_bytes`` from outside of Delta in the first step
    and in a planned one, ``peak_bytes`` in all steps as Delta reports it. Overheads are the time of forward and
    backward over plain's; ``predicted_overhead`` is None where the simulated run did not end, ``status`` says how."""

    policy: str
    gradients_identical: bool
    losses_identical: bool
    limit_bytes: int
    peak_bytes: int
    counted_peak_bytes: int
    predicted_peak_bytes: int
    overhead: float
    predicted_overhead: float | None
    status: str

    @property
    def held(self) -> bool:
        """Whether the budget was held, counted either way, as exactly as the engine promises (`MISSED`)."""
        return max(self.peak_bytes, self.counted_peak_bytes) <= MISSED * self.limit_bytes

    @property
    def peak_difference(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted_peak_bytes / self.peak_bytes - 1

    @property
    def overhead_points(self) -> float | None:
        """Predicted less measured overhead, in percentage points."""
        return None if self.predicted_overhead is None else 100 * (self.predicted_overhead - self.overhead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """All rows of one model, and where they come from."""

    model: str
    batch: int
    activations: str
    timed_steps: int
    threads: int
    machine: Mapping[str, str]
    command: str
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Prediction:
        """What `as_dict` gave, also after a round through JSON. Raises DeltaError for anything else."""
        try:
            return cls(**{**values, "rows": tuple(Row(**row) for row in values["rows"])})
        except (KeyError, TypeError) as error:
            raise DeltaError(f"this is not a result of scripts/predict: {error!r} in it") from error


def evicting() -> tuple[str, ...]:
    """The shipped policies that may evict."""
    return tuple(name for name in names() if set(load(name).director.actions) != {Action.KEEP})


def on_this_device(name: str) -> Policy:
    """The policy as it works on a CPU device, which has no addresses: storages go one by one (policies/coop.yaml)."""
    return load(name, overrides={"filter.choose": "one"})


def base_spec(model: str, batch: int, threads: int) -> Spec:
    """A plain training of the model, with its sizes for a CPU."""
    sizes = {**zoo.sizes(model, "cpu"), "batch": batch}
    return plain_spec(model, sizes, threads=threads)


def predict(
    spec: Spec,
    policies: Sequence[str],
    activations: str,
    timed_steps: int,
    command: str,
    done: Callable[[str], None] = lambda _: None,
) -> Prediction:
    """Trace, simulate and measure; ``command`` is what asked for it, ``done`` is told how far it has come.

    DeltaError if a process fails.
    """
    facts = machine_facts()
    recorded = record(spec)
    trace, budget = recorded.trace, parse_size(activations, what="activations")
    runs = {
        policy: simulate(trace, on_this_device(policy), budget, trace.link, first=recorded.first) for policy in policies
    }
    done(f"{spec.model}: traced and simulated")
    plain = train(spec, timed_steps)
    rows: list[Row] = []
    for policy in policies:
        limited = replace(spec, mode="delta", policy=policy, activations=activations)
        rows.append(_row(policy, runs[policy], train(limited, timed_steps), plain))
        done(f"{spec.model}: {policy}")
    return Prediction(
        model=spec.model,
        batch=spec.sizes["batch"],
        activations=activations,
        timed_steps=timed_steps,
        threads=spec.threads,
        machine=facts,
        command=command,
        rows=tuple(rows),
    )


def _row(policy: str, run: Run, found: Trained, plain: Trained) -> Row:
    def same(what: str) -> bool:
        return [step[what] for step in found.steps] == [step[what] for step in plain.steps]

    assert found.counted_peak_bytes is not None
    return Row(
        policy=policy,
        gradients_identical=same("gradients"),
        losses_identical=same("loss"),
        limit_bytes=run.budget_bytes,
        peak_bytes=int(found.end["report"]["peak_activation_bytes"]),
        counted_peak_bytes=found.counted_peak_bytes,
        predicted_peak_bytes=run.peak_bytes,
        overhead=median(found.ratios("passes_ns")),
        predicted_overhead=run.overhead,
        status=str(run.status),
    )
