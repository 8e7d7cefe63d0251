"""What the simulator foretells of a training, beside what the training really does.

A step of the plain program is traced, and simulated under each policy and the same budget. Then each policy trains in a
process of its own, in turn with a plain one: peaks, times and bits are compared. Times are those of forward and
backward, which is what a trace covers.

Not covered: how it is shown (`predict`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from delta.config import Policy
from delta.engine import MISSED
from delta.errors import DeltaError
from delta.policies.loader import load, names
from delta.runtime import zoo
from delta.runtime.demo_process import KEEPS_PAGES, SETTLING_STEPS, WARM_UP_STEPS, WorkerProcess
from delta.runtime.demo_worker import Spec
from delta.runtime.facts import machine_facts
from delta.runtime.tracing import plain_spec, record
from delta.simulate import Run, simulate
from delta.types import Action
from delta.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A policy. Peaks are those of saved activations over all steps: ``counted_peak_bytes`` in a step after the timed
    ones from outside of Delta, ``peak_bytes`` in all steps as Delta reports it. Overheads are step time over plain;
    ``predicted_overhead`` is None where the simulated run did not end, ``status`` says how."""

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
    done: Callable[[str], None] = lambda _: None,
) -> Prediction:
    """Trace, simulate and measure; ``done`` gets each policy once it is measured. DeltaError if a process fails."""
    facts = machine_facts()
    trace = record(spec).trace
    rows = []
    for policy in policies:
        run = simulate(trace, on_this_device(policy), parse_size(activations, what="activations"), trace.link)
        limited = replace(spec, mode="delta", policy=policy, activations=activations)
        rows.append(_measure(spec, limited, run, timed_steps))
        done(policy)
    return Prediction(
        model=spec.model,
        batch=spec.sizes["batch"],
        activations=activations,
        timed_steps=timed_steps,
        threads=spec.threads,
        machine=facts,
        rows=tuple(rows),
    )


def _measure(plain: Spec, limited: Spec, run: Run, timed_steps: int) -> Row:
    last = WARM_UP_STEPS + timed_steps
    answers: dict[str, list[dict[str, Any]]] = {"plain": [], "delta": []}
    with ExitStack() as stack:
        workers = {spec.mode: stack.enter_context(WorkerProcess(spec, KEEPS_PAGES)) for spec in (plain, limited)}
        for worker in workers.values():
            worker.wait_ready()
        for index in range(last + 1):
            for mode in sorted(workers, reverse=bool(index % 2)):
                asked = {"do": "step", "index": index, "count": index == last, "settle": index in SETTLING_STEPS}
                answers[mode].append(workers[mode].ask(asked))
        report = workers["delta"].ask({"do": "finish"})["report"]

    def passes_ns(mode: str) -> float:
        return float(median(answer["passes_ns"] for answer in answers[mode][WARM_UP_STEPS:last]))

    def same(what: str) -> bool:
        return [answer[what] for answer in answers["plain"]] == [answer[what] for answer in answers["delta"]]

    return Row(
        policy=limited.policy,
        gradients_identical=same("gradients"),
        losses_identical=same("loss"),
        limit_bytes=run.budget_bytes,
        peak_bytes=int(report["peak_activation_bytes"]),
        counted_peak_bytes=answers["delta"][last]["counted_peak_bytes"],
        predicted_peak_bytes=run.peak_bytes,
        overhead=passes_ns("delta") / passes_ns("plain"),
        predicted_overhead=run.overhead,
        status=str(run.status),
    )
