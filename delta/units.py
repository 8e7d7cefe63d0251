"""Sizes and times as people write them.

A size given by a user ("8GiB", "60%", 8_000_000_000) is read here, once, at the edge; everywhere else a size is an
``int`` whose name ends in ``_bytes`` and a time an ``int`` whose name ends in ``_ns``.

Not covered: what a share is a share *of*. Only the caller knows (device, step, host memory), so `parse_size` returns a
`Share`.
"""

import math
import re
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from delta.errors import BudgetError, DeltaError

# Decimal, not float, reads the text: 0.29 * 10**9 as floats is 289999999.99999994.
_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FACTORS = _DECIMAL | _BINARY
_NUMBER = re.compile(r"([+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z]*|%)")
_MAX_BYTES = 2**63 - 1
_SHARE_TEXT = 'a share such as "40%"'
_UNITS_TEXT = "B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"


@dataclass(frozen=True, slots=True)
class Bytes:
    """A size given outright."""

    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes} B"

    def of(self, whole_bytes: int) -> int:
        """The size, whatever the whole is."""
        return self.nbytes


@dataclass(frozen=True, slots=True)
class Share:
    """A size given as a part (0.0 to 1.0) of something the caller knows."""

    fraction: float

    def __str__(self) -> str:
        return f"{self.fraction * 100:.10g}%"

    def of(self, whole_bytes: int) -> int:
        """The share of ``whole_bytes``, rounded down, so that a limit made of it is never exceeded."""
        return math.floor(self.fraction * whole_bytes)


def parse_bytes(text: int | str, *, what: str, error: type[DeltaError] = BudgetError) -> int:
    """Read a number of bytes: ``8_000_000_000``, ``"8GiB"``, ``"2 GB"``. Raises ``error``; shares are not allowed."""
    size = parse_size(text, what=what, error=error, shares=False)
    assert isinstance(size, Bytes)
    return size.nbytes


def parse_size(
    value: int | float | str | Bytes | Share, *, what: str, error: type[DeltaError] = BudgetError, shares: bool = True
) -> Bytes | Share:
    """Read a size or a share of one: ``8_000_000_000``, ``"8GiB"``, ``"40%"``.

    ``what`` names the thing in messages ("budget"). Raises ``error`` for anything that is negative, not a whole number
    of bytes, above 100 %, in an unknown unit, or not a number. Zero is a size: ``"0%"`` of the activations means evict
    all that can be.
    """
    return _Reader(what, value, error, shares=shares).read(value)


def parse_share(value: str | Share, *, what: str, error: type[DeltaError] = BudgetError) -> Share:
    """Read a share: ``"5%"``. Raises ``error``; sizes are not allowed."""
    share = _Reader(what, value, error, sizes=False).read(value)
    assert isinstance(share, Share)
    return share


@dataclass(frozen=True, slots=True)
class _Reader:
    """One value being read, with what its error messages need."""

    what: str
    given: object
    error: type[DeltaError]
    sizes: bool = True
    shares: bool = True

    def refused(self, why: str) -> DeltaError:
        """The error for this value: what was given, why not, what is allowed."""
        return self.error(f"{self.what}={self.given!r}: {why}. Give {self.allowed()}.")

    @property
    def kind(self) -> str:
        return "a size" if self.sizes else "a share"

    def allowed(self) -> str:
        if not self.sizes:
            return _SHARE_TEXT
        share = f", or {_SHARE_TEXT}" if self.shares else ""
        return f'a number of bytes such as 8_000_000_000, a size such as "8GiB"{share}; units: {_UNITS_TEXT}'

    def read(self, value: object) -> Bytes | Share:
        match value:
            case Bytes():
                return self.whole_bytes(value.nbytes)
            case Share():
                return self.share(value.fraction)
            case bool():
                raise self.refused(f"a truth value is not {self.kind}")
            case int() | float():
                return self.whole_bytes(value)
            case str():
                return self.text(value)
            case _:
                raise self.refused(f"a {type(value).__name__} is not {self.kind}")

    def text(self, text: str) -> Bytes | Share:
        match = _NUMBER.fullmatch(text.strip())
        if match is None:
            raise self.refused("this is not a number with a unit")
        number, unit = Decimal(match[1]), match[2]
        if unit == "%":
            return self.share(float(number / 100))
        factor = _FACTORS.get(unit.upper())
        if factor is None:
            raise self.refused(f"the unit {unit!r} is unknown")
        # "1.3GiB" is no whole number of bytes, yet plain enough to round down; "1.3" bytes is a mistake.
        return self.whole_bytes((number * factor).to_integral_value(ROUND_FLOOR) if factor > 1 else number)

    def whole_bytes(self, number: int | float | Decimal) -> Bytes:
        if not self.sizes:
            raise self.refused("this is not a share")
        if isinstance(number, float) and not math.isfinite(number):
            raise self.refused("a size must be finite")
        if number < 0:
            raise self.refused("a size cannot be negative")
        if self.shares and (0 < number < 1 or (number == 1 and isinstance(number, float))):
            raise self.refused(f'a share is written with its sign, "{float(number) * 100:.10g}%"')
        if number > _MAX_BYTES:
            raise self.refused("a size must be at most 8 EiB")
        if number != int(number):
            raise self.refused("a size in bytes must be a whole number")
        return Bytes(int(number))

    def share(self, fraction: float) -> Share:
        if not self.shares:
            raise self.refused("a share is not allowed here")
        if not 0.0 <= fraction <= 1.0:
            raise self.refused("a share must lie between 0% and 100%")
        return Share(fraction + 0.0)  # "-0%" is 0%


def at_least_one(**given: int) -> None:
    """Raises DeltaError, with its name, for a number below 1."""
    for name, number in given.items():
        if number < 1:
            raise DeltaError(f"{name}={number}: must be at least 1")


def parse_rate(text: str, *, what: str, error: type[DeltaError] = BudgetError) -> float:
    """Read bytes per second: ``"25GB/s"``. Raises ``error``."""
    amount, slash, second = text.partition("/")
    if not slash or second.strip() != "s":
        raise error(f"{what}={text!r}: give bytes per second, such as 25GB/s or 12GiB/s")
    rate = parse_bytes(amount, what=what, error=error)
    if rate <= 0:
        raise error(f"{what}={text!r}: a rate must be above 0")
    return float(rate)


def format_bytes(nbytes: int) -> str:
    """A size for people, in powers of 1024: ``"0 B"``, ``"512 KiB"``, ``"1.43 GiB"``."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_ns(time_ns: int) -> str:
    """A time for people: ``"0 ns"``, ``"1.3 ms"``, ``"12.4 s"``."""
    return _scaled(time_ns, 1000, ("ns", "µs", "ms", "s"))


def _scaled(number: int, step: int, units: tuple[str, ...]) -> str:
    """Three significant digits in the largest unit that keeps the number at 1 or above; in the first unit, all."""
    size, unit = float(abs(number)), 0
    # 999.5 and up would print as the next unit's 1000: step up before rounding does.
    while unit + 1 < len(units) and _rounded(size) >= step:
        size, unit = size / step, unit + 1
    text = f"{_rounded(size):.10g}" if unit else str(abs(number))
    return f"{'-' if number < 0 else ''}{text} {units[unit]}"


def _rounded(size: float) -> float:
    return round(size, 0 if size >= 100 else 1 if size >= 10 else 2)
