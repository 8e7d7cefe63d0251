"""`delta.evict(trace=...)`: records steps of the program and writes each to a file (`delta.trace`).

What is recorded is the program: its own ops in forward and backward, what autograd saves and asks for, and when the
program lets go of storages. What Delta does besides (replays, copies) is left out, so a trace looks the same whether or
not something was evicted. The optimizer is left out too: a step begins with the first op on something that requires a
gradient, and is over when all that was saved in it has been let go of and backward has returned, or when a parameter is
written.

To see backward's ops, a dispatch mode has to be on the stack while backward runs, and some backward formulas (that of
`prod`, for one) compute differently then: a traced step may differ from plain PyTorch in the last bits. Without
``trace=`` nothing of this is there.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from delta.errors import TraceError
from delta.files import bare_name, check_place
from delta.runtime import cudnn
from delta.runtime.hooks import Hooks
from delta.runtime.kept import Passed
from delta.runtime.opfacts import OpFacts, facts_of
from delta.runtime.own_time import OwnTime
from delta.runtime.recompute import results_of, strip
from delta.runtime.recorder import tensors_written, without_statistics
from delta.runtime.traced_step import Saved, TracedStep
from delta.runtime.view import is_plain
from delta.trace import Evictable, Recording, Trace, write
from delta.trace.events import FREE, Bookkeeping
from delta.types import Link

if TYPE_CHECKING:
    from delta.runtime.core import Core


@dataclass(slots=True)
class Taken:
    """What has been seen and recorded so far. A block that is entered again goes on from there."""

    whole: int = 0  # steps
    recorded: int = 0
    files: list[Path] = field(default_factory=list)


class Tracer(TorchDispatchMode):
    """Traces while it is on the mode stack, below Delta's recorder, so that an op's time is its own."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let the user's torch.compile keep its compiled regions."""
        return True

    def __init__(self, core: Core, hooks: Hooks, recording: Recording, taken: Taken, link: Link) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._core = core
        self._hooks = hooks
        self._recording = recording
        self._taken = taken
        self._link = link
        self._step: TracedStep | None = None
        self.spent_ns = 0  # in calls of the program that came by here, the ops themselves included
        _check_place(recording.path)
        core.may_watch = False  # a tensor that is only watched does not tell when the program lets go of it

    @property
    def wanted(self) -> bool:
        """Whether there are steps left to record."""
        return self._taken.recorded < self._recording.steps

    @property
    def own_time(self) -> OwnTime | None:
        """Where Delta's own work for the step under way is added up."""
        return self._step.own if self._step is not None else None

    def finish(self) -> None:
        """The block ends: a step that is whole is written; if there were too few, that is told."""
        self._current(begins=False)
        self._step = None
        if self.wanted:
            given, taken = self._recording, self._taken
            wanted = f"{given.skip + given.steps}"
            if given.skip:
                wanted += f", of which the first {given.skip} are skipped"
            self._core.engine.totals.warnings.append(
                f"trace={str(given.path)!r}: {taken.recorded} of {given.steps} steps were recorded: the block ran "
                f"{taken.whole} training steps, each with its backward, and has to run {wanted}"
            )

    # -- ops ------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        began_ns = time.perf_counter_ns()
        try:
            return self._follow(func, args, kwargs or {})
        finally:
            self.spent_ns += time.perf_counter_ns() - began_ns

    def _follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.wanted or self._core.inside() or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.view:
            return func(*args, **kwargs)
        call = strip(without_statistics(args, facts.statistics_written(args)), kwargs)
        step = self._current(begins=torch.is_grad_enabled() and any(map(self._trained, call.tensors)))
        written = tensors_written(facts, (), args, kwargs)
        if step is None or self._after_backward(step, written):
            return func(*args, **kwargs)
        inputs, available = step.reads(call.tensors)
        refusals = facts.refusals(self._core.device)
        mark = self._core.op_times.clock.start()
        result = func(*args, **kwargs)
        token = self._core.op_times.clock.stop(mark)
        results = results_of(result)
        replayable = available and self._replayable(facts, args, results, refusals)
        again_ns = self._core.trials.again_ns(func, args, results) if replayable else None
        step.ran(facts.name, inputs, written, results, replayable, token, again_ns or 0)
        return result

    def _trained(self, tensor: Tensor) -> bool:
        return tensor.requires_grad and tensor.device == self._core.device.torch_device

    def _after_backward(self, step: TracedStep, written: Sequence[Tensor]) -> bool:
        """Whether an op is the optimizer's, or a metric's: what was saved for an output that is not used in the loss
        outlives backward. The step is over at the latest when a parameter is written.
        """
        if not step.backward_began or _in_backward() or torch.is_grad_enabled():
            return False
        if any(tensor.requires_grad for tensor in written):
            self._end(step)
        return True

    def _replayable(self, facts: OpFacts, args: Sequence[Any], results: Sequence[Tensor], refusals: int) -> bool:
        """Whether Delta's recorder makes a recipe for the op: in forward, and where gradients are on. `refusals` are
        those before it."""
        device = self._core.device
        may = not cudnn.refused(facts, device, refusals) and facts.replays_on(device.kind, args)
        recorded = torch.is_grad_enabled() and not _in_backward()
        return may and recorded and all(is_plain(tensor) for tensor in results)

    # -- saved tensors --------------------------------------------------------------------------------------------
    def pack(self, tensor: Tensor) -> Any:
        began_ns = time.perf_counter_ns()
        packed = self._hooks.pack(tensor)
        took_ns = time.perf_counter_ns() - began_ns
        if not self.wanted:
            return packed
        passed = type(packed) is Passed
        step = self._step if passed else self._current(begins=True)
        if step is None:
            return packed
        step.own.saves_ns += took_ns
        if passed:
            return packed
        step.own.saves += 1
        return step.save(tensor, packed)

    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is not Saved:
            return self._hooks.unpack(packed)
        step = self._current(begins=False)
        if step is not packed.step:
            return self._hooks.unpack(packed.packed)
        step.need(packed)
        began_ns, lost_ns = time.perf_counter_ns(), self._lost_ns()
        tensor = self._hooks.unpack(packed.packed)
        step.own.needs += 1
        step.own.needs_ns += time.perf_counter_ns() - began_ns - (self._lost_ns() - lost_ns)
        step.given(packed, tensor)
        return tensor

    def _lost_ns(self) -> int:
        """Time of replays and waits so far: evicting costs that, not bookkeeping."""
        return self._core.rematerialiser.spent_ns + self._core.stall_ns

    # -- steps ----------------------------------------------------------------------------------------------------
    def _current(self, begins: bool) -> TracedStep | None:
        """The step under way, up to date. One that is over ends when something happens outside of backward."""
        in_backward = _in_backward()
        if self._step is not None:
            self._step.look(in_backward)
            if self._step.over and not in_backward:
                self._end(self._step)
        if self._step is None and begins and not in_backward and self.wanted:
            self._step = TracedStep(self._core)
        return self._step

    def _own(self, step: TracedStep) -> Bookkeeping:
        """Where the host works ahead, what Delta's own work takes there says nothing of the step's time."""
        return FREE if self._core.op_times.clock.late else step.own.means()

    def _end(self, step: TracedStep) -> None:
        self._step = None
        if not step.backward_began:
            return  # an evaluation with gradients on
        taken = self._taken
        taken.whole += 1
        if taken.whole <= self._recording.skip:
            return
        path = self._recording.file(taken.recorded)
        taken.recorded += 1
        self._core.may_watch = not self.wanted
        device, name = self._core.device, bare_name(path)
        facts = {
            "torch": torch.__version__,
            "device": _title(device.torch_device),
            "threads": str(torch.get_num_threads()),
            "step": str(taken.whole),
        }
        try:
            write(Trace(name, Evictable.SAVED, step.finish(), device.kind, self._link, facts, self._own(step)), path)
        except TraceError as error:
            self._core.engine.totals.warnings.append(str(error))  # training goes on
        else:
            taken.files.append(path)


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _check_place(path: Path) -> None:
    """A path that cannot be written is told before the first step."""
    try:
        check_place(path)
    except OSError as error:
        raise TraceError(f"trace={str(path)!r}: cannot be written: {error.strerror}") from error
