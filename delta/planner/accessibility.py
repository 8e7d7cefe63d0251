"""Where to put checkpoints: the search over caps of Feng and Huang (CVPR 2021, section 3).

What is computed again at once is a *unit*: all that lies between checkpoints. Under a cap on the bytes of a unit, a
vertex is *accessible* from another if what is between them is within the cap, and the cheapest set of checkpoints is a
shortest path in the accessibility graph. A segment of the division tree that is within the cap stays whole; in a
larger one that is linear the path decides, in any other all vertices of its level are checkpoints. The cap with the
least sum of checkpoints and largest unit wins.

The authors try every distinct cap, O(n^2) of them. The bytes of checkpoints never rise with the cap, so a range of caps
that cannot be better, were its largest cap's checkpoints enough under its smallest, is left out here: same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from delta.planner.segments import Segment, Shape

CAPS = 512  # searches at most


@dataclass(frozen=True, slots=True)
class Cut:
    """Checkpoints, and the units between them: vertices. `unit_bytes` are those of the largest unit."""

    checkpoints: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    checkpoint_bytes: int
    unit_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoint_bytes + self.unit_bytes


class Accessibility:
    """Cuts of one division tree. `keep_bytes` and `again_bytes`: what a vertex takes as a checkpoint, and in a unit."""

    def __init__(self, root: Segment, keep_bytes: Sequence[int], again_bytes: Sequence[int]) -> None:
        self._root, self._keep, self._again = root, keep_bytes, again_bytes

    @cached_property
    def _weights(self) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        todo = [self._root]
        while todo:
            segment = todo.pop()
            found[segment.inner] = sum(self._again[vertex] for vertex in segment.inner)
            todo += segment.children
        return found

    @property
    def whole_bytes(self) -> int:
        """The cap at which nothing has to be a checkpoint."""
        return self._weights[self._root.inner]

    def cut(self, cap_bytes: int) -> Cut:
        """The cheapest checkpoints whose units are within the cap. A vertex that alone is not is one of them."""
        checkpoints, units = self._cut(self._root, cap_bytes)
        return Cut(
            tuple(sorted(checkpoints)),
            tuple(sorted(units)),
            sum(self._keep[vertex] for vertex in checkpoints),
            max((sum(self._again[vertex] for vertex in unit) for unit in units), default=0),
        )

    def least(self) -> Cut:
        """The cut with the least sum of checkpoints and largest unit."""
        best = whole = self.cut(self.whole_bytes)
        ranges = [(-1, whole)]  # caps above the first and below the largest unit of the second
        for _ in range(CAPS):
            if not ranges:
                break
            below, above = ranges.pop()
            if above.unit_bytes - below < 2 or below + 1 + above.checkpoint_bytes >= best.total_bytes:
                continue
            middle = (below + above.unit_bytes) // 2
            found = self.cut(middle)
            best = min(best, found, key=lambda cut: cut.total_bytes)
            ranges += [(middle, above), (below, found)]
        return best

    def _cut(self, segment: Segment, cap_bytes: int) -> tuple[list[int], list[tuple[int, ...]]]:
        if not segment.inner:
            return [], []
        if self._weights[segment.inner] <= cap_bytes:
            return [], [segment.inner]
        if segment.shape is Shape.LINEAR:
            return self._path(segment, cap_bytes)
        checkpoints, units = list(segment.level), list[tuple[int, ...]]()
        for child in segment.children:
            more = self._cut(child, cap_bytes)
            checkpoints += more[0]
            units += more[1]
        return checkpoints, units

    def _path(self, segment: Segment, cap_bytes: int) -> tuple[list[int], list[tuple[int, ...]]]:
        """The shortest path along a linear segment, in one pass: what each vertex on it can be reached from at once is
        a window that only moves ahead."""
        last = len(segment.children)
        keep = [0, *(self._keep[vertex] for vertex in segment.level), 0]
        again = [0, *(self._again[vertex] for vertex in segment.level), 0]
        sizes = [self._weights[child.inner] for child in segment.children]
        apart = {i: self._cut(child, cap_bytes) for i, child in enumerate(segment.children) if sizes[i] > cap_bytes}
        upto, total = [0], 0  # bytes before each vertex of the path
        for i, size in enumerate(sizes):
            total += size + (again[i] if i else 0)
            upto.append(total)
        best, came = [0] * (last + 1), [-1] * (last + 1)
        window = deque([0])
        for j in range(1, last + 1):
            if j - 1 in apart:  # too large to be passed over: both its ends are checkpoints
                came[j] = j - 1
                best[j] = best[j - 1] + keep[j] + sum(self._keep[vertex] for vertex in apart[j - 1][0])
                window.clear()
            else:
                while upto[j] - upto[window[0]] - again[window[0]] > cap_bytes:
                    window.popleft()
                came[j] = window[0]
                best[j] = best[window[0]] + keep[j]
            while window and best[window[-1]] > best[j]:
                window.pop()
            window.append(j)
        return self._along(segment, came, apart)

    def _along(
        self, segment: Segment, came: list[int], apart: dict[int, tuple[list[int], list[tuple[int, ...]]]]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        checkpoints, units, j = list[int](), list[tuple[int, ...]](), len(segment.children)
        while j > 0:
            i = came[j]
            if j - 1 in apart:
                checkpoints += apart[j - 1][0]
                units += apart[j - 1][1]
            elif passed := tuple(self._between(segment, i, j)):
                units.append(passed)
            if i:
                checkpoints.append(segment.level[i - 1])
            j = i
        return checkpoints, units

    def _between(self, segment: Segment, i: int, j: int) -> list[int]:
        passed = [vertex for child in segment.children[i:j] for vertex in child.inner]
        return sorted([*passed, *segment.level[i : j - 1]])
