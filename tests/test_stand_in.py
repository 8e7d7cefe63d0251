"""ReLU's output kept as sign bits: exact whoever asks, and really smaller."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from covering import in_pairs
from exactly import STEPS, numbers_of, plain_numbers_of, trained
from inside import different
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import delta
from delta.engine import Engine
from delta.types import Action

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")

ACTIONS = [("keep", "encode"), ("keep", "encode", "recompute"), ("keep", "encode", "swap", "recompute")]
PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {}
WIDE = 4 * 256 * 32  # bytes of one activation


def program(function: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    PROGRAMS[function.__name__] = function
    return function


def policy(*actions: str, kind: str = "profile") -> delta.Policy:
    changes = {"filter.min_bytes": 0, "director.actions": list(actions), "planner.kind": kind}
    return delta.load_policy("delta", changes)


class Residual(nn.Module):
    """Each ReLU's result is added to what came before, which saves nothing: its own backward alone reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.parts[0](x))
        x = x + F.relu_(self.parts[1](x))
        return x + torch.relu(self.parts[2](x)).view(-1, 32).t().t()


def batch() -> Tensor:
    return torch.randn(256, 32)


@program
def residual() -> list[Tensor]:
    model = Residual()
    return trained(model, lambda: model(batch()).sum())


@program
def backward_twice() -> list[Tensor]:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    model = Residual()
    return trained(model, lambda: model(batch()).sum(), twice)


@program
def double_backward() -> list[Tensor]:
    model = Residual()

    def loss_of() -> Tensor:
        x = batch().requires_grad_()
        loss = model(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    return trained(model, loss_of)


@program
def some_are_saved_again() -> list[Tensor]:
    """By the product, by the exponential, by the next layer's weight; and one by ReLU alone."""
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)

    def loss_of() -> Tensor:
        x = first(batch())
        y = F.relu(x + 1)
        z = F.relu(second(F.relu(x)) + 0)
        return (F.relu(x - 1) * x).sum() + y.exp().mean() + z.sum()

    return trained(nn.ModuleList([first, second]), loss_of)


@program
def not_a_number() -> list[Tensor]:
    """And infinities, and both zeros, in several types."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-30, -1.0, 2.0] * 9, dtype=dtype)
        for _ in range(2):
            x = x.detach().clone().requires_grad_()
            (F.relu(x * 1) + x).backward(torch.arange(72, dtype=dtype))
            assert x.grad is not None
            found.append(x.grad)
    return found


@program
def convolutions() -> list[Tensor]:
    """Channels last, batch norm before and pooling over all of a plane after."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = model.to(memory_format=torch.channels_last)
    return trained(model, lambda: model(torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)).sum())


@program
def other_hooks_took_its_save() -> list[Tensor]:
    """A checkpoint saves for ReLU; the product's save of the same tensor is the first that Delta sees."""
    weight = nn.Parameter(torch.randn(32))
    layer = nn.Linear(32, 32)

    def loss_of() -> Tensor:
        product = checkpoint(F.relu, layer(batch()), use_reentrant=False) * weight
        return product.sum() + layer(batch()).exp().mean()

    return trained(nn.ModuleList([layer, nn.ParameterList([weight])]), loss_of)


@program
def in_a_recurrence() -> list[Tensor]:
    model = nn.RNN(8, 16, nonlinearity="relu", batch_first=True)
    return trained(model, lambda: model(torch.randn(4, 6, 8))[0].sum())


@program
def views_written_in_place() -> list[Tensor]:
    layer = nn.Linear(32, 32)

    def loss_of() -> Tensor:
        x = layer(batch())
        x[:100].relu_()
        return (x + F.relu_(layer(x)[3:])[:1].sum()).sum()

    return trained(layer, loss_of)


WAYS = [("0%", "cpu"), ("60%", "chaos:1")]


@in_pairs(name=PROGRAMS, actions=map("+".join, ACTIONS), way=WAYS)
def test_gradients_have_the_same_bits(name, actions, way):
    share, device = way
    plain = plain_numbers_of(PROGRAMS[name])
    with delta.evict(activations=share, policy=policy(*actions.split("+")), device=device) as session:
        evicted = numbers_of(PROGRAMS[name])
    assert different(plain, evicted) == []
    assert session._core is not None
    assert (session._core.engine.ledger.handles, session._core.slots) == (0, {})
    session._core.engine.ledger.validate()
    if share == "0%" and actions == ("keep", "encode") and name in ("residual", "backward_twice", "convolutions"):
        assert session.report().encoded_bytes_saved > 0
        assert session.report().recomputed_bytes == 0


def test_a_few_bits_are_left_of_each_result():
    """Two results of ReLU in 1/32, nothing replayed. The inputs of three layers stay, and the last result, which is
    needed at once."""
    plain = plain_numbers_of(residual)
    with delta.evict(activations="40%", policy=policy("keep", "encode")) as session:
        assert different(plain, numbers_of(residual)) == []
    report = session.report()
    assert report.unevicted_peak_activation_bytes == 6 * WIDE
    assert report.peak_activation_bytes <= 4 * WIDE + 2 * WIDE // 32
    assert report.encoded_bytes_saved == report.evictions["encode"] * WIDE * 31 // 32
    assert report.evictions == {"encode": 2 * STEPS}
    assert report.recomputed_bytes == 0


@pytest.mark.parametrize("kind", ["profile", "monet"])
def test_planners_choose_them(kind):
    """Under a limit that the results of ReLU in their bits meet, and at a cost that is far below a layer's."""
    plain = plain_numbers_of(residual)
    with delta.evict(activations="70%", policy=policy("keep", "encode", kind=kind)) as session:
        assert different(plain, numbers_of(residual)) == []
    report = session.report()
    assert report.evictions["encode"] >= STEPS
    assert (report.recomputed_bytes, report.warnings) == (0, ())


# -- who asks ---------------------------------------------------------------------------------------------------------
@contextmanager
def everything_in_bits(*more: str) -> Iterator[delta.evict]:
    with delta.evict(activations="0%", policy=policy("keep", "encode", *more, kind="none")) as session:
        yield session


def a_step() -> tuple[Tensor, Any, Tensor]:
    """A leaf, the node of a ReLU whose result is in its bits by now, and a loss."""
    x = torch.linspace(-1, 1, 4096).requires_grad_()
    y = F.relu(x * 2)
    node, loss = y.grad_fn, (y + 1)
    del y
    return x, node, (loss + x.exp()).sum()  # a save of somebody else's, after which ReLU's result has gone


def in_bits(session: delta.evict) -> int:
    assert session._core is not None
    return sum(record.stood_in_for for record in session._core.engine.ledger.records.values())


def test_the_program_reads_the_value():
    with everything_in_bits() as session:
        x, node, loss = a_step()
        assert in_bits(session) == 1
        assert torch.equal(node._saved_result, F.relu(x.detach() * 2))
        assert in_bits(session) == 0
        assert session._core is not None
        assert all(slot.form is None for slot in session._core.slots.values())
        loss.backward()
    assert torch.equal(x.grad, (x.detach() > 0) * 2 + x.detach().exp())


@pytest.mark.parametrize("where", ["register_hook", "register_prehook"])
def test_a_hook_reads_the_value_in_the_middle_of_backward(where):
    seen = []
    with everything_in_bits():
        x, node, loss = a_step()
        getattr(node, where)(lambda *_: seen.append(node._saved_result.clone()))
        loss.backward(retain_graph=True)
        loss.backward()
    assert len(seen) == 2
    assert all(torch.equal(each, F.relu(x.detach() * 2)) for each in seen)


def test_a_differentiated_backward_saves_the_value():
    with everything_in_bits():
        x, _, loss = a_step()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        nodes, found = [gradient.grad_fn], []
        while nodes:
            node = nodes.pop()
            found += [node] if node.name() == "ThresholdBackwardBackward0" else []
            nodes += [following for following, _ in node.next_functions if following is not None]
        assert torch.equal(found[0]._saved_self, F.relu(x * 2))


def test_a_mode_of_the_programs_sees_the_value():
    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.threshold_backward.default:
                seen.append(args[1].clone())
            return func(*args, **(kwargs or {}))

    seen: list[Tensor] = []
    with everything_in_bits():
        x, _, loss = a_step()
        with Sees():
            loss.backward()
    assert torch.equal(seen[0], F.relu(x.detach() * 2))


def test_relu_alone_is_answered_in_bits(monkeypatch):
    told = []
    monkeypatch.setattr(Engine, "allocating", lambda engine, nbytes, now_ns: told.append(nbytes) or [])
    monkeypatch.setattr(Engine, "stood_in", lambda engine, record: told.append(engine.ledger[record].nbytes))
    with everything_in_bits() as session:
        a_step()[2].backward()
    assert told == [4 * 4096, 4 * 4096]  # room is made, and taken
    assert session.report().recomputed_bytes == 0


def test_what_relu_has_not_saved_is_kept():
    """No gradient goes through this ReLU: the product is the first to save its result."""
    with everything_in_bits() as session:
        w = torch.full((4096,), 3.0, requires_grad=True)
        y = F.relu(torch.linspace(-1, 1, 4096))
        product = y * w
        del y
        loss = (product + w.exp()).sum()
        assert in_bits(session) == 0
        loss.backward()
    assert session.report().recomputed_bytes == 0


def test_nobody_else_is_answered_in_bits():
    """Two saves of one result, and the bits made between them."""
    with everything_in_bits() as session:
        x = torch.linspace(-1, 1, 4096).requires_grad_()
        w = torch.full((4096,), 3.0, requires_grad=True)
        y = F.relu(x * 2)
        _ = x.exp()
        core = session._core
        assert core is not None
        with core:
            record = core.storages.known(y)
            assert record is not None
            core.run(core.engine._room.carry_out(core.engine.ledger[record], Action.ENCODE, 0, False))
        assert in_bits(session) == 1
        z = y * w
        assert in_bits(session) == 0
        del y
        z.sum().backward()
    assert torch.equal(w.grad, F.relu(x.detach() * 2))
    assert torch.equal(x.grad, (x.detach() > 0) * 6.0)


def test_a_result_that_is_changed_in_place_is_an_error():
    with everything_in_bits():
        x = torch.linspace(-1, 1, 4096).requires_grad_()
        y = F.relu(x * 2)
        z, alias = y + 1, y.detach()
        del y
        loss = (z + x.exp()).sum()
        alias.add_(1)
        with pytest.raises(delta.StorageModifiedError, match="modified by an inplace operation"):
            loss.backward()


def test_the_graph_of_one_step_outlives_it():
    """`retain_graph`, and the second backward after the block has ended."""
    with everything_in_bits():
        x, _, loss = a_step()
        loss.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    assert torch.equal(x.grad, first)


def test_a_step_recorded_without_a_limit_has_no_stand_ins(tmp_path):
    """Traces carry forms that serve everybody; the simulator replays or keeps what ReLU has saved."""
    with delta.evict(trace=tmp_path / "step.jsonl"):
        a_step()[2].backward()
    assert "encoded_bytes" not in (tmp_path / "step.jsonl").read_text()
