"""What many ops read and nobody saves stays for their replays: which it is, what it takes from plans, and a training.
Units: bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import an_op
from covering import in_turns
from test_learner import plan_of
from torch import Tensor

import delta
from delta.learner import Learner
from delta.planner import Plan
from delta.planner.common import ALL, MANY, SMALL, keep_common
from delta.planner.steplog import Node, StepGraph
from delta.revising import Outcome, Revising
from delta.runtime.core import Core
from delta.runtime.made_again import MadeAgain
from delta.runtime.note import Note
from delta.types import Action, Kind

SAVED = 100_000  # by the results of the readers, together
MASK = int(SMALL * SAVED)


def shared(*sizes: int, readers: int = MANY, saved: bool = False, written: bool = False) -> StepGraph:
    """Node 0 is a source. The next ones, of these sizes, are each made of it, and read by so many ops, or one more for
    each that comes later; the results of all readers are saved."""
    ops = [an_op(i, [0], [1 + i]) for i in range(len(sizes))]
    nodes = [Node(8, -1, None, True, False)]
    nodes += [Node(nbytes, -1, i, False, True) for i, nbytes in enumerate(sizes)]
    orders = [1] if saved else []
    for i in range(len(sizes)):
        for _ in range(readers + i):
            ops.append(an_op(len(ops), [0, 1 + i], [len(nodes)], overwrites=(1,) if written else ()))
            nodes.append(Node(0, -1, len(ops) - 1, False, True))
            orders.append(len(nodes) - 1)
    made = [node for node in orders if node > len(sizes)]
    for order, node in enumerate(orders):
        nbytes = SAVED - (len(made) - 1) * (SAVED // len(made)) if node == made[0] else SAVED // len(made)
        nodes[node] = Node(nbytes if node in made else nodes[node].nbytes, order, nodes[node].op, False, True)
    count = len(orders)
    zeros = (0,) * count
    return StepGraph(tuple(nodes), tuple(ops), tuple(orders), zeros, zeros, (), (), zeros, zeros, 0)


def stays(graph: StepGraph) -> list[int]:
    kept = keep_common(graph)
    assert all(node.rooted for node, before in zip(kept.nodes, graph.nodes, strict=True) if before.rooted)
    return [number for number, node in enumerate(kept.nodes) if node.rooted and not graph.nodes[number].rooted]


def test_what_is_small_and_read_by_many_stays() -> None:
    graph = shared(MASK)
    assert stays(graph) == [1]
    assert (graph.common_bytes, keep_common(graph).common_bytes) == (0, MASK)


@pytest.mark.parametrize(
    "graph",
    [
        shared(MASK, readers=MANY - 1),
        shared(MASK + 1),
        shared(MASK, saved=True),
        shared(MASK, written=True),
    ],
    ids=["too few", "too large", "saved", "written"],
)
def test_nothing_else_does(graph: StepGraph) -> None:
    assert stays(graph) == []
    assert keep_common(graph) is graph


def test_one_that_reads_it_twice_is_one() -> None:
    graph = shared(MASK, readers=MANY - 1)
    ops = [*graph.ops[:-1], an_op(graph.ops[-1].id, [0, 1, 1], graph.ops[-1].outputs)]
    assert stays(replace(graph, ops=tuple(ops))) == []


def test_all_together_take_so_much_at_most() -> None:
    count = round(ALL / SMALL)
    graph = shared(*[MASK] * (count + 1))
    assert stays(graph) == list(range(2, count + 2)), "those with the most readers"


def observed(learner: Learner, mask_bytes: int) -> StepGraph:
    """A step in which each of `MANY` ops reads a mask; the graph that its plan was made from."""
    learner.recorded = True
    learner.op(an_op(100, [], [100]), {100: mask_bytes}, {100: Kind.ACTIVATION})
    for i in range(MANY):
        learner.packed(i, 0)
        learner.op(an_op(i, [100], [i]), {i: SAVED // MANY}, {i: Kind.ACTIVATION})
        learner.saved(i, SAVED // MANY, Kind.ACTIVATION, i)
    for i in reversed(range(MANY)):
        learner.needed(i, 100 - i)
        learner.released(i)
    outcome = Outcome(peak_bytes=SAVED, unevicted_peak_bytes=SAVED, limit_bytes=SAVED // 2, evicted=True, forced={})
    learner.end(200, outcome)
    return learner.profiles[0].graph


@pytest.mark.parametrize(("selective", "taken"), [(True, MASK), (False, 0)])
def test_plans_have_so_much_less(selective: bool, taken: int) -> None:
    aims = []

    def make_plan(graph: StepGraph, limit_bytes: int, forced: Mapping[int, Action]) -> Plan:
        aims.append(limit_bytes)
        return plan_of([Action.RECOMPUTE] * len(graph.saved))

    learner = Learner(Revising(0, make_plan, aim=1.0))
    learner.revising.selective = selective
    graph = observed(learner, MASK)
    assert (graph.common_bytes, aims) == (taken, [SAVED // 2 - taken])


# -- in a training ----------------------------------------------------------------------------------------------------
LAYERS, STEADY = MANY + 2, 8
Between = Callable[[int, Tensor], None]


def nothing(index: int, mask: Tensor) -> None:
    """To do between two layers."""


def loss_of(weights: list[Tensor], between: Between = nothing, mask: Tensor | None = None) -> Tensor:
    """Layers that add the same mask. Nobody saves it, and the program drops it before backward."""
    if mask is None:
        mask = torch.arange(32.0).view(32, 1).le(torch.arange(32.0)).float().mul(-1e4)
    x = torch.randn(64, 32, 32, generator=torch.Generator().manual_seed(0))
    for index, weight in enumerate(weights):
        x = ((x * weight + mask).softmax(-1) * weight).tanh()
        between(index, mask)
    return x.sum()


def fresh() -> list[Tensor]:
    return [torch.full((32, 32), 0.5 + i / 8, requires_grad=True) for i in range(LAYERS)]


def gradients(weights: list[Tensor]) -> list[Tensor]:
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return [grad for grad in found if grad is not None]


@contextmanager
def steady(weights: list[Tensor], policy: str) -> Iterator[Core]:
    """A block whose next step follows its routine, and makes again whatever it can."""
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0, "director.actions": ["keep", "recompute"]})
    with delta.evict(activations="40%", policy=chosen) as run:
        for _ in range(STEADY):
            loss_of(weights).backward()
            gradients(weights)
            assert run._core is not None
            run._core.planning.wait()
        assert run._core is not None and run._core.engine.routine is not None
        yield run._core


def plain(between: Between = nothing) -> list[Tensor]:
    weights = fresh()
    loss_of(weights, between).backward()
    return gradients(weights)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["recompute", "delta", "monet"])
def test_a_mask_is_made_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, weights, replayed = plain(), fresh(), list[str]()
    make = MadeAgain._make

    def noted(again: MadeAgain, note: Note, in_place: bool) -> Any:
        replayed.append(note.facts.name)
        return make(again, note, in_place)

    with steady(weights, policy) as core:
        monkeypatch.setattr(MadeAgain, "_make", noted)
        loss_of(weights).backward()
        assert core.engine.routine is not None
        core.engine.ledger.validate()
        assert not core.noted.readers
    assert all(map(torch.equal, gradients(weights), expected))
    assert "aten._softmax" in replayed and not {"aten.arange", "aten.le", "aten._to_copy"} & set(replayed)


@pytest.mark.usefixtures("one_thread")
def test_one_that_is_made_from_a_number_that_has_gone_keeps_no_step_from_its_plan() -> None:
    """As transformers makes it. What a recorded step makes again it makes by recipes, and these lead past the mask to
    that number; without them the limit would be missed in each step, and each would be recorded."""

    def step(weights: list[Tensor]) -> list[Tensor]:
        seen = torch.arange(32.0).view(32, 1).ge(torch.arange(32.0))
        mask = torch.where(seen, torch.tensor(0.0), torch.tensor(-1e4))
        loss_of(weights, mask=mask).backward()
        return gradients(weights)

    expected, weights = step(fresh()), fresh()
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 0})
    with delta.evict(activations="40%", policy=chosen) as run:
        assert run._core is not None
        engine = run._core.engine
        for _ in range(STEADY):
            assert all(map(torch.equal, step(weights), expected))
            run._core.planning.wait()
        assert engine.routine is not None
        assert not run.report().warnings


@pytest.mark.usefixtures("one_thread")
@in_turns(what=["written", "written unseen", "looked after"], at=[0, 3, LAYERS - 1])
def test_it_is_what_it_was_when_more_has_to_be_known(what: str, at: int) -> None:
    weights = fresh()

    def write(index: int, mask: Tensor) -> None:
        if index == at:
            (mask if what == "written" else mask.data).mul_(0.5)

    def look_after(index: int, mask: Tensor) -> None:
        if index == at:
            with core:
                core.engine.keeping.end()
            core.engine.ledger.validate()

    between = look_after if what == "looked after" else write
    expected = plain(nothing if what == "looked after" else write)
    with steady(weights, "recompute") as core:
        for each in (between, nothing, nothing):
            loss_of(weights, each).backward()
            core.engine.ledger.validate()
            assert all(map(torch.equal, gradients(weights), expected if each is between else plain()))
