"""The random generators that ops draw from: which one, and how to have it draw again what it drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from delta.runtime.opfacts import OpFacts


def drawn_from(
    facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[torch.Generator | None, Tensor | None]:
    """The generator that a seeded call draws from, and its state now; of any other call None. Where the call has no
    tensor, the generator is that of ``device``."""
    if not facts.seeded:
        return None, None
    given = (*args, *kwargs.values())
    generator = next((value for value in given if isinstance(value, torch.Generator)), None)
    if generator is None:
        generator = default_generator(next((value.device for value in given if isinstance(value, Tensor)), device))
    return generator, generator.get_state()


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator


def set_back(generator: torch.Generator | None, state: Tensor | None) -> None:
    """Have it draw again what it drew in that state. Without a generator nothing happens.

    On CUDA by another handle on the same numbers. A handle knows whether somebody has seeded it, and where one has,
    cuDNN's recurrent nets draw their dropout anew (PyTorch's RNN.cpp, CUDAGeneratorImpl.cpp).
    """
    if generator is not None and state is not None:
        _numbers_of(generator).set_state(state)


def _numbers_of(generator: torch.Generator) -> torch.Generator:
    return generator.graphsafe_get_state() if generator.device.type == "cuda" else generator


def run_seeded(
    func: OpOverload, generator: torch.Generator | None, state: Tensor | None, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Run a call that draws from the generator in that state; the generator is left as it is now.

    Other threads draw from it, too (a loader that shuffles). So a call that can be told where to draw from gets a
    generator of its own. Where it cannot, and on a card, the shared one is set back for as long as the call takes.
    """
    if generator is None or state is None:
        return func(*args, **kwargs)
    if generator.device.type == "cpu" and _may_be_told(func):
        return func(*args, **{**kwargs, "generator": torch.Generator().set_state(state)})
    now = generator.get_state()
    try:
        set_back(generator, state)
        return func(*args, **kwargs)
    finally:
        set_back(generator, now)


@cache
def _may_be_told(func: OpOverload) -> bool:
    """Whether the op has an argument for what to draw from."""
    return any(argument.name == "generator" and argument.kwarg_only for argument in func._schema.arguments)
