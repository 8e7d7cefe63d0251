"""A saved tensor that autograd no longer has: it knows the record, and how the tensor looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor

from delta.runtime.versions import counter_of
from delta.runtime.view import View

if TYPE_CHECKING:
    from delta.runtime.core import Core

_DONE = -1  # in place of the record, in a handle that was let go of before its death
LET_GO = (
    "a saved tensor was let go of within the backward of its convolution, and is asked for again: that backward "
    "failed, or a hook of its node asks. Run forward again, or set backward.split_convolutions to false in the policy."
)


@final
class Handle:
    """A saved tensor whose bytes Delta looks after. Its death tells the core that backward is done with it."""

    __slots__ = ("__weakref__", "core", "counter", "record", "stays", "version", "view")

    def __init__(self, core: Core, record: int, view: View, counter: Tensor, version: int, stays: bool) -> None:
        self.core = core
        self.record = record
        self.view = view
        self.counter = counter
        self.version = version
        self.stays = stays  # too small to be evicted

    @property
    def is_done(self) -> bool:
        """Whether it was let go of before its death."""
        return self.record == _DONE

    def done(self) -> None:
        """Backward is done with it, though it still lives, and what that lets go of has gone. Nobody may ask again."""
        record, self.record = self.record, _DONE
        with self.core:
            self.core.inbox.handle_died(record)

    def __del__(self) -> None:
        if self.record != _DONE:
            self.core.inbox.handle_died(self.record, soon=not self.stays)


def handle_of(core: Core, record: int, tensor: Tensor, version: int, stays: bool) -> Handle:
    """The handle of a tensor that was saved on a record."""
    return Handle(core, record, View.of(tensor), counter_of(tensor), version, stays)
