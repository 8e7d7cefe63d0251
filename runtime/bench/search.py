"""The largest number that passes a trial: doubled until one fails, then halved in between."""

from __future__ import annotations

from collections.abc import Callable


def largest(passes: Callable[[int], bool], start: int, most: int, precision: float = 0.0) -> int:
    """The largest number up to ``most`` that passes, 0 if not even 1 does, with a trial of ``start`` first.

    What is above a number that fails is taken to fail, too. The answer passes; a number larger by more than
    ``precision`` of it, and by more than 1, fails or was not allowed.
    """
    good, bad, at = 0, most + 1, min(start, most)
    while good == 0 and bad > 1:
        if passes(at):
            good = at
        else:
            bad, at = at, at // 2
    while good and bad == most + 1 and good < most:
        at = min(2 * good, most)
        if passes(at):
            good = at
        else:
            bad = at
    while bad - good > max(1, precision * good):
        at = (good + bad) // 2
        if passes(at):
            good = at
        else:
            bad = at
    return good
