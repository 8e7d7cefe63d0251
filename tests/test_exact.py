"""Promise P1: every number equals plain PyTorch bit for bit, whatever is evicted."""

import pytest
import torch
from models import CASES, train

import delta

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 10  # observed, twice refined, tightened as often as a plan may be, and steps after that


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    return {name: train(case, STEPS) for name, case in CASES.items()}


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("device", ["cpu", "chaos:3"])
@pytest.mark.parametrize("activations", ["0%", "40%"])
@pytest.mark.parametrize("policy", ["delta", "delta-paper", "swap", "recompute", "optimal-checkpoint", "capuchin"])
@pytest.mark.parametrize("name", CASES)
def test_training_is_bit_identical(name, policy, activations, device, plain, spill_dir):
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir)})
    with delta.evict(activations=activations, policy=chosen, device=device) as run:
        evicted = train(CASES[name], STEPS)
    assert plain[name].differences(evicted) == []
    assert sum(run.report().evictions.values()) > 0
