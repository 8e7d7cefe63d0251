"""What is on the host and not here, in the order of its next use."""

from __future__ import annotations

from bisect import bisect_left, insort


class Away:
    """Storages and when each is used next, or a little sooner: a use that has fallen away may still be told."""

    def __init__(self) -> None:
        self._use_ns: dict[int, float] = {}
        self._in_order: list[tuple[float, int]] = []

    def copy(self) -> Away:
        other = Away()
        other._use_ns, other._in_order = self._use_ns.copy(), self._in_order.copy()
        return other

    def __len__(self) -> int:
        return len(self._use_ns)

    def set(self, storage: int, use_ns: float) -> None:
        """A storage is away, or its next use is another one."""
        if storage in self._use_ns:
            self.remove(storage)
        self._use_ns[storage] = use_ns
        insort(self._in_order, (use_ns, storage))

    def remove(self, storage: int) -> None:
        """A storage is on its way back."""
        del self._in_order[bisect_left(self._in_order, (self._use_ns.pop(storage), storage))]

    def is_used_after(self, storage: int, use_ns: float) -> bool:
        """Whether the storage is away and its next use is later than that."""
        return self._use_ns.get(storage, 0) > use_ns

    def soonest(self, count: int) -> list[tuple[float, int]]:
        """The next uses and what is used."""
        return self._in_order[:count]
