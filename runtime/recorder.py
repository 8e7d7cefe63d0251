"""The dispatch mode that writes down how every storage was made.

It sits below autograd and autocast and sees the aten ops that really run. For each op in forward it notes the records
it read, those it made, its own time, and, for seeded ops, the state of the generator. Aliasing is decided by storage
identity after the call, not by the schema alone (`_unsafe_view` shares unmarked; rule 4). In backward, and where
gradients are off, ops are not recorded; only writes into known storages are noticed there, because they end a version.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from delta.routine import Way
from delta.runtime import batch_norm, cudnn
from delta.runtime.compiled import never_compiled
from delta.runtime.foreseen import Foreseen
from delta.runtime.generators import drawn_from, set_back
from delta.runtime.note import Note
from delta.runtime.opfacts import KNOWN, OpFacts, facts_of
from delta.runtime.recompute import Input, Product, Recipe, Scratch, results_of, strip
from delta.runtime.versions import count_write
from delta.runtime.view import View, is_plain
from delta.types import Kind, OpInfo

if TYPE_CHECKING:
    from delta.runtime.core import Core

_graph_task, _grad_enabled = torch._C._current_graph_task_id, torch.is_grad_enabled  # asked for each op
_SEARCHED = (
    "torch.backends.cudnn.benchmark is on: cuDNN looks for the fastest algorithm of a convolution anew in backward's "
    "thread, and another algorithm gives other bits, so convolutions are not recomputed. Set it to False to have them "
    "recomputed."
)


class Recorder(TorchDispatchMode):
    """Records into `core` while it is on the mode stack."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let the user's torch.compile keep its compiled regions (a plain mode would turn it off silently)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper: `never_compiled` is enough."""
        return False

    def __init__(self, core: Core) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._core, self._learner, self._step_ends = core, core.engine.learner, core.engine.step_ends
        self._foreseen = Foreseen()
        self._within: tuple[FrameType, int] | None = None  # the call in the middle of which it was put on the stack

    def put_on_within(self, caller: FrameType) -> None:
        """It was put on the stack by a hook, in the middle of an op that `caller` has called. What that op's kernel
        calls comes here then, and fills what it has made where nobody sees it."""
        self._within = caller, caller.f_lasti

    def put_on_between(self) -> None:
        """... or between two ops, or forward is over: a frame that is known keeps alive what it refers to."""
        self._within = None

    def _is_within(self) -> bool:
        """Whether the program is in that call still. (Or there again, as in a loop: less is recorded then.)"""
        caller = sys._getframe(2).f_back
        if caller is None or self._within != (caller, caller.f_lasti):
            self._within = None
        return self._within is not None

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        core, learner = self._core, self._learner
        if (routine := learner.routine) is not None and routine.passing[at := routine.calls] is func:
            at_rest = not (core.owner or core.passes or self._step_ends.needed)
            if at_rest and _grad_enabled() and _graph_task() == -1:  # as below, where it was let pass the last time
                routine.calls = at + 1
                return self._pass(func, args, kwargs, routine.made_bytes[at] if core.stretches.off else 0)
        known = KNOWN.get(id(func))  # as `facts_of`, without a call
        if known is not None:
            facts = known[1]
        elif isinstance(func, OpOverload):
            facts = facts_of(func)
        else:  # what it runs is not heard of
            if not (core.passes or core.inside()):
                core.device.enforce(False)
            return func(*args, **kwargs)
        if facts.idle or core.passes or (core.owner and core.inside()):
            return func(*args, **kwargs)
        if facts.cudnn_chooses:
            core.device.enforce(False)  # until the next save: what it is refused it does not say
        if _graph_task() == -1 and _grad_enabled():
            return self._forward(func, facts, args, kwargs)
        if core.gauge.closely and _graph_task() == -1:
            core.room_for(self._foreseen.made_bytes(func, facts, args, kwargs))
        keep_track = _graph_task() == -1 and learner.in_step
        watched = keep_track or (facts.writes and (learner.in_step or core.has_recipes))
        return self._let_pass(func, facts, args, kwargs, watched, keep_track)

    def _forward(self, func: OpOverload, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An op of forward, with gradients on: it goes the way that the routine has for it, or is recorded."""
        core, learner = self._core, self._learner
        if self._within is not None and self._is_within():
            return self._let_pass(func, facts, args, kwargs, facts.writes)
        if self._step_ends.needed:
            core.forward_again()
        routine, off, made_bytes = learner.routine, None, 0
        way = routine.way(func) if routine is not None else Way.RECORD
        if way is None:
            with core.lock:  # nothing goes by it
                way = core.engine.swerve(func)
            routine = learner.routine
        if way is None:
            way = self._unexpected()
        elif routine is not None and routine.alone is not None:
            off = routine.alone.turns.get(routine.calls)
            if off is not None:  # what this op saves of its results, and the next one of its arguments
                core.stretches.turn(off, routine.calls)
        if way is Way.NOTE and core.noted.on:
            return self._note(func, facts, args, kwargs)
        if way is not Way.PASS:
            return self._record(func, facts, args, kwargs)
        if routine is not None:
            if off is None and not (facts.writes or facts.seeded or facts.cudnn_chooses):
                routine.passed()
            if core.stretches.off:
                made_bytes = routine.made_bytes[routine.calls - 1]
        return self._let_pass(func, facts, args, kwargs, facts.writes, made_bytes=made_bytes)

    def _let_pass(
        self,
        func: OpOverload,
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        watched: bool,
        keep_track: bool = False,
        made_bytes: int = 0,
    ) -> Any:
        """Run an op that gets no recipe. `watched`: what it overwrites may be minded, with `keep_track` in any case."""
        if watched and (keep_track or self._minds(facts, args, kwargs)):
            return self._watch(func, facts, args, kwargs, keep_track)
        drawn = drawn_from(facts, args, kwargs, self._core.device.torch_device) if facts.seeded else (None, None)
        result = self._pass(func, args, kwargs, made_bytes, *drawn)
        if facts.writes_lists:
            count_write(tensors_written(facts, (), args, kwargs))
        return result

    def _pass(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        made_bytes: int,
        generator: torch.Generator | None = None,
        state: Tensor | None = None,
    ) -> Any:
        """Run an op; nobody will ask for what it makes. `made_bytes`: what that should be; 0 if it does not count."""
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            self._core.rescue()
            set_back(generator, state)
            result = func(*args, **kwargs)
        if made_bytes and isinstance(result, Tensor) and result.untyped_storage().nbytes() != made_bytes:
            self._unexpected()  # and nobody would hear what is saved of it
        return result

    def _minds(self, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether something depends on what the op overwrites."""
        return any(map(self._core.storages.minds, tensors_written(facts, facts.statistics_written(args), args, kwargs)))

    def _unexpected(self) -> Way:
        """In a step whose routine is known, this call is another than the one that it expects."""
        self._core.stretches.lost()
        with self._core:
            self._core.engine.unexpected()
        return Way.RECORD

    def _watch(
        self, func: OpOverload, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], keep_track: bool
    ) -> Any:
        """Run an op that gets no recipe: notice what it overwrites and, with `keep_track`, what it makes."""
        core = self._core
        written = tensors_written(facts, facts.statistics_written(args), args, kwargs)
        with core:
            preserved = core.writes.begin(written)
            drawn = drawn_from(facts, args, kwargs, core.device.torch_device)
            began_ns = time.perf_counter_ns()
            result = self._run(func, facts, args, kwargs, drawn, written, preserved)
            core.own_time(time.perf_counter_ns() - began_ns)
            core.writes.settle(core.writes.end(written, preserved))
            if keep_track:
                self._products(results_of(result), [], {})
        return result

    def _record(self, func: OpOverload, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        core = self._core
        routine = core.engine.routine
        if routine is None:
            core.stretches.lost()
        statistics = facts.statistics_written(args)
        call = strip(without_statistics(args, statistics), kwargs)
        with core:
            if core.engine.asks_ahead:
                made_bytes = self._foreseen.made_bytes(func, facts, args, kwargs)
                core.run(core.engine.making(made_bytes, time.perf_counter_ns()))
            known_ns = core.engine.known_cost_ns(func)
            written = tensors_written(facts, statistics, args, kwargs)
            inputs = self._inputs(call.tensors)
            preserved = core.writes.begin(written) if written else set()
            generator, state = drawn = drawn_from(facts, args, kwargs, core.device.torch_device)
            refusals = facts.refusals(core.device)
            began_ns, mark = time.perf_counter_ns(), core.op_times.clock.start() if known_ns is None else None
            result = self._run(func, facts, args, kwargs, drawn, written, preserved)
            token = core.op_times.clock.stop(mark) if known_ns is None else None
            core.own_time(time.perf_counter_ns() - began_ns)
            results = results_of(result)
            new_versions = core.writes.end(written, preserved) if written else {}
            products = self._products(results, call.tensors, new_versions)
            if products:
                if not call.tensors or any(tensor.device == core.device.torch_device for tensor in call.tensors):
                    core.device.computes()  # else it has only copied to here, on a stream that may be for that alone
                recipe = None
                if inputs is not None and self._replayable(facts, args, results, generator, refusals):
                    again_ns = self._again_ns(func, args, results, products)
                    recipe = Recipe(func, facts, call.args, call.kwargs, inputs, products, generator, state, again_ns)
                cost_ns = core.op_times.took_ns(recipe, token) if known_ns is None else known_ns
                op = self._op(facts, recipe, products, new_versions, cost_ns or 0)
                core.recorded(op, recipe, untimed=token if cost_ns is None else None)
            if routine is None:
                core.engine.called(func, made=bool(products))
            core.writes.settle(new_versions)
        return result

    def _run(
        self,
        func: OpOverload,
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        drawn: tuple[torch.Generator | None, Tensor | None],
        written: Sequence[Tensor],
        preserved: set[int],
    ) -> Any:
        """Run an op within the core. One that raises may have written into some of what it was to write."""
        core = self._core
        try:
            result = core.rescued(func, args, kwargs, *drawn)
        except BaseException:
            core.writes.failed(written, preserved)
            raise
        if facts.writes_lists:
            count_write(written)
        return result

    def _note(self, func: OpOverload, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an op whose replay nobody but the runtime has to know of."""
        if not facts.plain:
            return self._note_with_care(func, facts, args, kwargs)
        core, routine = self._core, self._learner.routine
        call = strip(args, kwargs)
        reads = core.noted.reads(call.tensors)
        if reads is None or routine is None:
            return self._record(func, facts, args, kwargs)
        cost_ns = routine.cost_ns or 0
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            core.rescue()
            return self._record(func, facts, args, kwargs)
        results = results_of(result)
        if core.noted.on and all(map(is_plain, results)):
            self._noted(results, func, facts, call, reads, None, None, cost_ns)
        return result

    def _note_with_care(self, func: OpOverload, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The same for one that may write, draw numbers, or give other bits another time."""
        core, routine = self._core, self._learner.routine
        statistics = facts.statistics_written(args)
        call = strip(without_statistics(args, statistics), kwargs)
        reads = core.noted.reads(call.tensors)
        if reads is None or routine is None or any(core.storages.minds(args[position]) for position in statistics):
            return self._record(func, facts, args, kwargs)
        if facts.writes_lists:  # it gives nothing that stands for what it has written
            return self._record(func, facts, args, kwargs)
        overwrites = None
        if facts.mutates and not statistics:
            overwrites = core.noted.overwrites(tensors_written(facts, (), args, kwargs), call.tensors)
            if overwrites is None:
                return self._record(func, facts, args, kwargs)
        cost_ns = routine.cost_ns or 0
        generator, state = drawn_from(facts, args, kwargs, core.device.torch_device)
        refusals = facts.refusals(core.device)
        try:
            with core.lock if overwrites is not None else nullcontext():  # what it writes into stays noted meanwhile
                result = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            core.rescue()
            set_back(generator, state)
            return self._record(func, facts, args, kwargs)
        results = results_of(result)
        if core.noted.on and self._replayable(facts, args, results, generator, refusals):
            note = self._noted(results, func, facts, call, reads, generator, state, cost_ns, overwrites)
            if func is batch_norm.OP:
                core.noted.by_statistics(note, core.trials.again_ns(func, args, results))
        return result

    def _noted(self, results: Sequence[Tensor], *known: Any) -> Note:
        """A call has given these results. What is `known` of it: see `Note`."""
        core = self._core
        core.device.computes()
        if core.gauge.closely:
            core.hear()
            core.gauge.look()
        note = Note(core, *known)
        core.noted.add(note, results)
        return note

    def _again_ns(
        self, func: OpOverload, args: Sequence[Any], results: Sequence[Tensor], products: Sequence[Product]
    ) -> int | None:
        """How long making the first result again takes, where the others give it."""
        if len(products) != len(results):
            return None
        return self._core.trials.again_ns(func, args, results)

    def _op(
        self,
        facts: OpFacts,
        recipe: Recipe | None,
        products: Sequence[Product],
        new_versions: dict[int, int],
        cost_ns: int,
    ) -> OpInfo:
        """The engine's side of a record: an op without a recipe reads nothing, so it keeps nothing alive."""
        core, made = self._core, tuple([product.record for product in products])
        if recipe is None:
            return OpInfo(core.next_id(), facts.name, (), made, cost_ns, False, module=core.module)
        read = tuple(dict.fromkeys([entry.record for entry in recipe.inputs]))
        overwrites = tuple([record for record in new_versions if record in read])  # statistics are written but not read
        return OpInfo(core.next_id(), facts.name, read, made, cost_ns, True, overwrites, core.module)

    def _inputs(self, tensors: Sequence[Tensor]) -> tuple[Input, ...] | None:
        """The op's inputs as records, or None where one of them cannot be had again."""
        inputs: list[Input] | None = []
        for tensor in tensors:
            record = self._core.storages.record_of(tensor) if is_plain(tensor) else None
            if record is None or inputs is None:
                inputs = None
                continue
            inputs.append(Input(record, View.of(tensor)))
        return tuple(inputs) if inputs is not None else None

    def _products(
        self, results: Sequence[Tensor], tensors: Sequence[Tensor], new_versions: dict[int, int]
    ) -> tuple[Product, ...]:
        """Records for the storages this op made or wrote. Results that share an input's storage make nothing."""
        storages, device = self._core.storages, self._core.device.torch_device
        products: list[Product] = []
        for index, tensor in enumerate(tensors):
            record = storages.known(tensor) if new_versions else None
            if record is None or record not in new_versions.values():
                continue
            if all(product.record != record for product in products):
                products.append(Product(record, tensor.untyped_storage().nbytes(), View.of(tensor), written=index))
        for index, tensor in enumerate(results):
            if not is_plain(tensor) or tensor.device != device or storages.known(tensor) is not None:
                continue
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes:
                record = storages.create(tensor, Kind.ACTIVATION)
                products.append(Product(record, nbytes, View.of(tensor), result=index))
        return tuple(products)

    def _replayable(
        self,
        facts: OpFacts,
        args: Sequence[Any],
        results: Sequence[Tensor],
        generator: torch.Generator | None,
        refusals: int,
    ) -> bool:
        """Whether a replay of the call that has just ended gives the same bits. `refusals` are those before it."""
        device = self._core.device
        may = not cudnn.refused(facts, device, refusals) and facts.replays_on(device.kind, args)
        if not may and facts.cudnn_chooses and cudnn.searches():
            self._core.engine.totals.warn("cudnn.benchmark", _SEARCHED)
        return may and (not facts.seeded or generator is not None) and all(map(is_plain, results))


def tensors_written(
    facts: OpFacts, statistics: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The tensors among the arguments that the op writes into."""
    written: list[Tensor] = []
    for where in (*facts.mutates, *statistics):
        value = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
        if value is not None:
            written += filter(is_plain, results_of(value))
    return written


def without_statistics(args: Sequence[Any], statistics: Sequence[int]) -> Sequence[Any]:
    """The arguments with scratch space in place of batch-norm statistics."""
    if not statistics:
        return args
    replaced = list(args)
    for position in statistics:
        tensor = args[position]
        replaced[position] = Scratch(tuple(tensor.size()), tensor.dtype, tensor.device)
    return replaced
