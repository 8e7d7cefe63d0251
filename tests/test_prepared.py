"""Data that are put together before the first save: now so and now otherwise, or for several steps at once."""

from __future__ import annotations

import random

import pytest
import torch
from builders import a_log, an_op
from covering import in_pairs
from sized import Run
from torch import Tensor, nn
from torch.nn import functional as F

import delta
from delta.learner import Learner
from delta.planner.steplog import StepLog, build_graph
from delta.prepared import STRUCTURES, Preparation
from delta.profile import Profile
from delta.revising import Revising
from delta.routine import Routine, Way
from delta.types import Kind

WEIGHT, RAW, PADDED, BATCH, X, Y, GONE = range(7)


# -- without tensors --------------------------------------------------------------------------------------------------
def a_step(replayable: bool = True, pads: int = 1, structures: tuple[int, ...] = (7, 8, 9)) -> StepLog:
    """A batch is padded and stacked; x is made from it and the weight, saved after y = f(x) has been. What comes
    before all that is for nothing."""
    ops = [
        an_op(0, [WEIGHT], [GONE], name="aten.norm"),
        *(an_op(1 + k, [RAW], [PADDED], name="aten.pad") for k in range(pads)),
        an_op(1 + pads, [PADDED], [BATCH], name="aten.stack"),
        an_op(2 + pads, [BATCH, WEIGHT], [X], name="aten.mul", replayable=replayable),
        an_op(3 + pads, [X], [Y], name="aten.tanh"),
    ]
    sizes = {WEIGHT: 0, RAW: 10, PADDED: 10, BATCH: 20, X: 40, Y: 40, GONE: 1}
    log = a_log(
        ops,
        sizes,
        saves=[(BATCH, 1, 3 + pads), (X, 2, 3 + pads), (Y, 3, 4 + pads)],
        needs=[(2, 4), (1, 5), (0, 6)],
        releases=[(2, 1), (1, 2), (0, 3)],
        end_ns=7,
        kinds={WEIGHT: Kind.PARAMETER, RAW: Kind.SOURCE},
    )
    log.structures = list(structures)
    return log


@pytest.fixture
def varying() -> Preparation:
    preparation = Preparation()
    preparation.differs()
    return preparation


def test_what_only_prepares_the_data_makes_nothing(varying: Preparation) -> None:
    graph = build_graph(varying.given(a_step()), 0)
    assert [op.outputs != () for op in graph.ops] == [True, False, False, True, True]
    batch, x, y = (graph.nodes[node] for node in graph.saved)
    assert (batch.op, batch.rooted, batch.evictable) == (None, False, True), "it is still copied to the host"
    assert (x.op, y.op) == (3, 4), "a parameter was used for it; what comes after the first save is of the step"


def test_what_can_not_be_made_again_is_given_too_and_what_is_made_from_it(varying: Preparation) -> None:
    log = a_step(replayable=False)
    log.ops_before = [5, 5, 5]
    assert [op.outputs != () for op in varying.given(log).ops] == [True, False, False, False, False]


def test_where_every_access_is_announced_nothing_is_given(varying: Preparation) -> None:
    log = a_step()
    log.turn_ends = [(1, 2, 3)]
    assert varying.given(log).ops == log.ops


def test_a_step_that_saves_nothing(varying: Preparation) -> None:
    assert varying.given(StepLog()).ops == []


def test_where_it_is_always_the_same_it_is_made_again() -> None:
    preparation, log = Preparation(), a_step()
    for _ in range(3):
        preparation.saw(a_step())
    assert not preparation.varies and not preparation.turned() and preparation.given(log) is log


@pytest.mark.parametrize(
    ("other", "varies"),
    [
        (a_step(pads=2), True),
        (a_step(pads=2, structures=(7, 8, 8)), False),  # that is another program
        (a_step(replayable=False), True),
    ],
)
def test_it_varies_once_two_steps_alike_have_differed(other: StepLog, varies: bool) -> None:
    preparation = Preparation()
    preparation.saw(a_step())
    preparation.saw(other)
    assert preparation.varies == varies
    assert [preparation.turned(), preparation.turned()] == [varies, False]
    preparation.saw(a_step())
    assert not preparation.turned(), "that is no news"


def test_it_is_news_until_it_has_been_heard(varying: Preparation) -> None:
    varying.differs()
    varying.saw(a_step())
    assert [varying.turned(), varying.turned()] == [True, False]


def test_what_nothing_of_the_step_depends_on_may_vary() -> None:
    preparation, other = Preparation(), a_step()
    preparation.saw(a_step())
    other.ops[0] = an_op(0, [RAW], [GONE], name="aten.sum")
    preparation.saw(other)
    assert not preparation.varies


def test_structures_are_forgotten_the_oldest_first() -> None:
    preparation = Preparation()
    for number in range(STRUCTURES + 1):
        preparation.saw(a_step(structures=(number,)))
    preparation.saw(a_step(pads=2, structures=(0,)))
    assert not preparation.varies
    preparation.saw(a_step(pads=2, structures=(STRUCTURES,)))
    assert preparation.varies


def a_routine() -> Routine:
    """What is saved first is made by the first of three calls; the second may stay away."""
    return Routine([("pad", 0), ("norm", 1), ("tanh", 2)], [Way.PASS] * 3, before=2, optional=[1])


@pytest.mark.parametrize(
    ("came", "packs", "as_expected", "varies"),
    [
        ([], 1, True, True),
        (["pad"], 1, True, False),  # what may stay away has
        ([], 0, True, False),  # it may still come
        ([], 1, False, False),  # that is another kind of step
    ],
)
def test_it_varies_where_a_step_of_the_expected_kind_does_without(
    came: list[str], packs: int, as_expected: bool, varies: bool
) -> None:
    learner, expected = Learner(Revising(0, None)), Profile((), build_graph(StepLog(), 0), 0, {}, 1.0)
    learner.routine, learner.packs, learner._following = a_routine(), packs, expected
    learner.current = expected if as_expected else None
    for call in came:
        learner.routine.way(call)
    learner.leave_routine()
    assert learner.revising.data.varies == varies


def test_all_is_learned_anew_then() -> None:
    run = Run()
    run.warm()
    assert run.sizes.ready and run.learner.profiles
    run.learner.revising.data.differs()
    run.step(4, 10, peak=1)
    assert not run.learner.profiles and not run.sizes.ready and not run.sizes._programs


# -- bit for bit ------------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """`skips`: each block but the first is left out by chance."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips, self.embedding, self.head = skips, nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.1))
            for _ in range(4)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            if not (self.skips and number and torch.rand(()) < 0.3):
                x = x + block(x)
        head: Tensor = self.head(x)
        return head


def a_batch(number: int, varied: bool, device: str) -> Tensor:
    """Four sequences, of which the shorter ones are padded."""
    of = random.Random(number)
    lengths = [of.randint(20, 40) for _ in range(4)]
    longest = max(lengths) if varied else 40
    rows = [torch.tensor([of.randrange(64) for _ in range(length)], device=device) for length in lengths]
    return torch.stack([row if len(row) == longest else F.pad(row, (0, longest - len(row))) for row in rows])


def train(varied: bool, skips: bool, at_once: int, device: str, steps: int = 36) -> list[Tensor]:
    torch.manual_seed(0)
    model, found = Net(skips).to(device), list[Tensor]()
    optimizer = torch.optim.AdamW(model.parameters())
    for first in range(0, steps, at_once):
        batches = [a_batch(number, varied, device) for number in range(first, first + at_once)]
        words = sum(batch.ne(0).sum() for batch in batches)
        for ids in batches:
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / words
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")  # while the ways are not known yet
@in_pairs(
    how=["evenly", "varied", "skips"],
    at_once=[1, 3],
    policy=["delta", "recompute", "mimose"],
    device=["cpu", "chaos", pytest.param("cuda", marks=pytest.mark.cuda)],
)
def test_however_a_batch_was_put_together_its_step_follows_a_routine(
    how: str, at_once: int, policy: str, device: str, followed: list[bool]
) -> None:
    varied, skips = how == "varied", how == "skips"
    on = "cuda" if device == "cuda" else "cpu"
    plain = train(varied, skips, at_once, on)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 256})
    with delta.evict(activations="60%", policy=chosen, device=device) as run:
        assert all(map(torch.equal, train(varied, skips, at_once, on), plain))
    assert run.report().evictions
    if not skips and device == "cpu":  # elsewhere copies are late now and then
        assert all(followed[-12:])
    elif not skips or policy != "mimose":  # to that, each way is another program
        assert sum(followed[-12:]) > 3
