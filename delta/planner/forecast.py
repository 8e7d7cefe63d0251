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
from delta.types import Action, Link

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
        prefetch.setdefault(at, []).insert(0, v)
    late_ns = max(0, graph.need_ns[0] - start_ns) if first_use else 0
    return {at: tuple(orders) for at, orders in prefetch.items()}, late_ns


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
    """Walk backward under `actions`, one for each saved storage: once to see when swapped storages are read, and once
    with their copies back in place."""
    first_use: Mapping[int, int] = {}
    if Action.SWAP in actions:
        scout = _Walk(graph, actions, link, {})
        scout.run()
        first_use = scout.used_at
    return _Walk(graph, actions, link, first_use).run()


class _Walk:
    def __init__(self, graph: StepGraph, actions: Sequence[Action], link: Link, first_use: Mapping[int, int]) -> None:
        self.graph, self.actions, self.link, self.first_use = graph, actions, link, first_use
        self.used_at: dict[int, int] = {}  # where each swapped storage is read first
        self.available = [node.rooted for node in graph.nodes]
        self.resident = 0
        self.present = [False] * len(graph.saved)
        self.back_at = [-1] * len(graph.saved)
        self.out_done_ns = copies_out(graph, actions, link)
        self.replay_ns = 0
        self.encode_ns = 0
        self.encoded: set[int] = set()  # save orders whose encoded form is there
        self.at = 0
        self.most = 0

    def run(self) -> Forecast:
        graph = self.graph
        for v, node in enumerate(graph.saved):
            if self.actions[v] is Action.KEEP:
                self._bring(v, node)
            elif self.actions[v] is Action.ENCODE:
                self.encoded.add(v)
                self.encode_ns += graph.nodes[node].encode_ns
                self._add(graph.nodes[node].encoded_bytes)
        prefetch, late_ns = copies_back(graph, self.first_use, self.link)
        leaving = self._leaving()
        released: dict[int, list[int]] = {}
        for v, before in enumerate(graph.release):
            released.setdefault(before, []).append(v)
        resident: list[int] = []
        for position, v in enumerate(graph.needs):
            self.at = position
            for gone in released.get(position, ()):
                self._release(gone)
            self.most = self.resident
            for coming in prefetch.get(position, ()):
                self._bring(coming, graph.saved[coming])
            if self.actions[v] is Action.SWAP:
                self._use_swapped(v)
            elif self.actions[v] is Action.ENCODE:
                self._use_encoded(v)
            elif not self.available[graph.saved[v]]:
                self._replay(graph.saved[v])
            resident.append(self.most + leaving.get(position, 0))
        if graph.beside_needs:
            resident = list(map(add, resident, graph.beside_needs))
        swap_bytes = sum(
            graph.nodes[node].nbytes for v, node in enumerate(graph.saved) if self.actions[v] is Action.SWAP
        )
        busy_ns = self.link.out_ns(swap_bytes) + self.link.in_ns(swap_bytes)
        stall_ns = late_ns + int(busy_ns * self.link.interference)
        return Forecast(
            tuple(self._forward()),
            tuple(resident),
            tuple(self.back_at),
            prefetch,
            self.replay_ns,
            stall_ns,
            swap_bytes,
            self.encode_ns,
        )

    def _forward(self) -> list[int]:
        """Resident bytes after each save: what is kept or encoded, what the program still uses, what is on its way
        out."""
        graph = self.graph
        count = len(graph.saved)
        change = [0] * (count + 1)
        for v, node in enumerate(graph.saved):
            until = count
            if self.actions[v] is not Action.KEEP:
                until = graph.floats_to[v] + 1
            if v in self.out_done_ns:
                until = max(until, bisect_right(graph.save_ns, self.out_done_ns[v]))
            change[v] += graph.nodes[node].nbytes
            change[until] -= graph.nodes[node].nbytes
            if self.actions[v] is Action.ENCODE:
                change[v] += graph.nodes[node].encoded_bytes
        return list(map(add, accumulate(change[:count]), graph.beside_saves or repeat(0)))

    def _leaving(self) -> dict[int, int]:
        """Bytes still on their way out at each position: a copy out may not have ended when backward begins."""
        leaving: dict[int, int] = {}
        for v, done_ns in self.out_done_ns.items():
            for position in range(bisect_right(self.graph.need_ns, done_ns)):
                leaving[position] = leaving.get(position, 0) + self.graph.nodes[self.graph.saved[v]].nbytes
        return leaving

    def _bring(self, v: int, node: int) -> None:
        self.available[node] = True
        if not self.present[v]:
            self.present[v] = True
            self.back_at[v] = self.at
            self._add(self.graph.nodes[node].nbytes)
            self._discard_encoded(v)

    def _use_swapped(self, v: int) -> None:
        self.used_at.setdefault(v, self.at)
        self._bring(v, self.graph.saved[v])

    def _use_encoded(self, v: int) -> None:
        node = self.graph.nodes[self.graph.saved[v]]
        if v in self.encoded:
            self.encode_ns += node.decode_ns
            if node.stand_in:
                self.most = max(self.most, self.resident + node.nbytes)
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
            self.resident -= self.graph.nodes[self.graph.saved[v]].nbytes

    def _add(self, nbytes: int) -> None:
        self.resident += nbytes
        self.most = max(self.most, self.resident)

    def _replay(self, target: int) -> None:
        """Replay the missing chain of `target`; its products stay where a later need will ask for them."""
        graph = self.graph
        chain = self._missing(target)
        uses: dict[int, int] = {}
        for op in chain:
            for node in graph.ops[op].inputs:
                uses[node] = uses.get(node, 0) + 1
        temporary: set[int] = set()
        for op in chain:
            self.replay_ns += graph.ops[op].cost_ns
            for node in graph.ops[op].outputs:
                if self.available[node]:
                    continue
                order = graph.nodes[node].order
                if order >= 0 and graph.release[order] > self.at:
                    self._bring(order, node)
                elif node in uses or node == target:
                    self.available[node] = True
                    temporary.add(node)
                    self._add(graph.nodes[node].nbytes)
            for node in graph.ops[op].inputs:
                uses[node] -= 1
                if not uses[node] and node in temporary:
                    temporary.discard(node)
                    self.available[node] = False
                    self.resident -= graph.nodes[node].nbytes
        for node in temporary:
            self.available[node] = False
            self.resident -= graph.nodes[node].nbytes

    def _missing(self, target: int) -> list[int]:
        """Ops to replay for `target`; a swapped ancestor is copied back at once instead, an encoded one decoded."""
        graph = self.graph
        chain: set[int] = set()
        todo = [target]
        while todo:
            node = graph.nodes[todo.pop()]
            if node.order >= 0 and self.actions[node.order] is Action.SWAP:
                self._use_swapped(node.order)
                continue
            whole = not node.rooted and not node.stand_in
            if node.order >= 0 and self.actions[node.order] is Action.ENCODE and whole:
                self._use_encoded(node.order)
                continue
            if node.op is None or node.op in chain:
                continue
            chain.add(node.op)
            todo += [source for source in graph.ops[node.op].inputs if not self.available[source]]
        return sorted(chain)
