"""Gets along with `torch.compile`: Delta is not compiled itself, and hears of what compiled code writes.

Compiled kernels write below the dispatcher, where the recorder sees nothing. Before a graph of `torch.compile` runs,
the version of each input that it will write in place is increased, because autograd needs that. It is the one sign of
such a write, and it comes early enough to keep the old value for the recipes that read it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo import convert_frame, eval_frame, trace_rules
from torch._dynamo.callback import callback_handler

from delta.runtime.view import is_plain

if TYPE_CHECKING:
    from delta.runtime.core import Core


# Dynamo passes over Delta's own code, which it meets in hooks that run in the midst of a compiled function. Importing
# it costs nothing in the end: every optimiser does it when it is made, and a dispatch mode at its first op.
trace_rules.add("delta")

F = TypeVar("F", bound=Callable[..., object])


def never_compiled(function: F) -> F:
    """The same function: Dynamo leaves it and all that it calls alone. PyTorch puts a wrapper around the method of a
    dispatch mode to that end, which takes a quarter of what a mode that does nothing costs an op."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def compiled_calls() -> int:
    """How many functions that `torch.compile` made are running on this thread, one inside the other."""
    calls, frame = 0, sys._getframe(1).f_back
    while frame is not None:
        code = frame.f_code
        calls += code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__
        frame = frame.f_back
    return calls


@contextmanager
def heard_of_compilation(call: Callable[[], None]) -> Iterator[None]:
    """While entered, `call` is made whenever `torch.compile` is about to compile something, and at once if it has."""
    if convert_frame.output_codes.seen_ids:
        call()
    told = callback_handler.register_start_callback(lambda _: call())
    try:
        yield
    finally:
        with suppress(ValueError):  # Dynamo may have been reset
            callback_handler.remove_start_callback(told)


class AnnouncedWrites:
    """While entered, `core` hears of tensors whose version is increased by hand."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __enter__(self) -> AnnouncedWrites:
        self._increment = torch._C._increment_version
        torch._C._increment_version = self._announced
        return self

    def __exit__(self, *exc: object) -> None:
        torch._C._increment_version = self._increment

    def _announced(self, tensors: Iterable[Tensor]) -> None:
        written = tuple(tensors)
        core = self._core
        if not core.passes:
            with core:
                plain = [tensor for tensor in written if is_plain(tensor)]
                preserved = core.writes.begin(plain)
                core.writes.settle(core.writes.end(plain, preserved))
        self._increment(written)
