"""The division tree of Optimal Gradient Checkpoint Search (Feng and Huang, CVPR 2021): which parts of a graph can be
computed again on their own.

An *independent segment* lies between two vertices: every vertex in it is on a path from the one to the other, and no
edge joins it to anything outside. It divides into smaller ones:

- `linear`: some vertices lie on all of its paths; they split it into segments one after the other;
- `branch`: parts side by side that share only the two ends;
- `complicate`: neither; the largest segments between vertices with more than two edges that have nothing in common;
- `leaf`: nothing is in it.

Where the authors' code picks vertices at random, the order of the vertices decides here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Shape(StrEnum):
    """How a segment divides."""

    LEAF = "leaf"
    LINEAR = "linear"
    BRANCH = "branch"
    COMPLICATE = "complicate"


@dataclass(frozen=True, slots=True)
class Segment:
    """What lies between two vertices. `level`: the vertices in it that are in none of its children; in a linear segment
    child i ends, and child i + 1 begins, at `level[i]`."""

    source: int
    target: int
    inner: tuple[int, ...]
    shape: Shape
    level: tuple[int, ...] = ()
    children: tuple[Segment, ...] = ()


def divide(successors: Sequence[Sequence[int]]) -> Segment:
    """The tree of a graph whose vertices are numbered along its edges, from its one source (the first) to its one
    target (the last). Every vertex is on a path from the one to the other."""
    return _Division(successors).tree()


class _Division:
    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        self._successors = [tuple(sorted(set(after))) for after in successors]
        self._predecessors: list[list[int]] = [[] for _ in successors]
        for vertex, after in enumerate(self._successors):
            for other in after:
                self._predecessors[other].append(vertex)

    def tree(self) -> Segment:
        last = len(self._successors) - 1
        return self._divide(0, last, list(range(1, last)), last in self._successors[0])

    def _divide(self, source: int, target: int, inner: list[int], direct: bool) -> Segment:
        """`inner` in ascending order; `direct`: an edge from source to target belongs to the segment."""
        if not inner:
            return Segment(source, target, (), Shape.LEAF)
        if not direct and (level := self._on_all_paths(source, target, inner)):
            return self._linear(source, target, inner, level)
        parts = self._parts(inner)
        if direct or len(parts) > 1:
            children = tuple(self._divide(source, target, part, direct=False) for part in parts)
            return Segment(source, target, tuple(inner), Shape.BRANCH, (), children)
        found = self._independent(source, target, inner)
        children = tuple(self._divide(first, last, part, direct=False) for first, last, part in found)
        covered = {vertex for child in children for vertex in child.inner}
        level = [vertex for vertex in inner if vertex not in covered]
        return Segment(source, target, tuple(inner), Shape.COMPLICATE, tuple(level), children)

    def _on_all_paths(self, source: int, target: int, inner: list[int]) -> list[int]:
        """A vertex is on all paths if no edge leads from before it to behind it."""
        inside = {*inner, target}
        farthest = max(after for after in self._successors[source] if after in inside and after != target)
        found = []
        for vertex in inner:
            if farthest <= vertex:
                found.append(vertex)
            farthest = max(farthest, max(after for after in self._successors[vertex] if after in inside))
        return found

    def _linear(self, source: int, target: int, inner: list[int], level: list[int]) -> Segment:
        ends, children = [source, *level, target], []
        for first, last in pairwise(ends):
            between = [vertex for vertex in inner if first < vertex < last]
            children.append(self._divide(first, last, between, last in self._successors[first]))
        return Segment(source, target, tuple(inner), Shape.LINEAR, tuple(level), tuple(children))

    def _parts(self, inner: Iterable[int]) -> list[list[int]]:
        """What hangs together without the two ends, each part in ascending order."""
        left, parts = dict.fromkeys(inner), []
        while left:
            todo, part = [next(iter(left))], []
            del left[todo[0]]
            while todo:
                vertex = todo.pop()
                part.append(vertex)
                for near in (*self._successors[vertex], *self._predecessors[vertex]):
                    if near in left:
                        del left[near]
                        todo.append(near)
            parts.append(sorted(part))
        return parts

    def _independent(self, source: int, target: int, inner: list[int]) -> list[tuple[int, int, list[int]]]:
        """Disjoint independent segments inside, the largest first: both ends, and what is between."""
        before = self._dominators(source, inner, self._predecessors)
        behind = self._dominators(target, inner[::-1], self._successors)
        between: dict[tuple[int, int], list[int]] = {}
        for vertex in inner:
            for first in before[vertex] - {vertex}:
                for last in behind[vertex] - {vertex}:
                    if (first, last) != (source, target) and self._forks(first) and self._forks(last):
                        between.setdefault((first, last), []).append(vertex)
        found: list[tuple[int, int, list[int]]] = []
        covered: set[int] = set()
        for (first, last), vertices in sorted(between.items(), key=lambda item: (-len(item[1]), item[0])):
            if not covered.issuperset(vertices):
                closed = [part for part in self._parts(vertices) if self._closed(part, first, last)]
                for part in closed:
                    if covered.isdisjoint(part):
                        covered.update(part)
                        found.append((first, last, part))
        return sorted(found, key=lambda segment: segment[2])

    def _forks(self, vertex: int) -> bool:
        return len(self._successors[vertex]) + len(self._predecessors[vertex]) > 2

    def _closed(self, part: list[int], first: int, last: int) -> bool:
        inside = {*part, first, last}
        return all(
            near in inside for vertex in part for near in (*self._successors[vertex], *self._predecessors[vertex])
        )

    def _dominators(self, root: int, inner: list[int], towards: Sequence[Sequence[int]]) -> dict[int, set[int]]:
        """For each vertex those that are on all its paths from `root`; `towards` leads there, one edge a step."""
        found = {root: {root}}
        for vertex in inner:
            nearer = [found[other] for other in towards[vertex] if other in found]
            found[vertex] = set.intersection(*nearer) | {vertex}
        return found
