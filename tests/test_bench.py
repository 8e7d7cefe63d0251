"""The benchmark: what is compared, who does what when, and the figures that come of it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import FACTORS, TINY, FakeWorker, install, measured_with_fakes, row, spec, with_row
from typer.testing import CliRunner

from delta.errors import DeltaError
from delta.runtime import side_by_side
from delta.runtime.bench import __main__ as command_line
from delta.runtime.bench import measure as measuring
from delta.runtime.bench import options as choosing
from delta.runtime.bench.measure import level_with_rivals, measure
from delta.runtime.bench.options import CPU_WAYS, BenchOptions, Way, default_models, left_out
from delta.runtime.bench.pages import read_bench
from delta.runtime.bench.result import BenchResult, ModelResult, Row
from delta.runtime.demo_worker import Spec, serve
from delta.runtime.facts import machine_facts
from delta.runtime.pages import to_json
from delta.simulate.floor import Floor
from delta.units import Share

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
tight = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # so small that one op's tensors are over it


@pytest.fixture
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture
def measured(fake_processes: None) -> BenchResult:
    return measured_with_fakes()


# --- what is compared -------------------------------------------------------------------------------------------------


def test_the_ways() -> None:
    options = replace(TINY, ways=("delta", "checkpoint", "plain"), budgets=("100%", "300MiB"))
    assert options.compared() == (
        Way("plain"),
        Way("delta", "100%"),
        Way("delta", "300MiB"),
        Way("checkpoint"),
    )
    assert [way.name for way in options.compared()] == ["plain", "delta 100%", "delta 300MiB", "checkpoint"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"threads": 0}, "threads=0: must be at least 1"),
        ({"ways": ("gist",)}, "way='gist': known are plain, checkpoint"),
        ({"budgets": ("8 apples",)}, "budgets='8 apples': the unit 'apples' is unknown"),
        ({"models": ("vgg",)}, "model='vgg': known are byte-gpt"),
        ({"policy": "none-such"}, "none-such"),
    ],
)
def test_what_cannot_be_is_said(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(DeltaError, match=says):
        replace(TINY, **wrong)


def test_models_whose_package_is_missing_are_left_out_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_models("cpu", False) == ("byte-gpt", "gpt", "bert", "resnet50", "vit", "unet")
    assert {"llama-1b", "swin", "gpt-varied", "resnet101"} < set(default_models("cuda", False))
    monkeypatch.setattr("delta.runtime.zoo.find_spec", lambda package: None)
    assert default_models("cpu", False) == ("byte-gpt", "unet")
    assert left_out("cpu", True) == ("gpt", "resnet50")
    with pytest.raises(DeltaError, match="pip install transformers"):
        BenchOptions(models=("gpt",))


def test_quick_is_tiny_on_a_cpu_and_small_on_cuda() -> None:
    quick = replace(TINY, models=("unet", "byte-gpt"))
    assert quick.sizes("unet") == choosing.zoo.ZOO["unet"].tiny
    assert replace(quick, device="cuda").sizes("unet") == choosing.zoo.ZOO["unet"].cpu
    assert (quick.overrides, replace(quick, device="cuda").overrides) == ({"filter.min_bytes": 0}, {})


# --- who does what ----------------------------------------------------------------------------------------------------


def test_only_the_last_budget_writes_a_timeline(fake_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Spec] = []

    class Noting(FakeWorker):
        def __init__(self, spec: Spec, settings: Mapping[str, str]) -> None:
            super().__init__(spec, settings)
            told.append(spec)

    monkeypatch.setattr(side_by_side, "WorkerProcess", Noting)
    measure(TINY, "byte-gpt", timeline=Path("t.jsonl"))
    assert [spec.activations for spec in told if spec.timeline == "t.jsonl"] == ["40%"]
    assert all(spec.overrides == {"filter.min_bytes": 0} for spec in told)


def test_rows_of_steps_are_trained_on_cuda(fake_processes: None) -> None:
    """A CPU has done what it was given when it is given more."""
    found = measure(replace(TINY, device="cuda"), "byte-gpt")
    assert {row.way: row.row_ratio for row in found.rows if row.way in FACTORS} == {
        "plain": 1.0,
        "checkpoint": 1.3,
        "delta 100%": 1.1,
        "delta 40%": 1.2,
    }
    assert {row.row_ratio for row in measure(TINY, "byte-gpt").rows} == {None}


# --- the figures ------------------------------------------------------------------------------------------------------


MIB = 2**20


def level(checkpoint_mib: int, *deltas: tuple[int, int]) -> list[str]:
    """The budgets with which Delta should take what checkpointing takes; `deltas`: budget and allocated, in MiB."""
    rows = [
        row("plain", peak_allocated_bytes=900 * MIB),
        row("checkpoint", peak_allocated_bytes=checkpoint_mib * MIB),
        row("sac", peak_allocated_bytes=100 * MIB),
        *(row(f"delta {b}", budget_bytes=b * MIB, peak_allocated_bytes=a * MIB) for b, a in deltas),
    ]
    return [way.name for way in level_with_rivals(rows)]


def test_delta_is_measured_with_what_a_rival_takes() -> None:
    assert level(400, (300, 700), (150, 550)) == []  # 150 - (550 - 396) would be less than nothing
    assert level(500, (300, 700), (150, 550)) == ["delta 95MiB"]
    assert level(549, (300, 700), (150, 550)) == ["delta 143MiB"]
    assert level(550, (300, 700), (150, 550)) == [], "it takes no more"
    assert level(600, (300, 700), (150, 550)) == [], "it takes less already"
    assert level(500) == []
    assert level(508, (235, 557), (181, 563)) == ["delta 120MiB"], "from the smallest, though it took more"
    assert level(560, (235, 557), (181, 563)) == [], "one of them takes less already"


def test_budgets_that_are_level_with_a_rival_are_measured_too(
    fake_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aimed again from what the last one took, none of them twice, and not for ever."""
    aims = {3: ["40%"], 4: ["40%", "30%"], 5: ["20%"], 6: ["10%"]}
    monkeypatch.setattr(measuring, "level_with_rivals", lambda rows: [Way("delta", b) for b in aims[len(rows)]])
    asked: list[Any] = []

    def floors(trace: object, policy: object, budgets: list[Any], link: object) -> list[Floor]:
        asked.extend(budgets)
        return [Floor(budget.fraction * 100, 400, 10, 10) for budget in budgets]

    monkeypatch.setattr(measuring, "floors", floors)
    model = measure(replace(TINY, budgets=("100%",), ways=("plain", "checkpoint", "delta")), "byte-gpt")
    assert [row.way for row in model.deltas] == ["delta 100%", "delta 40%", "delta 30%", "delta 20%"]
    assert asked == [Share(1.0), Share(0.4), Share(0.3), Share(0.2)]
    found = model.delta("40%")
    assert found is not None and (found.time_ratio, found.floor_ratio) == (1.2, 1 + 0.4 * 100 / 400 / 2)


def test_figures_of_a_way(measured: BenchResult) -> None:
    """Two timed steps, numbers 8 and 9: 120 · 9 and 120 · 10 against 900 and 1000. Counted in steps 0 and 6."""
    assert measured.models[0].delta("40%") == Row(
        way="delta 40%",
        step_time_ns=1140,
        time_ratio=1.2,
        time_ratio_least=1.2,
        time_ratio_most=1.2,
        floor_ratio=1.1,
        gradients="identical",
        peak_rss_bytes=70,
        rss_ratio=0.7,
        counted_peak_bytes=386,
        activation_ratio=0.386,
        peak_allocated_bytes=2900,
        allocated_ratio=0.58,
        host_bytes=3,
        moved_bytes=7,
        recomputed_bytes=5,
        reported_peak_bytes=6,
        budget_bytes=400,
        modes={"idle": 7},
        warnings=("of budgets",),
    )
    rows = {row.way: row for row in measured.models[0].rows}
    assert {way: row.moved_bytes for way, row in rows.items()} == {
        "plain": 0,
        "checkpoint": 0,
        "delta 100%": 7,
        "delta 40%": 7,
    }
    assert rows["delta 100%"].floor_ratio == 1.0 and rows["checkpoint"].floor_ratio is None
    assert measured.gradients_identical


def test_a_way_that_cannot_be_or_fails_is_missing_with_the_reason(measured: BenchResult) -> None:
    assert measured.models[0].failed == {"sac": "no blocks", "save_on_cpu": "killed\nin pieces"}
    missing = dict(measured.models[0].missing)
    assert missing.pop("offloader") == "not available on cpu: it needs streams"
    assert missing == {
        "compile 100%": "not available on cpu: compared on CUDA only",
        "compile 40%": "not available on cpu: compared on CUDA only",
    }


def test_plain_must_not_fail(fake_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FakeWorker):
        def wait_ready(self) -> None:
            raise DeltaError("plain is out of order")

    monkeypatch.setattr(side_by_side, "WorkerProcess", Failing)
    with pytest.raises(DeltaError, match="plain is out of order"):
        measure(TINY, "byte-gpt")


def test_what_is_known_so_far_is_told_after_each_way(fake_processes: None) -> None:
    seen: list[ModelResult] = []
    last = measure(TINY, "byte-gpt", so_far=seen.append)
    assert [(len(result.rows), len(result.failed)) for result in seen] == [(2, 0), (2, 1), (2, 2), (3, 2), (4, 2)]
    assert replace(seen[-1], rows=last.rows) == last


@pytest.mark.parametrize("name", ["record", "floors"])
def test_floors_that_nobody_can_tell_cost_no_figure(
    fake_processes: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def failing(*_: object) -> None:
        raise DeltaError("no trace")

    monkeypatch.setattr(measuring, name, failing)
    found = measure(TINY, "byte-gpt")
    assert len(found.rows) == 4 and {row.floor_ratio for row in found.rows} == {None}
    assert found.failed["floors"] == "no trace"


def test_one_bit_is_a_difference(fake_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flipping(FakeWorker):
        """Delta's last step has another gradient."""

        def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
            answer = super().ask(request)
            flips = self.told.mode == "delta" and request == {"do": "step", "index": side_by_side.STEPS_BEFORE + 1}
            return {**answer, "gradients": "h"} if flips else answer

    monkeypatch.setattr(side_by_side, "WorkerProcess", Flipping)
    found = measure(TINY, "byte-gpt")
    assert {row.way: row.gradients for row in found.rows} == {
        "plain": "identical",
        "checkpoint": "identical",
        "delta 100%": "different",
        "delta 40%": "different",
    }


def test_a_floor_that_no_plan_reaches_is_none(fake_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measuring, "floors", lambda *_: [Floor(extra_ns=1, base_ns=400, peak_bytes=11, budget_bytes=10)] * 2
    )
    assert {row.floor_ratio for row in measure(TINY, "byte-gpt").rows} == {None}


def test_a_result_survives_json(measured: BenchResult) -> None:
    assert BenchResult.from_dict(json.loads(to_json(measured.as_dict()))) == measured
    for wrong in ({"models": []}, {"options": {"models": ["unet"]}, "machine": {}, "command": "", "models": [{}]}, []):
        with pytest.raises(DeltaError, match="not a result of the benchmark"):
            BenchResult.from_dict(wrong)


def with_models(result: BenchResult, *names: str, **changes: Any) -> BenchResult:
    """A result of these models, with the figures of its first."""
    models = tuple(replace(result.models[0], model=name) for name in names)
    return replace(result, models=models, options=replace(result.options, models=names, **changes))


def test_results_of_several_runs_are_one(measured: BenchResult) -> None:
    first = replace(with_models(measured, "byte-gpt", "unet"), command="a")
    later = with_row(with_models(measured, "unet", "gpt"), "delta 40%", time_ratio=3.0)
    later = replace(later, command="b", machine={**measured.machine, "day": "later"})
    joined = BenchResult.joined([first, later])
    assert [model.model for model in joined.models] == ["byte-gpt", "unet", "gpt"]
    assert joined.options.models == ("byte-gpt", "unet", "gpt") and joined.command == "a; b"
    assert joined.model("unet") == later.model("unet") and joined.model("byte-gpt") == first.model("byte-gpt")
    assert BenchResult.joined([first]) == first


def test_results_of_different_runs_are_not(measured: BenchResult) -> None:
    for other, says in (
        (replace(measured, machine={**measured.machine, "commit": "abd"}), "commit is 'abc' and 'abd'"),
        (with_models(measured, "unet", steps=3), "steps is 2 and 3"),
    ):
        with pytest.raises(DeltaError, match=f"results of different runs cannot be one: {says}"):
            BenchResult.joined([measured, other])


def test_a_saved_result_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DeltaError, match="cannot be read"):
        read_bench(tmp_path / "none.json")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(DeltaError, match=r"b.json: not JSON"):
        read_bench(tmp_path / "b.json")


def test_facts_of_the_machine() -> None:
    facts = machine_facts()
    assert list(facts) == ["processor", "memory", "host tier", "system", "versions", "commit", "day"]
    assert facts["host tier"].startswith("spill file, ") and facts["host tier"].endswith("/s in")
    assert torch.__version__ in facts["versions"]


# --- the worker, for real ---------------------------------------------------------------------------------------------


def converse(told: Spec, *requests: Mapping[str, Any]) -> list[dict[str, Any]]:
    answers = StringIO()
    serve([json.dumps(asdict(told)), *map(json.dumps, requests)], answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


STEPS = (
    {"do": "step", "index": 0, "count": True},
    {"do": "step", "index": 1},
    {"do": "step", "index": 2, "count": True, "allocated": True},
)


@tight
def test_all_ways_train_alike_and_count_where_they_can() -> None:
    told = {way.name: spec(mode=way.mode, activations=way.budget) for way in replace(TINY, ways=CPU_WAYS).compared()}
    told["delta 40%"] = replace(told["delta 40%"], overrides=TINY.overrides)
    answers = {name: converse(one, *STEPS, {"do": "finish"}) for name, one in told.items()}
    plain = answers["plain"]
    for _, *steps, end in answers.values():
        assert [step["gradients"] for step in steps] == [step["gradients"] for step in plain[1:4]]
        assert end["parameters"] == plain[-1]["parameters"]
        assert "counted_peak_bytes" not in steps[1] and "allocated_peak_bytes" not in steps[0]
    counted = {name: steps[1]["counted_peak_bytes"] for name, steps in answers.items()}
    assert counted["delta 100%"] == counted["plain"] == plain[-1]["counted_peak_bytes"]
    assert counted["checkpoint"] is None and counted["save_on_cpu"] is None
    allocated = {name: steps[3]["allocated_peak_bytes"] for name, steps in answers.items()}
    assert allocated["plain"] == allocated["delta 100%"] > allocated["delta 40%"]
    assert allocated["plain"] > allocated["checkpoint"]
    assert answers["delta 40%"][-1]["report"]["evictions"]
    assert answers["plain"][-1]["host_peak_bytes"] is None and answers["delta 100%"][-1]["host_peak_bytes"] == 0


def test_a_way_that_draws_random_numbers_of_its_own_drops_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    @contextmanager
    def drawing() -> Iterator[None]:
        yield
        torch.rand(3)

    told = replace(spec(), model="gpt", sizes=choosing.zoo.ZOO["gpt"].tiny)
    plain = converse(told, *STEPS[:2])[1:]
    monkeypatch.setattr("delta.runtime.ways.prepare", lambda *_: drawing)
    drawn = converse(told, *STEPS[:2])[1:]
    assert [step["gradients"] for step in drawn] == [step["gradients"] for step in plain]


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("no more"), {"out_of_memory": "no more"}),
        (RuntimeError("CUDNN_STATUS_ALLOC_FAILED"), {"out_of_memory": "CUDNN_STATUS_ALLOC_FAILED"}),
        (RuntimeError("CUDA error: illegal address"), {"error": "RuntimeError: CUDA error: illegal address"}),
        (DeltaError("no blocks"), {"error": "no blocks"}),
    ],
)
def test_memory_that_runs_out_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: Exception, answer: Mapping[str, str]
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr("delta.runtime.zoo.make", failing)
    assert converse(spec()) == [answer]


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(command_line, "machine_facts", lambda *_: {"commit": "abc"})
    return lambda *arguments: CliRunner().invoke(command_line.app, arguments)


def test_the_command_measures_saves_and_shows_again(command: Any, fake_processes: None, tmp_path: Path) -> None:
    saved = tmp_path / "b.json"
    first = command("--quick", "--models", "byte-gpt,unet", "--budgets", "100%,40%", "--save", str(saved), "--json")
    assert first.exit_code == 0, first.output
    values = json.loads(first.stdout.splitlines()[-1])
    assert values["gradients_identical"] and values["options"]["models"] == ["byte-gpt", "unet"]
    assert [model["model"] for model in values["models"]] == ["byte-gpt", "unet"]
    again = command("--result", str(saved))
    assert again.stdout.splitlines() == first.stdout.splitlines()[:-1]
    twice = command("--result", str(saved), "--result", str(saved))
    assert twice.stdout == again.stdout


def test_a_run_that_is_ended_leaves_what_it_had(
    command: Any, fake_processes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Ended(FakeWorker):
        def wait_ready(self) -> None:
            super().wait_ready()
            if self.told.model == "unet" and self.told.mode == "delta":
                raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side, "WorkerProcess", Ended)
    command("--quick", "--models", "byte-gpt,unet", "--budgets", "100%,40%", "--save", str(tmp_path / "b.json"))
    found = read_bench(tmp_path / "b.json")
    assert [(model.model, len(model.rows)) for model in found.models] == [("byte-gpt", 4), ("unet", 2)]


def test_a_result_is_never_less_than_it_was(command: Any, fake_processes: None, tmp_path: Path) -> None:
    """A disk that is full: nothing of the file is lost, and no model has failed for it."""
    saved = tmp_path / "b.json"
    saved.write_text("before")
    with pytest.MonkeyPatch.context() as full:
        full.setattr(Path, "write_bytes", _no_space)
        done = command("--quick", "--models", "byte-gpt", "--budgets", "100%,40%", "--save", str(saved), "--json")
    assert isinstance(done.exception, DeltaError) and "No space left on device" in str(done.exception)
    assert f"warning: {saved} cannot be written: No space left on device" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["models"][0]["rows"]
    assert saved.read_text() == "before" and list(tmp_path.iterdir()) == [saved]


def _no_space(self: Path, content: bytes) -> int:
    self.touch()
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", [(), ("max-batch", "--limit", "1GiB")])
@pytest.mark.parametrize(
    ("where", "says"),
    [(["--save", "no/such/b.json"], "give a file in a directory"), (["--write-docs"], "in a checkout only")],
)
def test_what_cannot_be_written_is_told_before_anything_is_measured(
    kind: tuple[str, ...], where: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "machine_facts", None)
    done = CliRunner().invoke(command_line.app, [*kind, "--models", "resnet50", *where])
    assert isinstance(done.exception, DeltaError) and says in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("hot-path", "--ops", "0"), "ops=0: must be at least 1"),
        (("hot-path", "--rounds", "0"), "rounds=0: must be at least 1"),
        (("decisions", "--evictions", "0"), "evictions=0: must be at least 1"),
        (("--quick", "--device", "cuda", "--models", "nope"), "model='nope': known are byte-gpt"),
    ],
)
def test_arguments_that_make_no_measurement_are_refused(command: Any, arguments: tuple[str, ...], says: str) -> None:
    done = command(*arguments)
    assert isinstance(done.exception, DeltaError) and says in str(done.exception)


def test_times_that_mean_nothing_are_no_page(command: Any, measured: BenchResult, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(to_json(measured.as_dict()))
    for arguments in (("--quick", "--write-docs"), ("--result", str(tmp_path / "b.json"), "--write-docs")):
        done = command(*arguments)
        assert isinstance(done.exception, DeltaError) and "measure without --quick" in str(done.exception)


def test_the_command_goes_on_after_a_model_that_fails(
    command: Any,
    fake_processes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = command_line.measure

    def failing(options: BenchOptions, model: str, **others: Any) -> Any:
        if model == "unet":
            raise DeltaError("too large")
        return honest(options, model, **others)

    monkeypatch.setattr(command_line, "measure", failing)
    done = command("--quick", "--models", "unet,byte-gpt", "--budgets", "100%,40%")
    assert done.exit_code == 1
    assert any(line.startswith("unet ") and "failed: too large" in line for line in done.stdout.splitlines())
    assert any(line.startswith("byte-gpt  delta 40%") for line in done.stdout.splitlines())


def test_the_command_fails_when_bits_differ(command: Any, measured: BenchResult, tmp_path: Path) -> None:
    for way, code in (("delta 40%", 1), ("checkpoint", 0)):
        (tmp_path / "b.json").write_text(to_json(with_row(measured, way, gradients="different").as_dict()))
        assert command("--result", str(tmp_path / "b.json")).exit_code == code


def test_a_mistake_is_a_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "delta.runtime.bench", "--budgets", "8 apples"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("scripts/bench: budgets='8 apples': the unit 'apples' is unknown")


@pytest.mark.slow
def test_the_whole_benchmark_for_real() -> None:
    sizes = {"batch": 4, "seq": 128, "layers": 4, "width": 128, "heads": 8}
    options = replace(TINY, ways=CPU_WAYS, quick=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BenchOptions, "sizes", lambda self, model: sizes)
        result = measure(options, "byte-gpt")
    assert {row.gradients for row in result.rows} == {"identical"} and not result.missing
    idle = result.delta("100%")
    assert idle is not None and idle.moved_bytes == 0 and idle.activation_ratio == 1.0
