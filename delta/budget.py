"""How many bytes of saved activations may be resident, from what the user asked for.

Three forms (design, section 3): a number of activation bytes; a share of what the step would hold if nothing were
evicted, which is a share of what has been saved so far until a whole step has been seen; or the bytes the process may
use in all, where what is not an activation is measured and taken off: what the position in the step is known to take,
or seems to (`headroom`); for plans that do not tell positions apart, the most that was seen lately.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from delta.units import Bytes, Share

RETURNED = 0.7  # share of the unused room of a device budget that the next step may use
LATELY = 8  # steps that had to evict


@dataclass(frozen=True, slots=True)
class Need:
    """What a step that had to evict needs beside counted activations: `base_bytes` as it began, `most_bytes` when most
    of these are resident, and `anywhere_bytes` at most where not all of them would fit. All that it saved came to
    `saved_bytes`."""

    base_bytes: int
    most_bytes: int
    anywhere_bytes: int
    saved_bytes: int

    def of(self, saved_bytes: int) -> int:
        """The most of a step that saves so much: what is added to the base grows with that."""
        added_bytes = self.most_bytes - self.base_bytes
        return self.base_bytes + added_bytes * saved_bytes // max(1, self.saved_bytes)


@dataclass(slots=True)
class Budget:
    """`activations` and `device_bytes` exclude each other; with neither there is no limit.

    `reserve_bytes` of a device budget stay free for what nobody announces (workspaces, allocator rounding).
    """

    activations: Bytes | Share | None = None
    device_bytes: int | None = None
    reserve_bytes: int = 0
    other_bytes: int = 0  # in use that are not counted activations, the most seen lately while over the budget
    _needs: deque[Need] = field(default_factory=lambda: deque(maxlen=LATELY))  # of the last limited steps

    def step_used(self, used_bytes: int, need: Need, limited: bool) -> None:
        """A step used at most `used_bytes` of the device. What was taken for others and left unused is given back, most
        of it at a time, since the peak between two looks is not seen; but nothing that one of the last steps needed, as
        the next may be as large. A step that was not `limited` tells nothing: it had no use for the room."""
        if self.device_bytes is None or not used_bytes or not limited:
            return
        self._needs.append(need)
        returned_bytes = int(max(0, self.whole_bytes - used_bytes) * RETURNED)
        least_bytes = max(0, *(need.anywhere_bytes for need in self._needs), self.other_bytes - returned_bytes)
        self.other_bytes = min(self.other_bytes, least_bytes)

    def beside_bytes(self, saved_bytes: int) -> int:
        """What a step that saves so much takes beside counted activations, for plans that do not know it by position:
        as much as any of the last that had to evict, for its size. Before there was one, what was seen to be in use."""
        return max((need.of(saved_bytes) for need in self._needs), default=self.other_bytes)

    @property
    def whole_bytes(self) -> int:
        """Of a device budget: what may be in use in all."""
        assert self.device_bytes is not None
        return self.device_bytes - self.reserve_bytes

    @property
    def unlimited(self) -> bool:
        """Whether nothing can ever have to be evicted."""
        if self.device_bytes is not None:
            return False
        return self.activations is None or (isinstance(self.activations, Share) and self.activations.fraction >= 1.0)

    @property
    def is_share(self) -> bool:
        return isinstance(self.activations, Share)

    def limit_bytes(self, unevicted_peak_bytes: int, beside_bytes: int | None = None) -> int | None:
        """The limit now, given the unevicted peak as far as it is known, and what a device needs `beside_bytes` counted
        activations; None: not known. Returns None where there is no limit."""
        if self.unlimited:
            return None
        if self.activations is not None:
            return self.activations.of(unevicted_peak_bytes)
        assert self.device_bytes is not None
        beside_bytes = self.beside_bytes(unevicted_peak_bytes) if beside_bytes is None else beside_bytes
        return max(0, self.whole_bytes - beside_bytes)
