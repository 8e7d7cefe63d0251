"""Costs by hand. Units: bytes, ns; a link of N GB/s moves N bytes in a ns."""

import pytest
from builders import a_ledger, an_op
from hypothesis import given
from hypothesis import strategies as st

from delta.costs import Chains, Costs, LinkQueue, closure_ns, own_ns
from delta.ledger import Ledger
from delta.types import Cost, Kind, Link


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


def test_who_asked_is_named_once_when_a_class_costs_less():
    """1 and 2 are a class, 4 another; then 3 joins them. Those who asked for any part are named by the whole."""
    chains = Chains()
    chains.gone(1, 5, [2])
    chains.gone(2, 7, [1])
    chains.gone(4, 11, [])
    assert chains.cost_ns(1, [1], asker=10) == 13
    assert chains.cost_ns(1, [4], asker=11) == 12
    assert chains.cost_ns(1, [1, 4], asker=12) == 24
    chains.cost_ns(1, [1])
    chains.gone(3, 13, [2, 4])
    assert chains.back(4, 11) == {10, 11, 12}
    assert chains.back(1, 5) == set(), "nobody has asked since"


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
    ("now", "out_free", "in_free", "next_use", "exposed"),
    [
        (0, 0, 0, 300, 100),  # out ends at 100, which is waited for; in at 300, when the value is due: hidden
        (0, 0, 0, 250, 150),  # back at 300, used at 250
        (0, 0, 0, 0, 400),  # both ways exposed: 100 + (300 - 0)
        (0, 500, 0, 800, 600),  # the way out is busy until 500: host copy at 600, back at 800
        (0, 0, 900, 300, 900),  # the way in is busy until 900: back at 1100, used at 300
        (0, 0, 900, 1100, 100),
        (70, 50, 60, 370, 100),  # queues that are free already do not count back in time
        (70, 50, 60, 360, 110),
    ],
)
def test_exposed_time_by_hand(now, out_free, in_free, next_use, exposed):
    queue = LinkQueue(OUT_10_IN_5)
    queue.out_free_ns, queue.in_free_ns = out_free, in_free
    assert queue.exposed_ns(1000, now, next_use) == exposed


def test_a_whole_host_copy_costs_only_the_way_back():
    queue = LinkQueue(OUT_10_IN_5)
    queue.out_free_ns = 10_000  # no matter
    assert queue.exposed_ns(1000, 0, 150, whole=True) == 50  # back at 200, used at 150
    assert queue.exposed_ns(1000, 0, 200, whole=True) == 0


def test_interference_takes_its_share_of_the_copy_times():
    queue = LinkQueue(Link(10e9, 5e9, interference=0.3))
    # the way out is waited for, and compute loses 30 % of 100 ns out + 200 ns in
    assert queue.exposed_ns(1000, 0, 300) == 100 + 90
    # only the way back: 30 % of 200 ns
    assert queue.exposed_ns(1000, 0, 200, whole=True) == 60


def test_a_copy_takes_its_own_time_whatever_its_size():
    queue = LinkQueue(Link(10e9, 5e9, interference=0.3, copy_ns=7))
    assert queue.exposed_ns(1000, 0, 300) == 100 + 90 + 2 * 7
    assert queue.exposed_ns(1000, 0, 200, whole=True) == 60 + 7


def test_asking_queues_nothing():
    queue = LinkQueue(OUT_10_IN_5)
    queue.exposed_ns(1000, 0, 0)
    assert (queue.out_free_ns, queue.in_free_ns) == (0, 0)


# -- what an eviction costs -------------------------------------------------------------------------------------------
def lose(ledger: Ledger, costs: Costs, record: int) -> None:
    if ledger[record].held:
        ledger.let_go(record)
    ledger.gone(record)
    costs.went_missing(ledger[record])


def find(ledger: Ledger, costs: Costs, record: int) -> None:
    ledger.hold(record)
    costs.back(ledger[record])


def a_broken_chain(replay_ns: int = 0) -> tuple[Ledger, Costs]:
    """0 - 1 - 2 - 3 - 4 - 5, made in 1, 2, 4, 8, 16 ns from the source 0. 1, 2 and 4 are gone; 3 may go next."""
    ops = [an_op(100 + i, [i], [i + 1], cost_ns=2**i) for i in range(5)]
    ledger = a_ledger([1] * 6, ops, {0: Kind.SOURCE})
    ledger.replay_ns = replay_ns
    costs = Costs(ledger)
    for record in (0, 3, 5):
        ledger.hold(record)
    for record in (1, 2, 4):
        lose(ledger, costs, record)
    return ledger, costs


@pytest.mark.parametrize(
    ("kind", "cost_ns"),
    [
        (Cost.OWN, 4),  # the op that made 3
        (Cost.ANCESTORS, 7),  # and those of 2 and 1
        (Cost.NEIGHBOURHOOD, 15),  # and that of 4
        (Cost.CLASSES, 15),  # classes {1, 2} and {4}
    ],
)
def test_the_cost_of_an_eviction_by_hand(kind, cost_ns):
    _, costs = a_broken_chain()
    assert costs.of(kind, 3) == cost_ns


@pytest.mark.parametrize(
    ("kind", "replays"), [(Cost.OWN, 1), (Cost.ANCESTORS, 3), (Cost.NEIGHBOURHOOD, 4), (Cost.CLASSES, 4)]
)
def test_each_op_of_a_chain_takes_something_beside_its_own_time(kind, replays):
    ledger, costs = a_broken_chain()
    free_ns = costs.of(kind, 3)
    ledger, costs = a_broken_chain(replay_ns=100)
    assert costs.of(kind, 3) == free_ns + 100 * replays
    find(ledger, costs, 1)
    left = {Cost.OWN: (4, 1), Cost.ANCESTORS: (4 + 2, 2)}.get(kind, (4 + 2 + 8, 3))
    assert costs.of(kind, 3) == left[0] + 100 * left[1], "what 1 cost has gone with it"


def test_classes_remember_what_the_neighbourhood_forgets():
    """2 is back, and nothing connects 1 with 3 any more. With 2 gone again it is a class of its own, beside that of 1,
    until their ops join them once more."""
    ledger, costs = a_broken_chain()
    find(ledger, costs, 2)
    assert costs.of(Cost.NEIGHBOURHOOD, 3) == 4 + 8
    assert costs.of(Cost.CLASSES, 3) == 4 + 8
    find(ledger, costs, 4)
    assert costs.of(Cost.CLASSES, 3) == 4
    lose(ledger, costs, 3)
    # 1 and 3 are both missing, and 2, which is there, lies between them: two classes, 1 + 4, beside its own 2 ns
    assert costs.of(Cost.CLASSES, 2) == 2 + 1 + 4
    assert costs.of(Cost.NEIGHBOURHOOD, 2) == 2 + 1 + 4


def test_classes_are_dearer_once_they_have_been_connected():
    """1, 2 and 3 were gone together; 2 came back. 4 is beside 3 alone, and still pays for 1."""
    ops = [an_op(100 + i, [i], [i + 1], cost_ns=2**i) for i in range(4)]
    ledger = a_ledger([1] * 5, ops, {0: Kind.SOURCE})
    costs = Costs(ledger)
    for record in (0, 4):
        ledger.hold(record)
    for record in (1, 2, 3):
        lose(ledger, costs, record)
    find(ledger, costs, 2)
    assert costs.of(Cost.ANCESTORS, 4) == 8 + 4
    assert costs.of(Cost.NEIGHBOURHOOD, 4) == 8 + 4
    assert costs.of(Cost.CLASSES, 4) == 8 + 4 + 1


def test_a_closure_stops_at_what_is_there_and_pays_each_record_once():
    """4 = f(2, 3), 2 = f(1), 3 = f(1), 1 = f(0); 1, 2 and 3 are gone."""
    ops = [
        an_op(10, [0], [1], cost_ns=1),
        an_op(11, [1], [2], cost_ns=10),
        an_op(12, [1], [3], cost_ns=100),
        an_op(13, [2, 3], [4], cost_ns=1000),
    ]
    ledger = a_ledger([1] * 5, ops)
    for record in (0, 4):
        ledger.hold(record)
    assert closure_ns(ledger, 4, ledger.parents) == 111, "what merely is alive counts as gone"
    assert closure_ns(ledger, 1, ledger.children) == 110
    ledger.hold(2)
    assert closure_ns(ledger, 4, ledger.parents) == 101
    assert closure_ns(ledger, 0, ledger.parents) == 0


def test_what_no_op_made_costs_nothing():
    assert own_ns(a_ledger([1]), 0) == 0


def test_an_op_that_is_timed_later_costs_its_new_time():
    ledger, costs = a_broken_chain()
    assert (costs.of(Cost.ANCESTORS, 3), costs.of(Cost.NEIGHBOURHOOD, 3)) == (7, 15)
    ledger.time_op(101, 20)  # made 2, which is gone
    assert (costs.of(Cost.ANCESTORS, 3), costs.of(Cost.NEIGHBOURHOOD, 3)) == (25, 33)
    ledger.time_op(104, 100)  # made 5, which is there and below
    assert costs.of(Cost.NEIGHBOURHOOD, 3) == 33
    assert costs.of(Cost.OWN, 5) == 100


@given(st.data())
def test_costs_remember_only_what_is_still_true(data):
    """Records go, come, are timed anew and are forgotten in any order. What is asked for is what a fresh walk finds,
    and whoever has asked for what costs less now has been touched."""
    count = data.draw(st.integers(2, 9))
    sources = [data.draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=3)) for number in range(1, count)]
    ops = [an_op(100 + number, read, [number], cost_ns=3**number) for number, read in enumerate(sources, 1)]
    ledger = a_ledger([1] * count, ops, {0: Kind.SOURCE})
    for record in range(count):
        ledger.save(record, record)
        ledger.hold(record)
    costs = Costs(ledger)
    kinds = (Cost.ANCESTORS, Cost.NEIGHBOURHOOD, Cost.CLASSES)
    told: dict[tuple[Cost, int], int] = {}
    events = st.tuples(st.sampled_from(["turn", "time", "forget"]), st.integers(1, count - 1), st.integers(0, 999))
    for what, record, cost_ns in data.draw(st.lists(events, max_size=20)):
        if record not in ledger:
            continue
        if what == "time":
            ledger.time_op(100 + record, cost_ns)
        elif what == "forget":
            if not ledger[record].held and not ledger[record].users:
                ledger.unsave(record)
                ledger.forget_dead([record])
        elif ledger[record].held:
            lose(ledger, costs, record)
        else:
            find(ledger, costs, record)
        costs.settle()
        for kind, asked in list(told):
            if asked in ledger.touched or asked not in ledger:
                del told[kind, asked]
        ledger.touched.clear()
        for (kind, asked), before_ns in told.items():
            assert costs.of(kind, asked) >= before_ns, (kind, asked)
        for asked in data.draw(st.sets(st.integers(0, count - 1))) & ledger.records.keys():
            above_ns = own_ns(ledger, asked) + closure_ns(ledger, asked, ledger.parents)
            assert costs.of(Cost.ANCESTORS, asked) == above_ns
            assert costs.of(Cost.NEIGHBOURHOOD, asked) == above_ns + closure_ns(ledger, asked, ledger.children)
            told |= {(kind, asked): costs.of(kind, asked) for kind in kinds}
