"""What is known of one kind of step: its graph, the plan for it, and how far that has been tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import sub

from delta.beside import Beside
from delta.planner.steplog import Plan, StepGraph, StepLog
from delta.routine import Bare, Routine, bare
from delta.types import Action

# A profile is planned again with better op times after this many more recorded steps.
REFINEMENTS = 2
# It is planned again, too, when the measured peak was over the limit, or what is in use beside counted activations has
# grown by a share `MOVED` of the limit: so often at most, and no plan aims at less than a share `TIGHTEST` of it.
TIGHTENINGS = 6
MOVED = 0.01
TIGHTEST = 0.9
# And when the limit has grown by this factor: a device budget follows what else is in use.
ROOMIER = 1.05
# Steps by one plan in which notes found no room; after them there are none.
CRAMPED = 2
# So many odd steps in a row, and another kind is expected next.
MOST_TRUST = 3


@dataclass(slots=True)
class Profile:
    """One kind of step."""

    signatures: tuple[int, ...]
    graph: StepGraph
    unevicted_peak_bytes: int
    forced: Mapping[int, Action]
    squeeze: float  # plans aim at this share of the limit; less after a step whose peak was over it
    plan: Plan | None = None
    idle: bool = False
    refined: int = 0
    tightened: int = 0
    relaxed: int = 0
    planned_for_bytes: int = 0  # the limit at the last planning
    aim_bytes: int = 0  # what the plan was allowed to take
    planned_graph: StepGraph | None = None  # what the plan was made from
    course: StepLog = field(default_factory=StepLog)  # of the step that `graph` was built from
    fixed: Mapping[int, Action] = field(default_factory=dict)  # what a way that begins alike does: `branches.py`
    trunk: Profile | None = None  # that way
    trunk_plan: Plan | None = None  # ... and its plan, which this one's was made after
    trunk_packs: int = 0  # tensors saved before they part
    routine: Routine | None = None  # how steps go from now on; None: all of their calls are recorded
    strays: Mapping[int, Action] = field(default_factory=dict)  # of the last step: evicted, and not named by the plan
    then: Profile | None = None  # the kind of step that comes after one of this kind, most of the time
    then_trust: int = 0  # how much oftener than others, of late
    beside: Beside = field(default_factory=Beside)  # counted activations, under a budget on the device
    planned_beside: tuple[int, ...] = ()  # the most of it by save and need, at the last planning
    cramped: int = 0  # steps by this plan in which replays that nobody decides about found no room
    over_bytes: int | None = None  # by which the last step by this plan was over its limit, if there was one
    _bare: Bare | None = None
    _staying: frozenset[int] | None = None

    def went(self, graph: StepGraph, course: StepLog) -> None:
        """A step of this kind was recorded: its graph, and its course."""
        self.graph, self.course, self._bare, self._staying = graph, course, None, None

    @property
    def all_beside(self) -> tuple[int, ...]:
        """What its graph has beside saved storages, by save order and then by need."""
        return self.graph.beside_saves + self.graph.beside_needs

    @property
    def bare(self) -> Bare:
        """The course without the calls that are for nothing that is saved."""
        if self._bare is None:
            self._bare = bare(self.course, self.graph)
        return self._bare

    @property
    def staying(self) -> frozenset[int]:
        """The save orders of what may not go, such as what the program never lets go of."""
        if self._staying is None:
            nodes = self.graph.nodes
            self._staying = frozenset(v for v, node in enumerate(self.graph.saved) if not nodes[node].evictable)
        return self._staying

    @property
    def can_tighten(self) -> bool:
        """Whether its plan may be made tighter still."""
        return self.tightened < TIGHTENINGS and self.squeeze > TIGHTEST

    def costs_ns(self, replay_ns: int) -> Iterator[tuple[object, int]]:
        """Its recorded calls and how long their ops take, without what a replay takes beside."""
        ops = self.graph.ops
        return ((call, ops[op].cost_ns - replay_ns if op >= 0 else 0) for call, op in self.course.calls)

    def came_before(self, following: Profile | None) -> None:
        """A step of this kind was followed by one of that: the majority counts, so that one odd step among many, an
        epoch's last batch, is not expected again at once."""
        if self.then is following:
            self.then_trust = min(MOST_TRUST, self.then_trust + 1)
        elif self.then_trust > 1:
            self.then_trust -= 1
        else:
            self.then, self.then_trust = following, 1


def with_beside(graph: StepGraph, beside: Beside) -> StepGraph:
    """The graph with what its step used beside counted activations; as it is, where nobody measured that."""
    if beside.places != (len(graph.saved), len(graph.needs)):
        return graph
    return replace(
        graph,
        beside_saves=beside.saves.most_bytes,
        beside_needs=beside.needs.most_bytes,
        working_needs=tuple(beside.needs.working),
        making=tuple(beside.making),
    )


def refine(old: StepGraph, new: StepGraph, late: bool) -> StepGraph:
    """The newer step with, for each op, the least cost seen and, for each storage, the longest stay; the newer step
    alone if the ops differ, or it saved more or fewer. `late`: the device told the times, the host works ahead of it.
    """
    if len(old.saved) != len(new.saved) or [op.name for op in old.ops] != [op.name for op in new.ops]:
        return new
    ops = tuple(
        replace(fresh, cost_ns=min(fresh.cost_ns, known.cost_ns)) for fresh, known in zip(new.ops, old.ops, strict=True)
    )
    floats_to = tuple(map(max, new.floats_to, old.floats_to))
    return replace(_without_delays(old, new) if late else new, ops=ops, floats_to=floats_to)


def _without_delays(old: StepGraph, new: StepGraph) -> StepGraph:
    """The newer step with each save and need as soon after the one before it as ever. A host that records is held up
    now and then, here in one step and there in another, and a device that waits for it tells of that as its own time.
    """
    if old.needs != new.needs or old.needs_before != new.needs_before or new.turns:
        return new
    saves = [(before, False, order) for order, before in zip(range(len(new.saved)), new.needs_before, strict=True)]
    came = sorted(saves + [(position, True, position) for position in range(len(new.needs))])

    def gaps_ns(graph: StepGraph) -> Iterator[int]:
        at_ns = [(graph.need_ns if need else graph.save_ns)[number] for _, need, number in came]
        return map(sub, [*at_ns, graph.end_ns], [0, *at_ns])

    *at_ns, end_ns = accumulate(map(min, gaps_ns(old), gaps_ns(new)))
    save_ns = tuple([ns for ns, (_, need, _) in zip(at_ns, came, strict=True) if not need])
    need_ns = tuple([ns for ns, (_, need, _) in zip(at_ns, came, strict=True) if need])
    return replace(new, save_ns=save_ns, need_ns=need_ns, end_ns=end_ns)
