"""What lies above the recorder while an op is replayed: dispatch modes and transforms, out of the way for that time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode

_NOTHING_ABOVE = nullcontext()


def only_lowest(depth: int) -> AbstractContextManager[None]:
    """Take off the modes above the lowest `depth` and all transforms, and put them back.

    The recorder saw what the program's own modes above it had made of an op; to them a replay is none of the program's
    ops, which they would change, or count, once more. And a transform under which backward runs (gradients of a batch
    at once, by vmap) has nothing to do with forward: it would refuse to draw random numbers.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    nesting = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if not transformed and not nesting and torch._C._len_torch_dispatch_stack() <= depth:
        return _NOTHING_ABOVE
    return _out_of_the_way(depth, transformed, nesting)


@contextmanager
def _out_of_the_way(depth: int, transformed: bool, nesting: int) -> Iterator[None]:
    above: list[TorchDispatchMode] = []
    while torch._C._len_torch_dispatch_stack() > depth:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    try:
        with _outside_of_vmap(nesting), temporarily_clear_interpreter_stack() if transformed else nullcontext():
            yield
    finally:
        for mode in reversed(above):
            torch._C._push_on_torch_dispatch_stack(mode)


@contextmanager
def _outside_of_vmap(nesting: int) -> Iterator[None]:
    """Leave the vmap that `autograd.grad(is_grads_batched=True)` and gradcheck use, which is not one of functorch's."""
    for _ in range(nesting):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(nesting):
            torch._C._vmapmode_increment_nesting()
