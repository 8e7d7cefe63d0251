"""Recipes: how to run a recorded op again, and the run itself.

A recipe holds the op with its plain arguments and, in place of tensors, references to records; it keeps no tensor
alive. Replay happens below autograd and autocast (the recorded op is what ran below them the first time), with the
random generator and the process's settings as they were then and put back afterwards, with scratch space for batch-norm
statistics and copies of the inputs the op overwrites. What comes out is compared with what was recorded before anybody
may use it.

Guarantee: a replay changes nothing but its results. Not covered: choosing what to replay (`delta.engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from delta.errors import RecomputeMismatchError
from delta.runtime import batch_norm
from delta.runtime.generators import run_seeded
from delta.runtime.opfacts import OpFacts
from delta.runtime.settings import Settings, current, under
from delta.runtime.view import View

_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Where the calls that are run again ran the first time: below autograd and autocast. Holds for this thread."""
    with (
        torch.enable_grad(),  # some ops look at the mode; nothing is tracked there
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in an argument list where the tensor number `index` was."""

    index: int


_SLOTS = tuple(map(Slot, range(16)))
FIRST = _SLOTS[0]
_SIMPLE = frozenset({bool, int, float, type(None)})  # arguments of these types hold no tensor: most are of them


@dataclass(frozen=True, slots=True)
class Scratch:
    """Stands for batch-norm statistics: a training step writes them and does not read them, so a replay gets zeros."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Input(NamedTuple):
    """A tensor argument: a record seen through a view."""

    record: int
    view: View


class Product(NamedTuple):
    """A record the op makes: result number `result`, or the storage of input number `written`."""

    record: int
    nbytes: int
    view: View
    result: int | None = None
    written: int | None = None


@dataclass(slots=True)
class Recipe:
    """One recorded call."""

    func: OpOverload
    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Input, ...]
    products: tuple[Product, ...]
    generator: torch.Generator | None
    generator_state: Tensor | None
    again_ns: int | None = None  # for batch norm whose output its statistics give: how long that takes
    settings: Settings = field(default_factory=current)


class Call(NamedTuple):
    """Arguments with every tensor replaced by a `Slot`, and the tensors in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]


def strip(args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Take the tensors out of an op's arguments."""
    tensors: list[Tensor] = []
    plain_args = tuple([arg if type(arg) in _SIMPLE else _strip(arg, tensors) for arg in args])
    plain_kwargs = {name: _strip(arg, tensors) for name, arg in kwargs.items()} if kwargs else {}
    return Call(plain_args, plain_kwargs, tensors)


def _strip(value: Any, tensors: list[Tensor]) -> Any:
    # Not a closure: one that calls itself is a reference cycle, and would keep the tensors alive until a collection.
    if isinstance(value, Tensor):
        tensors.append(value)
        return _SLOTS[len(tensors) - 1] if len(tensors) <= len(_SLOTS) else Slot(len(tensors) - 1)
    if type(value) in (list, tuple):
        return type(value)(_strip(item, tensors) for item in value)
    return value


def filled(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """The reverse of `strip`."""
    whole_args = [arg if type(arg) in _SIMPLE else fill(arg, tensors) for arg in args]
    return whole_args, {name: fill(arg, tensors) for name, arg in kwargs.items()} if kwargs else {}


def fill(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The reverse of `strip`, for one argument."""
    if type(value) is Slot:
        return tensors[value.index]
    if type(value) is Scratch:
        return torch.zeros(value.size, dtype=value.dtype, device=value.device)
    if type(value) in (list, tuple):
        return type(value)(fill(item, tensors) for item in value)
    return value


def results_of(result: Any) -> list[Tensor]:
    """The tensors among an op's results, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        tensors: list[Tensor] = []
        for item in result:
            if isinstance(item, Tensor):
                tensors.append(item)
            else:
                tensors += results_of(item)
        return tensors
    return []


def replay(
    recipe: Recipe,
    storage_of: Callable[[int], torch.UntypedStorage],
    steal: frozenset[int],
    left: Mapping[int, torch.UntypedStorage],
) -> dict[int, torch.UntypedStorage]:
    """Run the op again; returns the storages of its products by record, of those at least that are not in `left`.

    `storage_of` gives the resident storage of an input record. Records in `steal` will not be read again: an op that
    overwrites one of them may do so without a copy. `left`: products that are still there. Raises
    RecomputeMismatchError where the results differ in layout from the recorded ones.
    """
    written = {product.written for product in recipe.products if product.written is not None}
    copies: dict[int, torch.UntypedStorage] = {}
    tensors = []
    with under(recipe.settings), below_autograd():
        overwritten = {recipe.inputs[index].record for index in written}
        for entry in recipe.inputs:
            storage = storage_of(entry.record)
            if entry.record in overwritten and entry.record not in steal:
                storage = copies.setdefault(entry.record, storage.clone())
            tensors.append(entry.view.over(storage))
        statistics = _statistics(recipe, left)
        if statistics is not None:
            made = recipe.products[batch_norm.OUTPUT]
            again = batch_norm.output([fill(arg, tensors) for arg in recipe.args[: batch_norm.NEEDED]], *statistics)
            return {made.record: _check(recipe, made, [again], tensors)}
        args, kwargs = filled(recipe.args, recipe.kwargs, tensors)
        result = results_of(run_seeded(recipe.func, recipe.generator, recipe.generator_state, args, kwargs))
    return {product.record: _check(recipe, product, result, tensors) for product in recipe.products}


def _statistics(recipe: Recipe, left: Mapping[int, torch.UntypedStorage]) -> list[Tensor] | None:
    """The statistics of a batch norm, if they are still there and give its output."""
    if recipe.again_ns is None:
        return None
    needed = [recipe.products[index] for index in (batch_norm.MEAN, batch_norm.INVSTD)]
    if any(product.record not in left for product in needed):
        return None
    return [product.view.over(left[product.record]) for product in needed]


def _check(recipe: Recipe, product: Product, result: list[Tensor], inputs: list[Tensor]) -> torch.UntypedStorage:
    if product.written is not None:
        return inputs[product.written].untyped_storage()
    assert product.result is not None
    found = View.of(result[product.result]) if product.result < len(result) else None
    if found != product.view or result[product.result].untyped_storage().nbytes() != product.nbytes:
        raise mismatch(recipe.facts.name, found, product.view, product.nbytes)
    return result[product.result].untyped_storage()


def mismatch(op: str, found: View | None, recorded: View, nbytes: int) -> RecomputeMismatchError:
    """What to raise where a replay gave something else than what was `recorded`."""
    return RecomputeMismatchError(
        f"replaying {op} gave {found}, recorded was {recorded} ({nbytes} bytes). The op does not give the same result "
        f'twice: keep what it makes with a rule such as {{op: "{op}", action: keep}} in the policy, and please report '
        "it."
    )
