"""Which storages belong to parameters and buffers: never counted, never evicted.

Autograd saves `weight.t()`, a plain tensor, for a linear layer, so parameters are recognised by storage (rule 2).
Without a model at hand, every `nn.Module` the garbage collector knows is asked for its parameters and buffers. Modules
made later tell of themselves when they register a buffer, and are asked at the next save, when they have been moved to
their device. Parameters and buffers of a wrapper subclass (a DTensor) are its inner tensors. Weights that FSDP gathers
are here today and gone tomorrow: they are `refilled`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from delta.runtime.sharded import gathered_weights, is_flat, may_be_sharded
from delta.runtime.view import is_plain


class Persistent:
    """The set of parameter and buffer storages, found through `model` or through all modules there are."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._refilled: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self._searched = False
        self._new: list[weakref.ref[nn.Module]] = []  # have registered buffers since the search

    @contextmanager
    def new_modules(self) -> Iterator[None]:
        """Hear of the buffers that are registered meanwhile."""
        handle = register_module_buffer_registration_hook(self._registered)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def swaps(self) -> Iterator[None]:
        """Have `torch.utils.swap_tensors`, by which a module may change its parameters, find no weak reference of these
        here: it would refuse."""
        plain: Any = torch.utils.swap_tensors

        def swap_tensors(one: Tensor, other: Tensor) -> None:
            known = [tensor for tensor in (one, other) if self._parameters.pop(id(tensor), None) is not None]
            try:
                plain(one, other)
            finally:
                self._parameters.update((id(tensor), weakref.ref(tensor)) for tensor in known)

        torch.utils.swap_tensors = swap_tensors
        try:
            yield
        finally:
            torch.utils.swap_tensors = plain

    def _registered(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        self._new.append(weakref.ref(module))

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is a parameter's or a buffer's."""
        return self.holds_storage(tensor, tensor.untyped_storage())

    def holds_storage(self, tensor: Tensor, storage: torch.UntypedStorage, saved: bool = False) -> bool:
        """... which is that one; `saved`: and a module has run on it."""
        known = self._known.get(storage._cdata)
        if known is not None and known() is storage:
            return True
        base = tensor._base  # of `weight.t()`: knows also the parameters of a model that was made after the search
        parameter = tensor if base is None else base
        if type(parameter) is not Tensor and isinstance(parameter, nn.Parameter):
            self._found(tensor, parameter)
            return True
        if self._searched and not (saved and self._new):
            return False
        if not self._searched:
            self._searched = True
            self._collect()
        if saved and self._new:
            new, self._new = self._new, []
            self._add_all({id(module): module for ref in new if (module := ref()) is not None}.values())
        return _is_in(self._known, storage)

    def refilled(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage belongs to FSDP and may be empty when a recipe is replayed."""
        return may_be_sharded() and self.holds(tensor) and _is_in(self._refilled, tensor.untyped_storage())

    def hooks(self) -> list[dict[int, Callable[..., Any]]]:
        """The program's own code that runs in backward when a parameter gets its gradient, as PyTorch keeps it."""
        parameters = (parameter for ref in self._parameters.values() if (parameter := ref()) is not None)
        known = (hooks for each in parameters for hooks in (each._backward_hooks, each._post_accumulate_grad_hooks))
        return [hooks for hooks in known if hooks]

    def _found(self, tensor: Tensor, parameter: nn.Parameter) -> None:
        """A parameter's storage seen for the first time: of a new model, or gathered by FSDP."""
        self._add(tensor)
        self._parameters[id(parameter)] = weakref.ref(parameter)
        if is_flat(parameter):
            self._add(tensor, self._refilled)
        self._note_gathered()

    def _note_gathered(self) -> None:
        for weight in gathered_weights():
            self._add(weight)
            self._add(weight, self._refilled)

    def _collect(self) -> None:
        model = self._model() if self._model is not None else None
        modules: Iterable[nn.Module]
        # `type(...)` is asked rather than the object: a lazy proxy must not be woken up by a search.
        modules = model.modules() if model is not None else _all_modules()
        self._add_all(modules)
        self._note_gathered()

    def _add_all(self, modules: Iterable[nn.Module]) -> None:
        self._known = {key: ref for key, ref in self._known.items() if ref() is not None}
        self._parameters = {key: ref for key, ref in self._parameters.items() if ref() is not None}
        for module in modules:
            self._parameters.update(
                (id(each), weakref.ref(each)) for each in module._parameters.values() if each is not None
            )
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    for part in _parts(tensor):
                        self._add(part)

    def _add(self, tensor: Tensor, to: dict[int, weakref.ref[torch.UntypedStorage]] | None = None) -> None:
        storage = tensor.untyped_storage()
        (self._known if to is None else to)[storage._cdata] = weakref.ref(storage)


def _is_in(known: dict[int, weakref.ref[torch.UntypedStorage]], storage: torch.UntypedStorage) -> bool:
    ref = known.get(storage._cdata)
    return ref is not None and ref() is storage


def _parts(tensor: Any) -> list[Tensor]:
    """The plain tensors that a parameter or buffer is made of."""
    if is_traceable_wrapper_subclass(tensor):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    return [tensor] if is_plain(tensor) else []


def _all_modules() -> list[nn.Module]:
    things = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    return [module for module in things if "_parameters" in module.__dict__]
