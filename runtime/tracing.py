"""A trace of one plain step of a model of the zoo, recorded in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from delta.runtime.demo_process import HEAP, WorkerProcess
from delta.runtime.demo_worker import COLD_STEPS, TRACED_STEPS, Spec
from delta.trace import Recording, Trace, read
from delta.trace.events import Bookkeeping


def plain_spec(model: str, sizes: Mapping[str, int], *, threads: int, device: str = "cpu", seed: int = 0) -> Spec:
    """A plain training of a model, for others to be made from."""
    return Spec(
        mode="plain",
        model=model,
        sizes=sizes,
        seed=seed,
        threads=threads,
        device=device,
        activations=None,
        policy="delta",
        timeline=None,
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace, and that of the first step of the same training."""

    trace: Trace
    first: Trace


def record(spec: Spec) -> Recorded:
    """A trace of one plain step: of the steps after the cold ones, the one whose ops took the least time, because other
    work on the machine met it least. What Delta's own work takes is the median over all of these."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"{spec.model}.jsonl.gz")
        watched = replace(spec, mode="delta", activations=None, trace=str(path))
        with WorkerProcess(watched, HEAP) as worker:
            worker.wait_ready()
            for index in range(TRACED_STEPS):
                worker.ask({"do": "step", "index": index})
            worker.ask({"do": "finish"})
        recording = Recording(path, steps=TRACED_STEPS)
        first, *traces = (read(recording.file(number)) for number in range(TRACED_STEPS))
    warm = traces[COLD_STEPS - 1 :]
    fastest = min(warm, key=lambda trace: trace.base_ns)
    usual = _median([trace.bookkeeping for trace in warm])
    return Recorded(replace(fastest, bookkeeping=usual), first)


def _median(steps: Sequence[Bookkeeping]) -> Bookkeeping:
    """Each time by itself: a garbage collection in one step is in one of its means."""
    return Bookkeeping(
        **{each.name: int(median(getattr(own, each.name) for own in steps)) for each in fields(steps[0])}
    )
