"""Batch norm made again from its statistics: the same bits, where a trial showed it, and while they are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from inside import different
from torch import Tensor, nn
from torch.nn import functional as F

import delta
from delta.runtime import batch_norm
from delta.runtime.batch_norm import OP, Trials
from delta.simulate import Status, simulate
from delta.trace import read
from delta.trace.events import Op
from delta.units import Share

STEPS = 4
SMALL = 1000  # bytes: statistics stay, activations go
Call = tuple[Any, ...]

# -- the op -----------------------------------------------------------------------------------------------------------
SHAPES = st.sampled_from(
    [(5, 3), (1, 4, 9), (6, 5, 7), (2, 3, 4, 4), (3, 8, 5, 7), (2, 16, 1, 1), (1, 2, 33, 3), (2, 4, 3, 5, 6), (64, 33)]
)


@st.composite
def calls(draw: st.DrawFn, dense: bool) -> Call:
    """A call in training, with and without weights and running statistics; `dense`: in a layout of the shared loop."""
    shape = draw(SHAPES)
    x_dtype, dtype = draw(
        st.sampled_from([(torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16, torch.float32)])
    )
    torch.manual_seed(draw(st.integers(0, 1000)))
    x = (draw(st.sampled_from([1e-3, 1.0, 1e4])) * torch.randn(shape, dtype=torch.float64)).to(x_dtype)
    if not dense:
        x = F.pad(x, (1, 2))[..., 1:-2]
    elif x.dim() in (4, 5) and draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    channels = shape[1]
    weight, bias = (torch.randn(channels, dtype=dtype) if draw(st.booleans()) else None for _ in range(2))
    if x_dtype is not dtype and (weight is None or bias is None):
        weight = bias = torch.randn(channels, dtype=dtype)
    running = draw(st.booleans())
    mean, var = (torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)) if running else (None, None)
    return x, weight, bias, mean, var, True, 0.1, draw(st.sampled_from([1e-5, 1e-3]))


def a_trial() -> Trials:
    """Of which nobody is told."""
    return Trials(time.perf_counter_ns, lambda spent_ns: None)


def same_bits(one: Tensor, other: Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.stride() == other.stride() and torch.equal(one.view(whole), other.view(whole))


@settings(derandomize=True, deadline=None)
@given(calls(dense=True))
def test_the_statistics_give_the_output_bit_for_bit(call: Call) -> None:
    output, mean, invstd = results = OP(*call)
    took_ns = a_trial().again_ns(OP, call, results)
    assert took_ns is not None and took_ns > 0
    assert same_bits(batch_norm.output(call[: batch_norm.NEEDED], mean, invstd), output)


@settings(derandomize=True, deadline=None)
@given(calls(dense=False))
def test_other_layouts_are_left_as_they_are(call: Call) -> None:
    """Their kernel multiplies in another order: one trial may come out even by chance."""
    assume(not call[0].is_contiguous())
    assert a_trial().again_ns(OP, call, OP(*call)) is None


def test_running_statistics_in_pieces_are_left_as_they_are() -> None:
    mean, var = torch.zeros(3, 2)[:, 0], torch.ones(3, 2)[:, 1]
    call = (torch.randn(4, 3), None, None, mean, var, True, 0.1, 1e-5)
    assert a_trial().again_ns(OP, call, OP(*call)) is None


def test_weights_in_reduced_precision_are_left_as_they_are() -> None:
    call = (
        torch.randn(4, 3).bfloat16(),
        torch.ones(3).bfloat16(),
        torch.ones(3).bfloat16(),
        None,
        None,
        True,
        0.1,
        1e-5,
    )
    assert a_trial().again_ns(OP, call, OP(*call)) is None


def test_a_call_in_evaluation_mode_and_other_ops_are_left_as_they_are() -> None:
    x, one = torch.randn(4, 3), torch.ones(3)
    call = (x, None, None, torch.zeros(3), one, False, 0.1, 1e-5)
    assert a_trial().again_ns(OP, call, OP(*call)) is None
    relu = torch.ops.aten.relu.default
    assert a_trial().again_ns(relu, (x,), [relu(x)]) is None


def test_there_is_one_trial_for_each_layout_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Tensor] = []
    make = batch_norm.output
    monkeypatch.setattr(batch_norm, "output", lambda args, *rest: (tried.append(args[0]), make(args, *rest))[1])
    trials = a_trial()
    for shape in ((4, 3, 8, 8), (4, 3, 8, 8), (2, 3, 8, 8)):
        call = (torch.randn(shape), None, None, None, None, True, 0.1, 1e-5)
        trials.again_ns(OP, call, OP(*call))
    assert [tuple(x.shape) for x in tried] == [(4, 3, 8, 8)] * 2 + [(2, 3, 8, 8)] * 2


def test_what_one_call_may_another_of_its_shape_may_not() -> None:
    trials, dense = a_trial(), torch.randn(4, 3, 8, 8)
    whole, pieces = torch.zeros(3), torch.zeros(3, 2)[:, 0]

    def may(x: Tensor, mean: Tensor) -> bool:
        call = (x, None, None, mean, torch.ones(3, dtype=mean.dtype), True, 0.1, 1e-5)
        return trials.again_ns(OP, call, OP(*call)) is not None

    assert may(dense, whole)
    assert not may(torch.randn(4, 3, 8, 16)[..., ::2], whole)
    assert not may(dense, pieces)
    assert not may(dense.bfloat16(), whole.bfloat16())
    assert may(dense, whole)


# -- in a training ----------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Convolutions, each with batch norm and ReLU; the norm's output is saved by nobody but is asked for again."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3 if not i else 8, 8, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return x


def numbers(model: Callable[[], nn.Module] = Net) -> list[Tensor]:
    """Gradients and statistics of a few steps."""
    torch.manual_seed(1)
    net = model()
    found = []
    for _ in range(STEPS):
        net.zero_grad()
        net(torch.randn(4, 3, 12, 12)).square().mean().backward()
        found += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        found += [buffer.clone() for buffer in net.buffers()]
    return found


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often an output was made from statistics, trials included."""
    made: list[int] = []
    make = batch_norm.output
    monkeypatch.setattr(batch_norm, "output", lambda *given: (made.append(1), make(*given))[1])
    yield made


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("device", ["cpu", "chaos:1"])
@pytest.mark.parametrize("name", ["recompute", "optimal-checkpoint", "coop"])
def test_a_training_makes_outputs_from_statistics_and_has_the_same_numbers(
    name: str, device: str, again: list[int]
) -> None:
    plain = numbers()
    with delta.evict(
        activations="0%", policy=delta.load_policy(name, {"filter.min_bytes": SMALL}), device=device
    ) as run:
        evicted = numbers()
    assert different(plain, evicted) == []
    assert run.report().recomputed_bytes > 0
    assert len(again) > 2, "more than the trial's two"


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_a_kernel_that_rounds_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = numbers()
    make = batch_norm.output
    monkeypatch.setattr(batch_norm, "output", lambda *given: make(*given) * (1 + 1e-7))
    with delta.evict(activations="0%", policy=delta.load_policy("recompute", {"filter.min_bytes": SMALL})) as run:
        evicted = numbers()
    assert different(plain, evicted) == []
    assert run.report().recomputed_bytes > 0


class Frozen(nn.Module):
    """A norm that nothing is learned through: nobody saves its statistics, which die at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False)
        self.last = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.norm(x)))


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_without_the_statistics_the_op_is_run_as_it_was(again: list[int]) -> None:
    plain = numbers(Frozen)
    with delta.evict(activations="0%", policy=delta.load_policy("recompute", {"filter.min_bytes": 0})) as run:
        evicted = numbers(Frozen)
    assert different(plain, evicted) == []
    assert run.report().recomputed_bytes > 0
    assert len(again) == 2, "the trial's two, and no other"


# -- what planners and traces know of it ------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_planners_are_told_the_time_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "_try", lambda args, results: 12_345)
    told = []
    with delta.evict(activations="40%", policy=delta.load_policy("recompute", {"filter.min_bytes": 0})) as run:
        assert run._core is not None
        ran = run._core.engine.op_ran
        monkeypatch.setattr(run._core.engine, "op_ran", lambda op, *rest: (told.append(op), ran(op, *rest))[1])
        numbers()
    assert {op.cost_ns for op in told if op.name == "aten.native_batch_norm"} == {12_345}


def test_a_trace_tells_both_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "_try", lambda args, results: 12_345)
    file = tmp_path / "step.jsonl"
    with delta.evict(trace=file):
        numbers()
    assert file.read_text().startswith('{"delta_trace":5,')
    trace = read(file)
    norms = [event for event in trace.events if isinstance(event, Op) and event.name == "aten.native_batch_norm"]
    assert len(norms) == 4
    assert {norm.again_ns for norm in norms} == {norm.replay_ns for norm in norms} == {12_345}
    assert all(norm.cost_ns != 12_345 for norm in norms)
    others = [event for event in trace.events if isinstance(event, Op) and event.name == "aten.relu"]
    assert others and all(op.again_ns == 0 and op.replay_ns == op.cost_ns for op in others)


def test_the_simulator_replays_in_that_time(tmp_path: Path) -> None:
    """The same trace, its norms dear and cheap to make again: what a plan costs follows the replays, and the step as
    such takes as long as ever."""
    file = tmp_path / "step.jsonl"
    with delta.evict(trace=file):
        numbers()
    trace = read(file)

    def replays(norm_ns: int) -> tuple[int, int]:
        """Time of replays, and of the step, where all other replays take 1 ns."""
        events = [
            replace(event, again_ns=norm_ns if event.name == "aten.native_batch_norm" else 1)
            if isinstance(event, Op)
            else event
            for event in trace.events
        ]
        kept = {"rules": [{"op": "aten.convolution", "action": "keep"}]}
        policy = delta.load_policy("recompute", {"filter.min_bytes": SMALL, **kept})
        run = simulate(replace(trace, events=tuple(events)), policy, Share(0.8))
        assert run.status is Status.OK
        return run.recomputed_ns, run.base_ns

    norm_ns = trace.base_ns // 100
    (cheap_ns, base_ns), (dear_ns, dear_base_ns) = replays(1), replays(norm_ns)
    assert base_ns == dear_base_ns == trace.base_ns
    assert cheap_ns < 1_000 < norm_ns <= dear_ns
