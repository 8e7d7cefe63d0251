"""The background thread: calls one function now and then.

It is a daemon (never keeps the process alive), holds its owner only weakly (a forgotten session ends it), and an
exception in the function is kept for `Daemon.check` to raise in the user's thread: training itself is never hurt by
it.

A core it runs on is one that the step has to do without, so it waits in C. Inside a real step, whose tensors have
emptied the caches, a sample of memory takes 0.2 ms of processor time, in a loop 8 µs.
"""

import inspect
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress

Tick = Callable[[], None]


class Daemon:
    """Calls ``tick`` every ``period_s`` seconds, in one thread named ``name``.

    If ``tick`` is a bound method, the thread ends when the object it belongs to is gone. A plain function is held on
    to.
    """

    def __init__(self, tick: Tick, period_s: float, name: str) -> None:
        if not period_s > 0:
            raise ValueError(f"period_s={period_s} must be above 0")
        self._shared = _Shared()
        owner: Callable[[], Tick | None] = weakref.WeakMethod(tick) if inspect.ismethod(tick) else lambda: tick
        self._thread = threading.Thread(target=_run, args=(self._shared, owner, period_s), name=name, daemon=True)
        weakref.finalize(self, self._shared.end)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise what ``tick`` raised first since the last check, once."""
        error, self._shared.error = self._shared.error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """End the thread; a tick under way is finished first. Idempotent; may be called from ``tick``."""
        self._shared.end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def is_alive(self) -> bool:
        return self._thread.is_alive()


class _Shared:
    """All that the thread and the `Daemon` both know. The thread must not know the `Daemon`, which knows its owner."""

    def __init__(self) -> None:
        self.going_on = threading.Lock()  # held until the end
        self.going_on.acquire()
        self.error: Exception | None = None

    def end(self) -> None:
        with suppress(RuntimeError):  # it has been let go of already
            self.going_on.release()


def _run(shared: _Shared, owner: Callable[[], Tick | None], period_s: float) -> None:
    while not shared.going_on.acquire(timeout=period_s):
        tick = owner()
        if tick is None:
            return
        try:
            tick()
        except Exception as error:
            if shared.error is None:
                shared.error = _without_frames(error)
        del tick  # the owner is not held while this thread sleeps


def _without_frames(error: Exception) -> Exception:
    """The error with its traceback as text: the frames themselves would keep the owner alive."""
    error.add_note("raised in the background thread:\n" + "".join(traceback.format_tb(error.__traceback__)))
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
