"""The most that a process had in use between two looks, of which nobody keeps count.

The heap keeps none of what it has given out. Linux keeps one of resident memory, but of the most since the process
began: where more was in use before, as when the program loaded its model, it tells nothing of what ops take and give
back. That count can be begun anew, but it is the program's to read. So another thread looks while ops run, which they
do without the interpreter's lock.
"""

import threading
import time

from delta.runtime.rawmem import ResidentMeter, heap_bytes

# A millisecond is enough to fault in 4 MiB, or 25 in huge pages (`rawmem.py`): what an op takes for less time than that
# is little.
_PERIOD_S = 1e-3
_SHARE = 0.02  # at most, of a processor's time


class PeakWatch:
    """Looks from `start` to `stop`, and keeps the most it has seen. For one thread at a time."""

    def __init__(self, meter: ResidentMeter) -> None:
        self._meter = meter
        self._thread: threading.Thread | None = None
        self._closed = False
        self._most_bytes = [0, 0]

    def start(self) -> None:
        """Begin to look; does nothing where it has begun, is closed, or the system has no thread left."""
        if self._thread is not None or self._closed:
            return
        self._most_bytes = [0, 0]
        self._thread = threading.Thread(target=self._run, name="delta-peaks", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def stop(self) -> None:
        """Look no more. The thread has ended when this returns, unless it is the caller: one that collects garbage may
        find out there that a step has ended."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """Look no more, whoever asks for it."""
        self._closed = True
        self.stop()

    def take(self) -> tuple[int, int]:
        """The most bytes that the heap had given out, and that were resident, since this was last asked; 0 where nobody
        has looked."""
        (given_out, resident), self._most_bytes = self._most_bytes, [0, 0]
        return given_out, resident

    def _run(self) -> None:
        while self._thread is threading.current_thread():
            most_bytes = self._most_bytes  # if that is taken before this has looked, what it sees is of before, too
            began_s = time.thread_time()  # not what it waits for the interpreter's lock
            most_bytes[0] = max(most_bytes[0], heap_bytes() or 0)
            most_bytes[1] = max(most_bytes[1], self._meter.read_bytes())
            time.sleep(max(_PERIOD_S, (time.thread_time() - began_s) / _SHARE))
