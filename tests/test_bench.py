"""The benchmark: what it counts from outside, who does what when, the figures, and the pages they go to."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import delta
from delta.errors import DeltaError
from delta.runtime import bench, bench_measure, bench_pages
from delta.runtime.bench_measure import BenchResult, Row, Way, machine_facts, measure, spec, turns, ways
from delta.runtime.bench_pages import (
    draw_two_runs,
    example,
    figures,
    fill,
    read_places,
    read_result,
    run_example,
    to_json,
    write_pages,
)
from delta.runtime.bench_view import goals, headline, markdown_table, text
from delta.runtime.demo import DemoOptions, Side
from delta.runtime.demo_measure import ResidentBytes, SavedBytes
from delta.runtime.demo_model import Batches, Gpt, GptConfig, next_byte_loss, stdlib_bytes
from delta.runtime.demo_worker import Spec, serve
from delta.timeline import Timeline

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
TINY = DemoOptions(steps=2, batch=2, layers=2, width=32, seq=16, threads=1, timeline="")
tight = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # so small that one op's tensors are over it


# --- counting from outside --------------------------------------------------------------------------------------------


LARGEST_BYTES = 4 * 32 * 4 * 64 * 4  # of the small GPT: what is inside an MLP, (batch, seq, 4 width) floats


def small_gpt() -> tuple[Gpt, Batches]:
    torch.manual_seed(0)
    return Gpt(GptConfig(layers=3, width=64, heads=4, seq=32)), Batches(stdlib_bytes(), batch=4, seq=32, seed=0)


class Compared(ResidentBytes):
    """Notes, whenever a tensor was brought back, this count and the one in Delta's ledger."""

    def __init__(self, model: Gpt, run: delta.evict) -> None:
        super().__init__(model, run._core.device)
        self._ledger = run._core.engine.ledger
        self.pairs: list[tuple[int, int]] = []

    def give(self, kept: Any) -> torch.Tensor:
        tensor = super().give(kept)
        self.pairs.append((self.live_bytes, self._ledger.resident_bytes))
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
        for step in range(4):
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
    assert "copy_in" not in vars(run._core.device)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_without_an_eviction_both_counts_are_one() -> None:
    model, batches = small_gpt()
    with SavedBytes(model) as plain:
        next_byte_loss(model, batches[0]).backward()
    with delta.evict(model) as run, ResidentBytes(model, run._core.device) as counted:
        next_byte_loss(model, batches[0]).backward()
    assert counted.peak_bytes == plain.peak_bytes > 0


# --- the worker's other ways ------------------------------------------------------------------------------------------


def converse(told: Spec, *requests: Mapping[str, Any]) -> list[dict[str, Any]]:
    answers = StringIO()
    serve([json.dumps(asdict(told)), *map(json.dumps, requests)], answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


STEPS = [{"do": "step", "index": 0, "count": True}, {"do": "step", "index": 1}]


@tight
def test_all_ways_train_alike_and_count_where_they_can() -> None:
    answers = {way.name: converse(spec(way, TINY), *STEPS, {"do": "finish"}) for way in ways("40%")}
    plain = answers["plain"]
    for _, *steps, end in answers.values():
        assert [step["gradients"] for step in steps] == [step["gradients"] for step in plain[1:3]]
        assert end["parameters"] == plain[-1]["parameters"]
        assert "counted_peak_bytes" not in steps[1]
    counted = {name: steps[1]["counted_peak_bytes"] for name, steps in answers.items()}
    assert counted["delta 100%"] == counted["plain"] == plain[-1]["counted_peak_bytes"]
    assert counted["checkpoint"] is None and counted["save_on_cpu"] is None


def test_save_on_cpu_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    original = torch.autograd.graph.save_on_cpu
    monkeypatch.setattr(
        torch.autograd.graph, "save_on_cpu", lambda pin_memory: pinned.append(pin_memory) or original(pin_memory)
    )
    converse(spec(Way("save_on_cpu", "save_on_cpu"), TINY), STEPS[1])
    assert pinned == [True]


# --- who does what ----------------------------------------------------------------------------------------------------


def test_the_ways() -> None:
    assert [(way.name, way.mode, way.activations) for way in ways("300MiB")] == [
        ("plain", "plain", None),
        ("delta 100%", "delta", "100%"),
        ("delta 300MiB", "delta", "300MiB"),
        ("checkpoint", "checkpoint", None),
        ("save_on_cpu", "save_on_cpu", None),
    ]
    with pytest.raises(DeltaError, match=r"activations='100\.0%': that is measured always"):
        ways("100.0%")


def test_only_the_limited_run_writes_a_timeline() -> None:
    told = {way.name: spec(way, replace(TINY, timeline="t.jsonl")) for way in ways("40%")}
    assert {name: one.timeline for name, one in told.items() if one.timeline} == {"delta 40%": "t.jsonl"}
    assert all(spec(way, TINY).timeline is None for way in ways("40%"))


def test_turns() -> None:
    """Three warm-up steps, one timed, one counted; each round begins with the next way. Counted: the first and last."""
    assert "".join(name for name, _, _ in turns("abc", 1)) == "abcbcacababcbca"
    assert [(index, count) for name, index, count in turns("abc", 1) if name == "a"] == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
        (4, True),
    ]


class FakeWorker:
    """A process that is none. Step times are 100 per step number for plain; others take 10 % more, delta 40% 20 %. A
    counted step seems to take no time."""

    def __init__(self, told: Spec) -> None:
        self.told = told
        self.factor = {"100%": 110, "40%": 120}.get(told.activations or "", 100 if told.mode == "plain" else 110)

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_ready(self) -> None:
        pass

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        delta_side = self.told.mode == "delta"
        if request["do"] == "finish":
            report = {"swapped_out_bytes": 3, "swapped_in_bytes": 4, "recomputed_bytes": 5, "peak_activation_bytes": 6}
            report |= {"modes": {"idle": 7}, "warnings": ["of budgets"]}
            end = {"parameters": "p", "start_rss_bytes": 1, "peak_rss_bytes": 70 if delta_side else 100}
            return end | {"rss_method": "m", "report": report if delta_side else None, "counted_peak_bytes": 9999}
        time_ns = 1 if request["count"] else self.factor * (request["index"] + 1)
        answer = {"time_ns": time_ns, "loss": "0x1p+0", "gradients": "g"}
        if request["count"]:
            counted = {None: 1000, "100%": 1000, "40%": 380 + request["index"]}[self.told.activations]
            answer["counted_peak_bytes"] = counted if self.told.mode in ("plain", "delta") else None
        return answer


@pytest.fixture
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_measure, "WorkerProcess", FakeWorker)


@pytest.fixture
def measured(fake_processes: None) -> BenchResult:
    return measure(TINY)


def test_figures_of_a_way(measured: BenchResult) -> None:
    """Two timed steps, numbers 4 and 5: 120 · 4 and 120 · 5 against 400 and 500. Counted in steps 0 and 5."""
    assert measured.limited == Row(
        way="delta 40%",
        step_time_ns=540,
        time_ratio=1.2,
        time_ratio_least=1.2,
        time_ratio_most=1.2,
        peak_rss_bytes=70,
        rss_ratio=0.7,
        peak_device_bytes=None,
        device_ratio=None,
        counted_peak_bytes=385,
        activation_ratio=0.385,
        gradients_identical=True,
        moved_bytes=7,
        recomputed_bytes=5,
        reported_peak_bytes=6,
        modes={"idle": 7},
        warnings=("of budgets",),
    )
    assert [row.moved_bytes for row in measured.rows] == [0, 7, 7, 0, None]
    assert measured.gradients_identical


def test_one_bit_is_a_difference(monkeypatch: pytest.MonkeyPatch, fake_processes: None) -> None:
    honest = bench_measure.side_from

    def flipped(steps: Any, end: Any) -> Side:
        side = honest(steps, end)
        return replace(side, gradients=("g",) * 5 + ("h",)) if end["report"] else side

    monkeypatch.setattr(bench_measure, "side_from", flipped)
    assert not measure(TINY).gradients_identical


def test_a_result_survives_json(measured: BenchResult) -> None:
    assert BenchResult.from_dict(json.loads(to_json(measured))) == measured
    with pytest.raises(DeltaError, match="not a result of the benchmark"):
        BenchResult.from_dict({"rows": []})


def test_a_saved_result_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DeltaError, match="cannot be read"):
        read_result(tmp_path / "none.json")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(DeltaError, match=r"b.json: not JSON"):
        read_result(tmp_path / "b.json")


def test_facts_of_the_machine() -> None:
    facts = machine_facts(TINY)
    assert list(facts) == ["processor", "memory", "host tier", "system", "versions", "commit", "day"]
    assert facts["host tier"].startswith("spill file, ") and facts["host tier"].endswith("/s in")
    assert torch.__version__ in facts["versions"]


# --- for people -------------------------------------------------------------------------------------------------------


def with_limited(result: BenchResult, **changes: Any) -> BenchResult:
    rows = tuple(replace(row, **changes) if row.way == "delta 40%" else row for row in result.rows)
    return replace(result, rows=rows)


def test_goals(measured: BenchResult) -> None:
    found = {goal.text: (goal.measured, goal.met) for goal in goals(measured)}
    assert found == {
        "saved activations under 40%: at most 0.40 of plain": ("0.385", True),
        "step time under 40%: at most 1.15 of plain": ("1.200", False),
        "step time under 40%, beside checkpointing: at most 1.10 of plain": ("1.200", False),
        "resident memory under 40%: at most 1.00 of plain": ("0.700", True),
        "step time at 100%: at most 1.02 of plain": ("1.100", False),
        "bytes moved at 100%: none": ("7 B", False),
        "gradients: those of plain, bit for bit": ("identical", True),
    }
    assert goals(with_limited(measured, activation_ratio=0.401))[0].met is False
    assert goals(with_limited(measured, gradients_identical=False))[-1].met is False


def test_the_table_leaves_out_what_nobody_measured(measured: BenchResult) -> None:
    shown = text(measured)
    limited = next(line for line in shown.splitlines() if line.startswith("delta 40%"))
    cells = ["delta 40%", "540 ns", "1.200", "1.20 to 1.20", "385 B", "0.385", "70 B", "0.700", "7 B", "identical"]
    assert re.split(r"  +", limited) == cells
    assert "device" not in shown.splitlines()[2] and "warning, delta 40%: of budgets" in shown
    assert "device" in markdown_table(with_limited(measured, peak_device_bytes=5)).splitlines()[0]


def test_the_sentence(measured: BenchResult) -> None:
    sentence = headline(measured)
    assert "saved activations peak at **38.5%** and resident memory at **70.0%**" in sentence
    assert "in **1.20** times its step time" in sentence and "takes 1.10 times" in sentence
    assert sentence.endswith("All gradients have the same bits.")
    assert "Not all gradients" in headline(with_limited(measured, gradients_identical=False))


# --- pages ------------------------------------------------------------------------------------------------------------

PAGE = "# A\n<!-- figure: one -->\nold\n<!-- /figure -->\n\n<!-- figure: two -->\nkept\n<!-- /figure -->\n"


def test_filling_a_page() -> None:
    filled = fill(PAGE, {"one": "new \\1\nlines"})
    assert read_places(filled) == {"one": "new \\1\nlines", "two": "kept"}
    assert filled == PAGE.replace("old", "new \\1\nlines")
    with pytest.raises(DeltaError, match="no place <!-- figure: three -->"):
        fill(PAGE, {"three": ""})


def test_the_example_of_a_page() -> None:
    page = "```shell\nls\n```\n\n```python\nprint('one')\nprint(2)\n```\n\n```python\nraise\n```\n"
    assert example(page) == "print('one')\nprint(2)\n"
    assert run_example(page) == "```text\none\n2\n```"
    with pytest.raises(DeltaError, match="holds no ```python block"):
        example("# A\n")
    with pytest.raises(DeltaError, match=r"the example of the page fails:\n(.|\n)*ZeroDivisionError"):
        run_example("```python\n1 / 0\n```\n")


def test_writing_the_pages(measured: BenchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_pages, "run_example", lambda page: "printed")
    (tmp_path / "docs").mkdir()
    for name in figures(measured):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    written = write_pages(measured, tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in written) == [
        "README.md",
        "docs/benchmark.json",
        "docs/benchmark.md",
    ]
    readme = read_places((tmp_path / "README.md").read_text(encoding="utf-8"))
    assert readme == {"example": "printed", "headline": headline(measured)}
    assert read_places((tmp_path / "docs/benchmark.md").read_text(encoding="utf-8"))["ways"] == markdown_table(measured)
    assert read_result(tmp_path / "docs/benchmark.json") == measured


def test_pages_are_written_in_a_checkout_only(measured: BenchResult, tmp_path: Path) -> None:
    with pytest.raises(DeltaError, match=r"README.md cannot be read: .* in a checkout only"):
        write_pages(measured, tmp_path)


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
    monkeypatch.setattr(bench_pages, "WorkerProcess", FakeRun)
    svg = draw_two_runs(replace(TINY, steps=1))
    for words in ("Delta with 40% (peak 40 B)", "plain PyTorch (peak 100 B)", "budget (40 B)", "over 1 training steps"):
        assert words in svg


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def command() -> Any:
    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench.main)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_the_command_measures_saves_and_shows_again(command: Any, fake_processes: None, tmp_path: Path) -> None:
    saved = tmp_path / "b.json"
    first = command("--steps", "2", "--layers", "2", "--width", "32", "--save", str(saved), "--json")
    assert first.exit_code == 0, first.output
    values = json.loads(first.output.splitlines()[-1])
    assert values["gradients_identical"] and values["options"]["layers"] == 2
    again = command("--result", str(saved))
    assert again.output.splitlines() == first.output.splitlines()[:-1]


def test_the_command_fails_when_bits_differ(command: Any, measured: BenchResult, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(to_json(with_limited(measured, gradients_identical=False)))
    assert command("--result", str(tmp_path / "b.json")).exit_code == 1


def test_a_mistake_is_a_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "delta.runtime.bench", "--activations", "8 apples"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("scripts/bench: activations='8 apples': the unit 'apples' is unknown")


@pytest.mark.parametrize(
    ("arguments", "code", "says"), [([], 2, "give one argument"), (["results"], 3, "no CUDA device: torch ")]
)
def test_gpu_check_without_a_card(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [ROOT / "scripts/gpu-check", *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr


@pytest.mark.slow
def test_the_whole_benchmark_for_real() -> None:
    result = measure(replace(TINY, layers=4, width=128, seq=128, batch=4))
    assert result.gradients_identical and all(row.gradients_identical for row in result.rows)
    assert result.row("delta 100%").moved_bytes == 0
    assert result.row("delta 100%").activation_ratio == 1.0
