"""`delta.evict`: wires policy, budget, engine, device, hooks, recorder and daemon together; nothing else."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from delta.budget import Budget
from delta.config import Policy
from delta.engine import Engine
from delta.errors import BudgetError, NestedSessionError
from delta.policies.loader import load
from delta.report import Report
from delta.runtime.addresses import DeviceAddresses
from delta.runtime.compiled import AnnouncedWrites, compiled_calls
from delta.runtime.core import Core
from delta.runtime.daemon import Daemon
from delta.runtime.device import Device, make_device
from delta.runtime.hooks import Hooks
from delta.runtime.modules import ModuleNames
from delta.runtime.own_time import TimedRecorder
from delta.runtime.persistent import Persistent
from delta.runtime.recorder import Recorder
from delta.runtime.replicas import no_replicas
from delta.runtime.settle import settle_kernels
from delta.runtime.tracer import Tracer
from delta.timeline import Timeline
from delta.trace import Recording
from delta.types import Link
from delta.units import Bytes, Share, parse_size

SAMPLE_S = 0.05
# What a copy takes from compute beside the part of its time that the device tells of. On a card it is the host's time,
# which counts where the host is behind: an eviction and a return each take it about a tenth of a millisecond, and plans
# with hundreds of them put it there. An estimate: no card has told.
COPY_NS = {"cpu": 0, "chaos": 0, "cuda": 50_000}
# What torch.func answers to hooks asks the user to report it to PyTorch; it says nothing of Delta.
_HOOKS_REFUSED = (
    "delta.evict works through saved-tensor hooks, under which torch.func.{grad, vjp, jacrev, hessian} do not run: use "
    "torch.autograd.grad or torch.autograd.functional, give the function that calls the transform to torch.compile, or "
    "run it outside of the block"
)

_open_session: weakref.ref[evict] | None = None
_open_lock = threading.Lock()


class evict(ContextDecorator):
    """Keep the saved activations of everything trained inside the block under a budget.

    ``budget``: device bytes the process may use in all (``8_000_000_000``, ``"8GiB"``, ``"60%"`` of the device).
    ``activations``: bytes of saved activations that may be resident (``"2GiB"``, or ``"40%"`` of what the step would
    hold if nothing were evicted). Give one of them, or neither to watch and report only. ``policy``: a shipped name, a
    path to a YAML file, or a `delta.Policy`. ``model``: optional; names modules in rules. ``timeline``: a file for the
    events of the run. ``trace``: a file for the first step as a trace, or a `delta.trace.Recording` of other steps.
    ``device``: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; by default the model's, else the current CUDA device, else the CPU.

    Usable as a decorator and one block after the other, not nested. A backward after the block has ended still works.

    Raises BudgetError (budget unreadable, or given twice), PolicyError, SwapError (spill directory), TimelineError,
    TraceError, NestedSessionError.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        budget: int | str | Bytes | Share | None = None,
        activations: int | str | Bytes | Share | None = None,
        policy: str | os.PathLike[str] | Policy = "delta",
        timeline: str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | Recording | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if budget is not None and activations is not None:
            raise BudgetError(
                f"budget={budget!r} and activations={activations!r} were both given; give one: budget= for all device "
                "bytes of the process, activations= for the bytes of saved activations"
            )
        self.policy = policy if isinstance(policy, Policy) else load(policy)
        self._budget = None if budget is None else parse_size(budget, what="budget")
        self._activations = None if activations is None else parse_size(activations, what="activations")
        self._model = weakref.ref(model) if model is not None else None
        self._timeline = timeline
        self._trace = Recording(Path(trace)) if isinstance(trace, str | os.PathLike) else trace
        self._device_name = device if device is not None else _device_of(model)
        self._core: Core | None = None
        self._stack: ExitStack | None = None
        self._tracer: Tracer | None = None
        self._switch: _Switch | None = None
        self._hooks: Hooks | None = None

    # -- the block ------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        _claim(self)
        try:
            with ExitStack() as stack:
                stack.callback(_give_up, self)
                self._open(stack)
                self._stack = stack.pop_all()
        except BaseException:
            self._stack = None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        elsewhere = self._hooks.all_elsewhere if self._hooks is not None else None
        stack.close()
        if error is not None and elsewhere is not None:
            error.add_note(elsewhere)
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            error.add_note(_HOOKS_REFUSED)
        if self._core is not None and kind is None:
            self._core.raise_warnings()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Between two steps of an open block: what runs in here is plain PyTorch, with no hooks and no recorder, and
        the block learns nothing of it. To compare both within one process."""
        assert self._switch is not None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert hooks is not None
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with self._switch.held_off():
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    @property
    def traces(self) -> tuple[Path, ...]:
        """The files of the steps recorded so far."""
        return tuple(self._tracer.files) if self._tracer is not None else ()

    def report(self) -> Report:
        """What the run did so far, or in all once the block has ended."""
        core = self._core
        if core is None:
            return Report(policy=self.policy.name, device=str(self._device_name or ""))
        with core.entered():
            totals, engine = core.engine.totals, core.engine
            return Report(
                policy=self.policy.name,
                device=core.device.kind,
                steps=totals.steps,
                modes=dict(totals.modes),
                peak_activation_bytes=max(totals.peak_bytes, engine.step_peak_bytes, core.watch.peak_bytes),
                unevicted_peak_activation_bytes=max(
                    totals.unevicted_peak_bytes, engine.step_unevicted_peak_bytes, core.watch.peak_bytes
                ),
                peak_device_bytes=core.peak_device_bytes,
                budget_bytes=engine.told_budget_bytes,
                swapped_out_bytes=totals.swapped_out_bytes,
                swapped_in_bytes=totals.swapped_in_bytes,
                recomputed_bytes=totals.recomputed_bytes,
                encoded_bytes_saved=totals.encoded_bytes,
                recompute_ns=core.rematerialiser.spent_ns,
                stall_ns=core.stall_ns,
                overhead_ns=core.overhead_ns,
                oom_rescues=core.oom_rescues,
                evictions=dict(totals.evictions),
                plans=dict(totals.plans),
                longest_plan_ns=dict(totals.longest_plan_ns),
                warnings=tuple(totals.warnings),
            )

    # -- wiring ---------------------------------------------------------------------------------------------------
    def _open(self, stack: ExitStack) -> None:
        settle_kernels()
        model = self._model() if self._model is not None else None
        device = make_device(self._device_name, self.policy.host)
        undo = stack.enter_context(ExitStack())
        undo.callback(device.close)
        budget = self._limit(device)
        timeline = Timeline(self._timeline, self._header(device))
        undo.callback(timeline.close)
        addresses = self._addresses(device)
        link = _link(device, budget)
        engine = Engine(self.policy, budget, link, layout=addresses, clock=time.perf_counter_ns)
        core = Core(engine, device, Persistent(model), timeline)
        if addresses is not None:
            addresses.follow(core.slots)
        undo.pop_all()  # from here on the core closes them, when the last handle has died
        self._core = core
        stack.callback(core.close)
        if budget.device_bytes is not None:
            device.cap(budget.device_bytes)
            stack.callback(device.cap, None)
        daemon = Daemon(core.sample, SAMPLE_S, "delta-daemon")
        daemon.start()
        stack.callback(daemon.stop)
        if model is not None and (timeline.active or any(rule.module for rule in self.policy.rules)):
            stack.enter_context(ModuleNames(core, model))
        stack.enter_context(AnnouncedWrites(core))
        stack.enter_context(core.persistent.new_modules())
        stack.enter_context(no_replicas())
        self._hooks = hooks = Hooks(core)
        if self._trace is not None:
            self._tracer = Tracer(core, hooks, self._trace, _measured(device))
            stack.callback(self._tracer.finish)
        recorder = Recorder(core) if self._tracer is None else TimedRecorder(core, self._tracer)
        self._switch = switch = _Switch(recorder, core, self._tracer)
        stack.callback(switch.off)
        core.at_pack, core.at_unpack = switch.follow, switch.step_aside
        switch.follow()
        stack.callback(register_optimizer_step_pre_hook(switch.optimizer_begins).remove)
        stack.callback(register_optimizer_step_post_hook(switch.optimizer_ended).remove)
        pair = hooks if self._tracer is None else self._tracer
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pair.pack, pair.unpack))

    def _addresses(self, device: Device) -> DeviceAddresses | None:
        """Where storages lie, if the policy asks and the device can tell."""
        wanted = self.policy.filter.choose == "window" and device.memory_blocks() is not None
        return DeviceAddresses(device) if wanted else None

    def _limit(self, device: Device) -> Budget:
        if self._budget is None:
            return Budget(activations=self._activations)
        whole = self._budget.of(device.capacity_bytes()) if isinstance(self._budget, Share) else self._budget.nbytes
        reserve = self.policy.budget.reserve
        return Budget(
            device_bytes=whole, reserve_bytes=reserve.of(whole) if isinstance(reserve, Share) else reserve.nbytes
        )

    def _header(self, device: Device) -> dict[str, Any]:
        given = {"budget": self._budget, "activations": self._activations}
        return {
            "policy": self.policy.name,
            "device": device.kind,
            "budget": {name: str(size) for name, size in given.items() if size is not None},
            "torch": torch.__version__,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }


class _Switch:
    """Puts tracer and recorder on the mode stack and takes them off, only where the stack is as the block found it.

    In between another mode of the user's may lie above ours, and leaving a mode takes off whatever is on top. And a
    compiled function, when it returns, puts back the dispatch keys of the time it was called: a mode put on meanwhile
    would see nothing from then on, and one taken off would be missed.
    """

    def __init__(self, recorder: Recorder, core: Core, tracer: Tracer | None) -> None:
        self._recorder, self._core, self._tracer = recorder, core, tracer
        self._depth = core.modes_below = torch._C._len_torch_dispatch_stack()
        self._compiled_calls = compiled_calls()
        self._on: list[TorchDispatchMode] = []  # the last one on top
        self._held_off = False

    def follow(self) -> None:
        """Do as the engine and the tracer want, if the stack allows it now."""
        self._follow(self._wanted())
        if torch._C._current_graph_task_id() == -1:
            self._core.device.enforce(self._recorder in self._on)

    def optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer has a dozen ops for each parameter, all in place: with nothing recorded that they could spoil,
        nobody has to see them. A closure is forward and backward once more, and they have to be seen."""
        traced = self._tracer is not None and self._tracer.wanted
        if traced or self._core.engine.minds_writes:
            return
        if not any(callable(given) for given in (*args[1:], *kwargs.values())):
            self._follow([])

    def optimizer_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What comes next may be recorded again."""
        self.follow()

    def _follow(self, wanted: list[TorchDispatchMode]) -> None:
        if wanted == self._on or torch._C._current_graph_task_id() != -1:
            return
        if torch._C._len_torch_dispatch_stack() != self._depth + len(self._on):
            return
        if compiled_calls() != self._compiled_calls:
            return
        self._turn(wanted)

    def step_aside(self) -> None:
        """In backward: take the recorder off for the rest of the node that is running. So nobody hears there of an op
        that finds no memory, and none is refused any for the budget's sake.

        Some backward formulas (that of `prod`, for one) compute differently while any dispatch mode is on the stack, so
        plain PyTorch's bits need an empty one. Autograd puts the stack back when the node has ended. Functions written
        in Python are no such formulas: they run the program's own code, which may write, and that has to be seen.
        """
        if torch._C._len_torch_dispatch_stack() == self._depth or torch._C._current_graph_task_id() == -1:
            return
        if self._recorder not in self._on:
            return
        self._core.device.enforce(False)
        if _runs_the_program_s_code(torch._C._current_autograd_node()):
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
        recorded = self._recorder in self._on
        while self._on:
            self._on.pop().__exit__(None, None, None)
        for mode in wanted:
            mode.__enter__()
            self._on.append(mode)
        if recorded is not (self._recorder in wanted):
            self._core.engine.recording(not recorded)


def _runs_the_program_s_code(node: Any) -> bool:
    """Whether a node of backward is an `autograd.Function`, other than that of a compiled graph."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    return not getattr(type(node), "_forward_cls").__module__.startswith("torch._functorch")  # noqa: B009, not typed


def _link(device: Device, budget: Budget) -> Link:
    if budget.unlimited:
        return Link(1e9, 1e9)
    return _measured(device)


def _measured(device: Device) -> Link:
    speed = device.bandwidth()
    return Link(speed.out_bytes_per_s, speed.in_bytes_per_s, device.interference(), COPY_NS[device.kind])


def _device_of(model: nn.Module | None) -> torch.device | None:
    parameter = next(model.parameters(), None) if model is not None else None
    return parameter.device if parameter is not None else None


def _claim(session: evict) -> None:
    global _open_session
    with _open_lock:
        if _open_session is not None and _open_session() is not None:
            raise NestedSessionError(
                "delta.evict was entered inside another delta.evict block; one at a time: leave the outer block first, "
                "or use one block around both"
            )
        _open_session = weakref.ref(session)


def _give_up(session: evict) -> None:
    global _open_session
    with _open_lock:
        _open_session = None
