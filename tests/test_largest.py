"""The largest batch that fits: the search itself, what is told to whom, and one for real."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from delta.errors import DeltaError
from delta.runtime.bench import largest as searching
from delta.runtime.bench import largest_view
from delta.runtime.bench.largest import Found, LargestOptions, LargestResult, Trial, TryBatch, search
from delta.runtime.bench.search import largest
from delta.runtime.demo_process import OutOfMemory
from delta.runtime.demo_worker import Spec
from delta.runtime.side_by_side import STEPS_BEFORE

# --- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fits", [0, 1, 2, 3, 7, 8, 9, 100, 1000])
@pytest.mark.parametrize("start", [1, 8, 50, 5000])
def test_the_largest_that_passes_is_found(fits: int, start: int) -> None:
    tried: list[int] = []

    def passes(number: int) -> bool:
        tried.append(number)
        return number <= fits

    assert largest(passes, start, most=1000) == fits
    assert len(tried) == len(set(tried)) <= 25 and min(tried) >= 1 and max(tried) <= 1000


def test_close_enough_is_close_enough() -> None:
    tried: list[int] = []
    found = largest(lambda number: (tried.append(number), number <= 900)[1], 1, most=10**6, precision=0.1)
    assert 900 / 1.1 <= found <= 900 and len(tried) <= 15
    assert tried[0] == 1


# --- what is searched -------------------------------------------------------------------------------------------------

OPTIONS = LargestOptions(models=("unet",), limit="1000B", ways=("checkpoint",), precision=0, quick=True)
FITS = {"plain": 10, "delta": 40}


def fake_trial(told: Spec, batch: int, timed: bool) -> Trial:
    """Plain fits up to 10, Delta up to 40; its speed falls from that of plain by a hundredth for each more."""
    if batch > FITS[told.mode]:
        return Trial(batch, None, why="no more")
    speed = 100.0 - max(0, batch - 10) if told.mode == "delta" else 100.0
    return Trial(batch, batch, speed if timed else None)


def searched(try_batch: TryBatch = fake_trial, **changes: Any) -> LargestResult:
    return search(replace(OPTIONS, **changes), {"commit": "abc"}, "scripts/bench max-batch", try_batch)


def test_the_largest_batch_of_each_way_beside_plain() -> None:
    result = searched(policies=("delta", "dtr"))
    plain, delta, dtr = result.found
    assert (plain.way, plain.batch, plain.samples_per_s, plain.batch_ratio, plain.fast_batch) == (
        "plain",
        10,
        100,
        1,
        10,
    )
    assert (delta.way, delta.batch, delta.samples_per_s) == ("delta", 40, 70)
    assert (delta.batch_ratio, delta.speed_ratio, delta.fast_batch, delta.fast_batch_ratio) == (4.0, 0.7, 20, 2.0)
    assert [trial.batch for trial in plain.trials if trial.samples_per_s is not None] == [10]
    assert dtr.way == "dtr" and dtr.batch == 40
    assert dict(result.missing) == {"checkpoint": "on a CPU its saved activations cannot be counted"}
    tried = [trial.batch for trial in delta.trials]
    assert tried == sorted(set(tried))


def test_of_a_way_that_is_fast_at_its_largest_batch_that_is_the_answer() -> None:
    """A smaller one may be slower: the host does the same for less."""

    def uneven(told: Spec, batch: int, timed: bool) -> Trial:
        trial = fake_trial(told, batch, timed)
        return replace(trial, samples_per_s=50.0) if timed and told.mode == "delta" and batch < 40 else trial

    def even(told: Spec, batch: int, timed: bool) -> Trial:
        trial = uneven(told, batch, timed)
        return replace(trial, samples_per_s=95.0) if timed and batch == 40 else trial

    assert [found.fast_batch for found in searched(even).found] == [10, 40]
    assert [found.fast_batch for found in searched(uneven).found] == [10, 0]


def test_a_batch_that_is_smaller_than_plain_s_may_be_slower_by_itself() -> None:
    def uneven(told: Spec, batch: int, timed: bool) -> Trial:
        if told.mode == "delta" and batch > 36:
            return Trial(batch, 2000, why="over the limit")
        trial = fake_trial(told, batch, timed)
        slow = told.mode == "delta" and batch != 10
        return replace(trial, samples_per_s=50.0 if slow else 95.0) if timed else trial

    assert [found.fast_batch for found in searched(uneven).found] == [10, 10]


def test_what_is_over_the_limit_in_a_later_step_does_not_fit() -> None:
    def growing(told: Spec, batch: int, timed: bool) -> Trial:
        if timed and told.mode == "delta" and batch > 33:
            return Trial(batch, 2000, why="over the limit")
        return fake_trial(told, batch, timed)

    _, delta = searched(growing).found
    assert delta.batch == 33 and delta.samples_per_s == 77


def test_a_way_that_fails_costs_no_other_one() -> None:
    """Where that is plain, there is nothing to compare the others of that model with."""

    def failing(told: Spec, batch: int, timed: bool) -> Trial:
        if told.policy == "dtr" or (told.model == "byte-gpt" and told.mode == "plain"):
            raise DeltaError("CUDA error\nsomewhere")
        return fake_trial(told, batch, timed)

    seen: list[LargestResult] = []
    options = replace(OPTIONS, models=("byte-gpt", "unet"), policies=("dtr", "delta"))
    result = search(options, {}, "", failing, so_far=seen.append)
    assert [(found.model, found.way) for found in result.found] == [("unet", "plain"), ("unet", "delta")]
    assert result.failed == {"byte-gpt, plain": "CUDA error\nsomewhere", "unet, dtr": "CUDA error\nsomewhere"}
    assert [len(found.found) for found in seen] == [0, 1, 1, 2]
    assert "unet, dtr: failed: CUDA error" in largest_view.text(result).splitlines()


def test_what_the_processes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Spec] = []

    def noting(spec: Spec, batch: int, timed: bool) -> Trial:
        if not timed:
            told.append(spec)
        return Trial(batch, 1, 1.0 if timed else None)

    search(replace(OPTIONS, policies=("dtr",), most=1), {}, "", noting)
    assert [(spec.mode, spec.policy, spec.activations, spec.budget) for spec in told] == [
        ("plain", "delta", None, None),
        ("delta", "dtr", "1000", None),
    ]
    told.clear()
    search(replace(OPTIONS, device="cuda", quick=False, most=1), {}, "", noting)
    assert [(spec.mode, spec.activations, spec.budget) for spec in told] == [
        ("plain", None, "1000"),
        ("checkpoint", None, "1000"),
        ("delta", None, "952"),  # of which it lets 1.05 be reserved
    ]


def test_a_model_that_does_not_fit_at_all_is_said() -> None:
    result = searched(lambda told, batch, timed: Trial(batch, None, why="too small"))
    why = "it does not train with a batch of 1 under limit='1000B': too small"
    assert (result.found, result.failed) == ((), {"unet, plain": why})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"limit": "40%"}, "limit='40%': give bytes, such as 8GiB"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"ways": ("compile",)}, "way='compile': known are checkpoint, sac"),
        ({"models": ("vgg",)}, "model='vgg'"),
    ],
)
def test_what_cannot_be_is_said(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(DeltaError, match=says):
        replace(OPTIONS, **wrong)


def test_a_result_survives_json_and_fills_a_table() -> None:
    result = searched()
    assert LargestResult.from_dict(json.loads(json.dumps(result.as_dict()))) == result
    with pytest.raises(DeltaError, match="not a result of max-batch"):
        LargestResult.from_dict({"found": []})
    assert "| unet | delta | 40 | 4.00 | 70.00 | 0.70 | 20 | 2.00 |" in largest_view.markdown(result)
    assert "checkpoint: on a CPU" in largest_view.text(result)


def test_the_papers_goals_are_for_cuda() -> None:
    def goals(device: str, ratio: float, way: str = "delta") -> list[str]:
        found = Found("resnet50", way, 1, 1.0, 1.0, 1.0, 1, ratio, ())
        result = replace(searched(), found=(found,))
        return list(largest_view.goals(replace(result, options=replace(result.options, device=device, quick=True))))

    assert goals("cpu", 3.0) == []
    assert goals("cuda", 2.25) == ["resnet50, delta: at least 2.25 x plain's batch: met"]
    assert goals("cuda", 2.24) == ["resnet50, delta: at least 2.25 x plain's batch: missed"]
    assert goals("cuda", 2.24, way="checkpoint") == [], "nobody has promised that of it"


# --- trials -----------------------------------------------------------------------------------------------------------


class FakeProcess:
    """Steps of 1 s, but those before the timed ones take 9; 100 bytes a sample, and out of memory from 16 on."""

    def __init__(self, told: Spec, settings: Mapping[str, str]) -> None:
        self.batch = told.sizes["batch"]

    def __enter__(self) -> "FakeProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_ready(self) -> None:
        if self.batch >= 16:
            raise OutOfMemory("no room\nat all")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "finish":
            return {"peak_reserved_bytes": None, "report": {"peak_activation_bytes": 90 * self.batch}}
        cold = request["index"] < STEPS_BEFORE
        return {"time_ns": 9 * 10**9 if cold else 10**9, "counted_peak_bytes": 100 * self.batch}


def test_a_trial_fits_within_the_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "WorkerProcess", FakeProcess)
    (found, *_) = search(replace(OPTIONS, policies=()), {}, "").found
    assert found.batch == 10 and found.samples_per_s == 10.0
    outcomes = {trial.batch: (trial.peak_bytes, trial.why) for trial in found.trials}
    assert outcomes[10] == (1000, "") and outcomes[16] == (None, "no room") and outcomes[11] == (1100, "over the limit")


@pytest.mark.slow
def test_a_search_for_real() -> None:
    """What a batch of 1 saves fits, and that of 2 does not."""
    options = LargestOptions(models=("unet",), limit="100KiB", steps=1, most=8, threads=1, quick=True)
    plain, delta = search(options, {}, "").found
    assert 0 < plain.batch < delta.batch
    fitting = [trial for found in (plain, delta) for trial in found.trials if trial.fits]
    assert all(trial.peak_bytes is not None and trial.peak_bytes <= options.limit_bytes for trial in fitting)
