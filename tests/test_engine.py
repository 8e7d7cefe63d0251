"""Golden schedules: events in, the exact instructions out. Units: bytes, ns; the link moves one byte a ns.

In all of them s (record 0) is a source of 10 bytes, and op k makes record k out of record k - 1 in 10 ns.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from toy import LINK, Toy

from delta import room
from delta.budget import Budget
from delta.descent import Descent
from delta.engine import Engine
from delta.errors import BudgetError
from delta.keeping import Kept
from delta.planner import Plan
from delta.planner.assemble import plan_of
from delta.planner.steplog import Moves, build_graph
from delta.profile import Profile
from delta.record import Host, Record
from delta.routine import Routine
from delta.shortage import parts_of
from delta.types import (
    Action,
    AwaitIn,
    AwaitOut,
    Drop,
    Forget,
    FreeHost,
    Hold,
    Kind,
    Link,
    Mode,
    Preserve,
    Release,
    SwapIn,
    SwapOut,
)
from delta.units import Bytes, Share

RECOMPUTE = ("keep", "recompute")
SWAP = ("keep", "swap")


def forward(toy: Toy, count: int, nbytes: int = 100, start: int = 0) -> list[list]:
    """s -> 1 -> 2 ...: each is saved when its op has run and dropped by the program when the next op has read it."""
    if not start:
        toy.source(0, 10)
    said = []
    for k in range(start + 1, start + count + 1):
        toy.op(k, nbytes, [k - 1])
        if k - 1 in toy.program and k > 1:
            toy.let_go(k - 1)
        said.append(toy.save(k, 10 * k))
    return said


def leaves(toy: Toy, record: int, at: int) -> None:
    """The one record that may go is on its way out."""
    toy.slow = True
    toy._do(toy.engine.rescue(at))
    toy.slow = False
    assert toy.leaving == [record]


# -- online eviction in forward ---------------------------------------------------------------------------------------
def test_a_step_that_fits_is_left_alone():
    toy = Toy(1000)
    assert forward(toy, 3) == [[Hold(1)], [Hold(2)], [Hold(3)]]
    toy.let_go(3)
    assert toy.use(3, 40) == [Release(3), Forget(3)]
    assert toy.use(2, 50) == [Release(2), Forget(2)]
    # the end of the step: recipes go, so nothing reads s any more; the program still holds it
    assert toy.use(1, 60) == [Release(1), Forget(1)]
    assert toy.engine.totals.evictions == {}
    assert toy.engine.totals.peak_bytes == 300


def test_recomputing_online():
    """Limit 250. After each save there must be room for one more of the largest so far, 100.

    save 1: 100 resident, 200 with the next: fits.
    save 2: 200, 300 with the next: 50 over. Scores cost / (bytes * idle^0.3): 1 (10+1)/(100*(10+1)^0.3) = 0.054,
            2 (10+1)/(100*1) = 0.11 -> 1 goes. Its recipe reads s, which has to be held for that (10 bytes).
    save 3: 2 + 3 + s = 210, 310 with the next: 60 over. 2 costs 10 + 10 (1 is missing): 21/(100*11^0.3) = 0.10;
            3: 11/100 = 0.11 -> 2 goes.
    """
    toy = Toy(250, RECOMPUTE)
    assert forward(toy, 3) == [
        [Hold(1)],
        [Hold(2), Hold(0), Drop(1, Action.RECOMPUTE)],
        [Hold(3), Drop(2, Action.RECOMPUTE)],
    ]
    assert toy.engine.ledger.resident_bytes == 110


def test_replay_goes_from_the_root_to_the_target_and_keeps_what_is_needed_later():
    """1 and 2 were dropped. Need 2 replays 1, then 2; 1 has a handle of its own and stays."""
    toy = Toy(250, RECOMPUTE)
    forward(toy, 3)
    toy.let_go(3)
    assert toy.use(3, 40) == [Release(3), Forget(3)]
    assert toy.need(2, 50) == []
    assert toy.replayed == [1, 2]
    assert toy.engine.ledger.resident_bytes == 210
    assert toy.unsave(2) == [Release(2), Forget(2)]
    assert toy.need(1, 60) == []
    assert toy.replayed == [1, 2], "1 was kept"
    # with 1 the last handle goes, and with its recipe the reason to hold s
    assert toy.unsave(1) == [Release(1), Forget(1), Release(0)]
    assert toy.engine.totals.recomputed_bytes == 200


def test_what_a_replay_makes_for_nobody_goes_at_once():
    """2 is not saved: replayed for 3 and let go when 3 has been made."""
    toy = Toy(150, RECOMPUTE)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.op(2, 60, [1])
    toy.op(3, 50, [2])
    toy.let_go(1, 2)  # nobody saved them: they die, but 3's recipe still reads them
    # 50 + 50 fit
    assert toy.save(3, 30) == [Hold(3)]
    toy.op(4, 80, [3], cost_ns=40)
    # 50 + 80, and 80 for the next: 60 over. 3 costs 10 + 10 + 10: 31/(50*11^0.3) = 0.30; 4: 41/80 = 0.51. 3 is not
    # enough, and 4 goes too (it reads 3, so its chain is 3 ops longer now, which is no reason: there is nothing else)
    toy.let_go(3)
    assert toy.save(4, 40) == [Hold(4), Hold(0), Drop(3, Action.RECOMPUTE), Drop(4, Action.RECOMPUTE)]
    toy.let_go(4)
    # replaying 2 makes 1 useless, replaying 3 makes 2 useless; 3 itself is saved and stays
    assert toy.need(4, 50) == [Release(1), Release(2)]
    assert toy.replayed == [1, 2, 3, 4]


def test_swapping_online():
    """Limit 250, nothing but swaps. Room is needed at once, so the copy is waited for.

    save 2: 50 over. Cost: exposed 100 out + 100 back - idle ahead (as long as since its last use).
            1: out 100 exposed, back at 20+200 = 220, next use guessed at 20 + 10: 190 -> 290; /(100*11^0.3) = 1.4
            2: out 100, back at 220, used at 20: 200 -> 300; /(100*1) = 3 -> 1 goes.
    save 3: 2 + 3 = 200, 300 with the next: 50 over; 2 is the older one again.
    """
    toy = Toy(250, SWAP)
    assert forward(toy, 3) == [
        [Hold(1)],
        [Hold(2), SwapOut(1, wait=True), Drop(1, Action.SWAP)],
        [Hold(3), SwapOut(2, wait=True), Drop(2, Action.SWAP)],
    ]
    assert toy.engine.totals.swapped_out_bytes == 200


def test_what_was_swapped_comes_back_and_the_next_is_prefetched():
    """After need 3: both 1 and 2 are on the host, the last saved first. Resident 100 (3): both fit under 250 only one
    after the other: 2 comes at once (200), 1 does not fit."""
    toy = Toy(250, SWAP)
    forward(toy, 3)
    toy.let_go(3)
    assert toy.need(3, 40) == [SwapIn(2)]
    assert toy.unsave(3) == [Release(3), Forget(3)]
    # need 2: nothing to start; served, then 1 fits beside it
    assert toy.need(2, 50) == [SwapIn(1)]
    assert toy.unsave(2) == [Release(2), Forget(2)]
    assert toy.use(1, 60) == [Release(1), Forget(1), FreeHost(1)], "unless it dies of the release"
    assert toy.engine.totals.swapped_in_bytes == 200


def test_what_the_program_still_has_keeps_no_host_copy_that_nobody_needs():
    """It may write into it, and save it once more."""
    toy = Toy(250, SWAP)
    forward(toy, 3)
    toy.need(1, 40)
    toy.program.add(1)
    toy.unsave(3), toy.unsave(2)
    assert FreeHost(1) in toy.unsave(1)
    assert toy.engine.ledger[1].host is Host.NONE and 1 in toy.engine.ledger


def coming_back() -> Toy:
    """1 is on the host, 2 on its way back and not asked for yet, 3 done with; from here on the limit is 150."""
    toy = Toy(250, SWAP)
    forward(toy, 3)
    toy.let_go(3)
    assert toy.use(3, 40)[0] == SwapIn(2)
    toy.engine.budget.activations = Bytes(150)
    return toy


def test_a_copy_back_that_nobody_waits_for_goes_again_where_nothing_else_can():
    """Until it has ended it is no candidate; without that, 1 would come beside it: 200 bytes."""
    toy = coming_back()
    assert toy.need(1, 50) == [AwaitIn(2), Drop(2, Action.SWAP), SwapIn(1)]
    toy.unsave(1)
    assert toy.engine.ledger[2].host is Host.WHOLE
    assert toy.use(2, 60)[0] == SwapIn(2)
    assert toy.engine.totals.evictions == {"swap": 3}


def test_what_is_about_to_come_counts_when_it_does():
    """The end of another copy, seen in between, makes no peak of it."""
    toy = coming_back()
    toy.engine.budget.activations = Bytes(1000)
    toy.engine.ledger.restart_peaks()
    assert toy.engine.need(1, 50) == [SwapIn(1)]
    toy.copy_ends(2)
    assert toy.engine.ledger.peak_resident_bytes == 100
    toy.engine.transfers.coming()
    assert toy.engine.ledger.peak_resident_bytes == 200


def test_what_is_needed_last_goes_again_first():
    toy = coming_back()
    toy.engine.budget.activations = Bytes(1000)
    assert toy._do(toy.engine.prefetch(42)) == [SwapIn(1)]
    toy.engine.budget.activations = Bytes(150)
    toy._do(toy.engine.pressure(45))
    assert (toy.coming, toy.mine) == ([2], {2}), "one is enough"


def test_a_copy_back_that_goes_again_but_is_asked_for_stays():
    toy = coming_back()
    toy.engine.budget.activations = Bytes(50)
    assert toy.engine.pressure(45) == [AwaitIn(2)]
    toy.engine.budget.activations = Bytes(150)
    assert Drop(2, Action.SWAP) not in toy.need(2, 50)
    assert 2 in toy.mine
    assert toy.unsave(2) == [Release(2), Forget(2)]


def test_a_copy_back_that_goes_again_and_fails_is_asked_for_as_ever():
    toy = coming_back()
    toy.engine.budget.activations = Bytes(50)
    assert toy.engine.pressure(45) == [AwaitIn(2)]
    toy.engine.budget.activations = Bytes(150)
    toy.coming.remove(2), toy.mine.remove(2)
    toy.engine.transfers.copy_in_failed(2)
    assert toy._do(toy.engine.prefetch(50)) == [SwapIn(2)]
    assert toy.copy_ends(2) == [], "this time it has room"
    assert toy.engine.totals.evictions == {"swap": 2}


def test_a_copy_back_that_somebody_waits_for_does_not_go_again():
    toy = coming_back()
    toy.engine.budget.activations = Bytes(50)
    assert toy.engine.need(2, 45) == []
    assert toy.engine.pressure(45) == []


@pytest.mark.parametrize("turned_back", [False, True])
def test_a_copy_back_that_nobody_can_ask_for_is_forgotten_when_it_has_ended(turned_back):
    toy = coming_back()
    toy.engine.budget.activations = Bytes(50 if turned_back else 150)
    assert toy.engine.pressure(45) == [AwaitIn(2)] * turned_back
    assert toy.unsave(2) == []
    assert toy.copy_ends(2)[-1] == Forget(2)
    assert 2 not in toy.engine.ledger and 2 not in toy.mine


def test_prefetch_can_be_turned_off():
    toy = Toy(250, SWAP, prefetch={"window": 0})
    forward(toy, 3)
    assert toy.need(3, 40) == []
    toy.unsave(3)
    assert toy.need(2, 50) == [SwapIn(2)]


@pytest.mark.parametrize("window", [100, 150])
def test_the_prefetch_window_bounds_what_is_on_its_way(window):
    toy = Toy(10_000, SWAP, prefetch={"window": window})
    forward(toy, 3)
    for record in (1, 2, 3):
        toy.let_go(record)
    toy.engine.budget.activations = Bytes(0)
    toy._do(toy.engine.pressure(35))
    toy.engine.budget.activations = Bytes(10_000)
    # 3 is needed and comes back; 2 (100 bytes) fits the window, 1 beside it does not
    assert toy.need(3, 40) == [SwapIn(3), SwapIn(2)]
    toy.copy_ends(2)
    assert toy.need(3, 45) == [SwapIn(1)]


def test_what_the_program_still_has_is_not_copied_back():
    toy = Toy(10_000, SWAP)
    forward(toy, 3)
    toy.program.add(1)
    for record in (1, 2):
        toy._do(toy.engine._room.carry_out(toy.engine.ledger[record], Action.SWAP, 30, wait=True))
    assert [i for i in toy.need(3, 40) if isinstance(i, (Hold, SwapIn))] == [SwapIn(2), Hold(1)]


def test_the_director_picks_per_record():
    """Room is needed at once, so a swap of 100 bytes costs at least its 100 ns out: less than op 1, more than op 2."""
    toy = Toy(150)
    toy.source(0, 10)
    toy.op(1, 100, [0], cost_ns=5000)
    toy.op(2, 100, [0], cost_ns=10)
    assert toy.save(1, 10) == [Hold(1), SwapOut(1, wait=True), Drop(1, Action.SWAP)]
    toy.let_go(1)
    assert toy.save(2, 20) == [Hold(2), Hold(0), Drop(2, Action.RECOMPUTE)]
    toy.let_go(2)
    assert toy.need(2, 30) == []
    assert toy.unsave(2) == [Release(2), Forget(2)]
    assert toy.need(1, 40) == [SwapIn(1)]
    assert toy.replayed == [2]


def logits(limit, actions=("keep", "swap", "recompute"), host_full: bool = False) -> Toy:
    """2 <- 1 <- a parameter, of which only 2 is saved, and evicted: as the loss of a language model and its logits. To
    copy it would cost more than to make it again, which takes 200 bytes, those of 1 and its own."""
    toy = Toy(limit, actions)
    toy.engine._room.candidates.host_full = host_full
    toy.source(0, 1000, Kind.PARAMETER)
    toy.op(1, 100, [0])
    toy.op(2, 100, [1])
    toy.save(2, 10)
    toy.let_go(1, 2)
    toy._do(toy.engine.rescue(20))
    assert 2 not in toy.mine
    return toy


@pytest.mark.parametrize(("limit", "action"), [(200, "recompute"), (199, "swap")])
def test_what_a_replay_would_have_no_room_for_is_copied_instead(limit, action):
    toy = logits(limit)
    assert toy.engine.totals.evictions == {action: 1}
    toy.use(2, 40)
    assert toy.engine.totals.peak_bytes <= limit
    assert toy.replayed == ([1, 2] if action == "recompute" else [])


def test_with_a_larger_budget_it_is_made_again():
    toy = logits(199)
    toy.need(2, 30)
    toy.engine.ledger.set_host(2, Host.NONE)
    toy.engine.budget.activations = Bytes(200)
    assert toy._do(toy.engine.rescue(40))[-1] == Drop(2, Action.RECOMPUTE)


def test_only_its_own_replay_counts():
    """Op 3, which makes nothing that is saved, wants more than there is room for; to make 2 again takes just that."""
    toy = Toy(110)
    toy.source(0, 10)
    toy.op(2, 100, [0])
    toy.op(3, 11, [2])
    toy.save(2, 10)
    toy.let_go(2, 3)
    toy._do(toy.engine.rescue(20))
    assert toy.engine.totals.evictions == {"recompute": 1}


def test_every_op_of_a_replay_wants_room():
    """3 is small, and read little: but that was made of much."""
    toy = Toy(150)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.op(2, 60, [1])
    toy.op(3, 20, [2])
    toy.save(3, 10)
    toy.let_go(1, 2, 3)
    toy._do(toy.engine.rescue(20))
    assert toy.engine.totals.evictions == {"swap": 1}


def test_an_op_that_no_replay_runs_wants_no_room():
    """2, of which 3 is made, is on the host: op 2, which wants 160 bytes, does not run again."""
    toy = Toy(150)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.op(2, 60, [1], cost_ns=10_000)
    toy.save(2, 5)
    toy.let_go(1, 2)
    toy._do(toy.engine.rescue(7))
    toy.op(3, 20, [2])
    toy.save(3, 10)
    toy.let_go(3)
    toy._do(toy.engine.rescue(20))
    assert toy.engine.totals.evictions == {"swap": 1, "recompute": 1}


@pytest.mark.parametrize(("actions", "host_full"), [(RECOMPUTE, False), (("keep", "swap", "recompute"), True)])
def test_what_cannot_be_copied_is_made_again_without_room(actions, host_full):
    assert logits(199, actions, host_full).engine.totals.evictions == {"recompute": 1}


def test_what_is_on_the_host_needs_no_room_there():
    toy = logits(199)
    toy.need(2, 30)
    toy.engine._room.candidates.host_full = True
    assert toy._do(toy.engine.rescue(40)) == [Drop(2, Action.SWAP)]


def test_a_share_of_what_is_not_known_yet_is_a_limit_like_others():
    """Half of the 100 bytes so far is too little for the replay. Half of the step's may not be, but nobody knows."""
    assert logits(Budget(activations=Share(0.5))).engine.totals.evictions == {"swap": 1}


def test_a_replay_reads_a_swapped_ancestor_from_the_host():
    """3 <- 2 <- 1: 1 is on the host, 2 was not saved, 3 was dropped. Op 1 does not run again."""
    toy = Toy(1000, rules=[{"op": "aten.dear", "action": "swap"}, {"op": "aten.f", "action": "recompute"}])
    toy.source(0, 10)
    toy.op(1, 100, [0], name="aten.dear")
    toy.op(2, 40, [1])
    toy.op(3, 50, [2])
    toy.save(1, 10), toy.save(3, 30)
    toy.let_go(1, 2, 3)
    toy._do(toy.engine.rescue(35))
    assert toy.mine == set()
    assert toy.need(3, 40) == [SwapIn(1), Release(2)]
    assert toy.replayed == [2, 3]


def test_copies_that_are_under_way_are_waited_for_first():
    """A copy out that is late frees its room without evicting anything else."""
    toy = Toy(1000, SWAP)
    forward(toy, 1)
    leaves(toy, 1, 15)
    forward(toy, 1, start=1)
    toy.engine.budget.activations = Bytes(100)
    assert toy._do(toy.engine.pressure(30)) == [AwaitOut(1), Drop(1, Action.SWAP)]


def test_without_memory_copies_under_way_are_waited_for_too():
    toy = Toy(1000, SWAP)
    forward(toy, 1)
    leaves(toy, 1, 15)
    forward(toy, 1, start=1)
    done = toy._do(toy.engine.rescue(30))
    assert done == [AwaitOut(1), Drop(1, Action.SWAP), SwapOut(2, wait=True), Drop(2, Action.SWAP)]


@pytest.mark.parametrize(("loose", "awaited"), [((), [1, 2]), ((2,), [2])])
def test_a_copy_out_of_what_the_program_still_uses_frees_nothing_now(loose, awaited):
    """200 bytes are on their way out, and 50 have to go. Which of them the program lets go of first nobody knows."""
    toy = Toy(250, SWAP)
    toy.source(0, 10)
    for k in (1, 2):
        toy.op(k, 100, [k - 1])
    toy.slow = True
    toy.save(1, 10)
    toy.save(2, 20)
    toy._do(toy.engine.make_place(1, 25))
    assert toy.leaving == [1, 2]
    toy.let_go(*loose)
    assert [i.record for i in toy.engine.allocating(100, 30) if isinstance(i, AwaitOut)] == awaited


@pytest.mark.parametrize("read", [Engine.still_used, lambda engine, records: engine.lent(records[0], 30)])
def test_a_copy_out_of_what_backward_or_a_replay_reads_frees_nothing_either(read):
    """A card that is behind the host is behind with its copies out, too, and backward may have come to one of them."""
    toy = Toy(250, SWAP)
    toy.source(0, 10)
    for k in (1, 2):
        toy.op(k, 100, [k - 1])
    toy.slow = True
    toy.save(1, 10)
    toy.save(2, 20)
    toy._do(toy.engine.make_place(1, 25))
    toy.let_go(1, 2)
    assert toy.leaving == [1, 2]
    read(toy.engine, [1])
    assert [i.record for i in toy.engine.allocating(100, 30) if isinstance(i, AwaitOut)] == [2]


def test_while_storages_are_only_kept_it_is_looked_up_what_backward_uses():
    toy, asked = Toy(250, SWAP), []
    forward(toy, 1)
    leaves(toy, 1, 15)
    toy.engine.keeping.find_used = lambda: asked.append(1) or toy.engine.still_used([1])
    toy.engine.keeping.first(Kept(key=7, record=3, nbytes=140, order=1, saved_ns=0), 0, 0)
    assert toy.engine._room.await_for(100) == [AwaitOut(1)] and not asked, "forward gives nothing out"
    toy.engine.learner.needed(1, 30)
    assert toy.engine._room.await_for(10) == [] and not asked, "there is room"
    assert toy.engine._room.await_for(100) == [] and asked


@pytest.mark.parametrize(
    ("order", "nbytes", "awaited"), [(1, 90, []), (1, 91, [AwaitOut(1)]), (0, 91, []), (2, 91, [])]
)
def test_before_a_save_that_a_routine_expects_a_late_copy_is_waited_for(order, nbytes, awaited):
    """Where there is no room for it, and for what comes next."""
    toy = Toy(250, SWAP)
    forward(toy, 1)
    leaves(toy, 1, 15)
    assert toy.engine.expected.await_for_save(1, 91) == [], "there is no routine"
    toy.engine.learner.routine = Routine([], [], coming_bytes=[60, 60, 60])
    assert toy.engine.expected.await_for_save(order, nbytes) == awaited


def test_what_a_recipe_cannot_do_without_has_room_before_it_counts():
    """Nobody has recorded how 2 is made, and 3 is made from it: 100 bytes count from here on. A copy out is late."""
    toy = Toy(1000)
    room, ledger = toy.engine._room, toy.engine.ledger
    toy.source(0, 10)
    toy.op(1, 200, [0])
    toy.save(1, 10)
    toy.let_go(1)
    toy._do(room.carry_out(ledger[1], Action.SWAP, 15, wait=False))
    toy.source(2, 100, Kind.ACTIVATION)
    toy.op(3, 100, [2])
    toy.save(3, 20)
    assert toy.leaving == [1]
    toy.engine.budget.activations = Bytes(350)
    gone = [AwaitOut(1), Drop(1, Action.SWAP), Hold(2), Drop(3, Action.RECOMPUTE)]
    assert toy._do(room.carry_out(ledger[3], Action.RECOMPUTE, 20, wait=False)) == gone
    assert ledger.peak_resident_bytes == 300


@pytest.mark.parametrize(("planned_bytes", "coming_bytes"), [((40, 30), -60), ((40, 70), 30 - 60), ((100, 130), 30)])
def test_what_a_late_copy_frees_over_the_plan_is_taken_off_what_comes_next(planned_bytes, coming_bytes):
    """100 bytes are resident, which a copy out that is waited for gives back: all that the plan has there, or more."""
    toy = Toy(1000)
    forward(toy, 1)
    toy.let_go(1)
    room, learner, asked = toy.engine._room, toy.engine.learner, []
    plan = plan_of(build_graph(learner.log, 0), LINK, [Action.KEEP])
    plan = replace(plan, saved_bytes=(100, 100), forward_bytes=planned_bytes)
    learner.log.loose_at[0] = 1
    room.await_out = lambda over_bytes, *_: ([AwaitOut(1)], over_bytes - 100)
    room.make = lambda nbytes, *_, **__: asked.append(nbytes) or []
    assert room.make_for_next(plan, 0, 20) == [AwaitOut(1)]
    assert asked == [coming_bytes]


def test_all_that_a_replay_takes_has_room_before_copies_back_begin():
    """They count from when they are decided, and the first one would be seen to be over the limit by the second."""
    toy = Toy(1000)
    room, ledger = toy.engine._room, toy.engine.ledger
    toy.source(0, 10)
    for k, read in ((1, [0]), (2, [0]), (3, [1, 2]), (4, [0])):
        toy.op(k, 100, read)
        toy.save(k, 10 * k)
    toy.let_go(1, 2, 3, 4)
    for k, action in ((1, Action.SWAP), (2, Action.SWAP), (3, Action.RECOMPUTE), (4, Action.SWAP)):
        toy._do(room.carry_out(ledger[k], action, 50, wait=k != 4))
    assert toy.leaving == [4]
    toy.engine.budget.activations = Bytes(310)
    assert toy.need(3, 60)[:4] == [AwaitOut(4), Drop(4, Action.SWAP), SwapIn(1), SwapIn(2)]


def test_copies_that_the_plan_counts_on_are_not_counted_twice():
    """The limit has fallen to 250 since it was planned that 100 of 240 bytes have left when 140 more come. Waiting for
    those 100 leaves 280: the other storage has to go too, and not the copy that is waited for once more."""
    toy = Toy(1000, SWAP)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.op(2, 140, [1])
    toy.save(1, 10)
    toy.slow = True
    toy._do(toy.engine.make_place(1, 15))
    toy.save(2, 20)
    toy.let_go(1, 2)
    assert (toy.leaving, toy.engine.ledger.resident_bytes) == ([1], 240)
    toy.engine.budget.activations = Bytes(250)
    plan = Plan((), {}, (), (), (100, 140), (240, 280), 280, 0, 0, {}, {}, ())
    told = toy.engine._room.make_for_next(plan, 0, 30)
    assert told == [AwaitOut(1), SwapOut(2, wait=True)]


def test_small_storages_are_never_evicted():
    toy = Toy(250, RECOMPUTE, filter={"min_bytes": 101})
    assert forward(toy, 3) == [[Hold(1)], [Hold(2)], [Hold(3)]]


def test_rules_decide_before_costs():
    toy = Toy(250, rules=[{"op": "aten.f", "action": "swap"}])
    assert forward(toy, 2)[1] == [Hold(2), SwapOut(1, wait=True), Drop(1, Action.SWAP)]
    toy = Toy(250, rules=[{"op": "aten.*", "action": "keep"}])
    assert forward(toy, 2)[1] == [Hold(2)]


def test_parameters_are_not_counted_and_not_held():
    toy = Toy(10)
    toy.source(7, 1000, Kind.PARAMETER)
    assert toy.save(7, 5) == []
    assert toy.engine.ledger.resident_bytes == 0
    assert toy.need(7, 6) == []


def test_delta_paper_counts_the_whole_swap():
    """Op 1 takes 150 ns, its swap 100 + 100, all of it hidden (the room is not needed before the next op).

    The published rule does not know that: 150 < 200, recompute.
    """
    toy = Toy(150, filter={"min_bytes": 0, "score": "delta-paper"})
    toy.source(0, 10)
    toy.op(1, 100, [0], cost_ns=150)
    assert toy.save(1, 10) == [Hold(1), Hold(0), Drop(1, Action.RECOMPUTE)]
    toy = Toy(150, filter={"min_bytes": 0, "score": "delta-paper"})
    toy.source(0, 10)
    toy.op(1, 100, [0], cost_ns=201)
    assert toy.save(1, 10) == [Hold(1), SwapOut(1, wait=True), Drop(1, Action.SWAP)]


def test_what_the_program_still_uses_is_dropped_but_not_gone():
    """1 is evicted while the program holds it: need finds it alive and copies nothing."""
    toy = Toy(150, SWAP)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    assert toy.save(1, 10) == [Hold(1), SwapOut(1, wait=True), Drop(1, Action.SWAP)]
    assert toy.engine.ledger.resident_bytes == 100
    assert toy.need(1, 20) == [Hold(1)]
    assert toy.engine.totals.swapped_in_bytes == 0


def test_two_handles_on_one_storage_count_once():
    toy = Toy(1000)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    assert toy.save(1, 10) == [Hold(1)]
    assert toy.save(1, 11) == []
    assert toy.engine.ledger.resident_bytes == 100
    toy.let_go(1)
    assert toy.use(1, 20) == []
    assert toy.use(1, 21) == [Release(1), Forget(1)]


# -- backward, more than once -----------------------------------------------------------------------------------------
def test_retain_graph_needs_everything_twice():
    """Limit 210. Forward: save 2 drops 1 (and holds s, 10 bytes), save 3 drops 2; 3 and s are left.

    First backward: need 2 replays 1 (s + 3 + 1 = 210 fits) and 2, for which 3 has to go (1 is read by the op). With
    every handle still alive the second backward finds 1 and 2.
    Second backward: need 3 replays 3; 2 is read by it, so 1 goes. Need 1 replays 1; of 2, used 10 ns ago, with a chain
    of 10 + 10 ns (21/(100*11^0.3)) and 3, used 20 ns ago, with 10 (11/(100*21^0.3)), 3 goes.
    """
    toy = Toy(210, RECOMPUTE)
    forward(toy, 3)
    toy.let_go(3)
    said = [toy.need(record, at) for record, at in ((3, 40), (2, 50), (1, 60))]
    assert said == [[], [Drop(3, Action.RECOMPUTE)], []]
    assert toy.replayed == [1, 2]
    said = [toy.need(record, at) for record, at in ((3, 80), (2, 90), (1, 100))]
    assert said == [[Drop(1, Action.RECOMPUTE)], [], [Drop(3, Action.RECOMPUTE)]]
    assert toy.replayed == [1, 2, 3, 1]
    assert toy.unsave(3) == [Forget(3)]
    assert toy.unsave(2) == [Release(2), Forget(2)]
    assert toy.unsave(1) == [Release(1), Forget(1), Release(0)]
    assert toy.engine.totals.steps == 1
    assert toy.engine.totals.peak_bytes == 210


def test_serving_twice_at_once_pins_twice():
    """Two threads of backward may hold the same value."""
    toy = Toy(1000)
    forward(toy, 1)
    toy._do(toy.engine.need(1, 20))
    toy._do(toy.engine.need(1, 21))
    assert toy.engine.ledger[1].pins == 2
    toy._do(toy.engine.rescue(22))
    assert 1 in toy.mine, "in use: it cannot go"
    toy._do(toy.engine.served(1))
    toy._do(toy.engine.rescue(23))
    assert 1 in toy.mine
    toy._do(toy.engine.served(1))
    assert toy._do(toy.engine.rescue(24))


def test_what_backward_has_been_given_is_no_candidate_until_it_has_let_go_of_it():
    """Dropping 2 for 3 would free nothing while backward reads it: 1 goes."""
    toy = Toy(1000)
    forward(toy, 2)
    toy.let_go(1, 2)
    toy._do(toy.engine.need(2, 30))
    toy._do(toy.engine.served(2))
    toy.engine.given(2)
    assert [each.record for each in toy._do(toy.engine.rescue(31)) if isinstance(each, Drop)] == [1]
    toy.engine.still_used([])
    assert [each.record for each in toy._do(toy.engine.rescue(32)) if isinstance(each, Drop)] == [2]


def test_what_is_saved_no_more_goes_when_it_has_been_served():
    toy = Toy(1000)
    forward(toy, 2)
    toy.let_go(2)
    toy._do(toy.engine.need(2, 30))
    assert toy.unsave(2) == [], "in use: it cannot go"
    assert toy._do(toy.engine.served(2)) == [Release(2), Forget(2)]


# -- writes in place --------------------------------------------------------------------------------------------------
def test_a_version_that_a_dropped_record_reads_is_preserved():
    """2 = f(1) was dropped; 1 is overwritten by 3 = g(1). The recipe of 2 reads the old 1, so that is cloned first."""
    toy = Toy(150, RECOMPUTE)
    toy.source(0, 10)
    toy.op(1, 20, [0])
    toy.op(2, 100, [1])
    # 100, and 100 for the next: over. What a replay of 2 begins with is s
    assert toy.save(2, 20) == [Hold(2), Hold(0), Drop(2, Action.RECOMPUTE)]
    toy.let_go(2)
    assert toy.overwrite(1, 3, [1], 20) == [Preserve(1)]
    assert toy.engine.ledger[1].held
    # the clone goes when 2 has been made: s is held, so 1 can be had again
    assert toy.need(2, 40) == [Release(1)]
    assert toy.replayed == [2]


def test_a_version_nobody_reads_again_is_let_go():
    toy = Toy(1000, RECOMPUTE)
    toy.source(0, 10)
    toy.op(1, 20, [0])
    # 3 = g(1), written into 1's storage: 3's own recipe reads 1, which can be made again from s
    assert toy.overwrite(1, 3, [1], 20) == []
    assert not toy.engine.ledger[1].alive
    assert toy.save(3, 20) == [Hold(3)]
    toy.let_go(3)
    assert toy._do(toy.engine.rescue(30)) == [Hold(0), Drop(3, Action.RECOMPUTE)]
    toy.need(3, 40)
    assert toy.replayed == [1, 3]


def test_handles_follow_an_overwritten_storage():
    """1 was saved and is overwritten: plain autograd's saved tensor shows the new bytes too (and complains of it)."""
    toy = Toy(1000)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.save(1, 10)
    assert toy.overwrite(1, 2, [1], 100) == [Hold(2), Release(1)]
    assert toy.engine.ledger[2].handles == 1
    assert toy.engine.ledger.resident_bytes == toy.engine.ledger.peak_resident_bytes == 100, "it is the same memory"
    assert toy.need(1, 20) == []
    toy.let_go(2)
    assert toy.unsave(1) == [Release(2), Forget(2), Forget(1)]


@pytest.mark.parametrize(
    ("needs_before", "peak_bytes", "unforeseen_bytes"), [((0, 2), 1001, 70), ((0, 2), 1000, 0), ((0, 0), 1001, 0)]
)
def test_only_a_plan_that_holds_its_limit_says_what_a_save_after_needs_adds(needs_before, peak_bytes, unforeseen_bytes):
    toy = Toy(1000, SWAP)
    graph = SimpleNamespace(needs_before=needs_before)
    toy.engine.learner.current = SimpleNamespace(graph=graph, unevicted_peak_bytes=2000)
    plan = SimpleNamespace(peak_bytes=peak_bytes, saved_bytes=(100, 70))
    assert toy.engine._room._unforeseen_bytes(plan, 1) == unforeseen_bytes


def test_a_storage_that_is_resized_when_it_is_overwritten_counts_as_large_as_it_is_then():
    toy = Toy(1000)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.save(1, 10)
    toy.overwrite(1, 2, [1], 150)
    assert toy.engine.ledger.resident_bytes == toy.engine.ledger.peak_resident_bytes == 150


def test_a_storage_on_its_way_out_is_waited_for_before_it_is_overwritten():
    toy = Toy(1000, SWAP)
    forward(toy, 1)
    leaves(toy, 1, 15)
    assert toy.overwrite(1, 2, [1], 100)[0] == AwaitOut(1)
    assert toy.leaving == []


def test_a_copy_out_that_fails_while_a_write_waits_for_it_has_the_old_version_cloned():
    """2 has been dropped and is made from 1, which nobody can make again: its only copy is about to be overwritten."""
    toy = Toy(1000)
    toy.source(0, 10)
    toy.op(1, 100, [0], replayable=False)
    toy.save(1, 0)
    toy.op(2, 100, [1])
    toy.save(2, 10)
    toy.let_go(2)
    toy._do(toy.engine._room.carry_out(toy.engine.ledger[2], Action.RECOMPUTE, 12, wait=False))
    leaves(toy, 1, 15)
    engine = toy.engine
    assert engine.before_overwrite(1) == [AwaitOut(1)]
    toy.leaving.remove(1)
    engine.transfers.copy_out_failed(1, host_full=False)
    assert engine.before_overwrite(1) == [Preserve(1)]


def test_what_a_replay_may_overwrite_without_a_copy():
    """3 is made by writing into 2. Nobody saved 2, and it can be made again: the replay may take its storage."""
    toy = Toy(10_000, RECOMPUTE)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.op(2, 100, [1])
    toy.overwrite(2, 3, [2], 100)
    toy.save(3, 30)
    toy.let_go(1, 3)
    toy._do(toy.engine.rescue(40))
    walk = toy.engine.replays.descend(3, 50)
    for made in (1, 2):
        op = walk.next(50)
        assert op is not None and op.outputs == (made,)
        toy._replay(op)
    last = walk.next(50)
    assert last is not None and last.outputs == (3,)
    assert toy.engine.replays.stealable(last) == {2}
    toy.engine.ledger[2].pins += 1  # somebody else reads it as well
    assert toy.engine.replays.stealable(last) == frozenset()


def test_what_a_replay_has_overwritten_has_gone_before_the_walk_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its patience ends there, the walk pins what it is still to read, and that has to be made again."""
    toy, there = Toy(10_000, RECOMPUTE), list[bool]()
    go_on = Descent.go_on
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.overwrite(1, 2, [1], 100)
    toy.save(2, 30)
    toy.let_go(2)
    toy._do(toy.engine.rescue(40))
    walk = toy.engine.replays.descend(2, 50)

    def noting(descent: Descent) -> None:
        there.append(1 in toy.engine.ledger and toy.engine.ledger[1].held)
        go_on(descent)

    monkeypatch.setattr(Descent, "go_on", noting)
    while (op := walk.next(50)) is not None:
        toy._replay(op)
    assert there == [True, False]


# -- the host tier fails ----------------------------------------------------------------------------------------------
def test_a_full_host_falls_back_to_recomputing():
    """Swap would be cheaper for op 1 (5 us), but there is no room; the next eviction takes the recipe."""
    toy = Toy(150)
    toy.host_room_left = False
    toy.source(0, 10)
    toy.op(1, 100, [0], cost_ns=5000)
    assert toy.save(1, 10) == [Hold(1), SwapOut(1, wait=True)]
    toy.let_go(1)
    assert toy.engine.ledger.resident_bytes == 100, "still the value"
    assert toy._do(toy.engine.rescue(20)) == [Hold(0), Drop(1, Action.RECOMPUTE)]


def test_when_the_host_has_room_again_it_is_used_again():
    toy = Toy(150)
    toy.host_room_left = False
    toy.source(0, 10)
    toy.op(1, 100, [0], cost_ns=5000)
    toy.save(1, 10)
    toy.host_room_left = True
    toy.engine.transfers.host_room()
    assert toy._do(toy.engine.rescue(20))[0] == SwapOut(1, wait=True)


def test_a_full_host_without_a_recipe_keeps():
    toy = Toy(150, SWAP)
    toy.host_room_left = False
    forward(toy, 2)
    assert toy.mine == {1, 2}
    assert toy.need(1, 50) == []


def test_a_failed_copy_out_keeps_and_warns():
    toy = Toy(1000, SWAP)
    forward(toy, 1)
    leaves(toy, 1, 15)
    toy.leaving.clear()
    assert toy._do(toy.engine.transfers.copy_out_failed(1, host_full=False)) == []
    assert toy.engine.totals.warnings == ["a copy to the host failed; the tensor was kept on the device"]
    assert toy.need(1, 20) == []


def test_a_failed_copy_back_may_be_asked_for_again():
    toy = Toy(250, SWAP)
    forward(toy, 3)
    toy.let_go(3)
    assert toy.need(3, 40) == [SwapIn(2)]
    toy.coming.clear()
    toy.mine.discard(2)
    toy.engine.transfers.copy_in_failed(2)
    toy.engine.ledger.validate()
    assert toy.engine.ledger.resident_bytes == 100
    toy.engine.transfers.swap_in_again(2, 45)
    assert toy._do([SwapIn(2)]) == [SwapIn(2)]
    assert toy.copy_ends(2) == []
    assert toy.engine.ledger.resident_bytes == 200


def test_what_the_program_still_uses_frees_nothing_yet():
    """Limit 250. With 2 saved, 100 more may come: 50 over. The program uses both, so 1 goes for the time when it lets
    go of it, and 2 would help no sooner. With 3 there are 300 still, and now 2 is loose: it goes for room at once."""
    toy = Toy(250, RECOMPUTE)
    toy.source(0, 10, Kind.PARAMETER)
    toy.op(1, 100, [0])
    assert toy.save(1, 10) == [Hold(1)]
    toy.op(2, 100, [1])
    assert toy.save(2, 20) == [Hold(2), Hold(0), Drop(1, Action.RECOMPUTE)]
    assert toy.engine.ledger.resident_bytes == 200
    toy.let_go(2)
    toy.op(3, 100, [1])
    assert Drop(2, Action.RECOMPUTE) in toy.save(3, 30)
    assert toy.engine.ledger.resident_bytes == 200, "1, which is the program's, and 3"


def test_the_storage_a_replay_wrote_over_is_let_go_of():
    """1 is overwritten by 2 and 2 dropped. Its replay makes 1 again and writes over it: 1 must not pass for held, also
    where what replays make on their way is kept."""
    toy = Toy(10_000, RECOMPUTE, replay={"results": "hold"})
    toy.source(0, 10, Kind.PARAMETER)
    toy.op(1, 100, [0])
    toy.overwrite(1, 2, [1], 100)
    toy.save(2, 20)
    toy.let_go(2)
    toy._do(toy.engine.rescue(30))
    for times in (1, 2):
        toy.need(2, 40 * times)
        assert toy.replayed == [1, 2] * times
        assert not toy.engine.ledger[1].held
        assert toy.engine.ledger.resident_bytes == 100
        toy._do(toy.engine.rescue(50 * times))


# -- budgets that cannot be held --------------------------------------------------------------------------------------
def tightened(strict: bool) -> Toy:
    """Resident: an input (600), one under min_bytes (99), one that cannot be made again (500) and one that can (100).
    Then the limit falls to 1 KiB."""
    toy = Toy(10_000, RECOMPUTE, filter={"min_bytes": 100}, budget={"strict": strict})
    toy.source(0, 600)
    toy.op(1, 99, [0])
    toy.op(2, 500, [1], replayable=False)
    toy.op(3, 100, [2])
    for record in range(4):
        toy.save(record, 10 * record)
    toy.engine.budget.activations = Bytes(1024)
    return toy


def test_a_strict_budget_that_cannot_be_held_is_an_error_that_names_the_floor_and_its_parts():
    """600 + 99 + 500 + 100 = 1299 resident, 275 over. The program still uses 3 (100), so letting go of it leaves all
    1299 bytes for now: 1.27 KiB."""
    toy = tightened(strict=True)
    toy.engine.pressure(40)
    with pytest.raises(BudgetError) as caught:
        toy.engine.raise_failed()
    text = str(caught.value)
    assert text.startswith("the budget of 1 KiB for saved activations cannot be held: 1.27 KiB have to be resident")
    assert text.partition("made up of ")[2].partition(". ")[0].split(", ") == [
        "600 B inputs of the step",
        "99 B smaller than filter.min_bytes",
        "100 B still used by the program",
        "500 B not evictable under this policy",
    ]
    assert "Give a larger budget, a smaller batch, or a policy that may evict more" in text


def test_a_device_budget_that_cannot_be_held_is_told_as_it_was_given():
    """Of 1000 bytes 600 are in use for other things and 30 in reserve: the input (500) does not fit into the rest."""
    toy = Toy(Budget(device_bytes=1000, reserve_bytes=30, other_bytes=600), RECOMPUTE, budget={"strict": True})
    toy.source(0, 500)
    toy.save(0, 10)
    with pytest.raises(BudgetError) as caught:
        toy.engine.raise_failed()
    assert str(caught.value).startswith(
        "the budget of 1000 B for the device cannot be held: 600 B are in use for other things, 30 B are kept in "
        "reserve, which leaves 370 B for saved activations, of which 500 B have to be resident at once, made up of "
    )


def test_a_budget_that_was_not_held_is_warned_of_once_when_the_step_has_ended():
    toy = Toy(500, RECOMPUTE)
    for base in (0, 10, 20):
        toy.source(base, 600)
        toy.save(base, base)
        if not base:
            assert toy.engine.totals.warnings == []
        toy.use(base, base + 5)
        (text,) = toy.engine.totals.warnings
        assert text.startswith("the budget of 500 B for saved activations was not held in step 0: ")
        assert toy.engine.totals.steps_over == base // 10 + 1
        assert "600 B inputs of the step" in text


@pytest.mark.parametrize("strict", [False, True])
def test_a_share_of_a_step_that_is_too_small_for_any_of_it_to_go_stands_for_no_other(strict):
    toy = Toy(Budget(activations=Share(0.5)), filter={"min_bytes": 64}, budget={"strict": strict})
    toy.source(0, 63)
    toy.save(0, 0)
    toy.use(0, 5)
    toy.engine.raise_failed()
    assert toy.engine.totals.steps_over == len(toy.engine.totals.warnings) == 1
    toy.source(10, 64)
    toy.save(10, 10)
    toy.use(10, 15)
    assert toy.engine.totals.steps_over == 2
    with pytest.raises(BudgetError, match="32 B") if strict else nullcontext():
        toy.engine.raise_failed()
    assert ["31 B" in text for text in toy.engine.totals.warnings] == ([True] if strict else [True, False])


def nothing(rec: Record) -> bool:
    return False


def test_copies_either_way_are_told_of_as_such():
    records = [
        Record(1, 100, Kind.ACTIVATION, handles=1, held=True, host=Host.LEAVING),
        Record(2, 200, Kind.ACTIVATION, handles=1, held=True, host=Host.COMING),
    ]
    assert parts_of(records, 0, 0, 0, nothing, nothing) == "300 B on the way out or back"


def test_what_others_use_is_said_to_be_used_whether_it_could_go_or_not():
    records = [Record(id, 100, Kind.ACTIVATION, handles=1, held=True) for id in (1, 2, 3)]
    text = parts_of(records, 0, 0, 0, lambda rec: rec.id == 1, lambda rec: rec.id < 3)
    assert text == "200 B still used by the program, 100 B not evictable under this policy"


def test_what_is_only_counted_has_its_part():
    assert parts_of([], 0, 300, 0, nothing, nothing) == "300 B kept by the plan"


def test_what_goes_at_once_is_no_part_of_what_is_over_when_it_has_gone():
    """600 bytes that stay and 300 that go, under 900; 400 more are to come: none of the 300 has to be there then."""
    toy = Toy(10_000, RECOMPUTE)
    toy.op(1, 600, replayable=False)
    toy.op(2, 300, [1])
    for record in (1, 2):
        toy.save(record, 10 * record)
        toy.let_go(record)
    toy.engine.budget.activations = Bytes(900)
    toy._do(toy.engine.pressure(40, 400))
    shortage = toy.engine._room._worst
    assert shortage is not None and shortage.needed_bytes == 1000
    assert shortage.parts == "400 B what the next op makes, 600 B not evictable under this policy"


def test_what_goes_or_can_go_is_not_called_unevictable():
    """Under 100 bytes, when the second of two storages of 100 has been saved: the copy out of the first goes on, and
    the second has just been asked to follow. But the op at hand has it still."""
    toy = Toy(100, SWAP)
    toy.slow = True
    forward(toy, 2)
    toy.let_go(1, 2)
    toy.use(2, 30)
    toy.use(1, 40)
    (text,) = toy.engine.totals.warnings
    parts = text.partition("made up of ")[2].partition(". ")[0].split(", ")
    assert parts == ["100 B still used by the program", "100 B on the way out or back"]


def test_what_is_resident_is_added_up_only_until_that_has_been_told(monkeypatch):
    """In a step that cannot be held that would be all records, at each of their saves."""
    summed = []
    monkeypatch.setattr(room, "parts_of", lambda *given: summed.append(given) or "")
    toy = Toy(500, RECOMPUTE)
    for base in (0, 10, 20):
        toy.source(base, 600)
        toy.save(base, base)
        toy.use(base, base + 5)
        if not base:
            first = len(summed)
    assert len(summed) == first > 0


def test_a_budget_that_held_in_the_end_is_not_complained_of():
    """There is no room for a second one of 600 bytes, but none comes."""
    toy = Toy(1000, RECOMPUTE)
    toy.source(0, 600)
    toy.save(0, 0)
    toy.use(0, 5)
    assert toy.engine.totals.warnings == []
    assert toy.engine.totals.steps_over == 0


def test_what_is_in_use_is_a_part_of_the_floor():
    toy = Toy(1024, RECOMPUTE, budget={"strict": True})
    forward(toy, 1, nbytes=500)
    toy._do(toy.engine.need(1, 20))
    toy.engine.budget.activations = Bytes(400)
    toy.engine.pressure(30)
    with pytest.raises(BudgetError, match="500 B in use by the op at hand"):
        toy.engine.raise_failed()


def test_a_share_says_nothing_while_the_peak_is_not_known():
    """40 % of what was saved so far cannot hold the first tensor: no complaint before backward begins."""
    toy = Toy(Budget(activations=Share(0.4)), RECOMPUTE, filter={"min_bytes": 1000}, budget={"strict": True})
    forward(toy, 3)
    assert toy.engine.totals.warnings == []
    toy.engine.raise_failed()
    toy.need(3, 40)
    toy.engine.pressure(41)
    with pytest.raises(BudgetError):
        toy.engine.raise_failed()


def test_a_first_step_under_a_share_that_was_over_it_is_warned_of_when_the_share_is_known():
    """Nothing can be made again: 300 of 300 bytes stay, 40 % of them may."""
    toy = Toy(Budget(activations=Share(0.4)), RECOMPUTE)
    for record in (1, 2, 3):
        toy.op(record, 100, replayable=False)
        toy.save(record, 10 * record)
        toy.let_go(record)
    assert toy.engine.totals.warnings == []
    for record in (3, 2, 1):
        toy.use(record, 50)
    (text,) = toy.engine.totals.warnings
    assert text.startswith("the budget of 120 B for saved activations was not held in step 0: 300 B have to be")


def test_a_storage_larger_than_any_before_finds_room_before_it_counts():
    """Four of 100 bytes fit under 450. When the logits (300) are there, room is made for another of their size: their
    softmax, which is saved."""
    toy = Toy(450, RECOMPUTE)
    forward(toy, 4)
    toy.let_go(1, 2, 3)
    before = toy.engine.ledger.peak_resident_bytes
    toy.op(5, 300, [4])
    assert toy.engine.ledger.resident_bytes <= 150
    toy.op(6, 300, [5])
    toy.let_go(4, 5)
    toy.save(6, 60)
    assert before <= 450 and toy.engine.ledger.peak_resident_bytes <= 450


@pytest.mark.parametrize(("kept_free_bytes", "evicted"), [(0, True), (99, True), (100, False), (150, False)])
def test_what_is_kept_free_for_ops_is_room_for_what_comes_next(monkeypatch, kept_free_bytes, evicted):
    monkeypatch.setattr(Engine, "working_bytes", kept_free_bytes)
    toy = Toy(300, ("keep", "recompute"))
    toy.source(10, 100)
    for record in (1, 2, 3):
        toy.op(record, 100, [10])
        done = toy.save(record, 10 * record)
        toy.let_go(record)
    assert (Drop(1, Action.RECOMPUTE) in done) == evicted


def test_what_counts_by_its_first_save_is_not_told_of_as_coming_again():
    """Of its second tensor, and of what the next storage has in use when it is looked at."""
    toy = Toy(1000)
    uncounted_bytes = toy.engine.expected.uncounted_bytes
    toy.op(1, 100)
    assert (uncounted_bytes(0, 1, 100), uncounted_bytes(0, None, 50)) == (100, 50)
    toy.save(1, 10)
    assert (uncounted_bytes(0, 1, 100), uncounted_bytes(0, None, 50)) == (0, 0)
    assert (uncounted_bytes(1, 1, 100), uncounted_bytes(1, None, 50)) == (0, 50)


def test_what_backward_or_the_program_still_uses_is_not_evicted_in_backward():
    """Letting go of it would free nothing: the next one has to."""
    toy = Toy(10_000, RECOMPUTE)
    forward(toy, 4)
    toy.let_go(1, 2, 3, 4)
    toy.use(4, 50)
    toy.engine.still_used([1])
    toy.engine.budget.activations = Bytes(200)
    assert toy._do(toy.engine.pressure(60)) == [Drop(2, Action.RECOMPUTE)]
    toy.engine.still_used([])
    toy.engine.budget.activations = Bytes(100)
    assert Drop(1, Action.RECOMPUTE) in toy._do(toy.engine.pressure(70))


def test_what_the_program_used_to_the_end_of_backward_is_left_out_of_the_plan():
    """A batch in a local variable: dropping it would free nothing in the next step either."""
    toy = Toy(150, RECOMPUTE)
    forward(toy, 4)
    toy.let_go(2, 3, 4)
    for record in (4, 3, 2, 1):
        toy.engine.still_used([1] if record > 2 else [1, 2])
        toy.use(record, 60 - record)
    graph = toy.engine.learner.profiles[0].graph
    assert [graph.nodes[node].evictable for node in graph.saved] == [False, True, True, True]


def slices(toy: Toy, base: int) -> int:
    """A step whose first storage the program keeps, as a data set of which each batch is a slice. Up to where its
    backward has begun; returns the bytes that were copied out by then."""
    toy.source(base, 10)
    before_bytes = toy.engine.totals.swapped_out_bytes
    for k in range(1, 4):
        toy.op(base + k, 100, [base + k - 1])
        if k > 2:
            toy.let_go(base + k - 1)
        toy._do(toy.engine.saved(base + k, k, 10 * k))
    toy.let_go(base + 3)
    copied_bytes = toy.engine.totals.swapped_out_bytes - before_bytes
    toy.engine.still_used([base + 1])
    toy.use(base + 3, 50)
    return copied_bytes


def test_what_the_program_never_lets_go_of_is_copied_out_in_the_first_step_only():
    """Until backward nobody knows that nothing comes of the copy."""
    toy, copied = Toy(150, SWAP), []
    for base in (0, 10, 20):
        copied.append(slices(toy, base))
        for k in (2, 1):
            toy.engine.still_used([base + 1])
            toy.use(base + k, 50)
        toy.let_go(base, base + 1)
    assert copied == [300, 200, 200]
    slices(toy, 30)
    toy.let_go(31)
    toy.engine.still_used([])
    toy.engine.budget.activations = Bytes(0)
    assert SwapOut(31, wait=True) in toy.engine.pressure(60), "this time it does"


def test_what_stays_since_the_program_never_lets_go_of_it_is_said_to_be_used_by_it():
    toy = Toy(150, SWAP, budget={"strict": True})
    slices(toy, 0)
    for k in (2, 1):
        toy.engine.still_used([1])
        toy.use(k, 50)
    toy.let_go(0, 1)
    toy.engine.totals.failed = None
    toy.source(10, 10)
    for k in (1, 2):
        toy.op(10 + k, 100, [9 + k])
        toy._do(toy.engine.saved(10 + k, k, 60 + k))
    assert "100 B still used by the program" in toy.engine._room._worst.parts
    assert "not evictable" not in toy.engine._room._worst.parts


# -- kinds of budget --------------------------------------------------------------------------------------------------
def test_a_share_is_one_of_what_was_saved_so_far():
    toy = Toy(Budget(activations=Share(0.5)), RECOMPUTE)
    forward(toy, 1)
    assert toy.engine.limit_bytes == 50
    forward(toy, 3, start=1)
    assert toy.engine.limit_bytes == 200


def test_a_device_budget_leaves_out_what_is_not_an_activation():
    toy = Toy(Budget(device_bytes=1000, reserve_bytes=30, other_bytes=600), RECOMPUTE)
    assert toy.engine.limit_bytes == 370
    assert toy.engine.told_budget_bytes == 1000
    forward(toy, 2)
    toy.let_go(1, 2)
    # a workspace of 200 appears: 200 resident, 170 may be: 30 over
    toy.engine.budget.other_bytes = 800
    assert toy._do(toy.engine.pressure(30)) == [Hold(0), Drop(1, Action.RECOMPUTE)]


def test_without_a_budget_nothing_is_ever_evicted():
    toy = Toy(Budget())
    assert toy.engine.limit_bytes is None
    assert forward(toy, 3) == [[Hold(1)], [Hold(2)], [Hold(3)]]
    assert not toy.engine.wants_recorder


# -- steps ------------------------------------------------------------------------------------------------------------
def backward(toy: Toy, records: list[int], at: int) -> list[list]:
    said = []
    for k, record in enumerate(records):
        toy.let_go(record)
        said.append(toy.use(record, at + 10 * k))
    return said


def step(toy: Toy, base: int, at: int) -> None:
    """s, then four records in a chain, saved 10 ns apart and needed in reverse."""
    toy.source(base, 10)
    for k in range(1, 5):
        toy.op(base + k, 100, [base + k - 1])
        if k > 1:
            toy.let_go(base + k - 1)
        toy.now = at + 10 * k
        toy._do(toy.engine.saved(base + k, k, toy.now))
    backward(toy, [base + k for k in (4, 3, 2, 1)], at + 50)
    toy.let_go(base)


def test_steps_go_from_observed_to_planned_and_end_with_nothing_left():
    toy = Toy(310, RECOMPUTE)
    step(toy, 0, 0)
    step(toy, 10, 1000)
    assert toy.engine.totals.modes == {"observe": 1, "planned": 1}
    assert toy.engine.totals.steps == 2
    assert [s.mode for s in toy.engine.finished_steps] == [Mode.OBSERVE, Mode.PLANNED]
    assert toy.engine.totals.unevicted_peak_bytes == 400
    assert toy.engine.totals.peak_bytes <= 310
    assert toy.engine.ledger.handles == 0
    assert toy.engine.ledger.resident_bytes == 0
    assert toy.mine == set()


def test_a_planned_copy_back_starts_where_the_plan_says():
    """The link is fast (1 TB/s). What the plan swaps leaves as soon as it is saved, and nobody waits for it."""
    toy = Toy(310, SWAP, Link(1e12, 1e12))
    step(toy, 0, 0)
    toy.source(10, 10)
    said = []
    for k in range(1, 5):
        toy.op(10 + k, 100, [9 + k])
        if k > 1:
            toy.let_go(9 + k)
        said.append(toy._do(toy.engine.saved(10 + k, k, 1000 + 10 * k)))
    plan = toy.engine.learner.plan
    assert plan is not None
    for k, action in enumerate(plan.actions):
        assert (SwapOut(11 + k, wait=False) in said[k]) is (action is Action.SWAP)
    for record in list(toy.leaving):
        toy.copy_ends(record)
    toy.let_go(14)
    for position, record in enumerate((14, 13, 12, 11)):
        started = [i.record for i in toy.need(record, 1050 + 10 * position) if isinstance(i, SwapIn)]
        assert started == [11 + order for order in plan.prefetch.get(position, ())]
        toy.unsave(record)


def in_a_step_that_brings_two_back_at_its_first_need() -> Toy:
    toy = Toy(310, SWAP)
    step(toy, 0, 0)
    profile = toy.engine.learner.profiles[0]
    profile.plan = plan_of(profile.graph, LINK, [Action.SWAP, Action.SWAP, Action.KEEP, Action.KEEP])
    assert profile.plan.prefetch == {0: (1, 0)}
    toy.source(10, 10)
    return toy


def test_what_nobody_can_ask_for_any_more_does_not_come_back():
    """Its saved tensor has died before the need at which the plan has it come."""
    toy = in_a_step_that_brings_two_back_at_its_first_need()
    for k in range(1, 5):
        toy.op(10 + k, 100, [9 + k])
        toy.let_go(9 + k)
        toy.save(10 + k, 1000 + 10 * k)
    for record in list(toy.leaving):
        toy.copy_ends(record)
    toy.let_go(14)
    toy.unsave(12)
    assert not toy.engine.ledger[12].handles
    assert [i for i in toy.use(14, 1050) if isinstance(i, SwapIn)] == [SwapIn(11)]


def in_backward_before_its_copy_out_has_ended() -> Toy:
    """11 and 12 are swapped by the plan, which has both come back from the first need on. 11 has gone, and comes; the
    copy out of 12 is under way."""
    toy = in_a_step_that_brings_two_back_at_its_first_need()
    for k in range(1, 5):
        toy.op(10 + k, 100, [9 + k])
        toy.let_go(9 + k)
        said = toy.engine.saved(10 + k, k, 1000 + 10 * k)
        toy._do([instruction for instruction in said if instruction != AwaitOut(12)])
    toy.let_go(14)
    toy.use(14, 1050)
    assert toy._do(toy.engine.prefetch(1050)) == [SwapIn(11)]
    assert toy.leaving == [12]
    assert not toy.engine._recall.waiting, "there is nothing to do at each need until then"
    return toy


def test_a_planned_copy_back_that_went_again_comes_as_soon_as_there_is_room():
    toy = in_backward_before_its_copy_out_has_ended()
    toy.copy_ends(12)
    toy.engine.budget.activations = Bytes(0)
    assert toy._do(toy.engine.pressure(1051))[-2:] == [AwaitIn(11), Drop(11, Action.SWAP)]
    toy.engine.budget.activations = Bytes(310)
    assert SwapIn(11) in toy._do(toy.engine.prefetch(1052))


def test_what_the_plan_has_come_back_does_not_go_when_its_copy_out_ends():
    toy = in_backward_before_its_copy_out_has_ended()
    assert toy.copy_ends(12) == []
    assert toy.use(13, 1060) == [Release(13), Forget(13)]
    assert not any(isinstance(instruction, SwapIn) for instruction in toy.need(12, 1070))


def test_what_the_plan_has_come_back_does_so_when_its_room_was_needed_meanwhile():
    toy = in_backward_before_its_copy_out_has_ended()
    awaited, _ = toy.engine._room.await_out(100)
    assert toy._do(awaited) == [AwaitOut(12), Drop(12, Action.SWAP)]
    assert toy.engine._recall.waiting
    assert SwapIn(12) in toy.use(13, 1060)


def test_what_is_to_come_back_by_now_is_waited_for_last():
    toy = Toy(1000, SWAP)
    forward(toy, 2)
    toy.let_go(1, 2)
    for record in (1, 2):
        toy._do(toy.engine._room.carry_out(toy.engine.ledger[record], Action.SWAP, 30, wait=False))
    wanted = toy.engine._room.wanted
    wanted.add(0)
    assert (toy.engine._room.await_out(50), wanted) == (([AwaitOut(2)], -50), {0})
    assert (toy.engine._room.await_out(150), wanted) == (([AwaitOut(2), AwaitOut(1)], -50), set())
    wanted.add(0)
    toy.use(2, 40)
    toy.use(1, 50)
    assert not wanted, "it is for one step"


def rehearsed(toy: Toy, moves: dict[int, Moves]) -> None:
    """From here on the step under way follows a rehearsal."""
    count = len(toy.engine.learner.log.saves)
    nothing = (0,) * count
    plan = Plan((Action.KEEP,) * count, {}, ((),) * count, nothing, nothing, nothing, 0, 0, 0, moves=moves)
    graph = build_graph(toy.engine.learner.log, 0)
    toy.engine.learner.current = Profile((), graph, 0, {}, 1.0, plan)
    toy.engine.learner.mode = Mode.PLANNED


@pytest.mark.parametrize("follows", [True, False])
def test_a_source_without_handles_goes_where_that_was_rehearsed(follows):
    """2 was dropped, and is made from 1, which is needed for nothing else: a rehearsal has counted it as gone."""
    toy = Toy(1000, RECOMPUTE)
    forward(toy, 2)
    toy.let_go(1, 2)
    toy._do(toy.engine._room.carry_out(toy.engine.ledger[2], Action.RECOMPUTE, 30, wait=True))
    toy.engine.ledger.hold(0)
    toy.mine.add(0)
    if follows:
        rehearsed(toy, {9: Moves()})
    assert toy.unsave(1) == ([Release(1)] if follows else [])
    toy.use(2, 40)
    assert toy.replayed == ([1, 2] if follows else [2])


def test_what_was_written_in_place_goes_in_the_version_there_is_now():
    toy = Toy(1000, SWAP, announced=True)
    forward(toy, 2)
    toy.overwrite(1, 9, [1], 100)
    toy.let_go(9)
    rehearsed(toy, {0: Moves(leaving=(0,))})
    assert [i for i in toy.use(2, 50) if isinstance(i, SwapOut)] == [SwapOut(9, wait=False)]


def test_a_rehearsed_copy_back_waits_until_there_is_room():
    """Limit 250: 1 and 2 are on the host. Both are to come back after the first turn, when 3 and 4 are resident; 2 fits
    when 4 has gone, 1 when 3 has."""
    toy = Toy(250, SWAP, announced=True)
    forward(toy, 4)
    toy.let_go(4)
    assert toy.mine == {3, 4}
    rehearsed(toy, {0: Moves(coming=(1, 0))})
    assert [[i for i in toy.use(record, 50) if isinstance(i, SwapIn)] for record in (4, 3, 2)] == [
        [],
        [SwapIn(2)],
        [SwapIn(1)],
    ]


def test_a_copy_back_counts_in_the_peak_from_its_beginning():
    toy = Toy(250, SWAP)
    forward(toy, 3)
    toy.let_go(3)
    ledger = toy.engine.ledger
    ledger.restart_peaks()
    assert toy.engine.need(2, 40) == [SwapIn(2)]
    assert ledger.peak_resident_bytes == 100, "what gives it room may still have to go"
    toy.engine.transfers.coming()
    assert ledger.peak_resident_bytes == 200


def test_a_step_that_fits_is_idle_afterwards():
    toy = Toy(10_000)
    step(toy, 0, 0)
    assert not toy.engine.wants_recorder
    step(toy, 10, 1000)
    assert toy.engine.totals.modes == {"observe": 1, "idle": 1}


def test_stalls_are_taken_out_of_the_times():
    toy = Toy(10_000)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.save(1, 10)
    toy.engine.lost(500)
    toy.op(2, 100, [1])
    toy.save(2, 530)
    assert toy.engine.learner.log.save_ns == [0, 20]


def test_recording_that_began_in_the_middle_teaches_nothing():
    toy = Toy(250, RECOMPUTE)
    toy.engine.recording(False)
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.save(1, 10)
    toy.engine.recording(True)
    assert not toy.engine.learner.recorded


def test_the_link_queue_learns_of_every_copy():
    toy = Toy(250, SWAP)
    forward(toy, 3)
    # 1 asked for at 20, 2 at 30: 20 + 100, then 100 more
    assert toy.engine.queue.out_free_ns == 20 + 100 + 100
    assert toy.engine.queue.link is LINK


def test_what_stays_when_the_device_is_out_of_memory_is_no_limit_missed():
    """All of 1000 bytes are free but 10, which are too small to go."""
    toy = Toy(1000, filter={"min_bytes": 20}, budget={"strict": True})
    toy.op(1, 10)
    toy.save(1, 1)
    toy.let_go(1)
    assert toy._do(toy.engine.rescue(2)) == []
    toy.engine.raise_failed()
