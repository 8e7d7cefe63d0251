"""When it is enough to count what is saved, and when that is too much."""

import math
from types import SimpleNamespace

import pytest

from delta.budget import Budget
from delta.idle import Idle
from delta.learner import Learner
from delta.profile import Profile
from delta.revising import Revising
from delta.types import Look
from delta.units import Bytes, Share


def an_idle(budget: Budget, limit_bytes: int | None = None, all_idle: bool = True) -> Idle:
    """300 bytes of other steps are resident, and 400 may come back."""
    ledger = SimpleNamespace(resident_bytes=300, unevicted_bytes=400)
    return Idle(budget, ledger, SimpleNamespace(all_idle=all_idle), SimpleNamespace(limit_bytes=limit_bytes))


def nearest(storages: int, step_bytes: int) -> tuple[int, int]:
    """Of the one known step: its storages have 10 bytes each."""
    return 10 * storages, 400


def going_on(budget: Budget, limit_bytes: int | None = None, nearest: object = nearest) -> Idle:
    """100 bytes are resident. On a device ops took up to 50."""
    ledger, learner = SimpleNamespace(resident_bytes=100), SimpleNamespace(nearest=nearest)
    headroom = SimpleNamespace(largest_bytes=50) if budget.device_bytes is not None else None
    return Idle(budget, ledger, learner, SimpleNamespace(limit_bytes=limit_bytes), headroom)


def unasked() -> int:
    raise AssertionError("nobody need ask the device")


@pytest.mark.parametrize("budget", [Budget(), Budget(activations=Share(1.0))])
def test_without_a_limit_anything_fits(budget):
    idle = an_idle(budget, all_idle=False)
    assert idle.expected and idle.goes_on(Look()) and idle.unasked_bytes == math.inf
    assert not idle.is_over(10**15, unasked)


def test_what_is_left_over_from_other_steps_takes_room():
    idle = an_idle(Budget(activations=Bytes(1000)), 1000)
    assert idle.unasked_bytes == 600
    assert not idle.is_over(700, unasked)
    assert idle.is_over(701, unasked)


@pytest.mark.parametrize("all_idle", [False, True])
def test_a_step_is_expected_to_fit_where_all_before_did(all_idle):
    assert an_idle(Budget(activations=Bytes(1000)), 1000, all_idle).expected == all_idle


def test_of_a_budget_on_the_device_others_use_some():
    idle = an_idle(Budget(device_bytes=1000, reserve_bytes=30), 500)
    assert idle.unasked_bytes < 0
    assert not idle.is_over(900, lambda: 970)
    assert idle.is_over(0, lambda: 971)


@pytest.mark.parametrize("storages", [1, 2, 4, 8, 16])
def test_a_step_that_is_larger_so_far_than_a_known_one_will_be_in_the_end(storages):
    """At 2.2 times the known one it comes to 880 bytes, beside the 100 that are resident."""
    grown = 22 * storages
    assert not going_on(Budget(activations=Bytes(980)), 980).will_be_over(storages, grown, unasked)
    assert going_on(Budget(activations=Bytes(979)), 979).will_be_over(storages, grown, unasked)
    assert not going_on(Budget(activations=Bytes(979)), 979).will_be_over(storages, 10 * storages, unasked)


def test_on_the_device_ops_and_others_take_some():
    """Its 44 bytes so far are among the 300 in use: 256 are not, and 2.2 times 400 and 50 to come."""
    budget = Budget(device_bytes=1300, reserve_bytes=54)
    assert not going_on(budget).will_be_over(2, 44, lambda: 300)
    assert going_on(budget).will_be_over(2, 44, lambda: 301)


@pytest.mark.parametrize("storages", [3, 5, 6, 7, 9, 12])
def test_it_is_not_looked_into_at_each_storage(storages):
    assert not going_on(Budget(activations=Bytes(200)), 200).will_be_over(storages, 10**6, unasked)


@pytest.mark.parametrize("budget", [Budget(), Budget(activations=Share(1.0))])
def test_without_a_limit_nobody_looks_ahead(budget):
    assert not going_on(budget, nearest=unasked).will_be_over(1, 10**6, unasked)


def test_where_nothing_is_known_nothing_is_foreseen():
    idle = going_on(Budget(activations=Bytes(200)), 200, lambda *_: (0, 0))
    assert not idle.will_be_over(1, 10**6, unasked)


def test_a_step_goes_on_like_the_one_that_is_nearest_so_far():
    learner = Learner(Revising(0, None))
    assert learner.nearest(2, 100) == (0, 0)
    small, large, nothing = (
        Profile((), SimpleNamespace(saved_bytes=sizes), sum(sizes), {}, 1.0) for sizes in ((10, 20, 30), (40, 50), ())
    )
    learner.profiles = [small, large, nothing]
    assert learner.nearest(1, 4) == learner.nearest(1, 24) == (10, 60)
    assert learner.nearest(2, 70) == (90, 90)
    assert learner.nearest(4, 70) == (60, 60)
