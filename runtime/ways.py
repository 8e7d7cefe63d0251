"""The ways to train with less memory that PyTorch's users have today, each as its own documentation sets it up.

::

    checkpoint    torch.utils.checkpoint around every block
    sac           the same, the results of matmuls, convolutions and attention kept
    save_on_cpu   every saved tensor to pinned memory, on the stream that computes
    offloader     TRL's OffloadActivations: to pinned memory on a stream of its own
    compile       torch.compile with a memory budget for activations

Blocks are wrapped on the instance, which is what wrapping a module by hand amounts to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from delta.errors import DeltaError
from delta.runtime.zoo.task import Task
from delta.units import Share, parse_size

_aten = torch.ops.aten
DEAR = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
CUDA_ONLY = {"offloader": "it needs streams", "compile": "compared on CUDA only"}


def unavailable(mode: str, device: str) -> str | None:
    """Why a way cannot be taken on this machine, or None."""
    if mode in CUDA_ONLY and not device.startswith("cuda"):
        return f"not available on {device}: {CUDA_ONLY[mode]}"
    if mode == "offloader" and find_spec("trl") is None:
        return "not available: trl is not installed"
    return None


def prepare(mode: str, task: Task, limit: str | None) -> Callable[[], AbstractContextManager[Any]]:
    """Set a task up for a way; plain and delta need nothing. Returns what each step has to be in."""
    match mode:
        case "checkpoint":
            _checkpoint(task.blocks)
        case "sac":
            _checkpoint(task.blocks, context_fn=partial(create_selective_checkpoint_contexts, _keep_dear))
        case "save_on_cpu":
            return partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
        case "offloader":
            return _offloader(task.model)
        case "compile":
            _compile(task.model, limit)
    return nullcontext


def _checkpoint(blocks: Iterable[nn.Module], **options: Any) -> None:
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _keep_dear(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


def _offloader(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    offloading: Any = import_module("trl.models.activation_offloading")
    context: AbstractContextManager[Any] = offloading.get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    return lambda: context  # one for all steps, as TRL's trainers have it


def _compile(model: nn.Module, limit: str | None) -> None:
    wanted = parse_size(limit or "100%", what="the memory budget of torch.compile")
    if not isinstance(wanted, Share):
        raise DeltaError(f"the memory budget of torch.compile is a share such as 50%, not {limit!r}")
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = wanted.fraction
    model.compile()
