"""What is compared: models of the zoo, ways to train them, and budgets for the ways that take one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from delta.errors import BudgetError, DeltaError
from delta.policies.loader import load
from delta.runtime import zoo
from delta.runtime.zoo import CPU_MODELS, ZOO
from delta.units import at_least_one, parse_size

PLAIN = "plain"
BUDGETED = ("delta", "compile")  # ways that are measured once for each budget
RIVALS = ("checkpoint", "offloader")  # Delta has to be faster than these where it takes no more memory
CPU_WAYS = (PLAIN, "checkpoint", "sac", "save_on_cpu", "delta")
CUDA_WAYS = (PLAIN, "checkpoint", "sac", "save_on_cpu", "offloader", "compile", "delta")
BUDGETS = ("100%", "70%", "50%", "30%")
QUICK_MODELS = ("byte-gpt", "gpt", "resnet50", "unet")
QUICK_BUDGETS = ("100%", "50%")
QUICK_STEPS = 3
STEPS = 10


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: ``mode`` as in `Spec`, and its budget of activations if it takes one."""

    mode: str
    budget: str | None = None

    @property
    def name(self) -> str:
        return self.mode if self.budget is None else f"{self.mode} {self.budget}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the benchmark measures. Raises DeltaError for what cannot be.

    ``quick``: on a CPU tiny sizes, on CUDA those for a CPU.
    """

    models: tuple[str, ...]
    ways: tuple[str, ...] = CPU_WAYS
    budgets: tuple[str, ...] = BUDGETS
    steps: int = STEPS
    threads: int = 2
    seed: int = 0
    device: str = "cpu"
    policy: str = "delta"
    quick: bool = False
    autocast: bool = False

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, threads=self.threads)
        unknown = [way for way in self.ways if way not in CUDA_WAYS]
        if unknown:
            raise DeltaError(f"way={unknown[0]!r}: known are {', '.join(CUDA_WAYS)}")
        for budget in self.budgets:
            parse_size(budget, what="budgets", error=BudgetError)
        for model in self.models:
            self.sizes(model)
        load(self.policy)

    def sizes(self, model: str) -> dict[str, int]:
        """What a model is made with."""
        if self.quick:
            return zoo.sizes(model, "cpu", tiny=self.device == "cpu" or zoo.entry(model).cpu is None)
        return zoo.sizes(model, self.device)

    @property
    def overrides(self) -> dict[str, Any]:
        """Of Delta's policy: what is tiny is evicted only if it is asked for."""
        return {"filter.min_bytes": 0} if self.quick and self.device == "cpu" else {}

    def compared(self) -> tuple[Way, ...]:
        """All ways, plain first: it is what the others are compared with."""
        others = [mode for mode in self.ways if mode != PLAIN]
        budgets: dict[str, Sequence[str | None]] = dict.fromkeys(BUDGETED, self.budgets)
        return (Way(PLAIN), *(Way(mode, budget) for mode in others for budget in budgets.get(mode, (None,))))


def default_models(device: str, quick: bool) -> tuple[str, ...]:
    """The models that are measured if none is named: those whose package is there."""
    names = QUICK_MODELS if quick else CPU_MODELS if device == "cpu" else tuple(ZOO)
    return tuple(name for name in names if ZOO[name].available)


def left_out(device: str, quick: bool) -> tuple[str, ...]:
    """The models that would be measured if their package were there."""
    names = QUICK_MODELS if quick else CPU_MODELS if device == "cpu" else tuple(ZOO)
    return tuple(name for name in names if not ZOO[name].available)
