"""Promise P1 inside `torch.utils.checkpoint`: what a checkpoint saves is its own, what it recomputes may be evicted.

The innermost pair of saved-tensor hooks wins. A non-reentrant checkpoint installs hooks of its own for its forward, so
that Delta sees neither what is saved there nor what it is given. A reentrant one runs without gradients and saves its
inputs under Delta's hooks. Both compute again inside backward; what the reentrant one saves then is Delta's again.
What selective checkpointing keeps is held beside autograd; from PyTorch 2.14 on it may be given to the hooks.
"""

import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
from covering import in_turns
from inside import POLICIES, exact, numbers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    # The inner of two reentrant checkpoints is called in the forward of the outer, where gradients are off.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning"),  # 2.14, if nothing is said
]

WIDTH = 16
Wrap = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """Attention and a layer, with what a recomputation can get wrong: random numbers and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)
        return x + self.dropout(self.down(F.gelu(self.up(x)).mul_(0.5)))


def train(wrap: Wrap, whole: bool = False, every: int = 1, autocast: bool = False) -> list[Tensor]:
    """Train three blocks, each of them (or each `every`-th, or the model as one) called through `wrap`."""
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 3))
    generator = torch.Generator().manual_seed(1)

    def forward(x: Tensor) -> Tensor:
        if whole:
            return wrap(model, x)
        for number, part in enumerate(model):
            x = wrap(part, x) if number % every == 0 else part(x)
        return x

    def loss(step: int) -> Tensor:
        x = torch.randn(2, 5, WIDTH, generator=generator, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return forward(x * 1).float().square().mean()

    return numbers(model, loss)


def reentrant(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=True)


def plain(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=False)


def whole_way(part: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(part, x, use_reentrant=False)


def autocast_inside(part: nn.Module, x: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return part(x).float()

    return checkpoint(run, x, use_reentrant=False)


def nested(inner: bool, outer: bool) -> Wrap:
    """A checkpoint in a checkpoint; the flags say which of the two is reentrant."""

    def run(part: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda y: checkpoint(part, y.sin(), use_reentrant=inner).cos(), x, use_reentrant=outer)

    return run


def selective(chosen: object, **more: object) -> Wrap:
    """Selective checkpointing: the chosen ops' results are kept, the rest is recomputed."""
    contexts = partial(create_selective_checkpoint_contexts, chosen)
    return lambda part, x: checkpoint(part, x, use_reentrant=False, context_fn=contexts, **more)


def keep_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def in_segments() -> list[Tensor]:
    model = nn.Sequential(*(Block() for _ in range(3)))
    generator = torch.Generator().manual_seed(1)

    def loss(step: int) -> Tensor:
        x = torch.randn(2, 5, WIDTH, generator=generator, requires_grad=True)
        return checkpoint_sequential(model, 2, x * 1, use_reentrant=False).square().mean()

    return numbers(model, loss)


def two_backwards() -> list[Tensor]:
    """A checkpoint recomputes for each of them."""
    part = Block()
    generator = torch.Generator().manual_seed(1)

    def loss(step: int) -> Tensor:
        y = plain(part, torch.randn(2, 5, WIDTH, generator=generator).sin()).exp()
        y.sum().backward(retain_graph=True)
        return y.square().mean()

    return numbers(part, loss)


def gradient_penalty() -> list[Tensor]:
    """Double backward through a checkpoint."""
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    generator = torch.Generator().manual_seed(1)

    def loss(step: int) -> Tensor:
        x = torch.randn(4, WIDTH, generator=generator, requires_grad=True)
        (gradient,) = torch.autograd.grad(plain(part, x.sin()).sum(), x, create_graph=True)
        return gradient.square().sum()

    return numbers(part, loss)


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
CASES: dict[str, Callable[[], list[Tensor]]] = {
    "reentrant": partial(train, reentrant),
    "non_reentrant": partial(train, plain),
    "no_early_stop": partial(train, whole_way),
    "reentrant_whole_model": partial(train, reentrant, whole=True),
    "whole_model": partial(train, plain, whole=True),
    "every_second_block": partial(train, plain, every=2),
    "every_second_block_reentrant": partial(train, reentrant, every=2),
    "inside_autocast": partial(train, plain, autocast=True),
    "inside_autocast_reentrant": partial(train, reentrant, autocast=True),
    "around_autocast": partial(train, autocast_inside),
    "nested": partial(train, nested(inner=False, outer=False)),
    "nested_reentrant": partial(train, nested(inner=True, outer=True)),
    "reentrant_in_non_reentrant": partial(train, nested(inner=True, outer=False)),
    "non_reentrant_in_reentrant": partial(train, nested(inner=False, outer=True)),
    "selective_by_ops": partial(train, selective(PRODUCTS)),
    "selective_by_function": partial(train, selective(keep_products)),
    "selective_every_second": partial(train, selective(PRODUCTS), every=2),
    "in_segments": in_segments,
    "two_backwards": two_backwards,
    "gradient_penalty": gradient_penalty,
}


@in_turns(name=CASES, policy=POLICIES)
def test_numbers_equal_plain(name, policy):
    exact(CASES[name], policy)


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters, reason="since PyTorch 2.14"
)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_selective_checkpointing_gives_to_the_hooks_is_evicted(policy):
    seen = exact(partial(train, selective(PRODUCTS, respect_saved_tensors_hooks=True)), policy)
    unseen = exact(partial(train, selective(PRODUCTS, respect_saved_tensors_hooks=False)), policy)
    assert sum(seen.evictions.values()) > sum(unseen.evictions.values())
