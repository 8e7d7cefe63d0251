"""A plain training beside another in one process: who does which step, and that neither touches the other."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from io import StringIO
from typing import Any

import pytest
import torch
from bench_fakes import TINY, NoProcess, spec
from torch import nn

import delta
from delta.runtime import side_by_side
from delta.runtime.demo_worker import Spec, Trainer, serve
from delta.runtime.side_by_side import COUNTED_STEPS, ROW_STEPS, SETTLING_STEPS, STEPS_BEFORE, Trained, train

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),  # so small that one op's tensors are over it
]
DELTA = spec(mode="delta", activations="40%", overrides=TINY.overrides)
STEPS = 12


class Noting(NoProcess):
    """A process that notes what it is asked and answers with its number."""

    asked: list[Mapping[str, Any]]

    def __init__(self, told: Spec, settings: Mapping[str, str]) -> None:
        type(self).asked = []

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        return {"number": len(self.asked) - 1, "counted_peak_bytes": None if request.get("index") else 7}


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> type[Noting]:
    monkeypatch.setattr(side_by_side, "WorkerProcess", Noting)
    return Noting


def names(asked: list[Mapping[str, Any]]) -> str:
    return " ".join(f"{'p' if one['do'] == 'plain step' else ''}{one['index']}" for one in asked if "index" in one)


def test_timed_steps_are_in_turns_with_plain_ones_and_each_round_begins_with_the_other(noting: type[Noting]) -> None:
    found = train(DELTA, 3)
    assert names(noting.asked) == "0 1 2 3 4 5 6 7 p6 p7 p8 8 9 p9 p10 10"
    assert [one["number"] for one in found.timed] == [11, 12, 15]
    assert [one["number"] for one in found.beside] == [10, 13, 14]
    assert noting.asked[-1] == {"do": "finish"} and found.end["number"] == 16
    assert found.counted_peak_bytes == 7 and found.allocated_peak_bytes is None


def test_rows_come_after_the_timed_steps_in_turns_with_plain_ones(noting: type[Noting]) -> None:
    found = train(DELTA, 1, rows=2)
    asked = [(one["do"], one["index"], one["steps"]) for one in noting.asked if "steps" in one]
    first, second = STEPS_BEFORE + 1, STEPS_BEFORE + 1 + ROW_STEPS
    assert asked == [
        ("row", first, ROW_STEPS),
        ("plain row", first, ROW_STEPS),
        ("plain row", second, ROW_STEPS),
        ("row", second, ROW_STEPS),
    ]
    rows, beside = [[one["number"] for one in answers] for answers in (found.rows, found.rows_beside)]
    assert (rows, beside) == ([12, 15], [13, 14])
    assert not train(spec(), 1, rows=2).rows_beside and len(train(spec(), 1, rows=2).rows) == 2


def test_plain_is_counted_with_its_largest_batch() -> None:
    """Steps of other lengths may need more than those that are counted beside it."""
    sizes = {"batch": 1, "seq": 16, "layers": 1, "width": 8, "heads": 2, "vocabulary": 8}
    varied = spec(model="gpt-varied", sizes=sizes, seed=4)  # the first batch is the shortest
    trainer = Trainer(varied)
    lengths = [trainer._task.batch(index)[0].numel() for index in range(6)]
    longest = lengths.index(max(lengths))
    *steps, end = converse(varied, *({"do": "step", "index": i, "count": True} for i in range(6)), {"do": "finish"})
    counted = [step["counted_peak_bytes"] for step in steps]
    assert longest > 0 and counted[longest] > counted[0]
    assert end["counted_peak_bytes"] == counted[longest]
    found = Trained(steps=[*steps, *steps], end=end)
    assert found.counted_peak_bytes == counted[longest]
    *_, end = converse(varied, {"do": "row", "index": 0, "steps": 6}, {"do": "finish"})
    assert end["counted_peak_bytes"] == counted[longest]


def test_rows_have_ratios_of_their_own() -> None:
    rows, beside = [{"time_ns": 12}, {"time_ns": 30}], [{"time_ns": 10}, {"time_ns": 20}]
    assert Trained(rows=rows, rows_beside=beside).row_ratios == [1.2, 1.5]


def test_a_row_draws_the_numbers_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, seeds = Trainer(spec()), list[int]()
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    for index in (5, 6):
        trainer.step(index)
    trainer.row(5, 2)
    assert seeds[:2] == seeds[2:] and len(set(seeds)) == 2


def test_a_row_of_steps_trains_as_these_steps_do() -> None:
    """Either kind, on the same batches."""
    beside = converse(DELTA, {"do": "row", "index": 0, "steps": 3}, {"do": "finish"})
    alone = converse(DELTA, *({"do": "step", "index": index} for index in range(3)), {"do": "finish"})
    assert beside[0]["time_ns"] > 0
    assert beside[-1]["parameters"] == alone[-1]["parameters"]
    trainer = Trainer(DELTA)
    with trainer.beside() as plain:
        plain.row(0, 3)
        assert plain.finish()["parameters"] == alone[-1]["parameters"]
    trainer.close()


def test_plain_has_nothing_beside_it(noting: type[Noting]) -> None:
    found = train(spec(), 2)
    assert names(noting.asked) == "0 1 2 3 4 5 6 7 8 9" and not found.beside and len(found.timed) == 2


def test_what_is_counted_and_waited_for_is_not_timed(noting: type[Noting]) -> None:
    train(DELTA, 3)
    steps = [one for one in noting.asked if one["do"] == "step"]
    assert tuple(one["index"] for one in steps if one.get("count")) == COUNTED_STEPS
    assert tuple(one["index"] for one in steps if one.get("settle")) == SETTLING_STEPS
    assert [one["index"] for one in steps if one.get("allocated")] == [COUNTED_STEPS[-1]]
    assert max(SETTLING_STEPS) < STEPS_BEFORE - 2, "the plan is followed twice before times count"


def test_each_step_is_compared_with_the_plain_one_beside_it() -> None:
    """A machine that is slower in the second half: the medians of either side would give 3 / 2."""
    beside = [{"time_ns": time} for time in (10, 10, 20, 30, 30)]
    steps = [{}] * STEPS_BEFORE + [{"time_ns": time} for time in (12, 12, 30, 36, 36)]
    assert Trained(steps, beside).ratios("time_ns") == [1.2, 1.2, 1.5, 1.2, 1.2]


def converse(told: Spec, *requests: Mapping[str, Any]) -> list[dict[str, Any]]:
    answers = StringIO()
    serve([json.dumps(asdict(told)), *map(json.dumps, requests)], answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()][1:]


def test_neither_training_touches_the_other() -> None:
    """Bits of both are those of either alone, and Delta does what it does alone: it learns and evicts nothing of the
    plain one."""
    steps = [{"do": "step", "index": index} for index in range(4)]
    beside = [{"do": "plain step", "index": index} for index in range(4)]
    between = [request for pair in zip(steps, beside, strict=True) for request in pair]
    *alone, end = converse(DELTA, *steps, {"do": "finish"})
    *both, end_of_both = converse(DELTA, *between, {"do": "finish"})
    plain = converse(spec(), *steps)
    assert [one["gradients"] for one in both[::2]] == [one["gradients"] for one in alone]
    assert [one["gradients"] for one in both[1::2]] == [one["gradients"] for one in plain]
    assert end_of_both["parameters"] == end["parameters"]
    figures = ("steps", "modes", "unevicted_peak_activation_bytes", "budget_bytes")
    assert {key: end_of_both["report"][key] for key in figures} == {key: end["report"][key] for key in figures}
    assert end["report"]["evictions"] and end_of_both["report"]["evictions"]


def beside(trainer: Trainer) -> None:
    with trainer.beside() as plain:
        plain.step(0)


@pytest.mark.parametrize("then", [beside, lambda trainer: trainer.row(1, 1)], ids=["beside", "row"])
def test_peaks_are_those_of_before_the_plain_training_and_rows(
    then: Callable[[Trainer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(DELTA)
    resident = [100]
    monkeypatch.setattr("delta.runtime.demo_measure.ResidentPeak.read", lambda _: resident[0])
    trainer.step(0)
    then(trainer)
    resident[0] = 900
    beside(trainer)
    assert trainer.finish()["peak_rss_bytes"] == 100


@pytest.fixture
def session() -> Iterator[tuple[delta.evict, nn.Module]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    policy = delta.load_policy("recompute", {"filter.min_bytes": 0})
    with delta.evict(model, activations="40%", policy=policy) as run:
        yield run, model


MEASURED = {"overhead_ns": 0, "peak_device_bytes": 0}  # the latter by a thread, now and then


def one_step(model: nn.Module) -> None:
    model(torch.randn(32, 64)).square().mean().backward()
    model.zero_grad()


def modes_on() -> int:
    return torch._C._len_torch_dispatch_stack()


def test_a_block_that_is_paused_sees_nothing(session: tuple[delta.evict, nn.Module]) -> None:
    """Also where an optimizer has stepped in between, after which the recorder is put back otherwise."""
    run, model = session
    for _ in range(3):
        one_step(model)
    before = replace(run.report(), **MEASURED)
    assert modes_on() == 1
    optimizer = torch.optim.SGD(model.parameters())
    with run._paused():
        one_step(model)
        optimizer.step()
        assert modes_on() == 0
        one_step(model)
    assert modes_on() == 1
    assert replace(run.report(), **MEASURED) == before
    one_step(model)
    assert run.report().steps == before.steps + 1 and run.report().modes["planned"] == before.modes["planned"] + 1
