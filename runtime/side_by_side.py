"""A training in one way and a plain one in the same process, in turns: what `scripts/bench` and `scripts/predict` time.

Two processes of one and the same training may differ by a tenth, for as long as they live, and a machine may be as fast
again a minute later. So a step is compared with a plain one of its own process just before or after it. Peaks of memory
are taken before there is a plain training beside.
"""

from __future__ import annotations

from collections.abc import Mapping
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

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a process answered: to every step of its own, to the plain steps beside the timed ones, to the end."""

    steps: list[Answer] = field(default_factory=list)
    beside: list[Answer] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> list[Answer]:
        return self.steps[STEPS_BEFORE:]

    def ratios(self, time: str) -> list[float]:
        """Of each timed step's time to that of the plain step beside it. A machine that becomes slower halfway moves
        the median of either side by itself, but not that of these."""
        return [mine[time] / plain[time] for mine, plain in zip(self.timed, self.beside, strict=True)]

    @property
    def counted_peak_bytes(self) -> int | None:
        """The most bytes of saved activations in the steps in which they were counted; None where they cannot be."""
        found = [self.steps[index].get("counted_peak_bytes") for index in COUNTED_STEPS]
        return max((nbytes for nbytes in found if nbytes is not None), default=None)

    @property
    def allocated_peak_bytes(self) -> int | None:
        """The most bytes that were allocated at once, on a CPU."""
        nbytes: int | None = self.steps[COUNTED_STEPS[-1]].get("allocated_peak_bytes")
        return nbytes


def train(spec: Spec, timed_steps: int) -> Trained:
    """Train in a process, with a plain training beside the timed steps unless this one is plain itself.

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
        for index in range(STEPS_BEFORE, STEPS_BEFORE + timed_steps):
            turns = ["step", "plain step"] if paired else ["step"]
            if index % 2 == 0:  # each round begins with the other
                turns.reverse()
            for do in turns:
                answers = found.steps if do == "step" else found.beside
                answers.append(worker.ask({"do": do, "index": index}))
        found.end.update(worker.ask({"do": "finish"}))
    return found
