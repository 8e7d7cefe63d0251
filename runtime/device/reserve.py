"""What a card's allocator has reserved, and how a budget on it is held: it is capped where somebody hears of an op that
finds no memory, and elsewhere gives back segments that nobody uses.

It reserves in segments, and what is free in one that is in use may be too small for the next request. So the cap lies
above the budget, by `RESERVED_RATIO`.
"""

from __future__ import annotations

from delta.errors import BudgetError
from delta.runtime.device.accelerator import Accelerator, MemoryUse

RESERVED_RATIO = 1.05  # of a budget, or of what is in use at most
_SEGMENT_BYTES = 20 * 2**20  # what the allocator reserves at least for a large request
_WORTH_IT = 0.02  # of what may be reserved: with so much more unused, giving back is tried again


class Reserve:
    """One card's, under at most one budget."""

    def __init__(self, card: Accelerator) -> None:
        self._card = card
        self._most_bytes: int | None = None  # that may be reserved; None: no budget holds
        self._program_s_fraction = 1.0
        self._enforced = False
        self._stuck_bytes = 0  # reserved, not given out, and not to be given back
        self._last_use = card.memory_use()

    def in_use(self) -> tuple[int, int]:
        """Bytes given out now, and the most since this was last asked. See `delta.runtime.device.base.Device.in_use`.

        The allocator's peak is the program's to reset, so it tells only where it has risen. Else the peak was at most
        what was in use before and all that has been asked for since, and no higher than the allocator's.

        Where it refuses nothing, segments nobody uses are given back here once it has reserved more than it may.
        """
        before, now = self._last_use, self._card.memory_use()
        self._last_use = now
        if not self._enforced:
            self._return_excess(now)
        if now.peak_bytes > before.peak_bytes:
            return now.now_bytes, now.peak_bytes
        asked_bytes = now.ever_bytes - before.ever_bytes
        if asked_bytes < 0:  # the program has reset what counts that
            return now.now_bytes, now.peak_bytes
        most = before.now_bytes + asked_bytes
        if now.peak_bytes == before.peak_bytes:
            most = min(most, now.peak_bytes)
        return now.now_bytes, max(now.now_bytes, most)

    def trim(self) -> None:
        """Give back what nobody uses, where more is reserved than the peak needs."""
        use = self._card.memory_use()
        if use.reserved_bytes > RESERVED_RATIO * use.peak_bytes:
            self._card.empty_cache()

    def cap(self, budget_bytes: int | None) -> None:
        """Which budget holds (None: none); it is not enforced yet. BudgetError where the allocator counts nothing."""
        if budget_bytes is not None and not self._card.counts():
            raise BudgetError(
                "budget= needs PyTorch's own allocator, which says what is in use, and another one is set "
                "(PYTORCH_CUDA_ALLOC_CONF=backend:..., or a pluggable one); take that back, or give activations="
            )
        if budget_bytes is not None and self._most_bytes is None:
            self._program_s_fraction = self._card.fraction()
        self._most_bytes = None if budget_bytes is None else int(budget_bytes * RESERVED_RATIO)
        self.enforce(False)

    def enforce(self, on: bool) -> None:
        """Have the allocator raise its out-of-memory error inside the op that would go over the cap, or let it go."""
        enforced = on and self._most_bytes is not None
        if enforced == self._enforced:
            return
        self._enforced = enforced
        fraction = self._program_s_fraction
        if self._most_bytes is not None and enforced:
            self._return_excess(self._card.memory_use())
            fraction = min(fraction, self._most_bytes / self._card.total_bytes())
        self._card.limit(fraction)

    def _return_excess(self, use: MemoryUse) -> None:
        """Give back segments that nobody uses, if too much is reserved and there may be one. What could not be given
        back the last time lies beside something that is in use, and to try again has the host wait for the card: it is
        not, before more is unused or enough has been given back."""
        if self._most_bytes is None or use.reserved_bytes <= self._most_bytes:
            self._stuck_bytes = 0
            return
        idle_bytes = use.reserved_bytes - use.now_bytes
        if idle_bytes - self._stuck_bytes >= max(_SEGMENT_BYTES, int(_WORTH_IT * self._most_bytes)):
            self._card.empty_cache()
            left = self._card.memory_use()
            self._stuck_bytes = left.reserved_bytes - left.now_bytes
