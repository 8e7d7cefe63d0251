"""What it costs to have a record again: chains of ops to replay, and the queue on the way to the host.

`Chains` is DTR's union-find approximation of the evicted neighbourhood (Kirisame et al., ICLR 2021, section 4.2 and
`h_eq` of its simulator): a record that goes joins the class of its missing neighbours, and a class carries the sum of
their own costs. A record that comes back takes its cost out of its class; classes are never split, so a cost may
include ops that are connected no more. That error is the published one and is accepted for its speed.

`LinkQueue` models both directions of the link as first-in-first-out queues, which turns "how long does this copy take"
into "how long would compute wait for it".
"""

from __future__ import annotations

from collections.abc import Iterable

from delta.types import Link


class Chains:
    """Union-find over missing records; each class knows the summed replay cost of its members, in ns."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._cost_ns: dict[int, int] = {}
        self._missing: set[int] = set()

    def gone(self, record: int, own_ns: int, neighbours: Iterable[int]) -> None:
        """`record` went missing; `neighbours` are the inputs and outputs of its op and of its users."""
        if record in self._missing:
            return
        self._missing.add(record)
        self._parent.setdefault(record, record)
        root = self._find(record)
        self._cost_ns[root] = self._cost_ns.get(root, 0) + own_ns
        for neighbour in neighbours:
            if neighbour in self._missing:
                self._merge(record, neighbour)

    def back(self, record: int, own_ns: int) -> None:
        """`record` is available again."""
        if record in self._missing:
            self._missing.discard(record)
            root = self._find(record)
            self._cost_ns[root] = max(0, self._cost_ns[root] - own_ns)

    def cost_ns(self, own_ns: int, inputs: Iterable[int]) -> int:
        """Own cost plus that of every distinct class among the inputs: c* of the design, section 7."""
        roots = {self._find(record) for record in inputs if record in self._missing}
        return own_ns + sum(self._cost_ns[root] for root in roots)

    def clear(self) -> None:
        self._parent.clear()
        self._cost_ns.clear()
        self._missing.clear()

    def _find(self, record: int) -> int:
        parent = self._parent
        while parent[record] != record:
            parent[record] = parent[parent[record]]
            record = parent[record]
        return record

    def _merge(self, left: int, right: int) -> None:
        left, right = self._find(left), self._find(right)
        if left != right:
            self._parent[left] = right
            self._cost_ns[right] += self._cost_ns.pop(left)


class LinkQueue:
    """When each direction of the link will be free, and what a new copy would make compute wait."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.out_free_ns = 0
        self.in_free_ns = 0

    def begin_out(self, nbytes: int, now_ns: int) -> int:
        """Queue a copy out; returns when it will be done."""
        self.out_free_ns = max(now_ns, self.out_free_ns) + self.link.out_ns(nbytes)
        return self.out_free_ns

    def begin_in(self, nbytes: int, now_ns: int) -> int:
        """Queue a copy in; returns when it will be done."""
        self.in_free_ns = max(now_ns, self.in_free_ns) + self.link.in_ns(nbytes)
        return self.in_free_ns

    def exposed_ns(self, nbytes: int, now_ns: int, room_by_ns: int, next_use_ns: int, whole: bool = False) -> int:
        """Time compute would wait for a swap of `nbytes`, plus the compute time its copies take away.

        `room_by_ns`: when the room is needed; `next_use_ns`: when the value is. `whole`: the host has a copy already,
        so nothing is to be copied out.
        """
        busy_ns = self.link.in_ns(nbytes)
        out_wait_ns, ready_ns = 0, now_ns
        if not whole:
            busy_ns += self.link.out_ns(nbytes)
            ready_ns = max(now_ns, self.out_free_ns) + self.link.out_ns(nbytes)
            out_wait_ns = max(0, ready_ns - room_by_ns)
        back_ns = max(ready_ns, self.in_free_ns) + self.link.in_ns(nbytes)
        return out_wait_ns + max(0, back_ns - next_use_ns) + int(busy_ns * self.link.interference)
