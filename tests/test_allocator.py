"""The modelled allocators: PyTorch's rules by hand, and any order of requests against the rules written once more."""

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta.simulate.allocator import Block, Caching, Ideal, OutOfMemory, Slab

KIB, MIB = 1024, 1024 * 1024


def layout(allocator):
    """(segment's start, bytes, id) of every block, in MiB."""
    return [(block.segment / MIB, block.nbytes / MIB, block.id) for block in allocator.blocks()]


def check(allocator):
    """What holds for every allocator at any time, from its blocks alone."""
    blocks = allocator.blocks()
    for left, right in itertools.pairwise(blocks):
        assert left.address + left.nbytes <= right.address, "blocks overlap, or are out of order"
        if left.segment == right.segment:
            assert left.address + left.nbytes == right.address, "a hole in a segment"
            assert left.id is not None or right.id is not None, "free neighbours that were not merged"
        else:
            assert right.address == right.segment, "a segment does not begin with its first block"
    assert not blocks or blocks[0].address == blocks[0].segment
    held = [block for block in blocks if block.id is not None]
    assert len({block.id for block in held}) == len(held)
    assert all(block.nbytes > 0 for block in blocks)
    assert allocator.allocated_bytes == sum(block.nbytes for block in held) <= allocator.peak_allocated_bytes
    assert allocator.reserved_bytes == sum(block.nbytes for block in blocks) <= allocator.peak_reserved_bytes
    assert allocator.peak_reserved_bytes <= allocator.capacity_bytes
    assert allocator.free_bytes == allocator.capacity_bytes - allocator.allocated_bytes
    largest = allocator.largest_free_bytes
    copy.deepcopy(allocator).allocate(largest)
    with pytest.raises(OutOfMemory):
        copy.deepcopy(allocator).allocate(largest + 1)


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ([Block(0, 1024, 1, 0), Block(512, 512, 2, 0)], "overlap"),
        ([Block(0, 512, 1, 0), Block(1024, 512, 2, 0)], "hole"),
        ([Block(0, 512, None, 0), Block(512, 512, None, 0)], "not merged"),
        ([Block(0, 512, 1, 0), Block(1024, 512, 2, 512)], "begin"),
    ],
)
def test_the_checker_sees_broken_books(blocks, complaint):
    allocator = Slab(4096)
    allocator.blocks = lambda: blocks
    with pytest.raises(AssertionError, match=complaint):
        check(allocator)


# -- PyTorch's rules, by hand -----------------------------------------------------------------------------------------
def test_small_requests_share_segments_of_two_mebibytes():
    allocator = Caching(64 * MIB)
    allocator.allocate(1)
    allocator.allocate(MIB)
    allocator.allocate(513)
    assert [(block.nbytes, block.id) for block in allocator.blocks()] == [
        (512, 1),
        (MIB, 2),
        (1024, 3),
        (MIB - 1536, None),
    ]
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (MIB + 1536, 2 * MIB)
    allocator.allocate(MIB)  # does not fit what is left of the first
    assert layout(allocator)[4:] == [(2, 1, 4), (2, 1, None)]


@pytest.mark.parametrize(
    ("request_bytes", "segment_bytes"),
    [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded up first
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_sizes_of_segments(request_bytes, segment_bytes):
    allocator = Caching(64 * MIB)
    allocator.allocate(request_bytes)
    assert allocator.reserved_bytes == segment_bytes


def test_a_large_block_keeps_a_rest_of_up_to_one_mebibyte():
    allocator = Caching(64 * MIB)
    first = allocator.allocate(19 * MIB)
    allocator.free(first)  # 20 MiB
    allocator.allocate(9 * MIB)
    assert layout(allocator) == [(0, 9, 2), (0, 11, None)]
    allocator.allocate(10 * MIB)
    assert layout(allocator) == [(0, 9, 2), (0, 11, 3)]
    assert allocator.allocated_bytes == 20 * MIB


def test_the_smallest_block_that_fits_and_of_those_the_lowest():
    allocator = Caching(100 * MIB)
    ids = [allocator.allocate(size * MIB) for size in (12, 10, 14, 12, 10)]
    for block in ids[:4]:
        allocator.free(block)
    allocator.allocate(11 * MIB)
    assert layout(allocator)[:2] == [(0, 12, 6), (12, 10, None)]
    allocator.allocate(11 * MIB)
    assert layout(allocator)[3] == (36, 12, 7)


def test_neighbours_merge_and_segments_do_not():
    allocator = Caching(40 * MIB)
    ids = [allocator.allocate(5 * MIB) for _ in range(8)]
    for block in ids[1:7]:
        allocator.free(block)
    assert layout(allocator) == [(0, 5, 1), (0, 15, None), (20, 15, None), (20, 5, 8)]
    assert (allocator.free_bytes, allocator.largest_free_bytes) == (30 * MIB, 15 * MIB)
    with pytest.raises(OutOfMemory, match=r"no room for 16 MiB: 30 MiB are free, at most 15 MiB of them in one piece"):
        allocator.allocate(16 * MIB)


def test_segments_not_in_use_go_back_when_the_device_is_full():
    allocator = Caching(64 * MIB)
    ids = [allocator.allocate(nbytes) for nbytes in (20 * MIB, 20 * MIB, 20 * MIB, 512)]
    allocator.free(ids[0])
    allocator.free(ids[2])
    assert allocator.reserved_bytes == 62 * MIB  # cached
    allocator.allocate(30 * MIB)
    assert layout(allocator)[0] == (20, 20, 2)
    assert layout(allocator)[-1] == (62, 30, 5)  # an address of its own
    assert allocator.reserved_bytes == 52 * MIB
    assert allocator.peak_reserved_bytes == 62 * MIB
    with pytest.raises(OutOfMemory):
        allocator.allocate(13 * MIB)
    allocator.allocate(12 * MIB)


def test_less_may_fit_where_more_does():
    """10 MiB take a segment of 10 MiB, 5 MiB one of 20 MiB."""
    allocator = Caching(10 * MIB)
    assert allocator.largest_free_bytes == 10 * MIB
    with pytest.raises(OutOfMemory):
        allocator.allocate(5 * MIB)
    allocator.allocate(10 * MIB)


# -- slab and ideal, by hand ------------------------------------------------------------------------------------------
def test_a_slab_places_at_either_end():
    slab = Slab(10 * MIB + 100)
    assert (slab.capacity_bytes, slab.reserved_bytes) == (10 * MIB, 10 * MIB)
    left, right = slab.allocate(2 * MIB), slab.allocate(3 * MIB, from_right=True)
    slab.allocate(MIB)
    assert layout(slab) == [(0, 2, 1), (0, 1, 3), (0, 4, None), (0, 3, 2)]
    slab.free(left)
    slab.free(right)
    assert layout(slab) == [(0, 2, None), (0, 1, 3), (0, 7, None)]
    slab.allocate(MIB, from_right=True)  # of the smaller free piece
    assert layout(slab) == [(0, 1, None), (0, 1, 4), (0, 1, 3), (0, 7, None)]


def test_the_ideal_allocator_never_fragments():
    ideal = Ideal(1_000)
    first, second, _ = (ideal.allocate(nbytes) for nbytes in (300, 300, 300))
    ideal.free(second)
    assert ideal.largest_free_bytes == 400
    fourth = ideal.allocate(400)
    assert ideal.blocks() == [Block(0, 300, first, 0), Block(300, 300, 3, 0), Block(600, 400, fourth, 0)]
    with pytest.raises(OutOfMemory):
        ideal.allocate(1)
    assert (ideal.allocated_bytes, ideal.peak_allocated_bytes, ideal.peak_reserved_bytes) == (1_000, 1_000, 1_000)


@pytest.mark.parametrize("make", [Caching, Slab, Ideal])
def test_nothing_takes_nothing_and_is_freed_once(make):
    allocator = make(4 * MIB)
    nothing = allocator.allocate(0)
    assert allocator.allocated_bytes == 0
    allocator.free(nothing)
    with pytest.raises(KeyError):
        allocator.free(nothing)
    check(allocator)


# -- any order of requests --------------------------------------------------------------------------------------------
class Plain:
    """The same rules again, as lists of [bytes, id] for each segment, everything looked for from the start."""

    def __init__(self, capacity_bytes, slab):
        self.capacity_bytes = capacity_bytes - capacity_bytes % 512 if slab else capacity_bytes
        self.slab = slab
        self.next_address = 0
        self.segments = {0: (True, [[self.capacity_bytes, None]])} if slab else {}  # address: (small?, cells)

    def blocks(self):
        found = []
        for segment, (_, cells) in sorted(self.segments.items()):
            address = segment
            for nbytes, holder in cells:
                found.append(Block(address, nbytes, holder, segment))
                address += nbytes
        return found

    def allocate(self, nbytes, holder, from_right=False):
        """Whether it could."""
        nbytes += -nbytes % 512
        small = self.slab or nbytes <= MIB
        pool = [block for block in self.blocks() if self.segments[block.segment][0] == small]
        fits = [block for block in pool if block.id is None and block.nbytes >= nbytes]
        if not fits and not self.slab:
            fits = self.new_segment(small, 2 * MIB if small else 20 * MIB if nbytes < 10 * MIB else nbytes)
        if not fits:
            return False
        best = min(fits, key=lambda block: (block.nbytes, block.address))
        cells = self.segments[best.segment][1]
        at = [block.address for block in self.blocks() if block.segment == best.segment].index(best.address)
        rest = best.nbytes - nbytes
        if rest > (0 if small else MIB):
            parts = [[nbytes, holder], [rest, None]]
            cells[at : at + 1] = parts[::-1] if from_right else parts
        else:
            cells[at][1] = holder
        return True

    def new_segment(self, small, nbytes):
        nbytes += -nbytes % (2 * MIB)
        if self.reserved() + nbytes > self.capacity_bytes:
            unused = [a for a, (_, cells) in self.segments.items() if len(cells) == 1 and cells[0][1] is None]
            for address in unused:
                del self.segments[address]
        if self.reserved() + nbytes > self.capacity_bytes:
            return []
        self.segments[self.next_address] = (small, [[nbytes, None]])
        self.next_address += nbytes
        return [self.blocks()[-1]]

    def reserved(self):
        return sum(block.nbytes for block in self.blocks())

    def free(self, holder):
        for _, cells in self.segments.values():
            for cell in cells:
                if cell[1] == holder:
                    cell[1] = None
            for at in reversed(range(1, len(cells))):
                if cells[at][1] is None and cells[at - 1][1] is None:
                    cells[at - 1 : at + 1] = [[cells[at - 1][0] + cells[at][0], None]]


EDGES = st.sampled_from([512, MIB, 2 * MIB, 5 * MIB, 10 * MIB, 12 * MIB, 19 * MIB, 20 * MIB])
SIZES = st.one_of(
    st.builds(lambda edge, off: max(1, edge + off), EDGES, st.sampled_from([-513, -512, -1, 0, 1])),
    st.integers(1, 4 * MIB),
    st.integers(1, 4 * KIB),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 100), st.none()),
    ),
    max_size=60,
)
EXAMPLES = settings(derandomize=True, deadline=None, database=None, max_examples=150)


def play(events, allocator, plain):
    """The same events on both; the same blocks, at the same addresses, after each."""
    held = []
    for what, number, from_right in events:
        if what == "free":
            if held:
                block = held.pop(number % len(held))
                allocator.free(block)
                plain.free(block)
        else:
            right = {"from_right": from_right} if plain.slab else {}
            try:
                block = allocator.allocate(number, **right)
            except OutOfMemory as full:
                assert full.needed_bytes == number
                assert not plain.allocate(number, None, **right)
            else:
                held.append(block)
                assert plain.allocate(number, block, **right)
        assert allocator.blocks() == plain.blocks()
        check(allocator)
    for block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    check(allocator)


@EXAMPLES
@given(EVENTS, st.sampled_from([3 * MIB, 45 * MIB + 7, 200 * MIB]))
def test_caching_follows_the_rules(events, capacity_bytes):
    play(events, Caching(capacity_bytes), Plain(capacity_bytes, slab=False))


@EXAMPLES
@given(EVENTS, st.sampled_from([3 * MIB, 45 * MIB + 7]))
def test_a_slab_follows_the_rules(events, capacity_bytes):
    play(events, Slab(capacity_bytes), Plain(capacity_bytes, slab=True))


@EXAMPLES
@given(EVENTS)
def test_the_ideal_allocator_counts(events):
    ideal, sizes = Ideal(45 * MIB), {}
    for what, number, _ in events:
        if what == "free":
            if sizes:
                block = list(sizes)[number % len(sizes)]
                del sizes[block]
                ideal.free(block)
        elif sum(sizes.values()) + number <= 45 * MIB:
            sizes[ideal.allocate(number)] = number
        else:
            with pytest.raises(OutOfMemory):
                ideal.allocate(number)
        assert [(block.id, block.nbytes) for block in ideal.blocks()] == list(sizes.items())
        check(ideal)
