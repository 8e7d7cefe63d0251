"""What exists as a trace goes on: every event is checked against it, and bytes are counted, nothing evicted."""

from __future__ import annotations

from dataclasses import dataclass

from delta.trace.events import Backward, Constant, Event, Free, Need, Op, Result, Save, Unsave


@dataclass(slots=True)
class _Storage:
    """It exists while the program refers to it (until it is `freed`) or a saved tensor is on it (`handles`)."""

    nbytes: int
    constant: bool = False
    handles: int = 0
    freed: bool = False

    @property
    def exists(self) -> bool:
        return not self.freed or self.handles > 0


class Inventory:
    """Follows a trace event by event. Its peaks are those of the step with nothing evicted.

    `live_bytes` is all that exists, constants too; an op's outputs are there before its inputs go, and what it
    overwrites turns into an output. `saved_bytes` is what has a handle, each storage once.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._results = False
        self.live_bytes = 0
        self.peak_bytes = 0
        self.saved_bytes = 0
        self.peak_saved_bytes = 0

    def __len__(self) -> int:
        return len(self._storages)

    def take(self, event: Event) -> None:
        """The next event. ValueError, in words, if it cannot happen here."""
        _require(not self._results or isinstance(event, Result), "only results may follow a result")
        match event:
            case Constant(storage, nbytes):
                self._add(storage, nbytes, constant=True)
                self._count_live(nbytes)
            case Op():
                self._run(event)
            case Save(storage, encoded_bytes):
                _require(
                    encoded_bytes < max(1, self._existing(storage).nbytes),
                    f"storage {storage} takes {encoded_bytes} bytes encoded, no less than as it is",
                )
                self._save(self._existing(storage))
            case Need(storage):
                _require(self._existing(storage).handles > 0, f"storage {storage} is needed, but not saved")
            case Unsave(storage):
                self._unsave(storage, self._existing(storage))
            case Free(storage):
                self._free(storage, self._existing(storage))
            case Result(storage):
                self._existing(storage)
                self._results = True
            case Backward():
                pass

    def end(self) -> None:
        """The trace ends here. ValueError if something is still saved: then the step is not whole."""
        for number, storage in self._storages.items():
            _require(not storage.handles, f"the step ends while storage {number} is still saved")

    def _run(self, op: Op) -> None:
        _require(min(op.cost_ns, op.workspace_bytes, op.again_ns) >= 0, "a time or a size is negative")
        _require(len(op.outputs) == len(op.nbytes), f"{len(op.outputs)} outputs, but {len(op.nbytes)} sizes")
        _require(len(op.overwrites) <= len(op.outputs), "what is overwritten has no output to become")
        for storage in op.inputs:
            self._existing(storage)
        for storage, nbytes in zip(op.outputs, op.nbytes, strict=True):
            self._add(storage, nbytes)
        overwritten_bytes = saved_bytes = 0
        for old, new, nbytes in zip(op.overwrites, op.outputs, op.nbytes, strict=False):
            _require(old in op.inputs, f"storage {old} is overwritten, but no input")
            before_bytes = self._existing(old).nbytes  # as many as now, unless the op resizes
            overwritten_bytes += before_bytes
            if self._become(old, new):
                saved_bytes += nbytes - before_bytes
        self._count_saved(saved_bytes)
        self._count_live(sum(op.nbytes) - overwritten_bytes, op.workspace_bytes)

    def _become(self, old: int, new: int) -> int:
        """The bytes of `old` hold `new` from here on; the handles follow, as those of autograd do. How many."""
        before, after = self._storages[old], self._storages[new]
        after.handles, before.handles, before.freed = before.handles, 0, True
        return after.handles

    def _save(self, storage: _Storage) -> None:
        storage.handles += 1
        if storage.handles == 1:
            self._count_saved(storage.nbytes)

    def _unsave(self, number: int, storage: _Storage) -> None:
        _require(storage.handles > 0, f"storage {number} has no saved tensor that could die")
        storage.handles -= 1
        if not storage.handles:
            self._count_saved(-storage.nbytes)
        if not storage.exists:
            self._count_live(-storage.nbytes)

    def _free(self, number: int, storage: _Storage) -> None:
        _require(not storage.constant, f"storage {number} is a constant, which stays")
        _require(not storage.freed, f"storage {number} is freed twice")
        storage.freed = True
        if not storage.exists:
            self._count_live(-storage.nbytes)

    def _add(self, number: int, nbytes: int, constant: bool = False) -> None:
        _require(number not in self._storages, f"storage {number} is made twice")
        _require(min(number, nbytes) >= 0, f"storage {number} has {nbytes} bytes: neither may be negative")
        self._storages[number] = _Storage(nbytes, constant)

    def _existing(self, number: int) -> _Storage:
        storage = self._storages.get(number)
        if storage is None or not storage.exists:
            raise ValueError(f"storage {number} {'is unknown' if storage is None else 'is gone'} here")
        return storage

    def _count_live(self, change_bytes: int, workspace_bytes: int = 0) -> None:
        self.live_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)

    def _count_saved(self, change_bytes: int) -> None:
        self.saved_bytes += change_bytes
        self.peak_saved_bytes = max(self.peak_saved_bytes, self.saved_bytes)


def _require(met: bool, otherwise: str) -> None:
    if not met:
        raise ValueError(otherwise)
