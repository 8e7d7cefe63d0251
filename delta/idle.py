"""Idle steps: whether what is only watched, and not recorded, fits (promise P2)."""

from __future__ import annotations

import math
from collections.abc import Callable

from delta.budget import Budget
from delta.headroom import HeadRoom
from delta.learner import Learner
from delta.ledger import Ledger
from delta.room import Room
from delta.types import Look


class Idle:
    """Decides when it is enough to count the bytes of saved tensors."""

    def __init__(
        self, budget: Budget, ledger: Ledger, learner: Learner, room: Room, headroom: HeadRoom | None = None
    ) -> None:
        self._budget, self._ledger, self._learner, self._room = budget, ledger, learner, room
        self._headroom = headroom

    @property
    def expected(self) -> bool:
        """Whether the next step is expected to fit."""
        return self._budget.unlimited or self._learner.all_idle

    @property
    def unasked_bytes(self) -> float:
        """So many may be watched before `is_over` need be asked."""
        if self._budget.unlimited:
            return math.inf
        limit = self._room.limit_bytes
        if self._budget.device_bytes is not None or limit is None:  # others use some of it, and nobody tells when
            return -1
        return limit - self._ledger.unevicted_bytes  # what is left over from other steps may all come back

    def goes_on(self, look: Look) -> bool:
        """Whether a step that begins with such a tensor may be expected to fit still."""
        return self._budget.unlimited or self._learner.goes_on(look)

    def is_over(self, watched_bytes: int, used_bytes: Callable[[], int]) -> bool:
        """Whether so much is too much. `used_bytes`: asks the device how much of it is in use."""
        if self._budget.unlimited:
            return False
        if self._budget.device_bytes is not None:
            return used_bytes() > self._budget.whole_bytes
        limit = self._room.limit_bytes
        return limit is not None and self._ledger.resident_bytes + watched_bytes > limit

    def will_be_over(self, storages: int, step_bytes: int, used_bytes: Callable[[], int]) -> bool:
        """Whether a step whose first `storages` make `step_bytes` will be too much if it goes on like the known one
        that is nearest to it there. Looked into at the first, the second, the fourth storage and so on: what has been
        saved before it is looked after can be made again by nobody, so when there is no room left it is too late.
        """
        budget = self._budget
        if budget.unlimited or storages & (storages - 1):
            return False
        known_bytes, most_bytes = self._learner.nearest(storages, step_bytes)
        if not known_bytes or step_bytes <= known_bytes:
            return False
        if self._headroom is not None:
            most_bytes += self._headroom.largest_bytes
        coming_bytes = most_bytes * step_bytes // known_bytes - step_bytes
        if budget.device_bytes is not None:
            return used_bytes() + coming_bytes > budget.whole_bytes
        limit = self._room.limit_bytes
        return limit is not None and self._ledger.resident_bytes + step_bytes + coming_bytes > limit
