"""Promise P1 with other tools of PyTorch in the block: hooks, modes, profilers, exported and scripted models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from covering import in_turns
from inside import POLICIES, STEPS, exact, numbers, policy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import delta

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning"),
]

WIDTH = 8


class Net(nn.Module):
    """Statistics, dropout and a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down((torch.tanh(y) + 1).mul_(0.5)))


def train(
    model: nn.Module | None = None, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> list[Tensor]:
    """Train with `around()` entered in every step, backward included."""
    model = model or nn.Sequential(Net(), Net())
    return numbers(model, lambda step: _loss_and_backward(model, around))


def _loss_and_backward(model: nn.Module, around: Callable[[], AbstractContextManager[Any]]) -> Tensor:
    with around():
        model(torch.randn(4, WIDTH)).square().sum().backward()
        return model(torch.randn(4, WIDTH)).square().sum()


class Doubling(TorchFunctionMode):
    """Doubles what `tanh` gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.tanh else found


class Noting(TorchDispatchMode):
    """A dispatch mode that only looks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Changing(TorchDispatchMode):
    """A dispatch mode that changes what an op gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.ops.aten.gelu.default else found


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def deterministic_debug() -> Iterator[None]:
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True),
    "record_function": lambda: torch.profiler.record_function("step"),
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "save_on_cpu": lambda: save_on_cpu(),
    "hooks_of_the_user": lambda: saved_tensors_hooks(lambda tensor: tensor.clone(), lambda packed: packed),
    "torch_function_mode": Doubling,
    "torch_dispatch_mode": Noting,
    "torch_dispatch_mode_that_changes": Changing,
    "flop_counter": lambda: FlopCounterMode(display=False),
    "deterministic_algorithms": deterministic,
    "deterministic_debug_mode": deterministic_debug,
    "default_device": default_device,
    "device_context": lambda: torch.device("cpu"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@in_turns(name=AROUND, policy_name=POLICIES)
def test_entered_in_every_step(name, policy_name):
    exact(lambda: train(around=AROUND[name]), policy_name)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize(
    "name", ["profiler", "detect_anomaly", "torch_function_mode", "torch_dispatch_mode_that_changes"]
)
def test_entered_around_the_block(name):
    """The block then finds something on the mode stack, or hooks, and leaves them as they were."""
    with AROUND[name]():
        exact(train, "recompute")


def test_save_on_cpu_around_the_block():
    """The inner pair of hooks is Delta's: what it leaves alone goes past the outer one, as with any nested pairs."""
    with save_on_cpu():
        report = exact(train, "recompute")
    assert report.evictions["recompute"] > 0


def test_the_flop_counter_counts_what_the_program_ran():
    """Not what is recomputed for it."""

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            train()
        return counter.get_total_flops()

    expected = flops()
    with delta.evict(activations="0%", policy=policy("recompute"), device="cpu"):
        assert flops() == expected


# -- hooks on tensors and modules -------------------------------------------------------------------------------------
def tensor_hooks() -> list[Tensor]:
    seen: list[Tensor] = []
    model = Net()

    def loss(step: int) -> Tensor:
        y = model(torch.randn(4, WIDTH))
        y.register_hook(lambda gradient: gradient * 2)
        y.retain_grad()
        model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        z = y.sin().exp()
        register_multi_grad_hook((y, z), lambda gradients: seen.extend(g.clone() for g in gradients if g is not None))
        z.grad_fn.register_prehook(lambda gradients: tuple(g * 3 for g in gradients))
        return z.sum()

    return numbers(model, loss) + seen


def module_hooks() -> list[Tensor]:
    model = nn.Sequential(Net(), Net())
    model[0].register_forward_hook(lambda module, given, found: found.mul_(2))
    model[1].register_forward_pre_hook(lambda module, given: (given[0].sin(),))
    model[1].register_full_backward_hook(lambda module, gradients, _: tuple(g * 2 for g in gradients))
    return train(model)


def inference_between_steps() -> list[Tensor]:
    model, found = Net(), []

    def loss(step: int) -> Tensor:
        with torch.inference_mode():
            found.append(model(torch.randn(4, WIDTH)).clone())
        return model(torch.randn(4, WIDTH) + found[-1].clone()).sum()

    return numbers(model, loss) + found


def another_default_dtype() -> list[Tensor]:
    torch.set_default_dtype(torch.float64)
    try:
        return train()
    finally:
        torch.set_default_dtype(torch.float32)


def fake_tensors_between_steps() -> list[Tensor]:
    """Shapes worked out without data, in the midst of a step."""
    model = Net()

    def loss(step: int) -> Tensor:
        y = model(torch.randn(4, WIDTH))
        with FakeTensorMode():
            fake = nn.Linear(WIDTH, 3)(torch.randn(4, WIDTH)).relu()
            fake.sum().backward()
        return y[:, : fake.shape[1]].sin().exp().sum()

    return numbers(model, loss)


def meta_tensors_between_steps() -> list[Tensor]:
    model, shadow = Net(), Net().to("meta")

    def loss(step: int) -> Tensor:
        rows = shadow(torch.randn(4, WIDTH, device="meta")).exp()
        rows.sum().backward()
        return model(torch.randn(rows.shape)).sin().exp().sum()

    return numbers(model, loss)


# -- other forms of a model -------------------------------------------------------------------------------------------
def scripted() -> list[Tensor]:
    """The first training of a kind runs as other graphs than the later ones, with other bits: it is not compared."""
    before = torch.get_rng_state()
    train(torch.jit.script(Net()))
    torch.set_rng_state(before)
    return train(torch.jit.script(Net()))


def traced() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    return train(torch.jit.trace(model, torch.randn(4, WIDTH)))


def fx_traced() -> list[Tensor]:
    return train(torch.fx.symbolic_trace(Net()))


def exported() -> list[Tensor]:
    return train(torch.export.export(Net(), (torch.randn(4, WIDTH),)).module())


PROGRAMS = (
    tensor_hooks,
    module_hooks,
    inference_between_steps,
    another_default_dtype,
    fake_tensors_between_steps,
    meta_tensors_between_steps,
    scripted,
    traced,
    fx_traced,
    exported,
)


@in_turns(program=PROGRAMS, policy_name=POLICIES)
def test_numbers_equal_plain(program, policy_name):
    report = exact(program, policy_name)
    assert report.steps >= STEPS


# -- DataParallel -----------------------------------------------------------------------------------------------------
def test_data_parallel_on_one_device_passes_through():
    exact(lambda: train(nn.DataParallel(Net())), "recompute")


def test_data_parallel_with_replicas_is_refused():
    model = nn.DataParallel(Net())
    model.device_ids = [0, 1]
    model.scatter = lambda given, kwargs, devices: ([given] * 2, [kwargs] * 2)
    model.src_device_obj = torch.device("cpu")
    refused = pytest.raises(delta.DeltaError, match=r"DataParallel.*DistributedDataParallel")
    with refused, delta.evict(activations="0%", policy=policy("swap"), device="cpu"):
        model(torch.randn(4, WIDTH))


def test_data_parallel_is_left_alone_outside_of_a_block():
    model = nn.DataParallel(Net())
    model.device_ids, model.src_device_obj = [0, 1], torch.device("cpu")
    model.scatter = lambda given, kwargs, devices: ([given] * 2, [kwargs] * 2)
    with delta.evict(activations="0%", device="cpu"):
        pass
    with pytest.raises(
        AssertionError, match="not implemented for CPU"
    ) as caught:  # it gets as far as plain PyTorch does
        model(torch.randn(4, WIDTH))
    assert not isinstance(caught.value, delta.DeltaError)
