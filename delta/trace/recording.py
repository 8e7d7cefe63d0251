"""Which steps are recorded, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from delta.errors import TraceError
from delta.files import marked


@dataclass(frozen=True, slots=True)
class Recording:
    """Leave out the first `skip` steps, then record `steps`: the first to `path`, the next to ``path-2`` and so on."""

    path: Path
    skip: int = 0
    steps: int = 1

    def __post_init__(self) -> None:
        if self.skip < 0 or self.steps < 1:
            raise TraceError(f"skip={self.skip}, steps={self.steps}: skip none or more steps, record one or more")

    def file(self, number: int) -> Path:
        """Where recorded step `number` goes, counted from 0."""
        return marked(self.path, str(number + 1)) if number else self.path
