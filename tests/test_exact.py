"""Promise P1: every number equals plain PyTorch bit for bit, whatever is evicted."""

import pytest
import torch
from covering import in_pairs
from models import CASES, train

import delta
from delta.runtime.device import chaos
from delta.runtime.device.chaos import ChaosDevice

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 10  # observed, twice refined, tightened as often as a plan may be, and steps after that


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    return {name: train(case, STEPS) for name, case in CASES.items()}


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@in_pairs(
    name=CASES,
    policy=["delta", "delta-paper", "swap", "recompute", "optimal-checkpoint", "capuchin"],
    activations=["0%", "40%"],
    device=["cpu", "chaos:3"],
)
def test_training_is_bit_identical(name, policy, activations, device, plain, spill_dir):
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir)})
    with delta.evict(activations=activations, policy=chosen, device=device) as run:
        evicted = train(CASES[name], STEPS)
    assert plain[name].differences(evicted) == []
    assert sum(run.report().evictions.values()) > 0


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("policy", ["delta", "swap"])
def test_a_copy_out_may_end_while_backward_is_given_the_value(policy, plain, monkeypatch):
    """Those that nobody waits for end when a copy back begins: after what was needed has been found, before backward
    has it. That it is whole on the host then is no reason to wipe it."""
    ended = []
    copy_in = ChaosDevice.copy_in

    def ends_those_under_way(device, block):
        for ticket in [each for each in device._pending if each.direction == "out"]:
            device._end(ticket)
            ended.append(ticket)
        return copy_in(device, block)

    monkeypatch.setattr(chaos, "_EARLY", 0)
    monkeypatch.setattr(chaos, "_STUBBORN", 1)
    monkeypatch.setattr(ChaosDevice, "copy_in", ends_those_under_way)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations="70%", policy=chosen, device="chaos:1"):
        evicted = train(CASES["cnn"], STEPS)
    assert plain["cnn"].differences(evicted) == []
    assert ended
