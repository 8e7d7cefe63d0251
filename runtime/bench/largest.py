"""``scripts/bench max-batch``: the largest batch that trains under a limit, and what it still gets done.

A trial is some steps with one batch size in a process of its own. The limit is of what the device's allocator reserves
on CUDA, for all ways alike: plain and the ways of today run under an allocator that is capped there, Delta with a
budget so much smaller that what it lets be reserved beyond it is within the limit. On a CPU it is the most bytes of
saved activations, which can be counted for plain and for Delta only.

Whether a batch fits, three steps tell. How fast it is, is timed later, when Delta has observed the step, refined its
plan and follows it; what is timed has to fit in all those steps, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from delta.errors import BudgetError, DeltaError
from delta.policies.loader import load
from delta.runtime import zoo
from delta.runtime.bench.search import largest
from delta.runtime.demo_process import HEAP, OutOfMemory, WorkerProcess
from delta.runtime.demo_worker import Spec
from delta.runtime.device.reserve import RESERVED_RATIO
from delta.runtime.side_by_side import SETTLING_STEPS, STEPS_BEFORE
from delta.runtime.tracing import plain_spec
from delta.runtime.ways import unavailable
from delta.units import Bytes, at_least_one, parse_size

PLAIN = "plain"
SHARE = 0.9  # of plain's samples per second: what the papers' tables hold a batch to
OTHERS = ("checkpoint", "sac", "save_on_cpu", "offloader")
STEPS = 5
_FITTING_STEPS = 3
COUNTED_ON_CPU = "on a CPU its saved activations cannot be counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestOptions:
    """What is searched. Raises DeltaError for what cannot be. ``limit``: bytes such as 8GiB."""

    models: tuple[str, ...]
    limit: str
    policies: tuple[str, ...] = ("delta",)
    ways: tuple[str, ...] = ()
    steps: int = STEPS
    most: int = 65536
    precision: float = 0.03
    threads: int = 2
    seed: int = 0
    device: str = "cpu"
    quick: bool = False
    autocast: bool = False

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, most=self.most, threads=self.threads)
        if not isinstance(parse_size(self.limit, what="limit", error=BudgetError), Bytes):
            raise DeltaError(f"limit={self.limit!r}: give bytes, such as 8GiB")
        if unknown := [way for way in self.ways if way not in OTHERS]:
            raise DeltaError(f"way={unknown[0]!r}: known are {', '.join(OTHERS)}")
        for policy in self.policies:
            load(policy)
        for model in self.models:
            self.sizes(model)

    @property
    def limit_bytes(self) -> int:
        wanted = parse_size(self.limit, what="limit", error=BudgetError)
        assert isinstance(wanted, Bytes)
        return wanted.nbytes

    def sizes(self, model: str) -> dict[str, int]:
        return zoo.sizes(model, self.device, tiny=self.quick)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one batch size. ``samples_per_s`` is None where it was not timed; ``why`` says in which way it did
    not fit."""

    batch: int
    peak_bytes: int | None
    samples_per_s: float | None = None
    why: str = ""

    @property
    def fits(self) -> bool:
        return not self.why


@dataclass(frozen=True, slots=True)
class Found:
    """The largest batch of a way, and the largest one with at least `SHARE` of plain's samples per second.

    0 is none. The ratios are over plain's largest batch and its samples per second.
    """

    model: str
    way: str
    batch: int
    samples_per_s: float
    batch_ratio: float
    speed_ratio: float
    fast_batch: int
    fast_batch_ratio: float
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestResult:
    """All ways of all models. ``missing``: way -> why it was not searched; ``failed``: model and way -> what went
    wrong."""

    options: LargestOptions
    machine: Mapping[str, str]
    command: str
    found: tuple[Found, ...]
    missing: Mapping[str, str]
    failed: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> LargestResult:
        """What `as_dict` gave, also after a round through JSON. Raises DeltaError for anything else."""
        try:
            lists = {key: tuple(value) for key, value in values["options"].items() if isinstance(value, list | tuple)}
            options = LargestOptions(**{**values["options"], **lists})
            found = tuple(
                Found(**{**one, "trials": tuple(Trial(**trial) for trial in one["trials"])}) for one in values["found"]
            )
            return cls(**{**values, "options": options, "found": found})
        except (KeyError, TypeError, AttributeError) as error:
            raise DeltaError(f"this is not a result of max-batch: {error!r} in it") from error


TryBatch = Callable[[Spec, int, bool], Trial]
"""Tries a batch, and whether it is timed."""


def search(
    options: LargestOptions,
    machine: Mapping[str, str],
    command: str,
    try_batch: TryBatch | None = None,
    done: Callable[[str, str, Trial], None] = lambda model, way, trial: None,
    so_far: Callable[[LargestResult], object] = lambda result: None,
) -> LargestResult:
    """Search every model in every way; ``done`` gets each trial, ``so_far`` the result as it stands after each way.

    A way that fails for another reason than memory is left out, with the reason; where that is plain, or plain trains
    no batch at all under the limit, so is the model.
    """
    missing, found, failed = dict(_missing(options)), list[Found](), dict[str, str]()

    def result() -> LargestResult:
        return LargestResult(
            options=options,
            machine=machine,
            command=command,
            found=tuple(found),
            missing=missing,
            failed=dict(failed),
        )

    for model in options.models:
        spec = replace(
            plain_spec(model, options.sizes(model), threads=options.threads, device=options.device, seed=options.seed),
            autocast=options.autocast,
        )
        plain: Found | None = None
        for way, told in _specs(spec, options):
            if way in missing:
                continue

            def attempt(batch: int, timed: bool, way: str = way, told: Spec = told, model: str = model) -> Trial:
                trial = (try_batch or _Trainer(options))(told, batch, timed)
                done(model, way, trial)
                return trial

            try:
                one = _search(model, way, attempt, options, plain)
            except DeltaError as error:
                failed[f"{model}, {way}"] = str(error)
            else:
                found.append(one)
                plain = plain or one
            so_far(result())
            if plain is None:
                break
    return result()


def _missing(options: LargestOptions) -> Iterator[tuple[str, str]]:
    for way in options.ways:
        why = unavailable(way, options.device) or (COUNTED_ON_CPU if options.device == "cpu" else None)
        if why is not None:
            yield way, why


def _specs(spec: Spec, options: LargestOptions) -> Iterator[tuple[str, Spec]]:
    """Each way and what its processes are told, plain first."""
    on_cpu = options.device == "cpu"
    capped = spec if on_cpu else replace(spec, budget=str(options.limit_bytes))
    yield PLAIN, capped
    for way in options.ways:
        yield way, replace(capped, mode=way)
    if on_cpu:
        limited = replace(spec, mode="delta", activations=str(options.limit_bytes))
    else:
        limited = replace(spec, mode="delta", budget=str(int(options.limit_bytes / RESERVED_RATIO)))
    if options.quick:
        limited = replace(limited, overrides={"filter.min_bytes": 0})
    for policy in options.policies:
        yield policy, replace(limited, policy=policy)


def _search(
    model: str, way: str, attempt: Callable[[int, bool], Trial], options: LargestOptions, plain: Found | None
) -> Found:
    trials: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        if batch not in trials:
            trials[batch] = attempt(batch, False)
        return trials[batch].fits

    def speed(batch: int) -> float:
        """Samples per second; 0 where it does not fit."""
        if fits(batch) and trials[batch].samples_per_s is None:
            trials[batch] = attempt(batch, True)
        return trials[batch].samples_per_s or 0.0

    start = plain.batch if plain is not None else options.sizes(model)["batch"]
    batch = largest(fits, start, options.most, options.precision)
    while batch and not speed(batch):  # it did not fit in a later step
        batch = largest(fits, batch, options.most, options.precision)
    if plain is None and not batch:
        raise DeltaError(f"it does not train with a batch of 1 under limit={options.limit!r}: {trials[1].why}")
    batch_speed = speed(batch) if batch else 0.0
    over_batch, over_speed = (plain.batch, plain.samples_per_s) if plain is not None else (batch, batch_speed)

    def is_fast(batch: int) -> bool:
        return speed(batch) >= SHARE * over_speed

    # From plain's batch on: a smaller one may be slower by itself.
    fast = batch if batch and is_fast(batch) else largest(is_fast, min(over_batch, batch), batch, options.precision)
    return Found(
        model=model,
        way=way,
        batch=batch,
        samples_per_s=batch_speed,
        batch_ratio=batch / over_batch,
        speed_ratio=batch_speed / over_speed,
        fast_batch=fast,
        fast_batch_ratio=fast / over_batch,
        trials=tuple(trials[batch] for batch in sorted(trials)),
    )


class _Trainer:
    """A batch size, tried in a process of its own."""

    def __init__(self, options: LargestOptions) -> None:
        self._options = options

    def __call__(self, told: Spec, batch: int, timed: bool) -> Trial:
        count = STEPS_BEFORE + self._options.steps if timed else _FITTING_STEPS
        try:
            with WorkerProcess(replace(told, sizes={**told.sizes, "batch": batch}), HEAP) as worker:
                worker.wait_ready()
                steps = [worker.ask(_step(index, counted=told.device == "cpu" and not index)) for index in range(count)]
                end = worker.ask({"do": "finish"})
        except OutOfMemory as error:
            return Trial(batch, None, why=str(error).partition("\n")[0] or "out of memory")
        peak_bytes = end["peak_reserved_bytes"] or _counted(steps[0], end)
        if peak_bytes > self._options.limit_bytes:
            return Trial(batch, peak_bytes, why="over the limit")
        if not timed:
            return Trial(batch, peak_bytes)
        step_ns = median(step["time_ns"] for step in steps[STEPS_BEFORE:])
        return Trial(batch, peak_bytes, batch * 1e9 / step_ns)


def _step(index: int, counted: bool) -> dict[str, Any]:
    return {"do": "step", "index": index, "count": counted, "settle": index in SETTLING_STEPS}


def _counted(first: Mapping[str, Any], end: Mapping[str, Any]) -> int:
    """Of saved activations: what was counted from outside, and what Delta saw in all steps."""
    report = end["report"] or {"peak_activation_bytes": 0}
    return max(int(first["counted_peak_bytes"]), int(report["peak_activation_bytes"]))
