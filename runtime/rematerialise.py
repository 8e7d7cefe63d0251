"""Brings a dropped record back by replaying its missing chain, op by op, as the engine orders it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from delta.runtime.cudnn import by_first_choice
from delta.runtime.modes import only_lowest
from delta.runtime.recompute import Recipe, replay
from delta.types import OpInfo

if TYPE_CHECKING:
    from delta.runtime.core import Core

Storages = Mapping[int, torch.UntypedStorage]  # by record


class Rematerialiser:
    """Walks chains; an explicit list, no recursion (rule 7). All calls come while the core is entered."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.spent_ns = 0

    def bring_back(self, record: int) -> None:
        """Replay what is missing for `record`; afterwards it is held. RecomputeMismatchError where a replay differs."""
        core, engine = self._core, self._core.engine
        walk = engine.replays.descend(record, time.perf_counter_ns())
        try:
            while (op := walk.next(time.perf_counter_ns())) is not None:
                self._replay(op)
        finally:
            core.run(engine.replays.end_descent())

    def _replay(self, op: OpInfo) -> None:
        core, engine = self._core, self._core.engine
        core.run(engine.replays.before(op, time.perf_counter_ns()))
        there = {source: core.ready(source) for source in op.inputs}
        core.writes.refuse_unseen(op)
        wanted, stolen = engine.replays.made_again(op), engine.replays.stealable(op)
        recipe = next(slot.recipe for r in op.outputs if (slot := core.slots.get(r)) is not None and slot.recipe)
        core.gauge.make_way(sum(product.nbytes for product in recipe.products))
        began_ns = core.begins()
        with only_lowest(core.modes_below):
            storages = self._storages(op, recipe, there, stolen, wanted)
        ended_ns = time.perf_counter_ns()
        del there  # what is let go of next dies at once, and is heard of before the walk goes on
        for made in wanted:
            slot = core.slots[made]
            slot.storage, slot.form = storages[made], None  # a stand-in has served its time
            slot.ref = core.storages.track(storages[made], made)
        for source in stolen:  # its storage belongs to the new version now
            core.slots[source].ref = core.slots[source].storage = None
        core.run(engine.replays.replayed(op, wanted, stolen))
        core.spent(ended_ns - began_ns)
        self.spent_ns += ended_ns - began_ns
        if core.timeline.active:
            nbytes = sum(product.nbytes for product in recipe.products if product.record in wanted)
            core.emit("recomputed", record=op.outputs[0], nbytes=nbytes, op=op.name, start_ns=began_ns, end_ns=ended_ns)

    def _storages(
        self, op: OpInfo, recipe: Recipe, there: Storages, stolen: frozenset[int], wanted: Sequence[int]
    ) -> dict[int, torch.UntypedStorage]:
        """What the replay makes; where it finds no memory, what it makes after all that can go has gone: that may be
        what the op made the first time, too."""
        try:
            return self._as_before(op, recipe, there, stolen, wanted)
        except torch.OutOfMemoryError:
            if stolen:  # it may have been written into
                raise
        self._core.rescue()
        return self._as_before(op, recipe, there, stolen, wanted)

    def _as_before(
        self, op: OpInfo, recipe: Recipe, there: Storages, stolen: frozenset[int], wanted: Sequence[int]
    ) -> dict[int, torch.UntypedStorage]:
        """What the replay makes, by the algorithm of the first time. OutOfMemoryError where there is no memory for
        that."""
        left = self._left(op, wanted) if recipe.again_ns is not None else {}
        again = partial(replay, recipe, there.__getitem__, stolen, left)
        return by_first_choice(recipe.facts, self._core.device, again)

    def _left(self, op: OpInfo, wanted: Sequence[int]) -> dict[int, torch.UntypedStorage]:
        """What the op made the first time and is still on the device."""
        slots = {made: self._core.slots[made] for made in op.outputs if made in self._core.slots and made not in wanted}
        there = ((made, slot.alive()) for made, slot in slots.items() if slot.coming is None)
        return {made: storage for made, storage in there if storage is not None}
