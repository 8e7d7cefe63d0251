"""`trace=`: what is recorded of a step, against counts of plain PyTorch that know nothing of Delta."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import CASES, train
from programs import COLUMNS, ROWS, Program, Weights, loss_of, programs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from typer import testing

import delta
from delta.cli import app
from delta.errors import TraceError
from delta.runtime import own_time, rematerialise, tracer
from delta.runtime.core import Core
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.hooks import Hooks
from delta.runtime.inbox import Inbox
from delta.runtime.opfacts import facts_of
from delta.runtime.own_time import OwnTime
from delta.runtime.rawmem import as_bytes
from delta.runtime.recorder import Recorder
from delta.runtime.traced_step import TracedStep
from delta.simulate import Status, simulate
from delta.simulate.floor import floors
from delta.trace import Evictable, Recording, Trace, read, summary
from delta.trace.events import Backward, Bookkeeping, Constant, Event, Free, Need, Op, Result, Save, Unsave
from delta.trace.inventory import Inventory
from delta.units import Share

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
EVICTING = [("recompute", "cpu"), ("swap", "chaos:1"), ("delta", "chaos:2")]


class Plain(TorchDispatchMode):
    """Counts plain PyTorch from the first op on a parameter on: ops, and the most bytes made since that exist."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.peak_bytes = 0
        self.left_bytes = 0  # after the step
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        inputs = tensors_in([*args, *(kwargs or {}).values()])
        result = func(*args, **kwargs or {})
        if facts_of(func).view or not (self.names or any(tensor.requires_grad for tensor in inputs)):
            return result
        if not any(tensor.untyped_storage().nbytes() for tensor in [*inputs, *tensors_in(result)]):
            return result
        self.names.append(facts_of(func).name)
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = weakref.ref(storage)
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        return result

    def bytes(self) -> int:
        return sum(storage.nbytes() for ref in self._made.values() if (storage := ref()) is not None)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def counted(step: Callable[[], object]) -> Plain:
    with Plain() as plain:
        step()
    plain.left_bytes = plain.bytes()
    return plain


def recorded(path: Path, step: Callable[[], object], **arguments: Any) -> tuple[Trace, delta.Report]:
    """A step under `trace=`. Writing checks that every input is known and nothing is used after it is gone."""
    with delta.evict(trace=path, **arguments) as run:
        step()
    assert run.traces == (path,)
    return read(path), run.report()


def assert_counts(trace: Trace, plain: Plain, saved_bytes: int) -> None:
    """The same ops, and the same bytes at the peak and in the end, as somebody else counted."""
    inventory = Inventory()
    for event in trace.events:
        inventory.take(event)
    assert names(trace) == plain.names
    assert inventory.peak_bytes - trace.constant_bytes == plain.peak_bytes
    assert inventory.live_bytes - trace.constant_bytes == plain.left_bytes
    assert inventory.peak_saved_bytes == saved_bytes


def evicting(policy: str, device: str) -> dict[str, Any]:
    return {
        "activations": "50%",
        "policy": delta.load_policy(policy, {"filter.min_bytes": 0, "planner.kind": "none"}),
        "device": device,
    }


def timeless(trace: Trace) -> list[Event]:
    return [replace(event, cost_ns=0, again_ns=0) if isinstance(event, Op) else event for event in trace.events]


def names(trace: Trace) -> list[str]:
    return [event.name for event in trace.events if isinstance(event, Op)]


def case_step(name: str) -> Callable[[], Callable[[], object]]:
    """A maker of equal steps: each time the same model and data."""

    def make() -> Callable[[], object]:
        torch.manual_seed(0)
        model, generator = CASES[name].make(), torch.Generator().manual_seed(1)
        kept = []  # as a training loop does, until after backward

        def step() -> None:
            kept.append(CASES[name].loss(model, generator))
            kept[0].backward()

        return step

    return make


def program_step(program: Program) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        torch.manual_seed(0)
        weights, data = Weights(), torch.randn(ROWS, COLUMNS, requires_grad=True)
        return lambda: loss_of(program, weights, data, lambda values: None).backward()

    return make


# --- what a trace says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_recorded_as_plain_pytorch_runs_it(name: str, tmp_path: Path) -> None:
    make = case_step(name)
    plain = counted(make())
    trace, report = recorded(tmp_path / "step.jsonl.gz", make())
    assert_counts(trace, plain, report.unevicted_peak_activation_bytes)
    assert all(event.cost_ns > 0 for event in trace.events if isinstance(event, Op))
    assert (trace.name, trace.evictable, trace.device) == ("step", Evictable.SAVED, "cpu")
    assert trace.facts.pop("device")
    assert trace.facts == {"torch": torch.__version__, "threads": "1", "step": "1"}
    assert trace.link is not None and trace.link.out_bytes_per_s > 1e6 and trace.link.in_bytes_per_s > 1e6


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize(("policy", "device"), EVICTING)
@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_of_the_program_whatever_is_evicted(name: str, policy: str, device: str, tmp_path: Path) -> None:
    make = case_step(name)
    plain, _ = recorded(tmp_path / "plain.jsonl", make())
    trace, report = recorded(tmp_path / "evicted.jsonl", make(), **evicting(policy, device))
    assert sum(report.evictions.values()) > 0
    assert timeless(trace) == timeless(plain)


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@settings(derandomize=True, max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(20), evict=st.sampled_from(EVICTING))
def test_random_programs(program: Program, evict: tuple[str, str], tmp_path: Path) -> None:
    make = program_step(program)
    plain = counted(make())
    trace, report = recorded(tmp_path / "plain.jsonl", make())
    assert_counts(trace, plain, report.unevicted_peak_activation_bytes)
    evicted, _ = recorded(tmp_path / "evicted.jsonl", make(), **evicting(*evict))
    assert timeless(evicted) == timeless(trace)


def test_delta_s_own_work_on_a_storage_is_no_use_of_it(tmp_path: Path) -> None:
    """Another thread may be at it (the one that samples memory takes in copies that have ended) when the tracer looks
    whether the program has let go."""

    def step(in_between: Callable[[torch.UntypedStorage], None]) -> None:
        first = torch.ones(4, requires_grad=True).exp()
        second = first.sin()
        storage = second.untyped_storage()
        second.register_hook(lambda gradient: in_between(storage))  # after its last use, before the next node
        loss = second.cos().sum()
        del first, second
        loss.backward()

    def work(core: Core, storage: torch.UntypedStorage) -> None:
        at_work = threading.Event()

        def copy() -> None:
            with core:
                tensor = as_bytes(storage)
                at_work.set()
                time.sleep(0.05)
                del tensor

        threading.Thread(target=copy).start()
        at_work.wait()

    quiet, _ = recorded(tmp_path / "quiet.jsonl", lambda: step(lambda storage: None))
    with delta.evict(trace=tmp_path / "busy.jsonl") as run:
        step(lambda storage: work(run._core, storage))
    assert timeless(read(tmp_path / "busy.jsonl")) == timeless(quiet)


def test_a_small_step_event_by_event(tmp_path: Path) -> None:
    weight, batch = nn.Parameter(torch.ones(4)), torch.ones(2, 4)

    def step() -> None:
        scaled = (weight.exp() * batch).add_(1)
        scaled.t().tanh().sum().backward()
        del scaled

    trace, _ = recorded(tmp_path / "step.jsonl", step)
    assert timeless(trace) == [
        Constant(0, 16),
        Constant(2, 32),
        Op("aten.exp", (0,), (1,), (16,), 0),
        Save(1),  # by exp
        Save(2),  # by mul: the batch is an input, and counts like any saved tensor
        Op("aten.mul", (1, 2), (3,), (32,), 0),
        Free(1),
        Op("aten.add_", (3,), (4,), (32,), 0, overwrites=(3,)),
        Op("aten.tanh", (4,), (5,), (32,), 0),  # a view makes no event
        Save(5),
        Op("aten.sum", (5,), (6,), (4,), 0),
        Free(5),
        Op("aten.ones_like", (6,), (7,), (4,), 0),
        Backward(),
        Need(5),
        Op("aten.tanh_backward", (7, 5), (8,), (32,), 0, replayable=False),
        Unsave(5),
        Need(2),
        Op("aten.mul", (8, 2), (9,), (32,), 0, replayable=False),
        Op("aten.sum", (9,), (10,), (16,), 0, replayable=False),
        Unsave(2),
        Free(8),
        Free(9),
        Need(1),
        Op("aten.mul", (10, 1), (11,), (16,), 0, replayable=False),
        *(Free(4), Free(6), Free(7), Free(10)),
        Unsave(1),
        Result(11),  # the gradient
    ]


# --- steps ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Its second output is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return hidden, self.second(hidden).tanh()


def loop(steps: int, optimiser: type[torch.optim.Optimizer] = torch.optim.Adam) -> list[int]:
    """Train as a script does, with the outputs kept until the next step; returns the modes on the stack each time."""
    model, depths = Net(), []
    optimise = optimiser(model.parameters(), 0.1)
    for _ in range(steps):
        hidden, unused = model(torch.randn(4, 8))
        depths.append(torch._C._len_torch_dispatch_stack())
        hidden.square().mean().backward()
        optimise.step()
        optimise.zero_grad()
    del unused
    return depths


def test_asked_steps_are_recorded_and_the_tracer_leaves(tmp_path: Path) -> None:
    with delta.evict(trace=Recording(tmp_path / "net.jsonl.gz", skip=1, steps=2)) as run:
        assert loop(6) == [2, 2, 2, 0, 0, 0]  # tracer and recorder
    assert run.traces == (tmp_path / "net.jsonl.gz", tmp_path / "net-2.jsonl.gz")
    first, second = map(read, run.traces)
    assert (first.name, second.name) == ("net", "net-2")
    assert [trace.facts["step"] for trace in (first, second)] == ["2", "3"]
    assert timeless(first) == timeless(second)
    assert min(asdict(first.bookkeeping).values()) > 0
    assert "aten.mm" in names(first) and not any("add_" in name or "sqrt" in name for name in names(first))


class Clock:
    """Stands still, but for what is said to take time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._now_ns = patch, 0
        patch.setattr("time.perf_counter_ns", lambda: self._now_ns)

    def takes(self, where: Any, name: str, ns: int) -> None:
        original = getattr(where, name)

        def slower(*args: Any, **kwargs: Any) -> Any:
            self._now_ns += ns
            return original(*args, **kwargs)

        self._patch.setattr(where, name, slower)


def small_step() -> None:
    """Six ops and a view outside of backward, its first gradient among them; what is saved are three activations."""
    weight, batch = nn.Parameter(torch.ones(4)), torch.ones(2, 4)
    scaled = (weight.exp() * batch).add_(1)
    scaled.t().tanh().sum().backward()


def test_a_trace_tells_what_delta_s_own_work_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.takes(Recorder, "__torch_dispatch__", 1_000)
    clock.takes(Recorder, "_record", 20_000)
    clock.takes(Hooks, "pack", 300_000)
    clock.takes(Hooks, "unpack", 4_000_000)
    clock.takes(Inbox, "handle_died", 50_000_000)
    clock.takes(TracedStep, "ran", 600_000_000)  # the tracer's own work
    trace, _ = recorded(tmp_path / "step.jsonl", small_step)
    own = trace.bookkeeping
    assert own.op_ns == 20_000 + 1_000 + 1_000 // 6  # its share of the view
    assert own.passed_ns == 1_000 + 1_000 // 6
    assert (own.save_ns, own.release_ns) == (300_000, 50_000_000)
    assert 4_000_000 <= own.need_ns < 4_100_000  # and what the recorder does in backward
    assert trace.base_ns == 0


def test_what_autograd_saves_of_the_model_is_part_of_what_a_save_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch).takes(Hooks, "pack", 300_000)
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.ones(2, 4)
    trace, _ = recorded(tmp_path / "step.jsonl", lambda: model(batch).sum().backward(), model=model)
    assert sum(isinstance(event, Save) for event in trace.events) == 3
    assert trace.bookkeeping.save_ns == 400_000  # the second weight is saved too, and is no activation


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_replays_are_no_bookkeeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch).takes(rematerialise, "replay", 1_000)
    trace, report = recorded(tmp_path / "step.jsonl", small_step, **evicting("recompute", "cpu"))
    assert report.recompute_ns > 0
    assert trace.bookkeeping == Bookkeeping()


def test_where_the_host_works_ahead_its_time_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with delta.evict(trace=tmp_path / "step.jsonl", device="cpu") as run:
        monkeypatch.setattr(type(run._core.op_times.clock), "late", True)
        small_step()
    assert read(tmp_path / "step.jsonl").bookkeeping == Bookkeeping()


@pytest.mark.filterwarnings("ignore:torch.backends.cudnn.benchmark is on:RuntimeWarning")
@pytest.mark.parametrize(("searches", "refused"), [(False, 0), (True, 0), (False, 1)])
def test_a_convolution_for_which_cudnn_may_choose_otherwise_is_not_replayable(
    searches: bool, refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = itertools.count(step=refused)
    monkeypatch.setattr("delta.runtime.cudnn._fell_back", threading.Event())
    monkeypatch.setattr(torch._C, "_get_cudnn_benchmark", lambda: searches)
    weight = nn.Parameter(torch.ones(3, 2, 3, 3))
    with delta.evict(trace=tmp_path / "step.jsonl", device="cpu") as run:
        monkeypatch.setattr(type(run._core.device), "kind", "cuda")
        monkeypatch.setattr(run._core.device, "refusals", lambda: next(refusals))
        torch.nn.functional.conv2d(torch.ones(1, 2, 5, 5), weight).tanh().sum().backward()
    ops = [event for event in read(tmp_path / "step.jsonl").events if isinstance(event, Op)]
    replayable = {op.name: op.replayable for op in ops}
    assert replayable["aten.tanh"]
    assert replayable["aten.convolution"] is not (searches or refused > 0)


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_outputs_that_outlive_backward_do_not_join_two_steps(
    optimiser: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    with delta.evict(trace=Recording(tmp_path / "net.jsonl", steps=2)) as run:
        loop(3, optimiser)
    first, second = map(read, run.traces)
    assert timeless(first) == timeless(second)
    assert [name for name in names(first) if name == "aten.tanh"] == ["aten.tanh"] * 2


def test_nothing_is_on_the_stack_without_trace() -> None:
    with delta.evict() as run:
        assert loop(2) == [0, 0]
    assert run.traces == ()


@pytest.mark.filterwarnings("ignore:autograd saves:RuntimeWarning")
def test_steps_on_another_device_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "torch_device", torch.device("meta"))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RuntimeWarning, match="0 of 1 steps were recorded"),
        delta.evict(trace=tmp_path / "t.jsonl", device="cpu") as run,
    ):
        for _ in range(2):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.traces == ()


def test_evaluations_are_no_steps(tmp_path: Path) -> None:
    model = Net()
    with delta.evict(trace=tmp_path / "net.jsonl") as run:
        model(torch.randn(4, 8))
        with torch.no_grad():
            model(torch.randn(4, 8))
        model(torch.randn(2, 8))[1].sum().backward()
    assert summary(read(run.traces[0])).peak_bytes < 2000
    assert names(read(run.traces[0]))[:2] == ["aten.addmm", "aten.tanh"]


def test_too_few_steps_are_told(tmp_path: Path) -> None:
    path = tmp_path / "net.jsonl"
    with (
        pytest.warns(
            RuntimeWarning, match=r"0 of 1 .*: the block ran 2 .* has to run 3, of which the first 2 are skipped"
        ),
        delta.evict(trace=Recording(path, skip=2)) as run,
    ):
        loop(2)
    assert run.traces == () and not path.exists()


def test_a_backward_after_the_block_is_not_recorded_and_works(tmp_path: Path) -> None:
    model = Net()
    with (
        pytest.warns(RuntimeWarning, match=r"0 of 1 steps were recorded: the block ran 0 .* and has to run 1$"),
        delta.evict(trace=tmp_path / "net.jsonl"),
    ):
        loss = model(torch.ones(4, 8))[1].sum()
    loss.backward()
    evicted, model.first.weight.grad = model.first.weight.grad, None
    model(torch.ones(4, 8))[1].sum().backward()
    assert torch.equal(evicted, model.first.weight.grad)


def test_an_error_of_the_program_leaves_the_block(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), delta.evict(trace=tmp_path / "net.jsonl") as run:
        Net()(torch.randn(4, 7))
    assert run.traces == ()
    assert torch._C._len_torch_dispatch_stack() == 0


# --- other ways to go backward ----------------------------------------------------------------------------------------


def penalty(model: nn.Module, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(model(x)[1].sum(), x, create_graph=True)
    gradient.square().sum().backward()


def twice(model: nn.Module, x: Tensor) -> None:
    loss = model(x)[1].sum()
    loss.backward(retain_graph=True)
    loss.backward()


def checkpointed(model: nn.Module, x: Tensor) -> None:
    checkpoint(model.second, model.first(x), use_reentrant=False).sum().backward()


def reentrant(model: nn.Module, x: Tensor) -> None:
    checkpoint(model.second, model.first(x), use_reentrant=True).sum().backward()


class Reuse(torch.autograd.Function):
    """Writes its gradient into what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        doubled = x * 2
        ctx.save_for_backward(doubled)
        return doubled.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (doubled,) = ctx.saved_tensors
        return doubled.cos_().mul_(gradient * 2)


def reusing(model: nn.Module, x: Tensor) -> None:
    Reuse.apply(Reuse.apply(model(x)[1])).sum().backward()


@pytest.mark.parametrize("way", [penalty, twice, checkpointed, reentrant, reusing])
def test_other_ways_to_go_backward(way: Callable[[nn.Module, Tensor], None], tmp_path: Path) -> None:
    def make() -> Callable[[], object]:
        torch.manual_seed(0)
        model, x = Net(), torch.randn(4, 8, requires_grad=True)
        return lambda: way(model, x)

    plain = counted(make())
    trace, report = recorded(tmp_path / "step.jsonl", make())
    assert_counts(trace, plain, report.unevicted_peak_activation_bytes)
    assert timeless(trace).count(Backward()) == 1


def go_on_between(model: nn.Module, x: Tensor) -> None:
    """Forward goes on after a first backward, from what that one kept."""
    hidden = model.first(x)
    hidden.tanh().sum().backward(retain_graph=True)
    model.second(hidden.exp().tanh()).sum().backward()


@pytest.mark.parametrize("policy", ["delta", "recompute", "swap", "monet"])
@pytest.mark.parametrize("way", [penalty, twice, reentrant, go_on_between])
def test_what_is_saved_after_backward_began_is_simulated(
    way: Callable[[nn.Module, Tensor], None], policy: str, tmp_path: Path
) -> None:
    model, x = Net(), torch.randn(4, 8, requires_grad=True)
    trace, _ = recorded(tmp_path / "step.jsonl", lambda: way(model, x))
    began = trace.events.index(Backward())
    assert any(isinstance(event, Save) for event in trace.events[began:]) is (way is not twice)
    # What ops of nanoseconds cost is noise: all take the same, so that no run thrashes on one day and not on another.
    even = tuple(replace(event, cost_ns=1_000) if isinstance(event, Op) else event for event in trace.events)
    trace = replace(trace, events=even)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    whole, half = (simulate(trace, chosen, Share(share), trace.link) for share in (1.0, 0.5))
    assert (whole.status, whole.overhead) == (Status.OK, 1.0)
    assert half.decisions > 0, "whether or not so small a net fits"
    (floor,) = floors(trace, chosen, [Share(1.0)], trace.link)
    assert floor.overhead >= 1


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_as_before(name: str, tmp_path: Path) -> None:
    """Of these models no backward formula depends on the mode stack."""
    plain = train(CASES[name], 4)
    with delta.evict(trace=Recording(tmp_path / "step.jsonl", skip=1, steps=2)):
        assert plain.differences(train(CASES[name], 4)) == []


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "step.jsonl"):
        with (
            pytest.raises(TraceError, match=r"cannot be written: .*give a file"),
            delta.evict(trace=path),
        ):
            pass
    with delta.evict():  # the failed blocks are closed
        pass


def test_what_is_no_file_is_refused_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TraceError, match="cannot be written: there is something that is no regular file; give a file"):
        delta.evict(trace=pipe).__enter__()
    assert pipe.is_fifo()


def test_a_block_that_is_entered_again_keeps_what_it_has_written(tmp_path: Path) -> None:
    run = delta.evict(trace=Recording(tmp_path / "net.jsonl", skip=1, steps=2), timeline=tmp_path / "t.jsonl")
    with pytest.warns(RuntimeWarning, match="1 of 2 steps were recorded"), run:
        loop(2)
    first = (tmp_path / "t.jsonl").read_bytes()
    with run:
        assert loop(3) == [2, 0, 0]
    with run:
        assert loop(1) == [0]
    assert run.traces == (tmp_path / "net.jsonl", tmp_path / "net-2.jsonl")
    assert [read(path).facts["step"] for path in run.traces] == ["2", "3"]
    assert (tmp_path / "t.jsonl").read_bytes() == first
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["net-2.jsonl", "net.jsonl", "t-2.jsonl", "t-3.jsonl", "t.jsonl"]


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(trace: Trace, path: Path) -> None:
        raise TraceError(f"trace {str(path)!r}: cannot be written: No space left on device")

    monkeypatch.setattr(tracer, "write", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"), delta.evict(trace=tmp_path / "t") as run:
        loop(3)
    assert run.traces == ()


# --- deltactl trace ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from delta.runtime.demo_model import Gpt, GptConfig, next_byte_loss
model = Gpt(GptConfig(layers=2, width=32, heads=4, seq=16))
optimiser = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[1])):
    next_byte_loss(model, torch.randint(0, 256, (2, 17))).backward()
    optimiser.step()
    optimiser.zero_grad()
print("trained")
sys.exit(int(sys.argv[2]))  # ValueError for a code that is no number
"""
FEWER_STEPS = pytest.mark.filterwarnings(
    "ignore:trace=.* steps were recorded:RuntimeWarning"
)  # it is in the report too


def arguments(tmp_path: Path, options: list[str], steps: int, code: int | str) -> list[str]:
    """`deltactl trace` on the script, which runs so many steps and exits with that code."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return ["trace", *options, str(script), str(steps), str(code)]


def deltactl(tmp_path: Path, options: list[str], steps: int, code: int | str) -> testing.Result:
    """... in this process: one of its own takes seconds to start."""
    return testing.CliRunner().invoke(app, arguments(tmp_path, options, steps, code), prog_name="deltactl")


def test_deltactl_trace_records_a_script(tmp_path: Path) -> None:
    output = tmp_path / "gpt.jsonl.gz"
    options = ["--output", str(output), "--skip", "1", "--steps", "2"]
    command = [sys.executable, "-m", "delta", *arguments(tmp_path, options, steps=4, code=0)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
    first, second = read(output), read(tmp_path / "gpt-2.jsonl.gz")
    assert timeless(first) == timeless(second)
    assert names(first)[0] == "aten.embedding" and "aten.embedding_dense_backward" in names(first)
    assert f"{output}: {summary(first)}\n" in done.stderr and str(summary(second)) in done.stderr


@FEWER_STEPS
@pytest.mark.parametrize(("code", "exit_code"), [("3", 3), ("failing", 1)])
def test_deltactl_trace_of_a_script_that_fails_tells_what_was_recorded(
    code: str, exit_code: int, tmp_path: Path
) -> None:
    output = tmp_path / "gpt.jsonl"
    done = deltactl(tmp_path, ["--output", str(output), "--steps", "2"], steps=1, code=code)
    assert done.exit_code == exit_code
    assert len(names(read(output))) > 20
    assert done.stderr.endswith(f"{output}: {summary(read(output))}\n")
    assert f"  warning: trace={str(output)!r}: 1 of 2 steps were recorded: the block ran 1 training" in done.stderr


@FEWER_STEPS
@pytest.mark.parametrize(("code", "exit_code"), [("0", 2), ("failing", 1)])
def test_deltactl_trace_tells_that_no_step_was_recorded(code: str, exit_code: int, tmp_path: Path) -> None:
    output = tmp_path / "gpt.jsonl"
    done = deltactl(tmp_path, ["--output", str(output), "--skip", "2"], steps=2, code=code)
    assert done.exit_code == exit_code
    assert f"  warning: trace={str(output)!r}: 0 of 1 steps were recorded: the block ran 2 training" in done.stderr
    assert done.stderr.endswith(f"{output}: no trace was written, the warning above says why\n")


@FEWER_STEPS
def test_deltactl_trace_tells_that_the_file_there_is_an_older_one(tmp_path: Path) -> None:
    output = tmp_path / "gpt.jsonl"
    output.write_text("before")
    done = deltactl(tmp_path, ["--output", str(output)], steps=0, code=0)
    assert done.exit_code == 2
    assert done.stderr.endswith("says why; the file that is there is an older one\n")


@pytest.mark.parametrize("options", [["--output", "/no/such/place/t.jsonl"], ["--steps", "0"], ["--skip", "-1"]])
def test_deltactl_trace_refuses_options_before_the_script_runs(options: list[str], tmp_path: Path) -> None:
    done = deltactl(tmp_path, options, steps=1, code=0)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("deltactl: ") and "Traceback" not in done.stderr


def test_what_makes_no_tensor_only_passes() -> None:
    """A number that is asked for is no op that is recorded, nor is a view."""
    own = OwnTime()
    for op in (torch.ops.aten._local_scalar_dense, torch.ops.aten.view, torch.ops.aten.sin, torch.ops.aten.add_.Tensor):
        own_time._note(own, getattr(op, "default", op), took_ns=5, followed=False)
    assert (own.passed, own.passed_ns, own.ops, own.ops_ns) == (2, 10, 2, 10)


def test_a_trace_knows_what_copies_take_from_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "interference", lambda _: 0.125)
    path = tmp_path / "step.jsonl"
    with delta.evict(trace=path, device="cpu"):
        torch.randn(8, 8, requires_grad=True).exp().sum().backward()
    link = read(path).link
    assert link is not None
    assert link.interference == 0.125
