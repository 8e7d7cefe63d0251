"""Which combinations of its parameters a test has: by default some, by `--slow` all.

A value is what `pytest.mark.parametrize` takes: the marks of a `pytest.param` are those of its combinations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations, product

import pytest

Combination = tuple[int, ...]  # the position of each parameter's value


def in_pairs(**values: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes with every combination; by default any two values meet, those without marks in what has none: a
    combination that is skipped here stands for no other."""
    lists = [list(each) for each in values.values()]
    every = list(product(*(range(len(each)) for each in lists)))
    unmarked = set(product(*_unmarked(lists)))
    chosen = _covering([each for each in every if each in unmarked], [])
    return _parametrized(values, lists, every, _covering(every, chosen))


def in_turns(**values: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes with every combination; by default each value comes once, those of shorter lists in turns, and those
    with marks not at all: for tests in which the values of the longest list differ most."""
    lists = [list(each) for each in values.values()]
    every = list(product(*(range(len(each)) for each in lists)))
    unmarked = _unmarked(lists)
    longest = max(map(len, unmarked))
    chosen = [tuple(each[turn % len(each)] for each in unmarked) for turn in range(longest)]
    return _parametrized(values, lists, every, chosen)


def _unmarked(lists: list[list[object]]) -> list[list[int]]:
    return [[at for at, value in enumerate(each) if not _with_marks(value)[1]] for each in lists]


def _parametrized(
    names: Iterable[str], lists: list[list[object]], every: list[Combination], chosen: list[Combination]
) -> pytest.MarkDecorator:
    params = []
    for combination in every:
        given = [_with_marks(each[at]) for each, at in zip(lists, combination, strict=True)]
        marks = [mark for _, marks in given for mark in marks]
        marks += [] if combination in chosen else [pytest.mark.slow]
        params.append(pytest.param(*(value for value, _ in given), marks=marks))
    return pytest.mark.parametrize(tuple(names), params)


def _with_marks(value: object) -> tuple[object, Collection[pytest.MarkDecorator | pytest.Mark]]:
    return (value.values[0], value.marks) if isinstance(value, type(pytest.param())) else (value, ())


def _covering(every: list[Combination], chosen: list[Combination]) -> list[Combination]:
    """What is `chosen`, and more: each time the one in which most pairs meet that have not met before."""
    chosen = list(chosen)
    missing = {pair for combination in every for pair in _pairs(combination)}
    missing -= {pair for combination in chosen for pair in _pairs(combination)}
    while missing:
        best = max(every, key=lambda combination: len(missing & _pairs(combination)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(combination: Combination) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(combination), 2))
