"""What one step did, as the planner sees it, and the plan it gives back.

A `StepLog` is written while the step runs: ops, saves, needs, and releases, each with the *net* time at which it
happened (Delta's own stalls and replays taken out). `StepGraph` is the same step with storages numbered by the order of
their first save, which is what stays the same from step to step.

Positions: backward is the sequence of needs (unpacks); position p is the p-th need. `release[v] == p` says that the
last handle on v died before need p.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from delta.planner.turns import Turn, turns_of
from delta.types import Action, Encoding, Kind, OpInfo


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Net times in a step by the device's clock: of first saves, of needs, and of its end."""

    save_ns: tuple[int, ...] = ()
    need_ns: tuple[int, ...] = ()
    end_ns: int = 0


@dataclass(slots=True)
class StepLog:
    """Events of one step, record ids as the ledger gave them."""

    ops: list[OpInfo] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)  # records in the order of their first save
    save_ns: list[int] = field(default_factory=list)
    ops_before: list[int] = field(default_factory=list)  # ops that had run when it was saved
    loose_at: dict[int, int] = field(default_factory=dict)  # save order -> saves when the program had let go of it
    kept: set[int] = field(default_factory=set)  # save orders that the program used before every need
    signatures: list[int] = field(default_factory=list)  # one for every pack, repeated saves included
    structures: list[int] = field(default_factory=list)  # ... and what of it is the same at every size
    orders: list[int] = field(default_factory=list)  # ... and the save order of its storage
    calls_at: list[int] = field(default_factory=list)  # ... and the calls that had come before it
    needs: list[tuple[int, int]] = field(default_factory=list)  # (save order, net time)
    asked: bool = False  # backward has begun to ask, be it only for what always stays
    asked_small: list[tuple[int, int, int]] = field(default_factory=list)  # for that: save order, needs, saves before
    releases: list[tuple[int, int]] = field(default_factory=list)  # (save order, number of needs before)
    small_before: list[int] = field(default_factory=list)  # ... and how often small ones had been asked for
    nbytes: dict[int, int] = field(default_factory=dict)
    kinds: dict[int, Kind] = field(default_factory=dict)
    encodings: dict[int, Encoding] = field(default_factory=dict)
    end_ns: int = 0
    forward_needs: int = 0
    needs_before: list[int] = field(default_factory=list)  # needs when it was saved
    turn_ends: list[tuple[int, int, int]] = field(default_factory=list)  # needs, ops and net time when a turn ended
    released_in: list[int] = field(default_factory=list)  # for each release, the turns that had ended
    calls: list[tuple[object, int]] = field(default_factory=list)  # what was called in forward, and its index in `ops`
    calls_before: int = 0  # of them, those before the first save

    @property
    def course(self) -> StepLog:
        """How the step goes, without what its graph tells: what a routine is made from."""
        return StepLog(
            calls=self.calls,
            calls_before=self.calls_before,
            calls_at=self.calls_at,
            orders=self.orders,
            releases=self.releases,
            ops_before=self.ops_before,
        )

    def timed(self, times: StepTimes) -> None:
        """The device's times are these; where they are not of all this step, the host's stand."""
        if (len(times.save_ns), len(times.need_ns)) == (len(self.saves), len(self.needs)):
            self.save_ns = list(times.save_ns)
            self.needs = [(order, at_ns) for (order, _), at_ns in zip(self.needs, times.need_ns, strict=True)]
            self.end_ns = times.end_ns


@dataclass(frozen=True, slots=True)
class Node:
    """A storage of the step. `order` is that of its first save, or -1; `nbytes` is 0 for what is never counted.

    `encoded_bytes`: what its encoded form takes; 0 where there is none. Then the times it costs, and whether it is only
    a stand-in: it serves the needs of the storage, and no replay that reads it."""

    nbytes: int
    order: int
    op: int | None  # index into StepGraph.ops
    rooted: bool  # always there: parameters, buffers, what the caller holds or an earlier step has made, what is common
    evictable: bool
    encoded_bytes: int = 0
    encode_ns: int = 0
    decode_ns: int = 0
    stand_in: bool = False


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One step in step-independent numbers. `nodes` and `ops` index each other."""

    nodes: tuple[Node, ...]
    ops: tuple[OpInfo, ...]  # ids, inputs and outputs renumbered to indices
    saved: tuple[int, ...]  # node of each save order
    save_ns: tuple[int, ...]
    floats_to: tuple[int, ...]  # by save order: the last save at which the program itself still uses the storage
    needs: tuple[int, ...]  # save order of each need
    need_ns: tuple[int, ...]
    first_need: tuple[int, ...]  # by save order; len(needs) if never needed
    release: tuple[int, ...]  # by save order
    end_ns: int
    forward_needs: int = 0  # needs before backward began; 0 where backward alone needs
    needs_before: tuple[int, ...] = ()  # by save order: needs before it was made
    turns: tuple[Turn, ...] = ()  # where every access is announced
    beside_saves: tuple[int, ...] = ()  # bytes of what is no saved storage, by save order, where they count
    beside_needs: tuple[int, ...] = ()  # ... by need
    working_needs: tuple[int, ...] = ()  # ... of which backward gives so much back before the next one
    making: tuple[int, ...] = ()  # bytes that an op has for a moment beside what it makes, by save order of that

    @property
    def next_needs(self) -> tuple[tuple[int, ...], ...]:
        """By save order: the positions of its needs."""
        found: list[list[int]] = [[] for _ in self.saved]
        for position, order in enumerate(self.needs):
            found[order].append(position)
        return tuple(map(tuple, found))

    @property
    def held_over(self) -> list[int]:
        """Save orders of what is there when backward begins and is needed after that."""
        began, needs = self.forward_needs, self.next_needs
        return [v for v, before in enumerate(self.needs_before) if before <= began and needs[v][-1:] >= (began,)]

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        """By save order: bytes of the storage."""
        return tuple([self.nodes[node].nbytes for node in self.saved])

    @property
    def common_bytes(self) -> int:
        """Bytes of what nobody saves and stays all the same (`common.py`)."""
        return sum(node.nbytes for node in self.nodes if node.rooted and node.op is not None and node.order < 0)

    @property
    def unevicted_bytes(self) -> int:
        """Bytes of all saved storages together: the peak of a step whose forward ends before its backward begins."""
        return sum(self.saved_bytes)


@dataclass(frozen=True, slots=True)
class Moves:
    """What happens to storages in one turn of a rehearsed step, by save order.

    `victims` go one after the other while room is short in the turn; one whose copy out is under way is waited for.
    After the turn the copies out of `leaving` begin, `dropped` go to make room, and the copies back of `coming` begin.
    """

    victims: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with each saved storage of the next step, by the order of its first save."""

    actions: tuple[Action, ...]
    prefetch: dict[int, tuple[int, ...]]  # need position -> save orders whose copy back starts there
    next_needs: tuple[tuple[int, ...], ...]  # by save order: positions of its needs
    need_ns: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    forward_bytes: tuple[int, ...]  # of what is saved: resident after each save, as forecast
    peak_bytes: int
    replay_ns: int
    swap_bytes: int
    evictions: Mapping[int, tuple[tuple[int, Action], ...]] = field(default_factory=dict)  # after a need was served
    moves: Mapping[int, Moves] = field(default_factory=dict)  # by turn: a step rehearsed from end to end
    stall_ns: int = 0  # time a rehearsed step stands still for copies

    @property
    def rehearsed(self) -> bool:
        """Whether the plan is the moves of a rehearsal, in which what the program has let go of goes at once."""
        return bool(self.moves)

    @property
    def idle(self) -> bool:
        """Whether nothing at all is to be done."""
        return not self.evictions and not self.moves and all(action is Action.KEEP for action in self.actions)


def build_graph(log: StepLog, min_bytes: int, replay_ns: int = 0) -> StepGraph:
    """Renumber a log. Storages under `min_bytes` are counted but never evicted. `replay_ns`: what a replay takes beside
    the op's own time."""
    index = _node_numbers(log)
    positions = len(log.needs)
    first_need, release = [positions] * len(log.saves), [positions] * len(log.saves)
    for position, (saved, _) in reversed(list(enumerate(log.needs))):
        first_need[saved] = position
    for saved, before in log.releases:
        release[saved] = before
    needs = tuple(saved for saved, _ in log.needs)
    released = ((saved, turns) for (saved, _), turns in zip(log.releases, log.released_in, strict=False))
    return StepGraph(
        nodes=_nodes(log, index, min_bytes),
        ops=_renumbered(log.ops, index, replay_ns),
        saved=tuple(index[record] for record in log.saves),
        save_ns=tuple(log.save_ns),
        floats_to=_floats_to(log),
        needs=needs,
        need_ns=tuple(at_ns for _, at_ns in log.needs),
        first_need=tuple(first_need),
        release=tuple(release),
        end_ns=log.end_ns,
        forward_needs=log.forward_needs,
        needs_before=tuple(log.needs_before),
        turns=tuple(turns_of(log.turn_ends, needs, released, log.end_ns)),
    )


def _node_numbers(log: StepLog) -> dict[int, int]:
    """Records in the order in which they are met, and their numbers."""
    read_or_made = (record for op in log.ops for record in (*op.inputs, *op.outputs))
    return {record: number for number, record in enumerate(dict.fromkeys((*read_or_made, *log.saves)))}


def _nodes(log: StepLog, index: Mapping[int, int], min_bytes: int) -> tuple[Node, ...]:
    order = {record: number for number, record in enumerate(log.saves)}
    producer = {record: position for position, op in enumerate(log.ops) for record in op.outputs}
    return tuple(
        Node(
            log.nbytes[record] if log.kinds[record] is not Kind.PARAMETER else 0,
            order.get(record, -1),
            producer.get(record),
            log.kinds[record] is not Kind.ACTIVATION or (record not in order and record not in producer),
            log.kinds[record] is Kind.ACTIVATION
            and log.nbytes[record] >= min_bytes
            and order.get(record, -1) not in log.kept,
            *_encoding(log.encodings.get(record)),
        )
        for record in index
    )


def _renumbered(ops: Iterable[OpInfo], index: Mapping[int, int], replay_ns: int) -> tuple[OpInfo, ...]:
    return tuple(
        replace(
            op,
            id=position,
            cost_ns=op.cost_ns + replay_ns,
            inputs=tuple(index[record] for record in op.inputs),
            outputs=tuple(index[record] for record in op.outputs),
            overwrites=tuple(index[record] for record in op.overwrites),
        )
        for position, op in enumerate(ops)
    )


def _encoding(known: Encoding | None) -> tuple[int, int, int, bool]:
    known = known or Encoding(0, 0, 0)
    return known.nbytes, known.encode_ns, known.decode_ns, known.stand_in


def _floats_to(log: StepLog) -> tuple[int, ...]:
    """Until which save each storage would stay alive even if it were evicted.

    What was seen of it decides; else its last reader in forward, which has to end first. What an op saves of its
    results is saved when the op has been counted already: hence `right` of its position + 1.
    """
    last_reader: dict[int, int] = {}
    for position, op in enumerate(log.ops):
        for record in (*op.inputs, *op.outputs):
            last_reader[record] = position
    floats = []
    for order, record in enumerate(log.saves):
        read_to = bisect_right(log.ops_before, last_reader.get(record, -1) + 1) - 1
        floats.append(max(order, log.loose_at[order] - 1 if order in log.loose_at else read_to))
    return tuple(floats)
