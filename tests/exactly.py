"""The promise of exactness, asked of a program: what it leaves behind plainly and under Delta has the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import cycle

import numpy as np
import torch
from inside import different
from torch import Tensor, nn

import delta
from delta.report import Report

POLICIES = ("swap", "recompute", "delta")
DEVICES = ("cpu", "chaos:1")
STEPS = 7  # observed, refined twice, and followed as a routine
Way = tuple[str, str, str]  # policy, device, share
# Every policy on both devices, each at both limits: nothing fits, and some of it does.
WAYS: list[Way] = [(policy, device, share) for policy in POLICIES for device in DEVICES for share in ("0%", "40%")]


def some_ways(names: Iterable[str]) -> list[tuple[str, Way]]:
    """Every program twice: where all is made again that can be, and under another policy; devices and limits in turn.
    For the default run."""
    again = cycle([way for way in WAYS if way[0] == "recompute"])
    others = cycle([way for way in WAYS if way[0] != "recompute"])
    return [(name, next(ways)) for name in names for ways in (again, others)]


@cache
def plain_numbers_of(program: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    return numbers_of(program)


def numbers_of(program: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """What a program returns from fixed seeds, and the state of the random generators after it."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    found = list(program())
    drawn = torch.tensor([random.random(), np.random.random()], dtype=torch.float64)
    return [*found, torch.get_rng_state(), drawn]


def exact(program: Callable[[], Sequence[Tensor]], policy: str, device: str, share: str) -> Report:
    """Run a program plainly and under a policy that evicts the smallest tensor; every number has to be the same."""
    plain = plain_numbers_of(program)
    modes = torch._C._len_torch_dispatch_stack()
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations=share, policy=chosen, device=device) as run:
        evicted = numbers_of(program)
    assert different(plain, evicted) == []
    assert torch._C._len_torch_dispatch_stack() == modes
    assert run._core is not None
    assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)
    return run.report()


def state_of(*modules: nn.Module) -> list[Tensor]:
    """Copies of gradients, parameters and buffers."""
    gradients = [part for module in modules for p in module.parameters() for part in _parts(p.grad)]
    kept = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return [tensor.detach().clone() for tensor in (*gradients, *kept)]


def trained(
    model: nn.Module, loss_of: Callable[[], Tensor], backward: Callable[[Tensor], None] = Tensor.backward
) -> list[Tensor]:
    """Losses, gradients and parameters of some steps; `loss_of` makes the loss of each."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(STEPS):
        loss = loss_of()
        backward(loss)
        found += [loss.detach(), *state_of(model)]
        optimiser.step()
        optimiser.zero_grad()
    return found


def _parts(gradient: Tensor | None) -> list[Tensor]:
    if gradient is None:
        return []
    return [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]
