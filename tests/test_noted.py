"""Calls that a plan replays and the ledger need not know: which they are, what they cost nobody, and that no value is
lost when more has to be known after all."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_kept import assert_same, counted, fresh, gradients, loss_of, plain, steady
from test_learner import plan_of
from test_routine import chain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import delta
from delta.errors import RecomputeMismatchError, StorageModifiedError
from delta.expected import Expected
from delta.keeping import Keeping, Kept
from delta.learner import Learner
from delta.ledger import Ledger
from delta.planner import Plan
from delta.planner.steplog import Node, StepGraph
from delta.profile import CRAMPED
from delta.revising import Revising
from delta.routine import noted_ops
from delta.runtime import batch_norm
from delta.runtime.core import Core
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.parts import WallClock
from delta.runtime.made_again import MadeAgain
from delta.runtime.note import Made, Note, NotedTensor
from delta.runtime.recorder import Recorder
from delta.runtime.swap import Swap
from delta.types import Action, OpInfo
from delta.units import Bytes

KEEP, SWAP, RECOMPUTE, ENCODE = Action.KEEP, Action.SWAP, Action.RECOMPUTE, Action.ENCODE
pytestmark = [
    pytest.mark.usefixtures("one_thread", "heard"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),  # of steps that save more than was planned for
]
Between = Callable[[int, Tensor], Tensor]


# -- which ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("saved", "actions", "expected"),
    [
        ([1, 2, 3], [KEEP, KEEP, KEEP], set()),
        ([1, 2, 3], [KEEP, KEEP, RECOMPUTE], {2}),
        # 3 is made out of 1, through 2, which nobody saved.
        ([1, 3], [KEEP, RECOMPUTE], {1, 2}),
        # What it reads may come and go, if it is saved by then.
        ([1, 2, 3], [KEEP, SWAP, RECOMPUTE], {2}),
        ([1, 2, 3], [KEEP, ENCODE, RECOMPUTE], {2}),
        ([1, 2, 3, 4], [KEEP, RECOMPUTE, SWAP, RECOMPUTE], {1, 3}),
        # What begins the step is not, and neither is what is made from it when that has gone.
        ([1, 2, 4], [RECOMPUTE, RECOMPUTE, RECOMPUTE], set()),
    ],
)
def test_the_ledger_need_not_know_of_what_goes_at_its_save(saved, actions, expected) -> None:
    orders = tuple(order if action in (KEEP, RECOMPUTE) else -1 for order, action in enumerate(actions))
    assert noted_ops(chain(saved), plan_of(actions), orders, saved) == expected


def test_it_has_to_know_of_what_comes_and_goes() -> None:
    graph, plan = chain([1, 2, 3]), plan_of([KEEP, RECOMPUTE, RECOMPUTE])
    assert noted_ops(graph, plan, (0, 1, 2), [1, 2, 3]) == {1, 2}
    assert noted_ops(graph, plan, (0, 1, -1), [1, 2, 3]) == set(), "more is done with 3, which is made from 2"
    assert noted_ops(graph, plan, (0, -1, 2), [1, 2, 3]) == set(), "3 is made from what comes and goes"
    swapped = plan_of([KEEP, SWAP, RECOMPUTE])
    assert noted_ops(graph, swapped, (0, -1, 2), [1, 3, 3]) == set(), "2 is saved only after 3 has been made from it"


@pytest.mark.parametrize("change", [{"replayable": False}, {"overwrites": (2,)}])
def test_it_has_to_know_of_what_is_written_or_cannot_be_replayed(change) -> None:
    graph, plan = chain([1, 2, 3, 4]), plan_of([KEEP, RECOMPUTE, RECOMPUTE, RECOMPUTE])
    ops = list(graph.ops)
    ops[2] = replace(ops[2], **change)
    changed: StepGraph = replace(graph, ops=tuple(ops))
    found = noted_ops(changed, plan, (0, 1, 2, 3), [1, 2, 3, 4])
    assert found == set(), "2 is read by the one that is recorded, and 4 is made from what that makes"


@pytest.mark.parametrize(
    ("saved", "actions", "expected"),
    [
        # 3 is 2 overwritten, which one that is noted makes and nobody saved.
        ([1, 3], [KEEP, RECOMPUTE], {1, 2}),
        ([1, 3, 4], [KEEP, RECOMPUTE, RECOMPUTE], {1, 2, 3}),
        # What was saved is not there any more.
        ([1, 2, 3], [KEEP, RECOMPUTE, RECOMPUTE], set()),
        # 2 is not made again.
        ([1, 3, 4], [KEEP, KEEP, RECOMPUTE], {3}),
        ([0, 3], [SWAP, SWAP], set()),
    ],
)
def test_what_nobody_saved_may_be_overwritten(saved, actions, expected) -> None:
    graph = chain(saved)
    ops = list(graph.ops)
    ops[2] = replace(ops[2], overwrites=(2,))
    orders = tuple(order if action in (KEEP, RECOMPUTE) else -1 for order, action in enumerate(actions))
    assert noted_ops(replace(graph, ops=tuple(ops)), plan_of(actions), orders, saved) == expected


@pytest.mark.parametrize("change", ["twice", "by one that is recorded", "two results", "rooted"])
def test_by_one_that_is_noted_alone(change: str) -> None:
    graph, plan, orders = chain([1, 3, 4]), plan_of([KEEP, RECOMPUTE, RECOMPUTE]), [0, 1, 2]
    ops, nodes = list(graph.ops), list(graph.nodes)
    ops[2] = replace(ops[2], overwrites=(2,))
    if change == "twice":
        ops[3] = replace(ops[3], inputs=(2, 3), overwrites=(2,))
    elif change == "by one that is recorded":
        orders[1] = -1
    elif change == "two results":
        nodes.append(replace(nodes[3], order=-1))
        ops[2] = replace(ops[2], outputs=(3, len(nodes) - 1))
    else:
        nodes[2] = replace(nodes[2], rooted=True)
    changed = replace(graph, ops=tuple(ops), nodes=tuple(nodes))
    assert not noted_ops(changed, plan, tuple(orders), [1, 3, 4]) & {1, 2}


# -- the count --------------------------------------------------------------------------------------------------------
def numbers(keeping: Keeping) -> tuple[int, int, int]:
    ledger = keeping._ledger
    ledger.validate()
    return ledger.own_handles, ledger.resident_bytes, ledger.unevicted_bytes


def test_what_has_gone_counts_while_it_is_there() -> None:
    keeping = Keeping(Ledger(), Learner(Revising(0, None)))
    kept = Kept(key=7, record=3, nbytes=40, order=1, saved_ns=5, noted=True)
    keeping.first(kept, 0, 0)
    keeping.again(kept, 0)
    assert numbers(keeping) == (2, 40, 40) and keeping.any
    keeping.went(kept)
    keeping.went(kept)
    assert numbers(keeping) == (2, 0, 40)
    keeping.came_back(kept)
    keeping.came_back(kept)
    assert numbers(keeping) == (2, 40, 40)
    keeping.released(kept)
    assert numbers(keeping) == (1, 40, 40)
    keeping.released(kept)
    assert numbers(keeping) == (0, 0, 0) and not keeping.any


def test_what_a_note_reads_counts_until_it_is_read_no_more() -> None:
    keeping = Keeping(Ledger(), Learner(Revising(0, None)))
    read, other = (Kept(key, key, 40, order, 5) for order, key in enumerate((7, 8)))
    for kept in (read, other):
        keeping.first(kept, 0, 0)
    keeping.released(read, read=True)
    keeping.released(other)
    assert numbers(keeping) == (0, 40, 0)
    keeping.unread(8)
    assert numbers(keeping) == (0, 40, 0)
    keeping.unread(7)
    assert numbers(keeping) == (0, 0, 0)


def test_what_gets_its_record_is_counted_there_alone() -> None:
    keeping = Keeping(Ledger(), Learner(Revising(0, None)))
    read = Kept(7, 7, 40, 0, 5)
    there, gone = (Kept(key, key, 40, order, 5, noted=True) for order, key in ((1, 8), (2, 9)))
    for kept in (read, there, gone):
        keeping.first(kept, 0, 0)
    keeping.released(read, read=True)
    keeping.went(gone)
    keeping.list_all()
    assert numbers(keeping) == (0, 0, 0)
    for kept in (read, there, gone):
        keeping.went(kept)
        keeping.unread(kept.key)
    assert numbers(keeping) == (0, 0, 0), "notes from before"


# -- in a training ----------------------------------------------------------------------------------------------------
def nothing_left(core: Core) -> None:
    keeping, ledger, noted = core.engine.keeping, core.engine.ledger, core.noted
    core.hear()
    deadline = time.monotonic() + 30
    while core.swap.busy and time.monotonic() < deadline:  # what is being copied stays until that has ended
        core.hear()
    assert (counted(core), ledger.handles, ledger.resident_bytes, ledger.unevicted_bytes) == (0, 0, 0, 0)
    assert not keeping.noted and not keeping.lingering and not noted.readers and not noted.made


def test_the_device_lets_go_within_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that locks itself runs an op then, for which the recorder wants the core; the daemon, which is in there, may
    wait for the device."""
    owned: list[bool] = []
    net, release = fresh("cpu"), CpuDevice.release
    with steady(net, "recompute", "cpu") as core:

        def spy(device: CpuDevice, storage: torch.UntypedStorage, tensors: int = 0) -> None:
            owned.append(core.lock._is_owned())  # type: ignore[attr-defined]
            release(device, storage, tensors)

        monkeypatch.setattr(CpuDevice, "release", spy)
        loss = loss_of(net)
        assert core.engine.keeping.noted and owned and all(owned)
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", "chaos:3", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("policy", ["recompute", "delta"])
def test_a_known_step_is_replayed_without_records(policy: str, device: str) -> None:
    expected, net = plain(device=device), fresh(device)
    with steady(net, policy, device) as core:
        engine = core.engine
        before, steps = dict(engine.totals.evictions), engine.totals.steps
        routine, recomputed = engine.routine, engine.totals.recomputed_bytes
        assert routine is not None
        loss = loss_of(net)
        counted(core)
        begins_step = {"aten.randn"}  # saved with the whole of it; a busy machine may find it worth a replay
        assert {op.name for op in engine.ledger.ops.values()} <= begins_step
        assert {kept.order for kept in engine.keeping.noted} == routine.noted
        assert policy == "delta" or routine.noted
        loss.backward()
        nothing_left(core)
        assert engine.totals.steps == steps + 1 and engine.routine is not None
        went = engine.totals.evictions.get("recompute", 0) - before.get("recompute", 0)
        assert went == len(routine.dropped)
        assert (engine.totals.recomputed_bytes > recomputed) is bool(routine.noted)
    assert_same(gradients(net), expected)


def test_nothing_of_a_step_outlives_it() -> None:
    """Neither a note nor what it reads is part of a cycle."""
    net = fresh()
    with steady(net) as core:
        gc.collect()
        gc.disable()
        try:
            loss = loss_of(net)
            notes = list(core.noted._notes)
            made = [weakref.ref(each) for each in core.noted.made.values()]
            assert notes and all(ref() is not None for ref in made)
            loss.backward()
            del loss
            assert not any(ref() for ref in (*notes, *made))
        finally:
            gc.enable()
        nothing_left(core)


def at_layer(index: int, when: str, do: Callable[..., None]) -> Between:
    """To do something at a layer, in `forward`, `backward` or `both`."""

    def between(at: int, x: Tensor) -> Tensor:
        if at == index:
            if when != "backward":
                do()
            if when != "forward":
                x.register_hook(do)
        return x

    return between


@pytest.mark.parametrize("when", ["forward", "backward", "both"])
@pytest.mark.parametrize("index", [0, 2, 4, 7])
def test_each_gets_its_record_when_more_has_to_be_known(index: int, when: str) -> None:
    expected, net, given = plain(), fresh(), []
    with steady(net) as core:

        def give(_: Tensor | None = None) -> None:
            before = core.engine.step_unevicted_peak_bytes
            with core:
                core.engine.keeping.end()
            core.engine.ledger.validate()
            assert core.engine.step_unevicted_peak_bytes == before
            given.append(len(core.engine.ledger.ops))

        loss = loss_of(net, at_layer(index, when, give))
        counted(core)
        loss.backward()
        counted(core)
        assert core.engine.ledger.handles == 0
        if when != "backward" and index:
            assert given[0], "recipes in place of notes"
        for _ in range(2):  # a step later all is as it was
            assert_same(gradients(net), expected)
            loss_of(net).backward()
        nothing_left(core)
    assert_same(gradients(net), expected)


def test_what_is_saved_only_after_that_goes_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls have been noted, and nobody has saved their results when more has to be known. All ops take as long as each
    other, so that it is the same plan each time."""
    monkeypatch.setattr(WallClock, "stop", lambda clock, mark: 1000)
    expected, net = plain(), fresh()
    later: set[int] = set()  # save orders of such results
    with steady(net) as core:
        engine = core.engine
        for index in range(8):
            unsaved: list[int] = []

            def give(found: list[int] = unsaved) -> None:
                keys = [key for key, made in core.noted.made.items() if made.kept is None]
                with core:
                    engine.keeping.end()
                found += [core.storages.by_key[key] for key in keys]

            routine, before = engine.routine, engine.totals.evictions.get("recompute", 0)
            assert routine is not None
            loss = loss_of(net, at_layer(index, "forward", give))
            assert engine.totals.evictions["recompute"] - before == len(routine.dropped)
            later |= {engine.ledger[record].saved_at for record in unsaved if record in engine.ledger}
            loss.backward()
            assert_same(gradients(net), expected)
            loss_of(net).backward()  # goes as planned again
            assert_same(gradients(net), expected)
        assert later & routine.dropped


def saved_results(x: Tensor) -> list[Tensor]:
    """What the nodes behind a tensor have saved of their results."""
    found: list[Tensor] = []
    todo, seen = [x.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
            if hasattr(node, "_saved_result"):
                found.append(node._saved_result.detach())
    return found


class Saving(torch.autograd.Function):
    """Saves what it is given beside its input, which no op reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * sum(other.mean() for other in ctx.saved_tensors), *[None for _ in ctx.saved_tensors]


@pytest.mark.parametrize(
    "use", [lambda x, found: x + sum(map(torch.exp, found)), lambda x, found: Saving.apply(x, *found)]
)
def test_what_was_made_again_and_is_used_by_others_gets_its_record_once(use: Callable[..., Tensor]) -> None:
    give: Callable[[], object] = int

    def between(at: int, x: Tensor) -> Tensor:
        if at == 4:
            found = saved_results(x)
            x = use(x, found)
            give()
        return x

    expected, net = plain(between), fresh()
    with steady(net) as core:

        def give() -> None:
            with core:
                core.engine.keeping.end()
            core.engine.ledger.validate()

        loss_of(net, between).backward()
        nothing_left(core)
    assert_same(gradients(net), expected)


def test_all_that_can_go_goes_in_the_middle() -> None:
    expected, net = plain(), fresh()

    def between(index: int, x: Tensor) -> Tensor:
        if index in (2, 5):
            core.rescue()
            counted(core)
            x.register_hook(lambda _: core.rescue())
        return x

    with steady(net) as core:
        loss_of(net, between).backward()
        counted(core)
    assert_same(gradients(net), expected)


def test_without_room_the_engine_finds_some(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, net, asked = plain(), fresh(), []
    with steady(net):
        monkeypatch.setattr(Expected, "fits", lambda *args: asked.append(args) or False)
        needs: list[int] = []
        end = Learner.end

        def noted(learner: Learner, *args: Any) -> None:
            needs.append(len(learner.log.needs))
            end(learner, *args)

        monkeypatch.setattr(Learner, "end", noted)
        loss_of(net).backward()
        assert len(asked) == 1, "from then on all is recorded"
        monkeypatch.undo()
        monkeypatch.setattr(Learner, "end", noted)
        assert_same(gradients(net), expected)
        for _ in range(2):
            loss_of(net).backward()
            assert_same(gradients(net), expected)
        assert len(set(needs)) == 1, "each is told of once"


def test_where_there_is_never_room_nothing_is_noted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each such step would be followed by one that is recorded whole, for as long as the training lasts."""
    expected, net, asked, gone = plain(), fresh(), [], []
    with steady(net) as core:
        monkeypatch.setattr(Expected, "fits", lambda *args: asked.append(args) or False)
        for _ in range(8):
            before = len(asked)
            loss_of(net).backward()
            assert_same(gradients(net), expected)
            gone.append(len(asked) - before)
        routine = core.engine.routine
        assert routine is not None and not routine.noted and routine.dropped
    assert sum(gone) == CRAMPED and not any(gone[-4:])


def test_what_a_noted_call_makes_and_the_plan_keeps_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool gives two results: the one that is kept is there for who reads it."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.max_pool2d(layer(x), 3, 1, 1).sin() * 1.5
            return x

    def loss(net: nn.Module) -> Tensor:
        torch.manual_seed(3)
        found: Tensor = net(torch.randn(3, 4, 8, 8)).square().mean()
        return found

    torch.manual_seed(1)
    net, replayed, run_once = Pooled(), [], MadeAgain.run_again
    loss(net).backward()
    expected = gradients(net)

    def noted(again: MadeAgain, note: Note, tensors: Sequence[Tensor], in_place: bool) -> Any:
        replayed.append(note.facts.name)
        return run_once(again, note, tensors, in_place)

    def action(op: OpInfo | None) -> Action:
        return RECOMPUTE if op is not None and op.name in ("aten.max_pool2d_with_indices", "aten.mul") else KEEP

    def values(node: Node) -> bool:
        """What a pool gives beside indices, which take twice the bytes; a layer has four ops."""
        return node.op is not None and node.op % 4 == 2 and node.nbytes == 3 * 4 * 8 * 8 * 4

    with planned(lambda: loss(net), action, but=values) as core:
        net.zero_grad()
        monkeypatch.setattr(MadeAgain, "run_again", noted)
        loss(net).backward()
        nothing_left(core)
    assert_same(gradients(net), expected)
    assert replayed == ["aten.sin", "aten.mul", "aten.max_pool2d_with_indices"] * 5


@pytest.mark.parametrize("times", [1, CRAMPED])
def test_a_replay_that_finds_no_memory_is_the_engine_s(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, net, failed, replay = plain(), fresh(), [], MadeAgain._replay

    def refused(again: MadeAgain, *args: Any) -> Any:
        if len(failed) < times:
            failed.append(1)
            raise torch.OutOfMemoryError("none")
        return replay(again, *args)

    with steady(net) as core:
        monkeypatch.setattr(MadeAgain, "_replay", refused)
        for _ in range(4):
            loss_of(net).backward()
            counted(core)
            assert_same(gradients(net), expected)
        assert len(failed) == times or core.engine.routine is None


def test_a_replay_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = fresh()

    def told() -> str:
        try:
            loss_of(net).backward()
        except RecomputeMismatchError as error:
            return str(error)
        return ""

    with steady(net) as core:
        monkeypatch.setattr("delta.runtime.made_again.run_seeded", lambda *_: torch.zeros(3))
        assert "does not give the same result twice" in told()
        torch.ones(1, requires_grad=True).sum().backward()  # autograd's queue still has what was to come next
        gc.collect()
        core.hear()
        assert core.engine.ledger.handles == 0


@contextmanager
def planned(
    loss: Callable[[], Tensor],
    action: Callable[[OpInfo | None], Action],
    share: str = "90%",
    but: Callable[[Node], bool] = lambda _: False,
) -> Iterator[Core]:
    """A block whose next step follows a routine by a plan that has for each saved storage the action of its maker; some
    are kept all the same."""
    policy = delta.load_policy("delta", {"filter.min_bytes": 0})
    with delta.evict(activations=share, policy=policy, device="cpu") as run:
        core = run._core
        assert core is not None
        core.planning.close()  # nobody looks for a better plan
        made = core.engine.learner.revising.make_plan
        assert made is not None

        def make_plan(graph: StepGraph, *args: Any) -> Plan:
            makers = [graph.ops[op] if (op := graph.nodes[node].op) is not None else None for node in graph.saved]
            kept = [but(graph.nodes[node]) for node in graph.saved]
            actions = (KEEP if keeps else action(op) for keeps, op in zip(kept, makers, strict=True))
            return replace(made(graph, *args), actions=tuple(actions), prefetch={}, evictions={})

        core.engine.learner.revising.make_plan = make_plan
        for _ in range(10):
            loss().backward()
        assert core.engine.routine is not None and core.engine.routine.noted
        yield core


def records_read(core: Core) -> set[int]:
    """Those that the notes of the step under way have a handle on."""
    notes = [note for ref in core.noted._notes if (note := ref()) is not None]
    return {record for note in notes for record in note.records}


def test_what_is_read_may_be_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the note has a handle on it: it is brought back for a replay, and lives as long as it may be read."""
    expected, net = plain(), fresh()

    def action(op: OpInfo | None) -> Action:
        return RECOMPUTE if op is not None and op.name in ("aten.add", "aten.mul") else SWAP

    with planned(lambda: loss_of(net), action, "60%") as core:
        net.zero_grad()
        engine = core.engine
        steps = engine.totals.steps
        loss = loss_of(net)
        assert records_read(core), "the plan swaps something that is read"
        counted(core)
        note = next(note for ref in core.noted._notes if (note := ref()) is not None and note.records)
        loss.backward()
        assert engine.totals.steps == steps and engine.ledger.handles == len(note.records)
        del note
        assert engine.totals.steps == steps + 1, "the last note to die ends the step"
        nothing_left(core)
        assert_same(gradients(net), expected)

        loss = loss_of(net)
        with core:
            engine.keeping.end()
        engine.ledger.validate()
        loss.backward()
        nothing_left(core)
        assert_same(gradients(net), expected)

        loss_of(net).backward()
        gradients(net)
        lend = Core.lend

        def given(core: Core, record: int) -> None:
            lend(core, record)
            engine.keeping.end()

        loss = loss_of(net)
        assert core.noted.on and records_read(core)
        monkeypatch.setattr(Core, "lend", given)
        loss.backward()
        nothing_left(core)
    assert_same(gradients(net), expected)


def exp_swapped(op: OpInfo | None) -> Action:
    return {"aten.exp": SWAP, "aten.mul": RECOMPUTE}.get(op.name if op is not None else "", KEEP)


def test_what_is_read_may_be_saved_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its record. Were everything to get one for that, each step of a ResNet would: what a block begins with is
    saved by two convolutions."""
    torch.manual_seed(0)
    x, w = (torch.randn(64, requires_grad=True) for _ in range(2))

    def loss() -> Tensor:
        y = x
        for _ in range(4):
            y = y.sin().exp()
            y = (y * w).sin() + (y * w).cos()
        return y.sum()

    loss().backward()
    expected, x.grad, w.grad = [x.grad, w.grad], None, None
    with planned(loss, exp_swapped) as core:
        x.grad = w.grad = None
        with monkeypatch.context() as late:
            late.setattr(Swap, "poll", lambda _: None)  # no copy has ended by then
            last = loss()
        assert core.noted.on and records_read(core)
        counted(core)
        last.backward()
        nothing_left(core)
    assert all(torch.equal(found, grad) for found, grad in zip([x.grad, w.grad], expected, strict=True))


def test_copies_out_that_are_late_are_waited_for_before_a_walk_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is behind the host, and its copies are: none has been seen to end when backward begins."""
    torch.manual_seed(0)
    x, w = (torch.randn(64, requires_grad=True) for _ in range(2))

    def loss() -> Tensor:
        y = x
        for _ in range(4):
            y = ((y.sin().exp() * 2.0) * w).sin()
        return y.sum()

    loss().backward()
    expected, x.grad, w.grad = [x.grad, w.grad], None, None
    with planned(loss, exp_swapped) as core:
        x.grad = w.grad = None
        cramped: list[Learner] = []
        monkeypatch.setattr(Learner, "cramped", lambda learner: cramped.append(learner))
        monkeypatch.setattr(Swap, "poll", lambda _: None)
        last, ledger = loss(), core.engine.ledger
        assert ledger.leaving_bytes
        core.engine.budget.activations = Bytes(ledger.resident_bytes)
        last.backward()
        assert not cramped
        monkeypatch.undo()
        nothing_left(core)
    assert all(torch.equal(found, grad) for found, grad in zip([x.grad, w.grad], expected, strict=True))


def test_what_is_read_may_be_written_when_no_saved_tensor_is_on_it_any_more() -> None:
    """Autograd has nothing against it, and no recipe says that a note reads it: it has to be known before the write."""
    torch.manual_seed(0)
    x = torch.randn(64)
    trained = y, u, v, w = [torch.randn(64, requires_grad=True) for _ in range(4)]

    def loss(write: bool = False) -> Tensor:
        total = torch.zeros(())
        for block in range(3):
            made = (x + block).exp()
            saved = (made * v).sum()
            turned = (y * u).cos()
            total = total + (made + turned).sin().sum() + turned.tanh().sum() + ((made - 2.0) * w).sum()
            if write:
                del saved
                made.zero_()
        return total

    def action(op: OpInfo | None) -> Action:
        actions = {"aten.add": RECOMPUTE, "aten.sub": RECOMPUTE, "aten.cos": SWAP}
        return actions.get(op.name if op is not None else "", KEEP)

    loss().backward()
    expected = [None if each.grad is None else each.grad.clone() for each in trained]
    with planned(loss, action) as core:
        for each in trained:
            each.grad = None
        last = loss(write=True)
        last.backward()
        nothing_left(core)
    for each, grad in zip(trained, expected, strict=True):
        assert grad is None if each.grad is None else torch.equal(each.grad, grad)


class Drawn(nn.Module):
    """What the gelu and the product save is made by batch norm, and of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.gelu(norm(layer(x)) + 1.0)
            x = x * torch.rand_like(x)
        return x


def test_what_draws_random_numbers_and_what_takes_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(net: nn.Module) -> Tensor:
        torch.manual_seed(3)
        found: Tensor = net(torch.randn(3, 4, 8, 8)).square().mean()
        return found

    def state(net: nn.Module) -> list[Tensor]:
        return [*gradients(net), *(each.clone() for each in net.buffers()), torch.get_rng_state()]

    torch.manual_seed(1)
    net, same = Drawn(), Drawn()
    same.load_state_dict(net.state_dict())
    for _ in range(11):
        loss(same).backward()
        expected = state(same)
    by_statistics, run_once, output = [], MadeAgain.run_again, batch_norm.output
    replayed: list[str] = []

    def noted(again: MadeAgain, note: Note, tensors: Sequence[Tensor], in_place: bool) -> Any:
        replayed.append(note.facts.name)
        return run_once(again, note, tensors, in_place)

    dropped = ("aten.add", "aten.rand_like")
    with planned(lambda: loss(net), lambda op: RECOMPUTE if op is not None and op.name in dropped else KEEP) as core:
        net.zero_grad()
        monkeypatch.setattr(MadeAgain, "run_again", noted)
        monkeypatch.setattr(batch_norm, "output", lambda *args: by_statistics.append(1) or output(*args))
        loss(net).backward()
        last = state(net)
        nothing_left(core)
    assert_same(last, expected)
    assert replayed.count("aten.rand_like") == replayed.count("aten.add") == 5
    assert replayed.count("aten.native_batch_norm") == len(by_statistics) >= 5


class SixLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))


class Lingering(SixLayers):
    """What the sums read dies in backward before they are needed."""

    def forward(self, x: Tensor, between: Between | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            h = layer(x)
            z = h + 1.0
            x = z.sin() + h.sin()
            if between is not None:
                x = between(index, x)
        return x


def test_what_the_program_still_has_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, replayed, replay = Lingering(), [], MadeAgain._replay
    monkeypatch.setattr(MadeAgain, "_replay", lambda *args: replayed.append(1) or replay(*args))

    def action(op: OpInfo | None) -> Action:
        return RECOMPUTE if op is not None and op.name == "aten.add" and len(op.inputs) == 2 else KEEP

    with planned(lambda: loss_of(net), action) as core:
        net.zero_grad()
        replayed.clear()
        loss_of(net).backward()
        usual, expected = len(replayed), gradients(net)
        has: list[Tensor] = []
        kept_for: list[int] = []

        def between(index: int, x: Tensor) -> Tensor:
            if index == 3:
                has.append(x)
            if index == 1:
                x.register_hook(lambda _: kept_for.append(len(core.noted.made)))
            return x

        replayed.clear()
        loss = loss_of(net, between)
        assert core.noted.made, "forward may read it"
        loss.backward()
        del loss
        assert kept_for == [0], "and backward does not"
        assert len(has) == 1 and 0 < len(replayed) < usual
        has.clear()
        nothing_left(core)
    assert_same(gradients(net), expected)


class Apart(SixLayers):
    """Some of its calls run under another setting than those before and after them."""

    def forward(self, x: Tensor, between: Between | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() + 1.0
            with torch.backends.mkldnn.flags(enabled=False):
                x = x.sin()
            x = x.cos()
        return x


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_each_of_a_walk_is_replayed_under_the_settings_of_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    net, same, replayed, walks = Apart(), Apart(), [], []
    same.load_state_dict(net.state_dict())
    loss_of(same).backward()
    run_once, replay_all = MadeAgain.run_again, MadeAgain._replay_all

    def noted(again: MadeAgain, note: Note, tensors: Sequence[Tensor], in_place: bool) -> Any:
        replayed.append((note.facts.name, torch._C._get_mkldnn_enabled(), torch._C._len_torch_dispatch_stack()))
        return run_once(again, note, tensors, in_place)

    def walked(again: MadeAgain, walk: list[Note], *args: Any) -> bool:
        walks.append([note.facts.name for note in walk])
        return replay_all(again, walk, *args)

    dropped = {"aten.add": True, "aten.sin": False, "aten.cos": True}
    with planned(lambda: loss_of(net), lambda op: RECOMPUTE if op is not None and op.name in dropped else KEEP) as core:
        net.zero_grad()
        monkeypatch.setattr(MadeAgain, "run_again", noted)
        monkeypatch.setattr(MadeAgain, "_replay_all", walked)
        loss_of(net).backward()
        nothing_left(core)
    assert_same(gradients(net), gradients(same))
    assert ["aten.add", "aten.sin", "aten.cos"] in walks, "one walk under two settings"
    assert set(replayed) == {(name, enabled, 0) for name, enabled in dropped.items()}
    assert torch._C._get_mkldnn_enabled()


def one_made(core: Core) -> Made:
    """Something that has gone and is saved."""
    return next(each.made for ref in core.noted._tensors if (each := ref()) is not None and each.made is not None)


def test_a_value_is_let_go_of_with_the_last_saved_tensor_on_it() -> None:
    with steady(fresh()) as core:
        loss = loss_of(fresh())
        made = one_made(core)
        made.came_back(torch.ones(1))
        kept = Kept(1, 1, 1, 1, 1, noted=True)
        for kept.users in (1, 0):
            core.noted.released(kept, weakref.ref(made))
            assert (made.value is None) is (kept.users == 0)
        del made
        loss.backward()


def test_a_result_that_was_written_into_is_found_by_nobody() -> None:
    net = fresh()
    with steady(net) as core:
        loss = loss_of(net)
        made = one_made(core)
        value = torch.ones(1)
        made.came_back(value)
        assert made.found() is value
        value.add_(1.0)
        assert made.found() is None
        made.value = None
        del made
        loss.backward()


def test_notes_do_not_pile_up() -> None:
    """What a note lets go of may end a step, and nobody else may come by for long."""
    net = fresh()
    with steady(net) as core:
        loss = loss_of(net)
        longest = 0
        for _ in range(100):
            core.inbox.note_died({}, [], [])
            longest = max(longest, len(core.inbox.notes))
        assert longest < 20
        loss.backward()


def test_what_is_read_counts_as_long_as_a_note_keeps_it() -> None:
    torch.manual_seed(1)
    net, found = Lingering(), []
    loss_of(net).backward()
    expected = gradients(net)

    def action(op: OpInfo | None) -> Action:
        return RECOMPUTE if op is not None and op.name == "aten.add" and len(op.inputs) == 1 else KEEP

    def look(_: Tensor) -> None:
        core.hear()
        core.engine.ledger.validate()
        lingering = core.engine.keeping.lingering
        assert all(kept.there and not kept.users for kept in lingering.values())
        found.append(len(lingering))

    def watch(index: int, x: Tensor) -> Tensor:
        x.register_hook(look)
        return x

    with planned(lambda: loss_of(net), action) as core:
        net.zero_grad()
        lingered, released = [], Keeping.released
        loss = loss_of(net, watch)

        def noted(keeping: Keeping, kept: Kept, read: bool = False) -> None:
            released(keeping, kept, read)
            lingered.append(len(keeping.lingering))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Keeping, "released", noted)
            loss.backward()
        assert max(lingered) == 1 and found
        nothing_left(core)
    assert_same(gradients(net), expected)


# -- writes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("unseen", "given"), [(False, False), (True, False), (True, True)])
def test_what_is_read_is_as_it_was_after_a_write(unseen: bool, given: bool) -> None:
    """One that the recorder sees is met by a clone; one that only the version counter tells of is refused."""
    torch.manual_seed(1)
    layers, writes = nn.ModuleList(nn.Linear(24, 24) for _ in range(8)), True
    shift = torch.ones(16, 24)

    def loss() -> Tensor:
        torch.manual_seed(3)
        x = torch.randn(16, 24)
        for index, layer in enumerate(layers):
            x = (layer(x) + shift).sin().tanh()
            if writes and index == 4:
                with torch.no_grad():
                    shift.mul_(2.0)
        return x.square().mean()

    loss().backward()
    expected = gradients(layers)
    shift.fill_(1.0)
    writes = False
    with planned(loss, lambda op: RECOMPUTE if op is not None and op.name == "aten.add" else KEEP) as core:
        layers.zero_grad()
        writes = not unseen
        found = loss()
        if not unseen:
            assert not core.noted.on
            found.backward()
            assert_same(gradients(layers), expected)
            return
        assert core.noted.knows(shift.untyped_storage()._cdata) and core.noted.on
        torch._C._autograd._unsafe_set_version_counter((shift,), (5,))
        if given:
            with core:
                core.engine.keeping.end()
        with pytest.raises(StorageModifiedError, match="would read"):
            found.backward()
        assert core.noted.on is not given


def test_a_write_into_a_saved_tensor_that_went_is_refused_as_ever() -> None:
    net = fresh()

    def between(index: int, x: Tensor) -> Tensor:
        if index == 3:
            y = x.tanh()
            z = y * 2.0
            y.add_(1.0)
            return z
        return x

    torch.manual_seed(1)
    policy = delta.load_policy("recompute", {"filter.min_bytes": 0})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(net, between).backward()
    net.zero_grad()

    def harmless(index: int, x: Tensor) -> Tensor:
        return x.tanh() * 2.0 if index == 3 else x

    with delta.evict(activations="40%", policy=policy, device="cpu") as run:
        for _ in range(8):
            loss_of(net, harmless).backward()
        core = run._core
        assert core is not None and core.engine.routine is not None and core.engine.routine.noted
        loss = loss_of(net, between)
        counted(core)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Doubling(torch.autograd.Function):
    """Writes into the value that it saved, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spoil: list[bool]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.spoil = spoil
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if ctx.spoil:
            x.add_(1.0)
        return grad * 2.0, None


def test_a_value_that_backward_wrote_into_is_given_to_nobody_else() -> None:
    net, spoil = fresh(), []

    def between(index: int, x: Tensor) -> Tensor:
        return Doubling.apply(x.tanh(), spoil) if index in (2, 5) else x

    with steady_with(net, between) as core:
        assert core.engine.routine is not None and core.engine.routine.noted
        spoil.append(True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(net, between).backward()


@contextmanager
def steady_with(net: nn.Module, between: Between) -> Iterator[Core]:
    with delta.evict(activations="40%", policy=delta.load_policy("recompute", {"filter.min_bytes": 0})) as run:
        for _ in range(8):
            loss_of(net, between).backward()
            net.zero_grad()
        assert run._core is not None
        yield run._core


# -- what else there is -----------------------------------------------------------------------------------------------
def test_under_a_device_budget_each_is_saved_and_needed_after_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, net, looks = plain(), fresh(), []
    with steady(net) as core:
        monkeypatch.setattr(core.gauge, "on", True)
        monkeypatch.setattr(core.gauge, "look", lambda own=False, uncounted_bytes=0: looks.append(own))
        loss = loss_of(net)
        noted = len(core.engine.keeping.noted)
        assert noted and len(looks) >= noted
        looks.clear()
        loss.backward()
        assert looks.count(False) >= noted and looks.count(True) >= noted
    assert_same(gradients(net), expected)


def test_what_goes_is_let_go_of_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream may be reading it, as it could if autograd had kept it."""
    net, released = fresh(), []
    with steady(net) as core:
        monkeypatch.setattr(core.device, "release", lambda storage, tensors=0: released.append(storage._cdata))
        loss = loss_of(net)
        assert len(core.engine.keeping.noted) > 3
        assert {kept.key for kept in core.engine.keeping.noted} <= set(released)
        loss.backward()


def test_the_recorder_does_not_see_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved tensor may be looked at in forward, where the recorder is on."""
    expected, net, seen = plain(), fresh(), []
    dispatch = Recorder._record

    def recorded(self: Recorder, func: Any, *args: Any) -> Any:
        seen.append(func)
        return dispatch(self, func, *args)

    with steady(net) as core:
        loss = loss_of(net)
        tensors = [each for ref in core.noted._tensors if (each := ref()) is not None and each.taken is None]
        monkeypatch.setattr(Recorder, "_record", recorded)
        node, found = loss.grad_fn, []
        todo = [node]
        while todo:
            each = todo.pop()
            if each is not None and each not in found:
                found.append(each)
                todo += [following for following, _ in each.next_functions]
        looked_at = [each._saved_result for each in found if hasattr(each, "_saved_result")]
        assert tensors and looked_at and not seen
        del looked_at, tensors, todo, found, node, each
        loss.backward()
        counted(core)
    assert_same(gradients(net), expected)


def test_a_graph_that_is_kept_is_replayed_twice() -> None:
    net = fresh()
    loss_of(net).backward()
    loss = loss_of(net)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = gradients(net)
    with steady(net) as core:
        loss_of(net).backward()
        loss = loss_of(net)
        loss.backward(retain_graph=True)
        counted(core)
        loss.backward()
        del loss
        assert counted(core) == 0
        assert core.engine.ledger.handles == 0
    assert_same(gradients(net), expected)


def test_backward_may_end_after_the_block() -> None:
    expected, net = plain(), fresh()
    with steady(net) as core:
        loss = loss_of(net)
        assert core.engine.keeping.noted
    loss.backward()
    assert not core.slots
    assert_same(gradients(net), expected)


def test_one_that_outlives_its_step_can_still_be_asked_for() -> None:
    net = fresh()
    with steady(net) as core:
        loss = loss_of(net)
        kinds = {type(ref()) for ref in core.noted._tensors}
        assert kinds == {NotedTensor}
        other = loss_of(net)  # two graphs at once
        other.backward()
        loss.backward()
        counted(core)
        assert core.engine.ledger.handles == 0
    twice = gradients(net)
    net = fresh()
    loss_of(net).backward()
    loss_of(net).backward()
    assert_same(twice, gradients(net))


def test_what_a_replay_reads_may_be_of_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its memory is shared with all of them before it is let go of."""
    net, shared = fresh(), []
    with steady(net) as core:
        monkeypatch.setattr(core.device, "share", lambda storage: shared.append(storage._cdata))
        loss = loss_of(net)
        held = set(core.noted.readers)
        assert held
        loss.backward()
        assert held <= set(shared)


# -- what is overwritten ----------------------------------------------------------------------------------------------
class InPlace(SixLayers):
    """Sums and activations in place, on what nobody saves, as residual nets have them."""

    def forward(self, x: Tensor, between: Between | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            h = layer(x)
            if between is not None:
                h = between(index, h)
            h += x
            x = torch.relu_(h)
        return x


def in_place() -> InPlace:
    torch.manual_seed(1)
    return InPlace()


def plain_in_place(between: Between | None = None) -> list[Tensor]:
    net = in_place()
    loss_of(net, between).backward()
    return gradients(net)


def every_second_goes(op: OpInfo | None) -> Action:
    """A layer has three ops."""
    return RECOMPUTE if op is not None and op.name == "aten.relu_" and op.id % 2 else KEEP


def test_what_nobody_saved_is_overwritten_in_a_replay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, net = plain_in_place(), in_place()
    run_once, note_peak = MadeAgain.run_again, Ledger.note_peak
    replayed: list[str] = []
    passing: list[int] = []

    def noted(again: MadeAgain, note: Note, tensors: Sequence[Tensor], in_place: bool) -> Any:
        replayed.append(note.facts.name)
        return run_once(again, note, tensors, in_place)

    def peak(ledger: Ledger, passing_bytes: int = 0) -> None:
        passing.append(passing_bytes)
        note_peak(ledger, passing_bytes)

    with planned(lambda: loss_of(net), every_second_goes) as core:
        net.zero_grad()
        monkeypatch.setattr(MadeAgain, "run_again", noted)
        monkeypatch.setattr(Ledger, "note_peak", peak)
        loss = loss_of(net)
        assert not core.engine.ledger.ops
        counted(core)
        loss.backward()
        nothing_left(core)
    assert replayed.count("aten.add_") == replayed.count("aten.relu_") >= 2
    assert (min(passing), max(passing)) == (0, 16 * 24 * 4), "what is overwritten takes no room beside what is written"
    assert_same(gradients(net), expected)


class Chains(SixLayers):
    """Element-wise calls one after the other, none of them in place; the last one's result is saved."""

    def forward(self, x: Tensor, between: Between | None = None) -> Tensor:
        for layer in self.layers:
            x = self.chain(layer(x), x)
        return x

    def chain(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.relu((h * 0.5 + x) * 3)


class ReadTwice(Chains):
    def chain(self, h: Tensor, x: Tensor) -> Tensor:
        h = h * 0.5
        return torch.relu((h + h) * 3 + h)


class AsSecond(Chains):
    """What is read no more is no first argument."""

    def chain(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.relu(x + h)


class OfAnotherKind(Chains):
    """Sums larger, and of another type, than their first arguments."""

    def chain(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.relu((x > 0) + (h.sum(0, keepdim=True) + x))


class Reduced(Chains):
    """In bfloat16 a number is rounded by `mul_`, and not by `mul`."""

    def chain(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.relu(h.bfloat16() * 0.5 * 3).float() + x


class Halves(Chains):
    """A view of what is read no more, not all of it."""

    def chain(self, h: Tensor, x: Tensor) -> Tensor:
        first, last = (h * 2).chunk(2, dim=1)
        return torch.relu(torch.cat([first * 3, last * 2], dim=1))


BYTES = 16 * 24 * 4


@pytest.mark.parametrize(
    ("kind", "in_its_place", "most_bytes"),
    [
        (Chains, {"mul", "add", "relu"}, BYTES),
        (ReadTwice, {"mul", "add", "relu"}, 2 * BYTES),
        (AsSecond, {"relu"}, 2 * BYTES),
        (OfAnotherKind, {"relu"}, 2.5 * BYTES),
        (Reduced, set(), 2.5 * BYTES),
        (Halves, {"mul", "relu"}, 2.5 * BYTES),
    ],
)
def test_what_a_replay_reads_last_is_overwritten_by_the_next(
    monkeypatch: pytest.MonkeyPatch, kind: type[Chains], in_its_place: set[str], most_bytes: float
) -> None:
    """What it takes at once is what the last one of a layer makes, and what is still to be read."""
    torch.manual_seed(1)
    net, run_once, note_peak = kind(), MadeAgain.run_again, Ledger.note_peak
    loss_of(net).backward()
    expected, placed, passing = gradients(net), set[str](), list[int]()

    def noted(again: MadeAgain, note: Note, tensors: Sequence[Tensor], in_place: bool) -> Any:
        made = run_once(again, note, tensors, in_place)
        if in_place:
            placed.add(note.facts.name.removeprefix("aten."))
            assert made[0].data_ptr() == tensors[0].data_ptr()
        return made

    def peak(ledger: Ledger, passing_bytes: int = 0) -> None:
        passing.append(passing_bytes)
        note_peak(ledger, passing_bytes)

    def relu_goes(op: OpInfo | None) -> Action:
        return RECOMPUTE if op is not None and op.name == "aten.relu" else KEEP

    with planned(lambda: loss_of(net), relu_goes, but=lambda node: node.order % 3 != 1) as core:
        net.zero_grad()
        monkeypatch.setattr(MadeAgain, "run_again", noted)
        monkeypatch.setattr(Ledger, "note_peak", peak)
        loss = loss_of(net)
        counted(core)
        loss.backward()
        nothing_left(core)
    assert_same(gradients(net), expected)
    assert placed == in_its_place and max(passing) <= most_bytes


@pytest.mark.parametrize("when", ["forward", "backward", "both"])
@pytest.mark.parametrize("index", [0, 1, 3, 5])
def test_what_was_overwritten_gets_its_record_too(index: int, when: str) -> None:
    """As another version of the same storage, which has gone."""
    expected, net, given = plain_in_place(), in_place(), []
    with planned(lambda: loss_of(net), every_second_goes) as core:
        net.zero_grad()

        def give(_: Tensor | None = None) -> None:
            with core:
                core.engine.keeping.end()
            core.engine.ledger.validate()
            given.append(sum(bool(op.overwrites) for op in core.engine.ledger.ops.values()))

        loss = loss_of(net, at_layer(index, when, give))
        counted(core)
        loss.backward()
        counted(core)
        assert core.engine.ledger.handles == 0
        if when != "backward" and index:
            assert given[0], "recipes that overwrite"
        for _ in range(2):
            assert_same(gradients(net), expected)
            loss_of(net).backward()
        nothing_left(core)
    assert_same(gradients(net), expected)


def test_nothing_else_may_be_overwritten_unrecorded() -> None:
    net, other, found = in_place(), torch.zeros(3), []
    with planned(lambda: loss_of(net), every_second_goes) as core:

        def between(at: int, x: Tensor) -> Tensor:
            made = core.noted.made.get(x.untyped_storage()._cdata)
            if made is not None:
                overwrites = core.noted.overwrites
                found.append(overwrites([x], [other, x]))
                refused = [overwrites(each, [x, x.data, other]) for each in ([x.data], [other], [x, other], [])]
                made.kept = Kept(1, 1, 1, 1, 1)
                refused.append(overwrites([x], [x]))
                made.kept = None
                assert not any(each is not None for each in refused)
            return x

        loss_of(net, between).backward()
    assert len(found) >= 2 and set(found) == {1}


class InPlaceByList(SixLayers):
    """A write into a list of one tensor gives nothing, and PyTorch counts none under a dispatch mode."""

    def forward(self, x: Tensor, between: Between | None = None) -> Tensor:
        for layer in self.layers:
            h = layer(x).sin()
            torch._foreach_add_([h], 1.0)
            x = h * h
        return x


def test_a_write_into_a_list_is_recorded() -> None:
    torch.manual_seed(1)
    net = InPlaceByList()
    loss_of(net).backward()
    expected = gradients(net)
    with planned(
        lambda: loss_of(net), lambda op: RECOMPUTE if op is not None and "foreach" in op.name else KEEP
    ) as core:
        net.zero_grad()
        loss_of(net).backward()
        nothing_left(core)
    assert_same(gradients(net), expected)


@pytest.mark.parametrize("index", range(6))
def test_a_write_by_another_name_is_recorded(index: int) -> None:
    """`data` counts its writes by itself: what it is an alias of tells nothing."""

    def between(at: int, x: Tensor) -> Tensor:
        if at == index:
            x.data += 1.0
        return x

    expected, net = plain_in_place(between), in_place()
    with planned(lambda: loss_of(net), every_second_goes) as core:
        net.zero_grad()
        loss_of(net, between).backward()
        nothing_left(core)
    assert_same(gradients(net), expected)


class OutOnce(TorchDispatchMode):
    """Finds no memory for the sum with that number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("none")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_call_that_finds_no_memory_is_recorded(number: int) -> None:
    """All that can go goes, for which more has to be known, and the call is run once more."""
    expected, net, out = plain_in_place(), in_place(), OutOnce(0)
    with out, planned(lambda: loss_of(net), every_second_goes) as core:
        net.zero_grad()
        out.left = number
        loss = loss_of(net)
        assert out.left < 0 and core.oom_rescues == 1
        counted(core)
        loss.backward()
        nothing_left(core)
    assert_same(gradients(net), expected)
