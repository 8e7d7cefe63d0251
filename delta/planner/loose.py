"""Steps whose data decide what they save: at one input size, too, it is something else each time.

So it is where tokens are routed to experts, or as many boxes are found as there are. Of a single storage no more is
known than about what it takes. What all of them take together is known better: each token goes to some expert. So plans
are made for that.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

from delta.planner.estimate import Dims, Interval
from delta.planner.family import Family
from delta.planner.steplog import StepGraph


class LooseFamily(Family):
    """A family of which each step is a sample of its own, as long as its bytes are others."""

    def _alike(self, known: StepGraph, graph: StepGraph) -> bool:
        return known.saved_bytes == graph.saved_bytes

    def _fit(self) -> None:
        super()._fit()
        saved = Counter(self._kind_of_node[node] for node in self._base.saved)
        self._loose = {kind: count for kind, count in saved.items() if self._is_loose(kind)}
        loose = [order for order, node in enumerate(self._base.saved) if self._kind_of_node[node] in self._loose]
        saved_bytes = [graph.saved_bytes for _, graph in self._samples]
        self._together = self._estimator.forms([sum(each[order] for order in loose) for each in saved_bytes])

    @property
    def loose(self) -> bool:
        """Whether what some saved storage takes is not known but by its mean."""
        return bool(self._loose)

    def _is_loose(self, kind: int) -> bool:
        return any(form.margin for form in self._forms[kind])

    def _intervals(self, dims: Dims) -> list[Interval]:
        """Of a loose one about its mean, as much more or less as all of them may take together."""
        intervals = super()._intervals(dims)
        if not self._loose:
            return intervals
        point = self._estimator.point(dims)
        together = self._estimator.between(self._together, point)
        means = {
            kind: max(0, sum(forms[0].at(point.monomials)))
            for kind, forms in enumerate(self._forms)
            if self._is_loose(kind)
        }
        means_bytes = sum(count * means[kind] for kind, count in self._loose.items())
        for kind, mean_bytes in means.items():
            share = mean_bytes / max(1, means_bytes)
            intervals[kind] = Interval(int(share * together.least), ceil(share * together.most))
        return intervals
