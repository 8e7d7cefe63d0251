"""What is known of a call that a plan replays and the ledger need not know (`noted.py`): its arguments, in place of the
tensors among them where each is to be had, and what it makes.

Nobody decides when such a note goes. A saved tensor refers to what it stands for, that to the call which makes it, and
that to what it reads: what nobody can ask for any more goes by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from delta.keeping import Kept
from delta.runtime.handle import Handle
from delta.runtime.opfacts import OpFacts
from delta.runtime.recompute import Call
from delta.runtime.settings import Settings, current
from delta.runtime.view import View

if TYPE_CHECKING:
    from delta.runtime.core import Core

Readers = dict[int, int]
"""By key of a storage: how many notes keep it alive."""


class MadeRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to the storage that a noted call made the first time."""

    __slots__ = ("key", "made")
    key: int
    made: weakref.ref[Made]


class Made:
    """A storage that a noted call makes: as it was, and as it was made again."""

    __slots__ = (
        "__weakref__", "kept", "nbytes", "note", "storage", "tensor", "value", "value_version", "version", "view",
    )  # fmt: skip

    def __init__(
        self,
        note: Note,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        died: Callable[[MadeRef], None],
        written: bool = False,
    ) -> None:
        """`tensor`: the result that is on `storage`; `died` is told when that has gone. `written`: the call wrote into
        it, which its version counter will tell when the call has returned to the program."""
        self.note = note
        self.nbytes = storage.nbytes()
        self.storage = MadeRef(storage, died)
        self.storage.key, self.storage.made = storage._cdata, weakref.ref(self)
        self.tensor = weakref.ref(tensor)
        self.view = View.of(tensor)
        self.kept: Kept | None = None  # once it is saved
        self.value: Tensor | None = None
        self.version, self.value_version = tensor._version + written, 0  # of the two

    @property
    def asked_for(self) -> bool:
        """Whether a saved tensor is on it."""
        return self.kept is not None and self.kept.users > 0

    def is_seen_through(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the storage that was made the first time, and nobody has written into that."""
        return tensor._version == self.version and self.storage() is tensor.untyped_storage()

    def found(self) -> Tensor | None:
        """The result, where somebody has it still as it was. A storage alone is not trusted: it takes the tensor to
        tell of writes."""
        if self.value is not None:
            return self.value if self.value._version == self.value_version else None
        tensor = self.tensor()
        return tensor if tensor is not None and self.is_seen_through(tensor) else None

    def is_kept_as(self, tensor: Tensor, alias: Tensor) -> None:
        """`tensor` was saved, and lives on as `alias`."""
        if self.tensor() is tensor:
            self.tensor = weakref.ref(alias)

    def came_back(self, value: Tensor) -> None:
        """The result has been made again."""
        self.value, self.value_version = value, value._version


class Read(NamedTuple):
    """A tensor that a noted call reads. It is there, and had that version then (`given`: the program's own); or another
    note makes it; or it is on the storage of a saved record. `view`: how it looks at that; None where it is the other
    note's result itself."""

    tensor: Tensor | None = None
    version: int = 0
    given: weakref.ref[Tensor] | None = None
    made: Made | None = None
    record: int = -1
    view: View | None = None


class Note:
    """One call. `number`: in the order of the calls, and of all else that the core numbers."""

    __slots__ = (
        "__weakref__", "again_ns", "args", "core", "cost_ns", "facts", "func", "generator", "held", "kwargs", "made",
        "module", "nbytes", "number", "overwrites", "readers", "reads", "records", "settings", "state", "statistics",
    )  # fmt: skip

    def __init__(
        self,
        core: Core,
        func: OpOverload,
        facts: OpFacts,
        call: Call,
        reads: Sequence[Read],
        generator: torch.Generator | None,
        state: Tensor | None,
        cost_ns: int,
        overwrites: int | None = None,
    ) -> None:
        """`generator` and `state`: what a seeded call draws from. `overwrites`: which of the `reads` it writes its
        result into, which is then another version of what a note made. Once it has been added (`Noted.add`) the
        storages it keeps alive count in `readers`, and each record that it reads has a handle by it, until it dies."""
        self.core = core
        self.number = core.next_id()
        self.func, self.facts, self.cost_ns, self.module = func, facts, cost_ns, core.module
        self.args, self.kwargs, self.reads = call.args, call.kwargs, reads
        self.generator, self.state, self.overwrites = generator, state, overwrites
        self.settings: Settings = current()
        self.held = [read.tensor.untyped_storage()._cdata for read in reads if read.tensor is not None]
        self.records = [read.record for read in reads if read.record >= 0]
        self.readers = core.noted.readers
        self.made: list[weakref.ref[Made] | None] = []  # by result; None for what is on no storage of its own
        self.nbytes = 0  # of all that it makes
        self.again_ns: int | None = None  # see `Recipe`
        self.statistics: list[tuple[MadeRef, View]] = []  # of a batch norm whose output they give

    def __del__(self) -> None:
        if self.held or self.records:
            self.core.inbox.note_died(self.readers, self.held, self.records)

    @property
    def overwritten(self) -> Made | None:
        """What is gone once it has run."""
        return self.reads[self.overwrites].made if self.overwrites is not None else None

    @property
    def results(self) -> list[Made | None]:
        """What it makes, by result, as far as somebody may ask for it."""
        return [ref() if ref is not None else None for ref in self.made]


class NotedTensor:
    """A saved tensor on something that has gone, until `taken` says that the core looks after it."""

    __slots__ = ("__weakref__", "core", "kept", "made", "stretch", "taken", "version", "view")

    def __init__(self, core: Core, made: Made, kept: Kept, tensor: Tensor, stretch: int) -> None:
        self.core = core
        self.made: Made | None = made
        self.kept: Kept | None = kept
        self.view = None if made.tensor() is tensor else View.of(tensor)
        self.version = tensor._version
        self.stretch = stretch
        self.taken: Handle | None = None

    def take(self, handle: Handle) -> None:
        """The core looks after it from here on."""
        self.taken, self.made, self.kept = handle, None, None

    def done(self) -> None:
        """Backward is done with it, though it still lives, and what that lets go of has gone. Nobody may ask again."""
        if self.taken is not None:
            self.taken.done()
            return
        with self.core:
            self._died()

    def __del__(self) -> None:
        if self.made is not None:
            self._died()

    def _died(self) -> None:
        made, kept, self.made, self.kept = self.made, self.kept, None, None
        assert made is not None and kept is not None
        self.core.inbox.noted_died(kept, weakref.ref(made))
