"""Delta trains PyTorch models under a memory budget by evicting saved activations.

::

    with delta.evict(budget="8GiB", policy="delta") as run:
        ...  # an ordinary training loop
    print(run.report())

This module is the one door. Every name is imported when it is first used, so that ``import delta`` costs little and
does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from delta.errors import (
    BudgetError,
    DeltaError,
    HostFullError,
    NestedSessionError,
    PlotError,
    PolicyError,
    RecomputeMismatchError,
    StorageModifiedError,
    SwapError,
    TimelineError,
    TraceError,
)

if TYPE_CHECKING:
    from delta.config import Policy
    from delta.parts import register_planner, register_score
    from delta.policies import CallablePackage
    from delta.policies.loader import load as load_policy
    from delta.report import Report
    from delta.runtime.session import evict

    policies: CallablePackage

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "DeltaError",
    "HostFullError",
    "NestedSessionError",
    "PlotError",
    "Policy",
    "PolicyError",
    "RecomputeMismatchError",
    "Report",
    "StorageModifiedError",
    "SwapError",
    "TimelineError",
    "TraceError",
    "__version__",
    "evict",
    "load_policy",
    "policies",
    "register_planner",
    "register_score",
]

# name: (module, attribute); no attribute: the module itself, which for delta.policies can also be called
_LAZY = {
    "Policy": ("delta.config", "Policy"),
    "Report": ("delta.report", "Report"),
    "evict": ("delta.runtime.session", "evict"),
    "load_policy": ("delta.policies.loader", "load"),
    "policies": ("delta.policies", ""),
    "register_planner": ("delta.parts", "register_planner"),
    "register_score": ("delta.parts", "register_score"),
}


def __getattr__(name: str) -> object:
    try:
        module_name, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'delta' has no attribute {name!r}; it has {', '.join(__all__)}") from None
    module = import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
