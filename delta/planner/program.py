"""A mixed-integer program in plain lists, and its solution by scipy's HiGHS.

Rows are sums that have to reach a bound. scipy is imported when a program is solved, not before. HiGHS is deterministic
as long as it is not its time limit that ends a search.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

Term = tuple[int, float]  # variable, factor


@dataclass(slots=True)
class Program:
    """Minimise the cost of the variables under all rows. Variables are numbers in the order they were added."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # 1: takes whole numbers only
    bounds: list[float] = field(default_factory=list)  # by row: what its sum has to reach
    factors: list[float] = field(default_factory=list)
    variables: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])

    def variable(self, cost: float = 0.0, upper: float = 1.0, whole: bool = False) -> int:
        """A variable between 0 and `upper`."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def at_least(self, bound: float, terms: Iterable[Term]) -> None:
        """The sum of factor x variable over `terms` is `bound` or more. A variable may be in several terms."""
        factors: dict[int, float] = {}  # HiGHS takes each variable of a row once
        for variable, factor in terms:
            factors[variable] = factors.get(variable, 0.0) + factor
        self.variables += factors
        self.factors += factors.values()
        self.starts.append(len(self.variables))
        self.bounds.append(bound)

    def solve(self, time_limit_s: float, gap: float, relaxed: bool = False) -> list[float] | None:
        """The values of the variables, within the relative `gap` of the best there are, or the best that were found
        in time. None: there are none, or none were found in time. `relaxed`: those that should be whole may not be."""
        if not self.costs:
            return [] if max(self.bounds, default=0) <= 0 else None

        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        shape = (len(self.bounds), len(self.costs))
        rows = LinearConstraint(csr_array((self.factors, self.variables, self.starts), shape=shape), self.bounds, inf)
        found = milp(
            self.costs,
            integrality=0 if relaxed else self.whole,
            bounds=Bounds(0.0, self.upper),
            constraints=rows if self.bounds else None,
            options={"time_limit": time_limit_s, "mip_rel_gap": gap},
        )
        return None if found.x is None else [float(value) for value in found.x]
