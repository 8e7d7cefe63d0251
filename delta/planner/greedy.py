"""The profile planner: which saved storages to keep, swap or recompute so that the whole step fits.

A greedy answer to the covering problem of the design (section 7): while the forecast is over the limit, take its worst
position and evict, among what is resident there and not needed before, the storage with the least added cost per byte.
The added cost of recomputing is that of the ops its chain adds to those replayed anyway; the added cost of swapping is
the compute time its copies take plus what the link cannot hide; that of encoding is the time to encode and to decode,
and frees only what the encoded form does not take; a stand-in adds its chain too where a replay reads it. When it fits,
evictions that turn out not to be needed are taken back, dearest first.

Bounds: no optimality; the covering integer program (policy `monet`) is for that. It is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from delta.planner.forecast import Forecast, forecast
from delta.planner.steplog import Plan, StepGraph
from delta.types import Action, Link

# Evictions chosen between two forecasts cover at most this share of the excess: costs change as chains grow.
BATCH = 0.34


@dataclass(frozen=True, slots=True)
class _Option:
    order: int
    action: Action
    cost_ns: float
    nbytes: int

    @property
    def per_byte(self) -> float:
        return self.cost_ns / self.nbytes


def plan_step(
    graph: StepGraph,
    limit_bytes: int,
    link: Link,
    allowed: Sequence[Action],
    forced: Mapping[int, Action] | None = None,
    begun: Sequence[Action] | None = None,
) -> Plan:
    """Plan a step like `graph` under `limit_bytes` of resident activations.

    `forced` gives the action of single storages (by save order) that a rule of the policy decides; `begun`, if given,
    are actions to begin with and to take none of back. The plan may be over the limit where nothing more can be
    evicted; `peak_bytes` tells.
    """
    return _Greedy(graph, limit_bytes, link, tuple(allowed), forced or {}, begun).plan()


class _Greedy:
    def __init__(
        self,
        graph: StepGraph,
        limit_bytes: int,
        link: Link,
        allowed: tuple[Action, ...],
        forced: Mapping[int, Action],
        begun: Sequence[Action] | None,
    ) -> None:
        self.graph, self.limit, self.link, self.allowed, self.forced = graph, limit_bytes, link, allowed, forced
        self.begun = begun or [Action.KEEP] * len(graph.saved)
        self.actions = list(self.begun)
        self.replayed: set[int] = set()
        for v, action in enumerate(self.begun):
            self.replayed |= self._adds(v, action) or set()
        self.now: Forecast = forecast(graph, self.actions, link)

    def plan(self) -> Plan:
        for _ in range(4 * len(self.actions) + 4):
            if self.now.peak_bytes <= self.limit or not self._relieve():
                break
            self.now = forecast(self.graph, self.actions, self.link)
        self._take_back()
        return Plan(
            tuple(self.actions),
            self.now.prefetch,
            self.graph.next_needs,
            self.graph.need_ns,
            tuple(self.graph.nodes[node].nbytes for node in self.graph.saved),
            self.now.forward_bytes,
            self.now.peak_bytes,
            self.now.replay_ns,
            self.now.swap_bytes,
        )

    def _relieve(self) -> bool:
        """Evict at the worst position. False if nothing there can go."""
        now = self.now
        forward, backward = max(now.forward_bytes, default=0), max(now.resident_bytes, default=0)
        if forward > backward:
            saves = now.forward_bytes.index(forward)
            options = self._options(-1, lambda v: v < saves and self.graph.floats_to[v] < saves)
        else:
            worst = now.resident_bytes.index(backward)
            options = self._options(worst, lambda v: self.graph.release[v] > worst)
        if not options:
            return forward <= backward and self._break_chain(now.resident_bytes.index(backward))
        wanted = max(1, int((max(forward, backward) - self.limit) * BATCH))
        for option in sorted(options, key=lambda option: (option.per_byte, -option.order)):
            self._take(option)
            wanted -= option.nbytes
            if wanted <= 0:
                break
        return True

    def _options(self, worst: int, resident: Callable[[int], bool]) -> list[_Option]:
        """Ways to evict what is `resident` at the worst position and not needed before it."""
        graph = self.graph
        options = []
        for v, action in enumerate(self.actions):
            node = graph.nodes[graph.saved[v]]
            stuck = not node.evictable or not node.nbytes
            if action is not Action.KEEP or stuck or graph.first_need[v] <= worst or not resident(v):
                continue
            best = min(self._ways(v, node.nbytes), key=lambda option: option.per_byte, default=None)
            if best is not None:
                options.append(best)
        return options

    def _ways(self, v: int, nbytes: int) -> list[_Option]:
        forced = self.forced.get(v)
        ways = []
        if Action.RECOMPUTE in self.allowed and forced in (None, Action.RECOMPUTE):
            replay_ns = self._replay_ns(v, Action.RECOMPUTE)
            if replay_ns is not None:
                ways.append(_Option(v, Action.RECOMPUTE, replay_ns, nbytes))
        if Action.SWAP in self.allowed and forced in (None, Action.SWAP):
            ways.append(_Option(v, Action.SWAP, self._swap_ns(nbytes), nbytes))
        node = self.graph.nodes[self.graph.saved[v]]
        if Action.ENCODE in self.allowed and forced in (None, Action.ENCODE) and node.encoded_bytes:
            replay_ns = self._replay_ns(v, Action.ENCODE)
            if replay_ns is not None:
                cost_ns = node.encode_ns + node.decode_ns + replay_ns
                ways.append(_Option(v, Action.ENCODE, cost_ns, nbytes - node.encoded_bytes))
        return ways

    def _replay_ns(self, v: int, action: Action) -> int | None:
        """Time of the ops it adds to the replays. None where they cannot be replayed."""
        added = self._adds(v, action)
        return sum(self.graph.ops[op].cost_ns for op in added) if added is not None else None

    def _swap_ns(self, nbytes: int) -> float:
        """Compute time its copies take, and what does not fit beside forward (out) or backward (in) any more."""
        swapped = self.now.swap_bytes + nbytes
        forward_ns = self.graph.need_ns[0]
        backward_ns = self.graph.end_ns - forward_ns
        out_ns, in_ns = self.link.out_ns(nbytes), self.link.in_ns(nbytes)
        over_out = min(out_ns, max(0, self.link.out_ns(swapped) - forward_ns))
        over_in = min(in_ns, max(0, self.link.in_ns(swapped) - backward_ns))
        return (out_ns + in_ns) * self.link.interference + over_out + over_in

    def _adds(self, v: int, action: Action) -> set[int] | None:
        """Ops that this action on `v` adds to the replays. None where they cannot be replayed."""
        if not self._drops(v, action):
            return set()
        added, number = self._added_ops(v), self.graph.saved[v]
        if action is Action.RECOMPUTE or added is None:
            return added
        return added if any(number in self.graph.ops[op].inputs for op in self.replayed) else set()

    def _drops(self, v: int, action: Action) -> bool:
        """Whether a replay that reads `v` has to make it again."""
        stand_in = action is Action.ENCODE and self.graph.nodes[self.graph.saved[v]].stand_in
        return stand_in or action is Action.RECOMPUTE

    def _added_ops(self, v: int) -> set[int] | None:
        """Ops that dropping `v` adds to the replays. None where its chain cannot be replayed."""
        graph = self.graph
        added: set[int] = set()
        todo = [graph.saved[v]]
        first = True
        while todo:
            node = graph.nodes[todo.pop()]
            kept = node.order >= 0 and not self._drops(node.order, self.actions[node.order])
            if (kept and not first) or node.rooted:
                continue
            first = False
            if node.op is None or not graph.ops[node.op].replayable:
                return None
            if node.op in self.replayed or node.op in added:
                continue
            added.add(node.op)
            todo += graph.ops[node.op].inputs
        return added

    def _take(self, option: _Option) -> None:
        added = self._adds(option.order, option.action)
        if added is not None:
            self.replayed |= added
            self.actions[option.order] = option.action

    def _break_chain(self, worst: int) -> bool:
        """The worst position is full of chains replayed for an early need: swap the largest of their links instead."""
        if Action.SWAP not in self.allowed:
            return False
        graph = self.graph
        links = [
            v
            for v, action in enumerate(self.actions)
            if action is Action.RECOMPUTE and self.forced.get(v) is not Action.RECOMPUTE
            if 0 <= self.now.back_at[v] <= worst < graph.first_need[v]
        ]
        if not links:
            return False
        self.actions[max(links, key=lambda v: graph.nodes[graph.saved[v]].nbytes)] = Action.SWAP
        return True

    def _take_back(self) -> None:
        """Undo evictions that are not needed, dearest per byte first."""
        if self.now.peak_bytes > self.limit:
            return
        graph = self.graph

        def own_cost(v: int) -> float:
            node = graph.nodes[graph.saved[v]]
            if self.actions[v] is Action.SWAP:
                return (self.link.out_ns(node.nbytes) + self.link.in_ns(node.nbytes)) * self.link.interference
            if self.actions[v] is Action.ENCODE:
                return node.encode_ns + node.decode_ns
            return graph.ops[node.op].cost_ns if node.op is not None else 0.0

        changed = (v for v, action in enumerate(self.actions) if action is not self.begun[v])
        evicted = [v for v in changed if self.actions[v] is not Action.KEEP and v not in self.forced]
        for v in sorted(evicted, key=own_cost, reverse=True):
            before, self.actions[v] = self.actions[v], self.begun[v]
            trial = forecast(graph, self.actions, self.link)
            if trial.peak_bytes <= self.limit and trial.cost_ns <= self.now.cost_ns:
                self.now = trial
            else:
                self.actions[v] = before
