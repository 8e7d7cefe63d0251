"""Steps that go as planned: what the plan keeps is only counted, and gets its record when more has to be known."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import a_log, an_op
from test_learner import plan_of
from test_routine import chain
from torch import Tensor, nn
from torch.nn import functional as F
from toy import Toy

import delta
from delta.budget import Budget
from delta.engine import Engine
from delta.errors import DeltaError, StorageModifiedError
from delta.expected import Expected
from delta.keeping import Keeping, Kept
from delta.learner import Learner
from delta.ledger import Ledger, LedgerError
from delta.planner import Plan, StepGraph, StepLog
from delta.planner.steplog import build_graph
from delta.profile import Profile
from delta.revising import Revising
from delta.routine import Routine, orders_of, read_by_replays, room_for_next
from delta.runtime.core import Core
from delta.runtime.inbox import Inbox
from delta.runtime.kept import KeptTensor, signature_of
from delta.trace import Recording
from delta.types import Action, AwaitOut, Kind, Mode
from delta.units import Bytes

KEEP, SWAP, RECOMPUTE, ENCODE = Action.KEEP, Action.SWAP, Action.RECOMPUTE, Action.ENCODE
pytestmark = [
    pytest.mark.usefixtures("one_thread", "heard"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),  # of steps that save more than was planned for
]


# -- the count --------------------------------------------------------------------------------------------------------
@pytest.fixture
def keeping() -> Keeping:
    return Keeping(Ledger(), Learner(Revising(0, None)))


def ledger_of(keeping: Keeping) -> Ledger:
    return keeping._ledger


def test_a_storage_counts_once_until_its_last_tensor_dies(keeping: Keeping) -> None:
    ledger, kept = ledger_of(keeping), Kept(key=7, record=3, nbytes=40, order=0, saved_ns=5)
    keeping.first(kept, 0, 0)
    keeping.again(kept, 0)
    assert (ledger.resident_bytes, ledger.unevicted_bytes, ledger.own_handles) == (40, 40, 2)
    ledger.validate()
    keeping.released(kept)
    assert (ledger.resident_bytes, ledger.own_handles, list(keeping.storages)) == (40, 1, [7])
    keeping.released(kept)
    assert (ledger.resident_bytes, ledger.unevicted_bytes, ledger.own_handles, keeping.storages) == (0, 0, 0, {})
    assert (ledger.peak_resident_bytes, ledger.peak_unevicted_bytes) == (40, 40)
    ledger.validate()


def test_what_has_got_its_record_is_counted_there(keeping: Keeping) -> None:
    ledger, kept = ledger_of(keeping), Kept(key=7, record=3, nbytes=40, order=0, saved_ns=5)

    def give_records() -> None:
        keeping.list_all()
        ledger.create(3, 40, Kind.ACTIVATION)
        ledger.save(3, 0)

    keeping.give_records = give_records
    keeping.end()
    assert 3 not in ledger, "there was nothing to give one"
    keeping.first(kept, 0, 0)
    keeping.end()
    keeping.end()
    keeping.released(kept)  # a note from before
    assert (ledger.resident_bytes, ledger.own_handles, keeping.storages) == (40, 1, {})
    ledger.validate()


def test_the_ledger_minds_what_was_never_counted() -> None:
    for fewer in ((-2, 0, 0), (0, -41, 0), (0, 0, -41)):
        ledger = Ledger()
        ledger.count(1, 40, 40)
        with pytest.raises(LedgerError, match="are not counted"):
            ledger.count(*fewer)


# -- which ------------------------------------------------------------------------------------------------------------
def a_step(packs: list[int], releases: list[int] | None = None) -> tuple[StepLog, StepGraph]:
    """Op i makes storage i + 1 out of storage i. `packs`: save orders of storages 1, 2 and 3, one after the other."""
    graph = chain([1, 2, 3])
    log = StepLog(orders=packs, releases=[(order, 3) for order in (releases or range(3))])
    return log, graph


@pytest.mark.parametrize(
    ("packs", "actions", "expected"),
    [
        ([0, 1, 2], [KEEP, KEEP, KEEP], (0, 1, 2)),
        ([0, 1, 0, 2, 1], [KEEP, KEEP, SWAP], (0, 1, 0, -1, 1)),
        ([0, 1, 2, 2], [KEEP, KEEP, RECOMPUTE], (0, 1, 2, 2)),
        ([0, 1, 2], [KEEP, ENCODE, RECOMPUTE], (0, -1, 2)),
        ([0, 1, 2], [KEEP, SWAP, KEEP], (0, -1, 2)),
    ],
)
def test_what_is_kept_or_dropped_is_known_by_its_order(packs, actions, expected) -> None:
    log, graph = a_step(packs)
    assert orders_of(log, graph, plan_of(actions)) == expected


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([KEEP, KEEP, KEEP], set()),
        # 3 is made again out of 2, which is ...
        ([KEEP, KEEP, RECOMPUTE], {1}),
        # ... made again out of 1.
        ([KEEP, RECOMPUTE, RECOMPUTE], {0, 1}),
        # 2 is brought back from the host: nobody reads 1.
        ([KEEP, SWAP, KEEP], set()),
    ],
)
def test_what_replays_read(actions, expected) -> None:
    _, graph = a_step([0, 1, 2])
    assert read_by_replays(graph, plan_of(actions)) == expected


def test_what_goes_later_is_not() -> None:
    log, graph = a_step([0, 1, 2])
    plan = replace(plan_of([KEEP] * 3), evictions={1: ((0, RECOMPUTE),)})
    assert orders_of(log, graph, plan) == (-1, 1, 2)


def test_nor_what_was_let_go_of_and_saved_again() -> None:
    log, graph = a_step([0, 1, 0, 2], releases=[0, 1, 0, 2])
    assert orders_of(log, graph, plan_of([KEEP] * 3)) == (-1, 1, -1, 2)


def test_nor_what_does_not_count() -> None:
    ops = [an_op(100, [0], [1])]
    log = a_log(ops, {0: 8, 1: 8}, [(0, 0, 0), (1, 1, 1)], [(1, 5), (0, 6)], [(0, 2), (1, 2)], 9, {0: Kind.PARAMETER})
    log.orders = [0, 1]
    assert orders_of(log, build_graph(log, 0), plan_of([KEEP, KEEP])) == (-1, 1)


def test_steps_are_told_apart_by_sizes_strides_and_types() -> None:
    x = torch.randn(4, 6)
    others = [x.t(), x.view(6, 4), x.double(), x[:2]]
    assert signature_of(x, 96) == signature_of(torch.zeros(4, 6), 96)
    assert len({signature_of(each, 96) for each in (x, *others)}) == 5
    assert signature_of(x, 96) != signature_of(x, 100)


# -- what goes at once ------------------------------------------------------------------------------------------------
def planned(limit: int = 1000, **second: Any) -> Toy:
    """Storage 1 is saved and kept, 3 is to be saved next and goes; it is made of 2, and 2 of 1. `second`: of 2's op."""
    toy = Toy(limit, ("keep", "recompute"))
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.save(1, 10)
    toy.op(2, 100, [1], **second)
    toy.op(3, 100, [2])
    nothing = (0, 0)
    plan = Plan((KEEP, RECOMPUTE), {}, ((), ()), nothing, (100, 100), (100, 200), 0, 0, 0)
    learner = toy.engine.learner
    learner.current = Profile((), build_graph(learner.log, 0), 0, {}, 1.0, plan)
    learner.mode = Mode.PLANNED
    learner.routine = Routine([], [], coming_bytes=room_for_next(plan))
    return toy


def test_what_goes_at_its_save_counts_until_the_program_lets_go_of_it() -> None:
    toy = planned()
    engine, ledger = toy.engine, toy.engine.ledger
    assert engine.expected.drop(1, 3, 7, 20) == []
    assert (ledger[3].saved_at, ledger[3].handles, ledger[3].available) == (1, 1, False)
    assert (ledger.resident_bytes, ledger.unevicted_bytes, engine.totals.evictions) == (200, 200, {"recompute": 1})
    assert engine.expected.drop(1, 3, 7, 21) == [], "one more tensor on it"
    assert (ledger[3].handles, ledger.resident_bytes, engine.totals.evictions) == (2, 200, {"recompute": 1})
    ledger.validate()
    toy.let_go(2, 3)
    assert (ledger.resident_bytes, ledger.unevicted_bytes) == (100, 200)
    ledger.validate()
    assert engine.learner.log.saves == [1, 3] and engine.learner.log.orders == [0, 1, 1]


def test_one_more_tensor_on_what_is_there_again_is_saved_the_whole_way() -> None:
    toy = planned()
    assert toy.engine.expected.drop(1, 3, 7, 20) == []
    toy.engine.ledger.hold(3)
    assert toy.engine.expected.drop(1, 3, 7, 21) is None
    assert toy.engine.ledger[3].handles == 1


def test_what_it_is_made_from_is_held_where_nothing_else_makes_it() -> None:
    toy = planned(replayable=False)
    assert toy.engine.expected.drop(1, 3, 7, 20) == [2]
    assert toy.engine.ledger[2].held
    toy.engine.ledger.validate()


@pytest.mark.parametrize(
    ("order", "limit", "gone"), [(0, 1000, False), (2, 1000, False), (1, 199, False), (1, 1000, True)]
)
def test_else_it_is_saved_the_whole_way(order: int, limit: int, gone: bool) -> None:
    """Another save than the planned one; no room for it; what it is made from has gone for good."""
    toy = planned(limit, replayable=not gone)
    if gone:
        toy.let_go(2)
    before = toy.engine.learner.packs
    assert toy.engine.expected.drop(order, 3, 7, 20) is None
    ledger = toy.engine.ledger
    assert (ledger[3].handles, ledger[3].saved_at, toy.engine.learner.packs) == (0, -1, before)
    ledger.validate()


@pytest.mark.parametrize(("limit", "more"), [(99, True), (100, False)])
def test_a_need_of_what_is_kept_sees_to_a_device_budget(limit: int, more: bool) -> None:
    """What else is in use has grown, and what is resident is over the limit by that."""
    toy = planned()
    kept = Kept(7, 1, 100, 0, 10, recorded=True)
    toy.engine.expected._headroom = SimpleNamespace(needed=lambda: None)  # type: ignore[assignment]
    toy.engine._room._budget = Budget(activations=Bytes(limit))
    assert toy.engine.expected.need(kept, 0, False, 20, True) is more


@pytest.mark.parametrize("moves", ["prefetch", "evictions"])
def test_a_need_of_what_is_kept_sees_to_what_the_plan_has_there(moves: str) -> None:
    toy = planned()
    kept, learner = Kept(7, 1, 100, 0, 10, recorded=True), toy.engine.learner
    assert learner.current is not None and learner.current.plan is not None
    learner.current.plan = replace(learner.current.plan, **{moves: {1: ()}})
    assert [toy.engine.expected.need(kept, 0, False, at, True) for at in (20, 30, 40)] == [False, True, False]


@pytest.mark.parametrize("in_backward", [True, False])
def test_only_a_need_in_backward_ends_a_stretch(in_backward: bool) -> None:
    toy = planned()
    toy.engine.expected.need(Kept(7, 1, 100, 0, 10, recorded=True), 0, False, 20, in_backward)
    assert toy.engine.step_ends.needed is in_backward


@pytest.mark.parametrize("limit", [199, 200])
def test_what_is_kept_with_a_record_has_room_or_is_saved_the_whole_way(limit: int) -> None:
    toy = planned()
    toy.engine._room._budget = Budget(activations=Bytes(limit))
    kept = toy.engine.expected.keep_record(1, 3, 7, 0, 20)
    assert (kept is not None) == (toy.engine.ledger[3].handles == 1) == (limit == 200)


# -- in a training ----------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Of its saved tensors a plan drops some and keeps others; two of each kind are on one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))

    def forward(self, x: Tensor, between: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) * 1.5 + x.tanh()
            if between is not None:
                x = between(index, x)
        return x


POLICY = {"filter.min_bytes": 0}
STEADY = 8  # steps after which one follows its routine


def loss_of(net: nn.Module, between: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
    torch.manual_seed(3)
    x = torch.randn(16, 24).to(next(net.parameters()).device)
    loss: Tensor = net(x, between).square().mean()
    return loss


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return found


def fresh(device: str = "cpu") -> Net:
    torch.manual_seed(1)
    return Net().to("cpu" if device.startswith("chaos") else device)


def plain(between: Callable[[int, Tensor], Tensor] | None = None, device: str = "cpu") -> list[Tensor]:
    net = fresh(device)
    loss_of(net, between).backward()
    return gradients(net)


@contextmanager
def steady(net: nn.Module, policy: str = "recompute", device: str = "cpu", **more: Any) -> Iterator[Core]:
    """A block whose next step follows its routine."""
    with delta.evict(activations="60%", policy=delta.load_policy(policy, POLICY | more), device=device) as run:
        for _ in range(STEADY):
            loss_of(net).backward()
            net.zero_grad()
        assert run._core is not None
        assert run._core.engine.routine is not None
        yield run._core


def counted(core: Core) -> int:
    core.engine.ledger.validate()
    return len(core.engine.keeping.storages)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("late", [True, False])
def test_what_is_kept_waits_for_copies_that_are_late_and_stays_itself(late: bool, monkeypatch) -> None:
    """There is no room for it until one has ended; else it takes the whole way."""
    net, late_copies, ran, refused = fresh(), [AwaitOut(-1)] if late else [], list[object](), list[int]()
    with steady(net) as core:
        expected, run = core.engine.expected, core.run
        keep, await_for_save = expected.keep, expected.await_for_save

        def refuses_once(order: int, *rest: Any, noted: bool = False) -> Kept | None:
            if order and not (noted or refused):
                refused.append(order)
                return None
            return keep(order, *rest, noted=noted)

        monkeypatch.setattr(expected, "keep", refuses_once)

        def awaits(order: int, nbytes: int) -> list[AwaitOut]:
            """Others may find no room of themselves, by what ops took when the plan was made."""
            return late_copies if order in refused else await_for_save(order, nbytes)

        monkeypatch.setattr(expected, "await_for_save", awaits)
        monkeypatch.setattr(core, "run", lambda told: ran.append(told) if told is late_copies else run(told))
        loss = loss_of(net)
        assert ran == ([late_copies] if late else [])
        by_themselves = {kept.order for kept in core.engine.keeping.storages.values()}
        assert len(refused) == 1 and by_themselves.issuperset(refused) is late
        loss.backward()
    assert_same(gradients(net), plain())


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("device", ["cpu", "chaos:3", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("policy", ["recompute", "delta", "swap"])
def test_most_of_a_known_step_is_only_kept(policy: str, device: str) -> None:
    """What replays read or make has a record, and counts there; all the others count by themselves."""
    expected, net = plain(device=device), fresh(device)
    with steady(net, policy, device) as core:
        before = core.engine.finished_steps, core.engine.totals.steps
        room, refused = core.engine._room, {0}  # the first one begins the step
        has_for = room.has_for

        def noted(routine: Routine, order: int, nbytes: int) -> bool:
            if not (has := has_for(routine, order, nbytes)) and nbytes:  # else it is about the one after
                refused.add(len(core.engine._recall.by_order))
            return has

        room.has_for = noted  # type: ignore[method-assign]
        routine, plan = core.engine.routine, core.engine.learner.profiles[0].plan
        assert routine is not None and plan is not None
        loss = loss_of(net)
        kept = counted(core)
        keeping = core.engine.keeping
        without = {each.order for each in keeping.storages.values()}
        recorded = {each.order for each in keeping.recorded.values()}
        assert without and without | recorded == set(routine.orders) - {-1} - routine.dropped - refused
        assert not without & (recorded | routine.read)
        assert bool(recorded) is (Action.RECOMPUTE in plan.actions)
        assert all(core.engine.ledger[record].held for record in keeping.recorded)
        resident = core.engine.ledger.resident_bytes
        peak = core.engine.step_peak_bytes
        listed = {rec.id for rec in core.engine.ledger.records.values() if rec.handles}
        assert 0 < len(listed) < core.engine.learner.packs
        assert not listed & {each.record for each in keeping.storages.values()}
        loss.backward()
        assert kept * 16 * 24 * 4 <= resident <= peak <= 1.01 * (core.engine.limit_bytes or 0)
        assert counted(core) == 0
        assert (core.engine.finished_steps, core.engine.totals.steps) == (before[0], before[1] + 1)
        assert core.engine.routine is not None
    assert_same(gradients(net), expected)


@pytest.mark.usefixtures("recorded")
def test_peaks_are_those_of_a_step_with_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two steps that follow one plan: another one may have other peaks."""
    peaks, net = [], fresh()
    with steady(net) as core:
        for keeps in (True, False):
            if not keeps:
                monkeypatch.setattr(core.kept, "pack", lambda *_: None)
            assert core.engine.routine is not None
            loss = loss_of(net)
            assert bool(counted(core)) is keeps
            peaks.append((core.engine.step_peak_bytes, core.engine.step_unevicted_peak_bytes))
            loss.backward()
    assert peaks[0] == peaks[1]


def test_an_eviction_beside_the_plan_gives_them_records() -> None:
    expected, net = plain(), fresh()
    with steady(net) as core:
        loss = loss_of(net)
        kept = counted(core)
        assert kept
        core.rescue()
        assert counted(core) == 0
        resident = core.engine.ledger.resident_bytes
        loss.backward()
        assert resident < kept * 16 * 24 * 4 + 2**14
    assert_same(gradients(net), expected)


@pytest.mark.parametrize("policy", ["delta", "swap"])
def test_they_can_be_evicted_then(policy: str) -> None:
    expected, net = plain(), fresh()
    with steady(net, policy) as core:
        loss = loss_of(net)
        kept, resident = counted(core), core.engine.ledger.resident_bytes
        core.rescue()
        assert kept and core.engine.ledger.resident_bytes < resident / 2
        loss.backward()
    assert_same(gradients(net), expected)


def branching(index: int, x: Tensor) -> Tensor:
    return x.sigmoid() * 1.01 if index == 6 else x


def narrowing(index: int, x: Tensor) -> Tensor:
    return x[:8] if index == 6 else x  # the same ops from there on, of other sizes


def writing(index: int, x: Tensor) -> Tensor:
    return x.add_(0.25) if index == 6 else x  # nobody has saved it yet


@pytest.mark.parametrize("policy", ["recompute", "delta", "swap"])
@pytest.mark.parametrize("between", [branching, writing, narrowing])
def test_a_step_that_goes_otherwise_has_plain_s_bits(between, policy: str) -> None:
    """What was counted is looked after where that is needed, with the version it was saved at."""
    expected, net = plain(between), fresh()
    with steady(net, policy) as core:
        seen = []

        def noted(index: int, x: Tensor) -> Tensor:
            seen.append(counted(core))
            return between(index, x)

        loss = loss_of(net, noted)
        assert seen[6] > 0
        counted(core)
        loss.backward()
    assert_same(gradients(net), expected)


def test_a_write_into_what_is_only_counted_is_told_as_ever() -> None:
    net = fresh()
    with steady(net) as core:
        loss = loss_of(net)
        packed = core.kept._tensors[-1]()
        assert packed is not None and packed.tensor is not None
        with torch.no_grad():
            packed.tensor.add_(1)
        del packed
        with pytest.raises(StorageModifiedError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_past_the_version_counter_is_what_backward_reads() -> None:
    """As in plain PyTorch, whose saved tensors are themselves."""

    def through_data(index: int, x: Tensor) -> Tensor:
        if index:
            saved[-1].data.mul_(2)
        saved.append(x)
        return x

    saved: list[Tensor] = []
    expected, net = plain(through_data), fresh()
    saved.clear()
    with steady(net) as core:
        loss = loss_of(net, through_data)
        counted(core)
        loss.backward()
    assert_same(gradients(net), expected)


def test_the_graph_may_be_kept() -> None:
    net = fresh()
    loss = loss_of(net)
    loss.backward(retain_graph=True)
    loss.backward()
    expected, net = gradients(net), fresh()
    with steady(net) as core:
        loss = loss_of(net)
        assert counted(core)
        loss.backward(retain_graph=True)
        loss.backward()
        assert counted(core) == 0
    assert_same(gradients(net), expected)


def test_backward_may_come_after_the_block() -> None:
    expected, net = plain(), fresh()
    with steady(net) as core:
        loss = loss_of(net)
        assert counted(core)
    loss.backward()
    assert_same(gradients(net), expected)
    assert not core.slots and core.engine.ledger.handles == 0


def test_a_graph_that_only_garbage_has_is_counted_no_more() -> None:
    net = fresh()
    with steady(net) as core:
        steps = core.engine.totals.steps
        knot: list[Any] = [loss_of(net)]
        knot.append(knot)
        assert counted(core)
        del knot
        gc.collect()
        with core:
            pass
        assert counted(core) == 0 and core.engine.totals.steps == steps + 1


def test_what_is_left_over_of_a_step_gets_its_record() -> None:
    """A saved tensor that outlives backward: where forward goes on after two of those, it is of no step any more."""
    net = fresh()
    with steady(net) as core:
        left = []
        original = core.engine._end_step

        def noted(*args: Any) -> Any:
            left.append(counted(core))
            return original(*args)

        core.engine._end_step = noted  # type: ignore[method-assign]
        loss = loss_of(net)
        packed = core.kept._tensors[0]()
        loss.backward()
        for _ in range(3):
            torch.ones(4, requires_grad=True).exp().sum().backward()
            counted(core)
        assert packed is not None and packed.taken is not None and any(left)
        assert counted(core) == 0 and core.engine.ledger.left_over == 1
        del packed
        with core:
            pass
        assert counted(core) == 0 and core.engine.ledger.handles == 0


def test_while_steps_are_traced_each_has_a_record(tmp_path: Any) -> None:
    net = fresh()
    recording = Recording(tmp_path / "step.jsonl", skip=STEADY, steps=1)
    with delta.evict(
        activations="60%", policy=delta.load_policy("recompute", POLICY), device="cpu", trace=recording
    ) as run:
        for step in range(STEADY + 2):
            loss = loss_of(net)
            assert run._core is not None
            assert bool(counted(run._core)) is (step > STEADY) or step < STEADY
            loss.backward()
            net.zero_grad()


# -- with a record ----------------------------------------------------------------------------------------------------
class Watched(Net):
    """The same with sources of replays that are saved only after what is made of them, and long before it."""

    def forward(self, x: Tensor, between: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        early = x = self.layers[0](x).tanh()
        for layer in list(self.layers)[1:]:
            read = layer(x)
            x = (read + 1).sigmoid() * read.sin() * early
        return x * early.exp()


def full_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the records of saves that take the whole way."""
    records: list[int] = []
    saved = Core.saved

    def noted(core: Core, *args: Any) -> int:
        records.append(saved(core, *args))
        return records[-1]

    monkeypatch.setattr(Core, "saved", noted)
    return records


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("net_class", [Net, Watched])
def test_what_replays_read_is_held_as_long_as_it_is_needed(net_class, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    net = net_class()
    loss_of(net).backward()
    expected = gradients(net)
    with steady(net) as core:
        engine, whole, dropped, deaths = core.engine, full_ways(monkeypatch), [], []
        drop, unsaved_kept = Expected.drop, Engine.unsaved_kept

        def noted_drop(expected: Expected, order: int, record: int, *args: Any) -> list[int] | None:
            anchors = drop(expected, order, record, *args)
            dropped.append((order, anchors))
            assert anchors is None or not engine.ledger[record].available
            assert not gc.isenabled(), "what it is made from has to live until it is held"
            return anchors

        def checked(engine: Engine, kept: Kept, *more: Any) -> Any:
            told = unsaved_kept(engine, kept, *more)
            deaths.append(kept)
            engine.ledger.validate()
            lives = kept.record in engine.ledger and engine.ledger[kept.record].handles > 0
            assert not kept.recorded or (kept.record in engine.keeping.recorded) is lives
            return told

        monkeypatch.setattr(Expected, "drop", noted_drop)
        monkeypatch.setattr(Engine, "unsaved_kept", checked)
        routine, before = engine.routine, dict(engine.totals.evictions)
        assert routine is not None and routine.dropped and routine.read
        loss = loss_of(net)
        counted(core)
        assert 1 <= len(whole) < engine.learner.packs / 3, "the one that begins the step, and where room is short"
        gone = {order for order, anchors in dropped if anchors is not None}
        assert gone and gone <= routine.dropped
        went = {order for order, _ in dropped}
        went |= {engine.ledger[record].saved_at for record in whole if not engine.ledger[record].available}
        assert engine.totals.evictions["recompute"] - before["recompute"] == len(went)
        anchors = {anchor for _, found in dropped for anchor in found or ()}
        assert all(core.slots[anchor].storage is not None for anchor in anchors)
        loss.backward()
        assert any(kept.recorded for kept in deaths) and counted(core) == 0
        assert engine.routine is not None and not engine.keeping.recorded
    assert_same(gradients(net), expected)


@pytest.mark.usefixtures("recorded")
def test_what_goes_at_its_save_is_let_go_of_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream may be reading it, as it could if autograd had kept it."""
    net, drop, gone = fresh(), Expected.drop, set()
    with steady(net) as core:

        def noted(expected: Expected, order: int, record: int, *args: Any) -> list[int] | None:
            if (anchors := drop(expected, order, record, *args)) is not None:
                gone.add(core.slots[record].ref.key)
            return anchors

        released: set[int] = set()
        monkeypatch.setattr(Expected, "drop", noted)
        monkeypatch.setattr(core.device, "release", lambda storage, tensors=0: released.add(storage._cdata))
        loss = loss_of(net)
        assert gone and gone <= released
        loss.backward()


@pytest.mark.usefixtures("recorded")
def test_what_cannot_be_made_again_is_not_dropped_at_its_save(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, net = plain(), fresh()
    with steady(net) as core, monkeypatch.context() as patched:
        whole = full_ways(patched)
        patched.setattr(Ledger, "_roots", lambda *_, **__: None)
        loss = loss_of(net)
        assert core.engine.routine is not None
        dropped = {core.engine._recall.by_order[order] for order in core.engine.routine.dropped}
        assert dropped <= set(whole)
        assert all(core.engine.ledger[record].held for record in dropped)
        loss.backward()
    assert_same(gradients(net), expected)


@pytest.mark.usefixtures("recorded")
def test_under_a_device_budget_what_has_a_record_is_saved_and_needed_after_a_look(monkeypatch) -> None:
    net, looks, pressed = fresh(), [], []
    pressure = Engine.pressure
    with steady(net) as core:
        monkeypatch.setattr(core.gauge, "on", True)
        monkeypatch.setattr(core.gauge, "look", lambda own=False, uncounted_bytes=0: looks.append(own))
        monkeypatch.setattr(Expected, "need", lambda *_: True)
        monkeypatch.setattr(Engine, "pressure", lambda *args: pressed.append(1) or pressure(*args))
        whole = full_ways(monkeypatch)
        loss = loss_of(net)
        recorded, engine = len(core.engine.keeping.recorded), core.engine
        assert engine.routine is not None and recorded
        assert len(looks) >= len(engine.routine.dropped) + len(whole) - 1
        before, counted_only, fetched, fetch = len(looks), len(engine.keeping.storages), [], Core.fetch
        monkeypatch.setattr(Core, "fetch", lambda *args: fetched.append(1) or fetch(*args))
        loss.backward()
        assert looks[before:].count(False) >= len(fetched) + recorded
        assert len(pressed) >= recorded + counted_only


def test_what_has_died_counts_no_more_at_the_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    net, expects, waiting = fresh(), Learner.expects, []
    with steady(net) as core:

        def noted(learner: Learner, signature: int, nbytes: int) -> int:
            waiting.append(len(core.inbox.notes))
            return expects(learner, signature, nbytes)

        monkeypatch.setattr(Learner, "expects", noted)
        loss_of(net).backward()
    assert len(waiting) > 10 and not any(waiting)


@pytest.mark.usefixtures("recorded")
def test_those_with_a_record_are_looked_after_too_then() -> None:
    expected, net = plain(), fresh()
    with steady(net) as core:
        loss = loss_of(net)
        recorded = set(core.engine.keeping.recorded)
        packed = [each for ref in core.kept._tensors if (each := ref()) is not None]
        assert recorded and all(core.engine.ledger[record].held for record in recorded)
        core.rescue()
        counted(core)
        assert not core.engine.keeping.recorded
        assert recorded <= {each.taken.record for each in packed if each.taken is not None}
        let_go = recorded - set(core.attached.records)
        assert {core.engine.ledger[each].saved_at for each in let_go} <= set(core.engine.learner.log.loose_at)
        del packed
        loss.backward()
    assert_same(gradients(net), expected)


def test_what_backward_uses_is_looked_up_when_somebody_asks_what_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, net = plain(), fresh()
    found: list[Any] = []
    find_used = Core.find_used

    def noted(core: Core) -> None:
        find_used(core)
        assert core.engine._room.candidates._used == set(core.attached.records)
        found.append(torch._C._current_graph_task_id())

    with steady(net) as core:
        monkeypatch.setattr(Core, "find_used", noted)

        def rescue(_: Tensor) -> None:
            found.append("rescue")
            core.rescue()
            found.append("rescued")

        def between(index: int, x: Tensor) -> Tensor:
            if index == 4:
                x.register_hook(rescue)
            return x

        loss_of(net, between).backward()
        began, ended = found.index("rescue"), found.index("rescued")
        assert began <= 1, "at the need of what began the step, which is before any of these is kept"
        assert ended - began > 1 and -1 not in found
    assert_same(gradients(net), expected)


@pytest.mark.usefixtures("recorded")
def test_one_that_is_dying_gets_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weak references find it until its death has been told of, and that may bring about that records are given."""
    expected, net = plain(), fresh()
    with steady(net) as core:
        loss, died = loss_of(net), []
        kept_died = Inbox.kept_died

        def told(inbox: Inbox, kept: Kept, soon: bool = False) -> None:
            if kept.recorded and not died:
                died.append(kept)
                with core:
                    core.engine.keeping.end()
            kept_died(inbox, kept, soon)

        monkeypatch.setattr(Inbox, "kept_died", told)
        loss.backward()
        assert died and counted(core) == 0
        assert core.engine.ledger.handles == 0
    assert_same(gradients(net), expected)


# -- convolutions -----------------------------------------------------------------------------------------------------
class Pictures(nn.Module):
    """The convolution's input is saved by nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.rest = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    def forward(self, x: Tensor, between: None = None) -> Tensor:
        x = F.avg_pool2d(F.silu(self.first(x)), 2)
        for layer in self.rest:
            x = layer(x.tanh())
        return self.second(F.avg_pool2d(x.sigmoid(), 1))


def picture_loss(net: nn.Module) -> Tensor:
    torch.manual_seed(3)
    loss: Tensor = net(torch.randn(4, 3, 32, 32)).square().mean()
    return loss


def test_a_kept_input_of_a_convolution_goes_between_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from delta.runtime import split

    torch.manual_seed(1)
    net = Pictures()
    picture_loss(net).backward()
    expected = gradients(net)
    done = []
    original = split._Split._let_go

    def noted(self: Any, value: Tensor) -> None:
        handle = self._handle()
        original(self, value)
        if type(handle) is KeptTensor:
            done.append((handle.tensor, handle.kept, value.untyped_storage().nbytes()))

    monkeypatch.setattr(split._Split, "_let_go", noted)
    policy = delta.load_policy("recompute", POLICY | {"backward.split_convolutions": True})
    with delta.evict(activations="90%", policy=policy, device="cpu") as run:
        for _ in range(STEADY):
            picture_loss(net).backward()
            found = gradients(net)
        core = run._core
        assert core is not None and core.engine.routine is not None
        assert counted(core) == 0
    assert_same(found, expected)
    assert (None, None, 0) in done


def test_what_was_let_go_of_there_cannot_be_asked_for_again() -> None:
    net, packed = fresh(), None
    with steady(net) as core:

        def noted(index: int, x: Tensor) -> Tensor:
            nonlocal packed
            live = [ref() for ref in core.kept._tensors]
            packed = next((each for each in live if each is not None), packed)
            return x

        loss = loss_of(net, noted)
        assert packed is not None
        packed.done()
        with pytest.raises(DeltaError, match="was let go of within the backward of its convolution"):
            loss.backward()


def test_what_has_got_its_record_is_let_go_of_there() -> None:
    net = fresh()
    with steady(net) as core:
        loss = loss_of(net)
        packed = core.kept._tensors[-1]()
        assert packed is not None
        core.rescue()
        handles = core.engine.ledger.own_handles
        packed.done()
        assert core.engine.ledger.own_handles == handles - 1
        counted(core)
        with pytest.raises(DeltaError, match="was let go of within the backward of its convolution"):
            loss.backward()


def test_in_forward_of_a_known_step_the_device_may_refuse_memory_as_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    net, asked = fresh(), []
    with steady(net) as core:
        monkeypatch.setattr(core.device, "enforce", asked.append)
        loss = loss_of(net)
        assert counted(core) and asked and all(asked)
        loss.backward()
        assert not asked[-1]
