"""A recorded step as the graph that Optimal Gradient Checkpoint Search divides: one source, one target, and vertices
that can be checkpoints.

A vertex is an op, with the storages it made that may go: they come back together. What is there anyway (parameters,
inputs, storages that no replay makes or that a rule keeps) is no vertex and costs nothing. Where the recorded graph is
not of the form that the search expects:

- an op whose result is read but not there in backward is part of the first op that reads it;
- what starts on its own (a mask, positions) is part of its reader, or kept where it has several;
- what nothing is made of is part of the last op it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from delta.planner.steplog import StepGraph
from delta.planner.task import Task
from delta.types import Action


@dataclass(slots=True)
class Vertex:
    """Ops of forward that come back together. `orders`: their storages that may be kept, by save order."""

    ops: list[int]
    orders: list[int]
    again_bytes: int  # of all they make that would not be there
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)


def vertices_of(task: Task) -> list[Vertex]:
    """The vertices between source and target in order, their edges numbered by position in the list: source -1, target
    its length. What is in none of them is kept."""
    found = _Builder(task).vertices()
    place = {op: index for index, op in enumerate(sorted(found))}
    ordered = [found[op] for op in sorted(found)]
    for vertex in ordered:
        vertex.before = {place[op] for op in vertex.before} or {-1}
        vertex.after = {place[op] for op in vertex.after} or {len(ordered)}
    return ordered


class _Builder:
    def __init__(self, task: Task) -> None:
        self._graph: StepGraph = task.graph
        self._over = set(task.graph.held_over) if task.everything else set(range(len(task.graph.saved)))
        self._forced = task.forced
        self._began = task.graph.forward_needs if task.everything else None
        self._there = [node.rooted for node in task.graph.nodes]  # without a replay, whatever is chosen
        self._known = list(self._there)  # or with one
        self._vertices: dict[int, Vertex] = {}

    def vertices(self) -> dict[int, Vertex]:
        self._collect()
        self._connect()
        self._absorb_unkept()
        self._absorb_starts()
        self._absorb_ends()
        return self._vertices

    def _keepable(self, node: int) -> bool:
        return self._graph.nodes[node].order in self._over

    def _in_forward(self, op: int) -> bool:
        if self._began is None:
            return True
        orders = [self._graph.nodes[node].order for node in self._graph.ops[op].outputs]
        return all(self._graph.needs_before[order] <= self._began for order in orders if order >= 0)

    def _collect(self) -> None:
        graph = self._graph
        written = {node for op in graph.ops for node in op.overwrites}
        made = {node for op in graph.ops for node in op.outputs}
        for number in range(len(graph.nodes)):
            if number not in made:  # it was there before the step, or has to stay
                self._there[number] = self._known[number] = True
        for position, op in enumerate(graph.ops):
            if not self._in_forward(position):
                continue
            again = op.replayable and all(self._known[source] for source in op.inputs)
            orders, again_bytes = [], 0
            for number in op.outputs:
                node = graph.nodes[number]
                stays = not again or not node.evictable or self._forced.get(node.order) is Action.KEEP
                if stays and self._keepable(number):
                    self._there[number] = self._known[number] = True
                    continue
                self._known[number] = again
                if again:
                    again_bytes += node.nbytes if number not in written else 0
                    if self._keepable(number):
                        orders.append(node.order)
            if again and not all(self._there[number] for number in op.outputs):
                self._vertices[position] = Vertex([position], orders, again_bytes)

    def _connect(self) -> None:
        for position, vertex in self._vertices.items():
            for source in self._graph.ops[position].inputs:
                maker = self._graph.nodes[source].op
                if maker is not None and not self._there[source] and maker in self._vertices and maker < position:
                    self._join(maker, position, vertex)

    def _join(self, earlier: int, later: int, vertex: Vertex) -> None:
        vertex.before.add(earlier)
        self._vertices[earlier].after.add(later)

    def _take_out(self, position: int, into: int | None) -> None:
        """The vertex goes; what it was made of and what is made of it are joined by nobody."""
        gone = self._vertices.pop(position)
        for near in gone.before:
            self._vertices[near].after.discard(position)
        for near in gone.after:
            self._vertices[near].before.discard(position)
        if into is not None:
            host = self._vertices[into]
            host.ops += gone.ops
            host.orders += gone.orders
            host.again_bytes += gone.again_bytes

    def _read(self, position: int) -> set[int]:
        """What it made that a later op of forward reads."""
        after = [op for reader in self._vertices[position].after for op in self._vertices[reader].ops]
        return {node for op in after for node in self._graph.ops[op].inputs} & set(self._graph.ops[position].outputs)

    def _absorb_unkept(self) -> None:
        for position in list(self._vertices):
            vertex = self._vertices[position]
            unkept = any(not self._keepable(node) and not self._there[node] for node in self._read(position))
            if unkept:
                before, after = sorted(vertex.before), sorted(vertex.after)
                self._take_out(position, after[0])
                for later in after:
                    for earlier in before:
                        self._join(earlier, later, self._vertices[later])

    def _absorb_starts(self) -> None:
        if not self._vertices:
            return
        chief = self._chief_start()
        for position in sorted(self._vertices):
            vertex = self._vertices[position]
            if not vertex.before and position != chief:
                self._take_out(position, next(iter(vertex.after)) if len(vertex.after) == 1 else None)

    def _absorb_ends(self) -> None:
        if not self._vertices:
            return
        reached = self._reached(sorted(self._vertices), lambda vertex: vertex.before)
        chief = max(sorted(self._vertices), key=lambda position: (reached[position], position))
        for position in sorted(self._vertices, reverse=True):
            vertex = self._vertices[position]
            if not vertex.after and position != chief:
                self._take_out(position, max(vertex.before) if vertex.before else None)

    def _chief_start(self) -> int:
        """Where the input comes in: the largest of the starts that lead to most of the step. A mask that all layers
        read leads to as much, and is smaller."""
        reached = self._reached(sorted(self._vertices, reverse=True), lambda vertex: vertex.after)
        most = max(reached.values())
        starts = [at for at in sorted(self._vertices) if not self._vertices[at].before and 2 * reached[at] >= most]
        return max(starts, key=lambda at: self._vertices[at].again_bytes)

    def _reached(self, positions: list[int], towards: Callable[[Vertex], set[int]]) -> dict[int, int]:
        """How many vertices each leads to, itself included."""
        reached: dict[int, int] = {}  # as bits
        for position in positions:
            near = 1 << position
            for other in towards(self._vertices[position]):
                near |= reached[other]
            reached[position] = near
        return {position: bits.bit_count() for position, bits in reached.items()}
