"""Somebody else's count of resident activations: weak references to storages, from outside of Delta's own books.

A *saving* is one storage that autograd saved; it lives while autograd has a handle on it. It may be there as several
storages in turn: the original, and what Delta made or copied in its place. Storages that Delta makes inside its hooks
count from then on, before it is known for which saving they are. Parameters and buffers never count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Storage = torch.UntypedStorage


class Saving:
    """One saved storage, however many handles autograd has on it."""

    def __init__(self) -> None:
        self.handles = 0
        self.storages: list[weakref.ref[Storage]] = []

    def resident_bytes(self) -> int:
        return sum(storage.nbytes() for ref in self.storages if (storage := ref()) is not None)


class Token:
    """What autograd holds in place of a saved tensor; `inner` is what Delta gave it."""

    def __init__(self, saving: Saving, inner: Any) -> None:
        self.saving = saving
        self.inner = inner

    def __del__(self) -> None:
        self.saving.handles -= 1


class Witness(TorchDispatchMode):
    """Counts while entered; `pack` and `unpack` go around those of whoever looks after the saved tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._persistent = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._savings: list[Saving] = []
        self._known: dict[int, tuple[weakref.ref[Storage], Saving | None]] = {}
        self._inside = 0

    def resident_bytes(self) -> int:
        self._savings = [saving for saving in self._savings if saving.handles]
        made = [ref() for ref, saving in self._known.values() if saving is None]
        unclaimed = sum(storage.nbytes() for storage in made if storage is not None)
        return unclaimed + sum(saving.resident_bytes() for saving in self._savings)

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes())

    # -- what is saved ------------------------------------------------------------------------------------------------
    def pack(self, tensor: Tensor, inner: Callable[[Tensor], Any]) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata in self._persistent:
            return inner(tensor)
        saving = self._saving_of(storage)
        saving.handles += 1
        self.look()
        self._inside += 1
        try:
            return Token(saving, inner(tensor))
        finally:
            self._inside -= 1
            self.look()

    def unpack(self, packed: Any, inner: Callable[[Any], Tensor]) -> Tensor:
        if not isinstance(packed, Token):
            return inner(packed)
        self._inside += 1
        try:
            tensor = inner(packed.inner)
        finally:
            self._inside -= 1
        self._claim(tensor.untyped_storage(), packed.saving)
        self.look()
        return tensor

    def made(self, storages: Iterable[Storage]) -> None:
        """Delta made these; for which saving is seen when autograd gets them."""
        for storage in storages:
            if storage._cdata not in self._persistent and self._entry(storage) is None:
                self._known[storage._cdata] = (weakref.ref(storage), None)

    def _entry(self, storage: Storage) -> tuple[weakref.ref[Storage], Saving | None] | None:
        entry = self._known.get(storage._cdata)
        return entry if entry is not None and entry[0]() is storage else None

    def _saving_of(self, storage: Storage) -> Saving:
        entry = self._entry(storage)
        if entry is not None and entry[1] is not None:
            saving = entry[1]
        else:
            saving = Saving()
            self._claim(storage, saving)
        if saving not in self._savings:
            self._savings.append(saving)
        return saving

    def _claim(self, storage: Storage, saving: Saving) -> None:
        entry = self._entry(storage)
        if entry is None or entry[1] is None:
            ref = weakref.ref(storage)
            self._known[storage._cdata] = (ref, saving)
            saving.storages.append(ref)

    # -- what is made -------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **kwargs or {})
        if self._inside:
            made = result if isinstance(result, (tuple, list)) else [result]
            self.made(t.untyped_storage() for t in made if isinstance(t, Tensor))
        self.look()
        return result
