"""The mechanism's side of a record: its storage, its smaller form, its host block, its transfers, its recipe."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from delta.runtime.codecs import Codec, Form
from delta.runtime.device.base import HostBlock, Ticket
from delta.runtime.recompute import Recipe


class StorageRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a storage that knows which record it belongs to."""

    __slots__ = ("key", "record")
    key: int
    record: int


class Slot:
    """The mechanism's side of a record."""

    __slots__ = ("block", "codec", "coming", "form", "going", "recipe", "ref", "seen", "storage", "version")

    def __init__(self, ref: StorageRef | None) -> None:
        self.ref = ref
        self.storage: torch.UntypedStorage | None = None  # Delta's own reference, while the record is held
        self.codec: Codec | None = None
        self.form: Form | None = None  # the encoded storage, or the stand-in, in place of the storage
        self.block: HostBlock | None = None
        self.going: Ticket | None = None
        self.coming: Ticket | None = None
        self.recipe: Recipe | None = None
        self.seen: weakref.ref[Tensor] | None = None  # a tensor on the storage, at this version when a recipe read it
        self.version = 0

    def alive(self) -> torch.UntypedStorage | None:
        """The storage, if anybody still has it."""
        if self.storage is not None:
            return self.storage
        storage: torch.UntypedStorage | None = self.ref() if self.ref is not None else None
        return storage

    def look_at(self, tensor: Tensor) -> None:
        """From here on, writes that nobody tells of show in the tensor's version counter."""
        base = tensor._base  # a view dies soon, and counts on its base
        self.seen = weakref.ref(tensor if base is None else base)
        self.version = tensor._version

    @property
    def written_unseen(self) -> bool:
        """Whether the bytes may be others than those of the recorded version."""
        tensor = self.seen() if self.seen is not None else None
        if tensor is None or tensor._version == self.version:
            return False
        return self.ref is None or tensor.untyped_storage()._cdata == self.ref.key  # else it has moved on to another
