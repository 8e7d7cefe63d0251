"""A step as one row of moments: every save and every need, in the order in which they happened.

Planners that ask "what is there at the worst moment, and what is not in use then" work on this view: a storage's bytes
over time, and its *gaps*, from one access to the next. It holds for both kinds of step. Where backward alone needs what
was saved, there is one gap for each storage, from its save to its first need; where everything may go, there is one
between any two accesses.

It counts bytes that are saved, not what replays need on their way: `forecast` does that where backward alone needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

from delta.planner.task import Task


@dataclass(frozen=True, slots=True)
class Gap:
    """From one access of a storage to the next. Evicted, it frees the moments from `first` on and before `back`."""

    order: int  # save order of the storage
    after: int  # need after which it may go; -1: once it has been saved
    until: int  # need that reads it again
    from_ns: int
    until_ns: int
    first: int  # moment
    back: int  # moment of the need `until`


class Moments:
    """The moments of a step, the bytes at each with nothing evicted, with what is beside them, and all gaps."""

    def __init__(self, task: Task) -> None:
        graph = self._graph = task.graph
        count, needs = len(graph.saved), len(graph.needs)
        before = graph.needs_before or (0,) * count
        self.saves = [order + before[order] for order in range(count)]  # moment of each save
        made = [bisect_right(before, position) for position in range(needs)]  # saves before each need
        self.needs = [position + made[position] for position in range(needs)]  # moment of each need
        self.ns = [0] * (count + needs)
        for times, moments in ((graph.save_ns, self.saves), (graph.need_ns, self.needs)):
            for at_ns, moment in zip(times, moments, strict=True):
                self.ns[moment] = at_ns
        ends = [*self.needs, len(self.ns)]
        self.lives = [(self.saves[v], max(self.saves[v] + 1, ends[graph.release[v]])) for v in range(count)]
        self.resident_bytes = self._resident()
        self._everything_goes = task.everything
        self.gaps = self._everywhere() if task.everything else self._once()

    def nbytes(self, order: int) -> int:
        return self._graph.nodes[self._graph.saved[order]].nbytes

    def around(self, moment: int) -> tuple[int, int]:
        """Begin and end of what goes on at a moment: of the op, where ops announce what they read; else an instant."""
        before = bisect_right(self.needs, moment) - 1
        if not self._everything_goes or before < 0:
            return self.ns[moment], self.ns[moment]
        need_ns = self._graph.need_ns
        later = bisect_right(need_ns, need_ns[before])
        return need_ns[before], need_ns[later] if later < len(need_ns) else self._graph.end_ns

    def gone_by(self, ns: int) -> int:
        """The first moment from which on what has left by this time takes no room."""
        if not self._everything_goes:
            return bisect_left(self.ns, ns)
        later = bisect_left(self._graph.need_ns, ns)  # an op has room for its results when it begins
        return self.needs[later] if later < len(self.needs) else len(self.ns)

    def trigger(self, gap: Gap, ns: int) -> int:
        """The last need in a gap that has been served by this time; the first one in it if none has."""
        need_ns = self._graph.need_ns
        at = bisect_right(need_ns, ns) - 1
        if self._everything_goes and at >= 0:
            at = bisect_left(need_ns, need_ns[at]) - 1  # served when its op has ended
        return max(0, min(max(at, gap.after + 1), gap.until - 1))

    def _resident(self) -> list[int]:
        change = [0] * (len(self.ns) + 1)
        for order, (born, dead) in enumerate(self.lives):
            change[born] += self.nbytes(order)
            change[dead] -= self.nbytes(order)
        for beside, moments in ((self._graph.beside_saves, self.saves), (self._graph.beside_needs, self.needs)):
            for nbytes, moment in zip(beside, moments, strict=bool(beside)):
                change[moment] += nbytes
                change[moment + 1] -= nbytes
        return list(accumulate(change))[:-1]

    def _once(self) -> list[Gap]:
        graph, gaps = self._graph, []
        for order, until in enumerate(graph.first_need):
            if until < len(graph.needs):
                floats = graph.floats_to[order] + 1  # the program itself has it up to here
                first = self.saves[floats] if floats < len(self.saves) else self.needs[0]
                gaps.append(self._gap(order, -1, until, graph.save_ns[order], max(first, self.saves[order] + 1)))
        return gaps

    def _everywhere(self) -> list[Gap]:
        graph, gaps = self._graph, []
        for order, needs in enumerate(graph.next_needs):
            for after, until in pairwise((-1, *needs)):
                # What the op at `after` reads stays until the op has ended: the next one begins at a later time.
                began_ns = graph.save_ns[order] if after < 0 else graph.need_ns[after]
                later = graph.needs_before[order] if after < 0 else bisect_right(graph.need_ns, began_ns)
                if later < until and graph.need_ns[later] < graph.need_ns[until]:
                    gaps.append(self._gap(order, after, until, graph.need_ns[later], self.needs[later]))
        return gaps

    def _gap(self, order: int, after: int, until: int, from_ns: int, first: int) -> Gap:
        return Gap(order, after, until, from_ns, self._graph.need_ns[until], first, self.needs[until])


def free(resident_bytes: list[int], first: int, back: int, nbytes: int) -> None:
    """Take `nbytes` off the moments from `first` on and before `back`."""
    for moment in range(first, back):
        resident_bytes[moment] -= nbytes
