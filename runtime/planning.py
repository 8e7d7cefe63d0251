"""Plans searched beside the training: in a process of their own, which no step ever waits for.

The engine plans a step at once, in milliseconds, and holds a task open where a longer search may find a better plan.
That search is half Python and half HiGHS, so a thread would hold the interpreter's lock for a good part of it and could
not be stopped; a process can, keeps its memory out of the budget, and runs at low priority. It starts from the task as
a pickle in a file without a name and leaves its plan in another, so neither side waits for the other at a pipe.

What goes wrong there is no trouble to the training: the plan in use stays.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from tempfile import TemporaryFile

from delta.planner import Plan, Task
from delta.planning import Planning


class PlanningAside:
    """Has the engine's open tasks searched, one at a time. Call `step_begins` between two steps, and `close`."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._search: _Search | None = None
        self._seen: list[Task] = []
        self._closed = False

    def step_begins(self) -> None:
        """Take the plan that has been found; see to it that what is open is searched."""
        if self._closed:
            return
        tasks, search = self._planning.open_tasks, self._search
        if search is not None and not _among(tasks, search.task):
            self._stop()
        elif search is not None and search.ended:
            plan = search.plan()
            self._stop()
            self._planning.search_ended(search.task, plan)
            tasks = self._planning.open_tasks
        # A new task is let alone for a step: after the first ones op times are still refined, and planned for anew.
        if self._search is None and (task := next((task for task in tasks if _among(self._seen, task)), None)):
            self._start(task)
        self._seen = tasks

    def wait(self) -> None:
        """Until a search under way has ended, for who compares times. Its plan is taken when the next step begins."""
        if self._search is not None:
            self._search.wait()

    def close(self) -> None:
        """End a search under way. Idempotent."""
        self._closed = True
        self._stop()

    def _start(self, task: Task) -> None:
        try:
            self._search = _Search(task)
        except OSError:  # no process, no file: nothing is searched
            self._planning.search_ended(task, None)

    def _stop(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.stop()


def _among(tasks: Iterable[Task], one: Task) -> bool:
    return any(task is one for task in tasks)


class _Search:
    """One process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        if not sys.executable:  # an interpreter inside another program
            raise OSError("there is no interpreter to start")
        with ExitStack() as files, TemporaryFile() as given:
            self._found = files.enter_context(TemporaryFile())
            pickle.dump(task, given, protocol=pickle.HIGHEST_PROTOCOL)
            given.seek(0)
            search = [str(place) for place in sys.path]  # a program may have put a `Path` there
            start = f"import sys; sys.path[:] = {search!r}; from delta.aside import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", start], stdin=given, stdout=self._found, stderr=subprocess.DEVNULL
            )
            files.pop_all()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        self._process.wait()

    def plan(self) -> Plan | None:
        """What it has found; None if it failed.

        Its exit status does not always tell: where the program ignores SIGCHLD, or waits for all of its children, it
        reads as 0 whatever happened, and the file may be empty or end midway.
        """
        if self._process.returncode != 0:
            return None
        self._found.seek(0)
        try:
            plan = pickle.load(self._found)
        except Exception:  # of half a pickle almost any
            return None
        return plan if isinstance(plan, Plan) else None

    def stop(self) -> None:
        if not self.ended:
            self._process.kill()
            self._process.wait()
        self._found.close()
