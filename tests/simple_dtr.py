"""DTR once more, as its paper puts it (Kirisame et al., ICLR 2021, sections 3 and 4), with plain loops over a list of
storages: to compare the simulator with. It shares nothing with Delta but the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from delta.trace.events import Constant, Free, Op, Result, Trace


class Stuck(Exception):
    """It does not fit, and nothing can be evicted."""


@dataclass(eq=False)
class Storage:
    nbytes: int
    maker: Op | None  # None: a constant
    here: bool = True
    locks: int = 0
    used_ns: int = 0
    parents: list[Storage] = field(default_factory=list)
    children: list[Storage] = field(default_factory=list)

    @property
    def own_ns(self) -> int:
        return self.maker.cost_ns if self.maker else 0


class Dtr:
    """`run` gives the time of the step."""

    def __init__(self, trace: Trace, budget_bytes: int, cost: str) -> None:
        self._trace, self._budget_bytes = trace, budget_bytes
        self._cost: Callable[[Storage], int] = {
            "own": lambda storage: storage.own_ns,
            "neighbourhood": self._neighbourhood_ns,
            "classes": self._classes_ns,
        }[cost]
        self._storages: dict[int, Storage] = {}
        self._now_ns = 0
        self._groups: list[tuple[set[Storage], int]] = []  # (members, ever merged, and their cost)

    def run(self) -> int:
        for event in self._trace.events:
            match event:
                case Constant(number, nbytes):
                    self._storages[number] = Storage(nbytes, None, locks=1)
                case Op():
                    self._call(event)
                case Free(number):
                    storage = self._storages[number]
                    if storage.here:
                        self._evict(storage)  # eager eviction
                case Result(number):
                    storage = self._storages[number]
                    self._materialise(storage)
                    storage.locks += 1
        return self._now_ns

    def _call(self, op: Op) -> None:
        inputs = [self._storages[number] for number in op.inputs]
        for number, nbytes in zip(op.outputs, op.nbytes, strict=True):
            storage = self._storages[number] = Storage(nbytes, op, here=False)
            storage.parents = [parent for parent in inputs if parent.maker]
            for parent in storage.parents:
                parent.children.append(storage)
        self._execute(op)
        for number in op.outputs:
            self._storages[number].used_ns = self._now_ns

    def _execute(self, op: Op) -> None:
        """What is there is locked first, then what is missing is made, then there has to be room."""
        inputs = [self._storages[number] for number in op.inputs]
        for storage in inputs:
            storage.used_ns = self._now_ns
            storage.locks += 1
        for storage in inputs:
            self._materialise(storage)
        self._make_room(sum(op.nbytes))
        self._now_ns += op.cost_ns
        for number in op.outputs:
            self._arrive(self._storages[number])
        for storage in inputs:
            storage.locks -= 1

    def _materialise(self, storage: Storage) -> None:
        if not storage.here:
            assert storage.maker is not None
            self._execute(storage.maker)

    def _make_room(self, nbytes: int) -> None:
        while sum(storage.nbytes for storage in self._storages.values() if storage.here) + nbytes > self._budget_bytes:
            free = [storage for storage in self._storages.values() if storage.here and not storage.locks]
            if not free:
                raise Stuck
            self._evict(min(free, key=self._score))

    def _score(self, storage: Storage) -> float:
        weight = storage.nbytes * (self._now_ns - storage.used_ns)
        return self._cost(storage) / weight if weight else float("inf")

    # -- going and coming -----------------------------------------------------------------------------------------
    def _evict(self, storage: Storage) -> None:
        storage.here = False
        members, cost_ns = {storage}, storage.own_ns
        for group in self._missing_groups(storage):
            self._groups.remove(group)
            members |= group[0]
            cost_ns += group[1]
        self._groups.append((members, cost_ns))

    def _arrive(self, storage: Storage) -> None:
        """It leaves its class; whoever stays is not split."""
        storage.here = True
        for group in self._groups:
            if storage in group[0]:
                self._groups.remove(group)
                self._groups.append((group[0] - {storage}, group[1] - storage.own_ns))
                return

    # -- costs ----------------------------------------------------------------------------------------------------
    def _missing_groups(self, storage: Storage) -> list[tuple[set[Storage], int]]:
        near = {other for other in (*storage.parents, *storage.children) if not other.here}
        return [group for group in self._groups if group[0] & near]

    def _classes_ns(self, storage: Storage) -> int:
        return storage.own_ns + sum(cost_ns for _, cost_ns in self._missing_groups(storage))

    def _neighbourhood_ns(self, storage: Storage) -> int:
        up = self._evicted_from(storage, lambda other: other.parents)
        down = self._evicted_from(storage, lambda other: other.children)
        return storage.own_ns + sum(other.own_ns for other in (*up, *down))

    def _evicted_from(self, storage: Storage, step: Callable[[Storage], Iterable[Storage]]) -> set[Storage]:
        found: set[Storage] = set()
        edge = [storage]
        while edge:
            fresh = {other for one in edge for other in step(one) if not other.here} - found - {storage}
            found |= fresh
            edge = list(fresh)
        return found
