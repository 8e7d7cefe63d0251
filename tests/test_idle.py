"""When it is enough to count what is saved, and when that is too much."""

import math
from types import SimpleNamespace

import pytest

from delta.budget import Budget
from delta.idle import Idle
from delta.units import Bytes, Share


def an_idle(budget: Budget, limit_bytes: int | None = None, all_idle: bool = True) -> Idle:
    """300 bytes of other steps are resident, and 400 may come back."""
    ledger = SimpleNamespace(resident_bytes=300, unevicted_bytes=400)
    return Idle(budget, ledger, SimpleNamespace(all_idle=all_idle), SimpleNamespace(limit_bytes=limit_bytes))


def unasked() -> int:
    raise AssertionError("nobody need ask the device")


@pytest.mark.parametrize("budget", [Budget(), Budget(activations=Share(1.0))])
def test_without_a_limit_anything_fits(budget):
    idle = an_idle(budget, all_idle=False)
    assert idle.expected and idle.unasked_bytes == math.inf
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
