"""The responsive scheduler of Mimose (arXiv:2209.02478): what to drop, fast enough to be asked before each forward.

As its authors' code has it: candidates are put into buckets of about equal bytes (within 10 %); in a bucket the earlier
ones go first, since they come back last, when backward has given back most of the rest; if one candidate alone covers
what is still over, the smallest such goes.

Where none does, the authors take the earliest of the bucket with the fewest bytes; here it is the earliest of that with
the most, so that few have to be made again.

Mimose checkpoints modules, so its chains end where a module does. Here single storages go, and a chain of dropped
ones would grow to the whole step. So what one chain brings back together is limited: to an eighth of the budget at
first, and to more where that does not suffice. And Mimose does not model when the peak is: here the forecast does, a
few times, and what it finds over the limit is taken off too, of what is there at the worst moment: beside a large op in
the middle that is not all.

Bounds: no optimality, times are not looked at. Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from delta.planner.assemble import assemble
from delta.planner.forecast import forecast
from delta.planner.steplog import Plan, StepGraph
from delta.planner.task import Task
from delta.types import Action

SAME = 0.9  # what has this share of the largest one's bytes is in its bucket
CHAIN = 8  # at first, what one chain brings back is at most the limit divided by this
ROUNDS = 6  # forecasts before a plan is taken as it is


def respond(task: Task) -> Plan:
    """Drop storages until the step of the task fits, or nothing more can be dropped."""
    scheduler = _Scheduler(task)
    graph = task.graph
    if task.everything:
        held_over = frozenset(graph.held_over)
        scheduler.drop(sum(graph.nodes[graph.saved[v]].nbytes for v in held_over) - task.limit_bytes, held_over)
        return assemble(task, scheduler.actions)
    moments = _Moments(graph)
    for _ in range(ROUNDS):
        found = forecast(graph, scheduler.actions, task.link)
        if not moments.lower([*found.forward_bytes, *found.resident_bytes], task.limit_bytes, scheduler.drop):
            break
    return assemble(task, scheduler.actions)


class _Moments:
    """The saves of a step and then its needs, as far as something may still go that is there."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph, self._saves = graph, len(graph.saved)
        self._first, self._end = 0, len(graph.saved) + len(graph.needs)

    def lower(
        self, resident_bytes: Sequence[int], limit_bytes: int, drop: Callable[[int, Collection[int]], bool]
    ) -> bool:
        """Drop what the worst moment is over the limit, of what is there then; where nothing is, at the worst of the
        others. Whether anything was dropped."""
        while self._first < self._end:
            worst = max(range(self._first, self._end), key=resident_bytes.__getitem__)
            over_bytes = resident_bytes[worst] - limit_bytes
            if over_bytes <= 0:
                return False
            if drop(over_bytes, self._there(worst)):
                return True
            if worst < self._saves:  # before it there was even less
                self._first = worst + 1
            else:
                self._end = worst
        return False

    def _there(self, moment: int) -> frozenset[int]:
        """Save orders of what would not be there if it were dropped."""
        graph = self._graph
        if moment < self._saves:
            return frozenset(v for v in range(moment) if graph.floats_to[v] < moment)
        position = moment - self._saves
        return frozenset(v for v, first in enumerate(graph.first_need) if first > position)


class _Scheduler:
    def __init__(self, task: Task) -> None:
        self.graph = task.graph
        self.actions = [Action.KEEP] * len(self.graph.saved)
        self._bytes = self.graph.saved_bytes
        self._chains = _Chains(task.graph)
        self._limit = task.limit_bytes
        self._cap = max(1, task.limit_bytes // CHAIN)
        self._buckets = self._into_buckets(self._candidates(task))
        self._refused: list[int] = []  # their chain would be too long under the cap there is

    def _candidates(self, task: Task) -> list[int]:
        if Action.RECOMPUTE not in task.allowed:
            return []
        graph = self.graph
        return [
            v
            for v in (graph.held_over if task.everything else range(len(graph.saved)))
            if graph.nodes[graph.saved[v]].evictable
            and task.forced.get(v, Action.RECOMPUTE) is Action.RECOMPUTE
            and self._chains.can_make(graph.saved[v])
        ]

    def _into_buckets(self, candidates: Iterable[int]) -> list[_Bucket]:
        """The smallest ones first."""
        buckets: list[_Bucket] = []
        for v in sorted(candidates, key=lambda v: (-self._bytes[v], v)):
            if not buckets or self._bytes[v] < SAME * buckets[-1].most_bytes:
                buckets.append(_Bucket(self._bytes[v], []))
            buckets[-1].orders.append(v)
        for bucket in buckets:
            bucket.orders.sort()
        return buckets[::-1]

    def drop(self, over_bytes: int, there: Collection[int]) -> bool:
        """Drop that many more bytes of the storages `there`, as far as possible. Whether anything was dropped."""
        dropped = False
        while over_bytes > 0:
            v = self._pick(over_bytes, there)
            if v is None:
                if self._cap >= self._limit or not any(v in there for v in self._refused):
                    break
                self._cap *= 2
                left = (v for bucket in self._buckets for v in bucket.orders)
                self._buckets, self._refused = self._into_buckets([*left, *self._refused]), []
            elif self._chains.drop(self.graph.saved[v], self._cap):
                self.actions[v] = Action.RECOMPUTE
                over_bytes -= self._bytes[v]
                dropped = True
            else:
                self._refused.append(v)
        return dropped

    def _pick(self, over_bytes: int, there: Collection[int]) -> int | None:
        """Take out the smallest candidate `there` that covers it alone, else the earliest of the largest."""
        enough = (bucket for bucket in self._buckets if bucket.most_bytes >= over_bytes)
        for buckets, least_bytes in ((enough, over_bytes), (reversed(self._buckets), 0)):
            for bucket in buckets:
                for place, v in enumerate(bucket.orders):
                    if self._bytes[v] >= least_bytes and v in there:
                        return self._take(bucket, place)
        return None

    def _take(self, bucket: _Bucket, place: int) -> int:
        v = bucket.orders.pop(place)
        if not bucket.orders:
            self._buckets.remove(bucket)
        return v


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Candidates of about equal bytes, the earliest first; none has more than `most_bytes`."""

    most_bytes: int
    orders: list[int]


class _Chains:
    """What would be replayed together, as union-find classes over the storages that are missing in backward."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self._missing: dict[int, int] = {}  # node -> parent in its class
        self._bytes: dict[int, int] = {}  # of each class, by its root
        self._readers: list[list[int]] = [[] for _ in graph.nodes]
        self._makes = [node.rooted or node.order >= 0 for node in graph.nodes]  # can be had, if what is saved is kept
        for number, op in enumerate(graph.ops):
            for node in op.inputs:
                self._readers[node].append(number)
            can = op.replayable and all(self._makes[node] for node in op.inputs)
            for node in op.outputs:
                self._makes[node] = self._makes[node] or can

    def can_make(self, node: int) -> bool:
        op = self.graph.nodes[node].op
        return (
            op is not None and self.graph.ops[op].replayable and all(map(self._makes.__getitem__, self._inputs(node)))
        )

    def drop(self, node: int, cap_bytes: int) -> bool:
        """Count a saved storage as missing. False, and nothing done, if its class would have more bytes than that; one
        that is alone may."""
        new = self._newly_missing(node)
        around = {self._root(other) for fresh in new for other in self._neighbours(fresh) if other in self._missing}
        nbytes = sum(self.graph.nodes[fresh].nbytes for fresh in new) + sum(self._bytes[r] for r in around)
        if nbytes > cap_bytes and (around or nbytes > self.graph.nodes[node].nbytes):
            return False
        for root in around:
            self._missing[root] = node
            del self._bytes[root]
        self._missing.update(dict.fromkeys(new, node))
        self._bytes[node] = nbytes
        return True

    def _newly_missing(self, node: int) -> list[int]:
        """The storage, and those nobody has saved that making it again would make for the first time."""
        new: dict[int, None] = {}
        todo = [node]
        while todo:
            current = todo.pop()
            if current in new:
                continue
            new[current] = None
            for source in self._inputs(current):
                fact = self.graph.nodes[source]
                if fact.order < 0 and not fact.rooted and source not in self._missing:
                    todo.append(source)
        return list(new)

    def _neighbours(self, node: int) -> Iterable[int]:
        yield from self._inputs(node)
        for op in self._readers[node]:
            yield from self.graph.ops[op].outputs

    def _inputs(self, node: int) -> tuple[int, ...]:
        op = self.graph.nodes[node].op
        return self.graph.ops[op].inputs if op is not None else ()

    def _root(self, node: int) -> int:
        while self._missing[node] != node:
            self._missing[node] = self._missing[self._missing[node]]
            node = self._missing[node]
        return node
