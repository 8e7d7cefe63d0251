"""The models of `scripts/predict`, with their batches: each a training task that knows nothing of Delta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from delta.errors import DeltaError
from delta.runtime.demo_model import Batches, Gpt, GptConfig, next_byte_loss, stdlib_bytes

# Name -> configuration of transformers.ResNetConfig, and pixels of a side. An empty configuration is ResNet-50.
RESNETS: dict[str, tuple[dict[str, Any], int]] = {
    "resnet50": ({}, 224),
    "resnet-small": ({"embedding_size": 32, "hidden_sizes": [128, 256, 256, 256], "depths": [2, 2, 1, 1]}, 96),
}
_CLASSES = 2  # transformers' default


@dataclass(frozen=True, slots=True)
class Task:
    """A model, its batch of each step (the same in every process), and the loss of a batch."""

    model: nn.Module
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[tuple[Tensor, ...]], Tensor]


def gpt(config: GptConfig, *, batch: int, seed: int) -> Task:
    """The demo's GPT on the standard library's source."""
    model = Gpt(config)
    batches = Batches(stdlib_bytes(), batch=batch, seq=config.seq, seed=seed)
    return Task(model, lambda index: (batches[index],), lambda given: next_byte_loss(model, given[0]))


def resnet(name: str, batch: int, seed: int) -> Task:
    """One of `RESNETS` on random pictures. Raises DeltaError for another name, and where transformers is missing."""
    if name not in RESNETS:
        raise DeltaError(f"model={name!r}: known are gpt, {', '.join(RESNETS)}")
    try:
        from transformers import ResNetConfig, ResNetForImageClassification
    except ImportError as error:
        raise DeltaError(f"model={name!r} is transformers' ResNet: pip install transformers") from error
    given, pixels = RESNETS[name]
    model = ResNetForImageClassification(ResNetConfig(**given))

    def pictures(index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        images = torch.randn(batch, 3, pixels, pixels, generator=generator)
        return images, torch.randint(_CLASSES, (batch,), generator=generator)

    def loss(given: tuple[Tensor, ...]) -> Tensor:
        found: Tensor = model(given[0], labels=given[1]).loss
        return found

    return Task(model, pictures, loss)
