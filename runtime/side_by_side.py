"""A training in one way and a plain one in the same process, in turns: what `scripts/bench` and `scripts/predict` time.

Two processes of one and the same training may differ by a tenth, for as long as they live, and a machine may be as fast
again a minute later. So a step is compared with a plain one of its own process just before or after it. Peaks of memory
are taken before there is a plain training beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from delta.runtime.demo_process import HEAP, WorkerProcess
from delta.runtime.demo_worker import Spec

# First-touch page faults, Delta observing, refining its plan, and following it, twice, before it records less. After
# some of them a search for a better plan is waited for: it takes the memory's bandwidth from the steps it runs beside.
STEPS_BEFORE = 8
SETTLING_STEPS = (3, 4)
COUNTED_STEPS = (0, 6)  # Delta's first, and one that is planned; what is allocated is counted in the latter
_WARM_UP_STEPS = 2  # of the plain training beside
ROWS, ROW_STEPS = 3, 4  # after the timed steps: rows of steps that nobody waits for, and of how many each

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a process answered: to every step of its own, to the plain steps beside the timed ones, to rows of steps of
    either kind, to the end."""

    steps: list[Answer] = field(default_factory=list)
    beside: list[Answer] = field(default_factory=list)
    rows: list[Answer] = field(default_factory=list)
    rows_beside: list[Answer] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> list[Answer]:
        return self.steps[STEPS_BEFORE:]

    def ratios(self, time: str) -> list[float]:
        """Of each timed step's time to that of the plain step beside it. A machine that becomes slower halfway moves
        the median of either side by itself, but not that of these."""
        return _ratios(self.timed, self.beside, time)

    @property
    def row_ratios(self) -> list[float]:
        """The same of rows of steps."""
        return _ratios(self.rows, self.rows_beside, "time_ns")

    @property
    def counted_peak_bytes(self) -> int | None:
        """The most bytes of saved activations in the steps in which they were counted, of plain with its largest batch
        too; None where they cannot be."""
        counted = (*(self.steps[index] for index in COUNTED_STEPS), self.end)
        found = [answer.get("counted_peak_bytes") for answer in counted]
        return max((nbytes for nbytes in found if nbytes is not None), default=None)

    @property
    def allocated_peak_bytes(self) -> int | None:
        """The most bytes that were allocated at once, on a CPU."""
        nbytes: int | None = self.steps[COUNTED_STEPS[-1]].get("allocated_peak_bytes")
        return nbytes


def _ratios(mine: Sequence[Answer], plain: Sequence[Answer], time: str) -> list[float]:
    return [one[time] / other[time] for one, other in zip(mine, plain, strict=True)]


def train(spec: Spec, timed_steps: int, rows: int = 0) -> Trained:
    """Train in a process, with a plain training beside the timed steps, and beside `rows` of more steps after them,
    unless this one is plain itself.

    Raises DeltaError if the process fails.
    """
    found = Trained()
    with WorkerProcess(spec, HEAP) as worker:
        worker.wait_ready()
        for index in range(STEPS_BEFORE):
            counted = {"count": index in COUNTED_STEPS, "allocated": index == COUNTED_STEPS[-1]}
            asked = {"do": "step", "index": index, "settle": index in SETTLING_STEPS, **counted}
            found.steps.append(worker.ask(asked))
        paired = spec.mode != "plain"
        for index in range(STEPS_BEFORE - _WARM_UP_STEPS, STEPS_BEFORE) if paired else ():
            worker.ask({"do": "plain step", "index": index})
        in_turns = _InTurns(worker, paired)
        for index in range(STEPS_BEFORE, STEPS_BEFORE + timed_steps):
            in_turns.ask({"do": "step", "index": index}, found.steps, found.beside)
        for index in range(STEPS_BEFORE + timed_steps, STEPS_BEFORE + timed_steps + rows * ROW_STEPS, ROW_STEPS):
            in_turns.ask({"do": "row", "index": index, "steps": ROW_STEPS}, found.rows, found.rows_beside)
        found.end.update(worker.ask({"do": "finish"}))
    return found


class _InTurns:
    """Asks for something of a training, and of the plain one beside it if there is one; who is first changes."""

    def __init__(self, worker: WorkerProcess, paired: bool) -> None:
        self._worker, self._paired, self._plain_first = worker, paired, True

    def ask(self, request: Mapping[str, Any], mine: list[Answer], plain: list[Answer]) -> None:
        turns = [(request, mine), ({**request, "do": f"plain {request['do']}"}, plain)][: 1 + self._paired]
        for asked, answers in reversed(turns) if self._plain_first else turns:
            answers.append(self._worker.ask(asked))
        self._plain_first = not self._plain_first
