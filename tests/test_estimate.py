"""The estimator: what is known at a size that was never seen. Sizes are (batch, length)."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta.planner.estimate import DEGREE, Estimator, Interval

THREE = [(4, 31), (4, 53), (2, 50)]


def predicted(observed, bytes_of, dims):
    estimator = Estimator(observed)
    forms = estimator.forms([bytes_of(*seen) for seen in observed])
    return estimator.between(forms, estimator.point(dims))


def exactly(nbytes):
    return Interval(nbytes, nbytes)


@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda b, t: 0,
        lambda b, t: 4096,
        lambda b, t: 8 * b * t,
        lambda b, t: 96 * b * t * t,
        lambda b, t: 12 * t * t,
        lambda b, t: 8 * b * (t + 1),  # a view without the last token of a longer storage
        lambda b, t: 64 * b * t + 32 * b * t * t,
    ],
)
def test_products_of_dims_are_known_exactly_from_three_sizes(bytes_of):
    assert predicted(THREE, bytes_of, (7, 97)) == exactly(bytes_of(7, 97))


def test_one_dim_is_known_exactly_from_two_sizes():
    assert predicted([(10,), (14,)], lambda t: 3 * t * t, (100,)) == exactly(30_000)


def test_any_quadratic_is_known_exactly_from_three_sizes():
    def bytes_of(t):
        return 5 * t * t + 7 * t + 100

    assert predicted([(10,), (14,), (31,)], bytes_of, (100,)) == exactly(bytes_of(100))


def test_where_several_forms_are_possible_all_lie_in_between():
    """(2, 10) and (4, 20): 20 to 80 bytes is batch * length, but batch ** 2 and length ** 2 would say so too."""
    found = predicted([(2, 10), (4, 20)], lambda b, t: b * t, (4, 40))
    assert (found.least, found.most) == (80, 320)


def test_of_nothing_nothing_is_a_multiple():
    """A dim of 0, as where a batch has no boxes: it counts as 1 where it never varied, and no time is in proportion to
    it where it did."""
    assert predicted([(0, 10), (0, 20)], lambda b, t: 3 * t, (4, 10)) == Interval(30, 480)
    assert predicted([(4, 10), (4, 20)], lambda b, t: b * t, (0, 10)) == Interval(2, 40)
    assert Estimator([(0, 10)]).point((4, 10)).scale == 4
    assert Estimator([(0,), (2,), (4,)]).rate([5, 6, 7]) == (0, 6)


def test_a_dim_that_never_varied_may_count_squared():
    assert predicted([(4, 10), (4, 20)], lambda b, t: b * t, (8, 10)) == Interval(40, 160)
    assert predicted([(4, 10), (4, 20)], lambda b, t: b * t, (2, 10)) == Interval(10, 40)


@given(st.lists(st.integers(0, 10**9), min_size=4, max_size=6))
def test_what_was_observed_is_always_covered(values):
    observed = [(10 * t,) for t in range(1, len(values) + 1)]  # more than a quadratic has factors
    estimator = Estimator(observed)
    forms = estimator.forms(values)
    for dims, value in zip(observed, values, strict=True):
        found = estimator.between(forms, estimator.point(dims))
        assert found.least <= value <= found.most


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 90), st.integers(0, 10**9)), min_size=1, max_size=8))
def test_what_is_off_is_off_by_nothing_that_a_term_explains(seen):
    """Least squares: what is left at the observed sizes, which may be the same ones, is orthogonal to every term. Where
    a simpler form is exact, nothing is left."""
    observed, values = [(b, t) for b, t, _ in seen], [nbytes for *_, nbytes in seen]
    estimator = Estimator(observed)
    for form in estimator.forms(values):
        monomials = [estimator.point(dims).monomials for dims in observed]
        fits = [Fraction(sum(factor * row[place] for place, factor in form.terms), form.divisor) for row in monomials]
        left = [value - fit for value, fit in zip(values, fits, strict=True)]
        assert form.margin >= max(map(abs, left))
        for place, term in enumerate(estimator.terms):
            if sum(term) <= DEGREE + 1:
                assert sum(off * row[place] for off, row in zip(left, monomials, strict=True)) == 0


def test_a_size_that_was_observed_twice_says_what_is_no_form_of_it():
    assert predicted([(4, 10), (4, 10), (4, 20)], lambda b, t: 8 * t, (4, 30)) == exactly(240)
    estimator = Estimator([(4, 10), (4, 10), (4, 20)])
    (form,) = estimator.forms([70, 90, 160])
    assert (form.margin, estimator.between([form], estimator.point((4, 30)))) == (10, Interval(230, 250))


def test_times_follow_the_term_they_are_most_evenly_proportional_to():
    """Noise of 10 % each way on t ** 2 must not turn into another power, or into a second term."""
    lengths = [(50,), (100,), (150,), (200,)]
    estimator = Estimator(lengths)
    noise = (1.1, 0.9, 1.0, 1.1)
    place, factor = estimator.rate([int(70 * t * t * off) for (t,), off in zip(lengths, noise, strict=True)])
    assert estimator.terms[place] == (2,)
    assert factor == pytest.approx(70, rel=0.11)


def test_times_of_nothing_are_nothing():
    assert Estimator([(1,), (2,)]).rate([0, 0]) == (0, 0.0)
