"""``scripts/bench max-batch``: the largest batch that trains under a limit, and what it still gets done.

A trial is some steps with one batch size in a process of its own. The limit is that of the device's allocator on CUDA:
plain and the ways of today run under an allocator that is capped there, Delta with it as its budget. On a CPU it is the
most bytes of saved activations, which can be counted for plain and for Delta only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from delta.errors import BudgetError, DeltaError
from delta.policies.loader import load
from delta.runtime import zoo
from delta.runtime.bench.search import largest
from delta.runtime.demo_process import OutOfMemory, WorkerProcess
from delta.runtime.demo_worker import Spec
from delta.runtime.tracing import plain_spec
from delta.runtime.ways import unavailable
from delta.units import Bytes, parse_size

PLAIN = "plain"
SHARE = 0.9  # of plain's samples per second: what the papers' tables hold a batch to
OTHERS = ("checkpoint", "sac", "save_on_cpu", "offloader")
COUNTED_ON_CPU = "on a CPU its saved activations cannot be counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestOptions:
    """What is searched. Raises DeltaError for what cannot be. ``limit``: bytes such as 8GiB."""

    models: tuple[str, ...]
    limit: str
    policies: tuple[str, ...] = ("delta",)
    ways: tuple[str, ...] = ()
    steps: int = 3
    most: int = 65536
    precision: float = 0.03
    threads: int = 2
    seed: int = 0
    device: str = "cpu"
    quick: bool = False
    autocast: bool = False

    def __post_init__(self) -> None:
        for name, least in (("steps", 2), ("most", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise DeltaError(f"{name}={getattr(self, name)}: must be at least {least}")
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
    """What came of one batch size. ``samples_per_s`` is None where it did not fit; ``why`` says in which way."""

    batch: int
    peak_bytes: int | None
    samples_per_s: float | None
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.samples_per_s is not None


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
    """All ways of all models. ``missing``: way -> why it was not searched."""

    options: LargestOptions
    machine: Mapping[str, str]
    command: str
    found: tuple[Found, ...]
    missing: Mapping[str, str]

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


TryBatch = Callable[[Spec, int], Trial]


def search(
    options: LargestOptions,
    machine: Mapping[str, str],
    command: str,
    try_batch: TryBatch | None = None,
    done: Callable[[str, str, Trial], None] = lambda model, way, trial: None,
) -> LargestResult:
    """Search every model in every way; ``done`` gets each trial. DeltaError if plain fails for another reason than
    memory, or trains no batch at all under the limit."""
    missing = dict(_missing(options))
    found: list[Found] = []
    for model in options.models:
        spec = replace(
            plain_spec(model, options.sizes(model), threads=options.threads, device=options.device, seed=options.seed),
            autocast=options.autocast,
        )
        plain: Found | None = None
        for way, told in _specs(spec, options):
            if way in missing:
                continue

            def attempt(batch: int, way: str = way, told: Spec = told, model: str = model) -> Trial:
                trial = (try_batch or _Trainer(options))(told, batch)
                done(model, way, trial)
                return trial

            plain = _search(model, way, attempt, options, plain) if plain is None else plain
            found.append(plain if way == PLAIN else _search(model, way, attempt, options, plain))
    return LargestResult(options=options, machine=machine, command=command, found=tuple(found), missing=missing)


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
    limit = str(options.limit_bytes)
    limited = replace(spec, mode="delta", activations=limit) if on_cpu else replace(spec, mode="delta", budget=limit)
    if options.quick:
        limited = replace(limited, overrides={"filter.min_bytes": 0})
    for policy in options.policies:
        yield policy, replace(limited, policy=policy)


def _search(
    model: str, way: str, attempt: Callable[[int], Trial], options: LargestOptions, plain: Found | None
) -> Found:
    trials: dict[int, Trial] = {}

    def trial(batch: int) -> Trial:
        if batch not in trials:
            trials[batch] = attempt(batch)
        return trials[batch]

    start = plain.batch if plain is not None else options.sizes(model)["batch"]
    batch = largest(lambda n: trial(n).fits, start, options.most, options.precision)
    if plain is None and not batch:
        raise DeltaError(f"{model} does not train with a batch of 1 under limit={options.limit!r}: {trials[1].why}")
    speed = trials[batch].samples_per_s or 0.0 if batch else 0.0
    over_batch, over_speed = (plain.batch, plain.samples_per_s) if plain is not None else (batch, speed)
    fast = largest(
        lambda n: (trial(n).samples_per_s or 0.0) >= SHARE * over_speed, over_batch, max(batch, 1), options.precision
    )
    return Found(
        model=model,
        way=way,
        batch=batch,
        samples_per_s=speed,
        batch_ratio=batch / over_batch,
        speed_ratio=speed / over_speed,
        fast_batch=fast,
        fast_batch_ratio=fast / over_batch,
        trials=tuple(trials[batch] for batch in sorted(trials)),
    )


class _Trainer:
    """A batch size, tried in a process of its own."""

    def __init__(self, options: LargestOptions) -> None:
        self._options = options

    def __call__(self, told: Spec, batch: int) -> Trial:
        last = self._options.steps - 1
        try:
            with WorkerProcess(replace(told, sizes={**told.sizes, "batch": batch})) as worker:
                worker.wait_ready()
                steps = [
                    worker.ask({"do": "step", "index": index, "count": told.device == "cpu" and index == 0})
                    for index in range(last + 1)
                ]
                end = worker.ask({"do": "finish"})
        except OutOfMemory as error:
            return Trial(batch, None, None, str(error).partition("\n")[0])
        peak_bytes = end["peak_device_bytes"] or _counted(steps[0], end)
        if peak_bytes > self._options.limit_bytes:
            return Trial(batch, peak_bytes, None, "over the limit")
        step_ns = median(step["time_ns"] for step in steps[1:])  # the first is cold, and counted
        return Trial(batch, peak_bytes, batch * 1e9 / step_ns)


def _counted(first: Mapping[str, Any], end: Mapping[str, Any]) -> int:
    """Of saved activations: what was counted from outside, and what Delta saw in all steps."""
    report = end["report"] or {"peak_activation_bytes": 0}
    return max(int(first["counted_peak_bytes"]), int(report["peak_activation_bytes"]))
