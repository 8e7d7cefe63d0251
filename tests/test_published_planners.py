"""Planners of published policies on the real CPU engine: the same numbers as plain PyTorch, under the budget."""

import pytest
from models import CASES, train

import delta

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5


@pytest.mark.parametrize("policy", ["optimal-checkpoint", "capuchin"])
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_half_of_the_activations_are_enough(name, policy, spill_dir):
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir)})
    with delta.evict(activations="50%", policy=chosen) as run:
        evicted = train(CASES[name], STEPS)
    report = run.report()
    assert train(CASES[name], STEPS).differences(evicted) == []
    assert report.peak_activation_bytes <= 0.505 * report.unevicted_peak_activation_bytes
    assert sum(report.evictions.values()) > 0
    assert not report.warnings
