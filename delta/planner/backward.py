"""A step in which everything may go, seen as its backward sees it: one with saved storages that backward alone needs.

What is there when backward begins takes the place of the saved storages. All else that is alive counts beside them:
what forward makes and is done with, and what backward makes. So the same planners serve both kinds of steps. What
nobody needs any more but has not been freed yet goes after its last need, since it never has to be brought back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from delta.planner.steplog import StepGraph
from delta.planner.task import Task
from delta.types import Action


class BackwardOnly:
    """`task` over the storages that are there when backward begins, needed after that or not."""

    def __init__(self, whole: Task) -> None:
        self._whole, self._graph, self._needs = whole, whole.graph, whole.graph.next_needs
        graph, began = whole.graph, whole.graph.forward_needs
        crossing = [v for v, before in enumerate(graph.needs_before) if before <= began < graph.release[v]]
        self._ends = [*sorted(set(graph.needs_before)), len(graph.needs) + 1]  # needs served when an op has ended
        self._orders = {v: index for index, v in enumerate(crossing)}
        self._idle = {v for v in range(len(graph.saved)) if v not in self._orders and self._idles(v)}
        forced = {self._orders[v]: action for v, action in whole.forced.items() if v in self._orders}
        self.task = replace(whole, graph=self._reduced(crossing), forced=forced, everything=False)

    def whole_step(self, actions: Sequence[Action]) -> list[Action]:
        """Actions for the whole step, from those for `task`."""
        found = [Action.RECOMPUTE if v in self._idle else Action.KEEP for v in range(len(self._graph.saved))]
        for v, index in self._orders.items():
            found[v] = actions[index]
        return found

    def _reduced(self, crossing: list[int]) -> StepGraph:
        graph, orders, needs, began = self._graph, self._orders, self._needs, self._graph.forward_needs
        end = len(graph.needs)
        left = [p for p in range(began, end) if graph.needs[p] in orders]
        alive = self._alive_bytes()
        made = [self._made(v) for v in crossing]
        evicted = [max((p for p in needs[v] if p < began), default=at) for v, at in zip(crossing, made, strict=True)]
        return StepGraph(
            nodes=tuple(replace(node, order=orders.get(node.order, -1)) for node in graph.nodes),
            ops=graph.ops,
            saved=tuple(graph.saved[v] for v in crossing),
            save_ns=tuple(graph.save_ns[v] for v in crossing),
            floats_to=tuple(max(k, bisect_left(made, at) - 1) for k, at in enumerate(evicted)),
            needs=tuple(orders[graph.needs[p]] for p in left),
            need_ns=tuple(graph.need_ns[p] for p in left),
            first_need=tuple(
                bisect_left(left, min((p for p in needs[v] if p >= began), default=end)) for v in crossing
            ),
            release=tuple(bisect_left(left, graph.release[v]) for v in crossing),
            end_ns=graph.end_ns,
            beside_saves=_most(alive, [*made, began]),
            beside_needs=_most(alive, [*left, end]),
        )

    def _made(self, v: int) -> int:
        """The need after which an op makes it: its inputs are there still."""
        return max(0, self._graph.needs_before[v] - 1)

    def _last_use(self, v: int) -> int:
        """The needs that have been served when the op that reads it last has ended."""
        last = max((self._made(v), *self._needs[v][-1:]))
        return self._ends[bisect_right(self._ends, last)]

    def _idles(self, v: int) -> bool:
        """Whether it stays after its last need, and may go."""
        graph, whole = self._graph, self._whole
        node = graph.nodes[graph.saved[v]]
        if Action.RECOMPUTE not in whole.allowed or whole.forced.get(v, Action.RECOMPUTE) is not Action.RECOMPUTE:
            return False
        if not node.evictable or node.op is None or not graph.ops[node.op].replayable:
            return False
        return self._last_use(v) < graph.release[v]

    def _alive_bytes(self) -> list[int]:
        """By need: bytes of all storages that are not crossing."""
        graph, count = self._graph, len(self._graph.needs)
        change = [0] * (count + 1)
        for v, number in enumerate(graph.saved):
            made, gone = self._made(v), self._last_use(v) if v in self._idle else graph.release[v]
            if v not in self._orders and made < gone:
                change[made] += graph.nodes[number].nbytes
                change[gone] -= graph.nodes[number].nbytes
        return list(accumulate(change[:count]))


def _most(values: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """The most between each place and the next one."""
    return tuple(max(values[start : max(start + 1, stop)], default=0) for start, stop in pairwise(places))
