"""What the simulator foretells of a training, beside what the training really does.

A step of the plain program is traced, and simulated under each policy and the same budget. Then each policy trains in a
process of its own, all in turn with plain ones: peaks, times and bits are compared. Times are those of forward and
backward, which is what a trace covers. Where a process has its memory makes one up to a tenth slower than another that
does the same, for as long as it lives, so it is done with several, plain ones too.

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
from delta.runtime.bench.measure import fitting, groups, rounds
from delta.runtime.bench.options import PLAIN
from delta.runtime.demo_process import KEEPS_PAGES, SETTLING_STEPS, WARM_UP_STEPS, WorkerProcess
from delta.runtime.demo_worker import Spec
from delta.runtime.facts import machine_facts
from delta.runtime.tracing import plain_spec, record
from delta.simulate import Run, simulate
from delta.types import Action
from delta.units import parse_size

PLAINS = tuple(f"{PLAIN}-{number}" for number in range(3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A policy. Peaks are those of saved activations over all steps and processes: ``counted_peak_bytes`` in a step
    after the timed ones from outside of Delta, ``peak_bytes`` in all steps as Delta reports it. Overheads are step time
    over plain, the median of the processes; ``predicted_overhead`` is None where the simulated run did not end,
    ``status`` says how."""

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
    processes: int
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
    processes: int = 1,
    done: Callable[[str], None] = lambda _: None,
) -> Prediction:
    """Trace, simulate and measure, with that many processes for each policy; ``done`` is told how far it has come.

    DeltaError if a process fails.
    """
    facts = machine_facts()
    recorded = record(spec)
    trace, budget = recorded.trace, parse_size(activations, what="activations")
    runs = {
        policy: simulate(trace, on_this_device(policy), budget, trace.link, first=recorded.first) for policy in policies
    }
    done(f"{spec.model}: traced and simulated")
    found: dict[str, list[_Found]] = {policy: [] for policy in policies}
    together = groups(policies, max(2, 1 + fitting(recorded.process_bytes, spec.device) - len(PLAINS)))
    for number in range(processes):
        for group in together:
            limited = {name: replace(spec, mode="delta", policy=name, activations=activations) for name in group}
            for policy, one in _train(spec, limited, timed_steps).items():
                found[policy].append(one)
        done(f"{spec.model}: {number + 1} of {processes} processes")
    rows = [_row(policy, runs[policy], found[policy]) for policy in policies]
    return Prediction(
        model=spec.model,
        batch=spec.sizes["batch"],
        activations=activations,
        timed_steps=timed_steps,
        processes=processes,
        threads=spec.threads,
        machine=facts,
        rows=tuple(rows),
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """What one process under a policy did, beside the plain ones."""

    same_gradients: bool
    same_losses: bool
    peak_bytes: int
    counted_peak_bytes: int
    overhead: float


def _train(plain: Spec, limited: Mapping[str, Spec], timed_steps: int) -> dict[str, _Found]:
    """Plain processes and one under each policy, in turn; each round begins with another."""
    last = WARM_UP_STEPS + timed_steps
    specs = {**dict.fromkeys(PLAINS, plain), **limited}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(WorkerProcess(spec, KEEPS_PAGES)) for name, spec in specs.items()}
        for worker in workers.values():
            worker.wait_ready()
        for name, index in rounds(list(specs), last + 1):
            asked = {"do": "step", "index": index, "count": index == last, "settle": index in SETTLING_STEPS}
            answers[name].append(workers[name].ask(asked))
        reports = {name: workers[name].ask({"do": "finish"})["report"] for name in limited}

    def overhead(name: str) -> float:
        timed = range(WARM_UP_STEPS, last)
        plain_ns = [median(answers[each][index]["passes_ns"] for each in PLAINS) for index in timed]
        return float(median(answers[name][index]["passes_ns"] for index in timed) / median(plain_ns))

    def same(name: str, what: str) -> bool:
        return [answer[what] for answer in answers[name]] == [answer[what] for answer in answers[PLAINS[0]]]

    return {
        name: _Found(
            same_gradients=same(name, "gradients"),
            same_losses=same(name, "loss"),
            peak_bytes=int(reports[name]["peak_activation_bytes"]),
            counted_peak_bytes=answers[name][last]["counted_peak_bytes"],
            overhead=overhead(name),
        )
        for name in limited
    }


def _row(policy: str, run: Run, found: Sequence[_Found]) -> Row:
    return Row(
        policy=policy,
        gradients_identical=all(one.same_gradients for one in found),
        losses_identical=all(one.same_losses for one in found),
        limit_bytes=run.budget_bytes,
        peak_bytes=max(one.peak_bytes for one in found),
        counted_peak_bytes=max(one.counted_peak_bytes for one in found),
        predicted_peak_bytes=run.peak_bytes,
        overhead=median(one.overhead for one in found),
        predicted_overhead=run.overhead,
        status=str(run.status),
    )
