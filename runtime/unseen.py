"""Backward without the recorder, where nobody has to see its ops; what the program's own code does there is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from delta.runtime.core import Core
from delta.runtime.recorder import Recorder
from delta.runtime.view import is_plain


class UnseenBackward:
    """The backward that runs without `recorder`, if one is under way."""

    def __init__(self, recorder: Recorder, core: Core) -> None:
        self._recorder, self._core = recorder, core
        self.under_way = False
        self._written: tuple[Sequence[Tensor], set[int]] | None = None  # what an optimizer is at work on, as it began

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The recorder, which is on top of the stack, is off while entered."""
        self._core.device.enforce(False)  # nobody hears of an op that finds no memory
        torch._C._pop_torch_dispatch_stack(None)
        self.under_way = True
        try:
            with self._hooks_seen():
                yield
        finally:
            self.under_way = False
            torch._C._push_on_torch_dispatch_stack(self._recorder)
            self.writes_ended()  # of one that failed midway, and backward with it

    def writes_begin(self, tensors: Sequence[Tensor]) -> None:
        """Nobody sees the ops that are about to write into these."""
        written = [tensor for tensor in tensors if is_plain(tensor)]
        with self._core:
            self._written = written, self._core.writes.begin(written)

    def writes_ended(self) -> None:
        """They have run, if any began."""
        if self._written is None:
            return
        (written, preserved), self._written = self._written, None
        with self._core:
            self._core.writes.settle(self._core.writes.end(written, preserved))

    @contextmanager
    def _hooks_seen(self) -> Iterator[None]:
        """The recorder is on while a parameter's hook runs, which may write in one step and not in another."""
        replaced = []
        for hooks in self._core.persistent.hooks():
            for key, hook in list(hooks.items()):
                hooks[key] = seen = self._seen(hook)
                replaced.append((hooks, key, hook, seen))
        try:
            yield
        finally:
            for hooks, key, hook, seen in replaced:
                if hooks.get(key) is seen:  # else the program has taken it off
                    hooks[key] = hook

    def _seen(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, with the recorder on."""

        def seen(*args: Any) -> Any:
            if self._recorder in _get_current_dispatch_mode_stack():  # it has called a backward of its own
                return hook(*args)
            under_way, self.under_way = self.under_way, False
            torch._C._push_on_torch_dispatch_stack(self._recorder)
            try:
                return hook(*args)
            finally:
                torch._C._pop_torch_dispatch_stack(None)
                self.under_way = under_way

        return seen
