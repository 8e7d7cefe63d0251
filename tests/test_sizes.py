"""Steps at sizes that were never seen, known by their first saved tensor: without tensors, and bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from sized import WARM, Run
from torch import Tensor, nn
from torch.nn import functional as F

import delta
from delta.beside import Beside, Track
from delta.engine import Engine
from delta.learner import WATCHFUL, Learner
from delta.planner import StepGraph, StepLog
from delta.planner.assemble import plan_of
from delta.planner.family import SAMPLES
from delta.planner.steplog import build_graph
from delta.profile import CRAMPED, REFINEMENTS, Profile
from delta.revising import Revising
from delta.routine import Way
from delta.runtime.demo_model import Gpt, GptConfig, next_byte_loss
from delta.runtime.recorder import Recorder
from delta.sizes import (
    COMMON,
    HOPELESS,
    MOST_OTHERWISE,
    OBSERVED,
    OFTEN,
    PROFILES,
    PROGRAMS,
    Foretold,
    Sizes,
    with_small_needs,
    with_small_needs_beside,
)
from delta.types import Action, Kind, Link, Look, Mode

OBSERVE, PLANNED = Mode.OBSERVE, Mode.PLANNED
NOTHING_KNOWN = Profile((), build_graph(StepLog(), 0), 0, {}, 1.0)


# -- without tensors --------------------------------------------------------------------------------------------------
@pytest.fixture
def run() -> Run:
    return Run()


def bytes_of(graph: StepGraph) -> list[int]:
    return [graph.nodes[node].nbytes for node in graph.saved]


def test_a_size_that_was_never_seen_has_a_plan_and_a_routine_from_its_first_save_on(run: Run) -> None:
    run.warm()
    assert run.step(3, 16) == [PLANNED] * 3 and run.followed
    graph, limit_bytes = run.asked[-1]
    assert (bytes_of(graph), limit_bytes) == ([480, 4 * 3 * 256, 288], 1000)
    assert [op.cost_ns for op in graph.ops] == [48] * 3


def test_a_size_that_was_seen_once_is_not_recorded_again(run: Run) -> None:
    run.warm()
    assert run.step(4, 10) == [PLANNED] * 3 and run.followed


def test_fewer_sizes_foretell_nothing(run: Run) -> None:
    """An epoch's last batch is no reason to ask for every size."""
    for size in [*WARM[:2], *WARM[:2]]:
        run.step(*size, peak=1)
    assert not run.sizes.ready
    run.step(*WARM[2], peak=1)
    assert run.sizes.ready and run.learner.foretells


@pytest.mark.parametrize(
    ("size", "told"), [((4, 100), True), ((3, 50), True), ((4, 101), False), ((5, 4), False), ((1, 3), True)]
)
def test_a_step_larger_than_any_before_is_recorded(run: Run, size: tuple[int, int], told: bool) -> None:
    """It may do something else, and the limit is hardest to hold."""
    run.warm()
    assert (run.step(*size, peak=1)[0] is PLANNED) is told
    assert run.step(*size)[0] is PLANNED, "by now it has been seen"


def test_nor_is_one_foretold_by_a_dim_that_has_never_varied(run: Run) -> None:
    for length in (10, 100, 40):
        run.step(4, length, peak=1)
    assert run.step(4, 20)[0] is PLANNED
    assert run.step(3, 20, peak=1) == [OBSERVE] * 3
    assert run.step(2, 20)[0] is PLANNED


def test_nor_is_one_foretold_by_two_dims_that_were_never_as_large_together(run: Run) -> None:
    """But for a few percent, as in batches of about so many tokens."""
    for size in ((8, 10), (2, 40), (4, 21)):
        run.step(*size, peak=1)
    assert run.step(8, 40, peak=1) == [OBSERVE] * 3
    run = Run()
    for size in ((8, 10), (2, 40), (4, 21)):
        run.step(*size, peak=1)
    assert run.step(5, 17)[0] is PLANNED


def test_a_size_that_comes_often_is_a_kind_of_step_of_its_own(run: Run) -> None:
    """Batches that are padded to one of a few lengths."""
    run.warm()
    sizes, found = [(4, 30), (4, 60), (3, 40)], []
    for _ in range(COMMON + REFINEMENTS + 3):
        found.append([run.step(*size)[0] for size in sizes])
        assert run.followed or len(found) >= COMMON
    assert found[: COMMON - 1] == [[PLANNED] * 3] * (COMMON - 1), "foretold"
    assert found[COMMON - 1] == [OBSERVE] * 3, "recorded"
    assert run.followed and not run.asks_all, "by a routine of its own"
    profiles = [profile for profile in run.learner.profiles if profile.routine is not None]
    assert len(profiles) == 3 and all(profile.refined == REFINEMENTS for profile in profiles)


def test_that_it_has_come_often_among_many_more_is_no_reason(run: Run) -> None:
    run.warm()
    for count in range(20 * COMMON):
        run.step(4, 30 if count % 20 == 0 else 20 + count % 70)
        assert run.followed


def test_what_does_not_follow_from_the_input_s_size_is_not_foretold(run: Run) -> None:
    """Here g's bytes: any three points lie on a parabola, so more are looked at. As it is of no use, ever fewer are."""
    draw, told = random.Random(4), []
    run.step(4, 100, peak=1)
    for count in range(60):
        run.learner._whole = 0
        modes = run.step(4, 10 + count, more=draw.randrange(50_000), peak=1)
        told.append(modes[0] is PLANNED)
    assert not any(told), told


@pytest.mark.parametrize(("more", "told"), [(700, True), (800, False)])
def test_nor_is_what_follows_from_it_in_several_ways_that_are_far_apart(more: int, told: bool) -> None:
    """Three sizes do not tell which sum of two terms g is; at this one the most is 1.098 and 1.103 of the least."""
    run = Run(100_000)
    for count, size in enumerate(WARM):
        run.step(*size, more=more * (count == 2), peak=1)
    assert (run.step(3, 50)[0] is PLANNED) is told


def test_sizes_that_round_up_to_the_same_share_a_plan(run: Run) -> None:
    run.warm()
    asked = len(run.asked)
    assert run.step(4, 65) == run.step(4, 66) == [PLANNED] * 3
    assert len(run.asked) == asked + 1 and bytes_of(run.asked[-1][0])[0] == 10 * 4 * 66
    run.step(4, 67)
    assert len(run.asked) == asked + 2


@pytest.mark.parametrize(
    ("limits", "planned"),
    [
        ([80_000, 74_000, 73_920, 10**6], [80_000]),  # it takes 73,920 when all is kept
        ([80_000, 73_919, 73_000], [80_000, 73_919]),  # ... then 72,336, the least there is
        ([73_000, 76_650, 76_651], [73_000, 76_651]),  # with more room a better plan may be found
        ([72_000, 70_000, 68_572, 68_571], [72_000, 68_571]),  # nothing fits; far lower ones may let go of more
    ],
)
def test_a_plan_serves_other_limits_that_it_is_within(run: Run, limits: list[int], planned: list[int]) -> None:
    """Under a share the limit of a size is lower than that of the one which it is rounded up to, and what a device
    budget leaves goes up and down."""
    run.warm()
    run.holds, run.sizes._programs[0].missed = False, HOPELESS
    run.asked.clear()
    for limit_bytes in limits:
        run.sizes._limit = lambda peak, told, now=limit_bytes: now  # type: ignore[misc]
        run.step(4, 65)
    assert [limit_bytes for _, limit_bytes in run.asked] == planned
    assert {bytes_of(graph)[0] for graph, _ in run.asked} == {10 * 4 * 66}


def test_its_limit_is_a_share_of_its_own_peak_from_the_first_save_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(share=0.5)
    run.warm()
    told: list[int] = []
    saved = Learner.saved
    monkeypatch.setattr(Learner, "saved", lambda self, *args: told.append(self.known_peak_bytes) or saved(self, *args))
    run.step(3, 16)
    assert told == [480 + 4 * 3 * 256 + 288] * 3


def test_a_size_that_fits_is_let_pass_whole() -> None:
    run = Run(limit=10_000)
    run.warm()
    run.learner.profiles[0].idle = False
    assert run.step(3, 16) == [PLANNED] * 3 and run.followed
    profile = next(iter(run.sizes._programs[0].plans.values()))
    assert profile.plan is not None and profile.plan.idle
    assert profile.routine is not None and set(profile.routine.ways) == {Way.PASS}


def test_what_comes_before_the_first_save_is_recorded_until_that_tells(run: Run) -> None:
    """Once something may be foretold; what nothing saved is made from may come or not, as in any routine."""
    for size in WARM:
        run.step(*size, peak=1, before=["ids"])
    for before in (["ids"], ["ids", "logged"], []):
        assert run.learner.routine is None
        assert run.step(3, 16, before=before) == [PLANNED] * 3 and run.followed
    assert run.step(3, 16, names="fxh") == [PLANNED] * 3 and not run.followed, "another call after that ends it"


def test_what_many_ops_read_stays_and_counts_here_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta.planner.common.MANY", 3)
    for size in WARM:
        run.step(*size, peak=1, mask=5)
    assert run.step(3, 16, mask=5) == [PLANNED] * 3 and run.followed
    graph, limit_bytes = run.asked[-1]
    assert (graph.common_bytes, limit_bytes) == (5, 995)


def test_what_was_made_before_a_save_is_numbered_as_where_the_rest_is_left_out(run: Run) -> None:
    for size in WARM:
        run.step(*size, peak=1, before=["ids", "logged"])
    (program,) = run.sizes._programs
    assert program.course.ops_before == [1, 2, 3]


def test_notes_that_find_no_room_twice_are_no_more() -> None:
    run, link = Run(limit=4000), Link(1e9, 1e9)
    run.sizes._plan_like = lambda graph, *_: plan_of(graph, link, (Action.KEEP, Action.RECOMPUTE, Action.KEEP))
    run.warm()
    run.step(3, 16)
    (profile,) = run.sizes._programs[0].plans.values()
    for _ in range(CRAMPED):
        assert profile.routine is not None and profile.routine.noted
        profile.cramped += 1
        run.step(3, 16)
    assert not profile.routine.noted and profile.routine.most_bytes == profile.graph.saved_bytes


def test_more_bytes_than_foretold_end_the_plan_there(run: Run) -> None:
    run.warm()
    assert run.step(3, 16, more=1) == [PLANNED, OBSERVE, OBSERVE] and not run.followed
    assert run.step(3, 16, more=-500) == [OBSERVE] * 3, "what comes after that is recorded, and learned"
    assert run.step(3, 16) == [PLANNED, OBSERVE, OBSERVE], "by now it is said to take 500 bytes less"


def test_steps_of_two_structures_are_two_programs(run: Run) -> None:
    run.warm()
    assert run.step(3, 16, names="fg", peak=1) == [PLANNED] * 2
    assert run.sizes._programs[0].otherwise == 1, "it has ended early"
    for b, t in WARM:
        run.step(b + 1, t, names="fg", peak=1)
    assert sorted(len(program.structure) for program in run.sizes._programs) == [2, 3]


def test_a_structure_whose_calls_differ_is_another_program(run: Run) -> None:
    for size, names in zip(WARM, ("fgh", "fgh", "fxh"), strict=True):
        run.step(*size, names=names, peak=1)
    assert not run.sizes.ready, "two of them are of another program than the last"
    for size in ((5, 11), (6, 13)):
        run.step(*size, names="fxh", peak=1)
    assert run.sizes.ready


def test_a_program_whose_calls_are_others_from_now_on_is_learned_anew(run: Run) -> None:
    """In a step that was recorded, as it was larger than any before. How large earlier ones were does not count."""
    run.warm()
    assert run.step(5, 20, names="fxh", peak=1) == [OBSERVE] * 3
    (program,) = run.sizes._programs
    assert (list(program.sizes), program.most, run.sizes.ready) == ([(5, 20)], (5, 20), False)


def test_plans_are_forgotten_the_oldest_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta.sizes.PLANS", 2)
    run.warm()
    for length in (20, 30, 50):
        run.step(4, length)
    assert [size for _, size in run.sizes._programs[0].plans] == [30, 50]


def test_a_program_that_goes_otherwise_twice_running_is_learned_anew_from_more_sizes(run: Run) -> None:
    run.warm()
    (program,) = run.sizes._programs
    for again in range(2):
        assert run.sizes._programs == [program]
        assert run.step(3, 16 + again, names="fxh")[-1] is PLANNED and not run.followed
        run.learner._whole = 0
    (fresh,) = run.sizes._programs
    assert fresh is not program and not run.sizes.ready
    for count in range(2 * OBSERVED):
        assert not run.sizes.ready
        run.step(5, 20 + count, peak=1)
    assert run.sizes.ready


def test_a_program_that_goes_otherwise_now_and_then_is_foretold_all_the_same(run: Run) -> None:
    run.warm()
    (program,) = run.sizes._programs
    told = Foretold(program, run.learner.profiles[0], 0, None)
    for _ in range(3):
        for so in (False, *[True] * int(1 / MOST_OTHERWISE)):
            run.sizes.ended(told, so, 0, None)
    assert run.sizes._programs == [program]
    run.sizes.ended(told, False, 0, None)
    run.sizes.ended(told, False, 0, None)
    assert run.sizes._programs != [program]


def test_after_that_has_been_of_no_use_a_few_times_it_is_not_tried_any_more(run: Run) -> None:
    run.warm()
    count = 0
    while run.sizes.ready:
        count += 1
        (program,) = run.sizes._programs
        for _ in range(OFTEN):
            run.sizes.ended(Foretold(program, run.learner.profiles[0], 0, None), False, 0, None)
        for length in range(2 * SAMPLES):
            run.learner._whole = 0
            if not run.sizes.ready:
                run.step(4, 20 + length, peak=1)
    assert count == 3
    assert len(run.sizes._programs[0].logs) == SAMPLES, "more are not kept"


def test_of_two_programs_that_begin_alike_the_one_seen_at_about_that_size_is_foretold(run: Run) -> None:
    """What a program does may depend on a size: as long as a size like that has not been seen often enough, nothing is
    foretold of it."""
    run.warm()
    for count, length in enumerate((50, 55, 60)):
        modes = run.step(4, length, names="fx", peak=1)
        assert modes == ([PLANNED] * 2 if not count else [OBSERVE] * 2)
    run.step(4, 65, names="fx", peak=1)
    for names, (b, t), again in [("fgh", (4, 12), 0), ("fx", (4, 52), 1), ("fgh", (3, 20), 0)]:
        assert run.step(b, t, names=names)[0] is PLANNED and run.followed and run.learner.foretold is None, again
        assert run.sizes._programs[0].otherwise == (names == "fgh")


def test_after_one_that_went_otherwise_a_few_steps_are_recorded(run: Run) -> None:
    run.warm()
    run.step(3, 16, names="fxh")
    followed = []
    for _ in range(WATCHFUL + 1):
        run.step(4, 10, peak=1)
        followed.append(run.followed)
    assert followed == [False] * WATCHFUL + [True]


def test_nothing_is_foretold_of_a_step_of_which_something_has_passed(run: Run) -> None:
    run.warm()
    assert run.step(3, 16, recording=False) == [OBSERVE] * 3 and not run.followed
    assert run.learner.missed


def test_small_ones_are_asked_for_like_others_in_foretold_steps_only(run: Run) -> None:
    run.warm()
    assert run.learner.asks_all, "until the first save tells"
    for size, told in (((3, 16), True), ((9, 9), False)):
        run.step(*size, peak=1)
        assert run.asks_all is told and run.learner.asks_all


def test_a_save_that_looks_otherwise_ends_the_plan_there(run: Run) -> None:
    run.warm()
    assert run.step(3, 16, looks="axc") == [PLANNED, OBSERVE, OBSERVE] and not run.followed


def test_a_storage_more_than_foretold_ends_the_plan_there(run: Run) -> None:
    """Where a tensor was saved on one that had been saved before."""
    run.warm()
    learner = run.learner
    learner.begin(recording=True)
    learner.packed(0, 0, Look(hash("a"), (3, 16)))
    for order in range(4):
        learner.saved(order, 1, Kind.ACTIVATION, 0)
        assert learner.mode is (PLANNED if order < 3 else OBSERVE)


def test_where_a_device_s_limit_was_missed_plans_are_as_they_were(run: Run) -> None:
    """What else is in use there lowers the limit by itself."""
    run.warm()
    run.step(3, 16, peak=1100, beside=Beside())
    assert run.sizes._programs[0].aim == 1


def used(b: int, t: int) -> Beside:
    """What the device uses beside a step (b, t): a tenth of what it saves, and as much again at the last one."""
    tenth = (16 * b * t + 4 * b * t * t) // 10
    return Beside(Track([100, 100, 100], [0, 0, tenth]), Track([100 + tenth, 100, 100], [tenth, tenth, 0]))


def test_a_plan_is_told_what_the_device_uses_beside_a_step_of_that_size() -> None:
    run = Run(limit=9000)
    for b, t in WARM:
        run.step(b, t, beside=used(b, t))
    family = run.sizes._programs[0].family
    assert family is not None and family.beside.told
    run.step(3, 64)
    assert run.told == [True]
    graph, aim_bytes = run.asked[-1]
    beside, tenth = family.beside.at(graph.unevicted_bytes), sum(bytes_of(graph)) // 10
    assert graph.beside_saves == beside.saves.most_bytes and graph.beside_needs == beside.needs.most_bytes
    assert abs(graph.beside_saves[2] - 100 - tenth) <= 2 and abs(graph.beside_needs[0] - 100 - 2 * tenth) <= 2
    assert aim_bytes == 9000, "the whole"
    (profile,) = run.sizes._programs[0].plans.values()
    assert profile.beside == beside, "from which the head-room knows when more is in use"


def begun(run: Run, b: int, t: int) -> Learner:
    """A step (b, t) has saved its first tensor."""
    learner = run.learner
    learner.begin(recording=True)
    learner.packed(hash((b, t)), 0, Look(hash("a"), (b, t)))
    return learner


def test_before_enough_sizes_are_known_a_step_may_use_what_those_did() -> None:
    """By its size: nobody knows what it will save."""
    run = Run(limit=9000)
    assert begun(run, 3, 16).beside == Beside() and begun(run, 3, 16).beside_saves == ()
    run.learner._reset()
    for (b, t), tenth in (((4, 10), 200), ((4, 100), 2000)):
        run.step(b, t, beside=Beside(Track([100] * 3, [0, 0, tenth]), Track([100] * 3, [tenth, 0, tenth])))
    for (b, t), working in (((4, 10), 200), ((4, 55), 1100), ((2, 100), 1000), ((4, 200), 4000)):
        learner = begun(run, b, t)
        assert learner.current is None and learner.beside.needs.working == [working, 0, working]
        assert learner.beside_saves == (100, 100, 100 + working) and learner.beside_needs[0] == 100 + working
        learner._reset()
    assert learner.beside == Beside() and learner.beside_needs == ()


def test_what_is_known_to_be_larger_than_any_may_use_more_than_any() -> None:
    """It is not foretold, and what it will save is known."""
    run = Run(limit=9000)
    for b, t in WARM:
        run.step(b, t, beside=used(b, t))
    learner, known = begun(run, 4, 200), used(4, 200).needs.working
    assert learner.foretold is None
    assert all(abs(found - working) <= 2 for found, working in zip(learner.beside.needs.working, known, strict=True))


def test_a_size_may_be_nothing(run: Run) -> None:
    """A tensor without elements may be saved on a storage that has some."""
    run.step(4, 10, beside=used(4, 10))
    assert begun(run, 0, 10).beside.saves.levels == [100] * 3


@pytest.mark.parametrize("which", range(OBSERVED))
def test_each_of_the_first_sizes_tells_it(run: Run, which: int) -> None:
    for index, (b, t) in enumerate(WARM):
        run.step(b, t, beside=used(b, t) if index == which else None)
    family = run.sizes._programs[0].family
    assert family is not None and family.beside.told


def test_sizes_that_come_later_tell_it_too(run: Run) -> None:
    run.warm()
    family = run.sizes._programs[0].family
    assert family is not None and not family.beside.told
    run.step(4, 120, beside=used(4, 120))
    assert family.beside.told


def test_where_plans_are_told_a_missed_limit_makes_them_tighter() -> None:
    run = Run(limit=100_000)
    for b, t in WARM:
        run.step(b, t, beside=used(b, t))
    run.step(3, 16, peak=110_000, beside=Beside())
    assert run.sizes._programs[0].aim == pytest.approx(100 / 110)


def test_the_device_s_base_is_no_room_that_plans_may_miss() -> None:
    """One whose forecast is over the limit by a hundredth of what is left for the step is followed, and no other."""
    for over, told in ((1, True), (2, False)):
        run = Run(limit=9100, holds=False)
        for b, t in WARM:
            run.step(b, t, beside=Beside(Track([9000] * 3, [0] * 3), Track([9000] * 3, [0] * 3)))
        run.learner.revising.make_plan = None
        run.sizes._plan_like = lambda graph, limit, known, over=over: replace(
            plan_of(graph, Link(1e9, 1e9), [Action.KEEP] * 3), peak_bytes=limit + over
        )
        assert (run.step(3, 16)[-1] is PLANNED) is told


def test_a_missed_limit_makes_plans_tighter(run: Run) -> None:
    run.warm()
    run.step(3, 16, peak=1100)
    run.step(3, 16)
    assert run.asked[-1][1] == int(1000 * 1000 / 1100)


def test_where_the_plan_itself_is_over_it_a_tighter_one_would_be_no_better(run: Run) -> None:
    run.warm()
    run.holds, run.sizes._programs[0].missed = False, HOPELESS
    run.step(4, 60, peak=1100)
    assert run.sizes._programs[0].aim == 1


@pytest.mark.parametrize(("peak_bytes", "told"), [(1000, True), (1010, True), (1011, False)])
def test_a_step_whose_plan_would_not_hold_the_limit_is_recorded(run: Run, peak_bytes: int, told: bool) -> None:
    """More can be done for it there, at more cost. A percent too much is no limit missed."""
    run.warm()
    plan_like = run._plan_like
    run.sizes._plan_like = lambda *asked: replace(plan_like(*asked), peak_bytes=peak_bytes)
    run.step(4, 65, peak=1)
    assert run.followed == told


def test_but_not_where_such_steps_do_not_hold_it_either(run: Run) -> None:
    run.holds = False
    for number, size in enumerate([*WARM, (4, 20), (4, 60)]):
        run.step(*size, peak=10 if number == 1 else 10**6)
        assert not run.followed
    run.step(4, 50)
    assert run.followed, "three running were over it"


def test_what_a_longer_search_has_found_for_one_size_is_tried_at_others(run: Run) -> None:
    run.warm()
    run.step(4, 60)
    assert len(run.asked) > len(run.known) == 1
    learner, (profile, *_) = run.learner, run.learner.profiles
    assert run.known[-1] == tuple(dict.fromkeys(p.plan.actions for p in reversed(learner.profiles) if p.plan))
    run.step(4, 60)
    assert len(run.known) == 1, "the plan that was made is used again"
    assert profile.plan is not None
    better = replace(profile.plan, actions=(Action.RECOMPUTE, Action.KEEP, Action.RECOMPUTE))
    learner.follow(profile, better)
    run.step(4, 60)
    assert len(run.known) == 2 and better.actions in run.known[-1]


def test_only_plans_of_the_last_few_that_were_recorded_are(run: Run) -> None:
    run.warm()
    recorded = [(4, 110 + 10 * number) for number in range(PROFILES)]
    for size in recorded:
        run.step(*size, peak=1)
    assert [p.unevicted_peak_bytes for p in run.sizes._programs[0].profiles] == [
        10 * b * t + 4 * b * t * t + 6 * b * t for b, t in recorded
    ]


def test_what_is_left_over_of_another_step_counts(run: Run) -> None:
    run.warm()
    run.learner.standing_bytes = 300
    run.step(3, 16)
    assert run.asked[-1][1] == 700


def test_programs_are_forgotten_the_one_used_longest_ago_first(run: Run) -> None:
    for count in range(PROGRAMS + 2):
        run.sizes.learn(StepLog(signatures=[0], structures=[count]), (1,), 0, NOTHING_KNOWN, held=True, beside=Beside())
    assert [program.structure for program in run.sizes._programs] == [(i,) for i in range(PROGRAMS + 1, 1, -1)]


@pytest.mark.parametrize(
    "log",
    [
        StepLog(signatures=[0, 0], structures=[0]),
        StepLog(signatures=[0], structures=[0], saves=[1], needs_before=[1]),
        StepLog(signatures=[0], structures=[0], saves=[1, 2], needs_before=[0, 0], asked_small=[(0, 0, 1)]),
    ],
    ids=["not seen whole", "a need in forward", "one of what is small"],
)
def test_what_is_not_learned(run: Run, log: StepLog) -> None:
    run.sizes.learn(log, (1,), 0, NOTHING_KNOWN, held=True, beside=Beside())
    assert run.sizes._programs == []


def test_needs_are_numbered_alike_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """f is too small to be evicted at most of them; the plan's positions count its needs all the same."""
    run = Run(least=500)
    run.warm()
    positions = []
    needed = Learner.needed
    monkeypatch.setattr(
        Learner, "needed", lambda self, order, at: positions.append((order, self.position)) or needed(self, order, at)
    )
    assert run.step(3, 16) == [PLANNED] * 3
    assert positions == [(2, 0), (1, 1), (0, 2)]
    assert run.asked[-1][0].needs == (2, 1, 0)
    assert [run.asked[-1][0].nodes[node].evictable for node in run.asked[-1][0].saved] == [False, True, False]
    assert run.learner.profiles[0].graph.needs == (1,), "those of a kind that was recorded have none of small ones"


def test_what_may_be_too_small_at_a_size_that_is_rounded_up_is_not_planned_to_go() -> None:
    """f has 2,600 bytes here and 2,640 there."""
    for least, evictable in ((2620, False), (2200, True)):
        run = Run(limit=5000, least=least)
        run.warm()
        assert run.step(4, 65) == [PLANNED] * 3
        graph = run.asked[-1][0]
        assert bytes_of(graph)[0] == 2640
        assert [graph.nodes[node].evictable for node in graph.saved] == [evictable, True, False]


def test_needs_and_releases_with_those_of_what_is_small() -> None:
    log = StepLog(
        saves=[10, 11, 12, 13],
        needs=[(3, 50), (1, 70)],
        asked_small=[(2, 1, 4), (0, 2, 4)],
        releases=[(3, 1), (2, 1), (1, 2), (0, 2)],
        small_before=[0, 1, 1, 2],
        end_ns=90,
    )
    whole = with_small_needs(log)
    assert whole.needs == [(3, 50), (2, 70), (1, 70), (0, 90)]
    assert whole.releases == [(3, 1), (2, 2), (1, 3), (0, 4)]
    assert build_graph_needs(whole) == ((3, 2, 1, 0), (4, 3, 2, 1))


def test_beside_a_need_of_something_small_is_what_was_beside_the_one_before() -> None:
    log = StepLog(saves=[10, 11], needs=[(1, 50), (0, 70)], asked_small=[(1, 0, 2), (0, 1, 2), (1, 1, 2), (0, 2, 2)])
    beside = Beside(Track([1, 2], [3, 4]), Track([5, 6], [7, 8]), [0, 9])
    found = with_small_needs_beside(log, beside)
    assert found == Beside(beside.saves, Track([2, 5, 5, 5, 6, 6], [4, 7, 7, 7, 8, 8]), [0, 9])
    assert len(with_small_needs(log).needs) == len(found.needs.levels)
    assert with_small_needs_beside(log, Beside()) == Beside(), "nobody measured it"


def build_graph_needs(log: StepLog) -> tuple[tuple[int, ...], tuple[int, ...]]:
    log.nbytes, log.kinds = dict.fromkeys(log.saves, 8), dict.fromkeys(log.saves, Kind.ACTIVATION)
    log.save_ns, log.ops_before = [0] * 4, [0] * 4
    graph = build_graph(log, 0)
    return graph.needs, graph.release


def test_an_odd_step_now_and_then_costs_a_few_others_their_routine() -> None:
    """An epoch's last batch, while nothing else is known of it: all of the next epoch was recorded for it before."""
    from test_learner import Planner
    from test_routine import SHORT, follow

    learner = Learner(Revising(0, Planner(Action.SWAP)))
    for _ in range(SHORT):
        follow(learner, "a")
    assert follow(learner, "a") and not follow(learner, "a", shape="odd")
    assert [follow(learner, "a") for _ in range(WATCHFUL + 2)] == [False] * WATCHFUL + [True] * 2
    assert learner.missed, "and where all else fits, the recorder stays on until it has been seen whole"


# -- with tensors -----------------------------------------------------------------------------------------------------
LIMIT_BYTES = 5 * 2**18


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every finished step: mode, peak, and what its peak would have been."""
    seen: list[Any] = []
    finish = Engine._finish_step
    monkeypatch.setattr(Engine, "_finish_step", lambda *args: seen.append(finish(*args)) or seen[-1])
    return seen


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that was foretold, whether it went so."""
    seen: list[bool] = []
    ended = Sizes.ended
    monkeypatch.setattr(Sizes, "ended", lambda self, what, so, *more: seen.append(so) or ended(self, what, so, *more))
    return seen


def shapes(count: int, batches: tuple[int, ...] = (4,)) -> list[tuple[int, int]]:
    draw = random.Random(7)
    return [(draw.choice(batches), draw.randint(16, 64)) for _ in range(count)]


def train(sizes: list[tuple[int, int]], dropout: float = 0.0) -> list[Tensor]:
    """Losses and gradients of all steps."""
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=3, width=64, heads=4, seq=64))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    found = []
    for batch, length in sizes:
        loss = next_byte_loss(model, torch.randint(0, 256, (batch, length + 1), generator=generator))
        if dropout:
            loss = loss + F.dropout(model.head.weight, dropout).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            found.extend([loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        optimiser.step()
        optimiser.zero_grad()
    return found


def under(sizes: list[tuple[int, int]], least: int = 0, device: str = "cpu", **limit: Any) -> tuple[list[Tensor], Any]:
    policy = delta.load_policy("delta", {"filter.min_bytes": least})
    with delta.evict(policy=policy, device=device, **limit) as run:
        found = train(sizes)
    return found, run.report()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("batches", [(4,), (2, 3, 4, 5)])
@pytest.mark.parametrize("least", [0, 2**15])
@pytest.mark.parametrize("device", ["cpu", "chaos:3"])
def test_changing_sizes_are_exact_within_the_limit_and_planned(
    batches: tuple[int, ...], least: int, device: str, steps: list[Any], told: list[bool]
) -> None:
    sizes = shapes(24, batches)
    found, report = under(sizes, least, device, activations=LIMIT_BYTES)
    assert all(map(torch.equal, found, train(sizes)))
    planned = [step for step in steps[OBSERVED:] if step.mode is Mode.PLANNED]
    assert max(step.peak_bytes for step in planned) <= LIMIT_BYTES
    assert report.unevicted_peak_activation_bytes > 1.3 * LIMIT_BYTES
    assert len(told) > 15 and all(told[3:])


@pytest.mark.usefixtures("one_thread")
def test_a_share_is_one_of_each_step_s_own_peak(steps: list[Any]) -> None:
    sizes = shapes(16)
    found, _ = under(sizes, activations="60%")
    assert all(map(torch.equal, found, train(sizes)))
    assert [step.mode for step in steps[OBSERVED:]] == [Mode.PLANNED] * 13
    for step in steps[OBSERVED:]:
        assert step.peak_bytes <= 0.6 * step.unevicted_peak_bytes


@pytest.mark.usefixtures("one_thread")
def test_only_what_plans_replay_is_recorded_of_a_size_that_was_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = [0]
    record = Recorder._record

    def counted(self: Recorder, *args: Any) -> Any:
        recorded[-1] += self._learner.in_step
        return record(self, *args)

    monkeypatch.setattr(Recorder, "_record", counted)
    begin = Learner.begin
    monkeypatch.setattr(Learner, "begin", lambda *args: recorded.append(0) or begin(*args))
    under(shapes(12), activations=LIMIT_BYTES)
    _, *counts = recorded
    assert min(counts[:OBSERVED]) >= 40 and max(counts[OBSERVED + 1 :]) <= 5, counts


@pytest.mark.usefixtures("one_thread")
def test_a_program_that_takes_another_turn_stays_exact(steps: list[Any], told: list[bool]) -> None:
    """A batch of one needs one copy less in this model: other ops, and one storage less, than the plan is for."""
    few = shapes(6, (2, 3, 4))
    sizes = [(4, 63), *few, (1, 60), (1, 63), (4, 40), (1, 50), *few, (1, 41), *few, *few]
    found, _ = under(sizes, activations=LIMIT_BYTES)
    assert all(map(torch.equal, found, train(sizes)))
    assert False in told and all(told[-6:])


class Halves(nn.Module):
    """Saves what is small at some sizes and not at others, and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.2) + x
            x = x * torch.sigmoid(x[:, :1])
        return x.square().mean()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("device", ["cpu", "chaos:5"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_is_small_at_some_sizes_only(device: str, accumulate: int, told: list[bool]) -> None:
    """Rows of 32 numbers: storages from 8 to 64 KiB, of which those under 16 are never evicted."""

    def training() -> list[Tensor]:
        torch.manual_seed(0)
        model, draw = Halves(), random.Random(3)
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for step in range(24):
            loss = model(torch.randn(draw.randrange(64, 512), 32))
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            if step % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        return found

    expected = training()
    policy = delta.load_policy("delta", {"filter.min_bytes": "16KiB"})
    with delta.evict(activations="700KiB", policy=policy, device=device):
        assert all(map(torch.equal, training(), expected))
    assert len(told) > 15 and all(told[2:])
