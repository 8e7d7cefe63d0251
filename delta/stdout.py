"""Keeps the standard output for what a command says.

Libraries that are no Python may print past `sys.stdout`: HiGHS, as scipy 1.17 has it, prints a line about its own inner
workings that no option turns off. Where the output is read by a program, that must not get in between.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def others_to_stderr() -> Iterator[None]:
    """What is written to file descriptor 1 goes to 2 for as long as this lasts, nothing is lost.

    For commands, not for a training that others print from at the same time.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # the buffer of C's own standard output
        os.dup2(kept, 1)
        os.close(kept)
