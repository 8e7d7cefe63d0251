"""Writes into lists of tensors (`torch._foreach_mul_`, as optimizers make on cards) count as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import delta

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]
WRITES: list[Callable[[list[Tensor]], object]] = [
    lambda tensors: torch._foreach_mul_(tensors, 0.9),
    lambda tensors: torch._foreach_addcmul_(tensors, [t.clone() for t in tensors], [t.clone() for t in tensors]),
    lambda tensors: torch._foreach_copy_(tensors, [t.clone() for t in tensors]),
    lambda tensors: torch.unbind_copy(torch.ones(2, 8), out=tensors),
]


@pytest.mark.parametrize("minded", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_versions_are_those_of_plain_pytorch(write: Callable[[list[Tensor]], object], grad: bool, minded: bool) -> None:
    """`minded`: something depends on one of the tensors; else Delta knows none of them."""
    made = [[torch.ones(8), torch.ones(8)] for _ in range(8)]

    def versions(number: int) -> list[int]:
        weight, tensors = nn.Parameter(torch.ones(8)), made[number]
        held = (tensors[0] * 2).sin() * weight if minded else None
        with torch.set_grad_enabled(grad):
            write(tensors)
        del held
        return [tensor._version for tensor in tensors]

    plain = versions(0)
    with delta.evict(activations="0%", policy=delta.load_policy("recompute", {"filter.min_bytes": 0}), device="cpu"):
        assert [versions(number) for number in range(1, 8)] == [plain] * 7
    assert min(plain) > 0


@pytest.mark.parametrize("policy", ["delta", "recompute", "swap"])
def test_backward_over_a_graph_whose_weight_an_optimizer_has_changed(policy: str) -> None:
    """Plain PyTorch refuses it."""
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))
    optimizer = torch.optim.AdamW([weight], foreach=True)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations="0%", policy=chosen, device="cpu"):
        for _ in range(7):
            state = torch.randn(8, 64)
            loss = (state.sin() * weight).square().mean()
            held = (state * weight).cos() * weight
            loss.backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                held.sum().backward()
            optimizer.zero_grad()
