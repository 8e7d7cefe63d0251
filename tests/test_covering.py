"""The combinations that a default run takes: any two values meet, and `--slow` has all."""

from itertools import combinations, product

from covering import in_pairs

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
