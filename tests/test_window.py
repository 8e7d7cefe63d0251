"""The window by hand, against all windows, and on the memory it is for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta.filter.window import Piece, Window, cheapest_window
from delta.simulate.allocator import OutOfMemory, Slab

EXAMPLES = settings(derandomize=True, deadline=None, database=None, max_examples=300)


def pieces_of(*rows):
    """(bytes, cost), all in one segment."""
    return [Piece(nbytes, 0, cost) for nbytes, cost in rows]


def by_trying_all(pieces, need_bytes):
    """The cheapest cost, over every run of neighbours."""
    costs = []
    for start in range(len(pieces)):
        for stop in range(start + 1, len(pieces) + 1):
            run = pieces[start:stop]
            whole = all(piece.cost is not None and piece.segment == run[0].segment for piece in run)
            if whole and sum(piece.nbytes for piece in run) >= need_bytes:
                costs.append(sum(piece.cost for piece in run))
    return min(costs, default=None)


@pytest.mark.parametrize(
    ("pieces", "need_bytes", "window"),
    [
        ([], 1, None),
        (pieces_of((4, 7)), 4, Window(0, 1, 7)),
        (pieces_of((4, 7)), 5, None),
        (pieces_of((4, 9), (4, 1), (4, 1), (4, 9)), 8, Window(1, 3, 2)),
        (pieces_of((4, 9), (8, 0), (4, 1)), 8, Window(1, 2, 0)),  # free, and enough
        (pieces_of((4, 5), (2, 0), (2, 1), (4, 5)), 8, Window(0, 3, 6)),  # free blocks between count
        (pieces_of((2, 3), (9, 3)), 8, Window(1, 2, 3)),  # not wider than it has to be
        (pieces_of((4, 2), (4, 2), (4, 2)), 4, Window(0, 1, 2)),  # the first among equals
        (pieces_of((4, 1), (1, None), (4, 1), (4, 8)), 8, Window(2, 4, 9)),  # not across what has to stay
        (pieces_of((4, 1), (1, None), (4, 1)), 8, None),
        (pieces_of((4, None), (4, None)), 4, None),
        ([Piece(4, 0, 1), Piece(4, 8, 1), Piece(4, 8, 5)], 8, Window(1, 3, 6)),  # nor from segment to segment
        ([Piece(4, 0, 1), Piece(4, 4, 1)], 8, None),
        (pieces_of((4, 10**30), (4, 1), (4, 1)), 8, Window(1, 3, 2)),  # nothing is left of what slid out
    ],
)
def test_by_hand(pieces, need_bytes, window):
    assert cheapest_window(pieces, need_bytes) == window


PIECES = st.lists(
    st.builds(Piece, st.integers(1, 6), st.just(0), st.one_of(st.just(0), st.integers(0, 9), st.none())), max_size=12
)


@EXAMPLES
@given(st.lists(PIECES, max_size=3), st.integers(1, 20))
def test_it_is_the_cheapest_of_all(segments, need_bytes):
    pieces = [Piece(piece.nbytes, number, piece.cost) for number, run in enumerate(segments) for piece in run]
    found = cheapest_window(pieces, need_bytes)
    assert (found and found.cost) == by_trying_all(pieces, need_bytes)
    if found is not None:
        run = pieces[found.start : found.stop]
        assert sum(piece.nbytes for piece in run) >= need_bytes
        assert len({piece.segment for piece in run}) == 1
        assert sum(piece.cost for piece in run) == found.cost
        assert sum(piece.nbytes for piece in run[1:]) < need_bytes


@EXAMPLES
@given(
    st.lists(st.tuples(st.integers(1, 9_000), st.integers(0, 50), st.booleans(), st.booleans()), max_size=30),
    st.integers(1, 20_000),
)
def test_what_was_evicted_makes_room(requests, need_bytes):
    """On a slab, a window is where the request goes, and without one there is nowhere."""
    slab, costs = Slab(40_000), {}
    for nbytes, cost, from_right, stays in requests:
        try:
            costs[slab.allocate(nbytes, from_right)] = None if stays else cost
        except OutOfMemory:
            continue
    for block in [block for block, cost in costs.items() if cost == 0]:
        slab.free(block)
    blocks = slab.blocks()
    pieces = [Piece(block.nbytes, block.segment, costs.get(block.id, 0)) for block in blocks]
    window = cheapest_window(pieces, need_bytes)
    for block in blocks[window.start : window.stop] if window else blocks:
        if block.id is not None and costs[block.id] is not None:
            slab.free(block.id)
    if window:
        slab.allocate(need_bytes)
    else:
        with pytest.raises(OutOfMemory):
            slab.allocate(need_bytes)
