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
from delta.record import Record
from delta.types import Cost, Link


class Chains:
    """Union-find over missing records; each class knows the summed replay cost of its members, in ns.

    A record that comes back leaves its class, and is a new member of a class when it goes again.
    """

    def __init__(self) -> None:
        self._node: dict[int, int] = {}  # missing record -> its node
        self._parent: list[int] = []
        self._cost_ns: list[int] = []
        self._askers: dict[int, set[int]] = {}  # class -> who has asked for a cost that its own is part of

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

    def back(self, record: int, own_ns: int) -> set[int]:
        """`record` is available again. Returns those who have asked for a cost that is less now."""
        node = self._node.pop(record, None)
        if node is None:
            return set()
        root = self._find(node)
        self._cost_ns[root] = max(0, self._cost_ns[root] - own_ns)
        return self._askers.pop(root, set())

    def cost_ns(self, own_ns: int, near: Iterable[int], asker: int | None = None) -> int:
        """Own cost plus that of every distinct class among the records `near`: c* of the design, section 7, with the
        inputs of the op. `asker`: whom to name when one of the classes costs less."""
        roots = {self._find(self._node[record]) for record in near if record in self._node}
        if asker is not None:
            for root in roots:
                self._askers.setdefault(root, set()).add(asker)
        return own_ns + sum(self._cost_ns[root] for root in roots)

    def clear(self) -> None:
        self._node.clear()
        self._parent.clear()
        self._cost_ns.clear()
        self._askers.clear()

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
            fewer, more = sorted((self._askers.pop(root, set()) for root in (left, right)), key=len)
            if more:
                more |= fewer
                self._askers[right] = more


def closure_ns(ledger: Ledger, record: int, step: Callable[[int], Iterable[int]]) -> int:
    """Summed own costs of the evicted records that `step` leads to from `record`, itself left out. What only the
    program keeps alive counts as evicted: it will be gone when the value is asked for."""
    records, seen, todo = ledger.records, {record}, [record]
    while todo:
        for near in step(todo.pop()):
            if near not in seen and not records[near].available:
                seen.add(near)
                todo.append(near)
    seen.remove(record)
    return sum([own_ns(ledger, each) for each in seen])


class Closures:
    """For each record that was asked for, the summed own costs of the evicted records that `step` leads to from it,
    remembered until one of them is evicted, comes back, or is timed anew. `back` is the opposite of `step`."""

    def __init__(
        self, ledger: Ledger, step: Callable[[int], Iterable[int]], back: Callable[[int], Iterable[int]]
    ) -> None:
        self._ledger, self._step, self._back = ledger, step, back
        self._known_ns: dict[int, int] = {}

    def cost_ns(self, record: int) -> int:
        known = self._known_ns.get(record)
        if known is None:
            known = self._known_ns[record] = closure_ns(self._ledger, record, self._step)
        return known

    def clear(self) -> None:
        self._known_ns.clear()

    def forget(self, moved: Iterable[int]) -> list[int]:
        """What leads to a record that moved, through evicted ones, costs something else now. Returns whose cost was
        forgotten."""
        if not self._known_ns:
            return []
        ledger = self._ledger
        todo = [record for record in moved if record in ledger]
        seen = set(todo)
        forgotten = [record for record in todo if self._known_ns.pop(record, None) is not None]
        while todo:
            for near in self._back(todo.pop()):
                if self._known_ns.pop(near, None) is not None:
                    forgotten.append(near)
                if near not in seen and not ledger[near].available:
                    seen.add(near)
                    todo.append(near)
        return forgotten


class Costs:
    """What evicting each record costs in replay time, as DTR's heuristics count it (ICLR 2021, section 4.2). Whose cost
    may have fallen since it was asked for is told by `Ledger.touched`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._chains = Chains()
        self._above = Closures(ledger, ledger.parents, ledger.children)
        self._below = Closures(ledger, ledger.children, ledger.parents)

    def clear(self) -> None:
        """The step has ended."""
        self._chains.clear()
        self._above.clear()
        self._below.clear()

    def settle(self) -> None:
        """Take note of what has moved."""
        ledger = self._ledger
        if ledger.moved:
            ledger.touched.update(self._above.forget(ledger.moved), self._below.forget(ledger.moved))
            ledger.moved.clear()

    def of(self, kind: Cost, record: int) -> int:
        """In ns. `ACTION` is the director's to count."""
        ledger, own = self._ledger, own_ns(self._ledger, record)
        match kind:
            case Cost.ANCESTORS:
                return self.chain_ns(record)
            case Cost.CLASSES:
                return self._chains.cost_ns(own, (*ledger.parents(record), *ledger.children(record)), asker=record)
            case Cost.MAKERS:
                return self._chains.cost_ns(own, (*ledger.parents(record), *ledger.siblings(record)), asker=record)
            case Cost.NEIGHBOURHOOD:
                return self.chain_ns(record) + self._below.cost_ns(record)
            case _:
                return own

    def chain_ns(self, record: int) -> int:
        """Replay time of its own op and all its evicted ancestors."""
        self.settle()
        return own_ns(self._ledger, record) + self._above.cost_ns(record)

    def went_missing(self, rec: Record, of_makers: bool = False) -> None:
        """The record's bytes are gone, and somebody could still ask for them. `of_makers`: it joins the classes of what
        its op reads and makes, else of what its op and its users read and make."""
        op = self._ledger.maker(rec)
        if op is None or rec.available or (not rec.handles and not rec.users):
            return
        neighbours = [*op.inputs, *op.outputs] if of_makers else list(op.inputs)
        for user in () if of_makers else rec.users:
            neighbours += self._ledger.ops[user].outputs
        self._chains.gone(rec.id, own_ns(self._ledger, rec.id), neighbours)

    def back(self, rec: Record) -> None:
        """The record is available again."""
        if self._ledger.maker(rec) is not None:
            self._ledger.touched.update(self._chains.back(rec.id, own_ns(self._ledger, rec.id)))


def own_ns(ledger: Ledger, record: int) -> int:
    """What a replay of the op that made the record takes; 0 if none is known."""
    op = ledger.maker(ledger[record])
    return op.cost_ns + ledger.replay_ns if op is not None else 0


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

    def exposed_ns(self, nbytes: int, now_ns: int, next_use_ns: int, whole: bool = False) -> int:
        """Time compute would wait for a swap of `nbytes`, plus the compute time its copies take away.

        The room is needed now, the value at `next_use_ns`. `whole`: the host has a copy already, so nothing is to be
        copied out.
        """
        busy_ns, copies, gone_ns = self.link.in_ns(nbytes), 1, now_ns
        if not whole:
            busy_ns, copies = busy_ns + self.link.out_ns(nbytes), 2
            gone_ns = max(now_ns, self.out_free_ns) + self.link.out_ns(nbytes)
        back_ns = max(gone_ns, self.in_free_ns) + self.link.in_ns(nbytes)
        return gone_ns - now_ns + max(0, back_ns - next_use_ns) + int(self.link.taken_ns(busy_ns, copies))
