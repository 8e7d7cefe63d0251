"""What many ops read and nobody saves: a mask, positions, a table of cosines.

Where the results of its readers are dropped, each of their replays would make it again, by all the ops that it takes:
in a GPT-2 the eight ops of the causal mask, once for each layer. It is small, so it stays for them instead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from delta.planner.steplog import StepGraph

MANY = 4  # ops that read it
# Of what the step saves: what one may take, and all together.
SMALL, ALL = 1 / 500, 1 / 250


def keep_common(graph: StepGraph) -> StepGraph:
    """The graph with such storages `rooted`, those with most readers first; `StepGraph.common_bytes` has what they
    take."""
    saved_bytes = graph.unevicted_bytes
    readers = Counter(node for op in graph.ops for node in set(op.inputs))
    written = {node for op in graph.ops for node in op.overwrites}
    left_bytes = ALL * saved_bytes
    kept: set[int] = set()
    for number, count in readers.most_common():
        node = graph.nodes[number]
        if count < MANY:
            break
        made = node.op is not None and node.order < 0 and not node.rooted and number not in written
        if made and node.nbytes <= min(SMALL * saved_bytes, left_bytes):
            kept.add(number)
            left_bytes -= node.nbytes
    if not kept:
        return graph
    nodes = tuple(replace(node, rooted=True) if number in kept else node for number, node in enumerate(graph.nodes))
    return replace(graph, nodes=nodes)
