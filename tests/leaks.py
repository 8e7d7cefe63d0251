"""What a test leaves behind: threads, open spill files, pinned host memory, settings of the process."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 2.0
_FDS = Path("/proc/self/fd")


def _threads() -> set[threading.Thread]:
    # A dummy stands for a thread that Python did not start, such as autograd's: not ours to end.
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def _open_files() -> set[str]:
    """Open files that have no name any more, or one of ours. Empty where there is no /proc."""
    found = set()
    for fd in os.listdir(_FDS) if _FDS.is_dir() else ():
        try:
            target = os.readlink(_FDS / fd)
        except OSError:  # the one that lists the directory
            continue
        deleted = target.endswith(" (deleted)") and not target.startswith(("/memfd:", "/dev/"))
        if deleted or os.path.basename(target).startswith("delta-"):
            found.add(f"fd {fd} -> {target}")
    return found


def _slab_bytes() -> int:
    host = sys.modules.get("delta.runtime.host")  # not imported: nothing can be pinned
    return host.live_slab_bytes() if host else 0


def _settings() -> dict[str, object]:
    """What the process is set to, and a later test would find. Empty where torch is not imported yet."""
    torch, cudnn = sys.modules.get("torch"), sys.modules.get("delta.runtime.cudnn")
    found: dict[str, object] = {"cuDNN has fallen back": cudnn is not None and cudnn.fell_back()}
    if torch is not None:
        found |= {
            "threads": torch.get_num_threads(),
            "default dtype": torch.get_default_dtype(),
            "gradients": torch.is_grad_enabled(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "cuDNN searches": torch.backends.cudnn.benchmark,
        }
    return found


@dataclass(frozen=True)
class Snapshot:
    """The state before a test."""

    threads: set[threading.Thread]
    open_files: set[str]
    slab_bytes: int
    settings: dict[str, object]

    @classmethod
    def take(cls) -> "Snapshot":
        return cls(_threads(), _open_files(), _slab_bytes(), _settings())

    def leaks(self, patience_s: float = PATIENCE_S) -> list[str]:
        """What is there now and was not before, after waiting a while for it to go."""
        return wait_until_empty(self._leaks_now, patience_s)

    def _leaks_now(self) -> list[str]:
        found = [f"thread {thread.name}" for thread in _threads() - self.threads]
        found += _open_files() - self.open_files
        if _slab_bytes() > self.slab_bytes:
            found.append(f"{_slab_bytes() - self.slab_bytes} bytes of pinned host memory")
        found += [
            f"{name}: {now}, was {self.settings[name]}"
            for name, now in _settings().items()
            if self.settings.get(name, now) != now
        ]
        return found


def files_left(directory: Path, patience_s: float = PATIENCE_S) -> list[str]:
    """Everything below a directory, after waiting a while for it to go."""
    return wait_until_empty(lambda: sorted(str(path) for path in directory.rglob("*")), patience_s)


def wait_until_empty(look: Callable[[], list[str]], patience_s: float) -> list[str]:
    """`look()` until it finds nothing or patience ends. Objects that only wait for the collector are no leak."""
    end = time.monotonic() + patience_s
    while (found := look()) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return found
