"""Costs by hand. Units: bytes, ns; a link of N GB/s moves N bytes in a ns."""

import pytest

from delta.costs import Chains, LinkQueue
from delta.types import Link


# -- chains -----------------------------------------------------------------------------------------------------------
def missing_chain() -> Chains:
    """1 (5 ns) - 2 (7 ns) - 3 (11 ns), gone one after the other: one class of 23 ns."""
    chains = Chains()
    chains.gone(1, 5, [0, 2])
    chains.gone(2, 7, [1, 3])
    chains.gone(3, 11, [2, 4])
    return chains


def test_with_nothing_missing_an_op_costs_its_own_time():
    assert Chains().cost_ns(3, [1, 2]) == 3


def test_missing_neighbours_form_one_class():
    # 4 = op(3): own 2 ns + class {1, 2, 3} = 5 + 7 + 11 = 23 ns
    assert missing_chain().cost_ns(2, [3]) == 25


def test_a_class_is_paid_once_however_many_inputs_are_in_it():
    assert missing_chain().cost_ns(2, [1, 2, 3]) == 25


def test_classes_that_do_not_touch_add_up():
    chains = Chains()
    chains.gone(1, 5, [0])
    chains.gone(3, 11, [4])
    assert chains.cost_ns(2, [1, 3]) == 18  # 2 + 5 + 11
    chains.gone(2, 7, [1, 3])  # and a bridge makes them one: 5 + 11 + 7
    assert chains.cost_ns(2, [1]) == chains.cost_ns(2, [3]) == chains.cost_ns(2, [1, 3]) == 25


def test_what_is_gone_twice_counts_once():
    chains = missing_chain()
    chains.gone(2, 7, [1, 3])
    assert chains.cost_ns(0, [1]) == 23


def test_a_record_that_is_back_takes_its_cost_along():
    chains = missing_chain()
    chains.back(3, 11)
    assert chains.cost_ns(2, [3]) == 2, "3 is there: nothing to replay before it"
    assert chains.cost_ns(2, [2]) == 14  # 2 + 5 + 7


def test_classes_are_never_split_which_is_the_published_error():
    """2 came back, so 1 and 3 are connected no more; the true cost of reading 3 is 2 + 11."""
    chains = missing_chain()
    chains.back(2, 7)
    assert chains.cost_ns(2, [3]) == 18  # 2 + (5 + 11)


def test_back_without_having_gone_changes_nothing():
    chains = missing_chain()
    chains.back(9, 100)
    chains.back(3, 11)
    chains.back(3, 11)
    assert chains.cost_ns(0, [1]) == 12


def test_a_record_may_go_again():
    chains = missing_chain()
    chains.back(3, 11)
    chains.gone(3, 11, [2])
    assert chains.cost_ns(0, [3]) == 23


def test_a_class_never_costs_less_than_nothing():
    """Op times may be measured again in between."""
    chains = missing_chain()
    chains.back(3, 1000)
    assert chains.cost_ns(0, [1]) == 0


def test_clear_forgets_all():
    chains = missing_chain()
    chains.clear()
    assert chains.cost_ns(2, [1, 2, 3]) == 2


# -- the link ---------------------------------------------------------------------------------------------------------
OUT_10_IN_5 = Link(10e9, 5e9)  # out: 10 bytes a ns; in: 5 bytes a ns


def test_link_times_are_in_ns():
    assert OUT_10_IN_5.out_ns(1000) == 100
    assert OUT_10_IN_5.in_ns(1000) == 200
    assert Link(12e9, 12e9).out_ns(12 * 2**20) == 1_048_576  # 12 MiB at 12 GB/s: 1.05 ms


def test_each_direction_queues_on_its_own():
    queue = LinkQueue(OUT_10_IN_5)
    assert queue.begin_out(1000, 0) == 100
    assert queue.begin_out(1000, 50) == 200, "behind the first"
    assert queue.begin_in(1000, 50) == 250, "the way in is free"
    assert queue.begin_out(1000, 1000) == 1100, "the way out has been idle since 200"


# A swap of 1000 bytes: out takes 100 ns, in takes 200 ns.
@pytest.mark.parametrize(
    ("now", "out_free", "in_free", "room_by", "next_use", "exposed"),
    [
        (0, 0, 0, 100, 300, 0),  # out ends at 100 when room is due, in at 300 when the value is: hidden
        (0, 0, 0, 0, 300, 100),  # room is due at once: the whole way out is waited for
        (0, 0, 0, 40, 300, 60),  # 40 of its 100 ns are hidden
        (0, 0, 0, 100, 250, 50),  # back at 300, used at 250
        (0, 0, 0, 0, 0, 400),  # both ways exposed: 100 + (300 - 0)
        (0, 500, 0, 100, 800, 500),  # the way out is busy until 500: host copy at 600, room was due at 100; back at 800
        (0, 0, 900, 100, 300, 800),  # the way in is busy until 900: back at 1100, used at 300
        (0, 0, 900, 100, 1100, 0),
        (70, 50, 60, 170, 370, 0),  # queues that are free already do not count back in time
        (70, 50, 60, 160, 360, 20),  # 10 each way
    ],
)
def test_exposed_time_by_hand(now, out_free, in_free, room_by, next_use, exposed):
    queue = LinkQueue(OUT_10_IN_5)
    queue.out_free_ns, queue.in_free_ns = out_free, in_free
    assert queue.exposed_ns(1000, now, room_by, next_use) == exposed


def test_a_whole_host_copy_costs_only_the_way_back():
    queue = LinkQueue(OUT_10_IN_5)
    queue.out_free_ns = 10_000  # no matter
    assert queue.exposed_ns(1000, 0, 0, 150, whole=True) == 50  # back at 200, used at 150
    assert queue.exposed_ns(1000, 0, 0, 200, whole=True) == 0


def test_interference_takes_its_share_of_the_copy_times():
    queue = LinkQueue(Link(10e9, 5e9, interference=0.3))
    # hidden, but compute loses 30 % of 100 ns out + 200 ns in
    assert queue.exposed_ns(1000, 0, 100, 300) == 90
    # only the way back: 30 % of 200 ns
    assert queue.exposed_ns(1000, 0, 0, 200, whole=True) == 60


def test_asking_queues_nothing():
    queue = LinkQueue(OUT_10_IN_5)
    queue.exposed_ns(1000, 0, 0, 0)
    assert (queue.out_free_ns, queue.in_free_ns) == (0, 0)
