"""One side of the demo in a process of its own: the same training plain, under `delta.evict`, or in another way.

``python -m delta.runtime.demo_worker`` reads JSON lines from stdin, the `Spec` first, and answers each with one::

    {"mode": "plain", ...}      -> {"ready": true}
    {"do": "step", "index": 0}  -> {"time_ns": ..., "loss": "0x1.6p+2", "gradients": "<sha256>"}
    {"do": "finish"}            -> {"parameters": "<sha256>", "peak_rss_bytes": ..., ...}

A step with ``"count": true`` is slower, and answers with ``"counted_peak_bytes"``, too: the peak of saved activations
on the device, counted here and not by Delta; null where they cannot be counted from outside. A DeltaError is answered
with ``{"error": "<text>"}``. Between lines the process sleeps in a read, so the sides can take
turns on the same cores.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import delta
from delta.errors import DeltaError
from delta.runtime.demo_measure import ResidentBytes, ResidentPeak, SavedBytes, digest, gradient_digest
from delta.runtime.demo_model import Gpt, GptConfig
from delta.runtime.predict_models import Task, gpt, resnet
from delta.runtime.settle import settle_kernels
from delta.trace import Recording

SKIPPED_STEPS = 2  # first-touch page faults
TRACED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker trains and how.

    ``mode``: ``plain``, ``delta`` (with ``activations=None`` it only watches), ``checkpoint`` (per block) or
    ``save_on_cpu``. ``model``: one of `predict_models`, ``gpt`` with the sizes given here. ``trace``: a file for the
    `TRACED_STEPS` steps after the first `SKIPPED_STEPS` (mode ``delta`` only).
    """

    mode: str
    layers: int
    width: int
    heads: int
    seq: int
    batch: int
    seed: int
    threads: int
    device: str
    activations: str | None
    policy: str
    timeline: str | None
    model: str = "gpt"
    trace: str | None = None


class _Run(Protocol):
    def report(self) -> delta.Report: ...


class Trainer:
    """The training of one side. `step` and `finish` return the JSON-ready answers of the protocol."""

    def __init__(self, spec: Spec) -> None:
        torch.set_num_threads(spec.threads)
        torch.manual_seed(spec.seed)
        settle_kernels()  # for the plain side too: else two plain processes may differ
        _make_deterministic(spec.device)
        self._spec = spec
        self._task: Task = _gpt(spec) if spec.model == "gpt" else resnet(spec.model, spec.batch, spec.seed)
        self._model = self._task.model.to(spec.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        if spec.mode == "checkpoint":
            _checkpoint_blocks(self._model)
        self._session = _session(spec, self._model)
        self._run = self._session.__enter__()
        self._resident = ResidentPeak()

    def step(self, index: int, count: bool = False) -> dict[str, Any]:
        """One training step. Timed: forward, backward, optimizer; not timed: making the batch, hashing."""
        batch = self._batch(index)
        counter = self._counter() if count else None
        began_ns = self._now_ns()
        with counter or nullcontext():
            loss = self._task.loss(batch)
            loss.backward()
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
        if count:
            answer["counted_peak_bytes"] = None if counter is None else counter.peak_bytes
        return answer

    def finish(self) -> dict[str, Any]:
        """Close the session and give the figures of the whole training."""
        self.close()
        answer: dict[str, Any] = {
            "peak_rss_bytes": self._resident.read(),
            "start_rss_bytes": self._resident.start_bytes,
            "rss_method": self._resident.method,
            "peak_device_bytes": self._peak_device_bytes(),
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
        """The peak of saved activations of one plain step, counted after everything else has been measured."""
        with SavedBytes(self._model) as saved:
            self._task.loss(self._batch(0)).backward()
        return saved.peak_bytes

    def _batch(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self._spec.device) for tensor in self._task.batch(index))

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

    def _peak_device_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self._spec.device.startswith("cuda") else None


def _make_deterministic(device: str) -> None:
    """CPU kernels give the same bits on every run; CUDA ones have to be asked."""
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _gpt(spec: Spec) -> Task:
    config = GptConfig(layers=spec.layers, width=spec.width, heads=spec.heads, seq=spec.seq)
    return gpt(config, batch=spec.batch, seed=spec.seed)


def _checkpoint_blocks(model: nn.Module) -> None:
    assert isinstance(model, Gpt)
    for block in model.blocks:
        # Replaced on the instance: that is what wrapping a block by hand amounts to.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _session(spec: Spec, model: nn.Module) -> AbstractContextManager[_Run | None]:
    if spec.mode == "save_on_cpu":
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    if spec.mode != "delta":
        return nullcontext()
    trace = None if spec.trace is None else Recording(Path(spec.trace), SKIPPED_STEPS, TRACED_STEPS)
    return delta.evict(
        model,
        activations=spec.activations,
        policy=spec.policy,
        timeline=spec.timeline,
        trace=trace,
        device=spec.device,
    )


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
                    answer = trainer.step(request["index"], request.get("count", False))
                case "finish" if trainer is not None:
                    answer = trainer.finish()
                case _:
                    raise ValueError(f"unexpected request {line!r}")
            print(json.dumps(answer), file=answers, flush=True)
    except DeltaError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
    finally:
        if trainer is not None:
            trainer.close()


def main() -> None:
    """Serve stdin. Whatever else prints to stdout goes to stderr, so that it cannot break the protocol."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
