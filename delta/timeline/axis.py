"""Axes of a picture: from a largest value to a scale with round ticks in a readable unit."""

from dataclasses import dataclass

_TICKS = 5  # aimed at; the true number is 4 to 8
_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_TIME_UNITS = (("s", 10**9), ("ms", 10**6), ("µs", 10**3), ("ns", 1))


@dataclass(frozen=True, slots=True)
class Scale:
    """From zero to ``top``, with ticks as (value, label) and the unit of the labels."""

    top: float
    unit: str
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """Where a value lies between zero (0.0) and the top (1.0)."""
        return value / self.top


def bytes_scale(largest_bytes: int) -> Scale:
    """A scale for bytes that ends at a tick at or above the largest value."""
    return _scale(largest_bytes, _BYTE_UNITS, round_top=True)


def seconds_scale(largest_ns: int) -> Scale:
    """A scale for time that ends at the largest value."""
    return _scale(largest_ns, _TIME_UNITS, round_top=False)


def _scale(largest: int, units: tuple[tuple[str, int], ...], *, round_top: bool) -> Scale:
    largest = max(largest, 1)
    unit, factor = next(((name, size) for name, size in units if largest >= size), units[-1])
    pace = _round_pace(largest / factor / _TICKS)
    count = int(largest / factor / pace + 1e-9)
    if round_top and count * pace * factor < largest:
        count += 1
    ticks = tuple((index * pace * factor, f"{index * pace:.10g}") for index in range(count + 1))
    return Scale(ticks[-1][0] if round_top else largest, unit, ticks)


def _round_pace(pace: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least ``pace``."""
    power = 1e-9
    while power * 10 <= pace:
        power *= 10
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= pace * (1 - 1e-9))
