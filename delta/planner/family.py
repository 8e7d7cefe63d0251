"""Steps of one program at several input sizes, and the step it would be at any other.

A family is told by what does not depend on sizes: the structure of what its steps save, and the graph of its ops.
Each observed input size is a sample. From the samples, `Estimator` says what every storage takes and every op costs at
a size that was never seen; with the structure that is a whole `StepGraph`, ready to be planned before the step runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from delta.beside import Beside, BesideBySize
from delta.planner.estimate import Dims, Estimator, Form, Interval
from delta.planner.steplog import Node, StepGraph
from delta.types import Action, OpInfo
from delta.units import Share

SAMPLES = 16  # input sizes remembered of a family; the oldest is forgotten first


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is known of a step before it runs: what each saved storage takes, by save order, and at least how high its
    peak would be if nothing were evicted."""

    saved: tuple[Interval, ...]
    peak_bytes: int

    @property
    def exact(self) -> bool:
        return all(interval.exact for interval in self.saved)

    def covers(self, order: int, nbytes: int) -> bool:
        """Whether a plan made for this has the room that a storage takes."""
        return order < len(self.saved) and nbytes <= self.saved[order].most

    def foresaw(self, order: int, nbytes: int) -> bool:
        """Whether what a storage takes is no surprise, neither too much nor too little."""
        return self.covers(order, nbytes) and nbytes >= self.saved[order].least


class Family:
    """One program. `structure`: what does not depend on sizes, for each pack of a step."""

    def __init__(
        self,
        structure: tuple[int, ...],
        dims: Dims,
        graph: StepGraph,
        forced: Mapping[int, Action],
        min_bytes: int,
    ) -> None:
        self.structure, self.forced = structure, forced
        self._base = pruned(graph)
        self._min_bytes = min_bytes
        self._samples: list[tuple[Dims, StepGraph]] = [(dims, self._base)]
        self.observed = 1  # first sights of an input size; one that was forgotten since counts again
        self.beside = BesideBySize()
        self._held = self._held_in(self._base)
        self._fit()

    # -- learning -------------------------------------------------------------------------------------------------
    @property
    def sizes(self) -> tuple[Dims, ...]:
        """The input sizes that are remembered."""
        return tuple(dict.fromkeys(dims for dims, _ in self._samples))

    @property
    def guesses(self) -> bool:
        """Whether what some saved storage takes is no simple function of the input's size, as far as is known."""
        kinds = {self._kind_of_node[node] for node in self._base.saved}
        return any(form.margin or len(form.terms) > 2 for kind in kinds for form in self._forms[kind])

    def varies_so(self, dims: Dims) -> bool:
        """Whether a size differs from those observed in dims only that are known to vary."""
        varied = self._estimator.varied
        return all(i in varied or size == seen for i, (size, seen) in enumerate(zip(dims, self.sizes[0], strict=True)))

    def rounded(self, dims: Dims, rounding: Share) -> Dims:
        """The size to make a plan for, that others can use too: an observed one as it is, else each dim that is known
        to vary rounded up."""
        if dims in self.sizes:
            return dims
        varied = self._estimator.varied
        return tuple(round_up(size, rounding) if i in varied else size for i, size in enumerate(dims))

    def takes(self, structure: Sequence[int], dims: Dims, graph: StepGraph) -> bool:
        """Whether a step is one of this family."""
        return (
            self.structure == tuple(structure)
            and len(dims) == len(self.sizes[0])
            and _skeleton(pruned(graph)) == _skeleton(self._base)
        )

    def learn(self, dims: Dims, graph: StepGraph, forced: Mapping[int, Action]) -> None:
        """Another step that `takes` said yes to."""
        graph = pruned(graph)
        self.observed += dims not in self.sizes
        self._held |= self._held_in(graph)
        self._sample(dims, graph)
        del self._samples[:-SAMPLES]
        self._base = replace(graph, floats_to=tuple(map(max, graph.floats_to, self._base.floats_to)))
        self.forced = forced
        self._fit()

    def used(self, graph: StepGraph, beside: Beside) -> None:
        """What a step of this family, like `graph`, used beside counted activations, if anybody measured that."""
        if beside.places == (len(graph.saved), len(graph.needs)):
            self.beside.saw(graph.unevicted_bytes, beside)

    def _sample(self, dims: Dims, graph: StepGraph) -> None:
        """Of two steps that are alike the larger bytes and smaller times count."""
        known = next((sample for sample in self._samples if sample[0] == dims and self._alike(sample[1], graph)), None)
        if known is not None:
            self._samples.remove(known)
            graph = _both(known[1], graph)
        self._samples.append((dims, graph))

    def _alike(self, known: StepGraph, graph: StepGraph) -> bool:
        """Whether two steps of the same size are one sample."""
        return True

    def _held_in(self, graph: StepGraph) -> frozenset[int]:
        """Nodes that would be large enough, and that the program uses all the time: to evict one would free nothing."""
        return frozenset(
            number
            for number, node in enumerate(graph.nodes)
            if not node.rooted and not node.evictable and node.nbytes >= self._min_bytes
        )

    def _fit(self) -> None:
        """Fit everything once for all sizes. Storages that were alike at every size share one fit."""
        observed, graphs = zip(*self._samples, strict=True)
        self._estimator = Estimator(observed)
        kinds: dict[tuple[int, ...], int] = {}
        self._kind_of_node = [
            kinds.setdefault(values, len(kinds))
            for values in zip(*([node.nbytes for node in graph.nodes] for graph in graphs), strict=True)
        ]
        self._forms: list[tuple[Form, ...]] = [self._estimator.forms(values) for values in kinds]
        costs = zip(*([op.cost_ns for op in graph.ops] for graph in graphs), strict=True)
        self._rates = [self._estimator.rate(values) for values in costs]
        self._length = self._estimator.rate([graph.end_ns for graph in graphs])
        self._at_peak = Counter(self._kind_of_node[self._base.saved[v]] for v in _alive_at_peak(self._base))

    # -- asking ---------------------------------------------------------------------------------------------------
    def expects(self, dims: Dims) -> Expectation:
        """What a step at an input size will save."""
        intervals = self._intervals(dims)
        return Expectation(
            tuple(intervals[self._kind_of_node[node]] for node in self._base.saved),
            sum(count * intervals[kind].least for kind, count in self._at_peak.items()),
        )

    def graph(self, dims: Dims) -> StepGraph:
        """The step at an input size, with the most that each storage may take."""
        base, point = self._base, self._estimator.point(dims)
        most = [interval.most for interval in self._intervals(dims)]
        sizes = [most[kind] for kind in self._kind_of_node]
        nodes = tuple(self._sized(number, node, sizes[number]) for number, node in enumerate(base.nodes))
        ops = tuple(
            replace(op, cost_ns=int(factor * point.monomials[term] * point.scale))
            for op, (term, factor) in zip(base.ops, self._rates, strict=True)
        )
        term, factor = self._length
        longer = factor * point.monomials[term] * point.scale / max(1, base.end_ns)
        return replace(
            base,
            nodes=nodes,
            ops=ops,
            save_ns=tuple(int(at_ns * longer) for at_ns in base.save_ns),
            need_ns=tuple(int(at_ns * longer) for at_ns in base.need_ns),
            end_ns=int(base.end_ns * longer),
        )

    def _sized(self, number: int, node: Node, nbytes: int) -> Node:
        """A node of the base at another size; its encoded form is larger, and takes longer, by as much."""
        evictable = not node.rooted and number not in self._held and nbytes >= self._min_bytes
        sized = replace(node, nbytes=nbytes, evictable=evictable)
        if not node.encoded_bytes:
            return sized
        larger = nbytes / node.nbytes
        return replace(
            sized,
            encoded_bytes=ceil(node.encoded_bytes * larger),
            encode_ns=int(node.encode_ns * larger),
            decode_ns=int(node.decode_ns * larger),
        )

    def _intervals(self, dims: Dims) -> list[Interval]:
        point = self._estimator.point(dims)
        return [self._estimator.between(forms, point) for forms in self._forms]


def round_up(size: int, rounding: Share) -> int:
    """The size, larger by at most that share of it: up to a multiple of the largest power of two within the share."""
    step = 1
    while 2 * step <= rounding.fraction * size:
        step *= 2
    return -(-size // step) * step


def pruned(graph: StepGraph) -> StepGraph:
    """The graph without the ops that no saved storage depends on: those before the first step, such as the making of
    parameters, and those between two steps, which differ."""
    kept = kept_ops(graph)
    number = {op.id: place for place, op in enumerate(kept)}
    used = dict.fromkeys(node for op in kept for node in (*op.inputs, *op.outputs))
    place = {node: index for index, node in enumerate([*used, *(node for node in graph.saved if node not in used)])}

    def moved(nodes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place[node] for node in nodes)

    return replace(
        graph,
        nodes=tuple(
            replace(fact, op=number.get(fact.op) if fact.op is not None else None)
            for fact in map(graph.nodes.__getitem__, place)
        ),
        ops=tuple(
            replace(
                op,
                id=number[op.id],
                inputs=moved(op.inputs),
                outputs=moved(op.outputs),
                overwrites=moved(op.overwrites),
            )
            for op in kept
        ),
        saved=moved(graph.saved),
    )


def kept_ops(graph: StepGraph) -> list[OpInfo]:
    """The ops of the graph that are left in it when it is pruned."""
    wanted = {node for node in graph.saved if not graph.nodes[node].rooted}
    for op in reversed(graph.ops):
        if not wanted.isdisjoint(op.outputs):
            wanted.update(node for node in op.inputs if not graph.nodes[node].rooted)
    return [op for op in graph.ops if not wanted.isdisjoint(op.outputs)]


def _skeleton(graph: StepGraph) -> tuple[object, ...]:
    """All that sizes do not change."""
    return (
        [(node.order, node.op, node.rooted) for node in graph.nodes],
        [(op.name, op.inputs, op.outputs, op.replayable, op.overwrites) for op in graph.ops],
        graph.saved,
        graph.needs,
        graph.needs_before,
    )


def _both(known: StepGraph, fresh: StepGraph) -> StepGraph:
    nodes = tuple(
        replace(new, nbytes=max(new.nbytes, old.nbytes)) for new, old in zip(fresh.nodes, known.nodes, strict=True)
    )
    ops = tuple(
        replace(new, cost_ns=min(new.cost_ns, old.cost_ns)) for new, old in zip(fresh.ops, known.ops, strict=True)
    )
    return replace(fresh, nodes=nodes, ops=ops, end_ns=min(fresh.end_ns, known.end_ns))


def _alive_at_peak(graph: StepGraph) -> frozenset[int]:
    """Save orders of what would be there at the moment of the most bytes, if nothing were evicted."""
    alive: set[int] = set()
    best: frozenset[int] = frozenset()
    now_bytes = most_bytes = 0
    for v, node in enumerate(graph.saved):
        before = graph.needs_before[v]
        for gone in [other for other in alive if graph.release[other] <= before and other != v]:
            alive.remove(gone)
            now_bytes -= graph.nodes[graph.saved[gone]].nbytes
        alive.add(v)
        now_bytes += graph.nodes[node].nbytes
        if now_bytes > most_bytes:
            most_bytes, best = now_bytes, frozenset(alive)
    return best
