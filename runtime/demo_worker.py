"""One side of the demo in a process of its own: the same training plain, under `delta.evict`, or in another way.

`main` reads JSON lines from stdin, the `Spec` first, and answers each with one::

    {"mode": "plain", ...}      -> {"ready": true}
    {"do": "step", "index": 0}  -> {"time_ns": ..., "loss": "0x1.6p+2", "gradients": "<sha256>"}
    {"do": "plain step", "index": 8}  -> the same of a plain training beside this one, in the same process
    {"do": "row", "index": 9, "steps": 4}  -> {"time_ns": ...}, of one of these steps, which nobody waits for
    {"do": "plain row", ...}    -> the same of the plain training
    {"do": "finish"}            -> {"parameters": "<sha256>", "peak_rss_bytes": ..., ...}

A step with ``"count": true`` is slower, and answers with ``"counted_peak_bytes"``, too: the peak of saved activations
on the device, counted here and not by Delta; null where they cannot be counted from outside. With ``"allocated": true``
it answers with ``"allocated_peak_bytes"``: all that was allocated on a CPU, as the profiler saw it. On a card each step
answers with ``"host_ns"``, too: how long the host took for forward and backward, the card's work not waited for. An
error is answered with ``{"error": "<text>"}``, memory that ran out with ``{"out_of_memory": "<text>"}``. Between
lines the process sleeps in a read, so the sides can take turns on the same cores. Peaks of memory are those of the time
before the first plain step beside, or row.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import torch
from torch import Tensor, nn

import delta
from delta.errors import BudgetError, DeltaError
from delta.runtime import ways, zoo
from delta.runtime.demo_measure import (
    AllocatedBytes,
    ResidentBytes,
    ResidentPeak,
    SavedBytes,
    digest,
    gradient_digest,
    standing_bytes,
)
from delta.runtime.device.accelerator import CudaCard
from delta.runtime.settle import settle_kernels
from delta.trace import Recording
from delta.units import Bytes, parse_size

TRACED_STEPS = 5
COLD_STEPS = 2  # of them: first-touch page faults
_NO_MEMORY = (
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "unable to find an engine to execute this computation",  # cuDNN, where none has room for what it works with
    "DefaultCPUAllocator: can't allocate memory",
)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker trains and how.

    ``mode``: ``plain``, ``delta`` (with no limit it only watches), or one of `ways`. ``model`` and ``sizes``: of the
    zoo. ``activations``: Delta's limit, and the memory budget of ``compile``. ``budget``: bytes of the device in all;
    outside of Delta it caps the allocator (CUDA). ``overrides``: of the policy. ``autocast``: bfloat16 where autocast
    has it. ``trace``: a file for the first `TRACED_STEPS` steps (mode ``delta`` only).
    """

    mode: str
    sizes: Mapping[str, int]
    seed: int
    threads: int
    device: str
    activations: str | None
    policy: str
    timeline: str | None
    model: str = "byte-gpt"
    trace: str | None = None
    budget: str | None = None
    autocast: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


class _Run(Protocol):
    def report(self) -> delta.Report: ...


class Trainer:
    """The training of one side. `step` and `finish` return the JSON-ready answers of the protocol."""

    def __init__(self, spec: Spec) -> None:
        _choose_card(spec.device)
        torch.set_num_threads(spec.threads)
        torch.manual_seed(spec.seed)
        settle_kernels()  # for the plain side too: else two plain processes may differ
        _make_deterministic(spec.device)
        self._spec = spec
        if spec.budget is not None and spec.mode != "delta":
            _cap(spec.budget, spec.device)
        self._task = zoo.make(spec.model, spec.sizes, spec.seed, spec.device)
        self._model = self._task.model.to(spec.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self._around = ways.prepare(spec.mode, self._task, spec.activations)
        self._session = _session(spec, self._model)
        self._run = self._session.__enter__()
        self._resident = ResidentPeak()
        self._host_peak_bytes: int | None = None
        self._largest: tuple[Tensor, ...] = ()  # batch so far
        self._plain: Trainer | None = None
        self._peaks: dict[str, int | None] | None = None  # those before `_plain`, and before a row

    def step(self, index: int, count: bool = False, allocated: bool = False) -> dict[str, Any]:
        """One training step. Timed: forward, backward, optimizer; not timed: making the batch, hashing."""
        batch = self._batch(index)
        self._seed(index)
        counter = self._counter() if count else None
        profiler = AllocatedBytes() if allocated and self._spec.device == "cpu" else None
        standing = standing_bytes(self._model, self._optimizer)
        began_ns = self._now_ns()
        with ExitStack() as stack:
            for context in (profiler, counter):
                if context is not None:
                    stack.enter_context(context)
            loss = self._pass(batch)
        host_ns = time.perf_counter_ns() - began_ns
        middle_ns = self._now_ns()
        gradients = gradient_digest(self._model)
        resumed_ns = self._now_ns()
        self._optimizer.step()
        self._optimizer.zero_grad()
        time_ns = (middle_ns - began_ns) + (self._now_ns() - resumed_ns)
        answer: dict[str, Any] = {
            "time_ns": time_ns,
            "passes_ns": middle_ns - began_ns,
            "loss": float(loss.detach()).hex(),
            "gradients": gradients,
        }
        if self._spec.device != "cpu":
            answer["host_ns"] = host_ns
        if count:
            answer["counted_peak_bytes"] = None if counter is None else counter.peak_bytes
        if isinstance(counter, ResidentBytes):
            self._host_peak_bytes = max(self._host_peak_bytes or 0, counter.host_peak_bytes)
        if profiler is not None:
            answer["allocated_peak_bytes"] = standing + profiler.peak_bytes
        return answer

    def row(self, index: int, steps: int) -> dict[str, Any]:
        """Steps one after the other, the card waited for at the end only, as where a training reads no number in
        between; their batches are fetched from pinned memory. How long one takes."""
        self._note_peaks()
        batches = [self._drawn(index + step) for step in range(steps)]
        if self._device_type == "cuda":
            batches = [tuple(tensor.pin_memory() for tensor in batch) for batch in batches]
        began_ns = self._now_ns()
        for step, batch in enumerate(batches, index):
            self._seed(step)
            self._pass(tuple(tensor.to(self._spec.device, non_blocking=True) for tensor in batch))
            self._optimizer.step()
            self._optimizer.zero_grad()
        return {"time_ns": (self._now_ns() - began_ns) // steps}

    @contextmanager
    def beside(self) -> "Iterator[Trainer]":
        """A plain training beside this one, which it does not touch."""
        run = cast(Any, self._run)
        with nullcontext() if run is None else run._paused():
            if self._plain is None:
                self._note_peaks()
                self._plain = Trainer(replace(self._spec, mode="plain", budget=None, timeline=None, trace=None))
            yield self._plain

    def settle(self) -> None:
        """Wait for a search for a better plan."""
        if self._run is not None:
            cast(Any, self._run)._core.planning.wait()

    def _pass(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Forward and backward."""
        with self._around():
            with torch.autocast(self._device_type, torch.bfloat16, enabled=self._spec.autocast):
                loss = self._task.loss(batch)
            loss.backward()
        return loss

    def finish(self) -> dict[str, Any]:
        """Close the session and give the figures of the whole training."""
        self.close()
        answer: dict[str, Any] = {
            "start_rss_bytes": self._resident.start_bytes,
            "rss_method": self._resident.method,
            **self._note_peaks(),
            "parameters": digest(self._model.parameters()),
            "report": None if self._run is None else self._run.report().as_dict(),
            "counted_peak_bytes": None,
        }
        if self._spec.mode == "plain":
            answer["counted_peak_bytes"] = self._count_saved_bytes()
        return answer

    def close(self) -> None:
        """Leave the block of `delta.evict`, if there is one. A second call does nothing."""
        session, self._session = self._session, nullcontext()
        session.__exit__(None, None, None)

    def _count_saved_bytes(self) -> int:
        """The peak of saved activations of a plain step with the largest batch there was, counted after everything else
        has been measured."""
        with SavedBytes(self._model) as saved:
            self._pass(tuple(tensor.to(self._spec.device) for tensor in self._largest or self._task.batch(0)))
        return saved.peak_bytes

    def _seed(self, index: int) -> None:
        torch.manual_seed(self._spec.seed * 1_000_003 + index)  # every way drops out the same

    def _batch(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self._spec.device) for tensor in self._drawn(index))

    def _drawn(self, index: int) -> tuple[Tensor, ...]:
        batch = self._task.batch(index)
        self._largest = max(self._largest, batch, key=lambda one: sum(tensor.numel() for tensor in one))
        return batch

    def _counter(self) -> SavedBytes | None:
        match self._spec.mode:
            case "plain":
                return SavedBytes(self._model)
            case "delta":
                return ResidentBytes(self._model, cast(Any, self._run)._core.device)
        return None  # what checkpointing holds, and copies made by other hooks, are not seen by hooks from outside

    def _now_ns(self) -> int:
        if self._spec.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter_ns()

    @property
    def _device_type(self) -> str:
        return torch.device(self._spec.device).type

    def _note_peaks(self) -> dict[str, int | None]:
        """The peaks up to the first time that somebody asks."""
        self._peaks = self._peaks or self._read_peaks()
        return self._peaks

    def _read_peaks(self) -> dict[str, int | None]:
        """Peaks of resident memory, of the allocator, and of host memory that holds what was moved there; None where
        nobody counts it."""
        resident = self._resident.read()
        if self._device_type != "cuda":
            host = self._host_peak_bytes if self._spec.mode == "delta" else None
            on_device = {"peak_device_bytes": None, "peak_reserved_bytes": None, "host_peak_bytes": host}
            return {"peak_rss_bytes": resident, **on_device}
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
        return {
            "peak_rss_bytes": resident,
            "peak_device_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "host_peak_bytes": self._host_peak_bytes if self._spec.mode == "delta" else pinned,
        }


def _choose_card(device: str) -> None:
    """Peaks, and what is waited for, are those of the current card."""
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)


def _make_deterministic(device: str) -> None:
    """CPU kernels give the same bits on every run; CUDA ones have to be asked, and where there is none they warn."""
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else it means a kernel more for each tensor that is made empty, which nobody who trains would have.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010, not typed


def _cap(budget: str, device: str) -> None:
    """Let PyTorch's allocator reserve no more than that, in segments such as Delta has under a budget."""
    index = torch.device(device).index
    CudaCard(torch.cuda.current_device() if index is None else index).expand_segments(True)
    total_bytes = torch.cuda.mem_get_info()[1]
    wanted = parse_size(budget, what="budget")
    nbytes = wanted.nbytes if isinstance(wanted, Bytes) else wanted.fraction * total_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total_bytes))


def _session(spec: Spec, model: nn.Module) -> AbstractContextManager[_Run | None]:
    if spec.mode != "delta":
        return nullcontext()
    trace = None if spec.trace is None else Recording(Path(spec.trace), steps=TRACED_STEPS)
    return delta.evict(
        model,
        activations=spec.activations,
        budget=spec.budget,
        policy=delta.load_policy(spec.policy, spec.overrides),
        timeline=spec.timeline,
        trace=trace,
        device=spec.device,
    )


def _failure(error: Exception) -> dict[str, str]:
    if _is_out_of_memory(error):
        return {"out_of_memory": str(error)}
    if isinstance(error, DeltaError):
        return {"error": str(error)}
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"}


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, or a budget is too small. Libraries below PyTorch's allocators say so in words only."""
    if isinstance(error, (BudgetError, MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def serve(lines: Iterable[str], answers: TextIO) -> None:
    """Answer each line, until `finish` or the end of the lines."""
    trainer: Trainer | None = None
    try:
        for line in lines:
            request = json.loads(line)
            match request.get("do"):
                case None:
                    trainer, answer = Trainer(Spec(**request)), {"ready": True}
                case "step" if trainer is not None:
                    answer = trainer.step(
                        request["index"], request.get("count", False), request.get("allocated", False)
                    )
                    if request.get("settle"):
                        trainer.settle()
                case "plain step" if trainer is not None:
                    with trainer.beside() as plain:
                        answer = plain.step(request["index"])
                case "row" if trainer is not None:
                    answer = trainer.row(request["index"], request["steps"])
                case "plain row" if trainer is not None:
                    with trainer.beside() as plain:
                        answer = plain.row(request["index"], request["steps"])
                case "finish" if trainer is not None:
                    answer = trainer.finish()
                case _:
                    raise ValueError(f"unexpected request {line!r}")
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:  # whoever asked goes on without this process, and has to know why
        print(json.dumps(_failure(error)), file=answers, flush=True)
    finally:
        if trainer is not None:
            trainer.close()


def main() -> None:
    """Serve stdin. Whatever else prints to stdout goes to stderr, so that it cannot break the protocol."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)
