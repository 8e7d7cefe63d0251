"""Times of a step on a device that the host works ahead of."""

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from models import CASES, train
from torch.utils._python_dispatch import TorchDispatchMode

import delta
from delta.planner.steplog import StepLog, StepTimes
from delta.profile import REFINEMENTS
from delta.runtime import rematerialise
from delta.runtime.core import Core
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.moments import MOST_OPS, PACE, Moments
from delta.runtime.op_times import OpTimes
from delta.runtime.recompute import replay
from delta.runtime.recorder import Recorder
from delta.runtime.swap import Swap
from delta.transfers import Transfers
from delta.types import OpInfo


@dataclass
class Card:
    """A clock at which a test says what time it is. What it has told of is counted."""

    now_ns: int = 0
    late: bool = True
    waits: int = 0

    def start(self) -> int:
        return self.now_ns

    def stop(self, mark: int) -> int:
        return self.now_ns - mark

    def hold_back(self, ns: int) -> None:
        self.now_ns += ns

    def elapsed_ns(self, token: int) -> int | None:
        return None

    def wait_ns(self, token: int) -> int:
        self.waits += 1
        return token


@dataclass
class Step:
    """A step whose saves and needs are told of at given times of the card."""

    card: Card
    moments: Moments
    log: StepLog

    @classmethod
    def begun(cls, at_ns: int = 0) -> "Step":
        card = Card(at_ns)
        return cls(card, Moments(card), StepLog())

    def save(self, at_ns: int) -> None:
        self.card.now_ns = at_ns
        self.log.saves.append(len(self.log.saves))
        self.log.save_ns.append(0)
        self.moments.saw(self.log)

    def need(self, at_ns: int) -> None:
        self.card.now_ns = at_ns
        self.log.needs.append((0, 0))
        self.moments.saw(self.log)

    def adds(self, since_ns: int, until_ns: int) -> None:
        """Delta does something of its own."""
        self.card.now_ns = since_ns
        self.moments.interrupted(self.log)
        self.card.now_ns = until_ns
        self.moments.resumed(self.log)


def test_times_count_from_the_first_save():
    step = Step.begun(5000)
    step.save(5000)
    step.save(5030)
    step.need(5100)
    step.card.now_ns = 5150
    assert step.moments.so_far(step.log) == StepTimes((0, 30), (100,), 150)


def test_what_delta_adds_is_left_out():
    step = Step.begun()
    step.save(0)
    step.adds(10, 40)
    step.save(50)
    step.need(100)
    step.adds(100, 500)
    step.adds(510, 520)
    step.need(530)
    assert step.moments.so_far(step.log) == StepTimes((0, 20), (70, 90), 90)


def test_they_may_be_asked_for_more_than_once_and_the_device_is_asked_once():
    step = Step.begun()
    step.save(0)
    step.save(20)
    assert step.moments.so_far(step.log) == StepTimes((0, 20), (), 20)
    waits = step.card.waits
    step.need(70)
    assert step.moments.so_far(step.log) == StepTimes((0, 20), (70,), 70)
    assert step.card.waits == waits + 2, "for the need, and for now"


def test_nothing_is_asked_before_the_times_are_wanted():
    step = Step.begun()
    step.save(0)
    step.adds(1, 2)
    step.need(3)
    assert step.card.waits == 0


def test_a_tensor_that_is_saved_once_more_is_no_moment():
    step = Step.begun()
    step.save(0)
    step.card.now_ns = 10
    step.moments.saw(step.log)
    step.save(30)
    assert step.moments.so_far(step.log).save_ns == (0, 30)


def test_another_step_begins_anew():
    step = Step.begun()
    step.save(0)
    step.need(50)
    old, step.log = step.log, StepLog()
    step.save(1000)
    step.moments.interrupted(old)
    step.need(1040)
    assert step.moments.so_far(step.log) == StepTimes((0,), (40,), 40)


def test_of_a_step_that_was_not_shown_nothing_is_known():
    step = Step.begun()
    assert step.moments.so_far(StepLog()) == StepTimes()
    step.save(0)
    assert step.moments.so_far(StepLog()) == StepTimes()
    assert step.card.waits == 0


def test_moments_that_were_not_shown_are_taken_to_be_those_of_the_next_one():
    """Of a step that turns out to be no routine's the first save has gone by."""
    step = Step.begun(5000)
    step.log.saves.append(0)
    step.save(5010)
    step.save(5030)
    step.need(5100)
    assert step.moments.so_far(step.log) == StepTimes((0, 0, 20), (90,), 90)


def test_of_a_step_that_is_followed_no_further_nothing_is_kept():
    """It may go on for as long as the program runs."""
    step = Step.begun()
    step.save(0)
    step.log = StepLog()
    step.moments.saw(step.log)
    for at_ns in range(100):
        step.adds(at_ns, at_ns + 1)
        step.moments.saw(step.log)
    assert not step.moments._spans


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_a_step_that_begins_as_another_kind_does_has_the_device_s_times(monkeypatch):
    """Nothing was timed as long as it was taken for that."""
    graphs, x, card = [], torch.randn(64, requires_grad=True), Card()
    monkeypatch.setattr(CpuDevice, "clock", lambda _: card)
    chosen = delta.load_policy("swap", {"filter.min_bytes": 0})
    with delta.evict(activations="70%", policy=chosen, device="cpu") as run:
        assert run._core is not None
        learner = run._core.engine.learner
        plans = learner.revising.make_plan
        learner.revising.make_plan = lambda graph, *rest: graphs.append(graph) or plans(graph, *rest)
        for _ in range(4 + REFINEMENTS):
            x.sin().sin().sin().sin().sin().sin().sum().backward()
        assert learner.routine is not None and learner.routine.orders
        x.cos().sin().sin().sin().sin().sin().sin().sum().backward()
    assert graphs[-1].ops[0].name == "aten.cos"
    assert graphs[-1].end_ns == 0, "that clock stands still"


@pytest.mark.usefixtures("one_thread")
def test_a_step_that_fits_needs_no_times(monkeypatch):
    plain = train(CASES["gpt"], 3)
    monkeypatch.setattr(CpuDevice, "clock", lambda _: Slow())
    with delta.evict(activations="100%", policy="swap", device="cpu") as run:
        assert plain.differences(train(CASES["gpt"], 3)) == []
    assert run.report().warnings == ()


def test_times_of_part_of_a_step_are_not_taken():
    log = StepLog(saves=[4, 5], save_ns=[1, 2], needs=[(0, 3)], end_ns=9)
    log.timed(StepTimes((0,), (7,), 8))
    assert (log.save_ns, log.needs, log.end_ns) == ([1, 2], [(0, 3)], 9)
    log.timed(StepTimes((0, 5), (7,), 8))
    assert (log.save_ns, log.needs, log.end_ns) == ([0, 5], [(0, 7)], 8)


class Slow:
    """As if the device took thousands of times as long as the host for everything."""

    late = True
    times = 5000

    def start(self) -> int:
        return time.perf_counter_ns()

    def stop(self, mark: int) -> int:
        return self.times * (time.perf_counter_ns() - mark)

    def hold_back(self, ns: int) -> None:
        """It is far behind as it is."""

    def elapsed_ns(self, token: int) -> None:
        return None

    def wait_ns(self, token: int) -> int:
        return token


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["delta", "swap", "mimose"])
def test_plans_are_made_by_the_device_s_times(monkeypatch, policy):
    plain = train(CASES["gpt"], 4)
    monkeypatch.setattr(CpuDevice, "clock", lambda _: Slow())
    graphs, began_ns = [], time.perf_counter_ns()
    with delta.evict(activations="50%", policy=delta.load_policy(policy, {"filter.min_bytes": 0}), device="cpu") as run:
        assert run._core is not None
        plans = run._core.engine.learner.revising.make_plan
        run._core.engine.learner.revising.make_plan = lambda graph, *rest: graphs.append(graph) or plans(graph, *rest)
        evicted = train(CASES["gpt"], 4)
    took_ns = time.perf_counter_ns() - began_ns
    assert plain.differences(evicted) == []
    first = graphs[0]
    assert len(first.save_ns) == len(first.saved)
    assert list(first.save_ns) == sorted(first.save_ns)
    assert list(first.need_ns) == sorted(first.need_ns)
    assert first.save_ns[-1] < first.need_ns[0] < first.need_ns[-1] <= first.end_ns
    assert sum(op.cost_ns for op in first.ops) <= first.end_ns
    assert took_ns < first.end_ns <= Slow.times * took_ns


@pytest.mark.usefixtures("one_thread")
def test_in_the_last_step_that_is_timed_only_moments_are(monkeypatch):
    """Ops have been timed by then, and the two events around each would be part of the times between moments."""
    ran, timed = Counter(), Counter()
    runs, stops = Recorder._record, OpTimes.took_ns
    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "clock", lambda _: Slow())
        patch.setattr(Recorder, "_record", lambda *call: (ran.update([step()]), runs(*call))[1])
        patch.setattr(OpTimes, "took_ns", lambda *call: (timed.update([step()]), stops(*call))[1])
        policy = delta.load_policy("delta", {"filter.min_bytes": 0})
        with delta.evict(activations="50%", policy=policy, device="cpu") as run:
            assert run._core is not None
            learner = run._core.engine.learner

            def step() -> int:
                return learner.profiles[0].refined if learner.profiles else -1

            train(CASES["gpt"], 1 + REFINEMENTS)
    assert timed[-1] and timed[0] and not timed[1]
    assert ran[1] == ran[0] > 0


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_replays_are_not_the_step_s_time(monkeypatch):
    """Each takes so long that one alone would show; what the step does between two of them does not take any."""
    card = Card()

    def slowly(*args):
        card.now_ns += 10**12
        return replay(*args)

    monkeypatch.setattr(CpuDevice, "clock", lambda _: card)
    monkeypatch.setattr(rematerialise, "replay", slowly)
    graphs, x = [], torch.randn(64, requires_grad=True)
    with delta.evict(
        activations="0%", policy=delta.load_policy("recompute", {"filter.min_bytes": 0}), device="cpu"
    ) as run:
        assert run._core is not None
        core, learner = run._core, run._core.engine.learner
        plans = learner.revising.make_plan
        learner.revising.make_plan = lambda graph, *rest: graphs.append(graph) or plans(graph, *rest)
        loss = x.sin().sin().sin()
        card.now_ns += 5
        began_ns = core.begins()
        card.now_ns += 10**12
        core.spent(time.perf_counter_ns() - began_ns)
        loss.sum().backward()
    assert card.now_ns > 3 * 10**12
    assert (graphs[0].save_ns[0], graphs[0].end_ns) == (0, 5)


class Ticking(TorchDispatchMode):
    """Below the recorder: every op takes 7 ns of the card."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._card.now_ns += 7
        return func(*args, **(kwargs or {}))


def test_the_step_s_ops_are_its_time(monkeypatch):
    card, graphs = Card(), []
    monkeypatch.setattr(CpuDevice, "clock", lambda _: card)
    x, chosen = torch.randn(64, requires_grad=True), delta.load_policy("swap", {"filter.min_bytes": 0})
    with Ticking(card), delta.evict(activations="90%", policy=chosen, device="cpu") as run:
        assert run._core is not None
        learner = run._core.engine.learner
        plans = learner.revising.make_plan
        learner.revising.make_plan = lambda graph, *rest: graphs.append(graph) or plans(graph, *rest)
        x.sin().neg().sin().neg().exp().sum().backward()
    assert graphs[0].save_ns == (0, 14, 35)
    assert graphs[0].need_ns[0] > 35


def test_a_clock_of_a_device_that_is_done_at_once_has_no_moments():
    with delta.evict(activations="50%", device="cpu") as run:
        assert run._core is not None
        assert run._core.moments is None
        assert run._core.engine.learner.revising.device_times is None


@pytest.mark.parametrize(("policy", "told"), [("delta", True), ("mimose", True), ("dtr", False)])
def test_a_policy_that_does_not_plan_asks_for_no_moments(monkeypatch, policy, told):
    monkeypatch.setattr(CpuDevice, "clock", lambda _: Slow())
    with delta.evict(activations="50%", policy=policy, device="cpu") as run:
        assert run._core is not None
        assert (run._core.moments is not None) is told
        assert (run._core.engine.learner.revising.device_times is not None) is told


class Held(Slow):
    """Says how long it was held back."""

    def __init__(self, held_ns: list[int]) -> None:
        self.held_ns = held_ns

    def hold_back(self, ns: int) -> None:
        self.held_ns.append(ns)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("policy", "steps"), [("delta", 1 + REFINEMENTS), ("mimose", 1), ("dtr", 0)])
def test_the_device_is_held_back_where_ops_are_timed_once_more(monkeypatch, policy, steps):
    """The host is slow to give it work while it records, and the ops would seem to take as long. Policies that do not
    plan record every step, and none is held back."""
    held_ns: list[int] = []
    monkeypatch.setattr(CpuDevice, "clock", lambda _: Held(held_ns))
    with delta.evict(activations="50%", policy=delta.load_policy(policy, {"filter.min_bytes": 0}), device="cpu"):
        train(CASES["gpt"], 6)
    assert len(held_ns) == steps, "it never says that it has gone on"


class Piece(NamedTuple):
    lasted_ns: int
    ended_ns: int


@dataclass
class SlowHost:
    """A host that takes `each_ns` to give a card a piece of work, and a card that takes `DEVICE_NS` to do it. Where
    there are `queue` pieces that the card has not done, the host waits."""

    queue: int = 10**6
    host_ns: int = 0
    card_ns: int = 0
    late: bool = True
    each_ns: int = 1000

    def __post_init__(self) -> None:
        self.held_ns: list[int] = []
        self.waited_ns = 0
        self.pending: deque[int] = deque()

    def work(self) -> None:
        self.host_ns += self.each_ns
        self.card_ns = max(self.card_ns, self.host_ns) + DEVICE_NS
        self.pending.append(self.card_ns)
        while len(self.pending) > self.queue:
            until_ns = max(self.host_ns, self.pending.popleft())
            self.waited_ns += until_ns - self.host_ns
            self.host_ns = until_ns

    def wait(self) -> None:
        self.host_ns = max(self.host_ns, self.card_ns)

    def hold_back(self, ns: int) -> None:
        self.held_ns.append(ns)
        self.card_ns = max(self.card_ns, self.host_ns) + ns

    def start(self) -> int:
        return self.card_ns

    def stop(self, mark: int) -> Piece:
        return Piece(self.card_ns - mark, self.card_ns)

    def elapsed_ns(self, token: Piece) -> int | None:
        return token.lasted_ns if token.ended_ns <= self.host_ns else None

    def wait_ns(self, token: Piece) -> int:
        return token.lasted_ns


HOST_NS, DEVICE_NS, PIECES = 1000, 100, 10 * PACE + 3


def steps_on(card: SlowHost, *timed: bool, pieces: int = 1, waits_at: int = 10**6, slower: int = 1) -> list[int]:
    """How long steps seem to take in which a moment comes after so many pieces, each of which is an op. The host waits
    for the card after so many moments. In all but the first it is so much slower."""
    moments, lasted_ns = Moments(card), []
    for each in timed:
        card.each_ns = HOST_NS * (slower if lasted_ns else 1)
        log = StepLog()
        card.card_ns = card.host_ns = max(card.card_ns, card.host_ns)
        for at in range(PIECES):
            for _ in range(pieces):
                card.work()
                if at < PIECES // 2:  # those of backward nobody tells of
                    log.ops.append(OpInfo(0, "sin", (), (), 1, True))
            if at % waits_at == waits_at - 1:
                card.wait()
            if at < PIECES // 2:
                log.saves.append(at)
                log.save_ns.append(0)
            else:
                log.needs.append((0, 0))
            moments.saw(log, each)
        lasted_ns.append(moments.so_far(log).end_ns)
    return lasted_ns


def test_a_slow_host_does_not_make_a_timed_step_longer(monkeypatch):
    """What the device is given while it is held back it does without waiting for the host. In the first such step it is
    not known for how long, until a few moments have gone by."""
    card = SlowHost()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: card.host_ns)
    seemed, first, later = steps_on(card, False, True, True)
    assert seemed >= (PIECES - 1) * HOST_NS
    assert later == (PIECES - 1) * DEVICE_NS
    assert first <= later + PACE * HOST_NS


def test_a_host_that_is_slower_from_some_step_on_is_still_only_slow(monkeypatch):
    card = SlowHost()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: card.host_ns)
    *_, later = steps_on(card, True, True, True, slower=5)
    assert later < PIECES * card.each_ns / PACE, "it is waited for once in a hold at most"
    assert max(card.held_ns) > PACE * card.each_ns


def test_the_card_is_held_back_for_a_fifth_of_a_second_at_most(monkeypatch):
    card = SlowHost()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: card.host_ns)
    steps_on(card, True, True, slower=10**6)
    assert max(card.held_ns) == 200_000_000


def saves_on(card: SlowHost, *pieces: int, quick: int = -1) -> None:
    """A timed step of saves alone, each after so many ops; those of the `quick` one take the host hardly any time."""
    moments, log = Moments(card), StepLog()
    for at, ops in enumerate(pieces):
        card.each_ns = HOST_NS if at != quick else HOST_NS // 100
        for _ in range(ops):
            card.work()
            log.ops.append(OpInfo(0, "sin", (), (), 1, True))
        log.saves.append(at)
        log.save_ns.append(0)
        moments.saw(log, timed=True)


def test_where_little_is_saved_it_is_ops_that_count(monkeypatch):
    card = SlowHost(queue=4 * MOST_OPS)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: card.host_ns)
    saves_on(card, *[20] * 60)
    assert len(card.held_ns) > 5
    assert card.waited_ns == 0


def test_one_moment_alone_does_not_tell_how_slow_the_host_is(monkeypatch):
    card = SlowHost()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: card.host_ns)
    saves_on(card, *[1] * 20, quick=1)
    assert card.held_ns[0] > PACE * HOST_NS / 2


@pytest.mark.parametrize("pieces", [1, 4])
def test_it_falls_no_further_behind_than_its_queue_is_long(monkeypatch, pieces):
    card = SlowHost(queue=4 * MOST_OPS * pieces)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: card.host_ns)
    *_, later = steps_on(card, True, True, True, pieces=pieces)
    assert card.waited_ns == 0
    assert later == (PIECES - 1) * pieces * DEVICE_NS
    assert len(card.held_ns) > PIECES // PACE


@pytest.mark.parametrize(
    ("pieces", "queue", "waits_at"), [(1, 10**6, 1), (1, 10**6, 5), (1, 10**6, 15), (60, 256, 10**6), (20, 256, 10**6)]
)
def test_a_host_that_waits_for_the_device_is_not_taken_for_a_slow_one(monkeypatch, pieces, queue, waits_at):
    """It reads a number, or its queue is full: it waits for the hold. Were the next one as long as that and what comes
    besides, it would wait longer and longer."""
    card = SlowHost(queue)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: card.host_ns)
    steps_on(card, True, True, True, pieces=pieces, waits_at=waits_at)
    assert max(card.held_ns) <= 3 * PACE * pieces * HOST_NS


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_pinning_memory_for_a_copy_is_not_the_step_s_time(monkeypatch):
    """What the step has done before that is."""
    card, graphs, outs, copy_out, out = Card(), [], [], CpuDevice.copy_out, Swap.out

    def slowly(*args):
        card.now_ns += 10**12
        return copy_out(*args)

    def later(*args):
        card.now_ns += 7
        outs.append(out(*args))

    monkeypatch.setattr(CpuDevice, "clock", lambda _: card)
    monkeypatch.setattr(CpuDevice, "copy_out", slowly)
    monkeypatch.setattr(Swap, "out", later)
    x, chosen = torch.randn(64, requires_grad=True), delta.load_policy("swap", {"filter.min_bytes": 0})
    with delta.evict(activations="0%", policy=chosen, device="cpu") as run:
        assert run._core is not None
        learner = run._core.engine.learner
        plans = learner.revising.make_plan
        learner.revising.make_plan = lambda graph, *rest: graphs.append(graph) or plans(graph, *rest)
        x.sin().sin().sin().sum().backward()
    assert card.now_ns >= 2 * 10**12
    assert graphs[0].end_ns == 7 * len(outs)


@dataclass(eq=False)
class Stall:
    asked: int = 0


@dataclass
class Stalling:
    """A clock by which everything takes `takes_ns`. It knows that only when it is asked a second time."""

    takes_ns: int
    late: bool = True

    def start(self) -> None:
        return None

    def stop(self, mark: None) -> Stall:
        return Stall()

    def hold_back(self, ns: int) -> None:
        """Nobody times it."""

    def elapsed_ns(self, token: Stall) -> int | None:
        token.asked += 1
        return self.takes_ns if token.asked > 1 else None

    def wait_ns(self, token: Stall) -> int:
        return self.takes_ns


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("takes_ns", "late"), [(2_000, False), (1_000_000, True)])
def test_a_copy_back_is_late_if_it_was_for_the_device(monkeypatch, takes_ns, late):
    """The host finds all of them under way: it asks for each when it is needed."""
    plain = train(CASES["gpt"], 3)
    monkeypatch.setattr(CpuDevice, "clock", lambda _: Stalling(takes_ns))
    heard, waited = [], []
    monkeypatch.setattr(Transfers, "late", lambda _, order: heard.append(order))
    waits = Core.waited
    monkeypatch.setattr(Core, "waited", lambda *args: waited.append(args[-1]) or waits(*args))
    chosen = delta.load_policy("swap", {"filter.min_bytes": 0, "prefetch.window": 0})
    with delta.evict(activations="40%", policy=chosen, device="cpu"):
        evicted = train(CASES["gpt"], 3)
    assert plain.differences(evicted) == []
    waits_in = waited.count("copy in")
    assert waits_in > 10
    assert len(heard) >= waits_in - 3 if late else not heard, "of the last ones nobody asks any more"
    assert all(order >= 0 for order in heard)
