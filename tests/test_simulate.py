"""The simulator: runs by hand, random steps against a witness that follows every value, and DTR once more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import random_net
from simple_dtr import Dtr, Stuck
from traces import encodings

from delta.config import Policy
from delta.engine import Engine
from delta.errors import BudgetError, TraceError
from delta.policies.loader import load
from delta.simulate import ALLOCATORS, Run, Status, simulate, simulation
from delta.simulate.allocator import Allocator
from delta.simulate.machine import Entry, Machine
from delta.simulate.player import COUNTED
from delta.simulate.stopwatch import Stopwatch
from delta.trace import read
from delta.trace.events import (
    FREE,
    Backward,
    Bookkeeping,
    Constant,
    Event,
    Evictable,
    Free,
    Need,
    Op,
    Result,
    Save,
    Trace,
    Unsave,
)
from delta.types import Link
from delta.units import Bytes, Share

LINK = Link(10e9, 10e9)  # 10 bytes a ns each way


def a_trace(*events: Event, evictable: Evictable = Evictable.ALL) -> Trace:
    return Trace("test", evictable, events)


def make(output: int, *inputs: int, ns: int, nbytes: int = 100) -> Op:
    return Op("op", inputs, (output,), (nbytes,), ns)


def a_policy(*actions: str, score: str = "dtr", cost: str = "own", prefetch: int | str = 0) -> Policy:
    """Online, nothing is prefetched if not asked for, any size may go; DTR's handling of replays."""
    return Policy.model_validate(
        {
            "name": "test",
            "filter": {"score": score, "cost": cost, "min_bytes": 0},
            "director": {"actions": ["keep", *actions]},
            "planner": {"kind": "none"},
            "replay": {"sources": "drop", "results": "hold"},
            "prefetch": {"window": prefetch},
        }
    )


# -- by hand ----------------------------------------------------------------------------------------------------------
# A chain of four, and an op that reads both its ends: 100 bytes each, base time 10 + 20 + 30 + 40 + 50 = 150 ns.
FOUR_AND_BACK = a_trace(
    make(0, ns=10),
    make(1, 0, ns=20),
    make(2, 1, ns=30),
    make(3, 2, ns=40),
    make(4, 3, 0, ns=50),
    *(Free(number) for number in range(4)),
    Result(4),
)


def test_nothing_happens_where_all_fits():
    run = simulate(FOUR_AND_BACK, load("dtr"), Share(1.0))
    assert (run.status, run.overhead, run.first_overhead, run.decisions) == (Status.OK, 1.0, 1.0, 0)
    assert (run.base_ns, run.total_ns, run.peak_bytes, run.budget_bytes) == (150, 150, 500, 500)


@pytest.mark.parametrize("cost", ["classes", "neighbourhood"])
def test_a_chain_under_dtr_by_hand(cost):
    """Room for three.

    At 60 ns storage 3 needs room; 2 is in use. 0 was used at 10, 1 at 30: 10 / (100 * 50) = 0.0020 is less than
    20 / (100 * 30) = 0.0067: 0 goes, and 3 is there at 100.
    Then 0 is asked for, and needs room for its replay; 3 is in use. 1, with 0 missing beside it, costs 20 + 10:
    30 / (100 * 70) = 0.0043; 2 was used at 60 and nothing beside it is missing: 30 / (100 * 40) = 0.0075. 1 goes; the
    replay of 0 ends at 110. Storage 4 needs room: only 2 can go. The end is at 110 + 50 = 160.
    """
    run = simulate(FOUR_AND_BACK, load("dtr", overrides={"filter.cost": cost}), Bytes(300))
    assert run.status is Status.OK
    assert (run.total_ns, run.recomputed_ns, run.stall_ns, run.swapped_bytes) == (160, 10, 0, 0)
    assert run.overhead == run.first_overhead == 160 / 150
    assert run.peak_bytes == 300
    assert run.decisions == 3 * 3  # in each of the three steps
    assert run.fragmentation == 0.0  # nothing was free whenever something had to go


def test_the_first_step_goes_by_its_own_times():
    """As above, but 0 takes 1,000 ns in a first step: 1 goes there, and nobody asks for it again; then 2, for 4."""
    cold = replace(FOUR_AND_BACK, events=(make(0, ns=1000), *FOUR_AND_BACK.events[1:]))
    run = simulate(FOUR_AND_BACK, load("dtr"), Bytes(300), first=cold)
    assert (run.first_overhead, run.overhead, run.decisions) == (1.0, 160 / 150, 2 + 3 + 3)
    other = replace(FOUR_AND_BACK, events=FOUR_AND_BACK.events[1:])
    with pytest.raises(TraceError, match="it is another step, and may only differ in its times"):
        simulate(FOUR_AND_BACK, load("dtr"), Bytes(300), first=other)


def test_a_swap_over_the_link_by_hand():
    """Room for three; the least recently used goes, and 100 bytes take 10 ns each way.

    At 60 ns storage 3 waits until 0 is out: 70, and is there at 110. For 0 to come back, 1 (used at 30) goes out until
    120, then 0 comes until 130. Storage 4 waits for 2 to go out until 140, and is there at 190.
    """
    run = simulate(FOUR_AND_BACK, a_policy("swap", score="lru"), Bytes(300), LINK)
    assert run.status is Status.OK
    assert (run.total_ns, run.stall_ns, run.recomputed_ns, run.swapped_bytes) == (190, 40, 0, 300)
    assert run.peak_bytes == 300


def test_each_copy_takes_its_own_time_from_compute():
    """As above, and compute stands still for 7 ns whenever a copy is queued: three go out and one comes back."""
    run = simulate(FOUR_AND_BACK, a_policy("swap", score="lru"), Bytes(300), replace(LINK, copy_ns=7))
    assert run.status is Status.OK
    assert (run.total_ns, run.stall_ns, run.swapped_bytes) == (190 + 4 * 7, 40 + 4 * 7, 300)


def test_a_saved_trace_keeps_what_autograd_saved_under_the_budget():
    """Three saved storages of 100 bytes, room for two. Saves come unannounced, so room is kept for one more: with the
    second the first goes, with the third the second. To have the second again both are replayed, 10 ns each; the first
    stays. What the program alone refers to is not counted."""
    ops = [Op("op", (number - 1,) if number else (), (number,), (100,), 10) for number in range(3)]
    forward = [event for op in ops for event in (op, Save(op.outputs[0]), Free(op.outputs[0] - 1))][:-1]
    forward = [event for event in forward if event != Free(-1)]
    backward: list[Event] = [Free(1), Free(2), Backward()]
    for number in (2, 1, 0):
        read = (number,) if number == 2 else (number, number + 11)
        backward += [Need(number), Op("back", read, (number + 10,), (50,), 7, replayable=False), Unsave(number)]
        backward += [Free(number + 11)] if number < 2 else []
    trace = a_trace(*forward, *backward, Result(10), evictable=Evictable.SAVED)
    run = simulate(trace, a_policy("recompute"), Bytes(200))
    assert (run.status, run.why) == (Status.OK, "")
    assert (run.peak_bytes, run.total_ns, run.recomputed_ns) == (200, trace.base_ns + 20, 20)


def test_a_copy_back_without_room_goes_again_when_it_has_ended():
    """Room for 250 bytes, of which 200 are kept free for one more save: all three go at their saves, in no time. When 2
    is there (100 ns), 1 starts back; but 0 is needed next, which has no room beside it. So 1 is waited for (93 ns more,
    after 7 of compute), goes, and comes again after 0 (200 ns): 100 ns."""
    forward: list[Event] = [Op("op", (), (0,), (200,), 10), Save(0), Op("op", (0,), (1,), (100,), 10), Free(0), Save(1)]
    forward += [Op("op", (1,), (2,), (100,), 10), Free(1), Save(2), Free(2), Backward()]
    backward: list[Event] = []
    for made, number in enumerate((2, 0, 1), 10):
        read = (number,) if number == 2 else (number, made - 1)
        backward += [Need(number), Op("back", read, (made,), (50,), 7, replayable=False), Unsave(number)]
        backward += [Free(made - 1)] if number != 2 else []
    trace = a_trace(*forward, *backward, Result(12), evictable=Evictable.SAVED)
    with patch.object(Engine, "given", autospec=True, side_effect=Engine.given) as told:
        run = simulate(trace, a_policy("swap", score="lru", prefetch="auto"), Bytes(250), Link(1e15, 1e9))
    assert (run.status, run.why) == (Status.OK, "")
    assert (run.peak_bytes, run.stall_ns, run.total_ns) == (200, 100 + 93 + 200 + 100, trace.base_ns + 493)
    assert [call.args[1] for call in told.call_args_list][:3] == [2, 0, 1], "as on a device, backward uses these"


# -- ends -------------------------------------------------------------------------------------------------------------
def test_a_budget_below_the_largest_op_is_an_error():
    with pytest.raises(BudgetError, match=r"its constants and what its largest op \(op\) makes take 100 B"):
        simulate(FOUR_AND_BACK, load("dtr"), Bytes(99))


def test_an_op_whose_operands_do_not_fit_is_infeasible():
    run = simulate(FOUR_AND_BACK, load("dtr"), Bytes(299))  # 3, 0 and 4 have to be there at once
    assert (run.status, run.overhead, run.total_ns) == (Status.INFEASIBLE, None, None)
    assert "no room for 100 B" in run.why


def test_replays_that_take_longer_than_the_step_are_given_up():
    """Each use of the end of a long chain, with room for two, starts at its beginning."""
    ops = [make(0, ns=10), *(make(number, number - 1, ns=10) for number in range(1, 12))]
    again = [make(100 + number, number, ns=1) for number in range(10, 0, -1)]
    frees = [event for op in again for event in (op, Free(op.outputs[0]))]
    trace = a_trace(*ops, *frees, Result(11))
    run = simulate(trace, load("dtr"), Bytes(200))
    assert (run.status, run.overhead) == (Status.THRASH, None)
    assert "more time than the step" in run.why


@pytest.mark.parametrize(
    ("workspace_bytes", "budget_bytes", "overhead"),
    [(0, 400, 1.0), (0, 399, 1.25), (100, 500, 1.0), (100, 499, 1.25), (100, 300, 1.25), (100, 299, None)],
)
def test_what_an_op_needs_while_it_runs_has_to_find_room(workspace_bytes, budget_bytes, overhead):
    """0 has to go, and is made again in the end, where it does not fit beside 1, what the last op makes of that and
    needs for it, and the results of the step before."""
    last = replace(make(2, 1, ns=20), workspace_bytes=workspace_bytes)
    run = simulate(a_trace(make(0, ns=10), make(1, ns=10), last, Result(0)), load("dtr"), Bytes(budget_bytes))
    assert run.overhead == overhead
    assert run.peak_bytes <= budget_bytes


def test_swap_alone_needs_a_link():
    with pytest.raises(BudgetError, match="can only swap, and there is no link"):
        simulate(FOUR_AND_BACK, load("swap"), Bytes(300))


def test_the_clock_tells_how_long_decisions_take():
    ticks = iter(range(10**6))
    run = simulate(FOUR_AND_BACK, load("dtr"), Bytes(300), clock=lambda: next(ticks))
    assert run.decision_ns == next(ticks) // 2, "each event: a tick before and one after"


def test_events_of_replays_and_of_copies_take_their_time_too():
    ticks = iter(range(10))
    replays, transfers = SimpleNamespace(replayed=lambda op: [op]), SimpleNamespace(copied_in=lambda record: [record])
    watch = Stopwatch(
        SimpleNamespace(limit=3, need=lambda record: [record], replays=replays, transfers=transfers),
        lambda: next(ticks),
    )
    assert (watch.need(1), watch.replays.replayed(2), watch.transfers.copied_in(4), watch.limit) == ([1], [2], [4], 3)
    assert (watch.spent_ns, next(ticks)) == (3, 6)


def test_a_storage_in_pieces_makes_more_go():
    """PyTorch's allocator gives a request of less than 1 MiB a segment of 2 MiB: 2 MiB hold no second one, and what is
    free when something has to go is counted."""
    big = 3 * 2**20
    trace = a_trace(make(0, ns=5, nbytes=100), make(1, 0, ns=10, nbytes=big), make(2, 1, 0, ns=10))
    trace = a_trace(*trace.events, Free(0), Free(1), Result(2))
    ideal = simulate(trace, load("dtr"), Bytes(big + 200))
    assert ideal.status is Status.OK and ideal.decisions == 0
    caching = simulate(trace, load("dtr"), Bytes(big + 200), allocator="caching")
    assert caching.status is Status.INFEASIBLE, "3 MiB come in a segment of 20 MiB"
    assert simulate(trace, load("dtr"), Bytes(22 * 2**20), allocator="caching").status is Status.OK


# -- random steps, and a witness --------------------------------------------------------------------------------------
class Witness:
    """Follows the log of a machine, gives every storage a value, and compares what is read with a forward run.

    An op is known by its time: no two of a step are equal. Its results are made of its name and what it read.
    """

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self._trace, self._machine = trace, machine
        self._ops = {event.cost_ns: event for event in trace.events if isinstance(event, Op)}
        self._values: dict[int, Any] = {}
        self._first: dict[int, Any] = {}  # of each storage, the value it was made with
        self._host: dict[int, Any] = {}
        self._truth: dict[int, Any] = {}
        self._seen = 0
        self._constants = (event.storage for event in trace.events if isinstance(event, Constant))
        self._fresh: list[Any] = []

    def begin(self) -> None:
        """A step begins: what every storage of the trace is going to be worth."""
        heirs = {old: new for op in self._ops.values() for old, new in zip(op.overwrites, op.outputs, strict=False)}
        last = self._truth
        self._truth = {}
        for event in self._trace.events:
            if isinstance(event, Constant):
                number = event.storage
                while number in heirs:
                    number = heirs[number]
                self._truth[event.storage] = last.get(number, ("constant", event.storage))
            elif isinstance(event, Op):
                for position, output in enumerate(event.outputs):
                    self._truth[output] = self._made(event, position)

    def _made(self, op: Op, position: int) -> int:
        return hash((op.cost_ns, position, *(self._truth[source] for source in op.inputs)))

    def has(self, record: int) -> None:
        """The program looks at a storage: its value must be there, and the one it was made with."""
        self.follow()
        assert self._values[record] == self._first[record] is not None

    def follow(self) -> None:
        for entry in self._machine.log[self._seen :]:
            self._take(entry)
        self._seen = len(self._machine.log)

    def _take(self, entry: Entry) -> None:
        storage = entry.storages[0] if entry.storages else -1
        match entry.what:
            case "alloc":
                self._values[storage] = None
            case "free":
                del self._values[storage]
            case "out":
                self._host[storage] = self._values[storage]
            case "in":
                self._values[storage] = self._host[storage]
            case "become" if storage in self._first:  # the clone of an old version takes its place
                self._values[storage] = self._values.pop(entry.reads[0])
                assert self._values[storage] == self._first[storage]
            case "become":
                del self._values[entry.reads[0]]
                self._values[storage] = self._first[storage] = self._fresh.pop(0)
            case "encode" | "decode":
                self._values[storage] = self._values[entry.reads[0]]
            case "run" if entry.ended_ns > entry.began_ns:
                self._run(entry)
            case "run" if entry.reads:  # a clone
                self._values[storage] = self._values[entry.reads[0]]
            case "run":
                self._values[storage] = self._first[storage] = self._truth[next(self._constants)]

    def _run(self, entry: Entry) -> None:
        op = self._ops[entry.ended_ns - entry.began_ns]
        assert [self._values[source] for source in entry.reads] == [self._truth[source] for source in op.inputs]
        written = len(op.overwrites) if self._trace.evictable is Evictable.SAVED else 0  # else they are copies
        self._fresh = [self._truth[output] for output in op.outputs[:written]]
        for storage, output in zip(entry.storages, op.outputs[written:], strict=False):
            self._first.setdefault(storage, self._truth[output])
        for storage in entry.storages:
            self._values[storage] = self._first.get(storage)


class Watched(Stopwatch):
    """Before and after each event of the engine: the ledger is whole, and what is handed out is right."""

    witness: Witness

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not callable(found):
            return found

        def watched(*args: Any) -> Any:
            if name == "recording":
                self.witness.begin()
            if name == "served" and args[0] in self.witness._first:
                self.witness.has(self._engine.ledger.resolve(args[0]))
            self.witness.follow()
            result = found(*args)
            self._engine.ledger.validate()
            return result

        setattr(self, name, watched)
        return watched


def watched_run(trace: Trace, policy: Policy, budget: Bytes | Share, link: Link | None, allocator: str) -> Run:
    """`simulate`, with a witness, which knows ops by their times: what copies take from them only the engine counts."""

    def a_machine(allocator: Allocator, link: Link | None) -> Machine:
        machine = Machine(allocator, replace(link, interference=0.0) if link is not None else None)
        Watched.witness = Witness(trace, machine)
        return machine

    with patch.object(simulation, "Machine", a_machine), patch.object(simulation, "Stopwatch", Watched):
        return simulate(trace, policy, budget, link, allocator)


SIZES = st.integers(0, 300)


@st.composite
def steps(draw: st.DrawFn) -> Trace:
    """Everything may go: branches, many results of one op, writes in place, releases in any order."""
    events: list[Event] = [Constant(number, draw(SIZES)) for number in range(draw(st.integers(0, 2)))]
    live, count, constants = list(range(len(events))), len(events), len(events)
    for cost_ns in draw(st.lists(st.integers(1, 500), min_size=1, max_size=16, unique=True)):
        inputs = draw(st.lists(st.sampled_from(live), unique=True, max_size=3)) if live else []
        changeable = [number for number in inputs if number >= constants]
        olds = draw(st.lists(st.sampled_from(changeable), max_size=1)) if changeable else []
        made = tuple(range(count, count + len(olds) + draw(st.integers(0, 3))))
        sizes = tuple(_size(events, old) for old in olds) + tuple(draw(SIZES) for _ in made[len(olds) :])
        events.append(Op("op", tuple(inputs), made, sizes, cost_ns, True, tuple(olds)))
        live = [number for number in live if number not in olds] + list(made)
        count += len(made)
        for gone in draw(st.lists(st.sampled_from(live), unique=True, max_size=2)) if live else []:
            if gone >= constants:
                live.remove(gone)
                events.append(Free(gone))
    return a_trace(*events, *(Result(number) for number in live if number >= constants))


@st.composite
def saved_steps(draw: st.DrawFn) -> Trace:
    """What autograd saved may go: writes in place, constants too, and a backward that asks for all that was saved. What
    that makes may be saved in its turn, as of a gradient's own graph, and be replayed, as of a forward in between."""
    events: list[Event] = [Constant(number, draw(SIZES)) for number in range(draw(st.integers(1, 3)))]
    live, count, saved = list(range(len(events))), len(events), list[int]()
    constants = set(live)
    costs_ns = draw(st.lists(st.integers(1, 500), min_size=2, max_size=20, unique=True))
    forward = draw(st.integers(1, len(costs_ns)))
    for cost_ns in costs_ns[:forward]:
        inputs = draw(st.lists(st.sampled_from(live), unique=True, max_size=3))
        olds = draw(st.lists(st.sampled_from(inputs), unique=True, max_size=1)) if inputs else []
        made = tuple(range(count, count + len(olds) + draw(st.integers(0, 2))))
        sizes = tuple(_size(events, old) for old in olds) + tuple(draw(SIZES) for _ in made[len(olds) :])
        replayable = draw(st.integers(0, 4)) > 0
        events.append(Op("op", tuple(inputs), made, sizes, cost_ns, replayable, tuple(olds)))
        count += len(made)
        heirs = dict(zip(olds, made, strict=False))
        constants |= {heirs[old] for old in olds if old in constants}
        live = [number for number in live if number not in olds] + list(made)
        saved = [heirs.get(number, number) for number in saved]
        for number in draw(st.lists(st.sampled_from(live), max_size=2)) if live else []:
            saved.append(number)
            events.append(Save(number, *draw(encodings(_size(events, number)))))
        for gone in draw(st.lists(st.sampled_from(live), unique=True, max_size=2)) if live else []:
            if gone not in constants:
                live.remove(gone)
                events.append(Free(gone))
    events.append(Backward())
    for cost_ns in costs_ns[forward:]:
        asked = draw(st.lists(st.sampled_from(saved), unique=True, max_size=2)) if saved else []
        events += [Need(number) for number in asked]
        beside = draw(st.lists(st.sampled_from(live), max_size=1)) if live else []
        read = tuple(dict.fromkeys([*asked, *beside]))
        events.append(Op("back", read, (count,), (draw(SIZES),), cost_ns, draw(st.booleans())))
        for number in asked:
            saved.remove(number)
            events.append(Unsave(number))
        live.append(count)
        if draw(st.integers(0, 3)) == 0:
            saved.append(count)
            events.append(Save(count, *draw(encodings(_size(events, count)))))
        count += 1
    events += [Unsave(number) for number in saved]
    return a_trace(*events, *(Result(number) for number in live if number > max(constants)), evictable=Evictable.SAVED)


def _size(events: list[Event], number: int) -> int:
    for event in events:
        if isinstance(event, Constant) and event.storage == number:
            return event.nbytes
        if isinstance(event, Op) and number in event.outputs:
            return event.nbytes[event.outputs.index(number)]
    raise AssertionError(number)


MORE: list[list[str]] = [[], ["recompute"], ["swap"], ["swap", "recompute"]]
POLICIES = [
    *(load("dtr", overrides={"filter.cost": cost}) for cost in ("own", "ancestors", "classes", "neighbourhood")),
    *(
        load(name, overrides={"filter.min_bytes": 0})
        for name in ("delta", "delta-paper", "mimose", "recompute", "swap", "optimal-checkpoint", "capuchin")
    ),
    load("delta", overrides={"filter.min_bytes": 0, "planner.kind": "none"}),
    *(load("delta", overrides={"filter.min_bytes": 0, "director.actions": ["keep", "encode", *more]}) for more in MORE),
    load("dtr", overrides={"director.actions": ["keep", "encode", "recompute"]}),
    load("delta", overrides={"filter.min_bytes": 0, "replay.sources": "drop", "replay.results": "hold"}),
    *(load("coop", overrides={"filter.cost": cost}) for cost in ("ancestors", "makers")),
    load("coop", overrides={"director.actions": ["keep", "swap", "recompute"]}),
]
LINKS = [Link(1e9, 1e9), Link(20e9, 5e9), Link(5e9, 50e9, 0.3), Link(20e9, 20e9, copy_ns=3)]
CHECKED = settings(deadline=None, suppress_health_check=list(HealthCheck))


@CHECKED
@given(
    steps(),
    st.sampled_from(POLICIES),
    st.floats(0.3, 1.0),
    st.sampled_from(LINKS),
    st.booleans(),
    st.sampled_from(sorted(ALLOCATORS)),
)
def test_no_value_is_ever_lost_or_stale(trace, policy, share, link, linked, allocator):
    """Whatever the step, every op reads the right bytes, and memory stays under the budget."""
    link = link if linked or policy.name == "swap" else None
    allocator = "slab" if policy.filter.choose == "window" and allocator == "ideal" else allocator
    try:
        run = watched_run(trace, policy, Share(share), link, allocator)
    except BudgetError as error:
        assert "largest op" in str(error)
        return
    assert run.status in Status
    assert run.peak_bytes <= run.budget_bytes
    if run.status is Status.OK:
        assert run.total_ns == run.base_ns + run.recomputed_ns + run.stall_ns
        assert run.recomputed_ns <= run.base_ns


@CHECKED
@given(saved_steps(), st.sampled_from(POLICIES), st.floats(0.2, 1.0), st.sampled_from(LINKS), st.booleans())
def test_no_saved_value_is_ever_lost_or_stale(trace, policy, share, link, own):
    trace = replace(trace, bookkeeping=Bookkeeping(1, 2, 3, 4, 5) if own else FREE)
    allocator = "caching" if policy.filter.choose == "window" else "ideal"
    run = watched_run(trace, policy, Share(share), link, allocator)
    assert run.status in Status
    if run.status is Status.OK:
        assert run.peak_bytes <= run.budget_bytes
        assert run.total_ns == (run.base_ns + run.recomputed_ns + run.stall_ns + run.encoding_ns + run.bookkeeping_ns)


OWN = Bookkeeping(op_ns=1, passed_ns=20, save_ns=300, need_ns=4_000, release_ns=50_000)


def test_delta_s_own_work_takes_its_time():
    """Four storages of 80 bytes, each made, saved, needed and released once; one or two are replayed."""
    masks = replace(a_trace(*map(_recomputable, MASKS.events), evictable=Evictable.SAVED), bookkeeping=OWN)
    online = load("recompute", overrides={"filter.min_bytes": 0, "planner.kind": "none"})
    run = watched_run(masks, online, Bytes(260), None, "ideal")
    assert run.recomputed_ns == 10 + 11
    # A replay is taken for a need and an op that is recorded, and an eviction for a release.
    assert run.bookkeeping_ns == 4 * (1 + 300 + 4_000 + 50_000) + 2 * (4_000 + 1 + 50_000)
    assert run.total_ns == run.base_ns + run.recomputed_ns + run.bookkeeping_ns
    planned = watched_run(masks, load("recompute", overrides={"filter.min_bytes": 0}), Bytes(260), None, "ideal")
    assert planned.recomputed_ns < 20, "one replay"
    # What is not replayed needs no recipe, and what is kept is only counted.
    counted = 3 * (300 + 4_000 + 50_000) * (1 - COUNTED)
    assert planned.bookkeeping_ns == run.bookkeeping_ns - 54_001 + 3 * (20 - 1) - counted


def test_a_step_that_fits_costs_nothing():
    run = simulate(replace(MASKS, bookkeeping=OWN), load("delta"), Bytes(1000), None)
    assert (run.bookkeeping_ns, run.total_ns) == (0, run.base_ns)


def _recomputable(event: Event) -> Event:
    match event:
        case Op():
            return replace(event, replayable=True)
        case Save():
            return Save(event.storage)
    return event


MASKS = a_trace(
    *(
        event
        for number in range(4)
        for event in (Op("op", (), (number,), (80,), 10 + number, False), Save(number, 10, 3, 4), Free(number))
    ),
    Backward(),
    *(event for number in (3, 2, 1, 0) for event in (Need(number), Unsave(number))),
    evictable=Evictable.SAVED,
)


@pytest.mark.parametrize("kind", ["none", "profile"])
def test_what_delta_takes_for_a_replay_is_part_of_its_price(kind):
    """Three ops save 100 bytes each, and there is room for two. A copy out and back takes 100 ns from compute, the
    cheapest replay 10, and 130 with what Delta takes for it: to record its op, and for a need."""
    events: list[Event] = [Constant(0, 8)]
    for number, cost_ns in enumerate((40, 10, 20), start=1):
        events += [make(number, 0, ns=cost_ns), Save(number), Free(number)]
    events.append(Backward())
    for number in (3, 2, 1):
        events += [Need(number), Op("back", (number,), (), (), 100), Unsave(number)]
    trace, link = a_trace(*events, evictable=Evictable.SAVED), replace(LINK, copy_ns=50)
    policy = load("delta", {"filter.min_bytes": 0, "planner.kind": kind})
    free = simulate(trace, policy, Bytes(220), link)
    own = simulate(replace(trace, bookkeeping=Bookkeeping(op_ns=60, need_ns=60)), policy, Bytes(220), link)
    assert (free.swapped_bytes, own.recomputed_ns) == (0, 0)
    assert free.recomputed_ns > 0 < own.swapped_bytes


def test_what_has_a_smaller_form_is_kept_in_it():
    """Four storages of 80 bytes, each of which can be kept in 10."""
    policy = load("delta", overrides={"filter.min_bytes": 0, "director.actions": ["keep", "encode"]})
    run = watched_run(MASKS, policy, Bytes(260), None, "ideal")
    assert run.status is Status.OK
    assert run.encoding_ns in (7, 14)
    assert run.total_ns == run.base_ns + run.encoding_ns
    assert simulate(MASKS, policy, Bytes(410), None).encoding_ns == 0  # room for one more, and its form
    least = watched_run(MASKS, policy, Bytes(122), None, "ideal")
    assert (least.status, least.encoding_ns, least.peak_bytes) == (Status.OK, 21, 120)
    assert simulate(MASKS, policy, Bytes(119), None).status is Status.INFEASIBLE


def test_the_witness_sees_a_stale_value():
    """A machine that forgets what a replay makes: the witness has to complain."""
    take = Witness._take

    def wrong(self: Witness, entry: Entry) -> None:
        take(self, entry)
        if entry.what == "run" and entry.ended_ns - entry.began_ns == 10 and entry.began_ns > 50:
            self._values[entry.storages[0]] = "stale"

    with patch.object(Witness, "_take", wrong), pytest.raises(AssertionError, match="stale"):
        watched_run(FOUR_AND_BACK, load("dtr"), Bytes(300), None, "ideal")
    watched_run(FOUR_AND_BACK, load("dtr"), Bytes(300), None, "ideal")


# -- DTR, written twice -----------------------------------------------------------------------------------------------
def nets(tmp_path: Any) -> Iterator[Trace]:
    """No two sizes or times are equal, so no two scores are. In each net all that is made leads to the one result, so
    that Delta never forgets a storage that DTR would still count.

    (Where a storage leads to nothing that anybody can ask for, Delta forgets it, and what is connected by it alone is
    connected no more. The authors' simulator keeps it as evicted until the end.)
    """
    for seed in range(6):
        yield read(random_net(8 + 3 * seed, seed).write(tmp_path / f"net{seed}.log"))


@pytest.mark.parametrize("cost", ["own", "classes", "neighbourhood"])
def test_dtr_is_dtr(tmp_path, cost):
    policy = load("dtr", overrides={"filter.cost": cost})
    ended = 0
    for trace in nets(tmp_path):
        for share in (0.9, 0.7, 0.55, 0.45, 0.35):
            run = simulate(trace, policy, Share(share))
            if run.status is Status.OK:
                assert run.total_ns == Dtr(trace, run.budget_bytes, cost).run(), (trace.name, share)
                ended += run.decisions > 0
            elif run.status is Status.INFEASIBLE:
                with pytest.raises(Stuck):
                    Dtr(trace, run.budget_bytes, cost).run()
            else:
                assert Dtr(trace, run.budget_bytes, cost).run() > 2 * trace.base_ns
    assert ended > 10, "most runs end, with evictions"
