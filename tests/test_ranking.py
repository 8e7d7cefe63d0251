"""The ranking answers as a look at all keys would, and asks few of them."""

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta.filter import ranking as module
from delta.filter.ranking import Line, Ranking


def idle(nbytes: int, cost_ns: int, used_ns: int) -> Line:
    return Line(nbytes, -nbytes * used_ns, cost_ns)


def awaited(nbytes: int, cost_ns: int, use_ns: int) -> Line:
    return Line(-nbytes, nbytes * use_ns, cost_ns)


class LookAtAll:
    """The same, by looking at all: worth in exact fractions, the greatest order among equals."""

    def __init__(self):
        self.lines = {}
        self.orders = {}

    def add(self, key, line, order):
        line = line if line.run else Line(0, 1, 0)
        changed = (self.lines.get(key), self.orders.get(key)) != (line, order)
        self.lines[key], self.orders[key] = line, order
        return changed

    def discard(self, key):
        return self.lines.pop(key, None) is not None

    def worth(self, key, now_ns):
        rise, level, run = self.lines[key]
        return Fraction(rise * now_ns + level, run) if run else math.inf

    def best(self, now_ns):
        return max(self.lines, key=lambda key: (self.worth(key, now_ns), self.orders[key]), default=None)


# -- by hand ----------------------------------------------------------------------------------------------------------
def test_an_empty_ranking():
    ranking = Ranking()
    assert len(ranking) == 0
    assert 1 not in ranking
    assert ranking.best(0) is None
    assert not ranking.discard(1)


def test_the_order_changes_while_nothing_happens():
    ranking = Ranking()
    ranking.add(1, idle(100, 1_000, used_ns=0), 1)
    ranking.add(2, idle(300, 1_000, used_ns=60), 2)
    ranking.add(3, idle(900, 1_000, used_ns=90), 3)
    # 100 * t and 300 * (t - 60) meet at 90, and 300 * (t - 60) and 900 * (t - 90) at 105
    assert [ranking.best(now_ns) for now_ns in (0, 89, 90, 104, 105, 10**9)] == [1, 1, 2, 2, 3, 3]
    assert len(ranking) == 3


@pytest.mark.parametrize(
    ("line", "score"),
    [
        (idle, lambda nbytes, cost_ns, at_ns, now_ns: cost_ns / (nbytes * (now_ns - at_ns))),
        (awaited, lambda nbytes, cost_ns, at_ns, now_ns: cost_ns / (nbytes * (at_ns - now_ns))),
        (lambda nbytes, cost_ns, at_ns: Line(0, nbytes, cost_ns), lambda nbytes, cost_ns, *_: cost_ns / nbytes),
        (lambda nbytes, cost_ns, at_ns: Line(1, -at_ns, 1), lambda nbytes, cost_ns, at_ns, now_ns: at_ns),
        (lambda nbytes, cost_ns, at_ns: Line(0, nbytes, 1), lambda nbytes, *_: -nbytes),
    ],
    ids=["dtr", "known next use", "msps", "lru", "size"],
)
def test_each_score_is_a_line(line, score):
    """Largest worth, smallest score: for every form in the table of the module."""
    rng = random.Random(0)
    at = (0, 1_000) if line is not awaited else (2_000, 3_000)
    storages = [(rng.randrange(1, 10**6), rng.randrange(1, 10**6), rng.randrange(*at)) for _ in range(50)]
    ranking = Ranking()
    for key, storage in enumerate(storages):
        ranking.add(key, line(*storage), key)
    for now_ns in range(1_001, 1_999, 50):
        assert ranking.best(now_ns) == min(range(50), key=lambda key: (score(*storages[key], now_ns), -key))


def test_among_equals_the_last_goes_first():
    ranking = Ranking()
    for order, key in enumerate((7, 3, 5)):
        assert ranking.add(key, Line(1, -10, 1), order)
    assert ranking.best(20) == 5
    assert ranking.add(7, Line(2, 0, 1), 0)
    assert ranking.add(7, Line(1, -10, 1), 0)
    assert not ranking.add(7, Line(1, -10, 1), 0), "as it was"
    assert ranking.best(20) == 5
    assert ranking.add(7, Line(1, -10, 1), 3)
    assert ranking.best(20) == 7


def test_lines_that_meet_change_places_at_that_moment_or_just_after():
    steep, flat = idle(2, 1, used_ns=5), idle(1, 1, used_ns=0)  # equal at 10
    for lines, at_10 in (([flat, steep], steep), ([steep, flat], flat)):
        ranking = Ranking()
        for key, line in enumerate(lines):
            ranking.add(key, line, key)
        assert [lines[ranking.best(now_ns)] for now_ns in (9, 10, 11)] == [flat, at_10, steep]


def test_what_costs_nothing_goes_first():
    ranking = Ranking()
    ranking.add(1, idle(10**12, 1, used_ns=0), 1)
    ranking.add(2, idle(1, 0, used_ns=10**18), 2)
    ranking.add(3, idle(1, 5, used_ns=10**18), 3)
    assert ranking.best(10**18) == 2
    ranking.discard(2)
    assert ranking.best(10**18) == 1


def test_large_clocks_and_storages_are_compared_exactly():
    """In double precision these are equal, and so are their products with the clock."""
    now_ns, nbytes = 10**18, 10**12
    ranking = Ranking()
    ranking.add(1, idle(nbytes, 10**9, used_ns=now_ns - 2), 1)
    ranking.add(2, idle(nbytes + 1, 10**9, used_ns=now_ns - 2), 2)
    ranking.add(3, idle(nbytes, 10**9, used_ns=now_ns - 1), 3)
    order = []
    while ranking:
        order.append(ranking.best(now_ns))
        ranking.discard(order[-1])
    assert order == [2, 1, 3]


def test_the_clock_does_not_go_back():
    ranking = Ranking()
    ranking.best(10)
    ranking.best(10)
    with pytest.raises(ValueError, match="cannot go back from 10 to 9"):
        ranking.best(9)
    ranking.clear()
    assert ranking.best(0) is None


# -- any order of events ----------------------------------------------------------------------------------------------
SMALL = st.builds(Line, st.integers(-4, 4), st.integers(-20, 20), st.integers(0, 4))
LARGE = st.builds(idle, st.integers(1, 10**12), st.integers(0, 10**12), st.integers(10**18, 10**18 + 1_000))
KEYS = st.integers(0, 40)
EVENTS = st.one_of(
    st.tuples(st.just("add"), KEYS, st.one_of(SMALL, LARGE)),
    st.tuples(st.just("discard"), KEYS),
    st.tuples(st.just("later"), st.one_of(st.integers(0, 5), st.just(10**18))),
)


@settings(derandomize=True, deadline=None, database=None, max_examples=400)
@given(st.lists(EVENTS, max_size=80))
def test_it_answers_as_a_look_at_all_would(events):
    """A key that comes or changes is the last; one that is changed to what it was keeps its place."""
    ranking, plain, now_ns = Ranking(), LookAtAll(), 0
    for order, (name, *arguments) in enumerate(events):
        if name == "later":
            now_ns += arguments[0]
            assert ranking.best(now_ns) == plain.best(now_ns)
        elif name == "add":
            key, line = arguments
            place = plain.orders[key] if plain.lines.get(key) == line else order
            assert ranking.add(key, line, place) == plain.add(key, line, place)
        else:
            assert ranking.discard(*arguments) == plain.discard(*arguments)
        assert len(ranking) == len(plain.lines)
        assert all((key in ranking) == (key in plain.lines) for key in range(41))
    assert ranking.best(now_ns) == plain.best(now_ns)


def test_the_lead_changes_hands_everywhere_in_the_tree():
    """Time alone: as many keys as moments, and whoever leads leaves."""
    rng = random.Random(0)
    ranking, plain = Ranking(), LookAtAll()
    for key in range(300):
        line = idle(rng.randrange(1, 1_000), rng.randrange(1, 1_000), rng.randrange(2_000))
        ranking.add(key, line, key)
        plain.add(key, line, key)
    for now_ns in range(0, 3_000, 10):
        best = ranking.best(now_ns)
        assert best == plain.best(now_ns)
        if now_ns % 3 == 0:
            assert ranking.discard(best) == plain.discard(best)


@pytest.mark.parametrize("live", [100, 1_000, 10_000])
def test_an_eviction_looks_at_few(live, monkeypatch):
    """With each eviction one storage leaves and comes back and four change their cost: six paths to the root."""
    matches = 0

    def counted(*args):
        nonlocal matches
        matches += 1
        return match(*args)

    match = module._match
    rng = random.Random(live)

    def line(used_ns):
        return idle(rng.randrange(1, 10**8), rng.randrange(1, 10**7), used_ns)

    ranking = Ranking()
    now_ns = 10**9
    for key in range(live):
        ranking.add(key, line(rng.randrange(now_ns)), key)
    ranking.best(now_ns)
    monkeypatch.setattr(module, "_match", counted)
    for turn in range(500):
        now_ns += 50_000
        victim = ranking.best(now_ns)
        ranking.add(victim, line(now_ns), live + turn)
        for key in rng.choices(range(live), k=4):
            ranking.add(key, line(rng.randrange(now_ns)), key)
    assert matches / 500 < 8 * math.log2(live)
