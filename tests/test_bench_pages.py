"""The benchmark's result for people: goals, tables, and the pages they go to."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeWorker, install, measured_with_fakes, names, result_of, row, with_row

from delta.errors import DeltaError
from delta.runtime.bench import picture
from delta.runtime.bench.goals import goals
from delta.runtime.bench.pages import (
    figures,
    largest_figures,
    nothing_measured,
    read_bench,
    read_largest,
    write_bench,
    write_largest,
)
from delta.runtime.bench.picture import draw_two_runs
from delta.runtime.bench.result import BenchResult
from delta.runtime.bench.view import headline, markdown_table, text
from delta.runtime.demo import DemoOptions
from delta.runtime.pages import example, fill, read_places, run_example, table
from delta.timeline import Timeline

ROOT = Path(__file__).parent.parent


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> BenchResult:
    install(monkeypatch)
    return measured_with_fakes()


def test_what_the_host_takes_is_shown_where_somebody_measured_it(measured: BenchResult) -> None:
    assert "launched" not in text(measured)
    told = text(with_row(measured, "delta 40%", host_time_ns=211_000_000))
    assert "launched: how long the host" in told and "211 ms" in told


def test_rows_of_steps_are_shown_where_there_are_any(measured: BenchResult) -> None:
    assert "in a row" not in text(measured)
    told = text(with_row(measured, "delta 40%", row_ratio=1.125))
    assert "in a row: the ratio" in told and "1.125" in told


RESERVED = "reserved at most 1.05 of allocated, or as much of it as plain's"

# --- goals ------------------------------------------------------------------------------------------------------------


def found(result: BenchResult) -> dict[str, tuple[str, bool | None]]:
    return {goal.text: (goal.measured, goal.met) for goal in goals(result)}


def test_goals(measured: BenchResult) -> None:
    quick, measured = measured, replace(measured, options=replace(measured.options, quick=False))
    assert found(measured) == {
        "100%: step time at most 1.01 of plain": ("1.100", False),
        "faster than checkpoint at no more memory": ("delta 40%: 1.200 against 1.300", True),
        "100%: no byte moved": ("7 B", False),
        "saved activations within every budget": ("delta 100%: 1.000 of it", True),
        "gradients are plain's, bit for bit": ("identical", True),
    }
    assert found(with_row(measured, "delta 40%", counted_peak_bytes=401))["saved activations within every budget"] == (
        "delta 40%: 1.002 of it",
        False,
    )
    assert found(with_row(measured, "delta 40%", reported_peak_bytes=402))["saved activations within every budget"] == (
        "delta 40%: 1.005 of it",
        False,
    ), "in a step that nobody counted"
    assert set(found(quick)) == set(list(found(measured))[2:]), "times mean nothing there"
    different = found(with_row(measured, "delta 40%", gradients="different"))
    assert different["gradients are plain's, bit for bit"] == ("different", False)
    assert not with_row(measured, "delta 40%", gradients="different").succeeded
    assert measured.succeeded


def test_a_crash_of_delta_is_a_goal_missed(measured: BenchResult) -> None:
    def failed(*ways: str) -> BenchResult:
        model = measured.models[0]
        rows = tuple(row for row in model.rows if row.way not in ways)
        failed = dict.fromkeys(ways, "RuntimeError: illegal address\nat 0")
        return replace(measured, models=(replace(model, rows=rows, failed=failed),))

    result = failed("delta 40%", "delta 100%")
    assert found(result)["delta 40% trains"] == ("RuntimeError: illegal address", False)
    assert not result.succeeded
    assert "delta 40% trains" in text(result) and "failed: RuntimeError: illegal address" in text(result)
    assert failed("checkpoint").succeeded, "what others do is no fault of Delta's"
    nothing = replace(measured, models=(replace(measured.models[0], rows=(), failed={"plain": "too large"}),))
    assert not nothing.succeeded
    assert "| byte-gpt | plain | failed: too large |" in markdown_table(nothing).splitlines()


@pytest.mark.parametrize(
    ("peak_bytes", "ratio", "measured", "met"),
    [
        (100, 1.29, "delta 50%: 1.290 against 1.300", True),
        (100, 1.30, "delta 50%: 1.300 against 1.300", False),
        (101, 1.00, "takes 1 B more than 100 B", False),
        (None, 1.00, "not measured", None),
    ],
)
def test_beside_checkpointing_only_rows_that_take_no_more_count(
    peak_bytes: int | None, ratio: float, measured: str, met: bool | None
) -> None:
    result = result_of(
        "cpu",
        "unet",
        row("plain"),
        row("checkpoint", time_ratio=1.3, peak_allocated_bytes=100),
        row("delta 50%", time_ratio=ratio, peak_allocated_bytes=peak_bytes),
    )
    assert found(result)["faster than checkpoint at no more memory"] == (measured, met)


@pytest.mark.parametrize(
    ("device", "model", "most"), [("cpu", "bert", 1.05), ("cpu", "resnet50", 1.06), ("cuda", "resnet101", 1.08)]
)
def test_what_a_step_may_take_depends_on_device_and_model(device: str, model: str, most: float) -> None:
    for ratio, met in ((most, True), (most + 0.001, False)):
        goal = found(result_of(device, model, row("plain"), row("delta 50%", time_ratio=ratio)))
        assert goal[f"50%: step time at most {most:.2f} of plain"] == (f"{ratio:.3f}", met)


def test_on_cuda_a_short_step_is_not_held_to_one_per_cent_and_reserved_bytes_count() -> None:
    for step_time_ns, held in ((60_000_000, True), (40_000_000, False)):
        idle = row("delta 100%", peak_reserved_bytes=106, peak_allocated_bytes=100)
        goal = found(result_of("cuda", "swin", row("plain", step_time_ns=step_time_ns), idle))
        assert ("100%: step time at most 1.01 of plain" in goal) == held
        assert goal[RESERVED] == ("1.060 (1.050)", False)


def test_delta_may_reserve_as_much_of_what_is_allocated_as_plain_does() -> None:
    for plain_bytes, met in ((106, True), (105, False)):
        plain = row("plain", peak_reserved_bytes=plain_bytes, peak_allocated_bytes=100)
        half = row("delta 50%", peak_reserved_bytes=53, peak_allocated_bytes=50)
        assert found(result_of("cuda", "swin", plain, half))[RESERVED][1] is met


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_table_leaves_out_what_nobody_measured_and_says_why_a_way_is_missing(measured: BenchResult) -> None:
    shown = text(measured).splitlines()
    heading = next(line for line in shown if line.startswith("model"))
    assert "floor" in heading and "reserved" not in heading
    limited = next(line for line in shown if line.startswith("byte-gpt  delta 40%"))
    times = ["byte-gpt", "delta 40%", "1.14 µs", "1.200", "1.20 to 1.20", "1.100"]
    peaks = ["386 B", "0.386", "2.83 KiB", "0.580", "70 B", "0.700", "3 B"]
    assert re.split(r"  +", limited) == [*times, *peaks, "7 B", "identical"]
    failed = next(line for line in shown if line.startswith("byte-gpt  save_on_cpu"))
    assert failed.endswith("failed: killed") and "in pieces" not in text(measured)
    assert any(line.endswith("not available on cpu: it needs streams") for line in shown)
    assert "warning, byte-gpt, delta 40%: of budgets" in shown
    assert "reserved" in markdown_table(with_row(measured, "delta 40%", peak_reserved_bytes=5)).splitlines()[0]


def test_the_sentence(measured: BenchResult) -> None:
    sentence = headline(measured)
    assert sentence is not None
    assert "saved activations peak at **38.6%** and resident memory at **70.0%**" in sentence
    assert "in **1.20** times its step time; `torch.utils.checkpoint` on every block takes 1.30 times" in sentence
    assert sentence.endswith("All gradients have the same bits.")
    different = headline(with_row(measured, "delta 40%", gradients="different"))
    assert different is not None and "Not all gradients" in different
    assert headline(result_of("cpu", "unet", row("plain"), row("delta 50%"))) is None


def test_the_sentence_is_of_the_budget_nearest_to_a_half(measured: BenchResult) -> None:
    model = measured.models[0]
    rows = (*model.rows, replace(model.rows[-1], way="delta 55%", time_ratio=1.07))
    sentence = headline(replace(measured, models=(replace(model, rows=rows),)))
    assert sentence is not None and 'activations="55%"' in sentence and "**1.07** times" in sentence


# --- pages ------------------------------------------------------------------------------------------------------------

PAGE = "# A\n<!-- figure: one -->\nold\n<!-- /figure -->\n\n<!-- figure: two -->\nkept\n<!-- /figure -->\n"


def test_filling_a_page() -> None:
    filled = fill(PAGE, {"one": "new \\1\nlines"})
    assert read_places(filled) == {"one": "new \\1\nlines", "two": "kept"}
    assert filled == PAGE.replace("old", "new \\1\nlines")
    with pytest.raises(DeltaError, match="no place <!-- figure: three -->"):
        fill(PAGE, {"three": ""})


def test_a_table() -> None:
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_example_of_a_page() -> None:
    page = "```shell\nls\n```\n\n```python\nprint('one')\nprint(2)\n```\n\n```python\nraise\n```\n"
    assert example(page) == "print('one')\nprint(2)\n"
    assert run_example(page) == "```text\none\n2\n```"
    with pytest.raises(DeltaError, match="holds no ```python block"):
        example("# A\n")
    with pytest.raises(DeltaError, match=r"the example of the page fails:\n(.|\n)*ZeroDivisionError"):
        run_example("```python\n1 / 0\n```\n")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The pages of this one, to be filled."""
    for name in ("README.md", "docs/benchmarks/cpu.md", "docs/benchmarks/cuda.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def places(checkout: Path, name: str) -> dict[str, str]:
    return read_places((checkout / name).read_text(encoding="utf-8"))


def test_writing_the_pages(measured: BenchResult, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta.runtime.pages.run_example", lambda page: "printed")
    before = places(checkout, "docs/benchmarks/cpu.md")
    written = write_bench(measured, checkout)
    assert names(written, checkout) == ["README.md", "docs/benchmarks/cpu.json", "docs/benchmarks/cpu.md"]
    assert places(checkout, "README.md") == {"example": "printed", "headline": headline(measured)}
    page = places(checkout, "docs/benchmarks/cpu.md")
    assert page["ways"] == markdown_table(measured) and page["max-batch"] == before["max-batch"]
    assert "- command: `scripts/bench --quick`" in page["setting"] and "- commit: abc" in page["setting"]
    assert read_bench(checkout / "docs/benchmarks/cpu.json") == measured


def test_a_result_of_cuda_goes_to_its_own_page(measured: BenchResult, checkout: Path) -> None:
    result = replace(measured, options=replace(measured.options, device="cuda"))
    assert set(figures(result)) == {"docs/benchmarks/cuda.md"}
    assert names(write_bench(result, checkout), checkout) == ["docs/benchmarks/cuda.json", "docs/benchmarks/cuda.md"]
    assert set(nothing_measured("cuda")) == set(places(checkout, "docs/benchmarks/cuda.md"))


def test_a_search_goes_to_the_page_too(checkout: Path) -> None:
    from test_largest import searched

    result = searched()
    written = write_largest(result, checkout)
    assert names(written, checkout) == ["docs/benchmarks/cpu.md", "docs/benchmarks/max-batch-cpu.json"]
    assert (
        places(checkout, "docs/benchmarks/cpu.md")["max-batch"]
        == (largest_figures(result)["docs/benchmarks/cpu.md"]["max-batch"])
    )
    assert read_largest(checkout / "docs/benchmarks/max-batch-cpu.json") == result


def test_pages_are_written_in_a_checkout_only(measured: BenchResult, tmp_path: Path) -> None:
    with pytest.raises(DeltaError, match=r"README.md cannot be read: .* in a checkout only"):
        write_bench(measured, tmp_path)


class FakeRun(FakeWorker):
    """Writes a timeline with one step that holds 100 bytes, or 40 under a limit."""

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.told.mode == "delta" and self.told.timeline is not None
        if request["do"] == "finish":
            held, limit = (100, None) if self.told.activations is None else (40, 40)
            timeline = Timeline(self.told.timeline, {})
            timeline.emit("memory", 5, resident_bytes=held, limit_bytes=limit)
            timeline.emit("step", 9, index=0, mode="idle", start_ns=1, end_ns=9, peak_bytes=held)
            timeline.close()
        return {}


def test_the_picture_is_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "WorkerProcess", FakeRun)
    svg = draw_two_runs(DemoOptions(steps=1, batch=2, layers=2, width=32, seq=16, threads=1))
    for words in ("Delta with 40% (peak 40 B)", "plain PyTorch (peak 100 B)", "budget (40 B)", "over 1 training steps"):
        assert words in svg
