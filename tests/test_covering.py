"""The combinations that a default run takes: any two values meet, or each comes once, and `--slow` has all."""

from collections import Counter
from itertools import combinations, product

import pytest
from covering import in_pairs, in_turns

VALUES = {"policy": ["swap", "recompute", "delta"], "device": ["cpu", "chaos"], "share": ["0%", "40%", "100%", "50%"]}


def test_any_two_values_meet_by_default_and_all_do_among_the_slow():
    names, params = in_pairs(**VALUES).args
    assert names == tuple(VALUES)
    assert [param.values for param in params] == list(product(*VALUES.values()))
    assert {mark.name for param in params for mark in param.marks} == {"slow"}
    chosen = [param.values for param in params if not param.marks]
    for one, other in combinations(range(len(VALUES)), 2):
        met = {(values[one], values[other]) for values in chosen}
        assert met == set(product(list(VALUES.values())[one], list(VALUES.values())[other]))
    assert 12 <= len(chosen) <= 14, "the two longest lists need twelve"


def test_two_lists_have_no_combination_to_spare():
    _, params = in_pairs(policy=["swap", "delta"], share=["0%", "40%"]).args
    assert not any(param.marks for param in params)


def test_in_turns_each_value_of_the_longest_list_comes_once_and_the_others_evenly():
    names, params = in_turns(**VALUES, case=range(12)).args
    assert names == (*VALUES, "case")
    assert [param.values for param in params] == list(product(*VALUES.values(), range(12)))
    assert {mark.name for param in params for mark in param.marks} == {"slow"}
    chosen = [param.values for param in params if not param.marks]
    assert sorted(values[-1] for values in chosen) == list(range(12))
    for at, values in enumerate(VALUES.values()):
        assert Counter(each[at] for each in chosen) == dict.fromkeys(values, 12 // len(values))


CARD = pytest.param("cuda", marks=pytest.mark.cuda)


def test_a_combination_with_a_mark_stands_for_no_other():
    """It may be skipped."""
    lists = {"how": ["a", "b", "c"], "policy": ["swap", "recompute", "delta"], "device": ["cpu", "chaos", CARD]}
    _, params = in_pairs(**lists).args
    marks = {param.values: {mark.name for mark in param.marks} for param in params}
    assert all(("cuda" in names) is (values[-1] == "cuda") for values, names in marks.items())
    chosen = [values for values, names in marks.items() if not names]
    for one, other in combinations(range(3), 2):
        met = {(values[one], values[other]) for values in chosen}
        assert met == {
            pair for pair in product(*list(lists.values())[one : other + 1 : other - one]) if CARD not in pair
        }
    on_card = [values for values, names in marks.items() if names == {"cuda"}]
    assert {values[0] for values in on_card} == {"a", "b", "c"}
    assert {values[1] for values in on_card} == {"swap", "recompute", "delta"}


def test_in_turns_what_has_marks_is_among_the_slow():
    _, params = in_turns(case=["a", "b", "c"], device=["cpu", CARD]).args
    marks = {param.values: {mark.name for mark in param.marks} for param in params}
    assert all(marks[case, "cpu"] == set() and marks[case, "cuda"] == {"cuda", "slow"} for case in "abc")
