"""The walk to a missing record: which op is replayed when, what is pinned on the way, and that nothing stays pinned."""

from __future__ import annotations

import pytest
from builders import a_chain, a_ledger, an_op
from hypothesis import given
from hypothesis import strategies as st

from delta.descent import PATIENCE, Descent
from delta.ledger import Ledger
from delta.record import LedgerError
from delta.types import OpInfo


def without(ledger: Ledger, *records: int) -> Ledger:
    """Nobody has these storages any more; Delta holds all others, and every record is wanted."""
    for record in ledger.records:
        ledger.save(record, record)
        if record in records:
            ledger.gone(record)
        else:
            ledger.hold(record)
    return ledger


def walk(ledger: Ledger, record: int) -> list[int]:
    """The ops that bring the record back, in order; each is carried out."""
    descent, ran = Descent(ledger), list[int]()
    descent.begin(record, 0)
    while (op := descent.next(0)) is not None:
        ran.append(op.id)
        replay(ledger, op)
        done(descent)
    assert descent.abandon() == []
    return ran


def done(descent: Descent) -> None:
    descent.ran()
    descent.go_on()


def replay(ledger: Ledger, op: OpInfo) -> None:
    assert all(ledger[source].held and ledger[source].pins for source in op.inputs)
    for output in op.outputs:
        if not ledger[output].held:
            ledger.hold(output)


def test_a_chain_is_made_from_the_last_one_that_is_there():
    ledger = without(a_chain([1] * 6), 2, 3, 4)
    assert walk(ledger, 4) == [101, 102, 103]
    assert all(not rec.pins for rec in ledger.records.values())


def test_what_is_there_needs_nothing():
    assert walk(without(a_chain([1] * 3)), 2) == []


def test_what_both_sides_of_a_diamond_need_is_made_once():
    """4 = f(2, 3), 2 = f(1), 3 = f(1), 1 = f(0): depth first, the first input first."""
    ops = [an_op(10, [0], [1]), an_op(11, [1], [2]), an_op(12, [1], [3]), an_op(13, [3, 2], [4])]
    ledger = without(a_ledger([1] * 5, ops), 1, 2, 3, 4)
    assert walk(ledger, 4) == [10, 12, 11, 13]


def test_an_op_of_many_results_runs_once():
    ledger = without(a_ledger([1] * 4, [an_op(10, [0], [1, 2]), an_op(11, [1, 2], [3])]), 1, 2, 3)
    assert walk(ledger, 3) == [10, 11]


def test_what_an_op_on_the_way_reads_is_pinned_until_it_has_run():
    """2 = f(1, 0), 1 = f(0): 0 is read twice, by both ops on the way."""
    ledger = without(a_ledger([1] * 3, [an_op(10, [0], [1]), an_op(11, [1, 0], [2])]), 1, 2)
    descent = Descent(ledger)
    descent.begin(2, 7)
    assert [ledger[record].pins for record in (0, 1)] == [1, 1]
    op = descent.next(8)
    assert op is not None and op.id == 10
    assert [ledger[record].pins for record in (0, 1)] == [2, 1]
    assert (ledger[0].used_ns, ledger[1].used_ns) == (8, 7)
    assert descent.wants(0) and descent.wants(1)
    replay(ledger, op)
    done(descent)
    assert [ledger[record].pins for record in (0, 1)] == [1, 1]
    assert descent.wants(0), "op 11 is going to read it"


def test_what_went_again_meanwhile_is_made_again():
    """1 is made for 3 = f(2, 1); before 3 runs, room is short and 1, not pinned by 2's op, would have to stay: it is
    pinned by 3's. But 2, made first, goes while nobody has it pinned, and comes once more."""
    ops = [an_op(10, [0], [1]), an_op(11, [1], [2]), an_op(12, [2], [3])]
    ledger = without(a_ledger([1] * 4, ops), 1, 2, 3)
    descent, ran = Descent(ledger), list[int]()
    descent.begin(3, 0)
    dropped = False
    while (op := descent.next(0)) is not None:
        ran.append(op.id)
        replay(ledger, op)
        done(descent)
        if op.id == 11 and not dropped:
            dropped = True
            assert (ledger[1].pins, ledger[2].pins) == (0, 1)
            ledger.let_go(1)
            ledger.gone(1)
    assert ran == [10, 11, 12]
    assert walk(ledger, 1) == [10]


def test_giving_up_in_the_middle_leaves_nothing_pinned():
    ledger = without(a_chain([1] * 5), 2, 3, 4)
    descent = Descent(ledger)
    descent.begin(4, 0)
    op = descent.next(0)
    assert op is not None and op.id == 101
    assert sorted(descent.abandon()) == [1, 2, 3]
    assert all(not rec.pins for rec in ledger.records.values())
    assert descent.next(0) is None and not descent.wants(2)


def walk_without_room(descent: Descent, ledger: Ledger, record: int, kept: set[int]) -> int:
    """Bring the record back, with all that may go gone before each replay but what is in `kept`. Returns the replays;
    in the ledger then only those and the record are there."""
    replays = 0
    descent.begin(record, 0)
    while (op := descent.next(0)) is not None:
        replays += 1
        let_go(ledger, kept)
        replay(ledger, op)
        done(descent)
    descent.abandon()
    assert all(not rec.pins for rec in ledger.records.values())
    assert ledger[record].held
    let_go(ledger, kept | {record})
    ledger.validate()
    return replays


def let_go(ledger: Ledger, kept: set[int]) -> None:
    for rec in list(ledger.records.values()):
        if rec.held and not rec.pins and rec.id not in kept:
            ledger.let_go(rec.id)
            ledger.gone(rec.id)


def a_recurrence(places: int) -> tuple[Ledger, int]:
    """A state that two branches of two ops read at each place; only the first is there. Returns the last state too."""
    ops, state = [], 0
    for _ in range(places):
        a, b, c, d, after = range(state + 1, state + 6)
        ops += [an_op(10 + a, [state], [a]), an_op(10 + b, [a], [b])]
        ops += [an_op(10 + c, [state], [c]), an_op(10 + d, [c], [d]), an_op(10 + after, [b, d], [after])]
        state = after
    return without(a_ledger([1] * (state + 1), ops), *range(1, state + 1)), state


def test_a_walk_that_makes_the_same_again_and_again_comes_to_hold_what_it_wants():
    """Were it never to hold on to anything, each place would double the replays: 327,675 of them for 16."""
    ledger, last = a_recurrence(16)
    missing = len(ledger.missing_ops(last))
    assert PATIENCE * missing < walk_without_room(Descent(ledger), ledger, last, {0}) <= (PATIENCE + 1) * missing


def test_until_then_what_is_not_on_the_way_may_go():
    """The state 5 has been read by the one branch, and the other is going to read it."""
    ledger, last = a_recurrence(2)
    descent = Descent(ledger)
    descent.begin(last, 0)
    while (op := descent.next(0)) is not None and op.outputs != (7,):
        replay(ledger, op)
        done(descent)
    assert ledger[6].held and descent.wants(5)
    assert ledger[5].pins == 0


def test_after_it_the_walks_of_the_step_hold_what_they_want_at_once():
    ledger, last = a_recurrence(16)
    descent = Descent(ledger)
    walk_without_room(descent, ledger, last, {0})
    let_go(ledger, {0})
    missing = len(ledger.missing_ops(last))
    assert walk_without_room(descent, ledger, last, {0}) == missing
    descent.new_step()
    let_go(ledger, {0})
    assert walk_without_room(descent, ledger, last, {0}) > PATIENCE * missing


def in_a_hasty_walk() -> tuple[Ledger, Descent]:
    """A recurrence, and a walk to its last state that has begun after another has run out of patience."""
    ledger, last = a_recurrence(16)
    descent = Descent(ledger)
    walk_without_room(descent, ledger, last, {0})
    let_go(ledger, {0})
    descent.begin(last, 0)
    return ledger, descent


def test_a_hasty_walk_lets_go_of_what_it_has_read():
    ledger, descent = in_a_hasty_walk()
    while (op := descent.next(0)) is not None:
        let_go(ledger, {0})
        assert sum(rec.held for rec in ledger.records.values()) <= 5, "the first state, and one place"
        replay(ledger, op)
        done(descent)
    assert descent.abandon() == []
    assert all(not rec.pins for rec in ledger.records.values())


def test_a_hasty_walk_that_is_given_up_leaves_nothing_pinned():
    ledger, descent = in_a_hasty_walk()
    unread = [rec.id for rec in ledger.records.values() if not rec.pins]
    assert unread == [max(ledger.records)], "all but the last state are read"
    descent.abandon()
    assert all(not rec.pins for rec in ledger.records.values())


def test_a_step_that_ends_during_a_walk_leaves_nothing_pinned():
    """The last tensor of a step may be let go of while one that is left over from another is brought back."""
    ledger, descent = in_a_hasty_walk()
    descent.new_step()
    while (op := descent.next(0)) is not None:
        replay(ledger, op)
        done(descent)
    descent.abandon()
    assert all(not rec.pins for rec in ledger.records.values())


def test_what_no_op_can_make_is_an_error():
    ledger = a_ledger([1] * 2, [an_op(10, [0], [1], replayable=False)])
    ledger.gone(0)
    ledger.gone(1)
    with pytest.raises(LedgerError, match="record 0 is gone and cannot be replayed"):
        Descent(ledger).begin(0, 0)
    with pytest.raises(LedgerError, match="record 1 is gone and cannot be replayed"):
        Descent(ledger).begin(1, 0)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Ledger, int]:
    """Ops that read what is before them, and anything gone but the first record."""
    count = draw(st.integers(2, 12))
    ops = [
        an_op(10 + number, draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=3)), [number])
        for number in range(1, count)
    ]
    gone = draw(st.sets(st.integers(1, count - 1)))
    return without(a_ledger([1] * count, ops), *gone), draw(st.integers(1, count - 1))


@given(graphs())
def test_every_op_runs_when_all_it_reads_is_there_and_only_what_is_missing_runs(graph):
    ledger, record = graph
    missing = [op.id for op in ledger.missing_ops(record)]
    assert sorted(walk(ledger, record)) == missing  # `replay` looks at what each reads
    assert ledger[record].held
    assert all(not rec.pins for rec in ledger.records.values())
    ledger.validate()


@given(graphs())
def test_a_walk_without_room_ends(graph):
    ledger, record = graph
    kept = {0} | {rec.id for rec in ledger.records.values() if rec.held}
    missing = len(ledger.missing_ops(record))
    assert walk_without_room(Descent(ledger), ledger, record, kept) <= (PATIENCE + 1) * missing


def test_what_a_replay_has_spoiled_is_made_again_where_the_walk_runs_out_of_patience_then():
    """The op that overwrites 1 is the one with which patience is at its end, and another one is still to read 1."""
    ops = [an_op(10, [0], [1]), an_op(11, [1], [2], overwrites=(1,)), an_op(12, [1], [3]), an_op(13, [2, 3], [4])]
    ledger = without(a_ledger([1] * 5, ops), 1, 2, 3, 4)
    descent, ran = Descent(ledger), list[int]()
    descent.begin(4, 0)
    descent._patience = 2
    while (op := descent.next(0)) is not None:
        ran.append(op.id)
        replay(ledger, op)
        descent.ran()
        if op.id == 11:
            assert not ledger[1].pins
            ledger.let_go(1)
            ledger.gone(1)
        descent.go_on()
    assert ran == [10, 11, 10, 12, 13]
    descent.abandon()
    assert all(not rec.pins for rec in ledger.records.values())
