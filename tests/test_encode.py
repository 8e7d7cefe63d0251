"""Storages kept in a smaller lossless form: exact on training loops, and really smaller."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from covering import in_pairs
from exactly import STEPS, numbers_of, plain_numbers_of, trained
from inside import different
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import delta
from delta.planner import PLANNERS
from delta.report import Report
from delta.simulate import Status, simulate
from delta.trace import read
from delta.trace.events import Op, Save
from delta.types import Action
from delta.units import Share

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")

ACTIONS = [("keep", "encode"), ("keep", "encode", "recompute"), ("keep", "encode", "swap", "recompute")]
PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {}


def policy(*actions: str, kind: str = "profile") -> delta.Policy:
    changes = {"filter.min_bytes": 0, "director.actions": list(actions), "planner.kind": kind}
    return delta.load_policy("delta", changes)


def program(function: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    PROGRAMS[function.__name__] = function
    return function


class Pooled(nn.Module):
    """Pooling indices, a bool mask of dropout, dropout as it is on a CPU, comparisons; ReLU before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.relu_(self.second(x))
        x = torch.native_dropout(F.max_pool2d(x, 2), 0.3, True)[0]
        x = F.dropout(x.flatten(1), 0.2)
        x = torch.where(x > 0.1, x, 0.5 * x)
        x = x.masked_fill(x > 2.0, 2.0)
        return self.last(x.gather(1, x.argsort(1)))


def batch() -> Tensor:
    return torch.randn(4, 3, 16, 16)


@program
def pooled() -> list[Tensor]:
    model = Pooled()
    return trained(model, lambda: model(batch()).square().mean())


@program
def backward_twice() -> list[Tensor]:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    model = Pooled()
    return trained(model, lambda: model(batch()).square().mean(), twice)


@program
def double_backward() -> list[Tensor]:
    model = Pooled()

    def loss_of() -> Tensor:
        x = batch().requires_grad_()
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    return trained(model, loss_of)


@program
def checkpoint_inside() -> list[Tensor]:
    model = Pooled()
    return trained(model, lambda: checkpoint(model, batch(), use_reentrant=False).square().mean())


@program
def checkpoint_of_a_part() -> list[Tensor]:
    model, block = Pooled(), nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Dropout(0.3))
    both = nn.ModuleList([model, block])
    return trained(both, lambda: model(checkpoint(block, batch(), use_reentrant=False)).square().mean())


@program
def mask_written_after_use() -> list[Tensor]:
    """The mask of the first product goes on to hold that of the second, and a recipe reads both versions."""
    model = nn.Linear(32, 32)

    def loss_of() -> Tensor:
        x = model(torch.randn(64, 32))
        noise = torch.empty_like(x).bernoulli_(0.5)
        y = (x * 2).mul(noise.clone()).exp()
        noise.bernoulli_(0.5)
        return (y * noise).tanh().mean()

    return trained(model, loss_of)


def run(name: str, chosen: delta.Policy, share: str, device: str = "cpu") -> Report:
    plain = plain_numbers_of(PROGRAMS[name])
    with delta.evict(activations=share, policy=chosen, device=device) as session:
        evicted = numbers_of(PROGRAMS[name])
    assert different(plain, evicted) == []
    assert session._core is not None
    assert (session._core.engine.ledger.handles, session._core.slots) == (0, {})
    session._core.engine.ledger.validate()
    return session.report()


WAYS = [("0%", "cpu"), ("60%", "chaos:1"), ("85%", "cpu")]


@in_pairs(name=PROGRAMS, actions=map("+".join, ACTIONS), way=WAYS)
def test_gradients_have_the_same_bits(name, actions, way):
    share, device = way
    report = run(name, policy(*actions.split("+")), share, device)
    if share == "0%" and "swap" not in actions and name in ("pooled", "backward_twice", "double_backward"):
        assert report.evictions["encode"] > 0
        assert report.encoded_bytes_saved > 0


@pytest.mark.parametrize("kind", ["profile", "none"])
def test_bytes_are_really_smaller(kind):
    kept = run("pooled", policy("keep", "swap", kind="none"), "100%")
    report = run("pooled", policy("keep", "encode", kind=kind), "0%")
    assert report.unevicted_peak_activation_bytes == kept.peak_activation_bytes
    assert report.peak_activation_bytes < 0.9 * kept.peak_activation_bytes


@pytest.mark.parametrize("name", ["swap", "recompute", "delta"])
def test_saved_again_after_the_first_graph_has_died(name):
    """`argsort` saves its indices for values that nobody uses; then `gather` saves them."""
    linear, x = nn.Linear(8, 8), torch.randn(8, 8)

    def gradient() -> Tensor:
        y = linear(x)
        y.gather(1, y.argsort(1)).square().mean().backward()
        found, linear.weight.grad = linear.weight.grad, None
        assert found is not None
        return found

    plain = gradient()
    with delta.evict(activations="0%", policy=delta.load_policy(name, {"filter.min_bytes": 0})):
        assert torch.equal(gradient(), plain)
        assert torch.equal(gradient(), plain)


def test_a_graph_that_dies_with_an_encoded_form():
    """No backward, the mask is in its bits, and something made of it lives on."""
    x = torch.randn(256, requires_grad=True)

    def graph() -> Tensor:
        mask = torch.randn(256) > 0
        y = torch.where(mask, x, 2 * x)
        others = mask.to(torch.float32)
        del mask
        y.exp()
        return others

    with delta.evict(activations="0%", policy=policy("keep", "encode", kind="none")) as session:
        others = graph()
        assert session._core is not None
        assert (session._core.engine.ledger.handles, session._core.engine.ledger.resident_bytes) == (0, 0)
        assert others.numel() == 256
    assert session.report().evictions["encode"] > 0


def test_a_rule_says_what_is_encoded():
    """The mask of dropout alone, in its bits; all else is kept."""
    rules = [{"op": "aten.native_dropout", "action": "encode"}, {"op": "*", "action": "keep"}]
    changes = {"filter.min_bytes": 0, "director.actions": ["keep", "encode"], "rules": rules}
    report = run("pooled", delta.load_policy("delta", changes), "0%")
    assert report.evictions == {"encode": STEPS}
    assert report.encoded_bytes_saved == STEPS * 7 * (4 * 8 * 4 * 4) // 8


def test_the_rule_of_the_page_is_in_every_plan(monkeypatch):
    """Of what a step saves the mask of dropout alone, which is forgotten before the step ends, is the rule's."""
    tasks, planner = [], PLANNERS["profile"]
    monkeypatch.setitem(PLANNERS, "profile", lambda task: tasks.append(task) or planner(task))
    rules = [{"op": "aten.native_dropout", "action": "encode"}]
    changes = {"filter.min_bytes": 0, "director.actions": ["keep", "recompute", "encode"], "rules": rules}
    report = run("pooled", delta.load_policy("delta", changes), "0%")
    assert not any("rules.0" in text for text in report.warnings)
    assert tasks
    for task in tasks:
        (order,) = task.forced
        assert task.forced[order] is Action.ENCODE
        assert task.graph.nodes[task.graph.saved[order]].encoded_bytes == (4 * 8 * 4 * 4) // 8


def test_bytes_that_do_not_fit_stay_as_they_are():
    """A bool tensor with other bytes than 0 and 1 in it, and indices too far apart."""
    odd = torch.tensor([0, 1, 3, 1] * 64, dtype=torch.uint8)
    far = torch.tensor([0, 2**40] * 128)
    x = torch.randn(256, requires_grad=True)

    def gradient() -> Tensor:
        x.grad = None
        (torch.where((odd + 0).view(torch.bool), x, 2 * x) * (x + (far + 0)).sin()).gather(
            0, (far + 0) % 2
        ).sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient()
    with delta.evict(activations="0%", policy=policy("keep", "encode")) as session:
        for _ in range(STEPS):
            assert torch.equal(gradient(), plain)
    assert session.report().evictions["encode"] > 0


def test_a_trace_carries_the_smaller_forms(tmp_path):
    """Recorded without a budget; then the simulator keeps them so."""
    model = Pooled()
    with delta.evict(trace=tmp_path / "step.jsonl"):
        model(batch()).square().mean().backward()
    trace = read(tmp_path / "step.jsonl")
    sizes = {}
    for event in trace.events:
        if isinstance(event, Op):
            sizes |= dict(zip(event.outputs, event.nbytes, strict=True))
    saves = [event for event in trace.events if isinstance(event, Save) and event.encoded_bytes]
    forms = {(sizes[save.storage], save.encoded_bytes) for save in saves}
    assert forms >= {(16384, 8192), (512, 64), (2048, 64)}  # indices of pooling, the mask, the noise of dropout
    kept = simulate(trace, policy("keep", "encode"), Share(1.5))
    least = simulate(trace, policy("keep", "encode"), Share(0.9))
    assert (kept.encoding_ns, kept.status, least.status) == (0, Status.OK, Status.OK)
    assert least.peak_bytes < kept.peak_bytes
