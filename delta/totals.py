"""What a run adds up to, for the report, and what one step did, for the timeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from delta.types import Mode


@dataclass(slots=True)
class Totals:
    """Counted over the whole run."""

    steps: int = 0
    steps_over: int = 0  # that did not hold their limit
    modes: dict[str, int] = field(default_factory=dict)
    evictions: dict[str, int] = field(default_factory=dict)
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    recomputed_bytes: int = 0
    encoded_bytes: int = 0  # that encoding saved
    peak_bytes: int = 0
    unevicted_peak_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    # What `strict` makes of a budget that cannot be held, or the error of a planner of one's own, until it is raised.
    failed: Exception | None = None
    plans: dict[str, int] = field(default_factory=dict)
    longest_plan_ns: dict[str, int] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def planned(self, made: bool, took_ns: int) -> None:
        """A plan was made, or one that was there was found again for a step that begins."""
        how = "made" if made else "found"
        self.plans[how] = self.plans.get(how, 0) + 1
        self.longest_plan_ns[how] = max(self.longest_plan_ns.get(how, 0), took_ns)

    def warn(self, kind: str, text: str) -> None:
        """Note a warning; one of a kind is enough."""
        if not self.has_warned(kind):
            self._warned.add(kind)
            self.warnings.append(text)

    def has_warned(self, kind: str) -> bool:
        """Whether another of this kind would say nothing."""
        return kind in self._warned


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One finished step, for the timeline."""

    index: int
    mode: Mode
    peak_bytes: int
    unevicted_peak_bytes: int
