"""The profile planner: which saved storages to keep, swap or recompute so that the whole step fits.

A greedy answer to the covering problem of the design (section 7): while the forecast is over the limit, take its worst
position and evict, among what is resident there and not needed before, the storages with the least added cost per byte.
The added cost of recomputing is that of the ops its chain adds to those replayed anyway; the added cost of swapping is
the compute time its copies take plus what the link cannot hide; that of encoding is the time to encode and to decode,
and frees only what the encoded form does not take; a stand-in adds its chain too where a replay reads it. When it fits,
evictions that turn out not to be needed are taken back, dearest first.

The cheapest way into the room there is may be a dead end: chains that are all replayed at once where what they begin
at has gone, too. Where nothing more can be evicted and the forecast is over the limit, the choice is made again a few
times with costs that are drawn and not measured, until one fits.

Where copies back come late in the end, another plan is made without swaps, and the better one is taken.

Costs are kept in `Prices` and looked at again only where something changed, and a forecast is made only when a whole
excess has been chosen for, so the time grows with the storages and not with their square.

Bounds: no optimality; the covering integer program (policy `monet`) is for that. It is deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from delta.planner.assemble import as_forecast
from delta.planner.cuts import cut_links
from delta.planner.forecast import Forecast, Forecaster
from delta.planner.prices import Option, Prices
from delta.planner.steplog import Plan, StepGraph
from delta.types import Action, Link

# Links of chains are swapped for at most this share of the excess between two forecasts: one broken may free many more.
BATCH = 0.34
# Chains are cut rather than more evicted where the cuts take less than this share of the excess.
NARROW = 0.5
# Evictions are tried without one by one for as many forecasts as pass this many ops and storages.
TRIED = 10_000
# A choice that does not fit is made again so often at most, and never where one takes more than a share of `TRIED`.
DRAWS, TRIALS_A_DRAW = 4, 8
SPREAD = 1.0  # of the logarithm of drawn costs
# The worst position is looked for this often at most; what is over then is left to the engine, which holds the limit.
ROUNDS = 16


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
    greedy = _Greedy(graph, limit_bytes, link, tuple(allowed), forced or {}, begun)
    greedy.run()
    if greedy.now.late_ns:
        # Prices know when backward needs a copy, and not when a replay does, which may be long before.
        without = tuple(action for action in allowed if action is not Action.SWAP)
        other = _Greedy(graph, limit_bytes, link, without, forced or {}, begun)
        other.run()
        fits = greedy.now.peak_bytes <= limit_bytes
        if other.now.peak_bytes <= limit_bytes and (not fits or other.now.cost_ns < greedy.now.cost_ns):
            greedy = other
    return as_forecast(graph, greedy.actions, greedy.now)


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
        self.sizes = graph.saved_bytes
        self.forecaster = Forecaster(graph, link)
        self.trials = TRIED // (1 + len(graph.ops) + len(graph.saved))

    def _begin(self, priced: StepGraph, narrow: float) -> None:
        self.priced, self.narrow = priced, narrow
        self.actions = list(self.begun)
        self.cut: set[int] = set()  # links that are there so that chains end at them
        self.prices = self._prices()
        self.now: Forecast = self.forecaster.forecast(self.actions)

    def run(self) -> None:
        """Choose `actions`, of which `now` is the forecast."""
        self._fit(self.graph)
        for draw in range(min(DRAWS, self.trials // TRIALS_A_DRAW)):
            if self.now.peak_bytes <= self.limit:
                break
            known = self.actions, self.now
            self._fit(_drawn(self.graph, draw))
            self._rather(*known)
        self._take_back()

    def _fit(self, priced: StepGraph) -> None:
        """... at the costs of `priced`."""
        self._begin(priced, NARROW)
        self._relieve_all()
        if self.now.peak_bytes > self.limit and self.cut:  # it may go without cutting as long as there are other ways
            cut = self.actions, self.now
            self._begin(priced, 0.0)
            self._relieve_all()
            self._rather(*cut)

    def _rather(self, actions: list[Action], now: Forecast) -> None:
        """These, where those at hand come to no lower peak."""
        if now.peak_bytes <= self.now.peak_bytes:
            self.actions, self.now = actions, now

    def _relieve_all(self) -> None:
        for _ in range(ROUNDS):
            if self.now.peak_bytes <= self.limit or not self._relieve():
                break
            self.now = self.forecaster.forecast(self.actions)

    def _relieve(self) -> bool:
        """Evict at the worst position. False if nothing there can go."""
        now, graph = self.now, self.graph
        forward, backward = max(now.forward_bytes, default=0), max(now.resident_bytes, default=0)
        over_bytes = max(forward, backward) - self.limit
        if forward > backward:
            saves = now.forward_bytes.index(forward)
            return self._evict(over_bytes, -1, lambda v: v < saves and graph.floats_to[v] < saves)
        worst = now.resident_bytes.index(backward)
        links = self._links(worst)
        cut = cut_links(graph, links, self.prices.replayed, self.limit - backward + sum(self.sizes[v] for v in links))
        if cut and sum(self.sizes[v] for v in cut) < over_bytes * self.narrow:
            self._have(cut, Action.KEEP)
            return True
        return self._evict(over_bytes, worst, lambda v: graph.release[v] > worst) or self._break(links, cut, over_bytes)

    def _links(self, worst: int) -> list[int]:
        """What is back by then for the sake of chains alone."""
        actions, back_at, first_need = self.actions, self.now.back_at, self.graph.first_need
        return [
            v
            for v, action in enumerate(actions)
            if action is Action.RECOMPUTE
            and self.forced.get(v) is not action
            and 0 <= back_at[v] <= worst < first_need[v]
        ]

    def _evict(self, over_bytes: int, worst: int, resident: Callable[[int], bool]) -> bool:
        """Evict the cheapest of what is `resident` at the worst position and not needed before it."""
        first_need, actions = self.graph.first_need, self.actions
        heap: list[tuple[float, int]] = []
        for v, action in enumerate(actions):
            if action is Action.KEEP and first_need[v] > worst and v not in self.cut and resident(v):
                option = self.prices[v]
                if option is not None:
                    heap.append((option.per_byte, -v))
        heapify(heap)
        there = {-minus for _, minus in heap}
        while heap and over_bytes > 0:
            per_byte, minus = heappop(heap)
            v = -minus
            option = self.prices[v] if actions[v] is Action.KEEP else None
            if option is None or option.per_byte < per_byte:
                continue  # gone, or there is a cheaper entry for it
            if option.per_byte > per_byte and heap and option.per_byte > heap[0][0]:
                heappush(heap, (option.per_byte, minus))
                continue
            for cheaper in self._take(option):
                if cheaper in there and (price := self.prices[cheaper]) is not None:
                    heappush(heap, (price.per_byte, -cheaper))
            over_bytes -= option.nbytes
        return bool(there)

    def _take(self, option: Option) -> list[int]:
        """Evict; what may be cheaper for it."""
        self.actions[option.order] = option.action
        return self.prices.taken(option)

    def _break(self, links: list[int], cut: list[int], over_bytes: int) -> bool:
        """Nothing is left to evict where it is full of chains: have some of their links there instead, on the host if
        that can be. False if there are none."""
        if Action.SWAP not in self.allowed:
            self._have(cut, Action.KEEP)
            return bool(cut)
        wanted = max(1, int(over_bytes * BATCH))
        largest = []
        for v in sorted(links, key=lambda v: (-self.sizes[v], v)):
            if wanted > 0:
                largest.append(v)
                wanted -= self.sizes[v]
        self._have(largest, Action.SWAP)
        return bool(largest)

    def _have(self, links: list[int], action: Action) -> None:
        """Links of chains are kept or swapped from now on, so that chains end there."""
        for v in links:
            self.actions[v] = action
        self.cut.update(links)
        self.prices = self._prices()

    def _prices(self) -> Prices:
        return Prices(self.priced, self.link, self.allowed, self.forced, self.actions)

    # -- what was not needed --------------------------------------------------------------------------------------
    def _take_back(self) -> None:
        """Undo evictions that are not needed, dearest first, one by one; where they are too many to try, first those
        for which there is plainly room, as far as the forecast bears it out."""
        if self.now.peak_bytes > self.limit:
            return
        if len(self._evicted()) > self.trials:
            spared = self._spared()
            while spared and not self._try_without(spared):
                spared = spared[: len(spared) // 2]
        for v in self._evicted()[: self.trials]:
            self._try_without([v])

    def _try_without(self, orders: Sequence[int]) -> bool:
        actions = list(self.actions)
        for v in orders:
            actions[v] = self.begun[v]
        trial = self.forecaster.forecast(actions)
        better = trial.peak_bytes <= self.limit and trial.cost_ns <= self.now.cost_ns
        if better:
            self.actions, self.now = actions, trial
        return better

    def _evicted(self) -> list[int]:
        """What could be taken back, dearest first."""
        changed = (v for v, action in enumerate(self.actions) if action is not self.begun[v])
        evicted = (v for v in changed if self.actions[v] is not Action.KEEP and v not in self.forced)
        return sorted(evicted, key=self._own_cost_ns, reverse=True)

    def _spared(self) -> list[int]:
        """Evictions for whose bytes there is room from their save to where they are back."""
        import numpy as np  # here: the engine has this module, and a block without plans needs none

        now, graph, spared = self.now, self.graph, []
        forward = self.limit - np.array(now.forward_bytes, np.int64)  # the room after each save
        backward = self.limit - np.array(now.resident_bytes, np.int64)  # ... and at each need
        for v in self._evicted():
            back = now.back_at[v] if now.back_at[v] >= 0 else graph.release[v]
            while_away = forward[v:], backward[:back]
            if all(room.min(initial=self.limit) >= self.sizes[v] for room in while_away):
                for room in while_away:
                    room -= self.sizes[v]
                spared.append(v)
        return spared

    def _own_cost_ns(self, v: int) -> float:
        node = self.graph.nodes[self.graph.saved[v]]
        if self.actions[v] is Action.SWAP:
            return self.link.taken_ns(self.link.out_ns(node.nbytes) + self.link.in_ns(node.nbytes), 2)
        if self.actions[v] is Action.ENCODE:
            return node.encode_ns + node.decode_ns
        return self.graph.ops[node.op].cost_ns if node.op is not None else 0.0


def _drawn(graph: StepGraph, draw: int) -> StepGraph:
    """The step with costs of its ops that tell nothing of one another."""
    costs = random.Random(draw)
    ops = (replace(op, cost_ns=int(1000 * costs.lognormvariate(0, SPREAD))) for op in graph.ops)
    return replace(graph, ops=tuple(ops))
