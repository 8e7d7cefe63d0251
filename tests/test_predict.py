"""The simulator beside the real CPU engine: every shipped policy trains, holds its budget, and was foretold."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from delta.engine import MISSED
from delta.errors import DeltaError
from delta.runtime.demo import DemoOptions
from delta.runtime.demo_worker import SKIPPED_STEPS, TRACED_STEPS, Spec, Trainer
from delta.runtime.predict import figures
from delta.runtime.predict_measure import Prediction, Row, base_spec, evicting, on_this_device, predict
from delta.runtime.tracing import plain_spec
from delta.simulate import Status, simulate
from delta.trace import Trace, read
from delta.trace.events import Op, Save
from delta.units import Share

STEPS = 4
SMALL = {
    "byte-gpt": replace(DemoOptions(layers=4, width=256, seq=128, batch=8, threads=1).spec("plain"), timeline=None),
    "resnet50": plain_spec("resnet50", {"batch": 16, "pixels": 96, "width": 16}, threads=1),
}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def needs(model: str) -> None:
    if model != "byte-gpt":
        pytest.importorskip("transformers")


@cache
def plain_gradients(model: str) -> list[str]:
    trainer = Trainer(SMALL[model])
    return [trainer.step(index)["gradients"] for index in range(STEPS)]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    found = {}
    for model, spec in SMALL.items():
        path = Path(tmp_path_factory.mktemp("traces"), f"{model}.jsonl.gz")
        if model != "byte-gpt":
            pytest.importorskip("transformers")
        trainer = Trainer(replace(spec, mode="delta", trace=str(path)))
        for index in range(SKIPPED_STEPS + TRACED_STEPS):
            trainer.step(index)
        trainer.finish()
        found[model] = read(path)
    return found


def limited(spec: Spec, policy: str) -> Spec:
    return replace(spec, mode="delta", policy=policy, activations="50%")


def largest_saved_bytes(trace: Trace) -> int:
    saved = {event.storage for event in trace.events if isinstance(event, Save)}
    ops = [event for event in trace.events if isinstance(event, Op)]
    return max(nbytes for op in ops for storage, nbytes in zip(op.outputs, op.nbytes, strict=True) if storage in saved)


@pytest.mark.parametrize("policy", evicting())
@pytest.mark.parametrize("model", SMALL)
def test_each_policy_trains_with_the_same_bits_under_half_and_its_peak_is_foretold(
    model: str, policy: str, traces: dict[str, Trace]
) -> None:
    """On nets this small one storage is 3 to 12 % of the budget, and online policies look at real times: the peaks
    may differ by one. The full models are held to 2 % (below)."""
    needs(model)
    trainer = Trainer(limited(SMALL[model], policy))
    steps = [trainer.step(index, count=index == STEPS - 1) for index in range(STEPS)]
    report = trainer.finish()["report"]
    assert [step["gradients"] for step in steps] == plain_gradients(model)

    run = simulate(traces[model], on_this_device(policy), Share(0.5), traces[model].link)
    assert (run.status, run.why) == (Status.OK, "")
    assert sum(report["evictions"].values()) > 0
    peak_bytes = max(report["peak_activation_bytes"], steps[-1]["counted_peak_bytes"])
    assert peak_bytes <= MISSED * run.budget_bytes
    assert abs(run.peak_bytes - report["peak_activation_bytes"]) <= largest_saved_bytes(traces[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["byte-gpt", "resnet50"])
def test_the_full_models(model: str) -> None:
    needs(model)
    result = predict(base_spec(model, batch=4, threads=1), evicting(), "50%", timed_steps=1)
    assert [row.policy for row in result.rows if not (row.gradients_identical and row.losses_identical)] == []
    assert [row.policy for row in result.rows if not row.held] == []
    assert [(row.policy, row.peak_difference) for row in result.rows if abs(row.peak_difference) > 0.02] == []


def a_row(**given: object) -> Row:
    values = {
        "policy": "delta",
        "gradients_identical": True,
        "losses_identical": True,
        "limit_bytes": 100,
        "peak_bytes": 100,
        "counted_peak_bytes": 90,
        "predicted_peak_bytes": 98,
        "overhead": 1.25,
        "predicted_overhead": 1.125,
        "status": "ok",
    }
    return Row(**values | given)


def test_a_row_compares() -> None:
    row = a_row()
    assert row.held and row.peak_difference == pytest.approx(-0.02) and row.overhead_points == pytest.approx(-12.5)
    assert not a_row(counted_peak_bytes=102).held
    assert a_row(predicted_overhead=None, status="thrash").overhead_points is None


def test_a_result_survives_json_and_fills_a_table() -> None:
    result = Prediction(
        model="gpt",
        batch=4,
        activations="50%",
        timed_steps=2,
        processes=3,
        threads=1,
        machine={"day": "today"},
        rows=(a_row(),),
    )
    assert Prediction.from_dict(result.as_dict()) == result
    line = "| delta | 100 B | 100 B | 90 B | 98 B | -2.0% | 1.250 | 1.125 | -12.5 | identical |"
    assert line in figures([result])["tables"]
    with pytest.raises(DeltaError, match="not a result of scripts/predict"):
        Prediction.from_dict({"rows": [{}]})


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(DeltaError, match="known are byte-gpt, gpt, bert, resnet50"):
        base_spec("vgg", batch=1, threads=1)
