import inspect
import re

import pytest

import delta
from delta import errors

TREE = {
    "DeltaError": Exception,
    "BudgetError": errors.DeltaError,
    "PolicyError": errors.DeltaError,
    "TimelineError": errors.DeltaError,
    "PlotError": errors.DeltaError,
    "TraceError": errors.DeltaError,
    "NestedSessionError": errors.DeltaError,
    "RecomputeMismatchError": errors.DeltaError,
    "StorageModifiedError": errors.DeltaError,
    "SwapError": errors.DeltaError,
    "HostFullError": errors.SwapError,
}


def classes():
    return {name: value for name, value in vars(errors).items() if inspect.isclass(value)}


def test_the_tree_is_complete():
    assert classes().keys() == TREE.keys()


@pytest.mark.parametrize(("name", "parent"), TREE.items())
def test_parents(name, parent):
    assert getattr(errors, name).__bases__[0] is parent


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("PolicyError", ValueError),
        ("TimelineError", ValueError),
        ("TraceError", ValueError),
        ("NestedSessionError", RuntimeError),
        ("RecomputeMismatchError", RuntimeError),
        ("StorageModifiedError", RuntimeError),  # autograd raises RuntimeError for the same mistake
        ("SwapError", RuntimeError),
        ("HostFullError", RuntimeError),
    ],
)
def test_builtin_parents(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_the_docstring_draws_every_class():
    drawn = re.findall(r"^\W*(\w+Error)\b", errors.__doc__.split("::")[1].split("A message")[0], re.MULTILINE)
    assert sorted(drawn) == sorted(TREE)


@pytest.mark.parametrize("name", TREE)
def test_every_class_is_at_the_door_and_documented(name):
    assert getattr(delta, name) is getattr(errors, name)
    assert name in delta.__all__
    assert getattr(errors, name).__doc__
