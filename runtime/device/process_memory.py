"""What a process has in use of its resident memory, and what its heap merely keeps, now and at the most."""

from __future__ import annotations

from delta.runtime.device.peak_watch import PeakWatch
from delta.runtime.rawmem import ResidentMeter, heap_bytes, peak_resident_bytes, trim_heap


class ProcessMemory:
    """Of this process. The heap says what it has given out; all that is resident beside it is there to stay."""

    def __init__(self) -> None:
        self.budget_bytes: int | None = None
        self.kept_bytes = 0  # by the heap, at the last look
        self._meter = ResidentMeter()
        self._peak_watch = PeakWatch(self._meter)
        self._beside_heap_bytes: int | None = None  # resident when nothing was merely kept
        self._peak_bytes = peak_resident_bytes()
        self._before_trim_bytes = 0  # the most in use since the last look, where something was trimmed away after it

    def resident_bytes(self) -> int:
        """All that is resident now."""
        return self._meter.read_bytes()

    def in_use(self, coming_bytes: int) -> tuple[int, int]:
        """Bytes in use now, `coming_bytes` that are not resident yet among them, and the most since the last look.

        A peak is what the heap had given out, or what was resident without what the heap had kept at the last look:
        an op that makes a tensor, frees it and makes another does not always get the same place again. Seen are those
        that `watch_peaks` sees, and one that was higher than any before. Over the budget, all that was resident counts.
        """
        resident, given_out = self._meter.read_bytes(), heap_bytes()
        now, peak = resident + coming_bytes, max(self._before_trim_bytes, self._most_in_use())
        self._before_trim_bytes = 0
        if given_out is not None and self._beside_heap_bytes is not None:
            now = min(now, given_out + self._beside_heap_bytes)
        self.kept_bytes = max(0, resident - now)
        return now, max(now, peak)

    def _most_in_use(self) -> int:
        """Since this was last asked; 0 if nobody has seen anything."""
        given_out, resident = self._peak_watch.take()
        before, self._peak_bytes = self._peak_bytes, peak_resident_bytes()
        if self._peak_bytes > before:
            resident = self._peak_bytes
        if self.budget_bytes is not None and resident > self.budget_bytes:
            return resident
        return max(resident - self.kept_bytes, min(given_out + (self._beside_heap_bytes or 0), resident))

    def watch_peaks(self, on: bool) -> None:
        """Whether another thread looks at peaks."""
        if on:
            self._peak_watch.start()
        else:
            self._peak_watch.stop()

    def trim(self) -> None:
        """Give back what the heap merely keeps, and take what is resident beside it from now on."""
        self._before_trim_bytes = max(self._before_trim_bytes, self._most_in_use())
        trim_heap()
        given_out = heap_bytes()
        if given_out is not None:  # which may not all be resident yet: the most that was ever seen counts
            beside_bytes = self._meter.read_bytes() - given_out
            self._beside_heap_bytes = max(self._beside_heap_bytes or 0, beside_bytes)
        self.kept_bytes = 0
        self._peak_watch.take()  # of what was kept until then

    def stop(self) -> None:
        """Watch no peaks any more."""
        self._peak_watch.close()

    def close(self) -> None:
        self._meter.close()
