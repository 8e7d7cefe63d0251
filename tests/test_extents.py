"""Room handed out in extents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta.runtime.extents import Extent, ExtentAllocator, round_up


def allocate(room: ExtentAllocator, nbytes: int) -> Extent:
    extent = room.allocate(nbytes)
    assert extent is not None
    return extent


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_round_up(nbytes: int, rounded: int) -> None:
    assert round_up(nbytes, 512) == rounded


def test_the_smallest_hole_that_fits_is_taken() -> None:
    room = ExtentAllocator(1)
    extents = [allocate(room, nbytes) for nbytes in (50, 1, 10, 1, 30, 1)]
    for index in (0, 2, 4):
        room.free(extents[index])  # holes: 50 at 0, 10 at 51, 30 at 62
    assert room.allocate(10) == Extent(51, 10)  # exact
    assert room.allocate(25) == Extent(62, 25)  # 30 is nearer than 50
    assert room.allocate(6) == Extent(0, 6)  # only 50 is left that fits
    assert room.allocate(45) == Extent(93, 45)  # none fits: the top
    room.validate()


def test_neighbours_are_joined_on_both_sides() -> None:
    room = ExtentAllocator(1)
    left, middle, right, _last = (allocate(room, 10) for _ in range(4))
    room.free(left)
    room.free(right)
    room.free(middle)
    assert room.allocate(30) == Extent(0, 30)


def test_room_at_the_top_is_given_up() -> None:
    room = ExtentAllocator(1)
    first, second, third = (allocate(room, 10) for _ in range(3))
    room.free(second)
    room.free(third)
    assert room.top_bytes == 10
    room.free(first)
    assert room.top_bytes == 0


def test_capacity_is_kept() -> None:
    room = ExtentAllocator(512, capacity_bytes=1024)
    first = allocate(room, 1)
    assert room.allocate(513) is None
    second = allocate(room, 512)
    assert room.allocate(1) is None
    room.free(first)
    assert room.allocate(1) == first
    assert second.end_bytes == 1024


def test_an_extent_is_never_empty() -> None:
    room = ExtentAllocator(512)
    assert (allocate(room, 0), allocate(room, 0)) == (Extent(0, 512), Extent(512, 512))


def test_growth_is_told_beforehand() -> None:
    room = ExtentAllocator(10)
    hole = allocate(room, 25)
    allocate(room, 1)
    assert room.growth_bytes(25) == 30
    room.free(hole)
    assert room.growth_bytes(25) == 0


def test_room_that_was_used_before_is_no_growth() -> None:
    room = ExtentAllocator(10)
    allocate(room, 10)
    room.free(allocate(room, 20))
    assert (room.top_bytes, room.most_bytes) == (10, 30)
    assert [room.growth_bytes(nbytes) for nbytes in (20, 21, 45)] == [0, 10, 30]


def test_freeing_twice_is_an_error() -> None:
    room = ExtentAllocator(512)
    extent = allocate(room, 1)
    room.free(extent)
    with pytest.raises(ValueError, match="not allocated"):
        room.free(extent)


@pytest.mark.parametrize("damage", ["used", "overlap", "unjoined"])
def test_validate_sees_damage(damage: str) -> None:
    room = ExtentAllocator(1)
    allocate(room, 10)
    room.free(allocate(room, 10))
    match damage:
        case "used":
            room.used_bytes += 1
        case "overlap":
            room._live[5] = Extent(5, 10)
        case "unjoined":
            room._free, room.top_bytes = [Extent(10, 2), Extent(12, 2)], 14
    with pytest.raises(AssertionError):
        room.validate()


@given(st.lists(st.one_of(st.integers(0, 3000), st.none()), max_size=60), st.sampled_from([None, 8192]), st.randoms())
def test_any_use_keeps_the_books_right(wishes: list[int | None], capacity: int | None, chance: st.DataObject) -> None:
    room = ExtentAllocator(512, capacity)
    live: list[Extent] = []
    for wish in wishes:
        if wish is None and live:
            room.free(live.pop(chance.randrange(len(live))))  # type: ignore[attr-defined]
        elif wish is not None and (extent := room.allocate(wish)) is not None:
            assert extent.nbytes >= wish and extent.offset_bytes % 512 == 0
            live.append(extent)
        room.validate()
    for extent in live:
        room.free(extent)
    room.validate()
    assert (room.used_bytes, room.top_bytes) == (0, 0)
