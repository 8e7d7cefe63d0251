"""The floor of a budget: nothing where all fits, else the cheapest replays, never more than a simulated run adds."""

from dataclasses import replace

import pytest

from delta.config import Policy
from delta.policies.loader import load
from delta.simulate import simulate
from delta.simulate.floor import Floor, floors
from delta.trace import Trace
from delta.trace.events import Backward, Constant, Event, Evictable, Free, Need, Op, Save, Unsave
from delta.types import Link
from delta.units import Bytes, Share

COSTS_NS = (40, 10, 20)
BACKWARD_NS = 100


def a_step(costs_ns: tuple[int, ...] = COSTS_NS) -> Trace:
    """Each op makes 100 bytes from what is always there, and saves them; backward needs them the other way round."""
    made = range(1, len(costs_ns) + 1)
    events: list[Event] = [Constant(0, 8)]
    for number, cost_ns in zip(made, costs_ns, strict=True):
        events += [Op("op", (0,), (number,), (100,), cost_ns), Save(number), Free(number)]
    events.append(Backward())
    for number in reversed(made):
        events += [Need(number), Op("back", (number,), (), (), BACKWARD_NS), Unsave(number)]
    return Trace("step", Evictable.SAVED, tuple(events))


@pytest.fixture
def policy() -> Policy:
    return load("delta", {"filter.min_bytes": 0})


def test_the_cheapest_are_replayed(policy: Policy) -> None:
    budgets = [Share(1.0), Bytes(200), Bytes(100)]
    found = floors(a_step(), policy, budgets, None)
    assert [(floor.extra_ns, floor.fits, floor.budget_bytes) for floor in found] == [
        (0, True, 300),
        (10, True, 200),
        (10 + 40, True, 100),  # the dearest would be in the way of the last, which is needed first
    ]
    base_ns = sum(COSTS_NS) + 3 * BACKWARD_NS
    assert [floor.overhead for floor in found] == [1.0, 1 + 10 / base_ns, 1 + 50 / base_ns]


def test_the_floor_is_that_of_the_budget_whatever_the_policy_plans_by(policy: Policy) -> None:
    steps, budgets = a_step(), [Bytes(200)]
    families = load("mimose", {"filter.min_bytes": 0})
    assert floors(steps, families, budgets, None) == floors(steps, policy, budgets, None)


def test_what_a_link_hides_costs_nothing(policy: Policy) -> None:
    (fast,) = floors(a_step((1000, 2000, 3000)), policy, [Bytes(200)], Link(10.0e9, 10.0e9))
    (slow,) = floors(a_step((1000, 2000, 3000)), policy, [Bytes(200)], Link(1e3, 1e3))
    assert fast.extra_ns == 0 < slow.extra_ns == 1000


def test_what_a_runtime_takes_for_a_copy_is_no_part_of_it(policy: Policy) -> None:
    link = Link(10.0e9, 10.0e9)
    steps = a_step((1000, 2000, 3000))
    assert floors(steps, policy, [Bytes(200)], replace(link, copy_ns=700)) == floors(steps, policy, [Bytes(200)], link)


def test_what_no_plan_fits_is_said() -> None:
    (floor,) = floors(a_step(), load("delta"), [Bytes(100)], None)  # all smaller than filter.min_bytes
    assert (floor.fits, floor.peak_bytes) == (False, 300)


@pytest.mark.parametrize("budget", [0.35, 0.5, 0.7])
def test_a_run_takes_no_less(policy: Policy, budget: float) -> None:
    trace = a_step((70, 30, 50, 20, 90, 60, 10, 40, 80))
    (floor,) = floors(trace, policy, [Share(budget)], None)
    run = simulate(trace, policy, Share(budget))
    assert floor.fits and run.overhead is not None
    assert 1 < floor.overhead <= run.overhead


def test_a_floor_is_relative_to_the_step() -> None:
    assert Floor(extra_ns=5, base_ns=50, peak_bytes=11, budget_bytes=10).overhead == 1.1
    assert not Floor(extra_ns=5, base_ns=50, peak_bytes=11, budget_bytes=10).fits
