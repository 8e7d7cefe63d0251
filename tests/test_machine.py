"""The virtual device by hand: a clock, a link that queues each way, memory, and its log."""

import pytest

from delta.simulate.allocator import Ideal, OutOfMemory
from delta.simulate.machine import Entry, Machine
from delta.types import Link

LINK = Link(10e9, 5e9)  # out: 10 bytes a ns; in: 5 bytes a ns


def a_machine(capacity_bytes: int = 1000) -> Machine:
    return Machine(Ideal(capacity_bytes), LINK)


def test_compute_moves_the_clock():
    machine = a_machine()
    machine.allocate(1, 100)
    machine.run(30, (), (1,))
    machine.run(12, (1,), ())
    assert machine.now_ns == 42
    assert machine.log == [
        Entry("alloc", 0, 0, (1,)),
        Entry("run", 0, 30, (1,)),
        Entry("run", 30, 42, (), (1,)),
    ]


def test_memory_is_counted_and_has_a_peak():
    machine = a_machine()
    machine.allocate(1, 400)
    machine.allocate(2, 500)
    machine.free(1)
    machine.allocate(3, 100)
    assert (machine.used_bytes, machine.peak_bytes) == (600, 900)
    assert [machine.holds(storage) for storage in (1, 2, 3)] == [False, True, True]


def test_what_does_not_fit_changes_nothing():
    machine = a_machine(100)
    machine.allocate(1, 60)
    before = list(machine.log)
    with pytest.raises(OutOfMemory):
        machine.allocate(2, 41)
    assert (machine.used_bytes, machine.peak_bytes, machine.holds(2)) == (60, 60, False)
    assert machine.log == before


def test_a_write_in_place_takes_no_memory():
    machine = a_machine(100)
    machine.allocate(1, 100)
    machine.become(1, 2)
    assert (machine.holds(1), machine.holds(2), machine.used_bytes) == (False, True, 100)
    assert machine.log[-1] == Entry("become", 0, 0, (2,), (1,))
    machine.free(2)
    assert machine.used_bytes == 0


@pytest.mark.parametrize(
    ("out_bytes", "in_bytes", "took_ns"),
    [
        (0, 0, 100),
        (800, 0, 120),  # 80 ns beside a copy at 3/4 of the speed, and 40 ns alone
        (2000, 0, 133),  # beside it to the end: 100 / 0.75
        (400, 400, 130),  # 40 ns beside two at half the speed, 40 ns beside one, and 50 ns alone: 20 + 30 + 50
    ],
)
def test_copies_take_their_share_of_compute(out_bytes, in_bytes, took_ns):
    machine = Machine(Ideal(10_000), Link(10e9, 5e9, interference=0.25))
    for storage, nbytes in ((1, out_bytes), (2, in_bytes)):
        machine.allocate(storage, nbytes)
    if out_bytes:
        machine.copy_out(1)
    if in_bytes:
        machine.copy_in(2)
    machine.run(100, (), ())
    assert machine.now_ns == took_ns


def test_each_direction_of_the_link_queues_on_its_own():
    machine = a_machine()
    for storage in (1, 2):
        machine.allocate(storage, 100)
    assert machine.copy_out(1) == 10  # 100 bytes, 10 a ns
    assert machine.copy_out(2) == 20, "behind the first"
    assert machine.now_ns == 0, "compute goes on"
    machine.wait_until(10)
    machine.free(1)
    machine.allocate(1, 100)
    assert machine.copy_in(1) == 30  # from 10 on, 5 a ns, whatever goes out
    assert machine.moved_out_bytes == 200


def test_waiting_is_a_stall_and_waiting_for_the_past_is_none():
    machine = a_machine()
    machine.run(50, (), ())
    machine.wait_until(40)
    assert (machine.now_ns, machine.stall_ns) == (50, 0)
    machine.wait_until(65)
    assert (machine.now_ns, machine.stall_ns) == (65, 15)


def test_a_copy_begins_when_it_is_asked_for_and_not_before():
    machine = a_machine()
    machine.allocate(1, 100)
    machine.run(25, (), (1,))
    assert machine.copy_out(1) == 35
    assert machine.log[-1] == Entry("out", 25, 35, (1,))
