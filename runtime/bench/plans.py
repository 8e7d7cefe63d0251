"""``scripts/bench planning``: how long a plan takes and what it costs the step, by how many storages the step saves.

The step is a row of transformer blocks as GPT-2 has them, with dropout and attention written out; sizes and op times
are about those of width 512 and 8 sequences of 256 tokens on two cores. No tensor is made: planners see numbers only.
*At once* is the plan that the next step follows, *searched* the one that is looked for beside the training, *bound*
what the step costs at least within the planners' model: the program that looks at the end of forward alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from delta.config import Policy
from delta.errors import DeltaError
from delta.planner import BESIDE, PLANNERS, Plan, StepGraph, Task, forecast
from delta.planner.cover import Cover, Rows
from delta.planner.steplog import StepLog, build_graph
from delta.policies.loader import load
from delta.text import aligned
from delta.types import Kind, Link, OpInfo

LIMITS = (0.5, 0.3, 0.2)  # of what the step saves
_LINK = Link(4e9, 3e9, 0.3)
_BACKWARD = 2  # times as long as forward
_STREAM_BYTES = 4 * 2**20
_STATISTICS_BYTES = 8 * 2**10
_BOUND_S = 60.0  # for the search of the bound


class _Op(NamedTuple):
    """What it reads, by name within the block (``x``: the residual stream); its results, those that are saved first;
    their sizes over the stream's, how long it takes."""

    reads: str
    makes: str
    sizes: Sequence[float]
    us: int
    saved: int = 1


_NONE = 0.0  # of statistics
_BLOCK = (
    _Op("x", "ln1 mean1 invstd1", (1, _NONE, _NONE), 700, saved=3),
    _Op("ln1", "qkv", (3,), 16_000),
    _Op("qkv", "scores", (4,), 4_000, saved=0),
    _Op("scores", "masked", (4,), 4_000, saved=0),
    _Op("masked", "softmax", (4,), 8_000),
    _Op("softmax", "dropped mask1", (4, 1), 25_000, saved=2),
    _Op("dropped qkv", "context", (1,), 4_000, saved=0),
    _Op("context", "merged", (1,), 1_000),
    _Op("merged", "projected", (1,), 5_000, saved=0),
    _Op("projected", "mask2 dropped2", (0.25, 1), 6_000),
    _Op("x dropped2", "y", (1,), 1_000),
    _Op("y", "ln2 mean2 invstd2", (1, _NONE, _NONE), 700, saved=3),
    _Op("ln2", "wide", (4,), 21_000),
    _Op("wide", "cubed", (4,), 4_000, saved=0),
    _Op("wide cubed", "inner", (4,), 5_000, saved=0),
    _Op("inner", "tanh", (4,), 8_000),
    _Op("tanh", "plus_one", (4,), 4_000),
    _Op("wide", "half", (4,), 4_000),
    _Op("half plus_one", "gelu", (4,), 5_000),
    _Op("gelu", "narrow", (1,), 21_000, saved=0),
    _Op("narrow", "mask3 dropped3", (0.25, 1), 6_000),
    _Op("y dropped3", "x", (1,), 1_000),
)
SAVED_BY_BLOCK = sum(op.saved for op in _BLOCK)


def blocks(count: int, min_bytes: int) -> StepGraph:
    """The step of so many blocks. Storages under `min_bytes` always stay."""
    log = StepLog(nbytes={0: 0}, kinds={0: Kind.SOURCE})
    names, now_ns = {"x": 0}, 0
    for _ in range(count):
        for op in _BLOCK:
            inputs = tuple(names[name] for name in op.reads.split())
            outputs = tuple(range(len(log.nbytes), len(log.nbytes) + len(op.sizes)))
            names |= zip(op.makes.split(), outputs, strict=True)
            log.ops.append(OpInfo(len(log.ops), op.makes, inputs, outputs, 1000 * op.us, True))
            log.nbytes |= {
                made: int(size * _STREAM_BYTES) or _STATISTICS_BYTES
                for made, size in zip(outputs, op.sizes, strict=True)
            }
            log.kinds |= dict.fromkeys(outputs, Kind.ACTIVATION)
            now_ns += 1000 * op.us
            for made in outputs[: op.saved]:
                log.saves.append(made)
                log.save_ns.append(now_ns)
                log.ops_before.append(len(log.ops))
    forward_ns = now_ns
    for order in reversed(range(len(log.saves))):
        at_ns = forward_ns + _BACKWARD * (forward_ns - log.save_ns[order])
        log.needs.append((order, at_ns))
        log.releases.append((order, len(log.needs)))
    log.end_ns = (1 + _BACKWARD) * forward_ns
    return build_graph(log, min_bytes)


def table(storages: Sequence[int], policy: str) -> Iterator[str]:
    """The table, for steps that save about so many storages."""
    chosen = load(policy)
    rows = [row for size in storages for row in _rows(max(1, round(size / SAVED_BY_BLOCK)), chosen)]
    heading = ("storages", "limit", "at once", "costs", "searched", "costs", "bound", "over it", "peak / limit")
    yield from aligned([heading, *rows], right=range(len(heading)), rule=True).splitlines()


def _rows(count: int, policy: Policy) -> Iterator[tuple[str, ...]]:
    graph = blocks(count, policy.filter.min_bytes)
    for share in LIMITS:
        limit_bytes = int(share * graph.unevicted_bytes)
        task = Task(graph, limit_bytes, _LINK, tuple(policy.director.actions), {}, False, policy.planner)
        at_once, at_once_s = _timed(PLANNERS["profile"], task)
        searched, searched_s = _timed(BESIDE["profile"], task)
        bound = Cover(task, Rows(saves={len(graph.saved) - 1: 0})).solve(_BOUND_S, 0.0)
        if bound is None:
            raise DeltaError(f"no bound was found within {_BOUND_S:.0f} s for {len(graph.saved):,} storages")
        at_once_ns, searched_ns, bound_ns = (
            forecast(graph, actions, _LINK).cost_ns for actions in (at_once.actions, searched.actions, bound)
        )
        yield (
            f"{len(graph.saved):,}",
            f"{share:.0%}",
            f"{1e3 * at_once_s:.0f} ms",
            f"{at_once_ns / graph.end_ns:.2%}",
            f"{searched_s:.1f} s",
            f"{searched_ns / graph.end_ns:.2%}",
            f"{bound_ns / graph.end_ns:.2%}",
            f"{searched_ns / bound_ns - 1:.1%}",
            f"{searched.peak_bytes / limit_bytes:.3f}",
        )


def _timed(planner: Callable[[Task], Plan], task: Task) -> tuple[Plan, float]:
    """The plan, and the processor time that it took."""
    began_s = time.process_time()
    plan = planner(task)
    return plan, time.process_time() - began_s
