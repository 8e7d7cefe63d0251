"""What an op is about to make: the bytes it then makes, or nothing where nobody can tell."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import delta
from delta.runtime import foreseen
from delta.runtime.foreseen import Foreseen
from delta.runtime.opfacts import facts_of
from delta.runtime.recompute import results_of

ATEN = torch.ops.aten
CPU = torch.device("cpu")
MATRIX, WIDE, PICTURES, KERNEL = torch.ones(6, 8), torch.ones(8, 30), torch.ones(2, 4, 9, 9), torch.ones(5, 4, 3, 3)
WHOLE, MOMENTS = torch.arange(6), (torch.zeros(4), torch.ones(4))
CALLS = {
    "product": (ATEN.mm.default, (MATRIX, WIDE), {}),
    "product in double precision": (ATEN.mm.default, (MATRIX.double(), WIDE.double()), {}),
    "product and sum": (ATEN.addmm.default, (torch.ones(30), MATRIX, WIDE), {}),
    "of a view": (ATEN.mm.default, (MATRIX, torch.ones(30, 8).t()), {}),
    "convolution": (ATEN.convolution.default, (PICTURES, KERNEL, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1), {}),
    "softmax": (ATEN._log_softmax.default, (MATRIX, 1, False), {}),
    "batch norm": (ATEN.native_batch_norm.default, (PICTURES, None, None, *MOMENTS, True, 0.1, 1e-5), {}),
    "norm": (ATEN.native_layer_norm.default, (MATRIX, [8], None, None, 1e-5), {}),
    "pooling": (ATEN.max_pool2d_with_indices.default, (PICTURES, [2, 2]), {}),
    "list": (ATEN.cat.default, ([MATRIX, MATRIX], 1), {}),
    "list of indices": (ATEN.index.Tensor, (MATRIX, [None, WHOLE]), {}),
    "embedding": (ATEN.embedding.default, (MATRIX, WHOLE), {}),
    "repeated": (ATEN.repeat.default, (MATRIX, [3, 1]), {}),
    "broadcast": (ATEN.mul.Tensor, (torch.ones(7, 1), torch.ones(9)), {}),
    "whole numbers": (ATEN.add.Tensor, (WHOLE, 1), {}),
    "whole numbers and a fraction": (ATEN.add.Tensor, (WHOLE, 1.0), {}),
    "whole numbers and a truth": (ATEN.mul.Tensor, (WHOLE.bool(), True), {}),
    "truths and a whole number": (ATEN.mul.Tensor, (WHOLE.bool(), 1), {}),
    "other type": (ATEN._to_copy.default, (MATRIX,), {"dtype": torch.float64}),
    "out of nothing": (ATEN.full.default, ([3, 5], 1.0), {"device": CPU, "dtype": torch.float32}),
    "the same tensor": (ATEN.lift_fresh.default, (MATRIX,), {}),
    "view": (ATEN.view.default, (MATRIX, [48]), {}),
    "in place": (ATEN.add_.Tensor, (torch.ones(3), 1), {}),
}


def asked(known: Foreseen, func, args, kwargs) -> int:
    return known.made_bytes(func, facts_of(func), args, kwargs)


def test_what_is_foreseen_is_made():
    """All are asked of one that remembers, twice: looks that differ in little are told apart."""
    known = Foreseen()
    for _ in range(2):
        for name, (func, args, kwargs) in CALLS.items():
            told = asked(known, func, args, kwargs)
            given = {each.untyped_storage().data_ptr() for each in results_of(args)}
            made = [each.untyped_storage() for each in results_of(func(*args, **kwargs))]
            assert told == sum(each.nbytes() for each in made if each.data_ptr() not in given), name


@torch.library.custom_op("delta_foreseen::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])  # and nobody knows what else


def test_nothing_is_made_for_it():
    assert asked(Foreseen(), ATEN.full.default, ([2**45], 1.0), {"device": CPU, "dtype": torch.float32}) == 2**47


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.nonzero.default, (MATRIX,)),  # as many as there are
        (ATEN.neg.default, (torch.ones(3).as_subclass(Subclass),)),
        (ATEN.neg.default, (MATRIX.to_sparse(),)),
        (torch.ops.delta_foreseen.twice.default, (MATRIX,)),
        (ATEN.bernoulli.default, (MATRIX,)),
    ],
)
def test_of_some_calls_nobody_can_tell(func, args):
    assert asked(Foreseen(), func, args, {}) == 0


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.usefixtures("one_thread")
def test_only_ops_of_which_nothing_is_known_are_asked_and_under_a_device_budget_alone(monkeypatch):
    def asks(count: int = 3, **options) -> list[bool]:
        asked_for, found = list[object](), list[bool]()
        monkeypatch.setattr(Foreseen, "made_bytes", lambda *call: asked_for.append(call) or 0)
        with delta.evict(
            policy=delta.load_policy("recompute", {"filter.min_bytes": 1}), device="cpu", **options
        ) as run:
            assert run._core is not None
            run._core.may_watch = False
            for _ in range(count):
                asked_for.clear()
                model(x).sum().backward()
                found.append(bool(asked_for))
        assert all(mode in ("observe", "planned") for mode in run.report().modes)
        return found

    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.ones(6, 8)
    assert asks(budget="1MiB") == [True, False, False]
    assert asks(activations="50%") == [False, False, False]


def test_each_look_is_asked_for_once_and_not_for_ever(monkeypatch):
    asked_for, find = [], foreseen._asked
    monkeypatch.setattr(
        foreseen, "_asked", lambda func, args, kwargs: asked_for.append(args) or find(func, args, kwargs)
    )
    monkeypatch.setattr(foreseen, "_MOST", 2)
    known = Foreseen()
    for rows, times in ((1, 1), (1, 1), (2, 2), (1, 2), (3, 3), (2, 4)):
        assert asked(known, ATEN.neg.default, (torch.ones(rows),), {}) == 4 * rows
        assert len(asked_for) == times


class Counting(TorchDispatchMode):
    """How often each op is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_thread")
def test_modes_of_the_program_do_not_hear_of_it(monkeypatch):
    told, find = [], foreseen._asked
    monkeypatch.setattr(foreseen, "_asked", lambda *call: told.append(find(*call)) or told[-1])
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with Counting() as counting, delta.evict(budget="64GiB", policy="dtr", device="cpu") as run:
        assert run._core is not None
        run._core.may_watch = False
        model(torch.ones(6, 8)).sum().backward()
    assert any(told)
    assert counting.calls["aten.addmm.default"] == 4
