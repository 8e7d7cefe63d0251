"""What a run adds up to, for the report, and what one step did, for the timeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from delta.types import Mode


@dataclass(slots=True)
class Totals:
    """Counted over the whole run."""

    steps: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    evictions: dict[str, int] = field(default_factory=dict)
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    recomputed_bytes: int = 0
    encoded_bytes: int = 0  # that encoding saved
    peak_bytes: int = 0
    unevicted_peak_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)

    def warn(self, kind: str, text: str) -> None:
        """Note a warning; one of a kind is enough."""
        if kind not in self._warned:
            self._warned.add(kind)
            self.warnings.append(text)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One finished step, for the timeline."""

    index: int
    mode: Mode
    peak_bytes: int
    unevicted_peak_bytes: int
