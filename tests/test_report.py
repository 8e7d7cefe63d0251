"""The report: its text and its dict."""

import dataclasses
import json

import pytest

from delta.report import Report

REPORT = Report(
    policy="delta",
    device="cpu",
    steps=3,
    modes={"planned": 2, "observe": 1},
    peak_activation_bytes=300 * 2**20,
    unevicted_peak_activation_bytes=800 * 2**20,
    peak_device_bytes=2**30,
    budget_bytes=320 * 2**20,
    steps_over=1,
    swapped_out_bytes=2**20,
    swapped_in_bytes=2**19,
    recomputed_bytes=4096,
    recompute_ns=1_300_000,
    stall_ns=2000,
    overhead_ns=5,
    plans={"made": 2, "found": 1},
    longest_plan_ns={"made": 1_700_000, "found": 120_000},
    evictions={"swap": 4, "recompute": 1},
    warnings=("the budget cannot be held",),
)


def test_text_is_a_table_with_units_and_a_legend() -> None:
    assert str(REPORT).splitlines() == [
        "policy delta on cpu",
        "  steps               3 (observe 1, planned 2)",
        "  peak activations    300 MiB (37.5% of unevicted)",
        "  unevicted peak      800 MiB",
        "  peak device memory  1 GiB",
        "  budget              320 MiB, not held in 1 of the steps",
        "  swapped out / in    1 MiB / 512 KiB",
        "  recomputed          4 KiB in 1.3 ms",
        "  saved by encoding   0 B",
        "  stalled             2 µs",
        "  overhead            5 ns",
        "  plans               3 (found 1, made 2), found in 120 µs at most, made in 1.7 ms at most",
        "  evictions           5 (recompute 1, swap 4)",
        "  OOM rescues         0",
        "  warning: the budget cannot be held",
        "activations: bytes of unique storages that autograd has saved, parameters and buffers left out;",
        "unevicted: what they would have been had nothing been evicted; stalled: waiting for copies, and encoding;",
        "overhead: time spent in Delta's own hooks and decisions, replays and stalls left out.",
    ]


def test_text_of_a_run_without_a_step() -> None:
    lines = str(Report(policy="keep", device="cpu")).splitlines()
    assert "  peak activations    0 B" in lines
    assert "  budget              none" in lines
    assert any(line.startswith("  nothing was saved for backward: forward has to run inside") for line in lines)
    assert "nothing was saved" not in str(REPORT)


def test_text_before_the_block_is_entered() -> None:
    assert str(Report(policy="keep", device="")).splitlines()[0] == "policy keep, not entered yet"


def test_dict_has_every_field_and_is_json() -> None:
    values = REPORT.as_dict()
    assert list(values) == [field.name for field in dataclasses.fields(Report)]
    assert json.loads(json.dumps(values)) == values
    assert values["evictions"] == {"swap": 4, "recompute": 1}


def test_report_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.steps = 4  # type: ignore[misc]
