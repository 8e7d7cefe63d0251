"""The mechanism's side of a record: its storage, its host block, its transfers, its recipe."""

from __future__ import annotations

import weakref

import torch

from delta.runtime.device.base import HostBlock, Ticket
from delta.runtime.recompute import Recipe


class StorageRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a storage that knows which record it belongs to."""

    __slots__ = ("key", "record")
    key: int
    record: int


class Slot:
    """The mechanism's side of a record."""

    __slots__ = ("block", "coming", "going", "recipe", "ref", "storage")

    def __init__(self, ref: StorageRef | None) -> None:
        self.ref = ref
        self.storage: torch.UntypedStorage | None = None  # Delta's own reference, while the record is held
        self.block: HostBlock | None = None
        self.going: Ticket | None = None
        self.coming: Ticket | None = None
        self.recipe: Recipe | None = None

    def alive(self) -> torch.UntypedStorage | None:
        """The storage, if anybody still has it."""
        if self.storage is not None:
            return self.storage
        storage: torch.UntypedStorage | None = self.ref() if self.ref is not None else None
        return storage
