"""What may become of each saved storage of a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from delta.planner.steplog import StepGraph
from delta.planner.task import Task
from delta.types import Action, OpInfo


def choices_of(task: Task) -> list[tuple[Action, ...]]:
    """By save order, beside being kept. Empty for what has to stay."""
    graph, replayable = task.graph, replayable_ops(task.graph)
    found: list[tuple[Action, ...]] = []
    for v, number in enumerate(graph.saved):
        node, forced = graph.nodes[number], task.forced.get(v)
        ways = [action for action in task.allowed if forced in (None, action) and action is not Action.KEEP]
        again = node.op is not None and replayable[node.op]
        if not again and Action.RECOMPUTE in ways:
            ways.remove(Action.RECOMPUTE)
        if Action.ENCODE in ways and not (node.encoded_bytes and (again or not node.stand_in)):
            ways.remove(Action.ENCODE)
        found.append(tuple(ways) if node.evictable and node.nbytes else ())
    return found


def obeyed_rules(task: Task) -> dict[int, Action]:
    """What rules say that is possible, by save order. As in the director, a storage that cannot go as a rule says goes
    as if there were none."""
    ways = choices_of(replace(task, forced={}))
    return {v: action for v, action in task.forced.items() if action is Action.KEEP or action in ways[v]}


def without_wide_replays(graph: StepGraph, limit_bytes: int) -> StepGraph:
    """The graph in which no op can be replayed for which there would be no room: it reads and makes more than
    `limit_bytes`, with what is there at its need in any case. For steps whose storages can be copied instead (rule 14).
    """
    orders, sizes = [node.order for node in graph.nodes], graph.saved_bytes
    change = [0] * (len(graph.needs) + 1)  # of what is there in any case: needed before and after, or never to go
    firsts = zip(graph.saved, graph.first_need, graph.release, strict=True)
    since = [min(first, until) if graph.nodes[node].evictable else 0 for node, first, until in firsts]
    for v, nbytes in enumerate(sizes):
        change[since[v]] += nbytes
        change[graph.release[v]] -= nbytes
    there_bytes = list(accumulate(change))

    def wide(op: OpInfo) -> bool:
        used = {*op.inputs, *op.outputs}
        nbytes = sum(graph.nodes[node].nbytes for node in used)
        made = [orders[node] for node in op.outputs if orders[node] >= 0 and graph.nodes[node].evictable]
        if made:
            p = min(graph.first_need[v] for v in made)
            saved = (orders[node] for node in used if orders[node] >= 0)
            nbytes += there_bytes[p] - sum(sizes[v] for v in saved if since[v] <= p < graph.release[v])
        return nbytes > limit_bytes

    ops = tuple(replace(op, replayable=False) if op.replayable and wide(op) else op for op in graph.ops)
    return graph if ops == graph.ops else replace(graph, ops=ops)


def replayable_ops(graph: StepGraph) -> list[bool]:
    """The ops that can be replayed if everything saved among their ancestors is there."""
    found: list[bool] = []
    for op in graph.ops:
        sources = (graph.nodes[node] for node in op.inputs)
        found.append(
            op.replayable
            and all(node.rooted or node.order >= 0 or (node.op is not None and found[node.op]) for node in sources)
        )
    return found
