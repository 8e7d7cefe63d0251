"""Promise P1 on architectures that others wrote: the numbers of plain PyTorch."""

from functools import partial
from itertools import cycle

import pytest
import torch
from architectures import FAMILIES, loss_of
from exactly import exact, state_of
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the models
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS = 2  # observed, planned
WAYS = [(policy, share) for policy in ("recompute", "swap", "delta") for share in ("0%", "50%")]
ROTATION = list(zip(FAMILIES, cycle(WAYS), strict=False))


def train(name: str) -> list[Tensor]:
    make, inputs = FAMILIES[name]
    model = make()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = inputs()  # the same one twice: with other data a mixture of experts takes another kind of step
    found = []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        found += [loss.detach(), *state_of(model)]
        optimiser.step()
        optimiser.zero_grad()
    return found


PROGRAMS = {name: partial(train, name) for name in FAMILIES}


def check(name: str, policy: str, share: str) -> None:
    report = exact(PROGRAMS[name], policy, "cpu", share)
    assert report.steps == STEPS
    assert set(report.evictions) - {"keep"}, "nothing was evicted"


@pytest.mark.parametrize(("name", "way"), ROTATION, ids=list(FAMILIES))
def test_one_way_of_evicting(name, way):
    check(name, *way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_of_evicting(name, way):
    check(name, *way)
