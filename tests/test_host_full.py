"""Promise P4 where the host tier fails: full, disk full, a copy back that fails. Never a wrong number."""

import errno
import os

import pytest
from models import CASES, train

import delta
from delta.runtime import monitor

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


def policy(name, spill_dir, **more):
    return delta.load_policy(name, {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir), **more})


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("device", ["cpu", "chaos:5"])
@pytest.mark.parametrize("name", ["swap", "delta"])
def test_a_full_host_tier_keeps_or_recomputes(name, device, spill_dir):
    plain = train(CASES["cnn"], STEPS)
    chosen = policy(name, spill_dir, **{"host.limit": "8KiB"})
    with delta.evict(activations="20%", policy=chosen, device=device) as run:
        evicted = train(CASES["cnn"], STEPS)
    assert plain.differences(evicted) == []
    assert run.report().swapped_out_bytes < run.report().unevicted_peak_activation_bytes


def test_disk_full_while_spilling_is_told_and_training_goes_on(spill_dir, monkeypatch):
    plain = train(CASES["gpt"], STEPS)
    real = os.pwritev
    calls = []

    def full(fd, buffers, offset, *flags):
        calls.append(offset)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pwritev", full)
    with (
        pytest.warns(RuntimeWarning),
        delta.evict(activations="40%", policy=policy("swap", spill_dir), device="cpu") as run,
    ):
        evicted = train(CASES["gpt"], STEPS)
    assert plain.differences(evicted) == []
    assert len(calls) > 12
    assert run.report().swapped_out_bytes > 0


def test_a_copy_back_that_fails_once_is_asked_for_again(spill_dir, monkeypatch):
    plain = train(CASES["gpt"], STEPS)
    real = os.preadv
    calls = []

    def flaky(fd, buffers, offset, *flags):
        calls.append(offset)
        if len(calls) in (5, 9, 14):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset, *flags)

    with delta.evict(activations="40%", policy=policy("swap", spill_dir), device="cpu") as run:
        monkeypatch.setattr(os, "preadv", flaky)
        evicted = train(CASES["gpt"], STEPS)
    assert plain.differences(evicted) == []
    assert len(calls) > 14
    assert run.report().swapped_in_bytes > 0


def test_a_copy_back_that_keeps_failing_is_a_clear_error_and_leaves_nothing(spill_dir, monkeypatch):
    def broken(fd, buffers, offset, *flags):
        raise OSError(errno.EIO, "Input/output error")

    with (
        pytest.raises(delta.SwapError, match="Input/output error"),
        delta.evict(activations="0%", policy=policy("swap", spill_dir), device="cpu"),
    ):
        monkeypatch.setattr(os, "preadv", broken)
        train(CASES["gpt"], 1)


def test_an_unwritable_spill_directory_is_told_at_once(tmp_path):
    with (
        pytest.raises(delta.SwapError, match="absent"),
        delta.evict(activations="40%", policy=policy("swap", tmp_path / "absent"), device="cpu"),
    ):
        raise AssertionError("the block was entered")
    with delta.evict(device="cpu"):  # the failed block left no session open
        pass


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "device", "activations", "told"),
    [
        ("swap", "cpu", "40%", True),
        ("delta", "cpu", "40%", True),
        ("delta", "cpu", None, False),  # nothing is evicted
        ("recompute", "cpu", "40%", False),  # nothing is copied
        ("delta", "chaos", "40%", False),  # to no file
    ],
)
def test_a_spill_file_that_would_lie_in_memory_is_told(name, device, activations, told, spill_dir, monkeypatch):
    """A common place for temporary files, and under a limit of resident bytes it saves nothing."""
    monkeypatch.setattr(monitor, "_file_system", lambda _: "tmpfs")
    with delta.evict(activations=activations, policy=policy(name, spill_dir), device=device) as run:
        assert train(CASES["gpt"], 1).differences(train(CASES["gpt"], 1)) == []
    found = [text for text in run.report().warnings if str(spill_dir) in text]
    assert len(found) == told
    assert not told or "set host.spill_dir to a directory on disk" in found[0]
