"""A program that catches an error and goes on: what Delta knows of its tensors is as true as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import delta

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]


def policy(name: str, **more: object) -> delta.Policy:
    return delta.load_policy(name, {"filter.min_bytes": 0, **more})


# -- ops that write, and raise ----------------------------------------------------------------------------------------
def refused_writes(kept: bool, recorded: bool) -> list[Tensor]:
    """Each step reads a buffer twice and fails to write into it in between; `kept`: it is one for all steps."""
    torch.manual_seed(0)
    weight, buffer = nn.Parameter(torch.ones(512)), torch.randn(512)
    gradients = []
    for _ in range(7):
        held = buffer if kept else torch.randn(512)
        sine = held.sin()
        first = (sine * weight).sum()
        del sine
        cosine = held.cos()
        second = (cosine * weight).sum()
        del cosine
        with pytest.raises(RuntimeError, match="must match"), torch.set_grad_enabled(recorded):
            held.add_(torch.ones(3))
        after = held.exp()
        if not kept:
            del held
            torch.randn(512).sin()  # may lie where that was
        (first + second + (after * weight).sum()).backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
        weight.grad = None
    return gradients


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", ["recompute", "swap", "delta"])
def test_a_write_that_fails(name: str, kept: bool, recorded: bool) -> None:
    plain = refused_writes(kept, recorded)
    with delta.evict(activations="0%", policy=policy(name), device="cpu"):
        evicted = refused_writes(kept, recorded)
    assert all(map(torch.equal, plain, evicted))


def test_what_is_written_with_no_room_of_its_own_counts() -> None:
    """`out=` makes an empty tensor as large as it has to be."""
    weight, out = nn.Parameter(torch.ones(1 << 16)), torch.empty(0)
    with delta.evict(device="cpu", policy=policy("recompute"), activations="1GiB") as run:
        torch.mul(torch.randn(1 << 16), 2, out=out)
        (out * weight).sum().backward()
    assert run.report().unevicted_peak_activation_bytes == 4 << 16


# -- a budget that is an error ----------------------------------------------------------------------------------------
def unmovable_step(rows: int) -> None:
    """What `sort` gives is never made again."""
    weight = nn.Parameter(torch.ones(rows))
    (torch.randn(rows).sort().values * weight).sum().backward()


def refused(step: Callable[[], None]) -> bool:
    """Whether it ends in a BudgetError, of which nothing is kept: its traceback would keep the graph alive."""
    try:
        step()
    except delta.BudgetError:
        return True
    return False


def test_a_smaller_batch_may_follow_one_that_did_not_fit() -> None:
    strict = policy("recompute", **{"budget.strict": True})
    with delta.evict(activations=200_000, policy=strict, device="cpu") as run:
        for _ in range(3):
            assert refused(lambda: unmovable_step(1 << 16))
            for _ in range(3):
                unmovable_step(1 << 12)
        assert run._core is not None
        ledger = run._core.engine.ledger
        assert (ledger.handles, ledger.resident_bytes) == (0, 0)
    assert not run._core.slots


def test_a_larger_batch_that_was_only_watched_until_it_did_not_fit() -> None:
    net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
    strict = policy("keep", **{"budget.strict": True, "director.actions": ["keep", "recompute"]})
    with delta.evict(activations=300_000, policy=strict, device="cpu") as run:
        for _ in range(2):
            for rows, fits in ((64, True), (64, True), (1024, False), (64, True)):
                x = torch.randn(rows, 64)
                if fits:
                    net(x).square().sum().backward()
                else:  # forward says so
                    assert refused(lambda: net(x))  # noqa: B023
                assert run._core is not None and run._core.watch.count == 0


def test_a_last_step_over_a_strict_budget_is_told_at_the_end_of_the_block() -> None:
    """Of a share nobody knows before what it comes to."""
    strict = policy("recompute", **{"budget.strict": True})
    with pytest.raises(delta.BudgetError), delta.evict(activations="40%", policy=strict, device="cpu"):
        unmovable_step(1 << 12)


# -- what never ends --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["delta", "recompute", "dtr"])
def test_ops_that_save_nothing_are_not_remembered_for_ever(
    name: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at first nor when steps follow a routine."""
    monkeypatch.setattr("delta.underway.MOST_OPS", 100)
    frozen = nn.Linear(16, 16).requires_grad_(False)
    weight = nn.Parameter(torch.ones(8, 16))
    with delta.evict(activations="50%", policy=policy(name), device="cpu") as run:
        if trained:
            for _ in range(6):
                ((torch.randn(8, 16).cos() * weight).sin() * weight).sum().backward()
        state = torch.randn(8, 16)
        for number in range(500):
            state = frozen(state).sin()
            if number % 10 == 0:
                torch.empty(0)  # makes nothing
        assert run._core is not None
        engine = run._core.engine
        assert len(engine.learner.log.ops) <= 100 and len(engine.learner.log.calls) <= 100
        assert len(engine.ledger.ops) <= 100 and len(run._core.slots) <= 110
        for _ in range(6):
            ((state.cos() * weight).sin() * weight).sum().backward()
    assert run.report().modes.get("planned", 0) >= (0 if name == "dtr" else 3)


def test_watched_tensors_of_graphs_that_nobody_walks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last result of a loop lives until the next forward has saved: no step ever ends."""
    monkeypatch.setattr("delta.runtime.watch._MANY", 64)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    with delta.evict(device="cpu") as run:
        for _ in range(50):
            out = net(torch.randn(4, 8))
        assert run._core is not None and len(run._core.watch._handles) <= 200
        del out
