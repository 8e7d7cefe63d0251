"""Which steps are recorded, and where they go."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from delta.errors import TraceError
from delta.files import marked


@dataclass(frozen=True, slots=True, init=False)
class Recording:
    """Leave out the first `skip` steps, then record `steps`: the first to `path`, the next to ``path-2`` and so on."""

    path: Path
    skip: int
    steps: int

    def __init__(self, path: str | os.PathLike[str], skip: int = 0, steps: int = 1) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TraceError(f"path={path!r}: give the path of a file")
        if not (isinstance(skip, int) and isinstance(steps, int)) or skip < 0 or steps < 1:
            raise TraceError(f"skip={skip!r}, steps={steps!r}: skip none or more steps, record one or more")
        for name, value in (("path", Path(path)), ("skip", skip), ("steps", steps)):
            object.__setattr__(self, name, value)

    def file(self, number: int) -> Path:
        """Where recorded step `number` goes, counted from 0."""
        return marked(self.path, str(number + 1)) if number else self.path
