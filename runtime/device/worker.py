"""One I/O thread: runs jobs in order, helped by whoever cannot wait for its turn.

A thread that has to wait for a job that nobody began runs it itself, so a transfer that is needed now does not stand
in line behind prefetches. The thread is a daemon, starts at the first job, holds on to nothing but the queue, and
ends in `stop` or when the worker is forgotten.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class Job:
    """Work that runs exactly once, in the thread that claims it first. ``body`` reports failures itself; it raises only
    what stops the program, KeyboardInterrupt for one.
    """

    __slots__ = ("_body", "_claim", "_running", "done")

    def __init__(self, body: Callable[[], None]) -> None:
        self._body: Callable[[], None] | None = body
        self._claim = threading.Lock()
        self._running = threading.Lock()  # bare locks: an event takes four times as long to make
        self._running.acquire()
        self.done = False

    def run(self) -> None:
        """Do it now, unless a thread already does or did."""
        if not self._claim.acquire(blocking=False):
            return
        body, self._body = self._body, None  # a finished job keeps nothing alive
        assert body is not None
        try:
            body()
        finally:
            del body
            self.done = True
            self._running.release()

    def finish(self) -> None:
        """Return when it has run, running it here if nobody has begun."""
        self.run()
        with self._running:
            pass


class Worker:
    """A lazily started daemon thread named ``name``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        weakref.finalize(self, self._queue.put, None)

    def submit(self, job: Job) -> None:
        """Queue the job; after `stop`, run it here."""
        with self._lock:
            if not self._stopped and (self._thread is not None or self._start()):
                self._queue.put(job)
                return
        job.run()

    def stop(self) -> None:
        """End the thread after the jobs it has. Idempotent; may be called from a job."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> bool:
        """Whether it could be started."""
        thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down: no new threads, but jobs still have to be done
            return False
        self._thread = thread
        return True


def _work(queue: "SimpleQueue[Job | None]") -> None:
    while (job := queue.get()) is not None:
        job.run()
