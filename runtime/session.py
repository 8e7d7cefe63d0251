"""`delta.evict`: wires policy, budget, engine, device, hooks, recorder and daemon together; nothing else."""

from __future__ import annotations

import inspect
import os
import reprlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from delta.budget import Budget
from delta.config import Policy
from delta.engine import Engine
from delta.errors import BudgetError, DeltaError, NestedSessionError, PolicyError, TimelineError, TraceError
from delta.files import marked
from delta.policies.loader import load
from delta.report import Report
from delta.runtime.addresses import DeviceAddresses
from delta.runtime.capture import heard_of_capture
from delta.runtime.compiled import AnnouncedWrites, heard_of_compilation
from delta.runtime.core import Core
from delta.runtime.daemon import Daemon
from delta.runtime.device import Device, make_device
from delta.runtime.hooks import Hooks
from delta.runtime.interrupts import signals_wait
from delta.runtime.modules import ModuleNames
from delta.runtime.monitor import spill_facts
from delta.runtime.own_time import TimedRecorder
from delta.runtime.persistent import Persistent
from delta.runtime.recorder import Recorder
from delta.runtime.replicas import no_replicas
from delta.runtime.settle import settle_kernels
from delta.runtime.switch import Switch
from delta.runtime.tracer import Taken, Tracer
from delta.timeline import Timeline
from delta.trace import Recording
from delta.types import Action, Link
from delta.units import Bytes, Share, format_bytes, parse_size

F = TypeVar("F", bound=Callable[..., Any])
SAMPLE_S = 0.05  # while a timeline is written
# Else samples are of little use: each event takes in the copies that have ended, and memory is looked at when
# backward begins, where most of it is in use as a rule.
IDLE_S = 0.5
_UNUSED = Link(1e9, 1e9)  # where nothing is swapped
# What torch.func answers to hooks asks the user to report it to PyTorch; it says nothing of Delta.
_HOOKS_REFUSED = (
    "delta.evict works through saved-tensor hooks, under which torch.func.{grad, vjp, jacrev, hessian} do not run: use "
    "torch.autograd.grad or torch.autograd.functional, give the function that calls the transform to torch.compile, or "
    "run it outside of the block"
)
_LEFT_ELSEWHERE = (
    "this block of delta.evict was left in another thread than it was entered in, where its hooks and its recorder "
    "have to stay; they do nothing from here on. Leave a block in the thread that entered it: a generator in the midst "
    "of one is to be finished, or closed, there, too"
)

_open_session: weakref.ref[evict] | None = None  # of this process: a forked one may open its own
_open_lock = threading.Lock()


class evict(ContextDecorator):
    """Keep the saved activations of everything trained inside the block under a budget.

    ``budget``: device bytes the process may use in all (``8_000_000_000``, ``"8GiB"``, ``"60%"`` of the device).
    ``activations``: bytes of saved activations that may be resident (``"2GiB"``, or ``"40%"`` of what the step would
    hold if nothing were evicted). Give one of them, or neither to watch and report only. ``policy``: a shipped name, a
    path to a YAML file, or a `delta.Policy`. ``model``: names modules in the timeline and in rules, which need it then.
    ``timeline``: a file for the events of the run. ``trace``: a file for the first step as a trace, or a
    `delta.trace.Recording` of other steps.
    ``device``: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; by default the model's, else the current CUDA device, else the CPU.

    Put one block around the whole loop: what the first steps have shown serves the later ones of the same block. What
    autograd saves inside is looked after, and a backward after the block has ended still works. Usable as a decorator
    (of the function with the loop) and one block after the other, not nested. Entered again, it writes its timeline to
    ``-2`` and so on, and goes on counting the steps to be traced.

    Raises BudgetError (budget unreadable, or given twice), PolicyError, SwapError (spill directory), TimelineError,
    TraceError, NestedSessionError; DeltaError for a model that is none or on a device that is not known, for a
    decorated generator or coroutine, and where it is left in another thread than it was entered in.
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
        _refuse_types(model, timeline, trace)
        if budget is not None and activations is not None:
            raise BudgetError(
                f"budget={budget!r} and activations={activations!r} were both given; give one: budget= for all device "
                "bytes of the process, activations= for the bytes of saved activations"
            )
        self.policy = policy if isinstance(policy, Policy) else load(policy)
        if model is None:
            _refuse_modules(self.policy)
        self._budget = None if budget is None else parse_size(budget, what="budget")
        self._activations = None if activations is None else parse_size(activations, what="activations")
        self._model = weakref.ref(model) if model is not None else None
        self._timeline = None if timeline is None else Path(timeline)
        self._timelines = 0  # written so far
        self._trace = Recording(Path(trace)) if isinstance(trace, str | os.PathLike) else trace
        self._taken = Taken()
        self._device_name = device if device is not None else _device_of(model)
        self._thread = 0  # that entered the block: hooks and modes are its own
        self._core: Core | None = None
        self._stack: ExitStack | None = None
        self._tracer: Tracer | None = None
        self._switch: Switch | None = None
        self._hooks: Hooks | None = None
        self._daemon: Daemon | None = None

    def __call__(self, func: F) -> F:
        """The function with this block around each call of it."""
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise DeltaError(
                f"{func.__qualname__} is a generator or a coroutine: a call of it returns before it has run, and the "
                "block would end there. Write `with delta.evict(...):` inside of it"
            )
        return super().__call__(func)

    # -- the block ------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        _claim(self)
        self._thread = threading.get_ident()
        try:
            with ExitStack() as stack:
                stack.callback(_give_up, self)
                stack.enter_context(signals_wait())
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
        if stack is None:
            raise DeltaError("this block of delta.evict is not open: it was not entered, or has been left already")
        elsewhere = self._hooks.all_elsewhere if self._hooks is not None else None
        if isinstance(error, torch.OutOfMemoryError) and self._core is not None:
            _tell_what_was_held(error, self._core, beside=self._activations is None)
        left_elsewhere = threading.get_ident() != self._thread
        if left_elsewhere and self._core is not None:
            self._core.pass_for_ever()
        stack.close()
        if left_elsewhere:
            if error is None or isinstance(error, GeneratorExit):  # whose notes nobody reads
                raise DeltaError(_LEFT_ELSEWHERE)
            error.add_note(_LEFT_ELSEWHERE)
        if error is not None and elsewhere is not None:
            error.add_note(elsewhere)
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            error.add_note(_HOOKS_REFUSED)
        if self._core is not None and kind is None:
            self._core.raise_warnings()
        if self._daemon is not None and kind is None:
            self._daemon.check()

    def _in_its_thread(self, undo: Callable[[], object]) -> None:
        """As the block ends: undo what only the thread that entered it can."""
        if threading.get_ident() == self._thread:
            undo()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Between two steps of an open block: what runs in here is plain PyTorch, with no hooks and no recorder, and
        the block learns nothing of it. To compare both within one process."""
        assert self._switch is not None and self._core is not None
        self._core.stretches.end()
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
        return tuple(self._taken.files)

    def report(self) -> Report:
        """What the run did so far, or in all once the block has ended. Of a block entered again: since then."""
        core = self._core
        if core is None:
            return Report(policy=self.policy.name, device=str(self._device_name or ""))
        with core:
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
                peak_device_bytes=core.gauge.peak_bytes,
                budget_bytes=engine.told_budget_bytes,
                steps_over=totals.steps_over,
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
        timeline = self._next_timeline(device)
        undo.callback(timeline.close)
        addresses = self._addresses(device)
        swaps = not budget.unlimited and Action.SWAP in self.policy.director.actions
        link = _measured(device) if swaps else _UNUSED
        sees_peaks = not device.hoards
        engine = Engine(self.policy, budget, link, layout=addresses, clock=time.perf_counter_ns, sees_peaks=sees_peaks)
        if swaps and device.spill_directory is not None:
            _warn_of_spilling_to_memory(engine, device.spill_directory)
        core = Core(engine, device, Persistent(model), timeline)
        if addresses is not None:
            addresses.follow(core.slots)
        undo.pop_all()  # from here on the core closes them, when the last handle has died
        self._core = core
        stack.callback(core.close)
        if not budget.unlimited:
            device.expand(True)
        if budget.device_bytes is not None:
            device.cap(budget.device_bytes)
        self._daemon = daemon = Daemon(core.sample, SAMPLE_S if timeline.active else IDLE_S, "delta-daemon")
        daemon.start()
        stack.callback(daemon.stop)
        if model is not None and (timeline.active or any(rule.module for rule in self.policy.rules)):
            stack.enter_context(ModuleNames(core, model))
        stack.enter_context(AnnouncedWrites(core))
        stack.enter_context(core.persistent.new_modules())
        stack.enter_context(core.persistent.swaps())
        stack.enter_context(no_replicas())
        self._hooks = hooks = Hooks(core)
        self._tracer = None
        if self._trace is not None and self._taken.recorded < self._trace.steps:
            self._tracer = Tracer(core, hooks, self._trace, self._taken, _measured(device))
            stack.callback(self._tracer.finish)
        recorder = Recorder(core) if self._tracer is None else TimedRecorder(core, self._tracer)
        self._switch = switch = Switch(recorder, core, self._tracer)
        stack.callback(self._in_its_thread, switch.off)
        core.at_pack, core.at_unpack = switch.follow, switch.step_aside
        stack.enter_context(heard_of_compilation(switch.compiles))
        stack.enter_context(heard_of_capture(core))
        switch.follow()
        stack.callback(register_optimizer_step_pre_hook(switch.optimizer_begins).remove)
        stack.callback(register_optimizer_step_post_hook(switch.optimizer_ended).remove)
        stack.enter_context(switch.around_backward())
        pair = hooks if self._tracer is None else self._tracer
        core.stretches.open((pair.pack, pair.unpack))
        stack.callback(self._in_its_thread, core.stretches.close)

    def _next_timeline(self, device: Device) -> Timeline:
        """One of this block's own: an earlier block of the same session has its file."""
        path = self._timeline
        if path is not None and self._timelines:
            path = marked(path, str(self._timelines + 1))
        timeline = Timeline(path, self._header(device))
        self._timelines += 1
        return timeline

    def _addresses(self, device: Device) -> DeviceAddresses | None:
        """Where storages lie, if the policy asks and the device can tell."""
        wanted = self.policy.filter.choose == "window" and device.memory_blocks() is not None
        return DeviceAddresses(device) if wanted else None

    def _limit(self, device: Device) -> Budget:
        if self._budget is None:
            return Budget(activations=self._activations)
        whole_bytes = self._budget.of(device.capacity_bytes())
        reserve_bytes = self.policy.budget.reserve.of(whole_bytes)
        if reserve_bytes >= whole_bytes:
            raise BudgetError(
                f"the budget is {format_bytes(whole_bytes)}, of which {format_bytes(reserve_bytes)} are to stay free "
                "(budget.reserve): that leaves nothing. Give a larger budget, or a policy with a smaller reserve"
            )
        return Budget(device_bytes=whole_bytes, reserve_bytes=reserve_bytes)

    def _header(self, device: Device) -> dict[str, Any]:
        given = {"budget": self._budget, "activations": self._activations}
        return {
            "policy": self.policy.name,
            "device": device.kind,
            "budget": {name: str(size) for name, size in given.items() if size is not None},
            "torch": torch.__version__,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _tell_what_was_held(error: torch.OutOfMemoryError, core: Core, beside: bool) -> None:
    """Add to the error of an op that found no memory. `beside`: the limit counts what ops make beside activations."""
    held_bytes = core.engine.ledger.resident_bytes + core.watch.resident_bytes
    if held_bytes:
        other = (
            "" if beside else ", or budget= in place of activations=, which counts what ops make beside them as well"
        )
        error.add_note(
            f"{format_bytes(held_bytes)} of the device's memory were saved activations, as far as Delta knows. Give "
            f"delta.evict a lower limit{other}"
        )


def _warn_of_spilling_to_memory(engine: Engine, directory: str) -> None:
    """If the spill file would lie in memory."""
    facts = spill_facts(directory)
    if facts.in_memory:
        engine.totals.warn("spill", f"the spill directory {facts.text}")


def _refuse_types(model: object, timeline: object, trace: object) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise DeltaError(
            f"model={reprlib.repr(model)}: a {type(model).__name__} is no torch.nn.Module. The model comes first, and "
            'may be left out; all else has its name: delta.evict(model, activations="40%"), @delta.evict(budget="8GiB")'
        )
    if not isinstance(timeline, str | os.PathLike | None):
        raise TimelineError(f"timeline={timeline!r}: give the path of a file")
    if not isinstance(trace, str | os.PathLike | Recording | None):
        raise TraceError(f"trace={trace!r}: give the path of a file, or a delta.trace.Recording")


def _refuse_modules(policy: Policy) -> None:
    for number, rule in enumerate(policy.rules):
        if rule.module is not None:
            raise PolicyError(
                f"policy {policy.name}: rules.{number}.module={rule.module!r} is a glob over the names of the model's "
                "modules, and no model was given: give it, delta.evict(model, ...), or a rule with `op` alone; "
                "deltactl cannot give the model of a script"
            )


def _measured(device: Device) -> Link:
    speed = device.bandwidth()
    return Link(speed.out_bytes_per_s, speed.in_bytes_per_s, device.interference(), device.copy_ns)


def _device_of(model: nn.Module | None) -> torch.device | None:
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is None:
        return None
    if parameter.device.type not in ("cpu", "cuda"):
        raise DeltaError(
            f"the model is on {parameter.device}, and delta.evict trains on cpu and cuda: move it there first, or say "
            'where it will be, device="cuda"'
        )
    return parameter.device


def _claim(session: evict) -> None:
    global _open_session
    with _open_lock:
        if _open_session is not None and _open_session() is not None:
            raise NestedSessionError(
                "delta.evict was entered inside another delta.evict block; one at a time: leave the outer block first, "
                "or use one block around both"
            )
        _open_session = weakref.ref(session)


def _forget_session() -> None:
    global _open_session, _open_lock
    _open_session, _open_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_session)


def _give_up(session: evict) -> None:
    global _open_session
    with _open_lock:
        _open_session = None
