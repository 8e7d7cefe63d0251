"""Neighbours in memory go together: the choice, the engine's part, the simulator's memory, and whole runs of Coop."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import residual_net
from toy import Toy

from delta.errors import PolicyError
from delta.filter.neighbours import cheapest_neighbours
from delta.layout import Area, Place
from delta.policies.loader import load
from delta.simulate import Status, simulate
from delta.simulate.addresses import Addresses
from delta.simulate.allocator import Caching, OutOfMemory, Slab
from delta.simulate.machine import Machine
from delta.simulate.player import Player
from delta.trace import read
from delta.trace.events import Evictable, Free, Op, Result, Trace
from delta.types import Action, Drop, Instruction, Kind
from delta.units import Bytes, Share

MIB = 2**20
EXAMPLES = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def in_one_segment(*rows: tuple[int, int | None]) -> list[Place]:
    """(bytes, record or None for free), side by side."""
    return [Place(nbytes, 0, () if record is None else (record,)) for nbytes, record in rows]


# -- which neighbours -------------------------------------------------------------------------------------------------
def test_the_cheapest_neighbours_by_hand():
    places = in_one_segment((4, 1), (4, 2), (2, None), (2, 3), (4, 4))
    prices = {1: 1, 2: 9, 3: 2, 4: 3}
    assert cheapest_neighbours([Area(4, places)], prices.get) == (1,)
    assert cheapest_neighbours([Area(8, places)], prices.get) == (3, 4), "the free block between counts for its bytes"
    assert cheapest_neighbours([Area(14, places)], prices.get) == (1, 2, 3, 4)
    assert cheapest_neighbours([Area(17, places)], prices.get) is None
    assert cheapest_neighbours([Area(2, places)], prices.get) == (), "free already"


def test_a_record_without_a_price_parts_its_neighbours():
    places = in_one_segment((4, 1), (1, 2), (4, 3))
    assert cheapest_neighbours([Area(8, places)], {1: 1, 3: 1}.get) is None
    assert cheapest_neighbours([Area(8, places)], {1: 1, 2: 0, 3: 1}.get) == (1, 2, 3)


def test_segments_as_a_whole_need_not_be_side_by_side():
    segments = [Place(3, -1), Place(10, 0, (1, 2)), Place(10, 10, (3,)), Place(10, 20, (4, 5))]
    prices = {1: 4, 2: 4, 3: None, 4: 1, 5: 2}
    assert cheapest_neighbours([Area(12, segments, pages=True)], prices.get) == (4, 5), "with what is in no segment"
    assert cheapest_neighbours([Area(20, segments, pages=True)], prices.get) == (1, 2, 4, 5)
    assert cheapest_neighbours([Area(24, segments, pages=True)], prices.get) is None, "3 stays, so its segment does"
    assert cheapest_neighbours([Area(20, segments)], prices.get) is None, "without pages only one segment counts"


def test_the_cheaper_of_two_ways_is_taken():
    inside = Area(4, in_one_segment((4, 1), (4, 2)))
    whole = Area(4, [Place(8, 0, (1, 2)), Place(4, 8, (3,))], pages=True)
    assert cheapest_neighbours([inside, whole], {1: 5, 2: 6, 3: 2}.get) == (3,)
    assert cheapest_neighbours([inside, whole], {1: 1, 2: 6, 3: 2}.get) == (1,)


# -- the engine -------------------------------------------------------------------------------------------------------
class FixedLayout:
    """Records where they are said to be."""

    def __init__(self, places: Sequence[Place], bounded: bool) -> None:
        self.places, self.bounded = places, bounded

    def areas(self, nbytes: int) -> list[Area]:
        return [Area(nbytes, self.places)]


COOP = {
    "filter": {"score": "coop", "cost": "own", "choose": "window", "min_bytes": 0},
    "planner": {"kind": "none"},
    "replay": {"sources": "drop"},
}


def a_toy(places: Sequence[Place], bounded: bool = True, limit: int = 10**6) -> Toy:
    """Five saved storages of 100 bytes, each made of the weight; 1, 3 and 5 are dear."""
    toy = Toy(limit, ("keep", "recompute"), layout=FixedLayout(places, bounded), **COOP)
    for record in range(1, 6):
        toy.op(record, 100, cost_ns=1000 if record % 2 else 10)
        toy.save(record, at=record)
    toy.let_go(*range(1, 6))
    return toy


def gone(instructions: Sequence[Instruction]) -> list[int]:
    return [instruction.record for instruction in instructions if isinstance(instruction, Drop)]


def test_neighbours_go_and_not_the_cheapest_alone():
    """2 and 4 are the cheap ones. Where they lie apart, a dear one has to go with one of them to make 200 bytes."""
    apart = a_toy(in_one_segment((100, 1), (100, 2), (100, 3), (100, 4), (100, 5)))
    assert gone(apart.engine.make_place(200, 100)) == [1, 2]
    together = a_toy(in_one_segment((100, 1), (100, 2), (100, 4), (100, 3), (100, 5)))
    assert gone(together.engine.make_place(200, 100)) == [2, 4]


def test_the_time_since_the_last_use_counts_and_size_does_not():
    toy = a_toy([Place(100, 0, (1,)), Place(500, 1, (3,))])
    toy.now = 100
    toy.engine.ledger[1].used_ns = 0
    toy.engine.ledger[3].used_ns = 99
    assert gone(toy.engine.make_place(100, 100)) == [1]


def test_what_is_in_use_or_not_known_stays():
    toy = a_toy(in_one_segment((100, 1), (100, 2), (100, 77), (100, 4), (100, 5)))
    toy.engine.ledger[2].pins = 1
    assert gone(toy.engine.make_place(200, 100)) == [4, 5]
    assert toy.engine.make_place(300, 100) == [], "nothing would make that room"


def test_what_has_no_recipe_stays():
    toy = a_toy(in_one_segment((100, 6), (100, 1), (100, 3)))
    toy.op(6, 100, replayable=False)
    toy.save(6, at=10)
    toy.let_go(6)
    assert gone(toy.engine.make_place(100, 100)) == [1]
    assert gone(toy.engine.make_place(200, 100)) == []


def test_a_memory_that_is_the_budget_is_not_counted_in_bytes():
    toy = a_toy(in_one_segment((100, 1)), limit=300)
    assert toy.engine.ledger.resident_bytes == 500, "over the limit, and nobody failed to find a place"


def test_a_limit_in_bytes_takes_neighbours_too():
    """Free blocks bring no bytes then, but do not part neighbours."""
    layout = in_one_segment((100, 2), (300, None), (100, 3), (100, 1), (100, 4))
    toy = a_toy(layout, bounded=False)
    assert gone(toy.engine._room.evict(200, 100)) == [1, 4], "not 2 and 4, the cheapest: they lie apart"


def test_a_limit_beyond_any_window_takes_one_after_the_other():
    layout = [Place(100, segment, (record,)) for segment, record in enumerate(range(1, 6))]
    toy = a_toy(layout, bounded=False)
    assert gone(toy.engine._room.evict(300, 100))[:2] == [2, 4], "the cheapest first"
    assert len(gone(toy.engine._room.evict(100, 100))) == 1


def test_without_addresses_the_score_decides_alone():
    toy = Toy(300, ("keep", "recompute"), **COOP)
    went = []
    for record in range(1, 6):
        toy.op(record, 100, cost_ns=1000 if record % 2 else 10)
        went += gone(toy.save(record, at=record * 100))
        went += gone(toy.let_go(record))
    assert went == [2, 1, 4], "by cost / stale: 10 / 100, 1000 / 300, 10 / 100"


def test_what_was_written_in_place_can_be_made_again():
    """3 is written into the storage of 1, which is gone as a version: 3 may go all the same, and its recipe makes 1
    again first."""
    toy = Toy(10**6, ("keep", "recompute"), layout=FixedLayout(in_one_segment((100, 3)), bounded=True), **COOP)
    toy.source(0, 50, Kind.PARAMETER)
    toy.op(1, 100, [0])
    toy.now = 5
    toy.overwrite(1, 3, [1], 100)
    toy.save(3, at=10)
    toy.let_go(3)
    assert gone(toy.engine.make_place(100, 20)) == [3]
    toy.mine.discard(3)
    toy.engine.storage_gone(3)
    toy.need(3, at=30)
    assert toy.replayed == [1, 3]


def test_makers_cost_is_that_of_inputs_and_siblings_and_not_of_readers():
    """3 is read by 4 only; 1 and 2 come from one op. With 1 and 4 gone, 2 and 3 cost their own and 1's class."""
    toy = Toy(10**6, ("keep", "recompute"), **COOP | {"filter": COOP["filter"] | {"cost": "makers"}})
    toy.source(1, 100, Kind.ACTIVATION)
    toy.source(2, 100, Kind.ACTIVATION)
    toy.wrote([1, 2], [], cost_ns=7)
    toy.op(3, 100, [1], cost_ns=20)
    toy.op(4, 100, [3], cost_ns=500)
    for record in (1, 2, 3, 4):
        toy.save(record, at=record)
    toy.let_go(1, 2, 3, 4)
    room = toy.engine._room
    for record in (1, 4):
        room.carry_out(toy.engine.ledger[record], Action.RECOMPUTE, 50, wait=True)

    def cost(record: int) -> float:
        judged = room.candidates._judge(toy.engine.ledger[record], 1_000, 0)
        assert judged is not None
        return judged[0] * (1_001 - record)

    assert cost(2) == pytest.approx(7 + 7)
    assert cost(3) == pytest.approx(20 + 7), "4 is gone and reads it: not counted, and in no class with 1"
    room.carry_out(toy.engine.ledger[2], Action.RECOMPUTE, 50, wait=True)
    assert cost(3) == pytest.approx(20 + 7 + 7), "2 is of one class with 1, which one op made with it"


# -- the simulator's memory -------------------------------------------------------------------------------------------
REQUESTS = st.lists(st.integers(1, 24 * MIB), min_size=1, max_size=14)


@EXAMPLES
@given(REQUESTS, st.sets(st.integers(0, 13)), st.sets(st.integers(0, 13)), st.integers(1, 40 * MIB), st.booleans())
def test_what_the_layout_promises_the_allocator_keeps(sizes, freed, staying, need_bytes, slab):
    """The neighbours that are named make room; and where none are, evicting all that may go makes none."""
    allocator = Slab(128 * MIB) if slab else Caching(128 * MIB)
    machine = Machine(allocator)
    for storage, nbytes in enumerate(sizes):
        try:
            machine.allocate(storage, nbytes)
        except OutOfMemory:
            continue
    for storage in freed:
        if machine.holds(storage):
            machine.free(storage)
    layout = Addresses(machine, allocator, bounded=True)
    found = cheapest_neighbours(layout.areas(need_bytes), lambda record: None if record in staying else record + 1)
    everything = [storage for storage in range(len(sizes)) if machine.holds(storage) and storage not in staying]
    for storage in everything if found is None else found:
        machine.free(storage)
    if found is None:
        with pytest.raises(OutOfMemory):
            allocator.allocate(need_bytes)
    else:
        allocator.allocate(need_bytes)


def test_a_segment_that_would_be_enough_alone_does_not_hide_two_small_ones():
    rows = ((100, 50), (5, 5), (100, 101), (6, 8))
    places = [Place(nbytes, number, (number,)) for number, (nbytes, _) in enumerate(rows)]
    assert cheapest_neighbours([Area(10, places, pages=True)], lambda number: rows[number][1]) == (3, 1)


@settings(EXAMPLES, max_examples=300)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=7), st.integers(1, 120))
def test_segments_together_cost_at_most_twice_the_best(rows, need_bytes):
    places = [Place(nbytes, number, (number,)) for number, (nbytes, _) in enumerate(rows)]
    prices = {number: cost for number, (_, cost) in enumerate(rows)}
    found = cheapest_neighbours([Area(need_bytes, places, pages=True)], prices.get)
    enough = [
        sum(prices[number] for number in some)
        for count in range(1, len(rows) + 1)
        for some in combinations(range(len(rows)), count)
        if sum(rows[number][0] for number in some) >= need_bytes
    ]
    assert (found is None) == (not enough)
    if found is not None:
        assert sum(rows[number][0] for number in found) >= need_bytes
        assert Fraction(sum(prices[number] for number in found)) <= 2 * min(enough)


def test_dear_results_lie_left_and_cheap_ones_right():
    ops = [Op("mm" if number % 2 else "relu", (), (number,), (4 * MIB,), 10) for number in range(4)]
    trace = Trace("parts", Evictable.ALL, (*ops, *(Result(number) for number in range(4))))
    spots = {}
    allocate = Player._allocate

    def look(self: Player, record: int, nbytes: int, from_right: bool = False) -> None:
        allocate(self, record, nbytes, from_right)
        storages = self.machine.holders()
        spots.update({storages[b.id]: b.address for b in self.machine.allocator.blocks() if b.id is not None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Player, "_allocate", look)
        simulate(trace, load("coop"), Bytes(32 * MIB), allocator="slab")
    assert [spots[record] // MIB for record in range(4)] == [28, 0, 24, 4]


# -- whole runs -------------------------------------------------------------------------------------------------------
def a_net(length: int, seed: int, tmp_path) -> Trace:
    """Layers of 2 to 60 MiB, in which no two sizes and no two times are equal."""
    random = Random(seed)
    sizes = [nbytes * 1024 for nbytes in random.sample(range(2_000, 60_000), length)]
    costs_ns = random.sample(range(1_000, 1_000_000), length)
    return read(residual_net(length, sizes, costs_ns).write(tmp_path / f"net{length}-{seed}.log"))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5, 0.4])
def test_less_of_the_device_is_free_in_vain_than_under_dtr(tmp_path, share):
    """On PyTorch's allocator, in each net at each budget; and more of the runs end."""
    ended = {"dtr": 0, "coop": 0}
    for seed in range(5):
        trace = a_net(30, seed, tmp_path)
        runs = {name: simulate(trace, load(name), Share(share), allocator="caching") for name in ended}
        assert runs["coop"].fragmentation < runs["dtr"].fragmentation, seed
        for name, run in runs.items():
            ended[name] += run.status is Status.OK
    assert ended["coop"] >= ended["dtr"]


def test_it_fits_where_single_victims_leave_no_piece():
    """Eight storages of 4 MiB fill a slab, and every second one is dear. 8 MiB in one piece: one by one, the cheap ones
    go first and leave holes of 4 MiB until dear ones go too; together, one of each is enough."""
    ops = [Op("f", (), (number,), (4 * MIB,), 10 if number % 2 else 1000 + number) for number in range(8)]
    more = Op("g", (), (8,), (8 * MIB,), 10)
    events = (*ops, more, *(Free(number) for number in range(8)), Result(8))
    trace = Trace("holes", Evictable.ALL, events)
    runs = {
        name: simulate(trace, load(name, overrides={"placement.left": ["*"]}), Bytes(32 * MIB), allocator="slab")
        for name in ("dtr", "coop")
    }
    assert runs["coop"].decisions == 2 * 3, "in each of three steps"
    assert runs["dtr"].decisions > runs["coop"].decisions
    assert runs["coop"].fragmentation < runs["dtr"].fragmentation


def test_the_ideal_allocator_has_no_addresses(tmp_path):
    trace = a_net(6, 0, tmp_path)
    with pytest.raises(PolicyError, match=r"policy coop: filter.choose=window .* Give --allocator caching or slab"):
        simulate(trace, load("coop"), Share(0.5), allocator="ideal")
    one_by_one = load("coop", overrides={"filter.choose": "one"})
    assert simulate(trace, one_by_one, Share(0.8), allocator="ideal").status is Status.OK
