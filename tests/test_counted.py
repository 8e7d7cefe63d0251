"""What is measured outside of Delta: saved activations, the host tier, and all that a step allocates."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import delta
from delta.runtime.demo_measure import AllocatedBytes, ResidentBytes, SavedBytes, standing_bytes
from delta.runtime.demo_model import Batches, Gpt, GptConfig, next_byte_loss, stdlib_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

tight = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # so small that one op's tensors are over it

LARGEST_BYTES = 4 * 32 * 4 * 64 * 4  # of the small GPT: what is inside an MLP, (batch, seq, 4 width) floats


def small_gpt() -> tuple[Gpt, Batches]:
    torch.manual_seed(0)
    return Gpt(GptConfig(layers=3, width=64, heads=4, seq=32)), Batches(stdlib_bytes(), batch=4, seq=32, seed=0)


class Compared(ResidentBytes):
    """Notes, whenever a tensor was brought back, this count and the one in Delta's ledger."""

    def __init__(self, model: Gpt, run: delta.evict) -> None:
        super().__init__(model, run._core.device)
        self._core = run._core
        self.pairs: list[tuple[int, int]] = []

    def give(self, kept: Any) -> torch.Tensor:
        tensor = super().give(kept)
        self._core.hear()  # that a kept one died is told with the next event
        self.pairs.append((self.live_bytes, self._core.engine.ledger.resident_bytes))
        return tensor


@tight
@pytest.mark.parametrize("policy", ["delta", "swap", "recompute"])
def test_what_is_counted_from_outside_is_what_delta_says(policy: str, spill_dir: Path) -> None:
    model, batches = small_gpt()
    with SavedBytes(model) as plain:
        next_byte_loss(model, batches[0]).backward()
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir)})
    with delta.evict(model, activations="40%", policy=chosen) as run:
        peaks = []
        for step in range(8):  # in the last ones calls are noted in place of recorded
            with Compared(model, run) as counted:
                next_byte_loss(model, batches[step]).backward()
            assert counted.live_bytes == 0
            assert all(abs(mine - ledger) <= 0.01 * counted.peak_bytes for mine, ledger in counted.pairs)
            peaks.append(counted.peak_bytes)
    report = run.report()
    assert len(counted.pairs) > 50 and sum(report.evictions.values()) > 0
    # Here a storage counts when Delta's pack is called; Delta then first takes note of copies that have ended.
    assert 0.99 * report.peak_activation_bytes <= max(peaks) <= report.peak_activation_bytes + LARGEST_BYTES
    assert report.unevicted_peak_activation_bytes == plain.peak_bytes


@tight
def test_counting_from_outside_changes_nothing(spill_dir: Path) -> None:
    model, batches = small_gpt()
    next_byte_loss(model, batches[0]).backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    chosen = delta.load_policy("delta", {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir)})
    with delta.evict(model, activations="20%", policy=chosen) as run, ResidentBytes(model, run._core.device):
        next_byte_loss(model, batches[0]).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
    assert not {"copy_in", "copy_out"} & vars(run._core.device).keys()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_without_an_eviction_both_counts_are_one() -> None:
    model, batches = small_gpt()
    with SavedBytes(model) as plain:
        next_byte_loss(model, batches[0]).backward()
    with delta.evict(model) as run, ResidentBytes(model, run._core.device) as counted:
        next_byte_loss(model, batches[0]).backward()
    assert counted.peak_bytes == plain.peak_bytes > 0


@tight
def test_the_host_tier_is_counted_where_something_went(spill_dir: Path) -> None:
    model, batches = small_gpt()
    peaks = {}
    for policy in ("swap", "recompute"):
        chosen = delta.load_policy(policy, {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir)})
        with (
            delta.evict(model, activations="20%", policy=chosen) as run,
            ResidentBytes(model, run._core.device) as counted,
        ):
            next_byte_loss(model, batches[0]).backward()
        peaks[policy] = counted.host_peak_bytes
        moved = run.report().swapped_out_bytes
        # Blocks of the file are a little larger than what is in them; room that was given back is used again.
        assert (moved > 0) == (policy == "swap") and peaks[policy] <= 1.2 * moved
    assert peaks["recompute"] == 0 < LARGEST_BYTES <= peaks["swap"]


def test_all_that_a_step_allocates_is_seen() -> None:
    x = torch.ones(1000)
    with AllocatedBytes() as counted:
        y = x + 1  # 4,000 bytes
        y = y * 2  # two of them at once
        del y
        x * 3
    assert 8000 <= counted.peak_bytes < 8100  # the numbers that ops are given take a few bytes, too


def test_garbage_of_an_earlier_count_does_not_lower_a_later_one() -> None:
    with AllocatedBytes():
        cycle: list[object] = [torch.ones(1000)]
        cycle.append(cycle)
        del cycle
    with AllocatedBytes() as counted:
        gc.collect()
        kept = torch.ones(1000)
    assert counted.peak_bytes >= 4 * kept.numel()


def test_what_stands_from_step_to_step_is_counted_once() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW([layer.weight])
    layer.register_buffer("again", layer.weight.detach())
    assert standing_bytes(layer, optimizer) == 64
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert standing_bytes(layer, optimizer) == 64 + 2 * 64 + 4  # both moments, and the step number
