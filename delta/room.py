"""Making room: what goes, how, and what to say when nothing can.

The filter ranks, the director picks the action, the ledger is changed, and the instructions say what the runtime has to
do. `Room` is the engine's part for everything that lowers what is resident; `recall.py` is the part that raises it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from delta.budget import Budget
from delta.config import Policy
from delta.costs import Ancestry, Chains, LinkQueue, eviction_cost_ns
from delta.director import Choice, Director, Prospect
from delta.errors import BudgetError
from delta.filter import SCORES, Candidate
from delta.learner import Learner
from delta.ledger import Host, Ledger, Record
from delta.planner import Plan
from delta.totals import Totals
from delta.types import Action, AwaitOut, Cost, Drop, Encode, Encoding, Hold, Instruction, Kind, SwapOut
from delta.units import format_bytes

NEVER_NS = 1 << 62  # until the next use of what is not used again


@dataclass(frozen=True, slots=True)
class Shortage:
    """A moment at which the limit could not be held, and what was resident then, in words."""

    limit_bytes: int
    needed_bytes: int
    parts: str

    @property
    def over_bytes(self) -> int:
        return self.needed_bytes - self.limit_bytes

    def __str__(self) -> str:
        return (
            f"the budget of {format_bytes(self.limit_bytes)} for saved activations cannot be held: "
            f"{format_bytes(self.needed_bytes)} have to be resident at once, made up of {self.parts}. "
            "Give a larger budget, a smaller batch, or a policy that may evict more (director.actions, "
            "filter.min_bytes)."
        )


class Room:
    """Keeps what is resident under the limit of `budget`."""

    def __init__(
        self, policy: Policy, budget: Budget, ledger: Ledger, queue: LinkQueue, learner: Learner, totals: Totals
    ) -> None:
        self._policy, self._budget, self._ledger = policy, budget, ledger
        self._queue, self._learner, self._totals = queue, learner, totals
        self._chains = Chains()
        self._ancestry = Ancestry(ledger)
        self._score, self._cost = SCORES[policy.filter.score], policy.filter.cost
        self._least_bytes = max(1, policy.filter.min_bytes)  # what has no bytes frees none
        self.director = Director(policy.director.actions, policy.rules, policy.filter.score != "delta-paper")
        self.makers: dict[int, tuple[str, str]] = {}  # record -> (op, module) that made it
        self.host_full = False
        self.encodes = Action.ENCODE in policy.director.actions
        self.evicted = False  # something was evicted in this step
        self._encoded_bytes = 0  # of the largest encoded form there may be in this step
        self.shortage: Shortage | None = None  # the worst of this step

    @property
    def limit_bytes(self) -> int | None:
        """Bytes of saved activations that may be resident now; None: as many as there are."""
        return self._budget.limit_bytes(max(self._ledger.peak_unevicted_bytes, self._learner.known_peak_bytes))

    def new_step(self) -> None:
        """Forget what is only true within one step."""
        self._chains.clear()
        self._ancestry.clear()
        self.makers.clear()
        self._encoded_bytes = 0
        self.evicted = False
        self.shortage = None

    def offer(self, rec: Record, encoding: Encoding) -> None:
        """The record may be kept in this form."""
        rec.encoding = encoding
        self._encoded_bytes = max(self._encoded_bytes, encoding.nbytes)

    @property
    def _spare_bytes(self) -> int:
        """What is kept free online: an encoded form takes room before its making gives any. A plan counts it."""
        plan = self._learner.plan
        return self._encoded_bytes if plan is None or plan.idle else 0

    def make_for_next(self, plan: Plan, order: int, now_ns: int) -> list[Instruction]:
        """Keep the next save under the limit too. The plan knows by how much it should raise what is resident, all
        told; copies out that are late by then are waited for as if nothing else would go."""
        if order + 1 >= len(plan.saved_bytes):
            return self.make(0, now_ns)
        limit = self.limit_bytes
        awaits: list[AwaitOut] = []
        if limit is not None:
            awaits, _ = self._await_out(self._ledger.resident_bytes + plan.saved_bytes[order + 1] - limit)
        rise = plan.forward_bytes[order + 1] - plan.forward_bytes[order]
        awaited = sum(self._ledger[instruction.record].nbytes for instruction in awaits)
        return [*awaits, *self.make(max(0, rise) - awaited, now_ns)]

    def _await_out(self, over_bytes: int) -> tuple[list[AwaitOut], int]:
        """Wait for copies out until that much less is resident; returns what is over still."""
        out: list[AwaitOut] = []
        if over_bytes <= 0 or not self._ledger.leaving_bytes:
            return out, over_bytes
        leaving = [rec for rec in self._ledger.records.values() if rec.host is Host.LEAVING]
        # What the program still uses would stay when its copy is whole: wait for the others first.
        leaving.sort(key=lambda rec: rec.saved_at not in self._learner.log.loose_at)
        for rec in leaving:
            if over_bytes > 0:
                over_bytes -= rec.nbytes
                out.append(AwaitOut(rec.id))
        return out, over_bytes

    def make(self, extra_bytes: int, now_ns: int, guess: bool = False) -> list[Instruction]:
        """Evict until `extra_bytes` more fit; with `guess` they may never come, and nobody is told."""
        limit = self.limit_bytes
        if limit is None:
            return []
        over = self._ledger.resident_bytes + extra_bytes - limit
        spare = self._spare_bytes
        if over + spare <= 0:
            return []
        if over > 0:
            self._learner.surprise()
        out: list[Instruction] = []
        awaited, over = self._await_out(over + spare)
        out += awaited
        if over > 0:
            out += self.evict(over, now_ns, extra_bytes, guess, spare)
        return out

    def evict(
        self, over_bytes: int, now_ns: int, coming_bytes: int = 0, guess: bool = False, spare_bytes: int = 0
    ) -> list[Instruction]:
        """Let go of `over_bytes`, of which `coming_bytes` are not there yet and `spare_bytes` need not be free."""
        out: list[Instruction] = []
        stuck: set[int] = set()  # cannot be replayed after all
        room_bytes = coming_bytes + spare_bytes - over_bytes  # free by now, if what was to go has gone
        while over_bytes > 0:
            victim = self._victim(stuck, now_ns, room_bytes, over_bytes > spare_bytes)
            if victim is None:
                break
            choice, rec = victim
            if choice.action is Action.RECOMPUTE and not self._ledger.recoverable(rec.id, grasp=True):
                stuck.add(rec.id)
                continue
            out += self.carry_out(rec, choice.action, now_ns, wait=True)
            over_bytes -= rec.nbytes - choice.stays_bytes
            room_bytes += rec.nbytes - choice.stays_bytes
        coming_bytes = max(0, coming_bytes)
        lenient_bytes = spare_bytes + (coming_bytes if guess else 0)
        if over_bytes > lenient_bytes:
            self._short(over_bytes - lenient_bytes, 0 if guess else coming_bytes)
        return out

    def _victim(self, stuck: set[int], now_ns: int, room_bytes: int, short: bool) -> tuple[Choice, Record] | None:
        """What goes next, encoded only if there is room for the encoded form. Where it is `short` of room and nothing
        else can go, without that: being over the limit for a moment is better than staying there."""
        found = self._best(stuck, now_ns, room_bytes)
        return self._best(stuck, now_ns, inf) if found is None and short and self.encodes else found

    def _best(self, stuck: set[int], now_ns: int, room_bytes: float) -> tuple[Choice, Record] | None:
        """The filter's first choice among all that may go; among equals the one used last."""
        best_score, best = inf, None
        for record in self._ledger.held:
            rec = self._ledger[record]
            if not self.may_go(rec):
                continue
            until_use_ns = self._until_use_ns(rec, now_ns)
            choice = self.director.choose(
                self._prospect(rec, record not in stuck, until_use_ns, now_ns, room_bytes), self._queue
            )
            if choice is None:
                continue
            cost_ns = choice.cost_ns
            if self._cost is not Cost.ACTION:
                cost_ns = eviction_cost_ns(self._cost, self._ledger, self._chains, self._ancestry, record)
            freed_bytes = rec.nbytes - choice.stays_bytes
            score = self._score(Candidate(record, freed_bytes, cost_ns, now_ns - rec.used_ns, until_use_ns))
            if score <= best_score:
                best_score, best = score, (choice, rec)
        return best

    def may_go(self, rec: Record) -> bool:
        return (
            rec.held
            and not rec.pins
            and rec.kind is Kind.ACTIVATION
            and not rec.being_encoded
            and rec.host in (Host.NONE, Host.WHOLE)
            and rec.nbytes >= self._least_bytes
        )

    def _prospect(
        self, rec: Record, replayable: bool, until_use_ns: int | None, now_ns: int, room_bytes: float
    ) -> Prospect:
        op_name, module = self.makers.get(rec.id, ("", ""))
        chain_ns = None
        op = self._ledger.ops.get(rec.op) if rec.op is not None else None
        if replayable and op is not None and op.replayable and Action.RECOMPUTE in self._policy.director.actions:
            chain_ns = self._ancestry.cost_ns(rec.id)
        ahead_ns = now_ns - rec.used_ns if until_use_ns is None else until_use_ns
        return Prospect(
            rec.nbytes,
            op_name,
            module,
            chain_ns,
            rec.host is Host.WHOLE,
            not self.host_full,
            now_ns,
            now_ns,
            now_ns + ahead_ns,
            rec.encoding if rec.encoding is not None and rec.encoding.nbytes <= room_bytes else None,
        )

    def _until_use_ns(self, rec: Record, now_ns: int) -> int | None:
        """Time to the next use where the step is known."""
        plan = self._learner.plan
        if plan is None or not 0 <= rec.saved_at < len(plan.next_needs):
            return None
        position, needs = self._learner.position, plan.next_needs[rec.saved_at]
        coming = bisect_left(needs, position)
        if coming == len(needs):
            return NEVER_NS
        here_ns = plan.need_ns[min(position, len(plan.need_ns) - 1)]
        return max(0, plan.need_ns[needs[coming]] - here_ns)

    def carry_out(self, rec: Record, action: Action, now_ns: int, wait: bool) -> list[Instruction]:
        self.evicted = True
        self._totals.evictions[action.value] = self._totals.evictions.get(action.value, 0) + 1
        if action is Action.SWAP and rec.host is Host.NONE:
            self._ledger.set_host(rec.id, Host.LEAVING)
            self._queue.begin_out(rec.nbytes, now_ns)
            return [SwapOut(rec.id, wait)]
        if action is Action.ENCODE:
            self._ledger.encode(rec.id)
            return [Encode(rec.id)]
        out: list[Instruction] = []
        if action is Action.RECOMPUTE:
            for anchor in self._ledger.anchors(rec.id):
                self._ledger.hold(anchor)
                out.append(Hold(anchor))
        self._ledger.let_go(rec.id)
        if action is Action.RECOMPUTE:
            self.missing(rec)
        return [*out, Drop(rec.id, action)]

    def follow(self, rec: Record, plan: Plan, now_ns: int) -> list[Instruction]:
        """Do with a freshly saved record what the plan says, as far as it can be done."""
        action = plan.actions[rec.saved_at] if rec.saved_at < len(plan.actions) else Action.KEEP
        return self._as_planned(rec, action, now_ns)

    def _as_planned(self, rec: Record, action: Action, now_ns: int) -> list[Instruction]:
        if action is Action.KEEP or not self.may_go(rec):
            return []
        if action is Action.RECOMPUTE and not self._ledger.recoverable(rec.id, grasp=True):
            return []
        if action is Action.SWAP and self.host_full:
            return []
        if action is Action.ENCODE and (rec.encoding is None or rec.host is not Host.NONE):
            return []
        return self.carry_out(rec, action, now_ns, wait=False)

    def let_go_after(self, here: range, by_order: Sequence[int], now_ns: int) -> list[Instruction]:
        """Do what the plan puts after the needs at the positions `here`, as far as it can be done."""
        plan = self._learner.plan
        if plan is None or not plan.evictions:
            return []
        out: list[Instruction] = []
        for position in here:
            for order, action in plan.evictions.get(position, ()):
                rec = self._ledger.records.get(by_order[order]) if order < len(by_order) else None
                if rec is not None:
                    out += self._as_planned(rec, action, now_ns)
        return out

    def _short(self, over_bytes: int, coming_bytes: int) -> None:
        """Nothing more can go and it still does not fit. What the program itself still uses may go by itself soon, so
        only the rest is an error at once; whether the budget was really missed is known when the step has ended."""
        limit = self.limit_bytes
        firm = not self._budget.is_share or self._learner.known_peak_bytes or self._learner.log.needs
        if limit is None or not firm:
            return
        floating_bytes = sum(rec.nbytes for rec in self._ledger.records.values() if rec.counted and not rec.held)
        shortage = Shortage(limit, limit + over_bytes, self._floor_parts(coming_bytes))
        if self._policy.budget.strict and over_bytes > floating_bytes:
            raise BudgetError(str(shortage))
        if self.shortage is None or shortage.over_bytes > self.shortage.over_bytes:
            self.shortage = shortage

    def _floor_parts(self, coming_bytes: int) -> str:
        parts = {"what the next op makes": coming_bytes}
        parts |= {"in use by the op at hand": 0, "inputs of the step": 0, "smaller than filter.min_bytes": 0}
        parts |= {"still used by the program": 0, "not evictable under this policy": 0, "encoded forms": 0}
        for rec in self._ledger.records.values():
            parts["encoded forms"] += rec.encoded_bytes
            if not rec.counted:
                continue
            if rec.pins:
                parts["in use by the op at hand"] += rec.nbytes
            elif rec.kind is Kind.SOURCE:
                parts["inputs of the step"] += rec.nbytes
            elif rec.nbytes < self._policy.filter.min_bytes:
                parts["smaller than filter.min_bytes"] += rec.nbytes
            elif not rec.held:
                parts["still used by the program"] += rec.nbytes
            else:
                parts["not evictable under this policy"] += rec.nbytes
        said = [f"{format_bytes(nbytes)} {name}" for name, nbytes in parts.items() if nbytes]
        return ", ".join(said) or "nothing that could be named"

    def missing(self, rec: Record) -> None:
        """Tell the chains that the record's bytes are gone, if somebody could still ask for them."""
        op = self._ledger.ops.get(rec.op) if rec.op is not None else None
        if op is None or rec.available or (not rec.handles and not rec.users):
            return
        neighbours = list(op.inputs)
        for user in rec.users:
            neighbours += self._ledger.ops[user].outputs
        self._chains.gone(rec.id, op.cost_ns, neighbours)

    def back(self, rec: Record) -> None:
        op = self._ledger.ops.get(rec.op) if rec.op is not None else None
        if op is not None:
            self._chains.back(rec.id, op.cost_ns)
