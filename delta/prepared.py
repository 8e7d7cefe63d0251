"""How the data of a step are put together, and whether that matters.

A batch is put together before anything of it is saved: sequences are padded, masks made, pictures scaled. That need
not go the same way in each step like another one (what is the longest sequence already is not padded), and where
gradients are accumulated some loops do it for several steps at once. Once two steps that are alike have been seen to
differ in that, what it gives is taken as the program's other inputs are: no replay makes it again, and a step may do
without the ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from delta.planner.steplog import StepLog
from delta.types import Kind, OpInfo

STRUCTURES = 64  # of steps, of which it is remembered how their data were made, the oldest forgotten first


class Preparation:
    """Of all steps of a block. `varies`: whether it goes several ways."""

    def __init__(self) -> None:
        self.varies = False
        self._turned = False
        self._known: dict[tuple[int, ...], tuple[str, ...]] = {}

    def saw(self, log: StepLog) -> None:
        """A step was recorded from its first op on."""
        if self.varies:
            return
        structure, made_by = tuple(log.structures), tuple(_made_by(log))
        if self._known.setdefault(structure, made_by) != made_by:
            self.differs()
        if len(self._known) > STRUCTURES:
            del self._known[next(iter(self._known))]

    def differs(self) -> None:
        """The data of a step came in another way than those of one like it."""
        if not self.varies:
            self.varies = self._turned = True
            self._known.clear()

    def turned(self) -> bool:
        """Whether that is news since the last time: what was learned before is of no use then."""
        news, self._turned = self._turned, False
        return news

    def given(self, log: StepLog) -> StepLog:
        """The step as plans see it: if data come in several ways, those of its ops make nothing that prepare them."""
        if not self.varies:
            return log
        preparing = set(_preparing(log))
        ops = [replace(op, outputs=()) if at in preparing else op for at, op in enumerate(log.ops)]
        return replace(log, ops=ops)


def _preparing(log: StepLog) -> Iterator[int]:
    """The ops that only prepare data: they come before the first save, and what they give could not be made again, or
    does not depend on parameters or buffers.

    None where every access is announced: nearly all of a step comes after its first save there."""
    trained = {record for record, kind in log.kinds.items() if kind is Kind.PARAMETER}
    first = log.ops_before[0] if log.ops_before and not log.turn_ends else 0
    for at, op in enumerate(log.ops[:first]):
        if op.replayable and not trained.isdisjoint(op.inputs):
            trained.update(op.outputs)
        else:
            yield at


def _made_by(log: StepLog) -> list[str]:
    """The names of those that the rest of the step depends on, the last one first."""
    preparing = set(_preparing(log))
    rest: list[OpInfo] = [op for at, op in enumerate(log.ops) if at not in preparing]
    wanted = {record for op in rest for record in op.inputs}.union(log.saves)
    names: list[str] = []
    for at in sorted(preparing, reverse=True):
        op = log.ops[at]
        if not wanted.isdisjoint(op.outputs):
            wanted.update(op.inputs)
            names.append(op.name)
    return names
