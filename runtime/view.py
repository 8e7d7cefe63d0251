"""How a tensor looks at its storage: enough to build the same tensor again over the same bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from delta.runtime.landing import is_landing

_dispatch_keys = torch._C._dispatch_keys
_new = tuple.__new__  # a named tuple's own is a function of Python


class View(NamedTuple):
    """Geometry of a strided tensor; `size`, `stride` and `offset` count elements of `dtype`."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        keys = _dispatch_keys(tensor).raw_repr()
        bits = _bits.get(keys)
        if bits is None:
            # Asked once: to say so the tensor's own methods let go of Python's lock, and where a copy has just been
            # asked for its thread takes that (80 us on average).
            bits = _bits[keys] = tensor.is_conj(), tensor.is_neg()
        look = (tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), *bits)
        return _new(cls, look)

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor this view describes, over `storage`. Not seen by dispatch modes: no computation happens."""
        if torch._C._len_torch_dispatch_stack():  # in backward there is none as a rule
            with torch._C._DisableTorchDispatch():
                return self._over(storage)
        return self._over(storage)

    def _over(self, storage: torch.UntypedStorage) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conj:
            tensor = tensor.conj()
        if self.neg:
            tensor = torch._neg_view(tensor)
        return tensor


def is_shared(tensor: Tensor) -> bool:
    """Whether others may write the tensor's memory without PyTorch's knowledge.

    Memory that came from NumPy, a buffer or DLPack, or was given to NumPy, cannot be resized; memory shared with other
    processes says so (on CUDA any does, and it means nothing).
    """
    storage = tensor.untyped_storage()
    borrowed = not storage.resizable() and not is_landing(storage)
    return borrowed or (storage.device.type == "cpu" and storage.is_shared())


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is an ordinary strided one whose bytes are all in its storage.

    Subclasses, sparse, quantized and nested layouts, fake and functorch-wrapped tensors are left alone, and so are
    zero tensors (tangents of constants in forward AD), which have no bytes.
    """
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        return False
    keys = _dispatch_keys(tensor).raw_repr()  # which say all that is asked for here
    plain = _plain.get(keys)
    if plain is None:
        plain = _plain[keys] = _is_strided(tensor)
    return plain


_plain: dict[int, bool] = {}  # by dispatch keys
_bits: dict[int, tuple[bool, bool]] = {}  # by dispatch keys: lazily conjugated, and negated


def _is_strided(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_inference():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor():
        return False
    return tensor.device.type != "meta"
