"""What is written down of the step under way: what it saves, needs and releases, and the ops between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from delta.planner.steplog import StepLog
from delta.types import Encoding, Kind, OpInfo

LONGEST = 100_000  # saved tensors in a step that is still followed; something keeps a longer one from ever ending
MOST_OPS = 3 * LONGEST  # ops of a step that is still followed, or between two steps


@dataclass(slots=True, kw_only=True)
class Underway:
    """Writes down one step at a time."""

    log: StepLog = field(default_factory=StepLog)
    packs: int = 0
    recorded: bool = False  # the recorder was on from this step's first op
    began_ns: int | None = None
    standing_bytes: int = 0  # resident when the step began: left over from another
    given_up: bool = False  # this step is too long to be learned from
    late: set[int] = field(default_factory=set)  # save orders that backward waited for in this step
    _left_midway: bool = False  # some of its calls are not in the log

    @property
    def position(self) -> int:
        """Number of needs so far."""
        return len(self.log.needs)

    @property
    def turn(self) -> int:
        """Number of turns that have ended."""
        return len(self.log.turn_ends)

    @property
    def in_step(self) -> bool:
        return self.began_ns is not None

    def placed(self, order: int) -> None:
        """The tensor packed last is on the storage of this save order."""
        if not self.given_up:
            self.log.orders.append(order)

    def called(self, call: object, made: bool) -> None:
        """An op of forward ran that `call` stands for; `made`: the last one told of by `op`."""
        if self.given_up:
            return
        self.log.calls.append((call, len(self.log.ops) - 1 if made else -1))
        if self.too_many(len(self.log.calls)):
            self.forget()

    @staticmethod
    def too_many(ops: int) -> bool:
        """Whether so many ops are more than are followed."""
        return ops >= MOST_OPS

    def forget(self) -> None:
        """Forget the ops so far, or the log would grow for as long as the program runs. A step under way is followed no
        further; the next one is not taken for recorded whole."""
        if self.in_step:
            self._give_up()
        else:
            self.log, self._left_midway = StepLog(), True

    def op(self, op: OpInfo, nbytes: Mapping[int, int], kinds: Mapping[int, Kind]) -> None:
        if self.given_up:
            return
        self.log.ops.append(op)
        self.log.nbytes.update(nbytes)
        self.log.kinds.update(kinds)

    def time_op(self, op: int, cost_ns: int) -> None:
        """The device has told how long an op took, after the fact."""
        ops = self.log.ops
        position = bisect_left(ops, op, key=lambda known: known.id)
        if position < len(ops) and ops[position].id == op:
            ops[position] = replace(ops[position], cost_ns=cost_ns)

    def saved(self, record: int, nbytes: int, kind: Kind, now_ns: int) -> None:
        """First save of a record in this step."""
        if self.given_up:
            return
        log = self.log
        log.saves.append(record)
        log.save_ns.append(now_ns - (self.began_ns or 0))
        log.ops_before.append(len(log.ops))
        log.needs_before.append(len(log.needs))
        log.nbytes[record] = nbytes
        log.kinds[record] = kind

    def encodable(self, record: int, encoding: Encoding) -> None:
        """A record just saved can be kept in a smaller form."""
        if not self.given_up:
            self.log.encodings[record] = encoding

    def not_encodable(self, record: int) -> None:
        """It could not after all."""
        self.log.encodings.pop(record, None)

    def loose(self, order: int) -> None:
        """The program holds the storage no longer: only Delta, or nobody, does."""
        if not self.log.needs and not self.given_up:
            self.log.loose_at.setdefault(order, len(self.log.saves))

    def still_used(self, orders: set[int]) -> None:
        """Before a need: the program or backward uses the storages of these save orders."""
        log = self.log
        log.kept = orders if not log.needs else log.kept & orders

    def asked(self, order: int = -1) -> None:
        """Somebody asks for a saved storage that always stays; `order`: its save order, where that may be learned."""
        log = self.log
        log.asked = True
        if self.recorded and order >= 0 and not self.given_up:
            log.asked_small.append((order, len(log.needs), len(log.saves)))

    def needed(self, order: int, now_ns: int) -> None:
        """Somebody asks for one that may have gone."""
        log = self.log
        log.asked = True
        if not self.given_up:
            log.needs.append((order, now_ns - (self.began_ns or 0)))

    def backward_began(self) -> None:
        self.log.forward_needs = len(self.log.needs)

    def released(self, order: int) -> None:
        if self.given_up:
            return
        self.log.releases.append((order, len(self.log.needs)))
        self.log.small_before.append(len(self.log.asked_small))
        self.log.released_in.append(len(self.log.turn_ends))

    def turn_ended(self, now_ns: int) -> None:
        """What an op of the program needed has been served, and the op has run."""
        if not self.given_up:
            self.log.turn_ends.append((len(self.log.needs), len(self.log.ops), now_ns - (self.began_ns or 0)))

    def lose_track(self) -> None:
        """Some of what this step has saved is not known."""
        self._give_up()

    def _give_up(self) -> None:
        """Follow this step no further: its log would grow for as long as the program runs."""
        self.log, self.given_up = StepLog(), True

    def _reset(self) -> None:
        self.log = StepLog()
        self.packs = 0
        self.began_ns = None
        self.given_up = self._left_midway = False
        self.late.clear()
