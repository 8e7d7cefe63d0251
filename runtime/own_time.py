"""How long Delta's own work takes beside a step that is traced: `delta.trace.events.Bookkeeping`, measured.

In a real step every op empties the caches, and Delta's Python then takes several times what it takes in a loop. So it
is measured where it runs, event by event, and averaged over the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from delta.runtime.compiled import never_compiled
from delta.runtime.opfacts import facts_of
from delta.runtime.recorder import Recorder
from delta.trace.events import Bookkeeping

if TYPE_CHECKING:
    from delta.runtime.core import Core
    from delta.runtime.tracer import Tracer


class OwnTime:
    """Sums of one step. Calls that are no event of a trace (views, parameters that autograd saves) add time only."""

    __slots__ = (
        "needs",
        "needs_ns",
        "ops",
        "ops_ns",
        "passed",
        "passed_ns",
        "released",
        "released_ns",
        "saves",
        "saves_ns",
    )

    def __init__(self) -> None:
        self.ops = self.passed = self.saves = self.needs = self.released = 0
        self.ops_ns = self.passed_ns = self.saves_ns = self.needs_ns = self.released_ns = 0

    def means(self) -> Bookkeeping:
        """What each event took. A call that makes a view passes as one that needs no recipe does, and a trace has no
        views: the ops bear what they take."""
        views_ns = self.passed_ns // max(1, self.ops)
        each_ns = self.passed_ns // max(1, self.passed)
        return Bookkeeping(
            op_ns=self.ops_ns // max(1, self.ops) + views_ns,
            passed_ns=each_ns + views_ns,
            save_ns=self.saves_ns // max(1, self.saves),
            need_ns=self.needs_ns // max(1, self.needs),
            release_ns=self.released_ns // max(1, self.released),
        )


class TimedRecorder(Recorder):
    """The recorder while a tracer is below it: notes how long a call takes, without what the tracer does in it.

    The way from the recorder down to the tracer and back stands for the one from the program to the recorder.
    """

    def __init__(self, core: Core, tracer: Tracer) -> None:
        super().__init__(core)
        self._tracer = tracer

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracer = self._tracer
        if not tracer.wanted:
            return super().__torch_dispatch__(func, types, args, kwargs)
        followed = self._core.engine.routine is not None
        began_ns, below_ns = time.perf_counter_ns(), tracer.spent_ns
        result = super().__torch_dispatch__(func, types, args, kwargs)
        own = tracer.own_time
        if own is not None and not self._core.inside() and isinstance(func, OpOverload):
            _note(own, func, time.perf_counter_ns() - began_ns - (tracer.spent_ns - below_ns), followed)
        return result


def _note(own: OwnTime, func: OpOverload, took_ns: int, followed: bool) -> None:
    if torch._C._current_graph_task_id() != -1:
        own.needs_ns += took_ns  # backward runs because something was saved
    elif facts_of(func).idle or followed:
        own.passed += 1
        own.passed_ns += took_ns
    else:
        own.ops += 1
        own.ops_ns += took_ns
