"""What it costs to have a record again: chains of ops to replay, and the queue on the way to the host.

`Chains` is DTR's union-find approximation of the evicted neighbourhood (Kirisame et al., ICLR 2021, section 4.2 and
`h_eq` of its simulator): a record that goes joins the class of its missing neighbours, and a class carries the sum of
their own costs. A record that comes back takes its cost out of its class; classes are never split, so a cost may
include ops that are connected no more. That error is the published one and is accepted for its speed.

`LinkQueue` models both directions of the link as first-in-first-out queues, which turns "how long does this copy take"
into "how long would compute wait for it".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from delta.ledger import Ledger
from delta.types import Cost, Link


class Chains:
    """Union-find over missing records; each class knows the summed replay cost of its members, in ns.

    A record that comes back leaves its class, and is a new member of a class when it goes again.
    """

    def __init__(self) -> None:
        self._node: dict[int, int] = {}  # missing record -> its node
        self._parent: list[int] = []
        self._cost_ns: list[int] = []

    def gone(self, record: int, own_ns: int, neighbours: Iterable[int]) -> None:
        """`record` went missing; `neighbours` are the inputs and outputs of its op and of its users."""
        if record in self._node:
            return
        node = self._node[record] = len(self._parent)
        self._parent.append(node)
        self._cost_ns.append(own_ns)
        for neighbour in neighbours:
            if neighbour in self._node:
                self._merge(self._node[neighbour], node)

    def back(self, record: int, own_ns: int) -> None:
        """`record` is available again."""
        node = self._node.pop(record, None)
        if node is not None:
            root = self._find(node)
            self._cost_ns[root] = max(0, self._cost_ns[root] - own_ns)

    def cost_ns(self, own_ns: int, near: Iterable[int]) -> int:
        """Own cost plus that of every distinct class among the records `near`: c* of the design, section 7, with the
        inputs of the op."""
        roots = {self._find(self._node[record]) for record in near if record in self._node}
        return own_ns + sum(self._cost_ns[root] for root in roots)

    def clear(self) -> None:
        self._node.clear()
        self._parent.clear()
        self._cost_ns.clear()

    def _find(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def _merge(self, left: int, right: int) -> None:
        left, right = self._find(left), self._find(right)
        if left != right:
            self._parent[left] = right
            self._cost_ns[right] += self._cost_ns[left]


def closure_ns(ledger: Ledger, record: int, step: Callable[[int], Iterable[int]]) -> int:
    """Summed own costs of the evicted records that `step` leads to from `record`, itself left out. What only the
    program keeps alive counts as evicted: it will be gone when the value is asked for."""
    seen, todo, total_ns = {record}, [record], 0
    while todo:
        for near in step(todo.pop()):
            if near not in seen and not ledger[near].available:
                seen.add(near)
                todo.append(near)
                total_ns += own_ns(ledger, near)
    return total_ns


class Ancestry:
    """For each record, the replay time of its own op and all its evicted ancestors, remembered until one of them is
    evicted or comes back."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known_ns: dict[int, int] = {}

    def cost_ns(self, record: int) -> int:
        if self._ledger.moved:
            self._forget_below()
        known = self._known_ns.get(record)
        if known is None:
            known = own_ns(self._ledger, record) + closure_ns(self._ledger, record, self._ledger.parents)
            self._known_ns[record] = known
        return known

    def clear(self) -> None:
        """Op times have changed, or the step has ended."""
        self._known_ns.clear()

    def _forget_below(self) -> None:
        """What is made out of a record that moved, through evicted ones, costs something else now."""
        ledger = self._ledger
        seen, todo = set(ledger.moved), [record for record in ledger.moved if record in ledger]
        ledger.moved.clear()
        while todo:
            for child in ledger.children(todo.pop()):
                self._known_ns.pop(child, None)
                if child not in seen and not ledger[child].available:
                    seen.add(child)
                    todo.append(child)


def own_ns(ledger: Ledger, record: int) -> int:
    """Time of the op that made the record; 0 if none is known."""
    op_id = ledger[record].op
    op = ledger.ops.get(op_id) if op_id is not None else None
    return op.cost_ns if op is not None else 0


def eviction_cost_ns(kind: Cost, ledger: Ledger, chains: Chains, ancestry: Ancestry, record: int) -> int:
    """What losing the record costs in replay time, as DTR's heuristics count it (ICLR 2021, section 4.2)."""
    own = own_ns(ledger, record)
    match kind:
        case Cost.ANCESTORS:
            return ancestry.cost_ns(record)
        case Cost.CLASSES:
            return chains.cost_ns(own, (*ledger.parents(record), *ledger.children(record)))
        case Cost.MAKERS:
            return chains.cost_ns(own, (*ledger.parents(record), *ledger.siblings(record)))
        case Cost.NEIGHBOURHOOD:
            return ancestry.cost_ns(record) + closure_ns(ledger, record, ledger.children)
        case _:
            return own


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
