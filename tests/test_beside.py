"""What steps use beside counted activations, and what one of another size will."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta.beside import SIZES, Beside, BesideBySize, Track

BASE = 1000


def used(saved_bytes: int, fixed: int = 0, base: int = BASE) -> Beside:
    """By a step whose ops make a tenth of what it saves, and drop half of that; backward makes `fixed` bytes."""
    made = saved_bytes // 10
    return Beside(Track([base, base + made], [made, made // 2]), Track([base + made, base + fixed], [made, made]))


def known(*sizes: int, fixed: int = 0) -> BesideBySize:
    found = BesideBySize()
    for saved_bytes in sizes:
        found.saw(saved_bytes, used(saved_bytes, fixed))
    return found


def test_nothing_is_known_of_steps_that_nobody_has_seen() -> None:
    assert not known().told and not known().base_bytes
    assert known().at(500) == Beside()
    assert known(500).told


@pytest.mark.parametrize("saved_bytes", [200, 400, 1000])
def test_a_size_that_was_seen_uses_what_it_used(saved_bytes: int) -> None:
    assert known(200, 400, 1000).at(saved_bytes) == used(saved_bytes)


@given(st.integers(10, 100), st.integers(0, 900))
def test_between_two_sizes_it_is_what_grows_and_what_does_not(twentieth: int, fixed: int) -> None:
    """Gradients are as large at any size, what ops make is not."""
    assert known(200, 2000, fixed=fixed).at(20 * twentieth) == used(20 * twentieth, fixed)


def test_it_is_the_next_sizes_that_tell() -> None:
    found = known(200, 400, 2000)
    found.saw(600, Beside(Track([BASE, BASE], [900, 900]), Track([BASE, BASE], [0, 0])))
    assert found.at(300) == used(300)
    assert found.at(500).saves.working == [470, 460], "half of the way from 40 and 20"
    assert found.at(2000) == used(2000)


def test_a_larger_one_than_any_uses_more_but_for_what_is_there_anyway() -> None:
    assert known(200, 400).at(800) == used(800)
    assert known(400, fixed=100).at(800).needs.levels[1] == BASE + 200, "of what has been seen once all may grow"


def test_of_a_step_that_saves_nothing_no_other_can_be_told_but_that_it_uses_as_much() -> None:
    found = BesideBySize()
    found.saw(0, used(500))
    assert found.at(1) == used(500)


def test_a_smaller_one_than_any_uses_no_more_than_the_smallest() -> None:
    """Nobody knows which of it is as large at any size."""
    assert known(400, 800).at(100) == used(400)


def test_nothing_is_rounded_down() -> None:
    found = known(300, 600)
    found.saw(600, Beside(Track([BASE, BASE], [0, 0]), Track([BASE, BASE + 61], [61, 61])))
    assert found.at(301).needs.working[0] == 31, "less than a tenth more than 30"
    assert found.at(601).needs == Track([BASE, BASE + 62], [62, 62])


def test_of_a_size_that_comes_again_the_last_levels_count_and_the_largest_working_sets() -> None:
    found = known(200)
    found.saw(200, Beside(Track([5, 6], [100, 0]), Track([7, 8], [0, 90])))
    assert found.at(200) == Beside(Track([5, 6], [100, 10]), Track([7, 8], [20, 90]))
    assert found.base_bytes == 5, "as the last one began"


def test_steps_of_other_places_are_forgotten() -> None:
    found = known(200, 400)
    other = Beside(Track([BASE], [7]), Track([BASE, BASE], [8, 9]))
    found.saw(300, other)
    assert found.at(300) == found.at(200) == other
    found.saw(300, used(300))
    assert found.at(300) == used(300)


def test_what_was_there_as_the_last_one_began_is_there_at_any_size() -> None:
    """The first step of all began without the optimizer's state."""
    found = BesideBySize()
    for saved_bytes, base in ((2000, 1000), (200, 1700)):
        found.saw(saved_bytes, used(saved_bytes, base=base))
    assert found.at(2000) == used(2000, base=1700)
    assert found.at(400).saves == used(400, base=1700).saves


def test_the_size_seen_longest_ago_is_forgotten() -> None:
    sizes = [100 * (1 + k) for k in range(SIZES)]
    found = known(*sizes)
    found.saw(100, used(100))
    assert found.at(200) == used(200)
    found.saw(90_000, used(90_000))
    assert found.at(100) == used(100) and found.at(300) == used(300)
    found.saw(200, Beside(Track([0, 0], [0, 0]), Track([0, 0], [0, 0])))
    assert found.at(200).saves.working == [0, 0], "200 had gone, so nothing of it counts"


def test_more_is_used_the_more_is_saved() -> None:
    found = known(200, 900, 1000, fixed=300)
    steps = [found.at(saved_bytes).needs.most_bytes for saved_bytes in range(50, 1500, 7)]
    assert all(b >= a for one, two in pairwise(steps) for a, b in zip(one, two, strict=True))
