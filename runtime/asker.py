"""Who asks for a saved tensor: the node of backward that saved it, or somebody else."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch


def asks_alone(node_name: str) -> bool:
    """Whether the saved tensor that is being unpacked is read by the formula of such a node and by nobody else.

    Not by another node; nor by a hook of that node or by the program, which read `grad_fn._saved_result` in a frame of
    their own; nor where the backward is itself differentiated, since it saves what it has read; nor under a dispatch
    mode of the program's, which sees what the formula reads.
    """
    node = torch._C._current_autograd_node()
    if node is None or node.name() != node_name or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("delta.runtime."):
        frame = frame.f_back
    return frame is None or frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def runs_the_program_s_code() -> bool:
    """Whether the node of backward that runs is an `autograd.Function`, other than that of a compiled graph."""
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    return not getattr(type(node), "_forward_cls").__module__.startswith("torch._functorch")  # noqa: B009, not typed
