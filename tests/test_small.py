"""Saved storages below `filter.min_bytes`: they stay, and are given back with no question to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import delta
from delta.errors import StorageModifiedError
from delta.runtime.core import Core

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # small ones alone are over most
LEAST = 1000  # bytes
STEPS = 5


def small_ones(policy: str = "recompute") -> delta.Policy:
    return delta.load_policy(policy, {"filter.min_bytes": LEAST})


def core_of(run: delta.evict) -> Core:
    assert run._core is not None
    return run._core


@pytest.fixture
def session() -> Iterator[Core]:
    with delta.evict(activations="40%", policy=small_ones(), device="cpu") as run:
        yield core_of(run)


def layers() -> nn.Module:
    """Each batch norm saves its input, and two small statistics."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks)


def train(net: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        net.zero_grad()
        net(torch.randn(2, 8, 16, 16)).square().mean().backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("policy", ["delta", "recompute", "swap", "dtr", "mimose"])
def test_the_same_bits(policy: str) -> None:
    plain = train(layers())
    with delta.evict(activations="40%", policy=small_ones(policy), device="cpu") as run:
        assert all(map(torch.equal, train(layers()), plain))
    assert run.report().evictions and run.report().steps == STEPS


def test_steps_are_learned_without_their_needs(session: Core) -> None:
    train(layers())
    graph = session.engine.learner.profiles[0].graph
    sizes = [graph.nodes[node].nbytes for node in graph.saved]
    assert sum(nbytes < LEAST for nbytes in sizes) == 8
    assert {sizes[order] < LEAST for order in graph.needs} == {False}
    assert {order for order, nbytes in enumerate(sizes) if nbytes >= LEAST} == set(graph.needs)
    assert session.engine.totals.modes == {"observe": 1, "planned": STEPS - 1}


def test_so_it_is_in_a_step_that_was_foretold() -> None:
    with delta.evict(activations="50%", device="cpu") as run:
        assert run._core is not None
        engine = run._core.engine
        assert engine.stays(8)
        engine.learner.asks_all = True
        assert not engine.stays(8)


def test_where_sizes_change_the_engine_is_asked() -> None:
    with delta.evict(activations="40%", policy=small_ones("mimose"), device="cpu") as run:
        train(layers())
        assert not core_of(run).engine.stays(LEAST - 1)
    with delta.evict(policy=small_ones(), device="cpu") as run:
        assert core_of(run).engine.stays(LEAST - 1) and not core_of(run).engine.stays(LEAST)


def test_when_the_program_lets_go_is_noted_though_a_small_one_is_asked_for_first() -> None:
    """The program holds the first storage longer than its last reader, until forward is over."""
    with delta.evict(activations="1MiB", policy=small_ones(), device="cpu") as run:
        big = torch.zeros(LEAST, requires_grad=True).exp()
        top = big[:8].clone().exp().sum()
        del big
        top.backward()
        assert core_of(run).engine.learner.profiles[0].graph.floats_to[0] == 1


def tower(depth: int = 3) -> Tensor:
    """Leaf and result of small exponentials, each of which saves its result."""
    x = torch.zeros(8, requires_grad=True)
    top = x
    for _ in range(depth):
        top = (top - 1).exp()
    top.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("policy", ["delta", "recompute", "swap"])
def test_a_step_of_nothing_else_that_is_over_its_limit_is_not_recorded_for_ever(policy: str) -> None:
    """Nothing can be done about it, so once it is known nothing is recorded for it."""
    plain = tower()
    with delta.evict(activations="10B", policy=policy, device="cpu") as run:
        learner = core_of(run).engine.learner
        recorded = []
        for _ in range(STEPS):
            assert torch.equal(tower(), plain)
            recorded.append(learner.routine is None)
    assert recorded == [True] * (STEPS - 2) + [False] * 2
    assert not run.report().evictions


def test_a_step_of_nothing_else_becomes_idle() -> None:
    with delta.evict(activations="1MiB", device="cpu") as run:
        for _ in range(3):
            tower()
    assert run.report().modes == {"observe": 1, "idle": 2}


def test_a_step_of_nothing_else_over_its_limit_is_told_of() -> None:
    with (
        pytest.warns(RuntimeWarning, match="smaller than filter.min_bytes") as caught,
        delta.evict(activations=10, device="cpu") as run,
    ):
        for _ in range(3):
            tower()
    (warning,) = caught
    assert warning.filename == tower.__code__.co_filename, "not one of Delta's"
    assert run.report().steps == run.report().steps_over == 3 and not run.report().evictions


def test_a_step_ends_with_its_last_saved_tensor_be_it_small(session: Core) -> None:
    for steps in (1, 2, 3):
        tower()
        assert session.engine.totals.steps == steps and session.engine.ledger.handles == 0


def test_deaths_are_told_of_some_at_a_time(session: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither each by itself nor all at the end."""
    drains: list[int] = []
    drain = Core._drain

    def counting(core: Core) -> None:
        drains.append(sum(note[0] == core.inbox._unsaved for note in core.inbox.notes))
        drain(core)

    monkeypatch.setattr(Core, "_drain", counting)
    tower(depth=100)
    told = [notes for notes in drains if notes]
    assert sum(told) == 100 and max(told) <= 16 and len(told) <= 20
    assert session.engine.totals.steps == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda small: small.detach().add_(1), "modified by an inplace operation"),
        (lambda small: small.untyped_storage().resize_(0), "resized"),
    ],
)
def test_one_that_was_changed_is_an_error(session: Core, change: Callable[[Tensor], object], says: str) -> None:
    small = torch.zeros(8, requires_grad=True).exp()
    top = small.sum()
    change(small)
    with pytest.raises(StorageModifiedError, match=says):
        top.backward()


def test_backward_twice_and_a_look_in_between(session: Core) -> None:
    x = torch.zeros(8, requires_grad=True)
    top = x.exp()
    assert torch.equal(top.grad_fn._saved_result, torch.ones(8))  # type: ignore[union-attr]
    (slope,) = torch.autograd.grad(top.sum(), x, create_graph=True)
    slope.sum().backward()
    assert torch.equal(x.grad, torch.ones(8))  # type: ignore[arg-type]


@pytest.mark.parametrize("asks", [lambda small, big: small, lambda small, big: big])
def test_where_steps_end_is_learned_from_them_too(session: Core, asks: Callable[[Tensor, Tensor], Tensor]) -> None:
    """What backward does not ask for is left over: that backward has asked at all has to be known."""
    small, big = torch.zeros(8, requires_grad=True).exp(), torch.zeros(LEAST, requires_grad=True).exp()
    asks(small, big).sum().backward()
    assert session.engine.step_ends.needed
