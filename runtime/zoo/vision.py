"""Models of pictures: a U-Net written here, and configurations of transformers, on random pictures."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from delta.runtime.zoo.task import Batch, Task, blocks_of, generator, transformers

_CLASSES = 10
_DRAWN = 8  # pictures of noise, out of which all are cut


def resnet50(*, batch: int, pixels: int, width: int, seed: int) -> Task:
    return _resnet((3, 4, 6, 3), batch, pixels, width, seed)


def resnet101(*, batch: int, pixels: int, width: int, seed: int) -> Task:
    return _resnet((3, 4, 23, 3), batch, pixels, width, seed)


def _resnet(depths: tuple[int, ...], batch: int, pixels: int, width: int, seed: int) -> Task:
    widths = [width * 4 * 2**stage for stage in range(4)]
    config = transformers().ResNetConfig(
        embedding_size=width, hidden_sizes=widths, depths=list(depths), num_labels=_CLASSES
    )
    return _classifier(
        transformers().ResNetForImageClassification(config), "ResNetBottleNeckLayer", batch, pixels, seed
    )


def vit(*, batch: int, pixels: int, layers: int, width: int, heads: int, seed: int) -> Task:
    """A vision transformer with patches of 16 pixels; attention written out."""
    config = transformers().ViTConfig(
        image_size=pixels,
        patch_size=16,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_labels=_CLASSES,
        attn_implementation="eager",
    )
    return _classifier(transformers().ViTForImageClassification(config), "ViTLayer", batch, pixels, seed)


def swin(*, batch: int, pixels: int, width: int, seed: int) -> Task:
    """Swin with windows of 7 patches: many small tensors, rolled and cut up."""
    config = transformers().SwinConfig(image_size=pixels, embed_dim=width, num_labels=_CLASSES)
    return _classifier(transformers().SwinForImageClassification(config), "SwinLayer", batch, pixels, seed)


class Noise:
    """Random pictures, each cut out of the same noise somewhere else: to draw all anew takes a CPU longer than a card
    takes for a step."""

    def __init__(self, pixels: int, seed: int) -> None:
        self._shape = 3, pixels, pixels
        self._drawn = torch.randn(_DRAWN * prod(self._shape), generator=generator(seed, -1), device="cpu")

    def pictures(self, count: int, random: torch.Generator) -> Tensor:
        """(count, 3, pixels, pixels), on the CPU."""
        each = prod(self._shape)
        begins = torch.randint(len(self._drawn) - each, (count,), generator=random).tolist()
        return torch.cat([self._drawn[at : at + each] for at in begins]).view(count, *self._shape)


def _classifier(model: Any, block: str, batch: int, pixels: int, seed: int) -> Task:
    noise = Noise(pixels, seed)

    def pictures(index: int) -> Batch:
        random = generator(seed, index)
        return noise.pictures(batch, random), torch.randint(_CLASSES, (batch,), generator=random)

    def loss(given: Batch) -> Tensor:
        found: Tensor = model(given[0], labels=given[1]).loss
        return found

    return Task(model, pictures, loss, blocks_of(model, block))


class Level(nn.Sequential):
    """Two convolutions, each with a batch norm and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """A U-Net: what each level made on the way down is joined to the same level on the way up.

    After Ronneberger et al., "U-Net", MICCAI 2015 (arXiv:1505.04597), with batch norms and padding.
    """

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(Level(*pair) for pair in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * wide, wide, 2, stride=2) for wide in reversed(widths[:-1]))
        self.join = nn.ModuleList(Level(2 * wide, wide) for wide in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, _CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, class, height, width) for pictures (batch, 3, height, width)."""
        skips: list[Tensor] = []
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        logits: Tensor = self.head(x)
        return logits


def unet(*, batch: int, pixels: int, width: int, levels: int, seed: int) -> Task:
    """A class for every pixel of random pictures."""
    model = UNet(width, levels)

    noise = Noise(pixels, seed)

    def pictures(index: int) -> Batch:
        random = generator(seed, index)
        return noise.pictures(batch, random), torch.randint(_CLASSES, (batch, pixels, pixels), generator=random)

    def loss(given: Batch) -> Tensor:
        # As (pixel, class): the loss over pictures has no kernel on CUDA that gives the same bits twice.
        return F.cross_entropy(model(given[0]).permute(0, 2, 3, 1).flatten(0, 2), given[1].flatten())

    return Task(model, pictures, loss, blocks_of(model, "Level"))
