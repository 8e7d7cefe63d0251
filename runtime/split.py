"""The backward of a convolution in two parts, with its input let go of in between.

Autograd's node computes all gradients of a convolution in one call, so the input lies beside its own gradient, which is
as large. Only the weight's gradient reads the input. MONeT (ICLR 2021, operator optimisation) therefore computes that
one first; aten's op takes a mask of what is wanted, so it can be called once for each, with the same bits.

A dispatch mode that lies on the stack for this one node comes between. The rule that backward sees no mode is there for
formulas that look for one; that of a convolution does not. Only what nobody can ask for again is let go of: the graph
is not kept, this node's handle is the last one, and no other tensor is on the storage.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from delta.runtime.asker import asks_alone
from delta.runtime.rawmem import sole_owner, tensor_at

if TYPE_CHECKING:
    from delta.runtime.handle import Handle
    from delta.runtime.kept import KeptTensor
    from delta.runtime.note import NotedTensor

_NODE = "ConvolutionBackward0"
_OP = torch.ops.aten.convolution_backward.default
# Their kernels for the input's gradient take its sizes. ATen's own dilated ones cut it into views, and those for groups
# look at addresses; what PyTorch has no name for (oneDNN's transposed ones) cannot be told from others.
_KERNELS = {
    getattr(torch._C._ConvBackend, name)  # type: ignore[attr-defined]
    for name in ("Mkldnn", "Cudnn", "CudnnTranspose", "Slow2d", "Slow3d", "SlowTranspose2d", "SlowTranspose3d")
}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _one_name() -> int:
    """What `sys.getrefcount` says of a storage with one name: a program may keep a storage without a tensor."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_ONE_NAME = _one_name()


def may_split() -> bool:
    """Whether the saved tensor that is being unpacked is for the backward of a convolution, and for the last time."""
    return asks_alone(_NODE) and not torch._C._autograd._get_current_graph_task_keep_graph()


def split(handle: Handle | KeptTensor | NotedTensor, given: Tensor) -> None:
    """To be called last before `given`, the value of `handle`, goes to the node: the node's call will be split."""
    torch._C._push_on_torch_dispatch_stack(_Split(handle, given.untyped_storage()._cdata))


class _Split(TorchDispatchMode):
    """Autograd puts the stack back when the node has ended, so nobody takes this mode off. While it does, the stack is
    empty and the dispatcher takes it not to be, and no op can run: a handle must not die then.
    """

    def __init__(self, handle: Handle | KeptTensor | NotedTensor, key: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = weakref.ref(handle)  # its node has it until the gradients have been computed
        self._key = key

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _OP or not self._suits(args):
            return func(*args, **(kwargs or {}))
        *before, mask = args
        _, of_weight, of_bias = func(*before, [False, *mask[1:]])
        self._let_go(args[1])
        of_input, _, _ = func(*before, [True, False, False])
        return of_input, of_weight, of_bias

    def _suits(self, args: Sequence[Any]) -> bool:
        """Whether both gradients are wanted, and the input is the value that was given."""
        _, value, *_, mask = args
        return bool(mask[0] and mask[1]) and value.untyped_storage()._cdata == self._key and reads_no_input(args)

    def _let_go(self, value: Tensor) -> None:
        """Empty the input's storage, if nobody else has it."""
        handle = self._handle()
        assert handle is not None
        core = handle.core
        handle.done()
        storage = value.untyped_storage()
        if sys.getrefcount(storage) == _ONE_NAME and sole_owner(storage, tensors=1):
            with core.lock:  # as in `Noted.pack`
                core.device.release(storage, tensors=1)
            _put_off(value, storage)
            core.storages.emptied(storage)


def _put_off(value: Tensor, storage: torch.UntypedStorage) -> None:
    """Leave the tensor, which the node in C++ has, without bytes: its storage is emptied, or, where that cannot be
    resized (`delta.runtime.landing`), the tensor is put on another one, so that it goes with its last name."""
    if storage.resizable():
        storage.resize_(0)
        return
    nowhere = tensor_at(0, storage.nbytes()).untyped_storage()
    empty = torch.empty(0, dtype=value.dtype, device="cpu")
    value.data = empty.set_(nowhere, value.storage_offset(), value.size(), value.stride())


def reads_no_input(args: Sequence[Any]) -> bool:
    """Whether a call of `convolution_backward` with these arguments that is asked for the input's gradient alone reads
    nothing of the input but its layout.

    Not where the input is brought into another memory format first, and not where its rows are made a picture of one
    line (1d): nobody makes a view of an empty storage.
    """
    _, value, weight, _, *how, groups, _ = args
    last = _FORMATS.get(value.dim())
    if groups != 1 or last is None:
        return False
    alike = any(
        value.is_contiguous(memory_format=each) and weight.is_contiguous(memory_format=each)
        for each in (torch.contiguous_format, last)
    )
    return alike and torch._C._select_conv_backend(value, weight, None, *how, groups) in _KERNELS
