"""Version counters: PyTorch counts the writes into a tensor, and all views of it share the count.

An alias whose data has been replaced still shares the counter. So a count can be kept without the bytes, and other
bytes can be put under it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

_VIEWS = torch._C.DispatchKey.ADInplaceOrView  # where aliases get the counter of their base


_increment = torch._C._increment_version  # while a block is open another one stands there (`AnnouncedWrites`)


def count_write(tensors: Iterable[Tensor]) -> None:
    """Somebody has written into these."""
    _increment(tensors)


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor without bytes that counts the writes into `tensor`."""
    return over(tensor, _nothing(tensor.device))


def over(counter: Tensor, data: Tensor) -> Tensor:
    """`data` as a tensor whose writes count on `counter`."""
    if torch._C._len_torch_dispatch_stack():
        with torch._C._DisableTorchDispatch():
            return _over(counter, data)
    return _over(counter, data)


def _over(counter: Tensor, data: Tensor) -> Tensor:
    alias = counter.detach()
    alias.data = data
    return alias


def within_op() -> AbstractContextManager[None]:
    """While an op is being dispatched, what is detached counts for itself; in here it shares its counter as ever."""
    guard: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(_VIEWS, False)
    return guard


def without_graph(tensor: Tensor) -> Tensor:
    """The tensor without the node that made it, which may be the one that saves it: neither would ever die."""
    return tensor if tensor.is_leaf else alias_of(tensor)


def alias_of(tensor: Tensor) -> Tensor:
    """Another tensor on the same storage: it stays there, should the first be given other data."""
    if type(tensor) not in (Tensor, Parameter) or not torch._C._len_torch_dispatch_stack():
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)
