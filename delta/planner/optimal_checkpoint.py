"""Optimal Gradient Checkpoint Search as a planner (Feng and Huang, CVPR 2021, arXiv:1808.00079).

The division tree (`segments`) over the recorded forward (`vertices`), then the search over caps (`accessibility`):
checkpoints stay, everything else is recomputed, one unit at a time. The published search knows no budget; it returns
the plan of the least memory. Here, under a budget,

- of the cuts the search has looked at, that one is taken whose units cost least to recompute, after as many whole units
  as the budget has room for are kept, dearest per byte first;
- where none fits, it is the plan of the least memory.

What fits is tried on the step itself, by the forecast or, where everything may go, by what is there at each moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from delta.planner.accessibility import Accessibility, Cut
from delta.planner.assemble import assemble
from delta.planner.forecast import forecast
from delta.planner.moments import Moments, free
from delta.planner.segments import divide
from delta.planner.steplog import Plan
from delta.planner.task import Task
from delta.planner.vertices import Vertex, vertices_of
from delta.types import Action

CUTS = 48  # looked at beside that of the least memory


@dataclass(frozen=True, slots=True)
class Unit:
    """What is recomputed together: save orders of its storages, their bytes, and the time of its ops."""

    orders: tuple[int, ...]
    nbytes: int
    cost_ns: int

    @property
    def per_byte(self) -> float:
        return self.cost_ns / max(1, self.nbytes)


def optimal_checkpoint(task: Task) -> Plan:
    """Checkpoints keep, units are recomputed: the cheapest that fits, or the plan of the least memory."""
    return _Search(task).plan()


class _Search:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._moments = Moments(task)
        self._vertices = vertices_of(task)
        graph = task.graph
        self._keep = [
            sum(graph.nodes[graph.saved[order]].nbytes for order in vertex.orders) for vertex in self._vertices
        ]

    def plan(self) -> Plan:
        task, kept = self._task, [Action.KEEP] * len(self._task.graph.saved)
        if not self._vertices or Action.RECOMPUTE not in task.allowed:
            return assemble(task, self._as_forced(kept))
        again = [vertex.again_bytes for vertex in self._vertices]
        search = Accessibility(divide(_edges(self._vertices)), [0, *self._keep, 0], [0, *again, 0])
        least = search.least()
        caps = {search.whole_bytes * step // CUTS for step in range(1, CUTS + 1)}
        cuts = [least, *(search.cut(cap) for cap in sorted(caps))]
        return assemble(task, self._filled(self._cheapest(cuts)))

    def _cheapest(self, cuts: Sequence[Cut]) -> Cut:
        """The cut with the least recomputation left, by estimate, that fits; the one nearest to it where none does."""
        floor_bytes = self._floor_bytes()
        best, best_over = cuts[0], None
        for cut in sorted(dict.fromkeys(cuts), key=lambda cut: self._estimate_ns(cut, floor_bytes)):
            over_bytes = self._peak_bytes(self._units(cut)) - self._task.limit_bytes
            if over_bytes <= 0:
                return cut
            if best_over is None or over_bytes < best_over:
                best, best_over = cut, over_bytes
        return best

    def _units(self, cut: Cut) -> list[Unit]:
        """The units of a cut, dearest per byte first."""
        units = [self._unit([self._vertices[number - 1] for number in unit], unit) for unit in cut.units]
        return sorted(units, key=lambda unit: (-unit.per_byte, unit.orders))

    def _unit(self, vertices: Sequence[Vertex], numbers: Iterable[int]) -> Unit:
        ops = self._task.graph.ops
        return Unit(
            tuple(order for vertex in vertices for order in vertex.orders),
            sum(self._keep[number - 1] for number in numbers),
            sum(ops[op].cost_ns for vertex in vertices for op in vertex.ops),
        )

    def _floor_bytes(self) -> int:
        """What is there at the worst moment and is in no vertex."""
        return max(self._moments.resident_bytes, default=0) - sum(self._keep)

    def _estimate_ns(self, cut: Cut, floor_bytes: int) -> int:
        """Recomputation that is left when what fits beside checkpoints and the largest unit is filled with units."""
        room, cost_ns = self._task.limit_bytes - floor_bytes - cut.total_bytes, 0
        for unit in self._units(cut):
            if unit.nbytes <= room:
                room -= unit.nbytes
            else:
                cost_ns += unit.cost_ns
        return cost_ns

    def _peak_bytes(self, units: Sequence[Unit]) -> int:
        """With all units recomputed."""
        if self._task.everything:
            return max(self._left(self._absences(units)), default=0)
        return forecast(self._task.graph, self._actions(units, set()), self._task.link).peak_bytes

    def _filled(self, cut: Cut) -> list[Action]:
        """Recompute all units, then keep one after the other as long as that fits."""
        units = self._units(cut)
        fits = self._there_fits(units) if self._task.everything else self._forecast_fits(units)
        kept: set[int] = set()
        for index in range(len(units)):
            if fits(kept, index):
                kept.add(index)
        return self._actions(units, kept)

    def _forecast_fits(self, units: Sequence[Unit]) -> Callable[[set[int], int], bool]:
        def fits(kept: set[int], index: int) -> bool:
            actions = self._actions(units, kept | {index})
            return forecast(self._task.graph, actions, self._task.link).peak_bytes <= self._task.limit_bytes

        return fits

    def _absences(self, units: Sequence[Unit]) -> list[list[tuple[int, int, int]]]:
        """Where everything may go: for each unit from which moment to which its storages are gone, and their bytes. It
        comes back as a whole when any of it is needed."""
        moments, began = self._moments, self._task.graph.forward_needs
        gaps = {gap.order: gap for gap in moments.gaps if gap.until >= began > gap.after}
        absences = []
        for unit in units:
            gone = [gaps[order] for order in unit.orders if order in gaps]
            back = min((gap.back for gap in gone), default=0)
            absences.append([(gap.first, back, moments.nbytes(gap.order)) for gap in gone])
        return absences

    def _left(self, absences: Sequence[Sequence[tuple[int, int, int]]]) -> list[int]:
        """Bytes at each moment without them."""
        resident = list(self._moments.resident_bytes)
        for absence in absences:
            for first, back, nbytes in absence:
                free(resident, first, back, nbytes)
        return resident

    def _there_fits(self, units: Sequence[Unit]) -> Callable[[set[int], int], bool]:
        """Where everything may go: by the bytes at each moment."""
        absent = self._absences(units)
        resident = self._left(absent)

        def fits(kept: set[int], index: int) -> bool:
            for first, back, nbytes in absent[index]:
                free(resident, first, back, -nbytes)
            if all(max(resident[first:back], default=0) <= self._task.limit_bytes for first, back, _ in absent[index]):
                return True
            for first, back, nbytes in absent[index]:
                free(resident, first, back, nbytes)
            return False

        return fits

    def _actions(self, units: Sequence[Unit], kept: set[int]) -> list[Action]:
        actions = [Action.KEEP] * len(self._task.graph.saved)
        for index, unit in enumerate(units):
            if index not in kept:
                for order in unit.orders:
                    actions[order] = Action.RECOMPUTE
        return self._as_forced(actions)

    def _as_forced(self, actions: list[Action]) -> list[Action]:
        for order, action in self._task.forced.items():
            if action is not Action.KEEP and self._task.graph.nodes[self._task.graph.saved[order]].evictable:
                actions[order] = action
        return actions


def _edges(vertices: Sequence[Vertex]) -> list[list[int]]:
    """Edges between source (0), vertices (from 1 on) and target."""
    edges: list[list[int]] = [[] for _ in range(len(vertices) + 2)]
    for number, vertex in enumerate(vertices, 1):
        edges[number] = [after + 1 for after in vertex.after]
        if -1 in vertex.before:
            edges[0].append(number)
    return edges
