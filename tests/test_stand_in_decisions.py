"""Stand-ins: forms that answer the op that made a storage and nobody else. Decisions by hand; units: bytes, ns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import a_chain, a_ledger
from test_planner import chain_log
from toy import LINK, Toy

from delta.ledger import Ledger
from delta.planner import forecast
from delta.planner.greedy import plan_step
from delta.planner.steplog import StepGraph, build_graph
from delta.record import LedgerError
from delta.types import (
    Action,
    Cost,
    Decode,
    Drop,
    Encode,
    Encoding,
    Forget,
    Hold,
    Instruction,
    Kind,
    Link,
    Preserve,
    Release,
)
from delta.units import Bytes

KEEP, SWAP, RECOMPUTE, ENCODE = Action.KEEP, Action.SWAP, Action.RECOMPUTE, Action.ENCODE
BITS = Encoding(10, 3, 4, stand_in=True)  # of 80 bytes


# -- the ledger -------------------------------------------------------------------------------------------------------
def stood_in_ledger() -> Ledger:
    """Source 0, and records 1 and 2 made one out of the other, both saved; 10 bytes stand in for 1."""
    ledger = a_chain([8, 80, 80])
    ledger.hold(0)
    for record in (1, 2):
        ledger.save(record, record)
        ledger.hold(record)
    ledger[1].encoding = BITS
    ledger.let_go(1)
    ledger.stand_in(1)
    ledger.gone(1)
    ledger.validate()
    return ledger


def test_a_stand_in_counts_and_is_not_the_value():
    ledger = stood_in_ledger()
    assert (ledger.resident_bytes, ledger[1].available) == (8 + 10 + 80, False)
    ledger.let_go(2)
    ledger.gone(2)
    assert [op.id for op in ledger.missing_ops(2)] == [100, 101]
    ledger.validate()


def test_the_value_takes_the_place_of_its_stand_in():
    ledger = stood_in_ledger()
    ledger.hold(1)
    assert (ledger.resident_bytes, ledger[1].stood_in_for, ledger[1].available) == (8 + 80 + 80, False, True)
    ledger.validate()


def test_what_its_recipe_reads_cannot_go():
    with pytest.raises(LedgerError, match="lose its value"):
        stood_in_ledger().let_go(0)


def test_a_stand_in_may_go_at_any_time():
    ledger = stood_in_ledger()
    ledger.let_go(1)
    assert (ledger.resident_bytes, ledger[1].stood_in_for) == (8 + 80, False)


def test_the_ledger_knows_of_stand_ins_that_nobody_can_ask():
    ledger = stood_in_ledger()
    ledger.unsave(1)
    with pytest.raises(LedgerError, match="nobody can ask"):
        ledger.validate()


def test_both_are_there_while_a_stand_in_is_made():
    ledger = a_chain([8, 80])
    ledger.hold(0)
    ledger.save(1, 0)
    ledger.hold(1)
    ledger[1].encoding = BITS
    ledger.let_go(1)
    ledger.stand_in(1)
    assert (ledger.resident_bytes, ledger.peak_resident_bytes) == (98, 98)
    ledger.encode_failed(1)
    assert (ledger[1].held, ledger[1].encoding, ledger.resident_bytes) == (True, None, 88)
    ledger.validate()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda ledger: setattr(ledger[0], "encoding", None), "has no stand-in"),
        (lambda ledger: setattr(ledger[0], "encoding", replace(BITS, stand_in=False)), "has no stand-in"),
        (lambda ledger: ledger.hold(0), "has to be let go of"),
        (lambda ledger: ledger.gone(0), "has to be let go of, alive"),
        (lambda ledger: ledger.unsave(0), "has to be let go of, alive and saved"),
    ],
)
def test_what_is_not_stood_in_for(spoil, text):
    ledger = a_ledger([80])
    ledger.save(0, 0)
    ledger[0].encoding = BITS
    spoil(ledger)
    with pytest.raises(LedgerError, match=text):
        ledger.stand_in(0)


# -- the engine -------------------------------------------------------------------------------------------------------
def a_relu(limit: int, *actions: str, encoding: Encoding = BITS, replayable: bool = True, **sections: Any) -> Toy:
    """Record 1 of 80 bytes, made of a parameter, was saved by its maker."""
    toy = Toy(limit, ["keep", "encode", *actions], **sections)
    toy.source(0, 8, Kind.PARAMETER)
    toy.op(1, 80, [0], cost_ns=1000, replayable=replayable)
    toy.save(1, 10, encoding)
    return toy


def give_up(toy: Toy, record: int, action: Action) -> list[Instruction]:
    return toy._do(toy.engine._room.carry_out(toy.engine.ledger[record], action, toy.now, False))


def test_its_maker_is_answered_and_nothing_comes_back():
    toy = a_relu(200)
    toy.let_go(1)
    toy.op(2, 80)
    assert toy.save(2, 20) == [Hold(2), Hold(0), Encode(1)]
    engine = toy.engine
    assert (engine.ledger.resident_bytes, engine.totals.encoded_bytes) == (90, 70)
    toy.unsave(2)
    assert engine.ledger.resident_bytes == 10
    engine.ledger.restart_peaks()
    for at in (30, 40):  # as often as it asks
        assert toy.need(1, at, maker_asks=True) == []
        assert (engine.ledger.resident_bytes, engine.ledger.peak_resident_bytes) == (10, 90)
    assert Forget(1) in toy.unsave(1)
    assert (toy.replayed, toy.encoded, engine.ledger.resident_bytes) == ([], set(), 0)


def test_room_is_made_for_the_answer():
    toy = a_relu(300)
    toy.let_go(1)
    give_up(toy, 1, ENCODE)
    toy.op(2, 80)
    toy.save(2, 20, replace(BITS, stand_in=False))
    toy.let_go(2)
    toy.engine.budget.activations = Bytes(120)
    assert toy.need(1, 30, maker_asks=True) == [Encode(2)]
    assert toy.engine.ledger.resident_bytes == 20


def test_anybody_else_gets_the_value():
    toy = a_relu(400)
    toy.let_go(1)
    give_up(toy, 1, ENCODE)
    toy.need(1, 30)
    assert (toy.replayed, toy.encoded) == ([1], set())
    assert toy.engine.ledger[1].held
    assert toy.need(1, 40, maker_asks=True) == []  # it is there now, for the maker too
    assert toy.replayed == [1]


def test_a_program_that_still_has_the_storage_gets_it_held_again():
    toy = a_relu(400)
    give_up(toy, 1, ENCODE)
    assert toy.need(1, 30, maker_asks=True) == [Hold(1)]
    assert (toy.encoded, toy.replayed, toy.engine.ledger.resident_bytes) == (set(), [], 80)


def test_it_waits_until_the_program_has_let_go():
    """Before that, somebody else may save the storage too."""
    toy = a_relu(100)
    toy.op(2, 80)
    assert toy.save(2, 20) == [Hold(2)]
    toy.let_go(1)
    toy.op(3, 8)
    assert toy.save(3, 30) == [Hold(3), Hold(0), Encode(1)]


def test_a_second_save_withdraws_it():
    toy = a_relu(100)
    assert toy.save(1, 15) == []
    assert toy.engine.learner.log.encodings == {}
    toy.let_go(1)
    toy.op(2, 80)
    assert toy.save(2, 20) == [Hold(2)]


def test_a_second_save_takes_the_storage_back():
    toy = a_relu(400)
    give_up(toy, 1, ENCODE)
    assert toy.save(1, 15) == [Hold(1)]
    assert (toy.encoded, toy.engine.ledger.resident_bytes) == (set(), 80)
    toy.let_go(1)
    toy.unsave(1)
    assert toy.need(1, 30) == []


def test_a_whole_form_is_not_withdrawn():
    toy = a_relu(100, encoding=replace(BITS, stand_in=False))
    assert toy.save(1, 15) == []
    assert toy.engine.ledger[1].encoding is not None


def test_it_wants_a_recipe():
    for replayable in (False, True):
        toy = a_relu(100, replayable=replayable)
        toy.let_go(1)
        toy.op(2, 80)
        assert (Encode(1) in toy.save(2, 20)) is replayable


def test_a_replay_makes_it_again():
    toy = a_relu(400, "recompute")
    toy.op(2, 80, [1])
    toy.save(2, 20)
    toy.let_go(1, 2)
    give_up(toy, 2, RECOMPUTE)
    give_up(toy, 1, ENCODE)
    assert Decode(1) not in toy.use(2, 30)
    assert toy.replayed == [1, 2]
    toy.use(1, 40, maker_asks=True)
    assert (toy.replayed, toy.engine.ledger.resident_bytes) == ([1, 2], 0)


def test_a_stand_in_goes_with_the_handle_although_replays_read_the_record():
    toy = a_relu(400, "recompute")
    toy.op(2, 80, [1])
    toy.save(2, 20)
    toy.let_go(1, 2)
    give_up(toy, 2, RECOMPUTE)
    give_up(toy, 1, ENCODE)
    assert toy.unsave(1) == [Release(1)]
    assert (toy.encoded, toy.engine.ledger.resident_bytes) == (set(), 0)
    toy.use(2, 30)
    assert toy.replayed == [1, 2]


def test_what_its_recipe_starts_at_is_held():
    toy = Toy(400, ["keep", "encode"])
    toy.source(0, 8)
    toy.op(1, 80, [0])
    toy.save(1, 10, BITS)
    toy.let_go(1)
    assert give_up(toy, 1, ENCODE) == [Hold(0), Encode(1)]
    toy.let_go(0)
    toy.need(1, 30)
    assert toy.replayed == [1]


def test_the_stand_in_of_an_old_version_goes():
    toy = a_relu(400)
    give_up(toy, 1, ENCODE)
    said = toy.overwrite(1, 3, [1], 80)
    assert said[:2] == [Hold(3), Release(1)]
    assert (toy.encoded, toy.engine.ledger.resident_bytes) == (set(), 80)
    toy.use(1, 30, maker_asks=True)
    assert (toy.replayed, toy.engine.ledger.resident_bytes) == ([], 0)


def test_a_stand_in_is_no_old_version():
    """A dropped record reads the version that is about to be overwritten: it is cloned, bits or not."""
    toy = a_relu(400, "recompute")
    toy.op(2, 80, [1])
    toy.save(2, 20)
    toy.let_go(2)
    give_up(toy, 2, RECOMPUTE)
    give_up(toy, 1, ENCODE)
    assert Preserve(1) in toy.overwrite(1, 3, [1], 80)
    assert toy.encoded == set()
    toy.use(2, 30)
    assert toy.replayed == [2]


def test_replays_of_others_cost_more():
    """By the 1000 ns of its maker, as long as only bits are left of it, or are to be made."""
    for unfit, more_ns in ((set(), 1000), ({1}, 0)):
        toy = a_relu(400, "recompute", filter={"cost": "classes"})
        toy.unfit = unfit
        toy.op(2, 80, [1], cost_ns=10)
        costs = toy.engine._room.candidates._costs
        assert costs.of(Cost.CLASSES, 2) == 10
        give_up(toy, 1, ENCODE)
        assert costs.of(Cost.CLASSES, 2) == 10 + more_ns


def test_a_recipe_that_cannot_start_is_none():
    """What it reads has gone."""
    toy = Toy(100, ["keep", "encode"])
    toy.source(0, 8)
    toy.op(1, 80, [0])
    toy.save(1, 10, BITS)
    toy.let_go(0, 1)
    assert toy.engine._room.following._do(toy.engine.ledger[1], ENCODE, 15) == []
    toy.op(2, 80)
    assert toy.save(2, 20) == [Hold(2)]


def test_bits_that_cannot_be_made_leave_the_storage():
    toy = a_relu(200, "swap")
    toy.unfit = {1}
    toy.let_go(1)
    toy.op(2, 80)
    assert Encode(1) in toy.save(2, 20)
    assert toy.engine.ledger[1].encoding is None
    assert toy.engine.learner.log.encodings == {}
    toy.use(1, 30, maker_asks=True)
    assert toy.replayed == []


def test_a_planned_step_is_carried_out():
    """Three ReLUs, each saved by its maker; nothing is replayed, and the limit holds."""
    toy = Toy(190, ["keep", "encode"])
    toy.source(0, 8, Kind.PARAMETER)
    peaks, encoded = [], []
    for step in range(3):
        first, said = 10 * step + 1, []
        for record in range(first, first + 3):
            toy.now += 100
            toy.op(record, 80, [0], cost_ns=1000)
            toy.engine.encodable(record, BITS)
            said += toy._do(toy.engine.saved(record, record - first, toy.now))
            toy.let_go(record)
        for record in reversed(range(first, first + 3)):
            said += toy.use(record, toy.now + 100, maker_asks=True)
        assert not any(isinstance(each, Drop) for each in said)
        encoded.append(sum(isinstance(each, Encode) for each in said))
        peaks.append(toy.engine.finished_steps[-1].peak_bytes)
        assert toy.engine.ledger.resident_bytes == 0
    assert [str(summary.mode) for summary in toy.engine.finished_steps] == ["observe", "planned", "planned"]
    assert (toy.replayed, max(peaks) <= 190) == ([], True)
    assert encoded == [2, 1, 1]


# -- the planner ------------------------------------------------------------------------------------------------------
def with_bits(stand_in: bool = True, replayable: bool = True, backwards: bool = True) -> StepGraph:
    """`chain`, with a form of 10 bytes for b, which takes 1 + 1 ns. `backwards`: c is needed first, else last."""
    log = chain_log()
    log.ops = [replace(op, replayable=replayable) for op in log.ops]
    log.encodings = {log.saves[1]: Encoding(10, 1, 1, stand_in)}
    log.loose_at = {0: 1, 1: 2, 2: 3}
    if not backwards:
        log.needs, log.releases = [(0, 40), (1, 60), (2, 80)], [(0, 1), (1, 2), (2, 3)]
    return build_graph(log, 0)


def test_the_forecast_decodes_for_each_need_and_keeps_the_form():
    found = forecast(with_bits(), (KEEP, ENCODE, KEEP), LINK)
    assert found.resident_bytes == (410, 310, 100)
    assert (found.encode_ns, found.replay_ns, found.back_at) == (2, 0, (0, -1, 0))


def test_the_forecast_replays_for_others():
    found = forecast(with_bits(), (KEEP, ENCODE, RECOMPUTE), LINK)
    assert found.resident_bytes == (600, 300, 100)
    assert (found.replay_ns, found.encode_ns, found.back_at) == (9, 1, (0, 0, 0))
    whole = forecast(with_bits(stand_in=False), (KEEP, ENCODE, RECOMPUTE), LINK)
    assert (whole.replay_ns, whole.encode_ns) == (5, 2)


def test_the_plan_pays_for_the_replays():
    """c is dropped; b in its bits costs 2 ns, and as a stand-in 4 ns more for g, as much as to drop it."""
    for stand_in, expected in ((False, ENCODE), (True, RECOMPUTE)):
        graph, begun = with_bits(stand_in, backwards=False), (KEEP, KEEP, RECOMPUTE)
        made = plan_step(graph, 520, LINK, (KEEP, RECOMPUTE, ENCODE), begun=begun)
        assert made.actions == (KEEP, expected, RECOMPUTE)
        assert made.peak_bytes <= 520


def test_what_is_dropped_reads_through_a_stand_in():
    """To drop c takes 5 ns, and 4 more where a stand-in is all that is left of b; to swap it takes 7."""
    graph, link = with_bits(backwards=False), Link(100e9, 100e9, 7 / 6)
    for begun, expected in (((KEEP, KEEP, KEEP), RECOMPUTE), ((KEEP, ENCODE, KEEP), SWAP)):
        made = plan_step(graph, 400, link, (KEEP, SWAP, RECOMPUTE), {0: KEEP, 1: KEEP}, begun)
        assert made.actions[2] is expected


def test_no_plan_without_a_recipe():
    for stand_in, expected in ((False, ENCODE), (True, KEEP)):
        assert plan_step(with_bits(stand_in, replayable=False), 420, LINK, (KEEP, ENCODE)).actions[1] is expected
    assert plan_step(with_bits(), 420, LINK, (KEEP, ENCODE)).actions[1] is ENCODE
