"""Puts recorder and tracer on the dispatch mode stack, and takes them off where nobody has to see what runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from delta.runtime.asker import runs_the_program_s_code
from delta.runtime.compiled import compiled_calls
from delta.runtime.core import Core
from delta.runtime.recorder import Recorder
from delta.runtime.sharded import may_be_sharded
from delta.runtime.tracer import Tracer
from delta.runtime.unseen import UnseenBackward


class Switch:
    """Puts tracer and recorder on the mode stack and takes them off, only where the stack is as the block found it.

    The stack is one of the thread that entered the block, while optimizers tell of themselves in every thread: what
    another one does (a second model, trained beside the block) turns nothing.

    In between another mode of the user's may lie above ours, and leaving a mode takes off whatever is on top. And a
    compiled function, when it returns, puts back the dispatch keys of the time it was called: a mode put on meanwhile
    would see nothing from then on, and one taken off would be missed.
    """

    def __init__(self, recorder: Recorder, core: Core, tracer: Tracer | None) -> None:
        self._recorder, self._core, self._tracer = recorder, core, tracer
        self._thread = threading.get_ident()
        self._depth = core.modes_below = torch._C._len_torch_dispatch_stack()
        self._compiled_calls = compiled_calls()
        self._compiles = False  # something has been compiled in this process
        self._on: list[TorchDispatchMode] = []  # the last one on top
        self._held_off = False
        self._unseen = UnseenBackward(recorder, core)

    def follow(self, caller: FrameType | None = None) -> None:
        """Do as the engine and the tracer want, if the stack allows it now. `caller`: of the op in the middle of which
        this is."""
        if self._core.passes or self._elsewhere():
            return
        recorded = self._recorder in self._on
        learner = self._core.engine.learner
        as_planned = learner.routine is not None and learner.packs >= 2 and self._core.may_watch
        if not self._on or not as_planned:  # else it is as it was at the first save
            self._follow(self._wanted())
        if caller is not None and not recorded and self._recorder in self._on:
            self._recorder.put_on_within(caller)
        if torch._C._current_graph_task_id() == -1:
            heard = self._recorder in self._on and not self._compiles and not may_be_sharded()
            self._core.device.enforce(heard)

    def compiles(self) -> None:
        """Code is compiled. Nobody hears of what that finds no memory for, as of weights that FSDP gathers."""
        self._compiles = True
        self._core.stretches.forbid()
        if not self._core.passes:
            self._core.device.enforce(False)

    def optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer has a dozen ops for each parameter, all in place: with nothing recorded that they could spoil,
        nobody has to see them. A closure is forward and backward once more, and they have to be seen."""
        if self._core.passes or self._elsewhere():
            return
        if self._unseen.under_way:
            self._unseen.writes_begin([tensor for group in optimizer.param_groups for tensor in group["params"]])
        traced = self._tracer is not None and self._tracer.wanted
        if traced or self._core.engine.minds_writes or self._core.noted.any:
            return
        if not any(callable(given) for given in (*args[1:], *kwargs.values())):
            self._follow([])

    def optimizer_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What comes next may be recorded again."""
        if self._core.passes or self._elsewhere():
            return
        self._unseen.writes_ended()
        self.follow()

    def _elsewhere(self) -> bool:
        """Whether this is a thread of the program's other than the block's. Those of autograd are none of it: backward,
        and an optimizer that steps within it, may run there with what the block's thread has on its stack."""
        return threading.get_ident() != self._thread and torch._C._current_graph_task_id() == -1

    def _follow(self, wanted: list[TorchDispatchMode]) -> None:
        if wanted == self._on or torch._C._current_graph_task_id() != -1:
            return
        if torch._C._len_torch_dispatch_stack() != self._depth + len(self._on):
            return
        if compiled_calls() != self._compiled_calls:
            return
        self._turn(wanted)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """While entered, memory is looked at when backward begins, which runs without the recorder where nobody has to
        see its ops.

        Half of a step's ops and more are those of backward, and the way to a dispatch mode and back costs each of them
        something: one that does nothing takes about 2 % of a step on a CPU, three quarters of it there.
        The stack is captured when backward begins, so the recorder has to be off by then.
        """
        autograd: Any = torch.autograd  # PyTorch, too, puts another function into this place while it traces a step
        run = autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if not self._elsewhere():  # else it may be of another model
                self._core.stretches.end()
            if self._core.passes:
                return run(*args, **kwargs)
            self._core.gauge.sample_bytes()
            with self._unseen.entered() if self._needs_no_eye() else nullcontext():
                return run(*args, **kwargs)

        autograd._engine_run_backward = run_backward
        try:
            yield
        finally:
            autograd._engine_run_backward = run

    def _needs_no_eye(self) -> bool:
        """Whether the backward that begins writes into nothing that is needed still, as far as anybody can tell."""
        if self._on != [self._recorder] or _get_current_dispatch_mode() is not self._recorder:
            return False
        return not self._core.engine.minds_backward

    def step_aside(self) -> None:
        """In backward: take the recorder off for the rest of the node that is running. So nobody hears there of an op
        that finds no memory, and none is refused any for the budget's sake.

        Some backward formulas (that of `prod`, for one) compute differently while any dispatch mode is on the stack, so
        plain PyTorch's bits need an empty one. Autograd puts the stack back when the node has ended. Functions written
        in Python are no such formulas: they run the program's own code, which may write, and that has to be seen.
        """
        self._recorder.put_on_between()
        self._core.stretches.end()  # if that is in a thread where nobody knew whose backward it is
        if torch._C._len_torch_dispatch_stack() == self._depth or torch._C._current_graph_task_id() == -1:
            return
        if self._recorder not in self._on:
            return
        self._core.device.enforce(False)
        if runs_the_program_s_code():
            return
        if _get_current_dispatch_mode() is self._recorder:
            torch._C._pop_torch_dispatch_stack(None)

    def off(self) -> None:
        self._turn([])

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Off, whatever is asked for meanwhile; afterwards as the engine and the tracer want."""
        self._held_off = True
        self.off()
        try:
            yield
        finally:
            self._held_off = False
            self.follow()

    def _wanted(self) -> list[TorchDispatchMode]:
        if self._held_off:
            return []
        if self._tracer is not None and self._tracer.wanted:
            return [self._tracer, self._recorder]  # a trace tells what recording takes
        return [self._recorder] if self._core.engine.wants_recorder else []

    def _turn(self, wanted: list[TorchDispatchMode]) -> None:
        self._core.stretches.end()
        recorded = self._recorder in self._on
        if self._recorder not in wanted:
            self._recorder.put_on_between()
            self._core.device.enforce(False)  # nobody hears of an op that finds no memory
        while self._on:
            self._on.pop().__exit__(None, None, None)
        for mode in wanted:
            mode.__enter__()
            self._on.append(mode)
        if recorded is not (self._recorder in wanted):
            self._core.engine.recording(not recorded)
