"""Any op graph, any budget, any policy, the worst legal device: every number right, the books right after every event,
and the peak no further over the limit than the ops themselves force it."""

import functools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import COLUMNS, ROWS, Program, Weights, loss_of, programs
from torch.utils._python_dispatch import TorchDispatchMode

import delta
from delta.engine import Engine

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning", "ignore:a copy to the host failed"),
    pytest.mark.usefixtures("one_thread"),
]

STEPS = 7  # observed, planned, refined twice, and followed as a routine
POLICIES = ["delta", "delta-paper", "swap", "recompute"]


def examples(count: int) -> settings:
    return settings(
        derandomize=True,
        deadline=None,
        max_examples=count,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@pytest.fixture
def books_checked(monkeypatch):
    """After every event the ledger derives its totals and links anew: slow."""

    def checked(method):
        @functools.wraps(method)
        def event(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            self.ledger.validate()
            return result

        return event

    for name, method in list(vars(Engine).items()):
        if not name.startswith("_") and callable(method):
            monkeypatch.setattr(Engine, name, checked(method))


# -- one run ----------------------------------------------------------------------------------------------------------
@dataclass
class Sizes(TorchDispatchMode):
    """What plain training forces: the largest op's inputs and outputs, and the most the program itself holds."""

    op_bytes: int = 0
    live_bytes: int = 0

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.op_bytes = max(self.op_bytes, storage_bytes([*args, *(kwargs or {}).values(), result]))
        return result

    def look(self, values):
        self.live_bytes = max(self.live_bytes, storage_bytes(values))


def storage_bytes(things) -> int:
    found = {}
    todo = list(things)
    while todo:
        thing = todo.pop()
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
        elif isinstance(thing, (list, tuple)):
            todo += thing
    return sum(found.values())


def numbers(program: Program, look=lambda values: None, change=None, aside=None) -> list[torch.Tensor]:
    """Every number of a few training steps. `change`: another program for the last but one. `aside`: another program
    for a second output, which is in the next but one step's loss, or in none."""
    torch.manual_seed(0)
    weights = Weights()
    found = []
    kept: list[torch.Tensor] = []
    for step in range(STEPS):
        given = torch.randn(ROWS, COLUMNS, requires_grad=True)
        chosen = change if change is not None and step == STEPS - 2 else program
        loss = loss_of(chosen, weights, given, look)
        if aside is not None:
            kept.append(loss_of(aside, weights, given, look))
        if len(kept) == 3:
            loss = loss + kept[0]
        loss.backward()
        found += [loss.detach(), given.grad, *(p.grad.clone() for p in weights.parameters() if p.grad is not None)]
        weights.zero_grad()
    return [*found, *weights.buffers(), torch.get_rng_state()]


def assert_same(plain, evicted) -> None:
    """Bit for bit: NaN equals NaN, 0 does not equal -0."""
    assert len(plain) == len(evicted)
    for index, (left, right) in enumerate(zip(plain, evicted, strict=True)):
        same = torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
        assert same, f"number {index} of {len(plain)} differs: {left} {right}"


def block(policy, activations, seed, **more):
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0} | more)
    return delta.evict(activations=activations, policy=chosen, device=f"chaos:{seed}")


shares = st.integers(0, 10).map(lambda tenths: f"{10 * tenths}%")
budgets = shares | st.integers(0, 60_000)
seeds = st.integers(0, 1000)


# -- the properties ---------------------------------------------------------------------------------------------------
@examples(40)
@given(programs(), st.sampled_from(POLICIES), budgets, seeds)
def test_every_number_is_that_of_plain_training(program, policy, budget, seed):
    plain = numbers(program)
    with block(policy, budget, seed) as run:
        evicted = numbers(program)
    assert_same(plain, evicted)
    ledger = run._core.engine.ledger
    assert (ledger.handles, ledger.resident_bytes, run._core.device.host_bytes()) == (0, 0, 0)
    assert run.report().steps == STEPS


@pytest.mark.usefixtures("books_checked")
@examples(15)
@given(programs(15), st.sampled_from(POLICIES), budgets, seeds)
def test_the_books_are_right_after_every_event(program, policy, budget, seed):
    with block(policy, budget, seed):
        numbers(program)


@examples(20)
@given(programs(20), programs(10), st.sampled_from(POLICIES), shares, seeds)
def test_another_program_in_between_changes_nothing(program, change, policy, budget, seed):
    plain = numbers(program, change=change)
    with block(policy, budget, seed):
        evicted = numbers(program, change=change)
    assert_same(plain, evicted)


@examples(20)
@given(programs(15), programs(10), st.sampled_from(POLICIES), shares, seeds)
def test_what_outlives_backward_changes_nothing(program, aside, policy, budget, seed):
    plain = numbers(program, aside=aside)
    with block(policy, budget, seed) as run:
        evicted = numbers(program, aside=aside)
    assert_same(plain, evicted)
    ledger = run._core.engine.ledger
    assert (ledger.handles, ledger.resident_bytes, run._core.device.host_bytes()) == (0, 0, 0)


@examples(30)
@given(programs(20), st.sampled_from(POLICIES), shares, seeds, st.sampled_from([0, 1_000, 3_000]))
def test_a_full_host_changes_nothing(program, policy, budget, seed, host_bytes):
    """What cannot be copied is kept or made again."""
    plain = numbers(program)
    with block(policy, budget, seed, **{"host.limit": host_bytes}) as run:
        evicted = numbers(program)
    assert_same(plain, evicted)
    assert run._core.device._limit_bytes == host_bytes


@examples(40)
@given(programs(30), shares | st.integers(4_000, 30_000), seeds)
def test_swapping_holds_the_budget(program, budget, seed):
    """Everything may be swapped, at any time but while it is in use. So what is resident is at most the limit, or what
    the program itself holds on to, plus the inputs and outputs of one op."""
    sizes = Sizes()
    with sizes:
        numbers(program, sizes.look)
    with block("swap", budget, seed) as run:
        numbers(program)
    report = run.report()
    if report.budget_bytes is not None:  # of all there is, nothing has to go
        assert report.peak_activation_bytes <= max(report.budget_bytes, sizes.live_bytes) + sizes.op_bytes


@examples(40)
@given(programs(30), st.sampled_from(POLICIES), shares | st.integers(4_000, 30_000), seeds)
def test_a_budget_is_held_unless_it_is_said_not_to_be(program, policy, budget, seed):
    """Where no warning says otherwise, the limit was exceeded by no more than the inputs and outputs of one op."""
    sizes = Sizes()
    with sizes:
        numbers(program)
    with block(policy, budget, seed) as run:
        numbers(program)
    report = run.report()
    if report.budget_bytes is not None and not report.warnings:
        assert report.peak_activation_bytes <= report.budget_bytes + sizes.op_bytes
