"""Weights that FSDP gathers for a module's forward and frees again: their storages are emptied and refilled in a step.

A replay of another module may come when they are empty, so no recipe reads them. They are never evicted either: FSDP
holds them, and what autograd has saved of them is right again by the time it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def may_be_sharded() -> bool:
    """Whether there can be such weights in this process: cheap, asked for every input of a recorded op. Other libraries
    import FSDP without using it; with it there is a process group."""
    return "torch.distributed.fsdp" in sys.modules and torch.distributed.is_initialized()


def gathered_weights() -> Iterator[Tensor]:
    """What FSDP2 gathers weights into, for all modules sharded so far; nothing where FSDP2 was never imported.

    FSDP2 has no public way to ask for them: the tensors appear at a module's first forward, and are not marked.
    """
    if not may_be_sharded():
        return
    registry = sys.modules["torch.distributed._composable_state"]
    for module in list(registry._module_state_mapping):
        state = registry._get_module_state(module)
        for group in _groups(state):
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs
                yield from parameter._unsharded_inner_tensors


def _groups(state: Any) -> Iterable[Any]:
    """FSDP2's groups of parameters for one module; older versions have at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return tuple(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)
    return () if group is None else (group,)


def is_flat(parameter: nn.Parameter) -> bool:
    """Whether this is the parameter that the first FSDP flattens a module's weights into; those are views of it."""
    return hasattr(parameter, "_sharded_size")
