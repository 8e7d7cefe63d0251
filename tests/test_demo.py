"""The demo: its model, what it measures by itself, the worker's protocol, and what it concludes."""

import json
import math
import mmap
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import nn

import delta
from delta.errors import BudgetError, DeltaError, PolicyError
from delta.report import Report
from delta.runtime import demo, demo_measure, demo_process, demo_worker, ways
from delta.runtime.demo import DemoOptions, DemoResult, Side, run_demo
from delta.runtime.demo_measure import ResidentPeak, SavedBytes, digest
from delta.runtime.demo_model import Batches, Gpt, GptConfig, next_byte_loss, stdlib_bytes
from delta.runtime.demo_process import WorkerProcess
from delta.runtime.demo_view import print_result
from delta.runtime.demo_worker import Spec, serve

TINY = DemoOptions(steps=2, batch=2, layers=2, width=32, seq=16, threads=1)


@pytest.fixture(autouse=True)
def threads_put_back() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- model and data ---------------------------------------------------------------------------------------------------


def test_the_gpt_has_the_shape_it_says() -> None:
    model = Gpt(GptConfig(layers=3, width=32, heads=4, seq=16))
    # Per block: norms 4w, qkv 3w² + 3w, out w² + w, MLP 8w² + 5w = 12w² + 13w; around: two embeddings, head, norm.
    blocks = 3 * (12 * 32**2 + 13 * 32)
    assert sum(p.numel() for p in model.parameters()) == blocks + (256 + 16 + 256) * 32 + 2 * 32


def test_the_gpt_is_causal_and_begins_near_chance() -> None:
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=2, width=32, heads=4, seq=16))
    text = torch.randint(256, (3, 17))
    changed = text[:, :-1].clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    same = (model(text[:, :-1]) == model(changed)).all(dim=(0, 2))
    assert same[:9].all() and not same[9:].any()
    assert abs(next_byte_loss(model, text).item() - math.log(256)) < 0.1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"layers": 0}, "layers=0: must be at least 1"), ({"width": 30}, "width=30: must be a multiple of the 8")],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(DeltaError, match=message):
        GptConfig(**sizes)


def test_batches_are_windows_of_the_text_and_repeat() -> None:
    text = bytes(range(200))
    batches = Batches(text, batch=4, seq=8, seed=3)
    first = batches[0]
    assert first.shape == (4, 9) and first.dtype == torch.int64
    assert all(bytes(row.tolist()) in text for row in first)
    assert torch.equal(first, Batches(text, batch=4, seq=8, seed=3)[0])
    assert not torch.equal(first, batches[1])
    assert not torch.equal(first, Batches(text, batch=4, seq=8, seed=4)[0])
    with pytest.raises(DeltaError, match="seq=199: the text has only 200 bytes"):
        Batches(text, batch=4, seq=199, seed=3)
    with pytest.raises(DeltaError, match="batch=0"):
        Batches(text, batch=0, seq=8, seed=3)


def test_the_text_is_python() -> None:
    text = stdlib_bytes()
    assert len(text) > 1_000_000
    assert b"\ndef " in text


# --- measuring --------------------------------------------------------------------------------------------------------


def test_a_weighed_sum_sees_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for the bytes of a tensor on a card."""
    base = torch.randn(70)

    def weighed(tensor: torch.Tensor) -> int:
        return int(demo_measure._weighed(tensor))

    whole = weighed(base)
    for place in (0, 33, 69):
        for bit in (0, 17, 31):
            other = base.clone()
            other.view(torch.int32)[place] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            assert weighed(other) != whole, (place, bit)
    assert weighed(base.flip(0)) != whole == weighed(base.clone())
    monkeypatch.setattr(demo_measure, "_WEIGHED", 16)
    assert weighed(base) == whole, "in pieces"
    assert all(weighed(torch.ones(3, dtype=dtype)) for dtype in (torch.bool, torch.bfloat16, torch.int64))


@pytest.mark.cuda
def test_digest_sees_every_bit_on_a_card() -> None:
    base = torch.tensor([0.0, 1.0], device="cuda")
    assert digest([base]) == digest([base.clone()])
    assert digest([base]) != digest([torch.tensor([-0.0, 1.0], device="cuda")])
    assert digest([base]) != digest([base[:, None]])


def test_a_spare_process_does_its_imports_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one taken was started before it was asked for, but the first and those with other settings."""

    class Started:
        def __init__(self, settings: object) -> None:
            self.settings, self.killed = settings, False
            started.append(self)

        def kill(self) -> None:
            self.killed = True

        def communicate(self) -> None:
            pass

    started: list[Started] = []
    monkeypatch.setattr(demo_process, "_start", Started)
    spare = demo_process._Spare()
    assert [started.index(cast(Any, spare.take({"a": "1"}))) for _ in range(3)] == [0, 1, 2]
    assert len(started) == 4
    assert cast(Any, spare.take({"a": "2"})).settings == {"a": "2"}
    spare.drop()
    assert [one.killed for one in started] == [False, False, False, True, False, True]


def test_digest_sees_every_bit() -> None:
    base = torch.tensor([0.0, 1.0])
    assert digest([base]) == digest([base.clone()])
    assert digest([base]) != digest([torch.tensor([-0.0, 1.0])])
    assert digest([base]) != digest([base[:, None]])
    assert digest([base, base]) != digest([base])
    assert digest([torch.arange(4.0).view(2, 2)[:, :1]]) == digest([torch.tensor([[0.0], [2.0]])])  # not its neighbours
    assert digest([torch.empty(0)]) != digest([])


def test_saved_bytes_are_unique_storages_without_parameters() -> None:
    """Linear saves its input (2 x 4 floats) and the weight; relu its result (2 x 8); y * y that one again."""
    model = nn.Linear(4, 8)
    x = torch.randn(2, 4, requires_grad=True)
    with SavedBytes(model) as saved:
        y = model(x).relu()
        loss = (y * y).sum()
        assert saved.live_bytes == 2 * 4 * 4 + 2 * 8 * 4
        loss.backward(retain_graph=True)
        assert saved.live_bytes == 96
        del y, loss
    assert saved.live_bytes == 0
    assert saved.peak_bytes == 96


def test_saved_bytes_do_not_change_the_gradients() -> None:
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=1, width=16, heads=2, seq=8))
    text = torch.randint(256, (2, 9))
    next_byte_loss(model, text).backward()
    plain = demo_measure.gradient_digest(model)
    model.zero_grad()
    with SavedBytes(model) as saved:
        next_byte_loss(model, text).backward()
    assert demo_measure.gradient_digest(model) == plain
    assert saved.peak_bytes > 0 and saved.live_bytes == 0


def test_resident_peak_sees_what_is_gone_again() -> None:
    peak = ResidentPeak()
    with mmap.mmap(-1, 50_000_000) as block:  # not from the heap, which may have room left by other tests
        for _ in range(50):
            block.write(bytes(1_000_000))
    assert peak.read() >= peak.start_bytes + 40_000_000
    if peak.method == "VmHWM since training began":
        assert ResidentPeak().read() < peak.start_bytes + 40_000_000


def test_resident_peak_says_when_it_cannot_be_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(demo_measure, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    assert ResidentPeak().method == "VmHWM, whole process"
    monkeypatch.setattr(demo_measure, "_STATUS", tmp_path / "none" / "status")
    assert ResidentPeak().method == "ru_maxrss, whole process"
    assert ResidentPeak().read() > 10_000_000


# --- the worker -------------------------------------------------------------------------------------------------------


class FakeRun:
    """Stands for what `delta.evict` returns: notes how it was called and whether it is open."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        self.model, self.arguments, self.open, self.entered = model, arguments, False, 0

    def __enter__(self) -> "FakeRun":
        self.open, self.entered = True, self.entered + 1
        return self

    def __exit__(self, *exc: object) -> None:
        self.open = False

    def report(self) -> Report:
        return Report(policy="fake", device="cpu", peak_activation_bytes=7)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """What a fake `delta.evict` has returned so far."""
    made: list[FakeRun] = []

    def evict(model: nn.Module, **arguments: Any) -> FakeRun:
        made.append(FakeRun(model, **arguments))
        return made[-1]

    monkeypatch.setitem(vars(delta), "evict", evict)  # not setattr, which would look for the real one first
    return made


def converse(spec: Spec, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    answers = StringIO()
    serve([json.dumps(asdict(spec)), *map(json.dumps, requests)], answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


STEPS = ({"do": "step", "index": 0}, {"do": "step", "index": 1})
FINISH = {"do": "finish"}


def test_plain_worker_reports_steps_and_figures() -> None:
    ready, first, second, end = converse(TINY.spec("plain"), *STEPS, FINISH)
    assert ready == {"ready": True}
    assert first["time_ns"] > 0 and float.fromhex(first["loss"]) < 6
    assert first["gradients"] != second["gradients"]
    assert end["counted_peak_bytes"] > 0 and end["report"] is None
    assert end["peak_rss_bytes"] >= end["start_rss_bytes"] > 0


def test_checkpointing_wraps_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def checkpoint(forward: object, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
        calls.append(use_reentrant)
        return x

    monkeypatch.setattr(ways, "checkpoint", checkpoint)
    converse(TINY.spec("checkpoint"), STEPS[0])
    assert calls == [False, False]


def test_checkpointing_gives_the_same_bits() -> None:
    plain = converse(TINY.spec("plain"), *STEPS, FINISH)
    other = converse(TINY.spec("checkpoint"), *STEPS, FINISH)
    for ours, theirs in zip(plain[1:3], other[1:3], strict=True):
        assert ours["loss"] == theirs["loss"] and ours["gradients"] == theirs["gradients"]
    assert plain[-1]["parameters"] == other[-1]["parameters"]


def test_delta_worker_trains_inside_the_block(runs: list[FakeRun]) -> None:
    answers = converse(replace(TINY.spec("delta"), timeline="t.jsonl"), *STEPS, FINISH)
    (run,) = runs
    given = {"activations": "40%", "budget": None, "timeline": "t.jsonl", "trace": None, "device": "cpu"}
    assert run.arguments == {**given, "policy": delta.load_policy("delta")}
    assert run.entered == 1 and not run.open
    assert answers[-1]["report"]["peak_activation_bytes"] == 7
    assert answers[-1]["counted_peak_bytes"] is None


def test_worker_closes_the_block_when_its_lines_end(runs: list[FakeRun]) -> None:
    converse(TINY.spec("delta"), STEPS[0])
    assert not runs[0].open


def test_worker_answers_a_delta_error_with_its_text() -> None:
    (answer,) = converse(replace(TINY.spec("plain"), sizes={**TINY.spec("plain").sizes, "layers": 0}))
    assert answer == {"error": "layers=0: must be at least 1"}


def test_worker_refuses_requests_it_does_not_know() -> None:
    (_, answer) = converse(TINY.spec("plain"), {"do": "dance"})
    assert answer == {"error": """ValueError: unexpected request '{"do": "dance"}'"""}


def test_worker_in_a_process_of_its_own() -> None:
    with WorkerProcess(TINY.spec("plain")) as worker:
        worker.wait_ready()
        apart = worker.ask({"do": "step", "index": 0})
        end = worker.ask(FINISH)
        worker._process.kill()
        with pytest.raises(DeltaError, match=r"the plain process ended with exit code -9: killed"):
            worker.ask(FINISH)
    _, here, _ = converse(TINY.spec("plain"), STEPS[0], FINISH)
    assert float.fromhex(apart["loss"]) == pytest.approx(float.fromhex(here["loss"]), rel=1e-5)
    assert end["counted_peak_bytes"] > 0


def test_a_worker_finds_what_the_demo_finds_and_an_interrupt_is_the_demo_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("delta", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    with WorkerProcess(TINY.spec("plain")) as worker:
        worker.wait_ready()
        worker._process.send_signal(signal.SIGINT)
        assert worker.ask({"do": "step", "index": 0})["loss"]
    assert capfd.readouterr().err == ""


def test_a_worker_measures_the_card_it_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cpu", "cuda", "cuda:1"):
        demo_worker._choose_card(device)
    assert chosen == [torch.device("cuda:1")]


# --- what comes of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, DeltaError, "steps=0: must be at least 1"),
        ({"width": 30}, DeltaError, "width=30"),
        ({"activations": "8 apples"}, BudgetError, "8 apples"),
        ({"policy": "nope"}, PolicyError, "nope"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, Any], error: type[DeltaError], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(TINY, **changes)


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeltaError, match="device='cuda': PyTorch sees no accelerator"):
        replace(TINY, device="cuda")


class FakeWorker:
    """A process that is none: notes who was asked for what."""

    log: list[tuple[str, Any]]

    def __init__(self, spec: Spec) -> None:
        self.mode = spec.mode

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *exc: object) -> None:
        self.log.append((self.mode, "end"))

    def wait_ready(self) -> None:
        self.log.append((self.mode, "ready"))

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append((self.mode, request.get("index", "finish")))
        if "index" in request:
            return {"time_ns": 1000 * request["index"], "loss": "0x1p+0", "gradients": "g"}
        return {"parameters": "p", "start_rss_bytes": 1, "peak_rss_bytes": 2, "rss_method": "m"}


@pytest.mark.parametrize(
    ("interleave", "turns"),
    [
        (True, [("plain", 0), ("delta", 0), ("plain", 1), ("delta", 1)]),
        (False, [("plain", 0), ("plain", 1), ("delta", 0), ("delta", 1)]),
    ],
)
def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch, interleave: bool, turns: list[tuple[str, Any]]) -> None:
    monkeypatch.setattr(demo, "WorkerProcess", FakeWorker)
    monkeypatch.setattr(FakeWorker, "log", [], raising=False)
    stepped: list[str] = []
    result = run_demo(replace(TINY, interleave=interleave), stepped.append)
    ready, end = [("plain", "ready"), ("delta", "ready")], [("plain", "finish"), ("delta", "finish")]
    assert FakeWorker.log == [*ready, *turns, *end, ("delta", "end"), ("plain", "end")]
    assert stepped == [mode for mode, _ in turns]
    assert result.sides["delta"].times_ns == (0, 1000)


def side(**changes: Any) -> Side:
    base = Side(
        times_ns=(900, 800, 100, 300, 200),
        losses=("0x1p+2", "0x1p+1"),
        gradients=("a", "b"),
        parameters="p",
        start_rss_bytes=10,
        peak_rss_bytes=1000,
        rss_method="VmHWM",
    )
    return replace(base, **changes)


def result(**changes: Any) -> DemoResult:
    report = {"peak_activation_bytes": 390, "warnings": ["the budget cannot be held [x]"]}
    delta_side = side(times_ns=(900, 800, 110, 330, 220), peak_rss_bytes=700, report=report)
    sides = {"plain": side(counted_peak_bytes=1000), "delta": replace(delta_side, **changes)}
    return DemoResult(TINY, sides)


def test_ratios_leave_the_warm_up_out() -> None:
    """Medians of 100, 300, 200 and of 110, 330, 220; 390 of 1000 counted bytes; 700 of 1000 resident ones."""
    values = result().as_dict()
    assert values["step_time_ratio"] == pytest.approx(1.1)
    assert values["peak_activation_ratio"] == pytest.approx(0.39)
    assert values["peak_rss_ratio"] == pytest.approx(0.7)
    assert values["checkpoint_time_ratio"] is None
    assert (values["steps"], values["timeline"]) == (2, "delta-demo.jsonl")
    json.dumps(values)


def test_checkpoint_ratio_when_it_was_run() -> None:
    three = DemoResult(replace(TINY, checkpoint=True), {**result().sides, "checkpoint": side(times_ns=(1, 1, 300))})
    assert three.as_dict()["checkpoint_time_ratio"] == pytest.approx(1.5)
    assert three.options.modes() == ("plain", "delta", "checkpoint")


@pytest.mark.parametrize(
    ("changes", "gradients", "losses"),
    [
        ({}, True, True),
        ({"gradients": ("a", "x")}, False, True),
        ({"parameters": "q"}, False, True),
        ({"losses": ("0x1p+2", "0x1.0000000000001p+1")}, True, False),
    ],
)
def test_one_bit_is_a_difference(changes: dict[str, Any], gradients: bool, losses: bool) -> None:
    values = result(**changes).as_dict()
    assert (values["gradients_identical"], values["losses_identical"]) == (gradients, losses)
    assert values["first_different_step"] == (1 if "gradients" in changes else None)


def shown(outcome: DemoResult) -> str:
    text = StringIO()
    print_result(outcome, Console(file=text, width=120))
    return text.getvalue()


def test_the_table_shows_figures_ratios_and_verdicts() -> None:
    text = shown(result())
    rows = {line.split("  ")[0].strip(): line.split() for line in text.splitlines()}
    assert rows["peak of saved activations"][-5:] == ["1000", "B", "390", "B", "0.390"]
    assert rows["step time, median"][-5:] == ["200", "ns", "220", "ns", "1.100"]
    assert rows["final loss"][-2:] == ["2.000000", "2.000000"]
    assert "peak device memory" not in text
    assert "gradients identical: yes" in text and "losses identical: yes" in text
    assert "warning: the budget cannot be held [x]" in text
    assert "deltactl timeline delta-demo.jsonl --chrome trace.json" in text
    assert "gradients identical: no\n" in shown(result(parameters="q"))
    assert "gradients identical: no, first in step 1\n" in shown(result(gradients=("a", "x")))


def test_paths_are_shown_as_they_are_and_as_a_shell_takes_them() -> None:
    outcome = result()
    options = replace(outcome.options, timeline="my runs/[1].jsonl")
    object.__setattr__(options, "policy", "[red]mine.yaml")
    text = shown(replace(outcome, options=options))
    assert "policy [red]mine.yaml, " in text
    assert "timeline: my runs/[1].jsonl; to look at it: deltactl timeline 'my runs/[1].jsonl' --chrome" in text


def test_a_final_loss_that_is_no_number_is_json() -> None:
    values = json.loads(json.dumps(result(losses=("nan",)).as_dict(), allow_nan=False))
    assert values["sides"]["delta"]["final_loss"] is None and values["sides"]["delta"]["losses"] == ["nan"]
    assert values["sides"]["plain"]["final_loss"] == 2.0


def test_options_given_to_the_worker() -> None:
    spec = replace(TINY, seed=5).spec("delta")
    assert spec == Spec(
        mode="delta",
        sizes={"batch": 2, "seq": 16, "layers": 2, "width": 32, "heads": 8},
        seed=5,
        threads=1,
        device="cpu",
        activations="40%",
        policy="delta",
        timeline="delta-demo.jsonl",
    )
