"""What an op is about to make, before it runs, by what PyTorch says of shapes alone.

Under a budget on the whole device a step that is not known keeps room for as much as its ops have taken so far. The
first large one, the logits of a language model, would be over. So the ops of such a step are asked in advance, with
tensors that have no bytes (device `meta`), once for each call that looks otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from delta.runtime.modes import only_lowest
from delta.runtime.opfacts import OpFacts
from delta.runtime.recompute import results_of
from delta.runtime.view import is_plain

_META = torch.device("meta")
_SETTINGS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
# Calls that are remembered, before all are forgotten: those of several models, or of one at many sizes.
_MOST = 4096


class Foreseen:
    """Remembers what calls make."""

    def __init__(self) -> None:
        self._made_bytes: dict[Any, int] = {}

    def made_bytes(self, func: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """The bytes that a call makes; 0 where nobody can tell. Not asked: what draws numbers, and what is not
        PyTorch's own and may do more than to tell shapes."""
        if facts.seeded or func.namespace != "aten":
            return 0
        try:
            look = func, _look(args), _look(tuple(kwargs.items()))
        except _StrangeError:
            return 0
        made_bytes = self._made_bytes.get(look)
        if made_bytes is None:
            if len(self._made_bytes) >= _MOST:
                self._made_bytes.clear()
            made_bytes = self._made_bytes[look] = _asked(func, args, kwargs)
        return made_bytes


class _StrangeError(Exception):
    """An argument of which nothing is known."""


def _look(value: Any) -> Any:
    """What of an argument the size of the results may depend on."""
    if isinstance(value, Tensor):
        if not is_plain(value):
            raise _StrangeError
        return value.dtype, tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_look, value))
    if isinstance(value, _SETTINGS):
        return type(value), value  # True is 1 to a dict, and not to the type of a result
    raise _StrangeError


def _asked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """What the call makes of the same arguments without their bytes."""
    given: set[int] = set()
    try:
        with only_lowest(0):
            results = func(
                *(_without_bytes(value, given) for value in args),
                **{name: _without_bytes(value, given) for name, value in kwargs.items()},
            )
    except Exception:  # a formula for shapes says what it likes where there is none, or where they depend on data
        return 0
    made = {storage._cdata: storage.nbytes() for storage in map(Tensor.untyped_storage, results_of(results))}
    return sum(nbytes for storage, nbytes in made.items() if storage not in given)


def _without_bytes(value: Any, given: set[int]) -> Any:
    """The argument on device `meta`; its storage is then one of those that are `given`."""
    if isinstance(value, Tensor):
        bare = torch.empty(value.shape, dtype=value.dtype, device=_META)
        given.add(bare.untyped_storage()._cdata)
        return bare
    if isinstance(value, (tuple, list)):
        return [_without_bytes(each, given) for each in value]
    return _META if isinstance(value, torch.device) else value
