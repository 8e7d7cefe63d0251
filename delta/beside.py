"""What is in use beside counted activations, by position in the step; and what would be in a step of another size."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import ceil
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = 16  # remembered of steps that differ in their sizes only; the one seen longest ago is forgotten first


@dataclass(slots=True)
class Track:
    """Bytes beside counted activations, by position."""

    levels: list[int] = field(default_factory=list)  # when the position is reached
    working: list[int] = field(default_factory=list)  # the most above that, until the next one

    def begin(self, level_bytes: int) -> None:
        self.levels.append(level_bytes)
        self.working.append(0)

    def reached(self, nbytes: int) -> int:
        """So much was in use since the last position began; returns its working set."""
        self.working[-1] = max(self.working[-1], nbytes - self.levels[-1])
        return self.working[-1]

    def after(self, earlier: Track) -> Track:
        """What to expect of the next step: the levels of the last one, and the largest working sets of both, since
        not each time each of them is seen."""
        if len(earlier.working) != len(self.working):
            return self
        return Track(self.levels, list(map(max, self.working, earlier.working)))

    def towards(self, other: Track, part: Fraction) -> Track:
        """What lies that part of the way to another one."""
        return Track(
            [own + ceil((others - own) * part) for own, others in zip(self.levels, other.levels, strict=True)],
            [own + ceil((others - own) * part) for own, others in zip(self.working, other.working, strict=True)],
        )

    def scaled(self, times: Fraction) -> Track:
        """So many times as much."""
        return Track(
            [ceil(nbytes * times) for nbytes in self.levels], [ceil(nbytes * times) for nbytes in self.working]
        )

    def raised(self, nbytes: int) -> Track:
        """With so much more there all the time."""
        return Track([level + nbytes for level in self.levels], self.working)

    @property
    def most_bytes(self) -> tuple[int, ...]:
        return tuple(map(add, self.levels, self.working))


@dataclass(slots=True)
class Beside:
    """What one step used beside counted activations: by save order, and by need."""

    saves: Track = field(default_factory=Track)
    needs: Track = field(default_factory=Track)
    # By save order: the most of it that the making of the storage took, beside it. None where nobody tells it apart.
    making: list[int] = field(default_factory=list)

    def after(self, earlier: Beside) -> Beside:
        making = self.making
        if len(making) == len(earlier.making):
            making = list(map(max, making, earlier.making))
        return Beside(self.saves.after(earlier.saves), self.needs.after(earlier.needs), making)

    def towards(self, other: Beside, part: Fraction) -> Beside:
        making = [own + ceil((others - own) * part) for own, others in zip(self.making, other.making, strict=False)]
        return Beside(self.saves.towards(other.saves, part), self.needs.towards(other.needs, part), making)

    def scaled(self, times: Fraction) -> Beside:
        making = [ceil(nbytes * times) for nbytes in self.making]
        return Beside(self.saves.scaled(times), self.needs.scaled(times), making)

    def raised(self, nbytes: int) -> Beside:
        return Beside(self.saves.raised(nbytes), self.needs.raised(nbytes), self.making)

    @property
    def places(self) -> tuple[int, int]:
        """How many saves there are, and needs."""
        return len(self.saves.levels), len(self.needs.levels)

    @property
    def base_bytes(self) -> int:
        """When the step began."""
        return self.saves.levels[0] if self.saves.levels else 0

    def as_in_forward(self, taken_bytes: Sequence[int], saved_bytes: Sequence[int], needed: Sequence[int]) -> Beside:
        """The same where backward of an op takes no less than the op did, just before or after the save of what it
        needs, beside what was saved by it; and a replay what the op did, before the save of what it made.
        `taken_bytes`: after each save; `saved_bytes`: by save order; `needed`: save orders, by need."""
        if (len(saved_bytes), len(needed)) != (len(taken_bytes), len(self.needs.working)):
            return self
        next_bytes = [*saved_bytes[1:], 0]
        working = [max(0, most - nbytes) for most, nbytes in zip(taken_bytes, next_bytes, strict=True)]
        forward = [max(pair) for pair in pairwise([0, *working])]
        backward = [max(own, forward[order]) for own, order in zip(self.needs.working, needed, strict=True)]
        return Beside(self.saves, Track(self.needs.levels, backward), [0, *working[:-1]])


class BesideBySize:
    """Of steps that differ in their sizes only: what they used, and what one of any other size would.

    Some of it grows with what the step saves, such as what an op makes and drops, and some does not, such as gradients:
    at each place, it lies between that of the next smaller step that is known and that of the next larger one. Where
    only one is known, what there is too much of does less harm than what is missing. And what was there as a step
    began, such as an optimizer's state, is there in any that comes after it.
    """

    def __init__(self) -> None:
        # Above its base, by the bytes of all that the step saves; the one seen last at the end.
        self._known: dict[int, Beside] = {}
        self.base_bytes = 0  # as the step began that was seen last

    def saw(self, saved_bytes: int, beside: Beside) -> None:
        """A step that saved so much has used that. Steps of other places are nothing to go by any more."""
        self.base_bytes = beside.base_bytes
        if any(known.places != beside.places for known in self._known.values()):
            self._known.clear()
        known, beside = self._known.pop(saved_bytes, None), beside.raised(-self.base_bytes)
        self._known[saved_bytes] = beside if known is None else beside.after(known)
        if len(self._known) > SIZES:
            del self._known[next(iter(self._known))]

    @property
    def told(self) -> bool:
        """Whether anything is known."""
        return bool(self._known)

    def at(self, saved_bytes: int) -> Beside:
        """What a step that saves so much will use; nothing, where nothing is known."""
        return self._above_base(saved_bytes).raised(self.base_bytes)

    def _above_base(self, saved_bytes: int) -> Beside:
        smaller = max((known for known in self._known if known < saved_bytes), default=None)
        larger = min((known for known in self._known if known >= saved_bytes), default=None)
        if smaller is None:
            return self._known[larger] if larger is not None else Beside()
        if larger is None:
            return self._known[smaller].scaled(Fraction(saved_bytes, max(1, smaller)))
        part = Fraction(saved_bytes - smaller, larger - smaller)
        return self._known[smaller].towards(self._known[larger], part)
