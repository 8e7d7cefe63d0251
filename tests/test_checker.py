"""The checker refuses every kind of schedule that no device could run: one broken log for each rule."""

import pytest

from delta.simulate.checker import ScheduleError, check
from delta.simulate.machine import Entry
from delta.types import Link

LINK = Link(10e9, 5e9)  # out: 10 bytes a ns; in: 5 bytes a ns
SIZES = {1: 100, 2: 100, 3: 100}


def alloc(storage: int, at_ns: int = 0) -> Entry:
    return Entry("alloc", at_ns, at_ns, (storage,))


def free(storage: int, at_ns: int) -> Entry:
    return Entry("free", at_ns, at_ns, (storage,))


def become(old: int, new: int, at_ns: int) -> Entry:
    return Entry("become", at_ns, at_ns, (new,), (old,))


def run(began_ns: int, ended_ns: int, reads: tuple[int, ...], makes: tuple[int, ...]) -> Entry:
    return Entry("run", began_ns, ended_ns, makes, reads)


def out(storage: int, began_ns: int, ended_ns: int) -> Entry:
    return Entry("out", began_ns, ended_ns, (storage,))


def back(storage: int, began_ns: int, ended_ns: int) -> Entry:
    return Entry("in", began_ns, ended_ns, (storage,))


MADE = [alloc(1), run(0, 10, (), (1,))]  # storage 1 is there and whole from 10 on
AWAY = [*MADE, out(1, 10, 20), free(1, 20)]  # and on the host from 20 on
CODED = [*MADE, alloc(2, 10), Entry("encode", 10, 20, (2,), (1,))]  # 2 is the encoded form of 1


def test_a_schedule_that_can_be_run():
    log = [
        *AWAY,
        alloc(2, 20),
        run(20, 30, (), (2,)),
        alloc(1, 30),
        back(1, 30, 50),
        run(50, 60, (1, 2), ()),
        become(1, 3, 60),
        run(60, 61, (3,), ()),
        free(2, 61),
        free(3, 61),
    ]
    assert check(log, SIZES, 200, LINK) == 200


@pytest.mark.parametrize(
    ("log", "why"),
    [
        # an op reads only what is there and whole
        ([*MADE, run(10, 20, (2,), ())], "2 is not there"),
        ([*MADE, free(1, 10), run(10, 20, (1,), ())], "1 is not there"),
        ([alloc(1), run(0, 10, (1,), ())], "1 is not there, or not whole"),  # nobody has written it
        ([*AWAY, alloc(1, 20), back(1, 20, 40), run(39, 50, (1,), ())], "not whole"),  # 1 ns too early
        ([*MADE, become(1, 2, 10), run(10, 20, (1,), ())], "1 is not there"),  # the old version is overwritten
        # and writes only where memory has been taken
        ([run(0, 10, (), (1,))], "1 has no memory to be written to"),
        ([*MADE, free(1, 10), run(10, 20, (), (1,))], "no memory to be written to"),
        # one op at a time
        ([*MADE, run(9, 20, (), ())], "compute is busy"),
        ([Entry("run", 10, 9, ())], "ends before it begins"),
        # memory is never over the capacity
        ([alloc(1), alloc(2), alloc(3)], "300 bytes are taken"),
        ([alloc(1), alloc(1)], "has memory already"),
        ([free(1, 0)], "has no memory"),
        ([*MADE, free(1, 10), free(1, 10)], "has no memory"),
        ([become(1, 2, 0)], "cannot turn into the other"),
        ([*MADE, alloc(2, 10), become(1, 2, 10)], "cannot turn into the other"),
        # the copies of one direction follow each other
        ([*MADE, alloc(2, 10), run(10, 11, (), (2,)), out(1, 11, 21), out(2, 20, 30)], "the link is busy"),
        ([*AWAY, alloc(1, 20), back(1, 20, 40), free(1, 40), alloc(1, 40), back(1, 39, 60)], "the link is busy"),
        # none faster than the link
        ([*MADE, out(1, 10, 19)], "faster than the link"),
        ([*AWAY, alloc(1, 20), back(1, 20, 39)], "faster than the link"),
        # what goes out is there and whole
        ([alloc(1), out(1, 0, 10)], "not whole"),
        ([*MADE, out(1, 9, 19)], "not whole"),
        # what comes back went out whole before, into memory of its own
        ([*MADE, free(1, 10), alloc(1, 10), back(1, 10, 30)], "the host has no whole copy"),
        ([*MADE, out(1, 10, 20), back(1, 19, 39)], "the host has no whole copy"),
        ([*AWAY, back(1, 20, 40)], "there is no new memory for it"),
        ([*MADE, out(1, 10, 20), back(1, 20, 40)], "there is no new memory for it"),  # it is whole: why copy?
        # nothing is freed or overwritten while it is being copied out
        ([*MADE, out(1, 10, 20), free(1, 19)], "is still being copied out"),
        ([*MADE, out(1, 10, 20), become(1, 2, 19)], "is still being copied out"),
        ([*AWAY, alloc(1, 20), back(1, 20, 40), free(1, 39)], "is still being copied back"),
        # what is decoded was encoded before, from the same storage, and both have memory
        ([*MADE, Entry("encode", 10, 20, (2,), (1,))], "2 has no memory"),
        ([*CODED, free(1, 20), Entry("decode", 20, 30, (1,), (2,))], "1 has no memory"),
        ([*MADE, alloc(2, 10), run(10, 20, (), (2,)), Entry("decode", 20, 30, (1,), (2,))], "decoded from something"),
        ([*CODED, Entry("decode", 19, 30, (1,), (2,))], "compute is busy"),
        ([*CODED, Entry("decode", 20, 30, (2,), (2,))], "decoded from something"),
        ([Entry("sleep", 0, 1, ())], "unknown"),
    ],
)
def test_a_schedule_that_cannot(log, why):
    with pytest.raises(ScheduleError, match=why) as caught:
        check(log, SIZES, 200, LINK)
    assert f"entry {len(log) - 1}, " in str(caught.value), "the last entry is the one that is wrong"


def test_no_copies_without_a_link():
    with pytest.raises(ScheduleError, match="there is no link"):
        check([*MADE, out(1, 10, 20)], SIZES, 200, None)
