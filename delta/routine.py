"""What of a known step has to be recorded: the calls that its plan will replay, and nothing else.

A step that has gone as planned will go so again. Then most of its ops need no recipe, and the recorder lets them pass
after one look at what they are: a `Routine` knows the calls of the step in their order, and for each one the `Way` it
takes. A call that is another than the one expected ends the routine: from there on everything is recorded.

Before its first save a step may do things that the next one like it does not: what is logged now and then, what comes
after the optimizer and so in one of several steps that accumulate gradients. There only the calls that something saved
is made from have to come, and one that a routine does not know ends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from operator import sub

from delta.alone import Alone, left_alone
from delta.planner import Plan, StepGraph
from delta.planner.steplog import StepLog
from delta.types import Action, leaves_recipe_only

Call = tuple[object, int]
"""What the runtime knows an op by, and its index in `StepGraph.ops`; -1 for one that made nothing."""


class Way(IntEnum):
    """How the recorder takes a call."""

    PASS = 0
    RECORD = 1
    NOTE = 2  # the plan replays it, and the runtime alone has to know of it: see `noted_ops`


class Routine:
    """The calls of a step, one after the other."""

    __slots__ = (
        "_aside",
        "_asked",
        "_before",
        "_calls",
        "_costs_ns",
        "_optional",
        "alone",
        "branches",
        "calls",
        "coming_bytes",
        "dropped",
        "followed",
        "left",
        "made_bytes",
        "most_bytes",
        "noted",
        "orders",
        "passing",
        "read",
        "ways",
    )

    def __init__(
        self,
        calls: Sequence[Call],
        ways: Sequence[Way],
        *,
        orders: Sequence[int] = (),
        dropped: Collection[int] = (),
        read: Collection[int] = (),
        costs_ns: Sequence[int] = (),
        before: int = 0,
        optional: Collection[int] = (),
        noted: Collection[int] = (),
        coming_bytes: Sequence[int] = (),
        alone: Alone | None = None,
        made_bytes: Sequence[int] = (),
        aside: Set[object] | None = None,
    ) -> None:
        """`orders`: by saved tensor, the save order of a storage that the plan keeps, or drops at once; -1 where more
        is done. `dropped`: the orders of those that go, and of these `noted` the ones that only the runtime knows how
        to make again. `read`: of what a recorded op reads when it is replayed; what is kept and not read need only be
        counted.
        `costs_ns`: how long the ops of the step take. `before`: how many of the calls come before the first save; of
        these the `optional` ones, by their position, may stay away. `coming_bytes`: by save order, what there has to
        be room for when it has been saved (`room_for_next`). `alone`: what is left to autograd. `made_bytes`: by op, of
        the storage that it makes; 0 where that does not count, or there are others. `aside`: calls that are none of the
        step's own, whenever they come; where they are given, a step that goes by this may go on by another one.

        Looked up for each call by their position, without a call of Python: `calls` have come, `made_bytes` are what
        the next one makes, and if it is what `passing` has there, nothing need be done for it but to count it."""
        self._calls = [call for call, _ in calls]
        self._costs_ns = [costs_ns[op] if 0 <= op < len(costs_ns) else None for _, op in calls]
        self.made_bytes = [made_bytes[op] if 0 <= op < len(made_bytes) else 0 for _, op in calls]
        self.passing: list[object | None] = [None] * (len(calls) + 1)  # after the last one any is another
        self._before, self._optional = before, frozenset(optional)
        self.branches, self._aside = aside is not None, aside or frozenset()
        self.ways = list(ways)
        self.orders, self.dropped, self.read, self.noted = orders, frozenset(dropped), frozenset(read), frozenset(noted)
        self.coming_bytes = coming_bytes
        self.alone = alone
        self.most_bytes: Sequence[int] = ()  # by save order, where the sizes of a step are not known before it begins
        self.followed = 0  # steps that have gone so
        self.left = 0  # the last ones that began so and then went otherwise
        self.restart()

    def restart(self) -> None:
        """The next step begins."""
        self.calls = 0
        self._asked: int | None = None

    @property
    def all_saved(self) -> bool:
        """Whether all have that come before the last save of a step in which something is left alone. Others may come
        after backward has begun, and before it goes on."""
        return self.alone is not None and self.alone.saves_before(self.calls + 1) == self.alone.saves_before(None)

    @property
    def begun(self) -> bool:
        return self.calls > 0

    @property
    def lacks_data(self) -> bool:
        """Whether something has not come that has to before the first save."""
        return not self._optional.issuperset(range(self.calls, self._before))

    def way(self, call: object) -> Way | None:
        """The way of the next call; None where another one was expected."""
        at = self.calls
        while at == len(self._calls) or self._calls[at] is not call:
            if at >= self._before or at not in self._optional:
                self._asked = None
                return Way.PASS if call in self._aside else None
            at += 1
        self.calls, self._asked = at + 1, at
        return self.ways[at]

    def go_on_from(self, other: Routine, call: object | None, packs: int) -> bool:
        """Whether this one has done the same up to where the other one is, with so many tensors saved, and expects that
        call next, if it is one: then it is there."""
        at = other.calls
        if self._calls[:at] != other._calls[:at] or (call is not None and self._calls[at : at + 1] != [call]):
            return False
        if self._before != other._before or self.ways[:at] != other.ways[:at] or not (self.branches and other.branches):
            return False
        saved = set(self.orders[:packs])
        sets = ((self.dropped, other.dropped), (self.noted, other.noted))
        same = self.orders[:packs] == other.orders[:packs] and all(saved & a == saved & b for a, b in sets)
        same = same and saved & self.read <= other.read  # what need only be counted may have a record
        if same:
            self.calls, self._asked = at, None
        return same

    @property
    def cost_ns(self) -> int | None:
        """How long the call that `way` was last asked about takes, as far as it is known."""
        return self._costs_ns[self._asked] if self._asked is not None else None

    def passed(self) -> None:
        """Nothing need be done for the call that `way` was last asked about, in this step or in later ones."""
        if self._asked is not None:
            self.passing[self._asked] = self._calls[self._asked]


def routine_of(
    log: StepLog,
    graph: StepGraph,
    plan: Plan,
    notes: bool = True,
    aside: Set[object] | None = None,
    read_elsewhere: Set[int] = frozenset(),
) -> Routine:
    """How steps like the one that `log` and `graph` tell of go by `plan`. `notes`: whether any op may be noted.
    `aside`: calls that were taken out of the log of a way that a step may leave for another. Nothing is left alone
    there, as it would have to be in both. `read_elsewhere`: save orders that replays of the other one read."""
    orders = orders_of(log, graph, plan)
    noted = noted_ops(graph, plan, orders, log.ops_before) if notes else set()
    ways = [
        Way.NOTE if op in noted else way
        for (_, op), way in zip(log.calls, ways_of(log.calls, graph, plan), strict=True)
    ]
    dropped, read = settled(graph, plan, Action.RECOMPUTE), read_by_replays(graph, plan, noted) | read_elsewhere
    looked_after = dropped | read | _beside_notes(graph, noted) | _followed_by_moves(graph, plan)
    return Routine(
        log.calls,
        ways,
        orders=orders,
        dropped=dropped,
        read=read,
        costs_ns=[op.cost_ns for op in graph.ops],
        before=log.calls_before,
        optional=_optional(log.calls[: log.calls_before], graph),
        noted={order for order in dropped if graph.nodes[graph.saved[order]].op in noted},
        coming_bytes=room_for_next(plan),
        alone=left_alone(graph, log.calls_at, log.orders, orders, looked_after) if aside is None else None,
        made_bytes=[graph.nodes[op.outputs[0]].nbytes if len(op.outputs) == 1 else 0 for op in graph.ops],
        aside=aside,
    )


def _followed_by_moves(graph: StepGraph, plan: Plan) -> set[int]:
    """The save orders of those after whose needs something goes, or comes back."""
    return {graph.needs[position] for position in (*plan.prefetch, *plan.evictions) if position < len(graph.needs)}


def _beside_notes(graph: StepGraph, noted: Collection[int]) -> set[int]:
    """The save orders of what noted ops read, which has to have its record when they get theirs, and of what they make,
    which other replays find there."""
    nodes = {node for op in noted for node in (*graph.ops[op].inputs, *graph.ops[op].outputs)}
    return {order for order, node in enumerate(graph.saved) if node in nodes}


def room_for_next(plan: Plan) -> list[int]:
    """By save order: what the next save brings at most, or by how much the plan should raise what is resident there, if
    that is more; nothing at the last one."""
    rises = map(sub, plan.forward_bytes[1:], plan.forward_bytes)
    return [*map(max, rises, plan.saved_bytes[1:]), 0]


def _optional(calls: Sequence[Call], graph: StepGraph) -> list[int]:
    """The positions of those that nothing saved is made from."""
    makers = _makers_of(graph, graph.saved)
    return [position for position, (_, op) in enumerate(calls) if op not in makers]


@dataclass(frozen=True, slots=True)
class Bare:
    """The course of a step without the calls `aside`."""

    log: StepLog
    aside: frozenset[object]


def bare(course: StepLog, graph: StepGraph) -> Bare:
    """Without what is called for nothing that is saved, wherever it is: to draw a number, say, by which a layer is left
    out. Before the first save without any that need not come there."""
    makers = _makers_of(graph, graph.saved)
    needed = {call for call, op in course.calls if op < 0 or op in makers}
    may_stay_away = set(_optional(course.calls[: course.calls_before], graph))
    kept = [call in needed and at not in may_stay_away for at, (call, _) in enumerate(course.calls)]
    before = [0, *accumulate(kept)]  # by number of calls: of them, those that are left
    log = replace(
        course,
        calls=[call for call, stays in zip(course.calls, kept, strict=True) if stays],
        calls_before=before[course.calls_before],
        calls_at=[before[calls] for calls in course.calls_at],
    )
    return Bare(log, frozenset(call for call, _ in course.calls) - needed)


def _makers_of(graph: StepGraph, nodes: Iterable[int]) -> set[int]:
    """The ops that these storages are made by, and those that make what they read, and so on."""
    found: set[int] = set()
    todo = list(nodes)
    while todo:
        op = graph.nodes[todo.pop()].op
        if op is not None and op not in found:
            found.add(op)
            todo += graph.ops[op].inputs
    return found


def ways_of(calls: Sequence[Call], graph: StepGraph, plan: Plan) -> list[Way]:
    """The way of each call in a step like `graph` that follows `plan`."""
    replayed = _replayed(graph, plan)
    return [Way.RECORD if op in replayed else Way.PASS for _, op in calls]


def orders_of(log: StepLog, graph: StepGraph, plan: Plan) -> tuple[int, ...]:
    """By saved tensor of the step that `log` tells of: the save order of its storage if the plan keeps or drops it for
    good, else -1.

    Not where all saved tensors on a storage died and another came: who only counts them takes that for a new storage.
    """
    released = Counter(order for order, _ in log.releases)
    known = settled(graph, plan, Action.KEEP) | settled(graph, plan, Action.RECOMPUTE)
    return tuple(order if order in known and released[order] == 1 else -1 for order in log.orders)


def settled(graph: StepGraph, plan: Plan, action: Action) -> set[int]:
    """The save orders of what takes this action at its first save, and of which the plan asks nothing later."""
    asked_for = {order for going in plan.evictions.values() for order, _ in going}
    return {
        order
        for order, planned in enumerate(plan.actions)
        if planned is action and order not in asked_for and graph.nodes[graph.saved[order]].nbytes
    }


def read_by_replays(graph: StepGraph, plan: Plan, noted: Collection[int] = ()) -> set[int]:
    """The save orders of what the plan's replays read, but for those of `noted` ops."""
    read = {node for op in _replayed(graph, plan).difference(noted) for node in graph.ops[op].inputs}
    return {order for order, node in enumerate(graph.saved) if node in read}


def noted_ops(graph: StepGraph, plan: Plan, orders: Sequence[int], ops_before: Sequence[int]) -> set[int]:
    """Of the ops that the plan replays, those of which the ledger need not know: what they make goes at its save, what
    they read is saved by then, or there all the time, or made by others of them. Nothing of it is written, but for what
    one of them makes, nobody saves, and another overwrites (a sum in place, on its way to what is saved).

    `orders`: of `orders_of`; `ops_before`: of `StepLog`.
    """
    replayed, settled_orders = _replayed(graph, plan), set(orders) - {-1}
    writers = _writers(graph)
    readers: dict[int, list[int]] = {}  # by storage: the replayed ops that read it
    for op in replayed:
        for node in graph.ops[op].inputs:
            readers.setdefault(node, []).append(op)
    noted = {
        op
        for op in replayed
        if _may_be_noted(graph, op, settled_orders)
        and all(
            graph.nodes[node].order in settled_orders or ops_before[graph.nodes[node].order] <= op
            for node in graph.ops[op].inputs
            if graph.nodes[node].order >= 0 and graph.nodes[node].nbytes
        )
    }

    def can_stay(op: int) -> bool:
        call = graph.ops[op]
        return (
            all(reader in noted for node in call.outputs for reader in readers.get(node, ()))
            and noted.issuperset(_makers(graph, plan, call.inputs))
            and all(
                _is_passed_on(graph, node, writers[node], noted)
                for node in call.inputs + call.outputs
                if node in writers
            )
        )

    todo = list(noted)
    while todo:
        if (op := todo.pop()) in noted and not can_stay(op):
            noted.remove(op)
            call = graph.ops[op]  # it has to be recorded: look again at those that stand or fall with it
            todo += (maker for node in call.inputs if (maker := graph.nodes[node].op) is not None)
            for node in call.outputs + tuple(node for node in call.inputs if node in writers):
                todo += readers.get(node, ())
    return noted


def _writers(graph: StepGraph) -> dict[int, list[int]]:
    """By storage: the ops that write into it."""
    found: dict[int, list[int]] = {}
    for op in graph.ops:
        for node in op.overwrites:
            found.setdefault(node, []).append(op.id)
    return found


def _is_passed_on(graph: StepGraph, node: int, writers: Sequence[int], noted: Set[int]) -> bool:
    """Whether what is overwritten is made by a noted op, and only on its way to what another one makes."""
    made = graph.nodes[node]
    return made.op in noted and made.order < 0 and len(writers) == 1 and writers[0] in noted


def _may_be_noted(graph: StepGraph, op: int, settled_orders: Set[int]) -> bool:
    """Whether an op may, by what it is and makes. What begins a step is saved with all that belongs to it."""
    call = graph.ops[op]
    if not call.replayable or (call.overwrites and (len(call.overwrites), len(call.outputs)) != (1, 1)):
        return False
    made = [graph.nodes[node].order for node in call.outputs]
    return all(order < 0 or (order > 0 and order in settled_orders) for order in made)


def _replayed(graph: StepGraph, plan: Plan) -> set[int]:
    """Ops that the plan replays, and those that tell what form a storage is encoded in."""
    found: set[int] = set()
    encoded: set[int] = set()
    todo: list[int] = []
    writers = _writers(graph)
    for order, action in enumerate(plan.actions):
        node = graph.nodes[graph.saved[order]]
        if node.op is None:
            continue
        if leaves_recipe_only(action, node.stand_in):
            todo += [node.op, *_written_since(graph, graph.saved[order], writers)]
        elif action is Action.ENCODE:
            encoded.update(_overwritten(graph, node.op))
    while todo:
        op = todo.pop()
        if op not in found:
            found.add(op)
            todo += _makers(graph, plan, graph.ops[op].inputs)
    return found | encoded


def _written_since(graph: StepGraph, node: int, writers: Mapping[int, Sequence[int]]) -> set[int]:
    """The ops that write into a storage after its save. What has gone is there again by that, and backward asks for
    what the last of them leaves: without their recipes it could not go any more."""
    found: set[int] = set()
    todo = [node]
    while todo:
        for op in writers.get(todo.pop(), ()):
            if op not in found:
                found.add(op)
                todo += graph.ops[op].outputs
    return found


def _makers(graph: StepGraph, plan: Plan, nodes: Iterable[int]) -> Iterable[int]:
    """The ops that make those of `nodes` which are not there when they are read."""
    for number in nodes:
        node = graph.nodes[number]
        dropped = node.order < 0 or leaves_recipe_only(plan.actions[node.order], node.stand_in)
        if dropped and not node.rooted and node.op is not None:
            yield node.op


def _overwritten(graph: StepGraph, op: int) -> Iterable[int]:
    """An op, and those whose results it and they overwrite."""
    todo = [op]
    while todo:
        yield (op := todo.pop())
        todo += (maker for node in graph.ops[op].overwrites if (maker := graph.nodes[node].op) is not None)
