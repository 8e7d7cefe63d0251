"""Writes in place: each makes a new version of its storage, and a record of its own for it.

What a dropped record's recipe still reads is cloned first (rule 5), if the write is told of. A write that nobody tells
of is found by the version counter, and refused where its old value would be needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from delta.errors import StorageModifiedError
from delta.runtime.opfacts import OpFacts
from delta.runtime.view import is_shared
from delta.types import Kind, OpInfo, Preserve

if TYPE_CHECKING:
    from delta.runtime.core import Core


class Writes:
    """`begin` before an op that writes, `end` after it, and `settle` when it has been recorded."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def begin(self, tensors: Iterable[Tensor]) -> set[int]:
        """Storages about to be written; returns the records whose old version was saved from it."""
        core = self._core
        preserved, in_backward = set(), torch._C._current_graph_task_id() != -1
        for tensor in tensors:
            record = core.storages.known_to_be_written(tensor)
            if record is None or record in preserved:
                continue
            while instructions := core.engine.before_overwrite(record, in_backward):
                core.run(instructions)  # a copy out that was waited for may have failed: then it is asked again
                if any(isinstance(instruction, Preserve) for instruction in instructions):
                    preserved.add(record)
                    break
        return preserved

    def end(self, tensors: Iterable[Tensor], preserved: set[int]) -> dict[int, int]:
        """Storages were written: each becomes a new record. Returns old -> new."""
        core = self._core
        versions: dict[int, int] = {}
        for tensor in tensors:
            old = core.storages.known(tensor)
            if old is None or old in versions or old in versions.values():
                continue
            core.slots[old].seen = None  # this write is known of
            rec = core.engine.ledger[old]
            if not rec.depended_on and rec.nbytes == tensor.untyped_storage().nbytes():
                continue
            kind = Kind.PARAMETER if core.persistent.holds(tensor) else Kind.ACTIVATION
            new = core.storages.create(tensor, kind)
            versions[old] = new
            if old not in preserved:
                core.slots[old].ref = None
            core.run(core.engine.overwritten(old, new, old in preserved))
        return versions

    def failed(self, tensors: Iterable[Tensor], preserved: set[int]) -> None:
        """The op that was to write has raised, and may have written some of it."""
        self.settle(self.end(tensors, preserved))

    def settle(self, versions: Iterable[int]) -> None:
        """The op that made new versions out of these has been recorded, or will not be."""
        for old in versions:
            self._core.run(self._core.engine.version_ended(old))

    def refuse_unseen(self, op: OpInfo) -> None:
        """Raise where an input of an op that is to be replayed has been written since, and nobody told."""
        for source in op.inputs:
            if self._core.slots[source].written_unseen:
                self._core.engine.written_unseen()
                raise refusal(op.name, self._core.engine.ledger[source].nbytes)


def filled_unseen(facts: OpFacts, tensor: Tensor) -> bool:
    """Whether what an op made, and is saved now, may have got its content from somebody that nobody sees: then the op
    does not give it again (rule 19)."""
    return facts.unfilled or is_shared(tensor)


def refusal(op: str, nbytes: int) -> StorageModifiedError:
    """What to raise where an op to be replayed would read what has been written since."""
    return StorageModifiedError(
        f"a dropped tensor cannot be made again: {op} would read {nbytes} bytes that were written after forward where "
        "Delta does not see it (by another thread, by C++ code in backward, or in backward for the first time). Write "
        "them after backward, or write into a clone."
    )
