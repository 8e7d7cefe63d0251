"""Programs run inside another tool, plainly and under Delta: what both leave behind has to be the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import delta
from delta.report import Report

POLICIES = ("swap", "recompute", "delta")
STEPS = 7  # observed, refined twice, and followed as a routine


def policy(name: str) -> delta.Policy:
    """A shipped policy that evicts the smallest tensor too."""
    return delta.load_policy(name, {"filter.min_bytes": 0})


def numbers(model: nn.Module, loss_of: Callable[[int], Tensor], steps: int = STEPS) -> list[Tensor]:
    """Train `model` for some steps; `loss_of` gives the loss of a step. Returns losses, gradients and the state."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimiser.step()
        optimiser.zero_grad()
    return found + [tensor.clone() for tensor in model.state_dict().values()]


def different(plain: Sequence[Tensor], evicted: Sequence[Tensor]) -> list[int]:
    """Positions at which two lists of numbers differ in any bit, in type or in shape."""
    return [at for at, pair in enumerate(zip(plain, evicted, strict=True)) if not _same(*pair)]


def _same(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (tensor.detach().resolve_conj().contiguous().flatten() for tensor in (left, right))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def exact(program: Callable[[], Sequence[Tensor]], name: str) -> Report:
    """Run a program plainly and with everything evicted under a policy; both give the same numbers."""
    torch.manual_seed(3)
    plain = program()
    plain_random = torch.get_rng_state()
    modes = torch._C._len_torch_dispatch_stack()
    torch.manual_seed(3)
    with delta.evict(activations="0%", policy=policy(name), device="cpu") as run:
        evicted = program()
    assert different(plain, evicted) == []
    assert torch.equal(plain_random, torch.get_rng_state())
    assert torch._C._len_torch_dispatch_stack() == modes
    return run.report()
