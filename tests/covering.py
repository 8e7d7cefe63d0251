"""Which combinations of its parameters a test has: by default some in which any two values meet, by `--slow` all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product

import pytest

Combination = tuple[int, ...]  # the position of each parameter's value


def in_pairs(**values: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes with every combination; those that a default run can do without are marked slow."""
    lists = [list(each) for each in values.values()]
    every = list(product(*(range(len(each)) for each in lists)))
    chosen = _covering(every)
    params = []
    for combination in every:
        marks = () if combination in chosen else pytest.mark.slow
        params.append(pytest.param(*(each[at] for each, at in zip(lists, combination, strict=True)), marks=marks))
    return pytest.mark.parametrize(tuple(values), params)


def _covering(every: list[Combination]) -> list[Combination]:
    """Each time the one in which most pairs meet that have not met before."""
    missing = {pair for combination in every for pair in _pairs(combination)}
    chosen = []
    while missing:
        best = max(every, key=lambda combination: len(missing & _pairs(combination)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(combination: Combination) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(combination), 2))
