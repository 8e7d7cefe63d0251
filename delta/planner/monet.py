"""Policy `monet`: the covering program of `cover.py`, solved again until the forecast of its answer fits.

Solve; forecast the answer; where the forecast is over the limit, bound that position too, with what the program does
not see there as a margin; solve again. The greedy planner mends what little is over, and stands in where the program
has no answer. The plan is the best of all these by forecast.

From: Shah et al., "Memory Optimization for Deep Networks", ICLR 2021 (arXiv:2010.14501).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from delta.planner.assemble import assemble, best
from delta.planner.backward import BackwardOnly
from delta.planner.cover import Cover, Rows
from delta.planner.forecast import Forecast, copies_out, forecast
from delta.planner.greedy import plan_step
from delta.planner.steplog import Plan
from delta.planner.task import Task
from delta.types import Action

ROUNDS = 8  # solved at most this often
PEAKS = 6  # positions of backward that are bounded anew in one round, at most
APART = 8  # ... with at least that many needs between two of them


def monet(task: Task) -> Plan:
    """The cheapest plan found whose forecast fits, or the one that is least over the limit."""
    if task.everything:
        from delta.planner.search import rehearse_along  # needs numpy

        # Without swaps, too: the forecast knows them least.
        without = replace(task, allowed=tuple(action for action in task.allowed if action is not Action.SWAP))
        tasks = (task,) if without.allowed == task.allowed else (without, task)
        limit_s = task.options.time_limit_s / len(tasks)
        options = task.options.model_copy(update={"time_limit_s": limit_s})
        choices = [whole_step(replace(each, options=options)) for each in tasks]
        return rehearse_along(task, choices) or assemble(task, choices[-1])
    return best(task, _plans(task))


def whole_step(task: Task) -> list[Action]:
    """Actions for a step in which everything may go."""
    reduced = BackwardOnly(task)
    return reduced.whole_step(monet(reduced.task).actions)


def _greedy(task: Task, begun: Sequence[Action] | None = None) -> Plan:
    return plan_step(task.graph, task.limit_bytes, task.link, task.allowed, task.forced, begun)


def _plans(task: Task) -> Iterator[Plan]:
    """The greedy plan and the one in use, then the program's, each as it is and mended, better from round to round."""
    graph, limit = task.graph, task.limit_bytes
    yield _greedy(task)
    if task.known:
        yield assemble(task, task.known)
    if not graph.saved:
        return
    rows = Rows(saves={len(graph.saved) - 1: 0})
    for _ in range(ROUNDS):
        actions = Cover(task, rows).solve(task.options.time_limit_s / ROUNDS, task.options.gap)
        if actions is None:
            return
        found = forecast(graph, actions, task.link)
        yield assemble(task, actions)
        mended = found
        if found.peak_bytes > limit:
            plan = _greedy(task, actions)
            mended = forecast(graph, plan.actions, task.link)
            yield plan
        # What the program left out makes a plan dearer: one that fits and costs hardly more is close to the best.
        close = mended.cost_ns <= (1 + task.options.gap) * found.cost_ns
        if (mended.peak_bytes <= limit and close) or not _bound(task, actions, found, rows):
            return


def _bound(task: Task, actions: Sequence[Action], found: Forecast, rows: Rows) -> bool:
    """Bound the positions that are over the limit, more tightly where they are bounded already. False if none is."""
    limit, resident = task.limit_bytes, found.resident_bytes
    margins = {p: resident[p] - _settled_bytes(task, actions, found, p) for p in rows.needs}
    saves = _peaks(found.forward_bytes, limit, 1)
    needs = _peaks(resident, limit, PEAKS)
    for k in saves:
        rows.saves[k] = rows.saves[k] + found.forward_bytes[k] - limit if k in rows.saves else 0
    for p in needs:
        rows.needs[p] = rows.needs[p] + resident[p] - limit if p in rows.needs else 0
    for p, margin in margins.items():
        rows.needs[p] = max(rows.needs[p], margin)
    return bool(saves or needs)


def _peaks(resident_bytes: Sequence[int], limit_bytes: int, most: int) -> list[int]:
    """The worst positions over the limit, not too close to each other."""
    peaks: list[int] = []
    for p in sorted(range(len(resident_bytes)), key=lambda p: (-resident_bytes[p], p)):
        if resident_bytes[p] <= limit_bytes or len(peaks) == most:
            break
        if all(abs(p - other) > APART for other in peaks):
            peaks.append(p)
    return peaks


def _settled_bytes(task: Task, actions: Sequence[Action], found: Forecast, p: int) -> int:
    """What is resident when need p has been served, and what is still on its way out: what the program sees."""
    graph = task.graph
    sizes = graph.saved_bytes
    there = 0
    for v, back in enumerate(found.back_at):
        if 0 <= back <= p < graph.release[v]:
            there += sizes[v]
        elif actions[v] is Action.ENCODE and p < graph.release[v]:
            there += graph.nodes[graph.saved[v]].encoded_bytes
    leaving = copies_out(graph, actions, task.link)
    beside = graph.beside_needs[p] if graph.beside_needs else 0
    return there + beside + sum(sizes[v] for v, done_ns in leaving.items() if bisect_right(graph.need_ns, done_ns) > p)
