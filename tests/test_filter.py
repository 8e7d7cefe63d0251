"""The scores by hand: bytes and ns in, the smallest is evicted first."""

from math import inf

import pytest

from delta.filter import SCORES, Candidate
from delta.filter.scores import IDLE_WEIGHT
from delta.parts import SHIPPED_SCORES

# record, bytes, cost of the cheapest action in ns, ns since the last access, ns until the next use
BIG_DEAR = Candidate(1, 4_000, 8_000, 1_000, 500)
SMALL_CHEAP = Candidate(2, 1_000, 1_000, 1_000, 500)
FRESH = Candidate(3, 4_000, 8_000, 100, 50_000)
UNKNOWN = Candidate(4, 4_000, 8_000, 1_000, None)


def order(score, *candidates):
    return [c.record for c in sorted(candidates, key=SCORES[score])]


def test_every_score_a_policy_may_name_is_there():
    assert set(SHIPPED_SCORES) == set(SCORES)


@pytest.mark.parametrize(
    ("score", "candidate", "expected"),
    [
        ("delta", BIG_DEAR, 8_001 / (4_000 * 501**IDLE_WEIGHT)),  # cost / (bytes * weighed time until use)
        ("delta", UNKNOWN, 8_001 / (4_000 * 1_001**IDLE_WEIGHT)),  # no known use: time since the last
        ("delta-paper", BIG_DEAR, 8_001 / (4_000 * 1_001)),  # always since the last
        ("dtr", BIG_DEAR, 8_000 / (4_000 * 1_000)),  # the same without the ones: as published
        ("msps", BIG_DEAR, 8_000 / 4_000),  # staleness does not count
        ("size-staleness", BIG_DEAR, 1 / (4_000 * 1_001)),
        ("lru", BIG_DEAR, -1_000),
        ("size", BIG_DEAR, -4_000),
    ],
)
def test_scores_by_hand(score, candidate, expected):
    assert SCORES[score](candidate) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        # with weight 0.3, 501 and 50001 count as 6.5 and 26: 2.0/6.5 = 0.31, 1.0/6.5 = 0.15, 2.0/26 = 0.08
        ("delta", [3, 2, 1]),
        # 8001/(4000*1001) = 2.00e-3, 1001/(1000*1001) = 1.00e-3, 8001/(4000*101) = 1.98e-2
        ("delta-paper", [2, 1, 3]),
        ("dtr", [2, 1, 3]),  # 8000/(4000*1000) = 2e-3, 1000/(1000*1000) = 1e-3, 8000/(4000*100) = 2e-2
        ("msps", [2, 1, 3]),  # 2, 1, 2 (the order given stays)
        # 1/(4000*1001), 1/(1000*1001), 1/(4000*101) = 2.5e-7, 1.0e-6, 2.5e-6
        ("size-staleness", [1, 2, 3]),
        ("lru", [1, 2, 3]),  # 1000, 1000 (the order given stays), 100 ns ago
        ("size", [1, 3, 2]),
    ],
)
def test_orders_by_hand(score, expected):
    assert order(score, BIG_DEAR, SMALL_CHEAP, FRESH) == expected


def test_delta_looks_ahead_where_delta_paper_looks_back():
    """Just saved, needed last: DELTA would keep it for having been used; the known order says it waits longest."""
    assert order("delta", BIG_DEAR, FRESH) == [3, 1]
    assert order("delta-paper", BIG_DEAR, FRESH) == [1, 3]


@pytest.mark.parametrize("score", SCORES)
def test_a_free_action_at_time_zero_still_has_a_score(score):
    assert SCORES[score](Candidate(1, 1, 0, 0, 0)) == SCORES[score](Candidate(2, 1, 0, 0, None))


@pytest.mark.parametrize("score", ["dtr", "msps"])
def test_what_frees_nothing_comes_last(score):
    assert SCORES[score](Candidate(1, 0, 5, 10, None)) == inf


def test_dtr_keeps_what_was_used_this_very_moment():
    assert SCORES["dtr"](Candidate(1, 100, 5, 0, None)) == inf


def test_free_actions_are_still_told_apart_by_size():
    """Cost 0 is common (hidden swaps): without the + 1 every score would be 0."""
    assert order("delta", Candidate(1, 10, 0, 5, 5), Candidate(2, 1_000, 0, 5, 5)) == [2, 1]
