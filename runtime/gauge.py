"""What the device has in use, told to the engine where a budget is on the whole of it."""

from __future__ import annotations

from delta.engine import Engine
from delta.runtime.device.base import Device

_KEPT_BYTES = 4 * 2**20  # by the allocator, which are worth being asked for


class Gauge:
    """Looks at the device for one session, and keeps the most it has seen."""

    def __init__(self, engine: Engine, device: Device) -> None:
        self._engine, self._device = engine, device
        self.peak_bytes = 0
        self.on = engine.budget.device_bytes is not None
        # Of a process only levels are seen: what an op makes and its reader drops is there when the op has ended.
        self.closely = self.on and device.hoards
        self._watching = False  # what is in use between two looks

    def look(self, own: bool = False, uncounted_bytes: int = 0) -> None:
        """Tell the engine what is in use; `own`: after Delta's own work. `uncounted_bytes`: of what is being saved, and
        counts from here on."""
        budget, device = self._engine.budget, self._device
        if not self.on:
            return
        if not self._watching and self._engine.routine is None:
            self._watching = True
            device.watch_peaks(True)
        now, peak = device.in_use()
        used = device.used_bytes() if device.hoards else now
        # What the allocator merely keeps is neither an activation nor in use, and the next op may not fit into it.
        if device.kept_bytes > _KEPT_BYTES and (
            self._engine.observes or used + self._engine.working_bytes > budget.whole_bytes
        ):
            device.trim()
            used = device.used_bytes()
        if used > budget.whole_bytes:
            now = max(now, used)
        # A card's peak since the last look may be more than there was: it is the most that can have been.
        self.peak_bytes = max(self.peak_bytes, used, peak if device.hoards else 0)
        if own:
            self._engine.settled(now, peak if device.hoards else now, uncounted_bytes)
        else:
            self._engine.looked(now, max(now, peak), uncounted_bytes)

    def step_ended(self) -> None:
        """Where the next step goes by its routine, it is known what ops take."""
        if self._watching:
            self._watching = False
            self._device.watch_peaks(False)

    def make_way(self, nbytes: int) -> None:
        """Delta is about to ask for so much, which may not fit into what the allocator keeps."""
        device = self._device
        if device.kept_bytes > _KEPT_BYTES and device.used_bytes() + nbytes > self._engine.budget.whole_bytes:
            device.trim()

    def lacks(self, made_bytes: int) -> bool:
        """Whether an op that makes so much may not fit beside what is resident, some of which may merely be kept."""
        return made_bytes > _KEPT_BYTES and self._device.used_bytes() + made_bytes > self._engine.budget.whole_bytes

    def sample_bytes(self) -> int:
        """What is in use now, whatever the budget is on."""
        used = self._device.used_bytes()
        self.peak_bytes = max(self.peak_bytes, used)
        return used
