"""What a choice of actions would do to a step: resident bytes at every backward position, replay and copy costs.

The forecast walks backward once, in the order of the recorded step, and does what the engine will do: a missing storage
is replayed together with its missing ancestors, what such a chain makes for later needs stays, its other products go
after their last use in the chain; a swapped storage is copied back as late as the link allows; an encoded one is
decoded when it is read, and both forms take room while one is made from the other. What has only a stand-in is decoded
for each need and does not stay; a replay that reads it makes it again. It is a model of the engine, not the engine: a
plan is checked again by the peak that the planned step really had.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import add

from delta.planner.steplog import StepGraph
from delta.types import Action, Link, OpInfo

# A copy back starts this many times its own length before the value is used: a late one stalls compute, an early one
# only takes room a little longer.
EARLY = 2.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is resident, and when.

    `forward_bytes[k]` is resident when the k-th storage has just been saved, `resident_bytes[p]` the most while need
    p is served; `back_at[v]` is the position where v is back.
    """

    forward_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]
    back_at: tuple[int, ...]
    prefetch: dict[int, tuple[int, ...]]
    replay_ns: int
    stall_ns: int
    swap_bytes: int
    encode_ns: int = 0  # encoding and decoding
    late_ns: int = 0  # of the stall: copies back that there is no time for

    @property
    def cost_ns(self) -> int:
        """What the step is longer by."""
        return self.replay_ns + self.stall_ns + self.encode_ns

    @property
    def peak_bytes(self) -> int:
        return max(max(self.resident_bytes, default=0), max(self.forward_bytes, default=0))


def copies_back(graph: StepGraph, first_use: Mapping[int, int], link: Link) -> tuple[dict[int, tuple[int, ...]], int]:
    """When the copies back of swapped storages start: as late as possible, one after the other.

    `first_use`: position at which each is read first, by backward itself or by a replay. Returns position -> save
    orders, and the time by which the link is too slow to have everything in backward.
    """
    prefetch: dict[int, list[int]] = {}
    start_ns = graph.end_ns
    for v, position in sorted(first_use.items(), key=lambda item: (-item[1], -item[0])):
        took_ns = link.in_ns(graph.nodes[graph.saved[v]].nbytes)
        lead_ns = min(start_ns, graph.need_ns[position]) - int(took_ns * EARLY)
        start_ns = min(start_ns, graph.need_ns[position]) - took_ns
        at = max(0, min(bisect_right(graph.need_ns, lead_ns), position) - 1)
        prefetch.setdefault(at, []).append(v)
    late_ns = max(0, graph.need_ns[0] - start_ns) if first_use else 0
    return {at: tuple(reversed(orders)) for at, orders in prefetch.items()}, late_ns


def copies_out(graph: StepGraph, actions: Sequence[Action], link: Link) -> dict[int, int]:
    """When the copy out of each swapped storage ends: first in, first out, from the moment it is saved."""
    done: dict[int, int] = {}
    free_ns = 0
    for v, action in enumerate(actions):
        if action is Action.SWAP:
            free_ns = max(free_ns, graph.save_ns[v]) + link.out_ns(graph.nodes[graph.saved[v]].nbytes)
            done[v] = free_ns
    return done


def forecast(graph: StepGraph, actions: Sequence[Action], link: Link) -> Forecast:
    """Walk backward under `actions`, one for each saved storage."""
    return Forecaster(graph, link).forecast(actions)


class Forecaster:
    """Makes many forecasts of one step: what does not hang on the actions is laid out once."""

    def __init__(self, graph: StepGraph, link: Link) -> None:
        self.graph, self.link = graph, link
        self.sizes = graph.saved_bytes
        self.nbytes = [node.nbytes for node in graph.nodes]
        self.orders = [node.order for node in graph.nodes]
        self.makers = [node.op for node in graph.nodes]
        self.rooted = [node.rooted for node in graph.nodes]
        self.taken = [_taken(graph, op) for op in graph.ops]
        self.released: list[list[int]] = [[] for _ in range(len(graph.needs) + 1)]  # before each need
        for v, before in enumerate(graph.release):
            self.released[before].append(v)

    def forecast(self, actions: Sequence[Action]) -> Forecast:
        """What comes of `actions`, one for each saved storage."""
        graph, link = self.graph, self.link
        walk = _Walk(self, actions)
        resident = walk.run()
        prefetch, late_ns = copies_back(graph, walk.used_at, link)
        out_done_ns = copies_out(graph, actions, link)
        there = [0] * (len(resident) + 1)  # of what comes back ahead of its use, or is on its way out: how it changes
        for at, orders in prefetch.items():
            for v in orders:
                came = walk.back_at[v]
                if at <= came:  # else a replay has made it before
                    there[at] += self.sizes[v]
                    there[came + (came < walk.used_at[v])] -= self.sizes[v]  # while one makes it, it is there twice
                    walk.back_at[v] = at
        for v, done_ns in out_done_ns.items():
            there[0] += self.sizes[v]
            there[bisect_right(graph.need_ns, done_ns)] -= self.sizes[v]
        resident = list(map(add, resident, accumulate(there)))
        if graph.beside_needs:
            resident = list(map(add, resident, graph.beside_needs))
        swap_bytes = sum(self.sizes[v] for v in out_done_ns)
        busy_ns = link.out_ns(swap_bytes) + link.in_ns(swap_bytes)
        stall_ns = late_ns + int(link.taken_ns(busy_ns, 2 * len(out_done_ns)))
        return Forecast(
            tuple(self._forward(actions, out_done_ns)),
            tuple(resident),
            tuple(walk.back_at),
            prefetch,
            walk.replay_ns,
            stall_ns,
            swap_bytes,
            walk.encode_ns,
            late_ns,
        )

    def _forward(self, actions: Sequence[Action], out_done_ns: Mapping[int, int]) -> list[int]:
        """Resident bytes after each save: what is kept or encoded, what the program still uses, what is on its way
        out."""
        graph, sizes = self.graph, self.sizes
        count = len(sizes)
        change = [0] * (count + 1)
        for v, action in enumerate(actions):
            change[v] += sizes[v]
            if action is Action.KEEP:
                continue
            until = graph.floats_to[v] + 1
            if v in out_done_ns:
                until = max(until, bisect_right(graph.save_ns, out_done_ns[v]))
            change[until] -= sizes[v]
            if action is Action.ENCODE:
                change[v] += graph.nodes[graph.saved[v]].encoded_bytes
        return list(map(add, accumulate(change[:count]), graph.beside_saves or repeat(0)))


def _taken(graph: StepGraph, op: OpInfo) -> int:
    """What an op has for a moment beside what it makes, as far as that is known."""
    orders = [graph.nodes[node].order for node in op.outputs] if graph.making else []
    return max((graph.making[order] for order in orders if order >= 0), default=0)


class _Walk:
    """One walk through backward. A swapped storage is taken to be copied back in no time when it is first used."""

    def __init__(self, step: Forecaster, actions: Sequence[Action]) -> None:
        self.graph, self.actions, self.step = step.graph, actions, step
        self.used_at: dict[int, int] = {}  # where each swapped storage is read first
        self.available = list(step.rooted)
        self.resident = 0
        self.present = [False] * len(step.sizes)
        self.back_at = [-1] * len(step.sizes)
        self.replay_ns = 0
        self.encode_ns = 0
        self.encoded: set[int] = set()  # save orders whose encoded form is there
        self.at = 0
        self.most = 0

    def run(self) -> list[int]:
        """The most that is resident while each need is served."""
        graph, actions, available, released = self.graph, self.actions, self.available, self.step.released
        for v, node in enumerate(graph.saved):
            if actions[v] is Action.KEEP:
                self._bring(v, node)
            elif actions[v] is Action.ENCODE:
                self.encoded.add(v)
                self.encode_ns += graph.nodes[node].encode_ns
                self.resident += graph.nodes[node].encoded_bytes
        resident: list[int] = []
        for position, v in enumerate(graph.needs):
            self.at = position
            for gone in released[position]:
                self._release(gone)
            self.most = self.resident
            node = graph.saved[v]
            if actions[v] is Action.SWAP:
                self._use_swapped(v)
            elif actions[v] is Action.ENCODE:
                self._use_encoded(v)
            elif not available[node]:
                self._replay(node)
            resident.append(self.most)
        return resident

    def _bring(self, v: int, node: int) -> None:
        self.available[node] = True
        if not self.present[v]:
            self.present[v] = True
            self.back_at[v] = self.at
            self._add(self.step.sizes[v])
            self._discard_encoded(v)

    def _use_swapped(self, v: int) -> None:
        self.used_at.setdefault(v, self.at)
        self._bring(v, self.graph.saved[v])

    def _use_encoded(self, v: int) -> None:
        node = self.graph.nodes[self.graph.saved[v]]
        if v in self.encoded:
            self.encode_ns += node.decode_ns
            if node.stand_in:
                self._note(node.nbytes)
                return
        self._bring(v, self.graph.saved[v])

    def _discard_encoded(self, v: int) -> None:
        if v in self.encoded:
            self.encoded.discard(v)
            self.resident -= self.graph.nodes[self.graph.saved[v]].encoded_bytes

    def _release(self, v: int) -> None:
        self._discard_encoded(v)
        if self.present[v]:
            self.present[v] = False
            self.resident -= self.step.sizes[v]

    def _add(self, nbytes: int) -> None:
        self.resident += nbytes
        self._note(0)

    def _note(self, beside_bytes: int) -> None:
        """What is resident counts for the peak, and that beside it."""
        if self.resident + beside_bytes > self.most:
            self.most = self.resident + beside_bytes

    def _replay(self, target: int) -> None:
        """Replay the missing chain of `target`; its products stay where a later need will ask for them."""
        ops, release = self.graph.ops, self.graph.release
        available, orders, nbytes = self.available, self.step.orders, self.step.nbytes
        taken, working_bytes = self.step.taken, 0
        if self.graph.working_needs:  # for which there is room as an op of backward comes next
            working_bytes = self.graph.working_needs[self.at]
        chain = self._missing(target)
        uses: dict[int, int] = {}
        for op in chain:
            for node in ops[op].inputs:
                uses[node] = uses.get(node, 0) + 1
        temporary: set[int] = set()
        for op in chain:
            self.replay_ns += ops[op].cost_ns
            made_bytes = sum(nbytes[node] for node in ops[op].outputs)  # also of what is there, or nobody asks for
            self._note(made_bytes + max(0, taken[op] - working_bytes))
            for node in ops[op].outputs:
                if available[node]:
                    continue
                order = orders[node]
                if order >= 0 and release[order] > self.at:
                    self._bring(order, node)
                elif node in uses or node == target:
                    available[node] = True
                    temporary.add(node)
                    self._add(nbytes[node])
            for node in ops[op].inputs:
                uses[node] -= 1
                if not uses[node] and node in temporary:
                    temporary.discard(node)
                    available[node] = False
                    self.resident -= nbytes[node]
        for node in temporary:
            available[node] = False
            self.resident -= nbytes[node]

    def _missing(self, target: int) -> list[int]:
        """Ops to replay for `target`; a swapped ancestor is copied back at once instead, an encoded one decoded."""
        ops, available, actions = self.graph.ops, self.available, self.actions
        orders, makers, rooted = self.step.orders, self.step.makers, self.step.rooted
        chain: set[int] = set()
        todo = [target]
        while todo:
            node = todo.pop()
            order = orders[node]
            if order >= 0:
                action = actions[order]
                if action is Action.SWAP:
                    self._use_swapped(order)
                    continue
                if action is Action.ENCODE and not rooted[node] and not self.graph.nodes[node].stand_in:
                    self._use_encoded(order)
                    continue
            op = makers[node]
            if op is None or op in chain:
                continue
            chain.add(op)
            todo += [source for source in ops[op].inputs if not available[source]]
        return sorted(chain)
