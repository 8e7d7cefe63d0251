"""Bytes and times at an input size that was never seen, from a few that were: the estimator of Mimose.

Mimose (arXiv:2209.02478, its authors' `PolyPrediction`) fits a polynomial of degree 2 in one scalar to the bytes of
each module. Here it is the bytes of each storage, in all dims of the input. A storage is a product of dims, so its
bytes are most often one term, `c * batch * length ** 2`, and two or three observed sizes give it exactly. Forms are
tried from the simplest on: one term, two terms, least squares over more. Only the last can be wrong where it was
observed, by what is then its margin.

Where several forms explain what was seen, or a dim has never varied, the answer is an interval: plans are made for the
most, and what a share of a budget is a share of is the least. No exponent of a dim is above `DEGREE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations, product
from math import ceil, floor, inf, lcm, prod
from operator import mul
from statistics import median

DEGREE = 2

Dims = tuple[int, ...]
Exponents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A sum of terms, each the place of its monomial in `Estimator.terms` and a factor, over `divisor`: whole numbers,
    since this is evaluated before a step. `margin` is the most bytes it was off by at an observed size."""

    terms: tuple[tuple[int, int], ...]
    divisor: int
    margin: int = 0

    @classmethod
    def of(cls, factors: Sequence[tuple[int, Fraction]]) -> Form:
        divisor = lcm(*(factor.denominator for _, factor in factors))
        return cls(tuple((place, int(factor * divisor)) for place, factor in factors if factor), divisor)

    def at(self, monomials: Sequence[int]) -> tuple[int, int]:
        """The bytes, rounded down and up, give or take the margin."""
        value = 0
        for place, factor in self.terms:
            value += factor * monomials[place]
        return value // self.divisor - self.margin, -(-value // self.divisor) + self.margin


@dataclass(frozen=True, slots=True)
class Interval:
    """Between these, both included."""

    least: int
    most: int

    @property
    def exact(self) -> bool:
        return self.least == self.most


@dataclass(frozen=True, slots=True)
class Point:
    """An input size, prepared for many evaluations: the value of every monomial, and by how much the dims that never
    varied may shrink or raise everything."""

    monomials: tuple[int, ...]
    shrink: Fraction
    growth: Fraction
    scale: float  # expected, for times


class Estimator:
    """What can be said at any input size, given those that were observed: at least one, of as many dims."""

    def __init__(self, observed: Sequence[Dims]) -> None:
        self._fixed = observed[0]
        self.varied = tuple(i for i, sizes in enumerate(zip(*observed, strict=True)) if len(set(sizes)) > 1)
        exponents: Iterable[Exponents] = product(range(DEGREE + 1), repeat=len(self.varied))
        self.terms: tuple[Exponents, ...] = tuple(sorted(exponents, key=lambda term: (sum(term), term)))
        self._observed = [self._monomials(dims) for dims in observed]

    def _monomials(self, dims: Dims) -> tuple[int, ...]:
        sizes = [dims[i] for i in self.varied]
        return tuple(prod(map(pow, sizes, term)) for term in self.terms)

    def point(self, dims: Dims) -> Point:
        shrink = growth = Fraction(1)
        scale = 1.0
        for i, (size, seen) in enumerate(zip(dims, self._fixed, strict=True)):
            if i not in self.varied and size != seen:
                times = Fraction(max(1, size), max(1, seen))  # of nothing nothing is a multiple
                squared = times**DEGREE
                shrink, growth = shrink * min(squared, Fraction(1)), growth * max(squared, Fraction(1))
                scale *= float(times)
        return Point(self._monomials(dims), shrink, growth, scale)

    # -- bytes ----------------------------------------------------------------------------------------------------
    def forms(self, values: Sequence[int]) -> tuple[Form, ...]:
        """The simplest forms that explain the bytes at each observed size."""
        return self._exact(values, 1) or self._exact(values, 2) or (self._least_squares(values),)

    def between(self, forms: Sequence[Form], point: Point) -> Interval:
        """The bytes at a size. What a form makes negative does not count."""
        found = [form.at(point.monomials) for form in forms]
        least, most = min(least for least, _ in found), max(most for _, most in found)
        if point.shrink != 1:
            least = floor(least * point.shrink)
        if point.growth != 1:
            most = ceil(most * point.growth)
        return Interval(max(0, least), max(0, most))

    def _exact(self, values: Sequence[int], count: int) -> tuple[Form, ...]:
        found = []
        first = list(zip(self._observed, values, strict=True))[: count + 1]
        for terms in combinations(range(len(self.terms)), count):
            if len(first) > count and _determinant([[*(row[term] for term in terms), value] for row, value in first]):
                continue  # one of these is none of that form: most often, and found without fractions
            rows = [[monomials[term] for term in terms] for monomials in self._observed]
            factors = _solve(rows, values)
            if factors is not None and all(factors) == any(values):
                found.append(Form.of(tuple(zip(terms, factors, strict=True))))
        return tuple(found)

    def _least_squares(self, values: Sequence[int]) -> Form:
        """Over the terms up to the degree of batch * length ** 2, the simpler ones first where the data do not tell."""
        factors = [Fraction(sum(map(mul, each, values)), divisor) for each, divisor in self._weights]
        form = Form.of(tuple(zip(self._low_terms, factors, strict=True)))
        off = 0
        for monomials, value in zip(self._observed, values, strict=True):
            least, most = form.at(monomials)
            off = max(off, value - least, most - value)
        return replace(form, margin=off)

    @cached_property
    def _low_terms(self) -> list[int]:
        return [place for place, term in enumerate(self.terms) if sum(term) <= DEGREE + 1]

    @cached_property
    def _weights(self) -> list[tuple[list[int], int]]:
        """By low term, what the bytes at each observed size count for in its factor, over a divisor. So the normal
        equations are solved once for all kinds of storages, of which there may be hundreds."""
        terms = self._low_terms
        rows = [[monomials[term] for term in terms] for monomials in self._observed]
        normal = [[sum(row[i] * row[j] for row in rows) for j in range(len(terms))] for i in range(len(terms))]
        ones = []  # the factors were it one byte at this size, and none elsewhere
        for row in rows:
            factors = _solve(normal, row)
            assert factors is not None, "normal equations always have a solution"
            ones.append(factors)
        found = []
        for weights in zip(*ones, strict=True):
            divisor = lcm(*(weight.denominator for weight in weights))
            found.append(([int(weight * divisor) for weight in weights], divisor))
        return found

    # -- times ----------------------------------------------------------------------------------------------------
    def rate(self, values: Sequence[int]) -> tuple[int, float]:
        """A time as a multiple of one monomial (its place, the factor): the one it is most evenly proportional to.

        Measured times are noisy, so no second term is fitted: it would mostly be noise, and far off at other sizes.
        """
        best, least = (0, float(median(values))), inf
        for place in range(len(self.terms)):
            if not all(monomials[place] for monomials in self._observed):
                continue
            ratios = [value / monomials[place] for value, monomials in zip(values, self._observed, strict=True)]
            spread = max(ratios) / min(ratios) if min(ratios) > 0 else inf
            if spread < least:
                best, least = (place, median(ratios)), spread
        return best


def _determinant(table: list[list[int]]) -> int:
    """Of a square table of two rows, or a few more."""
    if len(table) == 2:
        (a, b), (c, d) = table
        return a * d - b * c
    head, *others = table
    minors = ([row[:column] + row[column + 1 :] for row in others] for column in range(len(head)))
    signed = [cell if column % 2 == 0 else -cell for column, cell in enumerate(head)]
    return sum(cell * _determinant(minor) for cell, minor in zip(signed, minors, strict=True) if cell)


def _solve(rows: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """Factors x with rows . x = values, exactly; 0 where the rows leave one open. None if there are none."""
    table = [[Fraction(cell) for cell in (*row, value)] for row, value in zip(rows, values, strict=True)]
    width, done = len(rows[0]), 0
    pivots: list[int] = []
    for column in range(width):
        pivot = next((i for i in range(done, len(table)) if table[i][column]), None)
        if pivot is None:
            continue
        table[done], table[pivot] = table[pivot], table[done]
        head = table[done] = [cell / table[done][column] for cell in table[done]]
        for i, row in enumerate(table):
            if i != done and row[column]:
                table[i] = [cell - row[column] * first for cell, first in zip(row, head, strict=True)]
        pivots.append(column)
        done += 1
    if any(row[width] for row in table[done:]):
        return None
    factors = [Fraction(0)] * width
    for i, column in enumerate(pivots):
        factors[column] = table[i][width]
    return factors
