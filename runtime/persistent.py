"""Which storages belong to parameters and buffers: never counted, never evicted.

Autograd saves `weight.t()`, a plain tensor, for a linear layer, so parameters are recognised by storage (rule 2).
Without a model at hand, every `nn.Module` the garbage collector knows is asked for its parameters and buffers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from delta.runtime.view import is_plain


class Persistent:
    """The set of parameter and buffer storages, found through `model` or through all modules there are."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._searched = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is a parameter's or a buffer's."""
        base = tensor._base  # of `weight.t()`: knows also the parameters of a model that was made after the search
        if isinstance(tensor if base is None else base, nn.Parameter):
            self._add(tensor)
            return True
        if not self._searched:
            self._searched = True
            self._collect()
        return self._has(tensor)

    def _has(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        return known is not None and known() is storage

    def _collect(self) -> None:
        model = self._model() if self._model is not None else None
        modules: Iterable[nn.Module]
        # `type(...)` is asked rather than the object: a lazy proxy must not be woken up by a search.
        modules = model.modules() if model is not None else _all_modules()
        self._known = {key: ref for key, ref in self._known.items() if ref() is not None}
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and is_plain(tensor):
                    self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = weakref.ref(storage)


def _all_modules() -> list[nn.Module]:
    things = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    return [module for module in things if "_parameters" in module.__dict__]
