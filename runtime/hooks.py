"""What autograd gets in place of a saved tensor.

`pack` gives back a `Handle`, which knows the record and how the tensor looks at it; a `Watched` or `KeptTensor`, which
is the tensor itself in a step that fits, and in a planned one that keeps it; or a `Passed`, the tensor itself where
Delta leaves it alone. With hooks installed autograd no longer checks for changes in place; all keep the version the
tensor was saved at and raise autograd's own complaint (rule 3). A handle keeps the tensor's version counter without its
bytes, and what it unpacks counts on it: a backward that writes into what it saved is noticed by the next one that reads
it.

Aliases are made before a copy is asked for. The thread that does it waits for Python's lock from then on, and would
take its turn at the first call that lets go of that, with the program waiting (docs/design.md, section 9).
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta.errors import DeltaError, StorageModifiedError
from delta.runtime.handle import LET_GO, Handle
from delta.runtime.kept import KeptTensor, Passed, look_of, signature_of, structure_of
from delta.runtime.note import NotedTensor
from delta.runtime.split import may_split, split
from delta.runtime.versions import counter_of, over
from delta.runtime.view import View, is_plain
from delta.runtime.watch import Watched

if TYPE_CHECKING:
    from delta.runtime.core import Core


class Hooks:
    """The pair of functions for `torch.autograd.graph.saved_tensors_hooks`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._device, self._persistent = core.device.torch_device, core.persistent
        self._watch, self._step_ends = core.watch, core.engine.step_ends
        self._elsewhere: torch.device | None = None  # where a tensor was saved that is not looked after

    def pack(self, tensor: Tensor) -> Handle | Watched | KeptTensor | NotedTensor | Passed:
        core = self._core
        storage = self._wanted(tensor)
        if storage is None:
            return Passed(tensor)
        if self._step_ends.needed:
            core.forward_again()
        watch = self._watch
        if watch.count or core.watching():  # nothing is called here that need not be: each call is felt in small steps
            watched = watch.pack(tensor, storage)
            if watch.count == 1:
                core.at_pack(sys._getframe().f_back)
            if watch.doubtful and core.watched_too_much(tensor):
                self._take_over(sys._getframe().f_back)
                core.raise_warnings()
            return watched
        nbytes = storage.nbytes()
        by_structure = core.engine.learner.by_structure
        signature = structure_of(tensor) if by_structure else signature_of(tensor, nbytes)
        if (kept := core.kept.pack(tensor, nbytes, signature)) is not None:
            return kept
        handle = self._handle(tensor, tensor._version, nbytes, signature)
        core.at_pack(sys._getframe().f_back)
        core.raise_warnings()
        return handle

    def _handle(
        self, tensor: Tensor, version: int, nbytes: int, signature: int, uncounted_bytes: int | None = None
    ) -> Handle:
        core = self._core
        stays = core.engine.stays(nbytes)
        look = look_of(tensor)
        view, counter = View.of(tensor), counter_of(tensor)
        with core:
            record = core.saved(tensor, signature, look, stays, uncounted_bytes)
        return Handle(core, record, view, counter, version, stays)

    def _take_over(self, caller: FrameType | None) -> None:
        """What was only watched so far does not fit: look after it from here on. One that cannot be taken over, and
        those behind it, keep their tensors. `caller`: of the op that saves; None in a thread of autograd's."""
        all_watched = self._core.watch.hand_over()
        left_bytes = {key: nbytes for key, nbytes, _ in (watched.saved for watched in all_watched)}
        uncounted_bytes = sum(left_bytes.values())
        for watched in all_watched:
            tensor = watched.tensor
            assert tensor is not None
            nbytes = tensor.untyped_storage().nbytes()
            signature = signature_of(tensor, nbytes)
            watched.taken = self._handle(tensor, watched.version, nbytes, signature, uncounted_bytes)
            uncounted_bytes -= left_bytes.pop(watched.saved[0], 0)
            watched.tensor = None
            del tensor
        self._core.at_pack(caller)

    def unpack(self, packed: Handle | Watched | KeptTensor | NotedTensor | Passed) -> Tensor:
        if type(packed) is Handle:
            return self._handled(packed)
        if type(packed) is Passed:
            return self._passed(packed)
        if type(packed) is Watched and (tensor := packed.tensor) is not None:
            return self._watched(packed, tensor)
        if type(packed) is KeptTensor and packed.taken is None:
            return self._kept(packed)
        if type(packed) is NotedTensor and packed.taken is None and (found := self._noted(packed)) is not None:
            return _for_its_node(packed, found)
        assert packed.taken is not None
        return self._handled(packed.taken)

    def _watched(self, packed: Watched, tensor: Tensor) -> Tensor:
        _, _, stretch = packed.saved
        if not self._step_ends.needed or stretch != self._step_ends.stretch:
            self._watch.need(stretch)
        return _unchanged(tensor, packed.version)

    def _passed(self, packed: Passed) -> Tensor:
        if self._elsewhere is not None:
            if self.all_elsewhere is not None:
                self._core.engine.totals.warn("elsewhere", self.all_elsewhere)
                self._core.raise_warnings()
            self._elsewhere = None
        return _unchanged(packed.tensor, packed.version)

    def _handled(self, packed: Handle) -> Tensor:
        if packed.is_done:
            raise DeltaError(LET_GO)
        if packed.counter._version != packed.version:
            raise _modified(packed.view.dtype, packed.view.size, packed.counter._version, packed.version)
        core = packed.core
        core.at_unpack()
        if packed.stays:
            return over(packed.counter, packed.view.over(core.fetch_small(packed.record)))
        with core:
            found = core.fetch(packed)
        core.raise_warnings()
        return _for_its_node(packed, found)

    def _kept(self, packed: KeptTensor) -> Tensor:
        if packed.tensor is None:
            raise DeltaError(LET_GO)
        tensor, core = _unchanged(packed.tensor, packed.version), packed.core
        core.at_unpack()
        core.kept.need(packed)
        return tensor if packed.stays else _for_its_node(packed, tensor)

    def _noted(self, packed: NotedTensor) -> Tensor | None:
        """Its value; None if it has a handle by now."""
        core = packed.core
        core.at_unpack()
        with core:
            made, kept = packed.made, packed.kept
            if packed.taken is not None:
                return None
            if made is None or kept is None:
                raise DeltaError(LET_GO)
            if made.value is not None:
                _unchanged(made.value, made.value_version)
            elif (tensor := made.tensor()) is not None:
                _unchanged(tensor, packed.version)
            found = core.noted.fetch(packed, made, kept)
        core.raise_warnings()
        return found

    @property
    def all_elsewhere(self) -> str | None:
        """What to tell the user if autograd has saved tensors, but none on the device that is looked after."""
        core = self._core
        if self._elsewhere is None or core.engine.totals.steps or core.watch.count or core.engine.learner.in_step:
            return None
        return (
            f"autograd saves its tensors on {self._elsewhere}, and none on {core.device.torch_device}, where this "
            f'block looks, so nothing was evicted: give device="{self._elsewhere}", or model='
        )

    def _wanted(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The storage of an activation; None for what is none of Delta's business."""
        if not is_plain(tensor) or self._core.passes:
            return None
        if tensor.device != self._device:
            if tensor.numel() and tensor.dim():
                self._elsewhere = tensor.device
            return None
        storage = tensor.untyped_storage()
        if self._persistent.holds_storage(tensor, storage, saved=True):
            return None
        numel = tensor.numel()
        return storage if numel > 1 or (numel == 1 and tensor.dtype is not torch.bool) else None


def _for_its_node(packed: Handle | KeptTensor | NotedTensor, tensor: Tensor) -> Tensor:
    """The value, for which the node's call may be split."""
    if packed.core.engine.policy.splits(tensor.untyped_storage().nbytes()) and may_split():
        split(packed, tensor)
    return tensor


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    if version >= 0 and tensor._version != version:
        raise _modified(tensor.dtype, tuple(tensor.size()), tensor._version, version)
    return tensor


def _modified(dtype: torch.dtype, size: tuple[int, ...], now: int, expected: int) -> StorageModifiedError:
    return StorageModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {now}; expected version {expected} instead. "
        "Hint: find the operation that changes it between forward and backward, and use its out-of-place form."
    )
