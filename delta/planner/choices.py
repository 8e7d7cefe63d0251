"""What may become of each saved storage of a step."""

from __future__ import annotations

from dataclasses import replace

from delta.planner.steplog import StepGraph
from delta.planner.task import Task
from delta.types import Action


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
