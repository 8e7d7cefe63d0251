"""Parts the devices share: shares of the machine, who may reuse a host block, measured rates, the wall clock."""

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

from delta.errors import HostFullError, SwapError
from delta.runtime.device.base import Bandwidth, Direction, HostBlock
from delta.units import Bytes, Share, format_bytes

_KEPT_RATES = 15
_MIN_RATED_BYTES = 256 * 1024  # below it a transfer measures its latency


def part_bytes(machine_bytes: int) -> int:
    """What this process has of something that all on the machine share: as much as each of the others, where torchrun
    says how many they are, else all of it.
    """
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return machine_bytes // max(1, int(processes)) if processes.isdecimal() else machine_bytes


def limit_bytes(limit: Share | Bytes, available_bytes: int) -> int:
    """The host limit of a policy: given outright, or a share of this process's part of what is available."""
    return limit.of(part_bytes(available_bytes))


def host_full(wanted_bytes: int, used_bytes: int, limit_bytes: int, what: str) -> HostFullError:
    """The error for a limit that a block would go over."""
    return HostFullError(
        f"no host room for {format_bytes(wanted_bytes)}: "
        f"{format_bytes(used_bytes)} of {format_bytes(limit_bytes)} {what} are in use; "
        f"raise host.limit in the policy, or allow recompute"
    )


class BlockBook:
    """Puts off giving a block back while transfers use it."""

    def __init__(self, give_back: Callable[[HostBlock], None]) -> None:
        self._give_back = give_back
        self._lock = threading.Lock()

    def begin(self, block: HostBlock) -> None:
        """A transfer starts to use the block. SwapError if it was given back."""
        with self._lock:
            if block.freed:
                raise SwapError(f"a host block of {format_bytes(block.nbytes)} was asked for after it was given back")
            block.pending += 1

    def end(self, block: HostBlock) -> None:
        """A transfer is done with the block."""
        with self._lock:
            block.pending -= 1
            dead = block.freed and block.pending == 0
        if dead:
            self._give_back(block)

    def free(self, block: HostBlock) -> None:
        """The owner is done with the block. Idempotent."""
        with self._lock:
            dead = not block.freed and block.pending == 0
            block.freed = True
        if dead:
            self._give_back(block)


class Rates:
    """Bandwidth from the transfers made: a moving median, which a single stall does not spoil."""

    def __init__(self) -> None:
        self._bytes_per_s: dict[Direction, deque[float]] = {
            "out": deque(maxlen=_KEPT_RATES),
            "in": deque(maxlen=_KEPT_RATES),
        }
        self._lock = threading.Lock()

    def note(self, direction: Direction, nbytes: int, duration_ns: int) -> None:
        if nbytes >= _MIN_RATED_BYTES:
            with self._lock:
                self._bytes_per_s[direction].append(nbytes / max(duration_ns, 1) * 1e9)

    def bandwidth(self) -> Bandwidth | None:
        """The medians, or None until both directions were seen."""
        with self._lock:
            out, back = (list(self._bytes_per_s[direction]) for direction in ("out", "in"))
        return Bandwidth(statistics.median(out), statistics.median(back)) if out and back else None


class WallClock:
    """The clock of a device whose work is done when the call returns."""

    late = False

    def start(self) -> int:
        return time.perf_counter_ns()

    def stop(self, mark: int) -> int:
        return time.perf_counter_ns() - mark

    def hold_back(self, ns: int) -> None:
        """It cannot be ahead of the device."""

    def elapsed_ns(self, token: int) -> int | None:
        return token

    def wait_ns(self, token: int) -> int:
        return token
