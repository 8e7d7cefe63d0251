"""One step of the program, written down as it happens: the recording side of `delta.trace.events`.

A storage has a number until an op writes into it in place, then a new one. When storages and saved tensors die is
noticed by weak references, which may fire anywhere: they only leave a note, which is taken in before the next event.

Delta holds what autograd saved, so a storage that the program lets go of does not die. It is looked at before every
event: one that only Delta holds has been let go of.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from delta.runtime.codecs import codec_for
from delta.runtime.own_time import OwnTime
from delta.runtime.rawmem import sole_owner
from delta.runtime.view import is_plain
from delta.trace.events import Backward, Constant, Event, Free, Need, Op, Result, Save, Unsave

if TYPE_CHECKING:
    from delta.runtime.core import Core

Storage = torch.UntypedStorage


class Stored:
    """A storage of the step, and the one object that stands for it now (Delta may have made it again).

    `freed`: the program has let go of it, and it lives on for autograd only. `made_by`: the op that made it and, if
    that wrote in place, the one before.
    """

    __slots__ = ("constant", "freed", "handles", "made_by", "number", "ref")

    def __init__(self, number: int, constant: bool) -> None:
        self.number = number
        self.constant = constant
        self.freed = False
        self.handles = 0
        self.made_by: tuple[str, ...] = ()
        self.ref: weakref.ref[Storage] | None = None

    def alive(self) -> Storage | None:
        return self.ref() if self.ref is not None else None

    def let_go(self) -> bool:
        """Whether nobody has it, but Delta."""
        storage = self.alive()
        return storage is None or sole_owner(storage)


class Saved:
    """What autograd holds of a saved tensor while a step is traced; `packed` is what Delta's own hook gave for it."""

    __slots__ = ("packed", "step", "stored")

    def __init__(self, step: TracedStep, stored: Stored, packed: Any) -> None:
        self.step = step
        self.stored = stored
        self.packed = packed

    def __del__(self) -> None:
        self.step.died(self.stored)
        own, began_ns = self.step.own, time.perf_counter_ns()
        del self.packed
        own.released += 1
        own.released_ns += time.perf_counter_ns() - began_ns


class TracedStep:
    """Collects the events of one step. For one thread at a time, but for deaths."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.own = OwnTime()
        self._count = 0
        self._constants: list[Constant] = []
        self._events: list[Event] = []
        self._times: list[tuple[int, Any]] = []  # position of an op among the events, token of the device's clock
        self._stored: dict[int, Stored] = {}  # by identity of the storage
        self._freed: list[int] = []  # since the last event
        self._attached: dict[Stored, None] = {}  # saved, and still used by the program when last looked at
        self._lingering: list[Stored] = []  # the last saved tensor died, but what backward was given is still in use
        self._notes: deque[tuple[Callable[[Stored], None], Stored]] = deque()
        self._saved: dict[Stored, None] = {}  # with a handle
        self._began_saving = False
        self.backward_began = False

    # -- what happens ---------------------------------------------------------------------------------------------
    def look(self, in_backward: bool) -> None:
        """Take in what happened since the last event: to be called before each."""
        with self._core:  # no other thread is at work on a storage, which would look like the program's use
            self._take_in()
        if in_backward and not self.backward_began:
            self.backward_began = True
            self._events.append(Backward())

    def _take_in(self) -> None:
        while self._notes:
            happened, stored = self._notes.popleft()
            happened(stored)
        for stored in [stored for stored in self._attached if stored.let_go()]:
            self._free(stored)
        self._events += [Free(number) for number in sorted(self._freed)]  # nobody promises an order
        self._freed.clear()
        for stored in [stored for stored in self._lingering if stored.let_go()]:
            self._lingering.remove(stored)
            self._events.append(Unsave(stored.number))

    @property
    def over(self) -> bool:
        """Whether all that was saved has been let go of."""
        return self._began_saving and not self._saved

    def reads(self, tensors: Sequence[Tensor]) -> tuple[list[Stored], bool]:
        """The storages of an op's inputs, and whether Delta could give them to a replay."""
        stored: dict[Stored, None] = {}
        available = True
        for tensor in tensors:
            if not self._is_ours(tensor):
                available = False
            elif tensor.untyped_storage().nbytes():
                one = self._of(tensor)
                stored[one] = None
                available = available and not (one.constant and self._is_part(tensor))
        return list(stored), available

    def ran(
        self,
        name: str,
        inputs: Sequence[Stored],
        written: Sequence[Tensor],
        results: Sequence[Tensor],
        replayable: bool,
        token: Any,
        again_ns: int,
    ) -> None:
        """An op ran; `token` of the device's clock says how long. `again_ns`: what a replay takes, 0 for as long."""
        read = tuple(stored.number for stored in inputs)
        keys = dict.fromkeys(tensor.untyped_storage()._cdata for tensor in written)
        changed = [stored for key in keys if (stored := self._stored.get(key)) in inputs and stored is not None]
        overwrites = tuple(stored.number for stored in changed)
        for stored in changed:
            self._renew(stored)
        made = changed + [self._add(tensor, constant=False) for tensor in results if self._is_new(tensor)]
        sizes = tuple(storage.nbytes() for stored in made if (storage := stored.alive()) is not None)
        for stored in made:
            stored.made_by = (name, *stored.made_by[:1])
        if read or made:
            self._times.append((len(self._events), token))
            outputs = tuple(stored.number for stored in made)
            self._events.append(Op(name, read, outputs, sizes, 0, replayable, overwrites, again_ns=again_ns))

    def save(self, tensor: Tensor, packed: Any) -> Saved:
        """Autograd saved a tensor."""
        stored = self._of(tensor)
        self._events.append(self._save_event(stored, tensor))
        stored.handles += 1
        self._saved[stored] = None
        self._began_saving = True
        self._attach(stored)
        return Saved(self, stored, packed)

    def _save_event(self, stored: Stored, tensor: Tensor) -> Save:
        """What was saved, and the smaller form that it may have: whether it really does, only encoding would show."""
        codec = codec_for(tensor, stored.made_by) if not stored.constant else None
        nbytes = tensor.untyped_storage().nbytes()
        if codec is None or (form := codec.encoding(nbytes)).nbytes >= nbytes:
            return Save(stored.number)
        return Save(stored.number, form.nbytes, form.encode_ns, form.decode_ns)

    def need(self, saved: Saved) -> None:
        """Backward asks for a saved tensor."""
        self._events.append(Need(saved.stored.number))

    def given(self, saved: Saved, tensor: Tensor) -> None:
        """Backward got a saved tensor, maybe on a storage that Delta made again."""
        if self._stored.get(tensor.untyped_storage()._cdata) is not saved.stored:
            self._stand_for(saved.stored, tensor.untyped_storage())

    def died(self, stored: Stored) -> None:
        """A saved tensor died. Called from anywhere."""
        self._notes.append((self._unsaved, stored))

    def finish(self) -> tuple[Event, ...]:
        """The step is over: its events, constants first. What is still saved will not be asked for."""
        self._events += [Unsave(stored.number) for stored in self._lingering]
        self._events += [Unsave(stored.number) for stored in self._saved for _ in range(stored.handles)]
        left = [stored for stored in self._stored.values() if not stored.freed and not stored.constant]
        for position, token in self._times:
            op = self._events[position]
            assert isinstance(op, Op)
            self._events[position] = replace(op, cost_ns=self._core.op_times.clock.wait_ns(token))
        self._stored.clear()  # its weak references and this object refer to each other
        return (*self._constants, *self._events, *(Result(stored.number) for stored in left))

    # -- notes ----------------------------------------------------------------------------------------------------
    def _unsaved(self, stored: Stored) -> None:
        stored.handles -= 1
        if not stored.handles:
            del self._saved[stored]
        if stored.freed and not stored.handles:
            self._lingering.append(stored)  # as a rule until `look` has seen to the rest of the notes
        else:
            self._events.append(Unsave(stored.number))

    def _gone(self, stored: Stored) -> None:
        if not stored.constant:
            self._free(stored)

    def _free(self, stored: Stored) -> None:
        self._attached.pop(stored, None)
        if not stored.freed:
            stored.freed = True
            self._freed.append(stored.number)

    # -- storages -------------------------------------------------------------------------------------------------
    def _is_ours(self, tensor: Tensor) -> bool:
        return is_plain(tensor) and tensor.device == self._core.device.torch_device

    def _is_new(self, tensor: Tensor) -> bool:
        if not self._is_ours(tensor):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 and storage._cdata not in self._stored

    def _is_part(self, tensor: Tensor) -> bool:
        """A small view of a big storage that is no parameter: no recipe has such an input (rule 1)."""
        nbytes = tensor.numel() * tensor.element_size()
        return 2 * nbytes < tensor.untyped_storage().nbytes() and not self._core.persistent.holds(tensor)

    def _of(self, tensor: Tensor) -> Stored:
        """The storage of a tensor; one that no op of the step made was there before."""
        stored = self._stored.get(tensor.untyped_storage()._cdata)
        if stored is None:
            stored = self._add(tensor, constant=True)
            self._constants.append(Constant(stored.number, tensor.untyped_storage().nbytes()))
        return stored

    def _add(self, tensor: Tensor, constant: bool) -> Stored:
        stored = Stored(self._next(), constant)
        self._stand_for(stored, tensor.untyped_storage())
        return stored

    def _renew(self, stored: Stored) -> None:
        """An op wrote into it in place."""
        stored.number = self._next()
        stored.constant = stored.freed = False
        self._attach(stored)

    def _attach(self, stored: Stored) -> None:
        if stored.handles and not stored.freed and not stored.constant:
            self._attached[stored] = None

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _stand_for(self, stored: Stored, storage: Storage) -> None:
        stored.ref = weakref.ref(storage, partial(self._storage_died, storage._cdata, stored))
        self._stored[storage._cdata] = stored

    def _storage_died(self, key: int, stored: Stored, ref: weakref.ref[Storage]) -> None:
        """Called from anywhere. The identity may be used again at once, so it is forgotten here."""
        if self._stored.get(key) is stored and stored.ref is ref:
            del self._stored[key]
        self._notes.append((self._gone, stored))
