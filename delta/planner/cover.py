"""Keep, recompute, swap or encode each saved storage, as a cover of storages by the ops that are replayed.

For every saved storage v there are d_v (dropped, to be replayed), s_v (swapped) and e_v (encoded), whole, at most one
of them 1; for every op j there is r_j (replayed). The cost is the time of replays, of encoding and decoding, and what
copies take from compute and cannot hide:

    r_prod(v) >= d_v                       what is dropped is replayed
    r_prod(u) >= r_j - (1 - d_u)           and so is every dropped input u of what is replayed

A u that has only a stand-in is as good as dropped for what reads it: its e_u stands beside d_u in the second line,
though not in the first. All r follow from d and e, so they need not be whole. The peak is bounded where `Rows` says so.
At save k it is what is kept, what the program still uses, and what the link has not taken yet. At need p of backward it
is what is kept and what has come back by then, for p itself, before it, or as an ancestor of such a one:

    y_j,p >= d_v, as above with y for r    for every v needed at or before p

The program is exact about what is resident between chains; what a chain makes on its way and drops again, and where a
copy back begins, are not in it. `Rows` carries a margin for each position, which the forecast sets.

From: Shah et al., "Memory Optimization for Deep Networks", ICLR 2021 (the joint choice, the peak bounded at every
backward position). There each backward node has its own set of recomputed ops, T x T binaries; here an op is replayed
once, when it is asked for, which leaves a few binaries for each storage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from delta.planner.choices import choices_of
from delta.planner.forecast import EARLY
from delta.planner.program import Program, Term
from delta.planner.task import Task
from delta.types import Action

# With more choices than this their relaxation is solved. It leaves hardly more choices open than there are bounded
# positions (without any, a storage or two), and rounding those costs less than the search for the best whole answer.
WHOLE = 4000
WINDOWS = 24  # of the link: that many moments at which what has been copied is compared with what it can carry


@dataclass(slots=True)
class Rows:
    """Where the peak is bounded: save or need position -> bytes the program does not see there."""

    saves: dict[int, int] = field(default_factory=dict)
    needs: dict[int, int] = field(default_factory=dict)


class Cover:
    """The program of one task."""

    def __init__(self, task: Task, rows: Rows) -> None:
        self._task, self._graph = task, task.graph
        self._program = Program()
        self._late: int | None = None  # time by which the link is too slow for backward, scaled
        self._sizes = self._graph.saved_bytes
        self._unit_ns = max(1, sum(op.cost_ns for op in self._graph.ops)) / 1000
        self._drop: dict[int, int] = {}  # save order -> its variable
        self._swap: dict[int, int] = {}
        self._encode: dict[int, int] = {}
        self._gone: dict[int, list[int]] = {}  # save order -> those that say that replays have to make it again
        self._replay: dict[int, int] = {}  # op -> its variable
        self._users: list[list[int]] = [[] for _ in self._graph.nodes]
        for j, op in enumerate(self._graph.ops):
            for node in op.inputs:
                self._users[node].append(j)
        self._add_choices()
        self._closure()
        if self._swap and self._graph.needs:
            self._bound_link()
        for k, margin in rows.saves.items():
            self._bound_save(k, margin)
        for p, margin in rows.needs.items():
            self._bound_need(p, margin)

    def solve(self, time_limit_s: float, gap: float) -> list[Action] | None:
        """The actions by save order; None where the limit cannot be kept or no answer was found in time."""
        ways = {Action.RECOMPUTE: self._drop, Action.SWAP: self._swap, Action.ENCODE: self._encode}
        relaxed = sum(map(len, ways.values())) > WHOLE
        found = self._program.solve(time_limit_s, gap, relaxed)
        if found is None:
            return None
        actions = [Action.KEEP] * len(self._sizes)
        for v in range(len(actions)):
            gone = {action: found[variables[v]] for action, variables in ways.items() if v in variables}
            if sum(gone.values()) > 0.5:
                actions[v] = max(gone, key=lambda action: gone[action])
        return actions

    # -- the cover ------------------------------------------------------------------------------------------------
    def _add_choices(self) -> None:
        link = self._task.link
        for v, ways in enumerate(choices_of(self._task)):
            node = self._graph.nodes[self._graph.saved[v]]
            if Action.RECOMPUTE in ways:
                self._drop[v] = self._program.variable(whole=True)
                self._gone[v] = [self._drop[v]]
            if Action.SWAP in ways:
                taken_ns = link.taken_ns(link.out_ns(node.nbytes) + link.in_ns(node.nbytes), 2)
                self._swap[v] = self._program.variable(taken_ns / self._unit_ns, whole=True)
            if Action.ENCODE in ways:
                cost_ns = node.encode_ns + node.decode_ns
                self._encode[v] = self._program.variable(cost_ns / self._unit_ns, whole=True)
                if node.stand_in:
                    self._gone.setdefault(v, []).append(self._encode[v])
            chosen = self._variables(v)
            if len(chosen) > 1:
                self._program.at_least(-1, [(variable, -1) for variable in chosen])

    def _variables(self, v: int) -> list[int]:
        """Those that say that v is not kept."""
        return [ways[v] for ways in (self._drop, self._swap, self._encode) if v in ways]

    def _closure(self) -> None:
        """Replays follow from drops."""
        graph, program = self._graph, self._program
        for j in reversed(range(len(graph.ops))):
            saved = [v for v in self._saved_by(j) if graph.first_need[v] < len(graph.needs)]
            dropped = [self._drop[v] for v in saved if v in self._drop]
            if dropped and j not in self._replay:
                self._replay[j] = program.variable(graph.ops[j].cost_ns / self._unit_ns)
            for variable in dropped:
                program.at_least(0, [(self._replay[j], 1), (variable, -1)])
            if j not in self._replay:
                continue
            for number in graph.ops[j].inputs:
                node = graph.nodes[number]
                if node.rooted or node.op is None or (node.order >= 0 and node.order not in self._gone):
                    continue
                if node.op not in self._replay:
                    self._replay[node.op] = program.variable(graph.ops[node.op].cost_ns / self._unit_ns)
                self._follows(self._replay[node.op], self._replay[j], node.order, only_dropped=True)

    def _saved_by(self, op: int) -> list[int]:
        nodes = (self._graph.nodes[node] for node in self._graph.ops[op].outputs)
        return [node.order for node in nodes if node.order >= 0]

    def _follows(self, what: int, when: int, order: int, only_dropped: bool) -> None:
        """`what` >= `when`, unless the saved storage `order` (-1: not saved) that leads from one to the other is there:
        not gone but for its recipe, and with `only_dropped` false neither swapped nor encoded."""
        if order < 0:
            self._program.at_least(0, [(what, 1), (when, -1)])
            return
        gone = self._gone[order] if only_dropped else self._variables(order)
        self._program.at_least(-1, [(what, 1), (when, -1), *((variable, -1.0) for variable in gone)])

    # -- the link -------------------------------------------------------------------------------------------------
    def _bound_link(self) -> None:
        """What is asked for by a moment of backward has to be copied back by then, or is waited for."""
        graph, link, program = self._graph, self._task.link, self._program
        self._late = program.variable(1.0, upper=float("inf"))
        positions = len(graph.needs)
        for p in sorted({positions * window // WINDOWS for window in range(WINDOWS)}):
            copies = [v for v in self._swap if graph.first_need[v] <= p]
            if copies:
                room_ns = graph.need_ns[p] - graph.need_ns[0]
                terms = [(self._swap[v], -link.in_ns(self._sizes[v]) / self._unit_ns) for v in copies]
                program.at_least(-room_ns / self._unit_ns, [*terms, (self._late, 1)])

    def _leaving(self, copies: Sequence[int], now_ns: int) -> list[Term]:
        """A variable for the bytes of `copies` that the link has not taken out by `now_ns`."""
        graph, program = self._graph, self._program
        if not copies:
            return []
        bytes_per_ns = self._task.link.out_bytes_per_s / 1e9
        left = program.variable(upper=float("inf"))
        for start in sorted({copies[len(copies) * window // WINDOWS] for window in range(WINDOWS)}):
            could = max(0, now_ns - graph.save_ns[start]) * bytes_per_ns / self._scale
            terms = [(self._swap[v], -self._sizes[v] / self._scale) for v in copies if v >= start]
            program.at_least(-could, [(left, 1), *terms])
        return [(left, self._scale)]

    # -- the peak -------------------------------------------------------------------------------------------------
    @property
    def _scale(self) -> float:
        return max(1, self._task.limit_bytes)

    def _keep_under(self, limit_bytes: float, terms: list[Term]) -> None:
        self._program.at_least(-limit_bytes / self._scale, [(var, -factor / self._scale) for var, factor in terms])

    def _away(self, v: int) -> list[Term]:
        """What takes the bytes of v away."""
        return [(variable, -float(self._sizes[v])) for variable in self._variables(v)]

    def _encoded(self, v: int) -> list[Term]:
        """What an encoded form of v takes, beside v as long as that is there."""
        if v not in self._encode:
            return []
        return [(self._encode[v], float(self._graph.nodes[self._graph.saved[v]].encoded_bytes))]

    def _bound_save(self, k: int, margin: int) -> None:
        graph = self._graph
        free = [v for v in range(k + 1) if graph.floats_to[v] < k]  # the program itself does not use them any more
        terms = [term for v in free for term in self._away(v)]
        terms += [term for v in range(k + 1) for term in self._encoded(v)]
        terms += self._leaving([v for v in free if v in self._swap], graph.save_ns[k])
        beside = graph.beside_saves[k] if graph.beside_saves else 0
        self._keep_under(self._task.limit_bytes - margin - beside - sum(self._sizes[: k + 1]), terms)

    def _bound_need(self, p: int, margin: int) -> None:
        graph = self._graph
        back = _Back(self, p)
        if self._drop and self._swap and p + 1 < len(graph.needs):
            back.copies_for(_Back(self, p + 1))
        there = graph.beside_needs[p] if graph.beside_needs else 0
        terms = self._leaving(list(self._swap), graph.need_ns[p])
        for v, nbytes in enumerate(self._sizes):
            if graph.release[v] <= p:
                continue
            there += nbytes
            if graph.first_need[v] > p:
                terms += self._away(v) + self._encoded(v)
                terms += [(variable, float(nbytes)) for variable in back.present.get(v, ())]
        self._keep_under(self._task.limit_bytes - margin - there, terms)


class _Back:
    """What has come back before its own first need, by need p."""

    def __init__(self, cover: Cover, p: int) -> None:
        self._cover, self._graph, self._p = cover, cover._graph, p
        self.present: dict[int, list[int]] = {}  # save order -> variables that are 1 when it is there
        self._by: dict[int, int] = {}  # op -> its variable: replayed by then
        self._settled = self._find_settled()
        self._walk()
        self._early_copies()

    def _find_settled(self) -> list[bool]:
        """Ops that are replayed by p if they are replayed at all."""
        graph = self._graph
        settled = [False] * len(graph.ops)
        for j in reversed(range(len(graph.ops))):
            saved = self._cover._saved_by(j)
            if saved:
                settled[j] = any(graph.first_need[v] <= self._p for v in saved)
            else:
                users = [user for node in graph.ops[j].outputs for user in self._cover._users[node]]
                settled[j] = all(settled[user] or user not in self._cover._replay for user in users)
        return settled

    def _op(self, j: int) -> int:
        if j not in self._by:
            self._by[j] = self._cover._replay[j] if self._settled[j] else self._cover._program.variable()
        return self._by[j]

    def _walk(self) -> None:
        graph, cover = self._graph, self._cover
        for j in reversed(range(len(graph.ops))):
            if self._settled[j] and j in cover._replay:
                self._op(j)
            if j not in self._by:
                continue
            for number in dict.fromkeys(graph.ops[j].inputs):
                self._reads(j, number)
            self._makes(j)

    def _reads(self, j: int, number: int) -> None:
        cover, node = self._cover, self._graph.nodes[number]
        if node.rooted or (node.order >= 0 and self._graph.first_need[node.order] <= self._p):
            return
        if node.op is not None and (node.order in cover._gone or node.order < 0):
            maker = self._op(node.op)
            if not self._settled[node.op]:
                cover._follows(maker, self._by[j], node.order, only_dropped=True)
        if node.order in cover._swap or node.order in cover._encode:
            cover._follows(self._presence(node.order), self._by[j], node.order, only_dropped=False)

    def _makes(self, j: int) -> None:
        """What is saved of an op's results is there once it has been replayed."""
        cover = self._cover
        later = [v for v in cover._saved_by(j) if self._graph.first_need[v] > self._p and v in cover._drop]
        alone = len(self._graph.ops[j].outputs) == 1
        for v in later:
            if alone and cover._variables(v) == [cover._drop[v]]:
                self.present[v] = [self._by[j]]
            else:
                cover._follows(self._presence(v), self._by[j], v, only_dropped=True)

    def _presence(self, v: int) -> int:
        if v not in self.present:
            self.present[v] = [self._cover._program.variable()]
        return self.present[v][0]

    def copies_for(self, later: _Back) -> None:
        """Copies back that the next need's chain reads have begun by now."""
        for v, variables in later.present.items():
            if v in self._cover._swap:
                terms = [(self._presence(v), 1.0), (variables[0], -1.0), (self._cover._swap[v], -1.0)]
                self._cover._program.at_least(-1, terms)

    def _early_copies(self) -> None:
        """Copies back that have to begin before p is served."""
        cover, graph, link = self._cover, self._graph, self._cover._task.link
        for v, variable in cover._swap.items():
            first = graph.first_need[v]
            if not self._p < first < len(graph.needs):
                continue
            lead_ns = graph.need_ns[first] - int(link.in_ns(cover._sizes[v]) * EARLY)
            if min(bisect_right(graph.need_ns, lead_ns), first) - 1 <= self._p:
                cover._program.at_least(0, [(self._presence(v), 1), (variable, -1)])
