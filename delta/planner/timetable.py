"""A step of turns in the form that a rehearsal runs on: plain lists, storages and ops numbered from 0."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise

from delta.planner.steplog import StepGraph
from delta.types import Action

NEVER_NS = 1e15  # the next use of what is not used again


class Timetable:
    """`nbytes`, `maker`, `children`, `uses` and so on by storage, `op_*` by op. Never changed once made."""

    def __init__(self, graph: StepGraph, kept: Mapping[int, Action]) -> None:
        """`kept`: save orders that have to stay."""
        nodes, self.turns = graph.nodes, graph.turns
        saved = [nodes[node] for node in graph.saved]
        self.count = len(saved)
        self.nbytes = [node.nbytes for node in saved]
        self.evictable = [node.evictable and node.nbytes > 0 and v not in kept for v, node in enumerate(saved)]
        self.maker = [-1 if node.op is None else node.op for node in saved]
        self.op_reads = [self._orders(graph, op.inputs) for op in graph.ops]
        self.op_makes = [self._orders(graph, op.outputs) for op in graph.ops]
        self.op_ns = [op.cost_ns for op in graph.ops]
        self.op_bytes = [sum(self.nbytes[made] for made in makes) for makes in self.op_makes]
        self.replayable = [made >= 0 and graph.ops[made].replayable for made in self.maker]
        self.children: list[list[int]] = [[] for _ in saved]
        for reads, makes in zip(self.op_reads, self.op_makes, strict=True):
            for read in reads:
                self.children[read] += makes
        self.uses: list[list[int]] = [[] for _ in saved]  # turns that read each storage
        self.made_in = [0] * self.count
        for number, turn in enumerate(self.turns):
            for read in turn.reads:
                self.uses[read].append(number)
            for made in self.op_makes[turn.op] if turn.op is not None else ():
                self.made_in[made] = number
        self.start_ns = [turn.start_ns for turn in self.turns]
        needs_so_far = [0]
        for turn in self.turns:
            needs_so_far.append(needs_so_far[-1] + len(turn.reads))
        self.backward = bisect_left(needs_so_far, graph.forward_needs, hi=len(self.turns) - 1)  # its first turn
        results = [self.op_makes[turn.op] if turn.op is not None else () for turn in self.turns]
        # By turn: the storages that it reads or makes, and when each is used next after it.
        self.reads_next_ns = [self._with_next_use(turn.reads, number) for number, turn in enumerate(self.turns)]
        self.makes_next_ns = [self._with_next_use(each, number) for number, each in enumerate(results)]
        self.end_ns = self.turns[-1].end_ns

    def before_longest_rest(self, storage: int) -> int:
        """The turn after which a storage is not used for longest."""
        turns = [self.made_in[storage], *self.uses[storage]]
        rests = [(self.start_ns[until] - self.start_ns[since], -since) for since, until in pairwise(turns)]
        return -max(rests, default=(0, 0))[1]

    def _with_next_use(self, storages: Iterable[int], turn: int) -> list[tuple[int, float]]:
        return [(storage, self._next_use_ns(storage, turn)) for storage in storages]

    def _next_use_ns(self, storage: int, turn: int) -> float:
        uses = self.uses[storage]
        later = bisect_right(uses, turn)
        return self.start_ns[uses[later]] if later < len(uses) else NEVER_NS

    @staticmethod
    def _orders(graph: StepGraph, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Save orders; what is rooted is always there and left out."""
        return tuple(dict.fromkeys(graph.nodes[node].order for node in nodes if graph.nodes[node].order >= 0))
