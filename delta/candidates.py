"""Who may go, and who goes first: filter, director and costs put together.

`Candidates` answers with records and the action the director takes for each; it changes nothing. `Room` lets them go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from delta.config import Policy
from delta.costs import Costs, LinkQueue
from delta.director import Choice, Director, Prospect
from delta.filter import COSTLESS, LINES, SCORES, Candidate, Rested, Victims
from delta.filter.neighbours import cheapest_neighbours
from delta.layout import Area
from delta.learner import Learner
from delta.ledger import Ledger
from delta.nextuse import NextUse
from delta.record import Host, Record
from delta.types import Action, Cost, Encoding, Kind, OpInfo, leaves_recipe_only

PRICES = 1 << 40  # of a score of 1: prices of neighbours are summed, and sums are exact in whole numbers

Going = tuple[Choice, Record]
"""A record that goes, and how."""


class Candidates:
    """The records that may be evicted under `policy`."""

    def __init__(self, policy: Policy, ledger: Ledger, queue: LinkQueue, learner: Learner) -> None:
        self._policy, self._ledger, self._queue = policy, ledger, queue
        self._costs = Costs(ledger)
        self._learner, self._next_use = learner, NextUse(learner)
        self._score, self._cost = SCORES[policy.filter.score], policy.filter.cost
        self._classes = self._cost in (Cost.CLASSES, Cost.MAKERS)
        self._least_bytes = max(1, policy.filter.min_bytes)  # what has no bytes frees none
        self.director = Director(policy.director.actions, policy.rules, policy.filter.score != "delta-paper")
        self.encodes = Action.ENCODE in policy.director.actions
        self._replay_limit_bytes: float = inf
        self.makers: dict[int, tuple[str, str]] = {}  # record -> (op, module) that made it
        self._host_full = False
        self._stuck: set[int] = set()  # cannot be replayed after all
        self._passed: set[int] = set()  # would free nothing now
        self._used: set[int] = set()  # ... nor would these, while backward or the program uses them
        self._staying: frozenset[int] = frozenset()  # ... nor what is saved at these places
        self._rested: Rested | None = None
        self._victims = self._ranked()

    def new_step(self) -> None:
        """Forget what is only true within one step."""
        self._costs.clear()
        self.makers.clear()
        self._used.clear()
        self._look_anew()

    @property
    def host_full(self) -> bool:
        """The host tier can take nothing more."""
        return self._host_full

    @host_full.setter
    def host_full(self, full: bool) -> None:
        changed, self._host_full = full is not self._host_full, full
        if changed:
            self._look_anew()

    def limit_replays(self, limit_bytes: int | None) -> None:
        """What one op of a replay may read and make, where a copy is possible."""
        before, now = self._replay_limit_bytes, inf if limit_bytes is None else limit_bytes
        self._replay_limit_bytes = now
        if self._ledger.has_ops_between(min(before, now), max(before, now)):
            self._look_anew()

    def _look_anew(self) -> None:
        """Whatever is known of who goes first may be wrong."""
        for known in (self._victims, self._rested):
            if known is not None:
                known.clear()

    def may_go(self, rec: Record) -> bool:
        return (
            rec.held
            and not rec.pins
            and rec.id not in self._passed
            and rec.id not in self._used
            and rec.saved_at not in self._staying
            and rec.kind is Kind.ACTIVATION
            and not rec.being_encoded
            and rec.host in (Host.NONE, Host.WHOLE)
            and rec.nbytes >= self._least_bytes
        )

    def evictable(self, rec: Record) -> bool:
        """Whether the record could go now, under this policy."""
        return bool(self._possible(rec))

    def in_use(self, rec: Record) -> bool:
        """Whether a replay reads the record now, or others than Delta use its storage."""
        return rec.pins > 0 or rec.id in self._used or rec.saved_at in self._staying

    def allows(self, action: Action) -> bool:
        """Whether the policy has the action at all."""
        return action in self._policy.director.actions

    def drops(self, rec: Record, action: Action) -> bool:
        """Whether nothing but its recipe would be left of the record's value."""
        return leaves_recipe_only(action, rec.encoding is not None and rec.encoding.stand_in)

    def first(self, now_ns: int, room_bytes: float, short: bool) -> Going | None:
        """What goes next, encoded only if there is room for the encoded form. Where it is `short` of room and nothing
        else can go, without that: being over the limit for a moment is better than staying there."""
        found = self._best(now_ns, room_bytes)
        return self._best(now_ns, inf) if found is None and short and self.encodes else found

    def together(self, areas: Sequence[Area], now_ns: int) -> list[Going]:
        """The neighbours that are cheapest to evict together, of the areas; empty if there are none."""
        prices: dict[int, int | None] = {}
        choices: dict[int, Choice] = {}

        def price(record: int) -> int | None:
            if record not in prices:
                rec = self._ledger.records.get(record)
                judged = self._judge(rec, now_ns, 0) if rec is not None else None
                prices[record] = None
                if judged is not None:
                    prices[record], choices[record] = int(judged[0] * PRICES), judged[1]
            return prices[record]

        records = cheapest_neighbours(areas, price)
        return [(choices[record], self._ledger[record]) for record in records or ()]

    def stuck(self, rec: Record) -> None:
        """The record cannot be replayed after all: it is no candidate until `unstuck`."""
        self._stuck.add(rec.id)
        self._ledger.touched.add(rec.id)

    def pass_over(self, records: Iterable[Record]) -> None:
        """These are no candidates until `unstuck`."""
        passed = {rec.id for rec in records}
        self._passed |= passed
        self._ledger.touched |= passed

    def unstuck(self) -> None:
        """All are candidates again that were not for a moment."""
        self._ledger.touched |= self._stuck | self._passed
        self._stuck.clear()
        self._passed.clear()

    def still_used(self, records: Iterable[int]) -> None:
        """Others than Delta use the storages of these, and of no other records: letting go would free nothing."""
        used = set(records)
        self._ledger.touched |= used ^ self._used
        self._used = used

    def given(self, record: int) -> None:
        """Backward uses the storage of this one, too."""
        self._used.add(record)
        self._ledger.touched.add(record)

    def stay(self, orders: frozenset[int]) -> None:
        """What is saved in these places, and in no others, will still be used by the program when it is needed."""
        if orders != self._staying:
            self._staying = orders
            self._look_anew()

    def made_by(self, op: OpInfo) -> None:
        """An op has made records, whose rules go by its name and module."""
        for output in op.outputs:
            self.makers[output] = (op.name, op.module)

    def went_missing(self, rec: Record) -> None:
        """The record's bytes are gone."""
        if self._classes:
            self._costs.went_missing(rec, of_makers=self._cost is Cost.MAKERS)

    def back(self, rec: Record) -> None:
        """The record is available again."""
        if self._classes:
            self._costs.back(rec)

    def _ranked(self) -> Victims | None:
        """The ranking, where what an eviction costs is settled by what the ledger tells. What a hidden swap costs is
        not: replays alone are ranked, and those who rested longest stand for the swaps."""
        score, actions = self._policy.filter.score, set(self._policy.director.actions)
        if score not in LINES or actions - {Action.KEEP, Action.SWAP, Action.RECOMPUTE}:
            return None
        hidden_swaps = self.director.hidden_swap and Action.SWAP in actions and self._cost is Cost.ACTION
        if hidden_swaps and score not in COSTLESS:
            self._rested = Rested(self._ledger, self._may_be_swapped, self._next_use)
        return Victims(score, self._ledger, self._price_ns, self._next_use if score == "delta" else None)

    def _best(self, now_ns: int, room_bytes: float) -> Going | None:
        """The filter's first choice among all that may go; among equals the one used last."""
        if self._victims is None:
            return self._first_of(self._ledger.held, now_ns, room_bytes)
        self._costs.settle()
        if self._rested is not None:
            if self._next_use.plan is not None and self._policy.filter.score != "delta":
                return self._first_of(self._ledger.held, now_ns, room_bytes)  # rests by the clock, swaps by the plan
            held, finalists = self._ledger.held, set(self._rested.first())
            if (replayed := self._victims.first(now_ns)) is not None:
                finalists.add(replayed.id)
            return self._first_of(sorted(finalists, key=held.__getitem__), now_ns, room_bytes)
        rec = self._victims.first(now_ns)
        if rec is None:
            return None
        if Action.SWAP not in self._policy.director.actions:  # nothing to choose from: no need to walk the chain
            return Choice(Action.RECOMPUTE, self._costs.of(Cost.OWN, rec.id)), rec
        choice = self._choice(rec, now_ns, room_bytes)
        return (choice, rec) if choice is not None else None

    def _first_of(self, records: Iterable[int], now_ns: int, room_bytes: float) -> Going | None:
        """The filter's first choice among `records`, which are in the order of their last uses."""
        best_score, best = inf, None
        for record in records:
            rec = self._ledger[record]
            judged = self._judge(rec, now_ns, room_bytes)
            if judged is not None and judged[0] <= best_score:
                best_score, best = judged[0], (judged[1], rec)
        return best

    def _judge(self, rec: Record, now_ns: int, room_bytes: float) -> tuple[float, Choice] | None:
        """The score of a record and how it would go; None if it has to stay."""
        if not self.may_go(rec):
            return None
        choice = self._choice(rec, now_ns, room_bytes)
        if choice is None:
            return None
        cost_ns = choice.cost_ns if self._cost is Cost.ACTION else self._costs.of(self._cost, rec.id)
        freed_bytes, until_use_ns = rec.nbytes - choice.stays_bytes, self._next_use.until_ns(rec)
        idle_ns = max(0, now_ns - rec.used_ns)  # what a need brought back has been used since it began
        return self._score(Candidate(rec.id, freed_bytes, cost_ns, idle_ns, until_use_ns)), choice

    def _price_ns(self, rec: Record) -> int | None:
        """What the score counts as the cost of evicting a record, by a replay where swaps are hidden; None where it has
        to stay."""
        possible = self._possible(rec)
        if not possible or (self._rested is not None and Action.RECOMPUTE not in possible):
            return None
        if self._policy.filter.score in COSTLESS:
            return 0
        if self._cost is not Cost.ACTION:
            return self._costs.of(self._cost, rec.id)
        if self._rested is not None:
            return self._costs.chain_ns(rec.id)
        choice = self._choice(rec, rec.used_ns, 0)  # no action that is ranked costs more or less with time
        return choice.cost_ns if choice is not None else None

    def _may_be_swapped(self, rec: Record) -> bool:
        return Action.SWAP in self._possible(rec)

    def _possible(self, rec: Record) -> list[Action]:
        """The ways in which a record may go now."""
        if not self.may_go(rec):
            return []
        op_name, module = self.makers.get(rec.id, ("", ""))
        swappable = rec.host is Host.WHOLE or not self.host_full
        return self.director.possible(op_name, module, self._replayable(rec), swappable)

    def _replayable(self, rec: Record) -> bool:
        op = self._ledger.maker(rec)
        return op is not None and op.replayable and rec.id not in self._stuck and not self._copied_rather(rec)

    def _copied_rather(self, rec: Record) -> bool:
        """Whether there would be no room for its replay, and it can be copied instead."""
        limit = self._replay_limit_bytes
        if not self._ledger.has_ops_between(limit, inf) or Action.SWAP not in self._policy.director.actions:
            return False
        self._costs.chain_ns(rec.id)  # who has asked is judged again when an ancestor moves
        return (rec.host is Host.WHOLE or not self.host_full) and self._ledger.replay_bytes(rec.id) > limit

    def _choice(self, rec: Record, now_ns: int, room_bytes: float) -> Choice | None:
        """What the director would do with the record, encoded if its form takes no more than `room_bytes`."""
        return self.director.choose(self._prospect(rec, now_ns, room_bytes), self._queue)

    def _prospect(self, rec: Record, now_ns: int, room_bytes: float) -> Prospect:
        op_name, module = self.makers.get(rec.id, ("", ""))
        chain_ns = None
        if Action.RECOMPUTE in self._policy.director.actions and self._replayable(rec):
            chain_ns = self._costs.chain_ns(rec.id)
        until_use_ns = self._next_use.until_ns(rec)
        ahead_ns = now_ns - rec.used_ns if until_use_ns is None else until_use_ns
        return Prospect(
            nbytes=rec.nbytes,
            op=op_name,
            module=module,
            chain_ns=chain_ns,
            host_whole=rec.host is Host.WHOLE,
            swappable=not self.host_full,
            now_ns=now_ns,
            next_use_ns=now_ns + ahead_ns,
            encoding=self._encoding(rec, room_bytes),
        )

    def _encoding(self, rec: Record, room_bytes: float) -> Encoding | None:
        """The form the record can be kept in now. A stand-in waits until the program has let go of the storage: nobody
        else can save it then."""
        encoding = rec.encoding
        if encoding is None or encoding.nbytes > room_bytes:
            return None
        if encoding.stand_in and not (self._replayable(rec) and rec.saved_at in self._learner.log.loose_at):
            return None
        return encoding
