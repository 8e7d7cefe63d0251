"""What a model of the zoo is: a training task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A model, its batch of each step (the same in every process), the loss of a batch, and the blocks that somebody
    who checkpoints by hand would wrap."""

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[Batch], Tensor]
    blocks: tuple[nn.Module, ...]


def transformers() -> Any:
    """The package, which Delta itself does not need; untyped, so that type checks do not need it either."""
    return import_module("transformers")


def blocks_of(model: nn.Module, kind: str) -> tuple[nn.Module, ...]:
    """All modules of a class, by its name."""
    found = tuple(module for module in model.modules() if type(module).__name__ == kind)
    assert found, f"no {kind} in {type(model).__name__}"
    return found


def generator(seed: int, index: int) -> torch.Generator:
    """Random numbers for the batch of a step, on the CPU whatever the device."""
    return torch.Generator().manual_seed(seed * 1_000_003 + index)
