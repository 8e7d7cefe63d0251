"""`WorkerProcess`: a `demo_worker` process seen from the demo, one JSON line out, one back."""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Self

from delta.errors import DeltaError
from delta.runtime.demo_worker import Spec
from delta.runtime.rawmem import GLIBC_SETTINGS, HUGE_PAGES

# The worker finds its modules where this process does: ``-m`` would look in the current directory first, for `random`
# too. What a terminal's Ctrl-C ends is this process, which then ends its workers: they have nothing to say to it.
_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = {search!r}
from delta.runtime.demo_worker import main
main()
"""
_GOODBYE_S = 10.0
_QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler has nothing to say to a terminal

# glibc's heap keeps the pages it has: faulting them in again took more than a quarter of a step, now more and now less,
# and has nothing to do with what is compared. They are huge ones where the system gives them to those who ask, as
# `deltactl doctor` tells users to have it.
HEAP = {
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(2**26),
    GLIBC_SETTINGS: HUGE_PAGES,
}


def _start(settings: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(search=[str(place) for place in sys.path])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**_QUIET, **settings, **os.environ},
    )


class _Spare:
    """A process started before it is asked for, which does its imports while the one before it trains: for trainings on
    a card, which leave cores to spare, half of a short one's time is that."""

    def __init__(self) -> None:
        self._ready: tuple[Mapping[str, str], subprocess.Popen[str]] | None = None
        atexit.register(self.drop)

    def take(self, settings: Mapping[str, str]) -> subprocess.Popen[str]:
        """One with these settings; the next like it is begun."""
        if self._ready is None or self._ready[0] != settings:
            self.drop()
            self._ready = settings, _start(settings)
        taken = self._ready[1]
        self._ready = settings, _start(settings)
        return taken

    def drop(self) -> None:
        """End the one that waits, if there is one."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready[1].kill()
            ready[1].communicate()


_spare = _Spare()


class OutOfMemory(DeltaError):
    """What the process was to train does not fit."""


class WorkerProcess:
    """Starts at construction, with `settings` in its environment; leaving the ``with`` block ends it, whatever
    happened."""

    def __init__(self, spec: Spec, settings: Mapping[str, str] | None = None) -> None:
        self._mode = spec.mode
        self._process = _spare.take(settings or {}) if spec.device != "cpu" else _start(settings or {})
        self._send(asdict(spec))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()  # the end of its lines: a worker that waits ends by itself
            self._process.wait(0 if exc[0] else _GOODBYE_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def wait_ready(self) -> None:
        """Wait for the answer to the spec. Raises DeltaError if the worker refused it."""
        self._answer()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises DeltaError with the worker's own text, or if it died."""
        self._send(request)
        return self._answer()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._died() from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "out_of_memory" in answer:
            raise OutOfMemory(answer["out_of_memory"])
        if "error" in answer:
            raise DeltaError(answer["error"])
        return answer

    def _died(self) -> DeltaError:
        try:
            code = self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:  # it has closed its output, and hangs
            self._process.kill()
            self._process.wait()
            return DeltaError(f"the {self._mode} process answers no more, and was ended")
        text = f"the {self._mode} process ended with exit code {code}"
        if code == -9:
            return OutOfMemory(f"{text}: killed, most likely for want of memory. A smaller batch needs less")
        return DeltaError(f"{text}: what it printed to the standard error says more")
