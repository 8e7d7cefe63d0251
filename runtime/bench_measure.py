"""The benchmark: one training in several ways, a process for each, all taking turns step by step.

What is compared is fixed here: the ratio of medians after the warm-up, over the same minutes of the same machine; the
peak of saved activations, counted in the process itself and not by Delta; the bits of every gradient of every step.

Not covered: how it is shown (`bench_view`) and which pages it goes to (`bench_pages`).
"""

import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from delta.errors import DeltaError
from delta.policies.loader import load
from delta.runtime import monitor
from delta.runtime.demo import DemoOptions, Side, side_from
from delta.runtime.demo_process import WorkerProcess
from delta.runtime.demo_worker import Spec
from delta.runtime.device import make_device
from delta.units import Share, format_bytes, parse_size

WARM_UP_STEPS = 3  # first-touch page faults, Delta observing and refining its plan


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train. ``mode`` and ``activations`` as in `Spec`."""

    name: str
    mode: str
    activations: str | None = None


def ways(activations: str) -> tuple[Way, ...]:
    """All ways that are compared, with that limit; the first one is what the others are compared with. DeltaError for
    a limit of 100%, which is measured always."""
    if parse_size(activations, what="activations") == Share(1.0):
        raise DeltaError(f"activations={activations!r}: that is measured always; give another limit, such as 40%")
    return (
        Way("plain", "plain"),
        Way("delta 100%", "delta", "100%"),
        Way(f"delta {activations}", "delta", activations),
        Way("checkpoint", "checkpoint"),
        Way("save_on_cpu", "save_on_cpu"),
    )


def spec(way: Way, options: DemoOptions) -> Spec:
    """What the process of that way is told. Only the one under the limit writes a timeline, if one is asked for."""
    timeline = options.timeline if way.activations == options.activations and options.timeline else None
    return replace(options.spec(way.mode), activations=way.activations, timeline=timeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one way. A ratio is over plain; the range is that of the ratios of single steps.

    ``counted_peak_bytes``: saved activations on the device at most, counted in the first step and after the last one;
    None where they cannot be counted from outside. ``moved_bytes``: copies out and back, all steps; None where nobody
    counts them. The figures after it are Delta's own, all steps.
    """

    way: str
    step_time_ns: int
    time_ratio: float
    time_ratio_least: float
    time_ratio_most: float
    peak_rss_bytes: int
    rss_ratio: float
    peak_device_bytes: int | None
    device_ratio: float | None
    counted_peak_bytes: int | None
    activation_ratio: float | None
    gradients_identical: bool
    moved_bytes: int | None
    recomputed_bytes: int | None
    reported_peak_bytes: int | None
    modes: Mapping[str, int] | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All rows, and where they come from."""

    options: DemoOptions
    machine: Mapping[str, str]
    rows: tuple[Row, ...]

    def row(self, way: str) -> Row:
        return next(row for row in self.rows if row.way == way)

    @property
    def limited(self) -> Row:
        """The run under the limit."""
        return self.row(f"delta {self.options.activations}")

    @property
    def gradients_identical(self) -> bool:
        """Whether Delta's gradients are those of plain PyTorch, all of them, bit for bit."""
        return all(row.gradients_identical for row in self.rows if row.way.startswith("delta"))

    def as_dict(self) -> dict[str, Any]:
        """The result, JSON-ready."""
        return {"gradients_identical": self.gradients_identical, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BenchResult":
        """What `as_dict` gave, also after a round through JSON. Raises DeltaError for anything else."""
        try:
            rows = tuple(Row(**{**row, "warnings": tuple(row["warnings"])}) for row in values["rows"])
            return cls(options=DemoOptions(**values["options"]), machine=values["machine"], rows=rows)
        except (KeyError, TypeError) as error:
            raise DeltaError(f"this is not a result of the benchmark: {error!r} in it") from error


def measure(options: DemoOptions, on_step: Callable[[str], None] = lambda way: None) -> BenchResult:
    """Train in every way; ``on_step`` gets the way after each step. ``options.steps`` are those that are timed.

    Raises DeltaError if a process fails.
    """
    compared = ways(options.activations)
    machine = machine_facts(options)  # before there are other processes: it measures the link to the host
    answers: dict[str, list[dict[str, Any]]] = {way.name: [] for way in compared}
    with ExitStack() as stack:
        workers = {way.name: stack.enter_context(WorkerProcess(spec(way, options))) for way in compared}
        for worker in workers.values():
            worker.wait_ready()
        for name, index, count in turns(list(workers), options.steps):
            answers[name].append(workers[name].ask({"do": "step", "index": index, "count": count}))
            on_step(name)
        ends = {name: worker.ask({"do": "finish"}) for name, worker in workers.items()}
    sides = {
        name: replace(side_from(answers[name], end), counted_peak_bytes=_counted(answers[name]))
        for name, end in ends.items()
    }
    return BenchResult(options=options, machine=machine, rows=tuple(_row(name, sides) for name in sides))


def step_count(timed_steps: int) -> int:
    """Steps that each process does in all: warm-up, timed ones, and one in which saved activations are counted."""
    return WARM_UP_STEPS + timed_steps + 1


def turns(names: Sequence[str], timed_steps: int) -> Iterator[tuple[str, int, bool]]:
    """Who does which step, in order, and whether saved activations are counted in it: never in a timed one.

    Each round begins with another way: whatever the first of a round has against it, all have.
    """
    last = step_count(timed_steps) - 1
    for index in range(last + 1):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            yield name, index, index in (0, last)


def _row(name: str, sides: Mapping[str, Side]) -> Row:
    side, plain = sides[name], next(iter(sides.values()))
    times_ns, plain_ns = _timed(side), _timed(plain)
    ratios = [mine / theirs for mine, theirs in zip(times_ns, plain_ns, strict=True)]
    report = side.report
    return Row(
        way=name,
        step_time_ns=int(median(times_ns)),
        time_ratio=median(times_ns) / median(plain_ns),
        time_ratio_least=min(ratios),
        time_ratio_most=max(ratios),
        peak_rss_bytes=side.peak_rss_bytes,
        rss_ratio=side.peak_rss_bytes / plain.peak_rss_bytes,
        peak_device_bytes=side.peak_device_bytes,
        device_ratio=_over(side.peak_device_bytes, plain.peak_device_bytes),
        counted_peak_bytes=side.counted_peak_bytes,
        activation_ratio=_over(side.counted_peak_bytes, plain.counted_peak_bytes),
        gradients_identical=(side.gradients, side.parameters) == (plain.gradients, plain.parameters),
        moved_bytes=_moved(name, report),
        recomputed_bytes=None if report is None else int(report["recomputed_bytes"]),
        reported_peak_bytes=None if report is None else int(report["peak_activation_bytes"]),
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
    return None if name == "save_on_cpu" else 0


def machine_facts(options: DemoOptions) -> dict[str, str]:
    """What a reader has to know to compare: hardware, versions, commit, day. Each fact is a text."""
    facts = {"processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores"}
    facts["memory"] = format_bytes(monitor.host_facts().total_bytes)
    if options.device != "cpu":
        facts["cards"] = monitor.gpus().text
    facts["host tier"] = _link(options)
    facts["system"] = platform.platform(terse=True)
    facts["versions"] = f"Python {platform.python_version()}, torch {torch.__version__}"
    return {**facts, "commit": _commit(), "day": datetime.now(UTC).date().isoformat()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _link(options: DemoOptions) -> str:
    device = make_device(options.device, load(options.policy).host)
    try:
        speed = device.bandwidth()
    finally:
        device.close()
    where = "spill file" if device.kind == "cpu" else "pinned memory"
    return f"{where}, {format_bytes(int(speed.out_bytes_per_s))}/s out, {format_bytes(int(speed.in_bytes_per_s))}/s in"


def _commit() -> str:
    """The commit of the checkout this file is in; with a + where the files differ from it."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
