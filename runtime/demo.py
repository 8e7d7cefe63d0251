"""The demo: the same training with and without Delta, each in a process of its own, and what differs.

Times on a busy machine wander, so the processes take turns step by step and the ratio is one of medians over the same
minutes. The bits are compared, not assumed: every step's loss, the digest of all gradients, the parameters at the end.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from itertools import product
from math import isfinite
from statistics import median
from typing import Any

import torch

from delta.errors import BudgetError, DeltaError
from delta.policies.loader import load
from delta.runtime.demo_model import GptConfig
from delta.runtime.demo_process import WorkerProcess
from delta.runtime.demo_worker import Spec
from delta.units import at_least_one, parse_size

_HEADS = 8
_WARM_UP_STEPS = 2  # first-touch page faults, and Delta observing: left out of the times


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo trains. Raises DeltaError for values that make no training."""

    steps: int = 10
    batch: int = 12
    layers: int = 8
    width: int = 512
    seq: int = 256
    activations: str = "40%"
    policy: str = "delta"
    timeline: str = "delta-demo.jsonl"
    threads: int = 2
    seed: int = 0
    device: str = "cpu"
    checkpoint: bool = False
    interleave: bool = True

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, batch=self.batch, threads=self.threads)
        GptConfig(layers=self.layers, width=self.width, heads=_HEADS, seq=self.seq)
        parse_size(self.activations, what="activations", error=BudgetError)
        load(self.policy)
        if self.device != "cpu" and not torch.accelerator.is_available():
            raise DeltaError(f"device={self.device!r}: PyTorch sees no accelerator here; give 'cpu'")

    def modes(self) -> tuple[str, ...]:
        """The processes to run, in the order in which they take turns."""
        return ("plain", "delta", "checkpoint") if self.checkpoint else ("plain", "delta")

    def spec(self, mode: str) -> Spec:
        """What the process of that mode is told."""
        shared = {field.name: getattr(self, field.name) for field in fields(Spec) if hasattr(self, field.name)}
        sizes = {name: getattr(self, name) for name in ("batch", "seq", "layers", "width")}
        return Spec(**shared, mode=mode, sizes={**sizes, "heads": _HEADS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The figures of one process. Sequences have one entry per step; ``losses`` are exact (``float.hex``).

    ``counted_peak_bytes``: peak of saved activations counted by the demo's own hooks, in the plain process only.
    ``report``: the fields of `delta.Report`, in the delta process only. ``peak_device_bytes``, ``peak_reserved_bytes``:
    the allocator's (CUDA). ``host_peak_bytes``: what the host tier held in steps that were counted.
    """

    times_ns: tuple[int, ...]
    losses: tuple[str, ...]
    gradients: tuple[str, ...]
    parameters: str
    start_rss_bytes: int
    peak_rss_bytes: int
    rss_method: str
    peak_device_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    host_peak_bytes: int | None = None
    counted_peak_bytes: int | None = None
    report: Mapping[str, Any] | None = None

    @property
    def step_time_ns(self) -> int:
        """Median over the steps after the warm-up."""
        return int(median(self.times_ns[min(_WARM_UP_STEPS, len(self.times_ns) - 1) :]))

    @property
    def peak_activation_bytes(self) -> int | None:
        """Counted independently for plain, reported by Delta for delta, not known for others."""
        return self.counted_peak_bytes if self.report is None else int(self.report["peak_activation_bytes"])

    @property
    def final_loss(self) -> float:
        return float.fromhex(self.losses[-1])


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both sides (and the checkpointing one if asked for), and what compares them."""

    options: DemoOptions
    sides: Mapping[str, Side]

    @property
    def gradients_identical(self) -> bool:
        """Whether every gradient of every step, and so the parameters at the end, have the same bits."""
        plain, other = self.sides["plain"], self.sides["delta"]
        return plain.gradients == other.gradients and plain.parameters == other.parameters

    @property
    def losses_identical(self) -> bool:
        return self.sides["plain"].losses == self.sides["delta"].losses

    @property
    def first_different_step(self) -> int | None:
        """The first step whose gradients differ; None when those of all steps are the same."""
        pairs = zip(self.sides["plain"].gradients, self.sides["delta"].gradients, strict=True)
        return next((index for index, (plain, other) in enumerate(pairs) if plain != other), None)

    def ratio(self, figure: str, mode: str = "delta") -> float | None:
        """A figure of `Side` over that of plain; None where one of them is not known."""
        over, under = getattr(self.sides[mode], figure), getattr(self.sides["plain"], figure)
        return over / under if over is not None and under else None

    def as_dict(self) -> dict[str, Any]:
        """Ratios, verdicts, options and every figure, JSON-ready. A final loss that is no number is null; `losses` tell
        which."""
        ratios = {
            "gradients_identical": self.gradients_identical,
            "losses_identical": self.losses_identical,
            "first_different_step": self.first_different_step,
            "step_time_ratio": self.ratio("step_time_ns"),
            "peak_activation_ratio": self.ratio("peak_activation_bytes"),
            "peak_rss_ratio": self.ratio("peak_rss_bytes"),
            "peak_device_ratio": self.ratio("peak_device_bytes"),
            "checkpoint_time_ratio": self.ratio("step_time_ns", "checkpoint") if self.options.checkpoint else None,
            "checkpoint_rss_ratio": self.ratio("peak_rss_bytes", "checkpoint") if self.options.checkpoint else None,
        }
        sides = {
            mode: {**asdict(side), "step_time_ns": side.step_time_ns, "final_loss": _finite(side.final_loss)}
            for mode, side in self.sides.items()
        }
        return {**ratios, **asdict(self.options), "torch": torch.__version__, "sides": sides}


def _finite(figure: float) -> float | None:
    return figure if isfinite(figure) else None


def run_demo(options: DemoOptions, on_step: Callable[[str], None] = lambda mode: None) -> DemoResult:
    """Train in one process per mode; ``on_step`` gets the mode after each step. DeltaError if a process fails."""
    with ExitStack() as stack:
        workers = {mode: stack.enter_context(WorkerProcess(options.spec(mode))) for mode in options.modes()}
        for worker in workers.values():
            worker.wait_ready()
        answers: dict[str, list[dict[str, Any]]] = {mode: [] for mode in workers}
        for mode, index in _turns(options):
            answers[mode].append(workers[mode].ask({"do": "step", "index": index}))
            on_step(mode)
        sides = {mode: side_from(answers[mode], worker.ask({"do": "finish"})) for mode, worker in workers.items()}
    return DemoResult(options, sides)


def _turns(options: DemoOptions) -> list[tuple[str, int]]:
    """Which process does which step, in order."""
    if options.interleave:
        return [(mode, index) for index, mode in product(range(options.steps), options.modes())]
    return list(product(options.modes(), range(options.steps)))


def side_from(steps: Sequence[Mapping[str, Any]], end: Mapping[str, Any]) -> Side:
    """The figures of a process from its answers to the steps and to the end."""
    return Side(
        times_ns=tuple(step["time_ns"] for step in steps),
        losses=tuple(step["loss"] for step in steps),
        gradients=tuple(step["gradients"] for step in steps),
        **end,
    )
