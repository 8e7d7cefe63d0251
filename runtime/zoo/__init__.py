"""The models that are measured: small factory functions, each giving a `Task` that knows nothing of Delta.

Each has three sets of sizes: for a CPU, for a CUDA card, and tiny ones for tests. `byte-gpt` (the demo's) and `unet`
are written here; the others are configurations of transformers with random weights, and need that package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from delta.errors import DeltaError
from delta.runtime.zoo import language, vision
from delta.runtime.zoo.task import Task

Sizes = Mapping[str, int]

GPT2 = {"batch": 8, "seq": 256, "layers": 8, "width": 512, "heads": 8, "vocabulary": 8192}
TINY_TEXT = {"batch": 2, "seq": 16, "layers": 2, "width": 32, "heads": 2, "vocabulary": 64}
MEDIUM = {"batch": 8, "seq": 1024, "layers": 24, "width": 1024, "heads": 16, "vocabulary": 50257}
LARGE = {"batch": 4, "seq": 1024, "layers": 36, "width": 1280, "heads": 20, "vocabulary": 50257}
LLAMA_1B = {"batch": 4, "seq": 2048, "layers": 16, "width": 2048, "heads": 32, "vocabulary": 32000}
RESNET = {"batch": 16, "pixels": 224, "width": 64}
RESNET_CUDA = {"batch": 256, "pixels": 224, "width": 64}
TINY_RESNET = {"batch": 2, "pixels": 32, "width": 8}


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the zoo. ``make`` takes ``seed`` and the names in the sizes; ``cpu`` is None for models that are too
    large for one. ``steady``: whether all its batches have one shape."""

    make: Callable[..., Task]
    cpu: Sizes | None
    cuda: Sizes
    tiny: Sizes
    package: str | None = "transformers"
    steady: bool = True

    @property
    def available(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


ZOO: Mapping[str, Entry] = {
    "byte-gpt": Entry(
        language.byte_gpt,
        cpu={"batch": 12, "seq": 256, "layers": 8, "width": 512, "heads": 8},
        cuda={"batch": 32, "seq": 1024, "layers": 12, "width": 768, "heads": 12},
        tiny={"batch": 2, "seq": 16, "layers": 2, "width": 32, "heads": 8},
        package=None,
    ),
    "gpt": Entry(language.gpt2, cpu=GPT2, cuda={**MEDIUM, "layers": 12, "width": 768, "heads": 12}, tiny=TINY_TEXT),
    "bert": Entry(language.bert, cpu=GPT2, cuda={**MEDIUM, "batch": 32, "seq": 512}, tiny=TINY_TEXT),
    "resnet50": Entry(vision.resnet50, cpu=RESNET, cuda=RESNET_CUDA, tiny=TINY_RESNET),
    "vit": Entry(
        vision.vit,
        cpu={"batch": 16, "pixels": 224, "layers": 8, "width": 384, "heads": 6},
        cuda={"batch": 64, "pixels": 224, "layers": 12, "width": 768, "heads": 12},
        tiny={"batch": 2, "pixels": 32, "layers": 2, "width": 32, "heads": 2},
    ),
    "unet": Entry(
        vision.unet,
        cpu={"batch": 8, "pixels": 128, "width": 32, "levels": 4},
        cuda={"batch": 16, "pixels": 512, "width": 64, "levels": 5},
        tiny={"batch": 2, "pixels": 16, "width": 4, "levels": 2},
        package=None,
    ),
    "gpt-varied": Entry(
        language.gpt2_varied,
        cpu=GPT2,
        cuda={**MEDIUM, "layers": 12, "width": 768, "heads": 12},
        tiny=TINY_TEXT,
        steady=False,
    ),
    "resnet101": Entry(vision.resnet101, cpu=RESNET, cuda=RESNET_CUDA, tiny=TINY_RESNET),
    "llama-1b": Entry(language.llama, cpu=None, cuda=LLAMA_1B, tiny=TINY_TEXT),
    "gpt2-medium": Entry(language.gpt2, cpu=None, cuda=MEDIUM, tiny=TINY_TEXT),
    "gpt2-large": Entry(language.gpt2, cpu=None, cuda=LARGE, tiny=TINY_TEXT),
    "swin": Entry(
        vision.swin,
        cpu=None,
        cuda={"batch": 64, "pixels": 224, "width": 96},
        tiny={"batch": 1, "pixels": 224, "width": 12},
    ),
}
# Compared where none is named: of the others that fit, sizes change, or say what another says.
CPU_MODELS = ("byte-gpt", "gpt", "bert", "resnet50", "vit", "unet")


def entry(name: str) -> Entry:
    """A model of the zoo. DeltaError for another name, and where the package it comes from is missing."""
    found = ZOO.get(name)
    if found is None:
        raise DeltaError(f"model={name!r}: known are {', '.join(ZOO)}")
    if not found.available:
        raise DeltaError(f"model={name!r} is a configuration of {found.package}: pip install {found.package}")
    return found


def sizes(name: str, device: str, *, tiny: bool = False) -> dict[str, int]:
    """The sizes of a model for a device. DeltaError for a model that is too large for it."""
    found = entry(name)
    chosen = found.tiny if tiny else found.cpu if device == "cpu" else found.cuda
    if chosen is None:
        fitting = ", ".join(each for each, other in ZOO.items() if other.cpu is not None)
        raise DeltaError(f"model={name!r} is too large for a CPU; those for one are {fitting}")
    return dict(chosen)


def make(name: str, sizes: Sizes, seed: int, device: str = "cpu") -> Task:
    """The model with random weights, drawn after that seed on that device, and its batches. DeltaError as `entry`, and
    for sizes that make no model."""
    torch.manual_seed(seed)
    with torch.device(device):  # a large model's weights take a CPU half a minute
        return entry(name).make(**sizes, seed=seed)
