"""The ranking picks whom a look at all would pick: every eviction of whole simulated steps, every score and cost."""

import dataclasses
from itertools import accumulate, pairwise
from math import inf
from types import SimpleNamespace

import pytest
from builders import a_ledger
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from logs import random_net, residual_net
from test_simulate import saved_steps, steps

from delta.budget import Budget
from delta.candidates import Candidates
from delta.config import Policy, Rule
from delta.costs import LinkQueue, closure_ns, own_ns
from delta.director import Director, Prospect
from delta.engine import Engine
from delta.errors import BudgetError
from delta.filter import SCORES, Candidate, Victims, rested
from delta.nextuse import NextUse
from delta.record import Host
from delta.simulate import simulate
from delta.trace import Trace, read
from delta.trace.events import Op
from delta.types import Action, Cost, Kind, Link, OpInfo, SwapOut
from delta.units import Bytes, Share

LINK = Link(20e9, 5e9)


def a_policy(score: str, cost: str = "own", planner: str = "none", actions=("recompute",), **replay: str) -> Policy:
    return Policy.model_validate(
        {
            "name": f"{score} {cost} {planner}",
            "filter": {"score": score, "cost": cost, "min_bytes": 0},
            "director": {"actions": ["keep", *actions]},
            "planner": {"kind": planner},
            "replay": {"sources": "drop", "results": "hold"} | replay,
        }
    )


RECOMPUTE = [
    *(a_policy(score, cost) for score in ("dtr", "delta") for cost in Cost),
    *(a_policy(score) for score in ("msps", "coop", "lru", "size", "size-staleness", "delta-paper")),
    a_policy("msps", "ancestors"),
    a_policy("delta", "action", "profile"),
    a_policy("delta", "classes", "profile", sources="hold", results="drop"),
]
SWAP = [
    *(a_policy(score, "action", actions=("swap", "recompute")) for score in ("delta", "dtr", "msps", "coop")),
    *(a_policy(score, "action", "profile", actions=("swap", "recompute")) for score in ("delta", "dtr")),
    a_policy("delta", "action", "profile", actions=("swap",)),
    a_policy("delta-paper", "action", actions=("swap", "recompute")),
    a_policy("delta", "classes", "profile", actions=("swap", "recompute")),
    a_policy("dtr", "neighbourhood", actions=("swap", "recompute")),
    a_policy("lru", "action", "profile", actions=("swap", "recompute")),
]
NAMES = {"ids": lambda policy: policy.name}


def by_looking(room: Candidates, now_ns: int):
    """The filter's first choice, with every cost counted anew, and all scores."""
    best_score, best, scores = inf, None, {}
    for record in room._ledger.held:
        rec = room._ledger[record]
        if not room.may_go(rec):
            continue
        above_ns = own_ns(room._ledger, record) + closure_ns(room._ledger, record, room._ledger.parents)
        op = room._ledger.ops.get(rec.op)
        replayable = op is not None and op.replayable and record not in room._stuck and not room._copied_rather(rec)
        until_ns = room._next_use.until_ns(rec)
        prospect = Prospect(
            rec.nbytes,
            *room.makers.get(record, ("", "")),
            above_ns if replayable and Action.RECOMPUTE in room._policy.director.actions else None,
            rec.host is Host.WHOLE,
            not room.host_full,
            now_ns,
            now_ns + (now_ns - rec.used_ns if until_ns is None else until_ns),
        )
        choice = room.director.choose(prospect, room._queue)
        if choice is None:
            continue
        cost_ns = {
            Cost.ACTION: lambda choice=choice: choice.cost_ns,
            Cost.OWN: lambda record=record: own_ns(room._ledger, record),
            Cost.ANCESTORS: lambda above_ns=above_ns: above_ns,
            Cost.NEIGHBOURHOOD: lambda record=record, above_ns=above_ns: (
                above_ns + closure_ns(room._ledger, record, room._ledger.children)
            ),
            Cost.MAKERS: lambda record=record: room._costs._chains.cost_ns(
                own_ns(room._ledger, record), (*room._ledger.parents(record), *room._ledger.siblings(record))
            ),
            Cost.CLASSES: lambda record=record: room._costs._chains.cost_ns(
                own_ns(room._ledger, record), (*room._ledger.parents(record), *room._ledger.children(record))
            ),
        }[room._policy.filter.cost]()
        score = SCORES[room._policy.filter.score](
            Candidate(record, rec.nbytes, cost_ns, now_ns - rec.used_ns, until_ns)
        )
        scores[record] = score
        if score <= best_score:
            best_score, best = score, (choice, rec)
    return best, scores


@pytest.fixture
def compared(monkeypatch):
    """Every answer of the ranking beside that of a look at all. Gives the list of them. No two sizes count as one."""
    monkeypatch.setattr(rested, "SIGNIFICANT_BITS", 64)
    answers = []
    ranked = Candidates._best

    def both(self, now_ns, room_bytes):
        assert self._victims is not None
        (seen, scores), found = by_looking(self, now_ns), ranked(self, now_ns, room_bytes)
        if found and seen and self._rested is not None:  # by a score that no rest matters to, many are equal
            assert scores[found[1].id] == scores[seen[1].id]
        else:
            assert (found and (found[0].action, found[1].id)) == (seen and (seen[0].action, seen[1].id))
        answers.append(found)
        return found

    monkeypatch.setattr(Candidates, "_best", both)
    return answers


def play(trace: Trace, policy: Policy, share: float, link: Link | None) -> None:
    try:
        simulate(trace, policy, Share(share), link)
    except BudgetError as error:
        assert "largest op" in str(error)


@pytest.mark.parametrize(("policy", "link"), [*((p, None) for p in RECOMPUTE), *((p, LINK) for p in SWAP)], ids=str)
def test_whole_steps_of_residual_nets(policy, link, compared, tmp_path):
    equal = residual_net(20, sizes=[100] * 20, costs_ns=[50] * 20)  # among equals the one used last
    for log, share in ((random_net(30, seed=1), 0.5), (random_net(30, seed=2), 0.35), (equal, 0.5)):
        play(read(log.write(tmp_path / "net.log")), policy, share, link)
    assert len(compared) > 20


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(steps() | saved_steps(), st.sampled_from([*RECOMPUTE, *SWAP]), st.floats(0.25, 0.9), st.sampled_from([1, 100]))
def test_any_step(compared, trace, policy, share, grain_ns):
    """Also with times so coarse that many are equal, or nothing."""
    events = (
        dataclasses.replace(event, cost_ns=event.cost_ns // grain_ns * grain_ns) if isinstance(event, Op) else event
        for event in trace.events
    )
    trace = dataclasses.replace(trace, events=tuple(events))
    assume(trace.base_ns)
    play(trace, policy, share, LINK if Action.SWAP in policy.director.actions else None)


COUNT = 6  # the first four of these are saved


def a_plan(needs: list[int], steps_ns: list[int]) -> SimpleNamespace:
    """A step whose needs are known: these save orders, so long after each other."""
    by_order = (tuple(at for at, order in enumerate(needs) if order == saved) for saved in range(4))
    return SimpleNamespace(next_needs=tuple(by_order), need_ns=tuple(accumulate(steps_ns[: len(needs)])))


PLANS = st.builds(
    a_plan, st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 90), min_size=20, max_size=20)
)


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(st.data())
def test_the_next_use_is_told_in_the_time_of_the_plan(data):
    """Needs are met, plans come and go, and some records are in no plan: the smallest score is found all the same."""
    ledger = a_ledger(data.draw(st.lists(st.integers(1, 10**6), min_size=COUNT, max_size=COUNT, unique=True)))
    costs_ns = data.draw(st.lists(st.integers(0, 10**6), min_size=COUNT, max_size=COUNT))
    for record in range(COUNT):
        if record < 4:
            ledger.save(record, record)
        ledger.hold(record)
    learner = SimpleNamespace(plan=None, position=0)
    next_use = NextUse(learner)
    victims = Victims("delta", ledger, lambda rec: costs_ns[rec.id] if rec.held else None, next_use)

    def score(record: int) -> float:
        rec = ledger[record]
        stale_ns = now_ns - rec.used_ns
        return SCORES["delta"](Candidate(record, rec.nbytes, costs_ns[record], stale_ns, next_use.until_ns(rec)))

    now_ns = 0
    for what in data.draw(st.lists(st.sampled_from(["plan", "need", "need", "use", "turn"]), max_size=40)):
        now_ns += data.draw(st.integers(0, 1000))
        record = data.draw(st.integers(0, COUNT - 1))
        if what == "plan":
            learner.plan = data.draw(st.none() | PLANS)
        elif what == "need":
            learner.position += 1
        elif what == "use":
            ledger.use(record, now_ns)
        elif not ledger[record].held:
            ledger.hold(record)
        elif not ledger[record].handles:
            ledger.let_go(record)
        first = victims.first(now_ns)
        assert first is not None and score(first.id) <= min(map(score, ledger.held)) * (1 + 1e-12)


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(st.data())
def test_the_first_to_be_swapped_has_rested_longest_of_its_size(data):
    """Whatever the queue on the link, with and without a plan, copied to the host before or not."""
    ledger = a_ledger(data.draw(st.lists(st.sampled_from([100, 200]), min_size=COUNT, max_size=COUNT)))
    for record in range(COUNT):
        if record < 4:
            ledger.save(record, record)
        ledger.hold(record)
    learner = SimpleNamespace(plan=None, position=0)
    next_use, queue, director = NextUse(learner), LinkQueue(Link(1e9, 1e9)), Director((Action.SWAP,))
    rested_longest = rested.Rested(ledger, lambda rec: rec.host in (Host.NONE, Host.WHOLE), next_use)

    def score(record: int) -> float:
        rec, until_ns = ledger[record], next_use.until_ns(ledger[record])
        stale_ns = now_ns - rec.used_ns
        use_ns = now_ns + (stale_ns if until_ns is None else until_ns)
        whole = rec.host is Host.WHOLE
        choice = director.choose(Prospect(rec.nbytes, "", "", None, whole, True, now_ns, use_ns), queue)
        return SCORES["delta"](Candidate(record, rec.nbytes, choice.cost_ns, stale_ns, until_ns))

    now_ns = 0
    for what in data.draw(st.lists(st.sampled_from(["plan", "need", "use", "use", "host", "queue"]), max_size=40)):
        now_ns += data.draw(st.integers(0, 300))
        record = data.draw(st.integers(0, COUNT - 1))
        if what == "plan":
            learner.plan = data.draw(st.none() | PLANS)
        elif what == "need" and learner.plan is not None:
            known = [order for order, needs in enumerate(learner.plan.next_needs) if learner.position in needs]
            learner.position += 1
            for order in known:
                ledger.use(order, now_ns)
        elif what == "use":
            ledger.use(record, now_ns)
        elif what == "host":
            state = {Host.NONE: Host.LEAVING, Host.LEAVING: Host.WHOLE, Host.WHOLE: Host.NONE}
            ledger.set_host(record, state[ledger[record].host])
        elif what == "queue":
            queue.begin_out(data.draw(st.integers(0, 500)), now_ns)
        found = list(rested_longest.first())
        ledger.touched.clear()
        may_go = [record for record in ledger.held if ledger[record].host in (Host.NONE, Host.WHOLE)]
        if may_go:
            assert min(map(score, found)) == min(map(score, may_go))
        else:
            assert not found


def test_what_costs_nothing_waits_until_it_has_been_idle():
    """By DTR's score what has just been used goes last, whatever it costs; a moment later what costs nothing is
    first."""
    ledger = a_ledger([10, 10])
    for record, used_ns in ((0, 5), (1, 7)):
        ledger.hold(record)
        ledger.use(record, used_ns)
    victims = Victims("dtr", ledger, lambda rec: 3 * (1 - rec.id), None)
    assert victims.first(7).id == 0
    assert victims.first(8).id == 1


def test_sizes_that_count_as_one_are_less_than_a_sixteenth_apart():
    """Of 3,000 sizes few are looked at, and of each the one used first; what comes to rest later does not take its
    place, and what may not be swapped is not looked at."""
    sizes = [2**20 + 400 * number for number in range(3000)]
    ledger = a_ledger(sizes)
    for record in range(len(sizes)):
        ledger.hold(record)
        ledger.use(record, 10 + record)
    kept = {0}
    rested_longest = rested.Rested(ledger, lambda rec: rec.id not in kept, NextUse(SimpleNamespace(plan=None)))

    def first() -> list[int]:
        found = sorted(rested_longest.first())
        ledger.touched.clear()
        return found

    before = first()
    assert before[0] == 1 and len(before) <= 20
    assert all(sizes[b - 1] < sizes[a] * 17 / 16 for a, b in pairwise(before))
    ledger.use(before[3], 10**6)
    assert first() == [*before[:3], before[3] + 1, *before[4:]]
    kept.clear()
    ledger.touched.add(0)
    assert first()[0] == 0


def test_a_step_that_never_ends_is_not_remembered_whole(monkeypatch):
    monkeypatch.setattr(rested, "_FEW", 3)
    ledger = a_ledger([100] * 4)
    for record in range(4):
        ledger.hold(record)
        ledger.use(record, record)
    rested_longest = rested.Rested(ledger, lambda rec: True, NextUse(SimpleNamespace(plan=None)))
    for now_ns in range(10, 200):
        ledger.use(1 + now_ns % 3, now_ns)  # never record 0, which stays first
        assert list(rested_longest.first()) == [0]
        ledger.touched.clear()
        assert sum(map(len, rested_longest._heaps.values())) <= 2 * 4 + 3
    ledger.use(0, 1000)
    assert list(rested_longest.first()) == [3]


def test_a_rule_against_a_swap_does_not_hide_the_next_in_rest():
    """Op a is used before op b, of the same size; a may only be replayed, which takes long."""
    policy = a_policy("delta", "action", actions=("swap", "recompute")).model_copy(
        update={"rules": (Rule(op="a", action=Action.RECOMPUTE),)}
    )
    engine = Engine(policy, Budget(activations=Bytes(1 << 62)), LINK, True)
    engine.recording(True)
    for record, name in enumerate("ab"):
        engine.created(record, 100, Kind.ACTIVATION, record)
        engine.op_ran(OpInfo(record, name, (), (record,), 10**9, True), record)
        engine.saved(record, 100, record)
    assert engine.make_place(1, 10) == [SwapOut(1, True)]


def test_by_another_score_than_delta_a_plan_does_not_tell_who_rests():
    """Two of one size, used at 1 and 2: the one that is used next first has been idle longest, which `dtr` goes by."""
    ledger = a_ledger([100, 100])
    for record in (0, 1):
        ledger.save(record, record)
        ledger.hold(record)
        ledger.use(record, 1 + record)
    plan = SimpleNamespace(next_needs=((1,), (2,)), need_ns=(0, 10**6, 2 * 10**6))
    learner = SimpleNamespace(plan=plan, position=0)
    policy = a_policy("dtr", "action", actions=("swap",))
    _, first = Candidates(policy, ledger, LinkQueue(Link(1e9, 1e9)), learner).first(1000, 0, False)
    assert first.id == 0


def test_what_has_been_used_since_an_event_began_has_not_been_idle():
    """A need brings back what is used later than it was asked for."""
    ledger = a_ledger([100])
    ledger.save(0, 0)
    ledger.hold(0)
    ledger.use(0, 40)
    learner = SimpleNamespace(plan=None, position=0)
    policy = a_policy("delta", "action", actions=("swap",))
    assert Candidates(policy, ledger, LinkQueue(Link(1e9, 1e9)), learner).first(20, 0, False) is not None
