"""When a storage is kept in its encoded form: decisions by hand, and the ledger that counts both forms."""

from __future__ import annotations

import pytest
from builders import a_chain, a_ledger, a_log
from toy import Toy

from delta.costs import LinkQueue
from delta.director import Director, Prospect
from delta.ledger import Ledger
from delta.planner import forecast
from delta.planner.greedy import plan_step
from delta.planner.steplog import StepGraph, build_graph
from delta.record import Host, LedgerError
from delta.types import Action, Decode, Drop, Encode, Encoding, Hold, Kind, Link, Release
from delta.units import Bytes

LINK = Link(1e9, 1e9)
EIGHTH = Encoding(10, 3, 4)  # of 80 bytes
KEEP, SWAP, RECOMPUTE, ENCODE = Action.KEEP, Action.SWAP, Action.RECOMPUTE, Action.ENCODE


# -- the ledger -------------------------------------------------------------------------------------------------------
def encoded_ledger() -> Ledger:
    """One saved record of 80 bytes, in 10."""
    ledger = a_ledger([80])
    ledger.save(0, 0)
    ledger.hold(0)
    ledger[0].encoding = EIGHTH
    ledger.encode(0)
    ledger.encoded(0, 10)
    ledger.gone(0)
    ledger.validate()
    return ledger


def test_both_forms_count_while_one_is_made_from_the_other():
    ledger = a_ledger([80])
    ledger.save(0, 0)
    ledger.hold(0)
    ledger[0].encoding = EIGHTH
    ledger.encode(0)
    assert ledger.resident_bytes == 80
    ledger.encoded(0, 7)
    assert (ledger.resident_bytes, ledger.peak_resident_bytes) == (87, 87)  # the program uses it still
    ledger.gone(0)
    assert (ledger.resident_bytes, ledger[0].available) == (7, True)
    ledger.restart_peaks()
    ledger.hold(0)
    assert (ledger.resident_bytes, ledger.peak_resident_bytes) == (80, 87)
    ledger.validate()


def test_a_form_that_cannot_be_made_leaves_the_record_held():
    ledger = a_ledger([80])
    ledger.save(0, 0)
    ledger.hold(0)
    ledger[0].encoding = EIGHTH
    ledger.encode(0)
    ledger.encode_failed(0)
    ledger.validate()
    assert (ledger[0].held, ledger[0].encoding, ledger.resident_bytes) == (True, None, 80)


def test_a_decoding_that_fails_leaves_the_form():
    ledger = encoded_ledger()
    ledger.hold(0)
    ledger[0].pins = 1
    ledger.decode_failed(0, 10)
    ledger.validate()
    assert (ledger[0].held, ledger[0].alive, ledger.resident_bytes) == (False, False, 10)


def test_what_is_encoded_ends_with_its_handle():
    ledger = encoded_ledger()
    ledger.unsave(0)
    assert ledger.forget_dead([0]) == ([0], [])
    assert ledger.resident_bytes == 0
    ledger.validate()


def test_an_encoded_input_starts_a_replay():
    ledger = a_chain([8, 80, 80])
    for record in (1, 2):
        ledger.save(record, record)
        ledger.hold(record)
    ledger[1].encoding = EIGHTH
    ledger.encode(1)
    ledger.encoded(1, 10)
    ledger.gone(1)
    ledger.let_go(2)
    ledger.gone(2)
    assert [op.id for op in ledger.missing_ops(2)] == [101]
    assert ledger.anchors(2) == []
    ledger.validate()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda ledger: setattr(ledger[0], "encoding", None), "no encoded form"),
        (lambda ledger: ledger.let_go(0), "has to be held"),
        (lambda ledger: setattr(ledger[0], "pins", 1), "has to be held, not in use"),
        (lambda ledger: ledger.set_host(0, Host.LEAVING), "without a host copy"),
    ],
)
def test_what_may_not_be_encoded(spoil, text):
    ledger = a_ledger([80])
    ledger.hold(0)
    ledger[0].encoding = EIGHTH
    spoil(ledger)
    with pytest.raises(LedgerError, match=text):
        ledger.encode(0)


def test_a_form_may_not_be_larger_than_was_said():
    ledger = a_ledger([80])
    ledger.hold(0)
    ledger[0].encoding = EIGHTH
    ledger.encode(0)
    with pytest.raises(LedgerError, match="11 bytes encoded, 10 were expected"):
        ledger.encoded(0, 11)


def test_an_encoded_form_that_is_needed_is_not_let_go_of():
    with pytest.raises(LedgerError, match="lose its value"):
        encoded_ledger().let_go(0)


def test_an_encoded_record_has_no_host_copy():
    ledger = encoded_ledger()
    with pytest.raises(LedgerError, match="not held"):
        ledger.set_host(0, Host.LEAVING)
    with pytest.raises(LedgerError, match="is not being encoded"):
        ledger.encoded(0, 10)
    ledger[0].host = Host.WHOLE
    with pytest.raises(LedgerError, match="is encoded, and Delta has its bytes in another place too"):
        ledger.validate()


# -- the director -----------------------------------------------------------------------------------------------------
def chosen(encoding: Encoding | None, chain_ns: int | None, *actions: Action, whole: bool = False) -> Action | None:
    prospect = Prospect(80, "aten.f", "", chain_ns, whole, True, 0, 1000, encoding)
    choice = Director(actions).choose(prospect, LinkQueue(LINK))
    return choice.action if choice is not None else None


def test_cheapest_per_byte_that_it_frees():
    assert chosen(EIGHTH, 9, RECOMPUTE, ENCODE) is ENCODE  # 7 ns for 70 bytes, 9 for 80
    assert chosen(EIGHTH, 8, RECOMPUTE, ENCODE) is RECOMPUTE
    assert chosen(Encoding(40, 3, 4), 13, RECOMPUTE, ENCODE) is RECOMPUTE  # 7 ns for 40 bytes
    assert chosen(EIGHTH, None, RECOMPUTE) is None
    assert chosen(None, None, ENCODE) is None
    assert chosen(EIGHTH, None, ENCODE, whole=True) is None


# -- the engine -------------------------------------------------------------------------------------------------------
def test_the_mask_goes_into_its_bits_and_comes_back():
    toy = Toy(200, ["keep", "encode"])
    toy.op(1, 80)
    assert toy.save(1, 10, EIGHTH) == [Hold(1)]
    toy.let_go(1)
    toy.op(2, 80)
    assert toy.save(2, 20) == [Hold(2), Encode(1)]  # room for one more of 80
    assert (toy.engine.ledger.resident_bytes, toy.engine.totals.encoded_bytes) == (90, 70)
    assert toy.engine.ledger.peak_resident_bytes == 170
    assert toy.use(2, 30)[:0] == []
    assert Decode(1) in toy.need(1, 40)
    assert toy.engine.ledger.resident_bytes == 80
    toy.unsave(1)
    assert toy.engine.finished_steps[0].peak_bytes == 170


def test_room_for_the_form_is_made_before():
    """A form takes room before it gives any, so as much is kept free; what fits beside all else is encoded first."""
    toy = Toy(100, ["keep", "encode"])
    toy.op(1, 40)
    assert toy.save(1, 10, Encoding(20, 1, 1)) == [Hold(1)]
    toy.let_go(1)
    toy.op(2, 40)
    assert toy.save(2, 20, Encoding(5, 1, 1)) == [Hold(2), Encode(1), Encode(2)]
    assert toy.engine.ledger.peak_resident_bytes == 100


def test_where_nothing_else_can_go_the_limit_is_passed_for_a_moment():
    toy = Toy(80, ["keep", "encode"])
    toy.op(1, 80)
    assert toy.save(1, 10, EIGHTH) == [Hold(1), Encode(1)]
    toy.let_go(1)
    assert (toy.engine.ledger.resident_bytes, toy.engine.ledger.peak_resident_bytes) == (10, 90)


def test_bytes_without_a_form_make_something_else_go():
    toy = Toy(200, ["keep", "encode", "swap"], Link(1e6, 1e6))
    toy.unfit = {1}
    toy.op(1, 80)
    toy.save(1, 10, EIGHTH)
    toy.op(2, 80)
    said = toy.save(2, 20, Encoding(20, 3, 4))
    assert said == [Hold(2), Encode(1), Encode(2)]
    assert toy.engine.ledger[1].encoding is None
    assert toy.engine.learner.log.encodings.keys() == {2}


def test_a_program_that_still_has_the_storage_gets_it_held_again():
    toy = Toy(100, ["keep", "encode"])
    toy.op(1, 80)
    assert Encode(1) in toy.save(1, 10, EIGHTH)
    assert toy.need(1, 20) == [Hold(1)]
    assert (toy.encoded, toy.engine.ledger.resident_bytes) == (set(), 80)


def test_a_replay_reads_what_is_encoded():
    toy = Toy(300, ["keep", "encode", "recompute"])
    toy.op(1, 80, replayable=False)
    toy.save(1, 10, EIGHTH)
    toy.op(2, 80, [1], cost_ns=1)
    toy.save(2, 20)
    toy.let_go(1, 2)
    engine = toy.engine
    toy._do(engine._room.carry_out(engine.ledger[1], ENCODE, 20, False))
    toy._do(engine._room.carry_out(engine.ledger[2], RECOMPUTE, 20, False))
    assert engine.ledger.resident_bytes == 10
    assert Decode(1) in toy.use(2, 30)
    assert toy.replayed == [2]
    toy.use(1, 40)
    assert engine.ledger.resident_bytes == 0


def test_an_old_version_that_a_recipe_reads_stays_encoded():
    toy = Toy(300, ["keep", "encode", "recompute"])
    toy.op(1, 80, replayable=False)
    toy.save(1, 10, EIGHTH)
    toy.op(2, 80, [1], cost_ns=1)
    toy.save(2, 20)
    toy.let_go(2)
    engine = toy.engine
    toy._do(engine._room.carry_out(engine.ledger[1], ENCODE, 20, False))
    toy._do(engine._room.carry_out(engine.ledger[2], RECOMPUTE, 20, False))
    toy.overwrite(1, 3, [1], 80)  # no clone: the encoded form is the old version
    assert 1 in toy.encoded
    assert Decode(1) in toy.use(2, 30)
    toy.use(3, 40)
    assert (engine.ledger.resident_bytes, toy.encoded) == (0, set())


def test_a_form_that_nobody_needs_goes():
    toy = Toy(100, ["keep", "encode"])
    toy.op(1, 80)
    toy.save(1, 10, EIGHTH)
    toy.op(2, 8, [1])
    toy.save(2, 20)
    assert toy.unsave(1) == [Release(1)]
    assert (toy.encoded, toy.engine.ledger.resident_bytes) == (set(), 8)


def test_saved_again_after_all_its_handles_have_died():
    toy = Toy(1000, ["keep", "recompute"])
    toy.op(1, 80, replayable=False)
    toy.op(2, 80, replayable=False)
    toy.save(2, 5)
    toy.save(1, 10)
    assert toy.unsave(1) == [Release(1)]
    assert toy.save(1, 20) == [Hold(1)]
    toy.let_go(1)
    toy.use(1, 30)


def test_what_has_no_room_for_its_form_waits_for_what_has():
    toy = Toy(100, ["keep", "encode"])
    toy.op(1, 40)
    toy.save(1, 10, Encoding(5, 10, 10))
    toy.let_go(1)
    toy.op(2, 40)
    assert toy.save(2, 20, Encoding(30, 0, 0)) == [Hold(2), Encode(1), Encode(2)]  # the other order would pass 100


def test_the_limit_is_not_passed_for_what_is_only_kept_free():
    toy = Toy(1000, ["keep", "encode"])
    toy.op(1, 80)
    toy.save(1, 10, EIGHTH)
    room = toy.engine._room
    assert room.evict(10, 20, 0, False, 10) == []
    assert room.evict(11, 20, 0, False, 10) == [Encode(1)]


def test_room_is_made_before_decoding():
    toy = Toy(1000, ["keep", "encode"])
    for record in (1, 2):
        toy.op(record, 80)
        toy.save(record, 10 * record, EIGHTH)
        toy.let_go(record)
    engine = toy.engine
    toy._do(engine._room.carry_out(engine.ledger[1], ENCODE, 20, False))
    engine.budget.activations = Bytes(160)
    assert toy.need(1, 30) == [Encode(2), Decode(1)]
    assert engine.ledger.resident_bytes == 90


def test_an_old_version_that_nobody_reads_goes():
    toy = Toy(300, ["keep", "encode", "recompute"])
    toy.op(1, 80, replayable=False)
    toy.save(1, 10, EIGHTH)
    toy.op(2, 80, [1], cost_ns=1)
    toy.save(2, 20)
    engine = toy.engine
    toy._do(engine._room.carry_out(engine.ledger[1], ENCODE, 20, False))
    assert Release(1) in toy.overwrite(1, 3, [1], 80)
    assert (toy.encoded, engine.ledger.resident_bytes) == (set(), 160)


# -- the planner ------------------------------------------------------------------------------------------------------
def masks(count: int, encoding: Encoding = EIGHTH) -> StepGraph:
    """`count` storages of 80 bytes, saved at 100, 200, ... and needed in reverse order; each frees itself at once."""
    log = a_log(
        [],
        dict.fromkeys(range(count), 80),
        [(v, 100 * (v + 1), 0) for v in range(count)],
        [(v, 1000 + 100 * p) for p, v in enumerate(reversed(range(count)))],
        [(v, p + 1) for p, v in enumerate(reversed(range(count)))],
        2000,
    )
    log.encodings = dict.fromkeys(range(count), encoding)
    log.loose_at = {v: v + 1 for v in range(count)}
    return build_graph(log, 0)


def test_the_forecast_counts_both_forms():
    graph = masks(3)
    found = forecast(graph, (ENCODE, KEEP, ENCODE), LINK)
    assert found.forward_bytes == (90, 10 + 80, 10 + 80 + 90)
    assert found.resident_bytes == (10 + 80 + 90, 10 + 80, 90)
    assert (found.encode_ns, found.cost_ns, found.replay_ns) == (14, 14, 0)


def test_a_form_nobody_asks_for_goes_with_its_handle():
    log = a_log([], {0: 80, 1: 80}, [(0, 1, 0), (1, 2, 0)], [(1, 10)], [(0, 0), (1, 1)], 20)
    log.encodings = {0: EIGHTH}
    found = forecast(build_graph(log, 0), (ENCODE, KEEP), LINK)
    assert found.resident_bytes == (80,)
    assert found.encode_ns == 3


@pytest.mark.parametrize(("limit", "encoded"), [(240, 0), (180, 1), (110, 2)])
def test_the_plan_encodes_what_has_to_be(limit, encoded):
    plan = plan_step(masks(3), limit, LINK, (KEEP, ENCODE))
    assert plan.actions.count(ENCODE) == encoded
    assert plan.peak_bytes <= limit


def test_the_plan_compares_with_a_swap():
    slow = Link(1e6, 1e6, 1.0)
    assert SWAP not in plan_step(masks(3), 110, slow, (KEEP, SWAP, ENCODE)).actions
    fast = Link(1e12, 1e12)
    assert ENCODE not in plan_step(masks(3), 110, fast, (KEEP, SWAP, ENCODE)).actions
    assert plan_step(masks(3), 110, fast, (KEEP, SWAP, ENCODE), {1: ENCODE}).actions[1] in (ENCODE, KEEP)


def test_a_form_that_frees_little_is_dear():
    """2 ns for 10 bytes, against a swap of 8 ns for 80."""
    plan = plan_step(masks(3, Encoding(70, 1, 1)), 160, Link(1e9, 1e9, 0.05), (KEEP, SWAP, ENCODE))
    assert SWAP in plan.actions
    assert ENCODE not in plan.actions


def test_a_planned_step_is_carried_out():
    toy = Toy(180, ["keep", "encode"])
    peaks = []
    for step in range(3):
        base = 10 * step
        for v in range(3):
            toy.now = 1000 * step + 100 * v
            toy.op(base + v, 80)
            toy.engine.ledger[base + v].used_ns = toy.now
            toy.now += 10
            toy.engine.encodable(base + v, EIGHTH)
            toy._do(toy.engine.saved(base + v, v, toy.now))
            toy.let_go(base + v)
        for p, v in enumerate(reversed(range(3))):
            toy.use(base + v, 1000 * step + 500 + 100 * p)
        peaks.append(toy.engine.finished_steps[-1].peak_bytes)
        assert toy.engine.ledger.resident_bytes == 0
    assert [str(summary.mode) for summary in toy.engine.finished_steps] == ["observe", "planned", "planned"]
    assert max(peaks) <= 180


def test_sources_are_never_encoded():
    toy = Toy(50, ["keep", "encode"])
    toy.source(1, 80, Kind.SOURCE)
    assert toy.save(1, 10, EIGHTH) == [Hold(1)]
    assert not any(isinstance(said, Drop) for said in toy.need(1, 20))
