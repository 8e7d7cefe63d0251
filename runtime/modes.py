"""The stack of dispatch modes while an op is replayed: as it was below the recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def only_lowest(depth: int) -> Iterator[None]:
    """Take off the modes above the lowest `depth`, and put them back.

    The recorder saw what the program's own modes above it had made of an op; to them a replay is none of the program's
    ops, which they would change, or count, once more.
    """
    above: list[TorchDispatchMode] = []
    while torch._C._len_torch_dispatch_stack() > depth:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    try:
        yield
    finally:
        for mode in reversed(above):
            torch._C._push_on_torch_dispatch_stack(mode)
