"""Any training loop, any policy, any device: all that a program can see is what it is without Delta."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager

import loops
import pytest
import torch
from test_card_training import PromptCard
from torch import nn

import delta
from delta.runtime import session
from delta.runtime.device.cuda import CudaDevice

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning", "ignore:a copy to the host failed"),
]
FEW, MANY = 12, 200
SEEDS = [*range(FEW), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW, MANY))]


def same(found: list[torch.Tensor | str], plain: list[torch.Tensor | str]) -> bool:
    """NaN is as good as NaN here."""
    return len(found) == len(plain) and all(map(_same, found, plain))


def _same(mine: torch.Tensor | str, theirs: torch.Tensor | str) -> bool:
    if isinstance(mine, str) or isinstance(theirs, str):
        return mine == theirs
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_drawn_at_random_sees_nothing_of_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed + 1000)
    name = draw.choice(delta.policies())
    policy = delta.load_policy(name, {"filter.min_bytes": draw.choice([0, 0, 1024, 4096])})
    share, device = draw.choice(["10%", "30%", "50%", "70%"]), draw.choice(["cpu", "cpu", f"chaos:{seed}", "cuda"])
    if device == "cuda":
        monkeypatch.setattr(session, "make_device", lambda name, host: CudaDevice(PromptCard(), host))
    runs: list[delta.evict] = []

    def enter(model: nn.Module) -> AbstractContextManager[object]:
        runs.append(delta.evict(model, activations=share, policy=policy, device=device))
        return runs[-1]

    plain = loops.run(seed)
    assert same(loops.run(seed, enter), plain)
    for run in runs:
        assert run._core is not None
        run._core.engine.ledger.validate()
        assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)
