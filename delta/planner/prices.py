"""What evicting a saved storage would cost, given what is evicted already: the market of the greedy planner.

Dropping adds the ops that nothing replayed so far has replayed; so a price rises when what a storage is made of goes,
and falls when a part of its chain is replayed for another's sake. Prices are reckoned when they are asked for and kept
until something they hang on has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from delta.planner.steplog import StepGraph
from delta.types import Action, Link, leaves_recipe_only

# Groups of needs, for which it is reckoned how far copies back are behind.
GROUPS = 64


@dataclass(frozen=True, slots=True)
class Option:
    """One way to evict a storage. `nbytes` is what it frees, `per_byte` its added cost in ns for each of these."""

    order: int
    action: Action
    nbytes: int
    per_byte: float


class Prices:
    """The cheapest way to evict each storage under `actions`, which the caller changes and tells of by `taken`."""

    def __init__(
        self,
        graph: StepGraph,
        link: Link,
        allowed: Sequence[Action],
        forced: Mapping[int, Action],
        actions: Sequence[Action],
    ) -> None:
        self._graph, self._link, self._forced, self._actions = graph, link, forced, actions
        self._recomputes = Action.RECOMPUTE in allowed
        self._swaps, self._encodes = Action.SWAP in allowed, Action.ENCODE in allowed
        self._orders = [node.order for node in graph.nodes]
        self._makers = [None if node.rooted else node.op for node in graph.nodes]
        self._rooted = [node.rooted for node in graph.nodes]
        self._users: list[list[int]] = [[] for _ in graph.nodes]
        for number, op in enumerate(graph.ops):
            for node in op.inputs:
                self._users[node].append(number)
        self.replayed: set[int] = set()
        self._fixed: dict[int, Option | None] = {}  # the best way but for swaps, whose cost the link's load moves
        self._swapped = _Swapped(graph, link)
        for v, action in enumerate(actions):
            if action is Action.SWAP:
                self._swapped.add(v)
            else:
                self.replayed.update(self._adds(v, action) or ())

    def __getitem__(self, v: int) -> Option | None:
        """None where it cannot go."""
        if v not in self._fixed:
            self._fixed[v] = self._cheapest_here(v)
        best = self._fixed[v]
        if not self._swaps or self._forced.get(v, Action.SWAP) is not Action.SWAP or not self._may_go(v):
            return best
        nbytes = self._graph.nodes[self._graph.saved[v]].nbytes
        per_byte = self._swapped.added_ns(v) / nbytes
        return Option(v, Action.SWAP, nbytes, per_byte) if best is None or per_byte < best.per_byte else best

    def taken(self, option: Option) -> list[int]:
        """The caller has done this. Returns the save orders of what may be cheaper now."""
        if option.action is Action.SWAP:
            self._swapped.add(option.order)
        if not self._drops(option.order, option.action):
            return []
        added = self._adds(option.order, option.action) or []
        self.replayed.update(added)
        return self._reprice([self._graph.saved[option.order]], added)

    def _may_go(self, v: int) -> bool:
        node = self._graph.nodes[self._graph.saved[v]]
        return node.evictable and node.nbytes > 0

    def _cheapest_here(self, v: int) -> Option | None:
        """Among dropping and encoding."""
        if not self._may_go(v):
            return None
        node, forced = self._graph.nodes[self._graph.saved[v]], self._forced.get(v)
        best: Option | None = None
        if self._recomputes and forced in (None, Action.RECOMPUTE):
            added = self._added(v)
            if added is not None:
                cost_ns = sum(self._graph.ops[op].cost_ns for op in added)
                best = Option(v, Action.RECOMPUTE, node.nbytes, cost_ns / node.nbytes)
        if self._encodes and forced in (None, Action.ENCODE) and node.encoded_bytes:
            added = self._adds(v, Action.ENCODE)
            if added is not None:
                freed = node.nbytes - node.encoded_bytes
                replay_ns = sum(self._graph.ops[op].cost_ns for op in added)
                per_byte = (node.encode_ns + node.decode_ns + replay_ns) / freed
                if best is None or per_byte < best.per_byte:
                    best = Option(v, Action.ENCODE, freed, per_byte)
        return best

    def _drops(self, v: int, action: Action) -> bool:
        """Whether a replay that reads `v` has to make it again."""
        return leaves_recipe_only(action, self._graph.nodes[self._graph.saved[v]].stand_in)

    def _adds(self, v: int, action: Action) -> list[int] | None:
        """Ops that this action on `v` adds to the replays. None where they cannot be replayed."""
        if not self._drops(v, action):
            return []
        added = self._added(v)
        if action is Action.RECOMPUTE or added is None:
            return added
        return added if any(user in self.replayed for user in self._users[self._graph.saved[v]]) else []

    def _added(self, v: int) -> list[int] | None:
        """Ops that dropping `v` adds to the replays. None where its chain cannot be replayed."""
        ops, orders, makers, replayed = self._graph.ops, self._orders, self._makers, self.replayed
        target = self._graph.saved[v]
        if self._rooted[target]:
            return []
        added: list[int] = []
        seen: set[int] = set()
        todo = [target]
        while todo:
            node = todo.pop()
            order = orders[node]
            kept = order >= 0 and not self._drops(order, self._actions[order])
            if self._rooted[node] or (node != target and kept):
                continue
            op = makers[node]
            if op is None or not ops[op].replayable:
                return None
            if op not in replayed and op not in seen:
                seen.add(op)
                added.append(op)
                todo += ops[op].inputs
        return added

    def _reprice(self, gone: list[int], replayed: list[int]) -> list[int]:
        """Forget the prices of what is made, directly or through what is not kept, of these; and of siblings."""
        graph, orders = self._graph, self._orders
        found: dict[int, None] = {}
        seen: set[int] = set(gone)
        todo = [*gone, *(node for op in replayed for node in graph.ops[op].outputs)]
        while todo:
            node = todo.pop()
            order = orders[node]
            if order >= 0 and not self._drops(order, self._actions[order]):
                if order not in found:
                    self._fixed.pop(order, None)
                    found[order] = None
                continue
            for user in self._users[node]:
                if user in self.replayed:
                    continue  # whatever is made of that costs no more, and no less: no chain goes on behind it
                for made in graph.ops[user].outputs:
                    if made not in seen:
                        seen.add(made)
                        todo.append(made)
        return list(found)


class _Swapped:
    """What is swapped so far, and what more of it would have compute wait for.

    A copy back has all of backward up to the first need, and shares it with those that are needed before: compute waits
    for as long as what is needed by some time takes longer than there is until then. Needs are taken together, as if
    all of a group came with its first one.
    """

    def __init__(self, graph: StepGraph, link: Link) -> None:
        self._graph, self._link, self._bytes = graph, link, 0
        self._forward_ns = graph.need_ns[0] if graph.need_ns else 0
        self._group = 1 + len(graph.need_ns) // GROUPS
        self._late_ns = [self._forward_ns - at_ns for at_ns in graph.need_ns[:: self._group]]  # copies up to each group
        self._worst_ns: list[int] = []  # of a group and those after it; empty: to be reckoned again

    def add(self, v: int) -> None:
        nbytes = self._graph.nodes[self._graph.saved[v]].nbytes
        self._bytes += nbytes
        in_ns, late_ns = self._link.in_ns(nbytes), self._late_ns
        for group in range(self._graph.first_need[v] // self._group, len(late_ns)):
            late_ns[group] += in_ns
        self._worst_ns = []

    def added_ns(self, v: int) -> float:
        """Compute time its copies take, and what does not fit beside forward (out) or before its need (in) any more."""
        link, nbytes = self._link, self._graph.nodes[self._graph.saved[v]].nbytes
        out_ns, in_ns = link.out_ns(nbytes), link.in_ns(nbytes)
        over_out = min(out_ns, max(0, link.out_ns(self._bytes + nbytes) - self._forward_ns))
        return link.taken_ns(out_ns + in_ns, 2) + over_out + self._over_in_ns(self._graph.first_need[v], in_ns)

    def _over_in_ns(self, need: int, in_ns: int) -> int:
        if need == len(self._graph.needs):
            return 0
        if not self._worst_ns:
            self._worst_ns = list(accumulate(reversed(self._late_ns), max))[::-1]
        return max(0, self._worst_ns[need // self._group] + in_ns - max(0, self._worst_ns[0]))
