"""Warnings at the line of the program's that led to them."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PASSED_OVER = ("delta", "torch")  # packages whose lines tell nobody where training was


def warn(text: str) -> None:
    """A RuntimeWarning at the innermost line of the program's own, or of a library's other than torch."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)
