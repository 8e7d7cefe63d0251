"""``scripts/bench hot-path``: what Delta's Python costs for each op and each saved tensor, and for each decision.

A step of very many tiny ops, so that nearly all of its time is Python's. It runs bare, with ops that save nothing, and
with ops that save one tensor each, which a policy may evict or finds too small for that; what an op or a saved tensor
adds is the difference to bare, and what Delta adds to that the difference to plain PyTorch. Some large tensors in every
step give a plan something to evict. All times are processor time of the one thread that trains, medians of rounds in
which everything takes its turn.

An op is `recorded` in an observed step, and `passed through` in a planned one that replays another op.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

import delta
from delta.runtime.bench.decisions import KINDS, eviction_ns
from delta.text import aligned

LARGE, LARGE_BYTES = 12, 2**16  # tensors of 64 KiB: what may be evicted
BARE, OPS, SAVES, SMALL = "bare", "ops", "saves", "small"
EVICTED_FROM = 1000  # live storages among which an eviction decides


@dataclass(frozen=True, slots=True)
class State:
    """In which way the hooks are at work: a limit that brings it about, and the steps that come before it."""

    limit: str | None
    steps_before: int


STATES = {"watched": State(None, 3), "observed": State("60%", 0), "planned": State("60%", 5)}


@dataclass(frozen=True, slots=True)
class HotPath:
    """Nanoseconds of Delta's own: by state what an op, a pack and an unpack cost, the latter two also of what is too
    small to be evicted, and what a decision does."""

    op_ns: dict[str, float]
    pack_ns: dict[str, float]
    unpack_ns: dict[str, float]
    small_pack_ns: dict[str, float]
    small_unpack_ns: dict[str, float]
    decision_ns: float
    modes: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        head = ("", *STATES)
        rows = [
            (name, *(f"{found[state]:.0f}" for state in STATES))
            for name, found in (
                ("ns for an op", self.op_ns),
                ("ns for a pack", self.pack_ns),
                ("ns for an unpack", self.unpack_ns),
                ("ns for a small pack", self.small_pack_ns),
                ("ns for a small unpack", self.small_unpack_ns),
            )
        ]
        return "\n".join(
            [
                aligned([head, *rows], right=range(1, len(head)), rule=True),
                f"ns for a decision to evict one of {EVICTED_FROM:,}: {self.decision_ns:.0f}",
                "an op: recorded where the step is observed, passed through where it is planned; a pack and an unpack: "
                "of one saved tensor, without the op; planned: of one that is kept; small: of one too small to be "
                "evicted; over plain PyTorch, processor time",
            ]
        )


@dataclass(frozen=True, slots=True)
class _Times:
    forward_ns: float
    backward_ns: float


def measure(count: int = 1000, rounds: int = 5, evictions: int = 500) -> HotPath:
    """``count``: tiny ops in a step. Uses one thread of PyTorch, and leaves as many as there were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken, modes = _rounds(count, rounds)
    finally:
        torch.set_num_threads(threads)

    def each(state: str | None, program: str, part: str) -> float:
        """What one op or saved tensor takes, of forward or backward."""
        bare, whole = (median(getattr(times, part) for times in taken[state, name]) for name in (BARE, program))
        return float(whole - bare) / count

    def over_plain(state: str, program: str, part: str) -> float:
        return each(state, program, part) - each(None, program, part)

    ops = {state: over_plain(state, OPS, "forward_ns") for state in STATES}
    return HotPath(
        op_ns=ops,
        pack_ns={state: over_plain(state, SAVES, "forward_ns") - ops[state] for state in STATES},
        unpack_ns={state: over_plain(state, SAVES, "backward_ns") for state in STATES},
        small_pack_ns={state: over_plain(state, SMALL, "forward_ns") - ops[state] for state in STATES},
        small_unpack_ns={state: over_plain(state, SMALL, "backward_ns") for state in STATES},
        decision_ns=median(_decisions(rounds, evictions)),
        modes=modes,
    )


def _rounds(count: int, rounds: int) -> tuple[dict[tuple[str | None, str], list[_Times]], dict[str, str]]:
    taken: dict[tuple[str | None, str], list[_Times]] = {}
    modes: dict[str, str] = {}
    for _ in range(rounds):
        for program in (BARE, OPS, SAVES, SMALL):
            for state in (None, *STATES):
                least_bytes = 0 if program == SAVES else LARGE_BYTES
                times, mode = _run(state, _step(program, count), least_bytes)
                taken.setdefault((state, program), []).append(times)
                if state is not None:
                    modes[state] = mode
    return taken, modes


def _decisions(rounds: int, evictions: int) -> Iterator[float]:
    kind = next(kind for kind in KINDS if kind[0] == "delta")
    for _ in range(rounds):
        yield eviction_ns(EVICTED_FROM, kind, evictions)


def _run(state: str | None, step: Callable[[], _Times], least_bytes: int) -> tuple[_Times, str]:
    """The times of the step that is in that state, and the mode Delta says it was in. What is smaller than
    ``least_bytes`` is not evicted."""
    if state is None:
        step()
        return step(), ""
    wanted = STATES[state]
    policy = delta.load_policy("delta", {"director.actions": ["keep", "recompute"], "filter.min_bytes": least_bytes})
    session: AbstractContextManager[Any] = (
        delta.evict(policy=policy) if wanted.limit is None else delta.evict(activations=wanted.limit, policy=policy)
    )
    with session as run:
        _step(BARE, 0, 2 * LARGE_BYTES)()  # another kind of step: the first one in a block looks for all modules
        for _ in range(wanted.steps_before):
            step()
        before = dict(run.report().modes)
        times = step()
        after = run.report().modes
    return times, next(mode for mode in after if after[mode] != before.get(mode, 0))


def _step(program: str, count: int, large_bytes: int = LARGE_BYTES) -> Callable[[], _Times]:
    large = torch.zeros(large_bytes // 4, requires_grad=True)
    small = torch.zeros(8, requires_grad=True)

    def forward() -> Tensor:
        kept = large
        for _ in range(LARGE):
            kept = kept.sin()
        x = small
        for _ in range(count if program != BARE else 0):
            x = x.add(1.0) if program == OPS else x.sin()
        return kept.sum() + x.sum()

    def step() -> _Times:
        began_ns = time.thread_time_ns()
        loss = forward()
        middle_ns = time.thread_time_ns()
        loss.backward()
        times = _Times(middle_ns - began_ns, time.thread_time_ns() - middle_ns)
        large.grad = small.grad = None
        return times

    return step
