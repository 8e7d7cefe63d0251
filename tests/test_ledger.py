"""The ledger: which transitions are legal, what the totals are, what can be had again, and what `validate` sees."""

import pytest
from builders import a_chain, a_ledger, an_op

from delta.ledger import Ledger
from delta.record import Host, LedgerError
from delta.types import Kind

LEGAL = {
    (Host.NONE, Host.LEAVING),
    (Host.LEAVING, Host.WHOLE),
    (Host.LEAVING, Host.NONE),
    (Host.WHOLE, Host.COMING),
    (Host.WHOLE, Host.NONE),
    (Host.COMING, Host.WHOLE),
}
WAY_TO = {
    Host.NONE: [],
    Host.LEAVING: [Host.LEAVING],
    Host.WHOLE: [Host.LEAVING, Host.WHOLE],
    Host.COMING: [Host.LEAVING, Host.WHOLE, Host.COMING],
}


def held_in(state: Host) -> Ledger:
    """One saved and held record of 8 bytes whose host copy is in `state`."""
    ledger = a_ledger([8])
    ledger.save(0, 0)
    ledger.hold(0)
    for step in WAY_TO[state]:
        ledger.set_host(0, step)
    return ledger


def swapped_out(ledger: Ledger, record: int) -> None:
    """The device copy goes, the host copy stays."""
    for step in WAY_TO[Host.WHOLE]:
        ledger.set_host(record, step)
    ledger.let_go(record)
    ledger.gone(record)


def dropped(ledger: Ledger, *records: int) -> None:
    """Nobody has these storages any more."""
    for record in records:
        if ledger[record].held:
            ledger.let_go(record)
        ledger.gone(record)


# -- births and handles -----------------------------------------------------------------------------------------------
def test_a_record_is_made_once():
    ledger = a_ledger([8])
    with pytest.raises(LedgerError, match="record 0 exists"):
        ledger.create(0, 8, Kind.ACTIVATION)


def test_a_record_has_one_producer():
    ledger = a_chain([1, 1])
    with pytest.raises(LedgerError, match="record 1 has a producer already"):
        ledger.add_op(an_op(7, [0], [1]))


def test_only_the_first_handle_adds_bytes_and_only_the_last_takes_them():
    ledger = a_ledger([8])
    assert ledger.save(0, 0) is True
    assert ledger.save(0, 1) is False
    assert (ledger.unevicted_bytes, ledger.resident_bytes, ledger.handles) == (8, 8, 2)
    assert ledger[0].saved_at == 0
    assert ledger.unsave(0) is False
    assert (ledger.unevicted_bytes, ledger.resident_bytes) == (8, 8)
    assert ledger.unsave(0) is True
    assert (ledger.unevicted_bytes, ledger.resident_bytes, ledger.handles) == (0, 0, 0)
    ledger.validate()


def test_a_handle_is_given_up_once():
    ledger = a_ledger([8])
    ledger.save(0, 0)
    ledger.unsave(0)
    with pytest.raises(LedgerError, match="record 0 has no handle to give up"):
        ledger.unsave(0)


def test_parameters_never_count():
    ledger = a_ledger([8], kinds={0: Kind.PARAMETER})
    ledger.save(0, 0)
    assert (ledger.unevicted_bytes, ledger.resident_bytes, ledger.handles) == (0, 0, 1)
    ledger.unsave(0)
    ledger.validate()


def test_sources_count_once_saved_or_held():
    ledger = a_ledger([8, 4], kinds={0: Kind.SOURCE, 1: Kind.SOURCE})
    assert ledger.resident_bytes == 0
    ledger.save(0, 0)
    ledger.hold(1)
    assert (ledger.resident_bytes, ledger.unevicted_bytes) == (12, 8)
    ledger.validate()


def test_peaks_are_those_of_the_running_totals_and_begin_anew():
    ledger = a_ledger([8, 4])
    ledger.save(0, 0)
    ledger.unsave(0)
    ledger.save(1, 1)
    assert (ledger.peak_resident_bytes, ledger.peak_unevicted_bytes) == (8, 8)
    ledger.restart_peaks()
    assert (ledger.peak_resident_bytes, ledger.peak_unevicted_bytes) == (4, 4)


# -- the device copy --------------------------------------------------------------------------------------------------
def test_a_held_record_is_held_once():
    ledger = held_in(Host.NONE)
    with pytest.raises(LedgerError, match="held already"):
        ledger.hold(0)


def test_holding_revives_a_dead_record():
    """A replay or a copy back gives it a storage again."""
    ledger = a_chain([1, 8])
    ledger.save(1, 0)
    ledger.gone(1)
    assert ledger.resident_bytes == 0
    ledger.hold(1)
    assert ledger[1].alive
    assert ledger.resident_bytes == 8
    ledger.validate()


def test_what_is_not_held_cannot_be_let_go():
    with pytest.raises(LedgerError, match="record 0 is not held"):
        a_ledger([8]).let_go(0)


def test_the_source_of_a_copy_out_stays():
    with pytest.raises(LedgerError, match="being copied out"):
        held_in(Host.LEAVING).let_go(0)


def test_what_is_in_use_stays():
    ledger = held_in(Host.WHOLE)
    ledger[0].pins = 1
    with pytest.raises(LedgerError, match="in use"):
        ledger.let_go(0)


def test_the_only_copy_of_a_saved_value_stays():
    with pytest.raises(LedgerError, match="would lose its value"):
        held_in(Host.NONE).let_go(0)


def test_the_root_of_a_dropped_value_stays():
    """Record 1 is dropped and can be made again only from record 0: promise P4 through a recipe."""
    ledger = a_chain([8, 8])
    ledger.hold(0)
    ledger.save(1, 0)
    dropped(ledger, 1)
    with pytest.raises(LedgerError, match="letting go of record 0 would lose its value"):
        ledger.let_go(0)


def test_a_value_with_a_host_copy_may_be_let_go():
    ledger = held_in(Host.WHOLE)
    ledger.let_go(0)
    ledger.validate()
    assert ledger.resident_bytes == 8, "the program has not let go of it yet"
    ledger.gone(0)
    assert ledger.resident_bytes == 0
    ledger.validate()


def test_a_value_with_a_recipe_may_be_let_go():
    ledger = a_chain([8, 4])
    ledger.hold(0)
    ledger.save(1, 0)
    ledger.hold(1)
    dropped(ledger, 1)
    ledger.validate()
    assert ledger.resident_bytes == 8


def test_a_value_nobody_asks_for_may_be_let_go():
    ledger = a_ledger([8])
    ledger.hold(0)
    ledger.let_go(0)
    assert ledger.resident_bytes == 0


def test_what_is_held_is_not_gone():
    with pytest.raises(LedgerError, match="held and cannot be gone"):
        held_in(Host.NONE).gone(0)


# -- the host copy ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("after", Host)
@pytest.mark.parametrize("before", Host)
def test_host_states_follow_each_other(before, after):
    ledger = held_in(before)
    if (before, after) in LEGAL:
        ledger.set_host(0, after)
        assert ledger[0].host is after
        ledger.validate()
    else:
        with pytest.raises(LedgerError, match=f"cannot go from {before.value} to {after.value}"):
            ledger.set_host(0, after)
        assert ledger[0].host is before


def test_only_a_held_record_is_copied_out():
    ledger = a_ledger([8])
    ledger.save(0, 0)
    with pytest.raises(LedgerError, match="not held and cannot be copied out"):
        ledger.set_host(0, Host.LEAVING)


def test_the_last_copy_of_a_saved_value_is_not_given_up():
    ledger = held_in(Host.WHOLE)
    ledger.let_go(0)
    with pytest.raises(LedgerError, match="giving up the host copy of record 0 would lose its value"):
        ledger.set_host(0, Host.NONE)


def test_a_host_copy_goes_when_the_device_has_the_value_or_nobody_asks():
    held_in(Host.WHOLE).set_host(0, Host.NONE)
    ledger = held_in(Host.WHOLE)
    ledger.let_go(0)
    ledger.unsave(0)
    ledger.set_host(0, Host.NONE)
    ledger.validate()


def test_leaving_bytes_are_those_on_their_way_out():
    ledger = a_ledger([8, 4])
    for record in (0, 1):
        ledger.save(record, record)
        ledger.hold(record)
        ledger.set_host(record, Host.LEAVING)
    assert ledger.leaving_bytes == 12
    ledger.set_host(0, Host.WHOLE)
    assert ledger.leaving_bytes == 4
    ledger.set_host(1, Host.NONE)
    assert ledger.leaving_bytes == 0


# -- versions ---------------------------------------------------------------------------------------------------------
def test_handles_follow_the_bytes_to_the_new_version():
    ledger = a_ledger([8, 8, 8])
    ledger.save(0, 5)
    ledger.save(0, 6)
    ledger.supersede(0, 1)
    assert [ledger[r].handles for r in range(3)] == [0, 2, 0]
    assert ledger[1].saved_at == 5
    assert (ledger.handles, ledger.unevicted_bytes) == (2, 8)
    ledger.supersede(1, 2)
    assert ledger.resolve(0) == ledger.resolve(1) == ledger.resolve(2) == 2
    ledger.validate()


def test_without_handles_nothing_is_superseded():
    ledger = a_ledger([8, 8])
    ledger.supersede(0, 1)
    assert ledger.resolve(0) == 0


# -- what can be had again --------------------------------------------------------------------------------------------
def test_recoverable_needs_a_root_delta_has():
    """0 -> 1 -> 2. Alive is not enough: its owner may drop it at any time; `grasp` would hold it first."""
    ledger = a_chain([1, 1, 1])
    assert not ledger.recoverable(2)
    assert ledger.recoverable(2, grasp=True)
    assert ledger.anchors(2) == [0]
    ledger.hold(0)
    assert ledger.recoverable(2)
    assert ledger.anchors(2) == []


def test_a_dead_root_makes_everything_after_it_unrecoverable():
    ledger = a_chain([1, 1, 1])
    dropped(ledger, 0)
    assert not ledger.recoverable(1, grasp=True)
    assert ledger.anchors(1) is None
    dropped(ledger, 1)
    assert not ledger.recoverable(2, grasp=True)
    assert ledger.anchors(2) is None


def test_what_is_alive_after_a_dead_root_is_root_enough():
    """A mask that every layer reads, made from a number that has gone."""
    ledger = a_chain([1, 1, 1, 1])
    dropped(ledger, 0)
    assert not ledger.recoverable(3)
    assert ledger.anchors(3) == [1], "the one next to what has gone: it takes the place of that"
    dropped(ledger, 1)
    assert ledger.anchors(3) == [2]


def test_a_root_that_is_not_reached_any_more_is_none():
    """4 = h(3), 3 = g(1, 2), 1 = f(0): 0 has gone, and 2 that no op made is alive. 3 is alive, 1 is not."""
    ops = [an_op(100, [0], [1]), an_op(101, [1, 2], [3]), an_op(102, [3], [4])]
    ledger = a_ledger([1] * 5, ops)
    dropped(ledger, 0)
    dropped(ledger, 1)
    assert ledger.anchors(4) == [3]


def test_the_nearest_available_ancestor_is_root_enough():
    ledger = a_chain([1, 1, 1])
    dropped(ledger, 0)
    ledger.hold(1)
    assert ledger.recoverable(2)
    assert not ledger.recoverable(1), "a recipe does not begin with its own result"


@pytest.mark.parametrize("have", [Host.WHOLE, Host.LEAVING])
def test_a_host_copy_is_a_root(have):
    ledger = a_chain([1, 1])
    ledger.hold(0)
    for step in WAY_TO[have]:
        ledger.set_host(0, step)
    assert ledger.recoverable(1)


def test_a_parameter_is_a_root_while_it_is_alive():
    """The program may replace or delete it, so what is dropped needs it held."""
    ledger = a_ledger([1, 1], [an_op(100, [0], [1])], {0: Kind.PARAMETER})
    assert not ledger.recoverable(1)
    assert ledger.recoverable(1, grasp=True)
    assert ledger.anchors(1) == [0]
    ledger.hold(0)
    assert ledger.recoverable(1)
    assert ledger.resident_bytes == 0
    ledger.let_go(0)
    ledger.gone(0)
    assert not ledger.recoverable(1, grasp=True)


def test_a_preserved_parameter_counts():
    ledger = a_ledger([8], kinds={0: Kind.PARAMETER})
    ledger.hold(0)
    assert ledger.resident_bytes == 0
    ledger.preserve(0)
    assert ledger.resident_bytes == 8
    ledger.validate()


def test_a_preserved_parameter_counts_with_its_handles():
    ledger = a_ledger([8], kinds={0: Kind.PARAMETER})
    ledger.save(0, 0)
    ledger.preserve(0)
    assert (ledger.resident_bytes, ledger.unevicted_bytes, ledger.peak_unevicted_bytes) == (8, 8, 8)
    ledger.validate()
    ledger.unsave(0)
    ledger.let_go(0)
    assert (ledger.resident_bytes, ledger.unevicted_bytes) == (0, 0)
    ledger.validate()


def test_without_an_op_that_may_run_again_nothing_is_recoverable():
    ledger = a_chain([1, 1], replayable=False)
    ledger.hold(0)
    assert not ledger.recoverable(0)
    assert not ledger.recoverable(1)
    assert not ledger.recoverable(1, grasp=True)


def test_an_unreplayable_ancestor_is_grasped_if_alive():
    """2 is made by a seedless op and alive: held, it is the root for 3; it cannot be its own root."""
    ops = [an_op(100, [0], [1]), an_op(101, [1], [2], replayable=False), an_op(102, [2], [3])]
    ledger = a_ledger([1, 1, 1, 1], ops)
    assert ledger.anchors(3) == [2]
    assert not ledger.recoverable(2, grasp=True)


def test_every_loose_root_is_named_once():
    """3 = f(1, 2), 1 = f(0), 2 = g(0, 9): both paths end at 0, one also at 4."""
    ops = [an_op(100, [0], [1]), an_op(101, [0, 4], [2]), an_op(102, [1, 2, 0], [3])]
    ledger = a_ledger([1] * 5, ops)
    assert sorted(ledger.anchors(3)) == [0, 4]


def test_no_recipe_needs_its_own_result():
    """Op 101 would make what op 100 has read already: the two recipes would wait for each other for ever."""
    with pytest.raises(LedgerError, match=r"record 1 was read before op 101 \(aten.f\) made it"):
        a_ledger([1, 1], [an_op(100, [1], [0]), an_op(101, [0], [1])])
    with pytest.raises(LedgerError, match=r"record 0 was read before op 100"):
        a_ledger([1], [an_op(100, [0], [0])])


def test_missing_ops_are_in_their_first_order():
    """5 = h(3, 4), 3 = f(1), 4 = g(1), 1 = e(0): a diamond. The ids decide, not the path the search takes."""
    ops = [an_op(10, [0], [1]), an_op(12, [1], [4]), an_op(11, [1], [3]), an_op(13, [4, 3], [5])]
    ledger = a_ledger([1] * 6, ops)
    ledger.hold(0)
    dropped(ledger, 1, 3, 4, 5)
    assert [op.id for op in ledger.missing_ops(5)] == [10, 11, 12, 13]


def test_missing_ops_begin_after_what_is_there():
    ledger = a_chain([1] * 5)
    dropped(ledger, 1, 3, 4)  # 2 is alive
    assert [op.id for op in ledger.missing_ops(4)] == [102, 103]
    ledger.save(2, 0)
    ledger.hold(2)
    swapped_out(ledger, 2)
    assert [op.id for op in ledger.missing_ops(4)] == [102, 103]


def test_nothing_is_missing_for_what_is_there():
    ledger = a_chain([1, 1])
    assert ledger.missing_ops(1) == []
    ledger.save(1, 0)
    ledger.hold(1)
    swapped_out(ledger, 1)
    assert ledger.missing_ops(1) == []


@pytest.mark.parametrize("replayable", [True, False])
def test_a_lost_ancestor_is_an_error(replayable):
    ledger = a_chain([1, 1], replayable=replayable)
    dropped(ledger, 0, 1)
    lost = 0 if replayable else 1
    with pytest.raises(LedgerError, match=f"record {lost} is gone and cannot be replayed"):
        ledger.missing_ops(1)


# -- who depends on what ----------------------------------------------------------------------------------------------
def test_needed_follows_recipes_as_far_as_values_are_missing():
    """0 -> 1 -> 2 -> 3, only 3 is saved. Each link that is there cuts the need of those before it."""
    ledger = a_chain([1] * 4)
    ledger.save(3, 0)
    assert [ledger.needed(r) for r in range(4)] == [True] * 4
    ledger.hold(2)
    assert [ledger.needed(r) for r in range(4)] == [False, False, True, True]
    ledger.hold(3)
    assert [ledger.needed(r) for r in range(4)] == [False, False, False, True]


def test_without_handles_nothing_is_needed():
    ledger = a_chain([1, 1])
    ledger.hold(1)
    assert not ledger.needed(0)
    assert not ledger.needed(1)


def test_supports_missing_asks_for_others_only():
    ledger = a_chain([1, 1])
    ledger.save(0, 0)
    assert ledger.needed(0)
    assert not ledger.supports_missing(0), "its own handle is not another record's need"
    ledger.save(1, 1)
    assert ledger.supports_missing(0)
    ledger.hold(1)
    assert not ledger.supports_missing(0)
    assert ledger[0].handles == 1
    ledger.validate()


# -- ends -------------------------------------------------------------------------------------------------------------
def test_forgetting_the_last_reader_forgets_the_chain():
    ledger = a_chain([1] * 4)
    dropped(ledger, 0, 1, 2, 3)
    forgotten, idle = ledger.forget_dead([3])
    assert (forgotten, idle) == ([3, 2, 1, 0], [])
    assert not ledger.records
    assert not ledger.ops


def test_a_chain_stays_while_anything_reads_it():
    """0 -> 1, and 1 -> 2 and 1 -> 3: 3 is alive, so 1 and 0 are still readable through its op."""
    ledger = a_ledger([1] * 4, [an_op(100, [0], [1]), an_op(101, [1], [2]), an_op(102, [1], [3])])
    dropped(ledger, 0, 1, 2)
    assert ledger.forget_dead([2]) == ([2], [])
    assert sorted(ledger.ops) == [100, 102]
    dropped(ledger, 3)
    assert ledger.forget_dead([3]) == ([3, 1, 0], [])


def test_an_op_stays_while_one_of_its_outputs_does():
    ledger = a_ledger([1] * 3, [an_op(100, [0], [1, 2])])
    dropped(ledger, 0, 1, 2)
    assert ledger.forget_dead([1]) == ([1], [])
    assert 100 in ledger.ops
    ledger.validate()
    assert ledger.forget_dead([2]) == ([2, 0], [])


def test_what_is_held_for_nothing_is_told():
    ledger = a_chain([1, 1])
    ledger.hold(0)
    dropped(ledger, 1)
    assert ledger.forget_dead([1]) == ([1], [0])
    assert 0 in ledger


def test_what_is_held_for_nothing_is_told_once():
    """2 = g(0, 1), 1 = f(0): both ops let go of 0."""
    ledger = a_ledger([1] * 3, [an_op(100, [0], [1]), an_op(101, [0, 1], [2])])
    ledger.hold(0)
    dropped(ledger, 1, 2)
    assert ledger.forget_dead([2]) == ([2, 1], [0])


@pytest.mark.parametrize("reason", ["handle", "user", "pin", "leaving", "coming", "alive"])
def test_nothing_in_use_is_forgotten(reason):
    ledger = a_chain([1, 1]) if reason == "user" else a_ledger([1])
    match reason:
        case "handle":
            ledger.save(0, 0)
        case "pin":
            ledger[0].pins = 1
        case "leaving" | "coming":
            ledger.hold(0)
            for step in WAY_TO[Host(reason)]:
                ledger.set_host(0, step)
    if reason in ("user", "pin"):
        ledger.gone(0)
    assert ledger.forget_dead([0]) == ([], [])
    assert 0 in ledger


def test_an_unknown_candidate_is_passed_over():
    assert a_ledger([1]).forget_dead([7]) == ([], [])


def test_cut_drops_recipes_and_forgets():
    ledger = a_chain([1] * 4)
    for record in (1, 2):
        ledger.save(record, record)
    ledger.hold(2)
    dropped(ledger, 1)
    ledger.unsave(1)
    ledger.unsave(2)
    assert ledger.cut() == ([1], [2])
    assert sorted(ledger.records) == [0, 2, 3]
    assert not ledger.ops
    assert all(r.op is None and not r.users and r.saved_at == -1 for r in ledger.records.values())
    ledger.validate()


def test_what_is_saved_when_a_step_is_cut_is_left_over():
    ledger = a_chain([1] * 3)
    ledger.save(1, 0)
    ledger.save(1, 0)
    ledger.save(2, 1)
    ledger.hold(1)
    ledger.cut()
    ledger.validate()
    assert (ledger.handles, ledger.own_handles) == (3, 0)
    ledger.save(2, 0)  # again, in the next step: both its handles are of that step now
    ledger.validate()
    assert (ledger.handles, ledger.own_handles) == (4, 2)
    ledger.unsave(1)
    assert (ledger.handles, ledger.own_handles) == (3, 2)
    ledger.unsave(2)
    assert (ledger.handles, ledger.own_handles) == (2, 1)
    ledger.validate()


def test_a_cut_keeps_the_recipes_of_what_is_missing_and_left_over():
    """0 -> 1 -> ... -> 5. Of the saved 2, 4 and 5, 4 is missing; it is made from 2, which is held."""
    ledger = a_chain([1] * 6)
    for order, record in enumerate((2, 4, 5)):
        ledger.save(record, order)
        ledger.hold(record)
    dropped(ledger, 1, 3, 4)
    ledger.cut()
    ledger.validate()
    assert sorted(ledger.ops) == [102, 103], "the ops that make 3 and 4"
    assert ledger.recoverable(4) and not ledger.recoverable(2)
    ledger.unsave(4)
    assert ledger.forget_dead([4]) == ([4, 3], [])
    ledger.validate()
    assert not ledger.ops


def test_a_handle_left_over_follows_its_bytes_to_the_version_it_was_taken_on():
    ledger = a_ledger([1, 1])
    ledger.save(0, 0)
    ledger.supersede(0, 1)
    ledger.cut()
    assert ledger.resolve(0) == 1
    ledger.create(2, 1, Kind.ACTIVATION)
    ledger.supersede(1, 2)
    ledger.validate()
    assert (ledger.resolve(0), ledger.own_handles) == (2, 0)
    ledger.unsave(2)
    ledger.cut()
    assert ledger.resolve(0) == 0, "nobody holds a handle on it any more"


# -- validate ---------------------------------------------------------------------------------------------------------
def a_busy_ledger() -> Ledger:
    """0 source (held), 1 leaving, 2 dropped and saved, 3 saved and alive, 4 parameter."""
    ops = [an_op(100, [0, 4], [1]), an_op(101, [0], [2]), an_op(102, [2], [3])]
    ledger = a_ledger([1, 2, 4, 8, 16], ops, {0: Kind.SOURCE, 4: Kind.PARAMETER})
    ledger.hold(0)
    for record in (1, 2, 3):
        ledger.save(record, record)
    ledger.hold(1)
    ledger.set_host(1, Host.LEAVING)
    dropped(ledger, 2)
    ledger.validate()
    return ledger


@pytest.mark.parametrize("total", ["resident_bytes", "unevicted_bytes", "leaving_bytes", "handles", "left_over"])
@pytest.mark.parametrize("by", [1, -1])
def test_validate_sees_a_wrong_total(total, by):
    ledger = a_busy_ledger()
    setattr(ledger, total, getattr(ledger, total) + by)
    with pytest.raises(LedgerError, match=f"{total} is"):
        ledger.validate()


def held_but_dead(ledger):
    ledger[4].held, ledger[4].alive = True, False  # a parameter: no total gives it away first


def leaving_but_not_held(ledger):
    ledger[1].held = False


def unknown_user(ledger):
    ledger[3].users.add(999)


def user_that_does_not_read(ledger):
    ledger[3].users.add(100)


def producer_that_does_not_make_it(ledger):
    ledger[3].op = 101


def producer_that_is_gone(ledger):
    ledger[3].op = 999


def reader_not_listed(ledger):
    ledger[4].users.clear()


def pins_below_zero(ledger):
    ledger[3].pins = -1


def handles_below_zero(ledger):
    ledger[0].handles = -1
    ledger.handles -= 1
    ledger.left_over -= 1
    ledger.unevicted_bytes += 1  # a record with any number of handles but 0 counts


def miscounted(ledger):
    ledger[0].accounted_bytes -= 1


def lost(ledger):
    ledger[0].held = False
    ledger.held.pop(0)
    ledger.dead_ends.add(0)
    miscounted(ledger)
    ledger.resident_bytes -= 1


def dead_end_not_listed(ledger):
    ledger.dead_ends.clear()
    ledger[0].held = False
    ledger.held.pop(0)
    miscounted(ledger)
    ledger.resident_bytes -= 1


def dead_end_that_is_none(ledger):
    ledger.dead_ends.add(1)


def held_not_listed(ledger):
    ledger.held.pop(0)


def listed_without_being_held(ledger):
    ledger.held[3] = None


def wrong_output_count(ledger):
    ledger._outputs_left[101] += 1


@pytest.mark.parametrize(
    ("corrupt", "told"),
    [
        (held_but_dead, "record 4 is held but not alive"),
        (leaving_but_not_held, "record 1 is being copied out without being held"),
        (unknown_user, "record 3 lists a user that does not read it"),
        (user_that_does_not_read, "record 3 lists a user that does not read it"),
        (producer_that_does_not_make_it, "record 3 names a producer that does not make it"),
        (producer_that_is_gone, "record 3 names a producer that does not make it"),
        (reader_not_listed, "op 100 reads a record that does not list it"),
        (pins_below_zero, "record 3 has 1 handles and -1 pins"),
        (handles_below_zero, "record 0 has -1 handles and 0 pins"),
        (miscounted, "record 0 counts 0 bytes for 1"),
        (lost, "record 2 is saved, gone, and cannot be brought back"),
        (dead_end_not_listed, "the list of dead ends differs"),
        (dead_end_that_is_none, "the list of dead ends differs"),
        (held_not_listed, "the list of held records differs"),
        (listed_without_being_held, "the list of held records differs"),
        (wrong_output_count, "op 101 counts 2 outputs wrongly"),
    ],
)
def test_validate_sees_each_kind_of_corruption(corrupt, told):
    ledger = a_busy_ledger()
    corrupt(ledger)
    with pytest.raises(LedgerError, match=told):
        ledger.validate()


def test_who_is_read_is_known_again_when_a_reader_at_the_end_of_a_chain_is_saved():
    """Nobody depended on any of them when that was asked first."""
    ledger = a_chain([8] * 5)
    assert [ledger.needed(record) for record in range(5)] == [False] * 5
    ledger.save(4, 0)
    assert [ledger.needed(record) for record in range(5)] == [True] * 5
    ledger.validate()
    ledger.hold(2)
    assert [ledger.supports_missing(record) for record in range(4)] == [False, False, True, True]
    ledger.validate()
