"""One run: a trace, a policy, a budget, a link and an allocator, played for three steps.

The first step is observed; the next ones run with what was learned, as on a real device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, cast

from delta.budget import Budget
from delta.config import Policy
from delta.engine import Engine
from delta.errors import BudgetError, PolicyError, TraceError
from delta.simulate.addresses import Addresses
from delta.simulate.allocator import Allocator, Caching, Ideal, Slab
from delta.simulate.checker import check
from delta.simulate.machine import Machine
from delta.simulate.player import Infeasible, Player, Thrash
from delta.simulate.stopwatch import Stopwatch
from delta.trace.events import Event, Evictable, Op, Save, Trace
from delta.trace.summary import summary
from delta.types import Action, Link
from delta.units import Bytes, Share, format_bytes

STEPS = 3
_AMPLE_BYTES = 1 << 62
NO_LINK = Link(1.0, 1.0)  # never used: without a link nothing is swapped


class Status(StrEnum):
    """How a run ended."""

    OK = "ok"
    INFEASIBLE = "infeasible"  # a storage did not fit, and nothing more could go
    THRASH = "thrash"  # replays took more time than the step itself


ALLOCATORS: dict[str, Callable[[int], Allocator]] = {"ideal": Ideal, "caching": Caching, "slab": Slab}


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it. `overhead` is the last step's time over the base time, `first_overhead` the first step's; both
    None where the step did not end. `peak_bytes` counts what the budget counts; `fragmentation` is the mean share of
    the device that was free when a storage had to go, None where the device has room for everything."""

    trace: str
    policy: str
    budget_bytes: int
    allocator: str
    base_ns: int
    total_ns: int | None
    overhead: float | None
    first_overhead: float | None
    status: Status
    peak_bytes: int
    swapped_bytes: int
    recomputed_ns: int
    stall_ns: int
    encoding_ns: int
    bookkeeping_ns: int
    fragmentation: float | None
    decisions: int
    decision_ns: int
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def unevicted_peak_bytes(trace: Trace) -> int:
    """What a share of a budget is a share of: all that exists, or all that is saved where only that may go."""
    found = summary(trace)
    return found.peak_bytes if trace.evictable is Evictable.ALL else found.saved_peak_bytes


def budget_bytes(trace: Trace, budget: Bytes | Share) -> int:
    """The budget in bytes. BudgetError where the step's constants and its largest op cannot fit into it."""
    nbytes = budget.nbytes if isinstance(budget, Bytes) else int(budget.fraction * unevicted_peak_bytes(trace))
    if trace.evictable is Evictable.ALL:
        largest = max((op for op in trace.events if isinstance(op, Op)), key=lambda op: sum(op.nbytes), default=None)
        floor_bytes = trace.constant_bytes + (sum(largest.nbytes) if largest is not None else 0)
        if nbytes < floor_bytes:
            raise BudgetError(
                f"a budget of {format_bytes(nbytes)} for trace {trace.name}: its constants and what its largest op "
                f"({largest.name if largest is not None else 'none'}) makes take {format_bytes(floor_bytes)}: give at "
                "least that much"
            )
    return nbytes


def base_ns(trace: Trace) -> int:
    """The time of all ops of a step. TraceError where they take none: nothing can be compared with that."""
    found = trace.base_ns
    if not found:
        raise TraceError(
            f"trace {trace.name}: its ops take no time, so there is nothing to compare with: give a trace with a "
            "cost_ns for its ops, as `deltactl trace` records it"
        )
    return found


def check_run(trace: Trace, policy: Policy, budget: Bytes | Share, link: Link | None, allocator: str) -> None:
    """Raises what `simulate` refuses, and plays nothing: BudgetError, PolicyError or TraceError."""
    base_ns(trace)
    budget_bytes(trace, budget)
    _fitting(policy, link)
    if policy.filter.choose == "window" and allocator == "ideal":
        raise PolicyError(
            f"policy {policy.name}: filter.choose=window evicts neighbours in memory, and the allocator `ideal` has no "
            "addresses. Give --allocator caching or slab, or --set filter.choose=one to evict one by one."
        )


def simulate(
    trace: Trace,
    policy: Policy,
    budget: Bytes | Share,
    link: Link | None = None,
    allocator: str = "ideal",
    clock: Callable[[], int] = lambda: 0,
    first: Trace | None = None,
) -> Run:
    """Play the trace. Without a link nothing is swapped. The schedule is checked (`checker`) before it is reported.

    `clock`: a real one in ns, by which `decision_ns` is taken. `first`: the same step as a training's first one, whose
    ops run cold and take several times as long; what is evicted in the observed step hangs on that.
    Raises BudgetError for a budget that cannot hold, PolicyError for a policy that needs another allocator, and
    TraceError where `first` is another step or no op takes time.
    """
    check_run(trace, policy, budget, link, allocator)
    if first is not None and _untimed(first) != _untimed(trace):
        raise TraceError(
            f"trace {first.name} as the first step of {trace.name}: it is another step, and may only differ in its "
            "times. Record both in one training, with steps= and the same shapes."
        )
    nbytes = budget_bytes(trace, budget)
    everything = trace.evictable is Evictable.ALL
    machine = Machine(ALLOCATORS[allocator](nbytes if everything else _AMPLE_BYTES), link)
    # Of what autograd saves a share is taken as it is: its bytes are known only when one step has been seen.
    limit = Budget(activations=Bytes(nbytes - trace.constant_bytes) if everything else budget)
    layout = _layout(policy, machine, everything)
    engine = Engine(_fitting(policy, link), limit, link or NO_LINK, announced=everything, layout=layout)
    # What a replay takes beside its op, as the player has it.
    engine.replays_take(trace.bookkeeping.op_ns + trace.bookkeeping.need_ns)
    watched = Stopwatch(engine, clock)
    player = Player(trace, cast(Engine, watched), machine)
    steps, status, why = _play(player, first)
    check(machine.log, machine.nbytes, machine.allocator.capacity_bytes, link)
    peak_bytes = machine.peak_bytes if everything else engine.totals.peak_bytes
    if status is Status.OK and not everything and peak_bytes > nbytes:
        status, why = Status.INFEASIBLE, f"{format_bytes(peak_bytes)} of saved tensors were resident at once"
    last = steps[-1] if status is Status.OK else None
    return Run(
        trace=trace.name,
        policy=policy.name,
        budget_bytes=nbytes,
        allocator=allocator,
        base_ns=trace.base_ns,
        total_ns=last.total_ns if last else None,
        overhead=last.total_ns / trace.base_ns if last else None,
        first_overhead=steps[0].total_ns / base_ns(first or trace) if steps else None,
        status=status,
        peak_bytes=peak_bytes,
        swapped_bytes=last.swapped_bytes if last else 0,
        recomputed_ns=last.recomputed_ns if last else 0,
        stall_ns=last.stall_ns if last else 0,
        encoding_ns=last.encoding_ns if last else 0,
        bookkeeping_ns=last.bookkeeping_ns if last else 0,
        fragmentation=_mean(player.fragmented) if everything else None,
        decisions=sum(engine.totals.evictions.values()),
        decision_ns=watched.spent_ns,
        why=why,
    )


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0


def _layout(policy: Policy, machine: Machine, bounded: bool) -> Addresses | None:
    """Where storages lie, if the policy asks."""
    if policy.filter.choose != "window":
        return None
    assert isinstance(machine.allocator, Caching | Slab)
    return Addresses(machine, machine.allocator, bounded)


@dataclass(frozen=True, slots=True)
class _Step:
    total_ns: int
    recomputed_ns: int
    stall_ns: int
    encoding_ns: int
    bookkeeping_ns: int
    swapped_bytes: int


def _untimed(trace: Trace) -> list[Event]:
    """What happens in a step, whatever it takes."""
    return [_instant(event) for event in trace.events]


def _instant(event: Event) -> Event:
    match event:
        case Op():
            return replace(event, cost_ns=0, again_ns=0)
        case Save():
            return replace(event, encode_ns=0, decode_ns=0)
    return event


def _play(player: Player, first: Trace | None) -> tuple[list[_Step], Status, str]:
    machine, steps = player.machine, list[_Step]()
    for timed in (first, *[None] * (STEPS - 1)):
        began_ns, stall_ns, moved_bytes = machine.now_ns, machine.stall_ns, machine.moved_out_bytes
        try:
            player.step(timed)
        except Infeasible as error:
            return steps, Status.INFEASIBLE, str(error)
        except Thrash:
            return steps, Status.THRASH, "replays took more time than the step itself"
        steps.append(
            _Step(
                machine.now_ns - began_ns,
                player.replay_ns,
                machine.stall_ns - stall_ns,
                player.encoding_ns,
                player.bookkeeping_ns,
                machine.moved_out_bytes - moved_bytes,
            )
        )
    return steps, Status.OK, ""


def _fitting(policy: Policy, link: Link | None) -> Policy:
    """The policy as far as the device goes: no swap without a link."""
    changes: dict[str, Any] = {}
    if link is None and Action.SWAP in policy.director.actions:
        actions = tuple(action for action in policy.director.actions if action is not Action.SWAP)
        if set(actions) <= {Action.KEEP}:
            raise BudgetError(f"policy {policy.name} can only swap, and there is no link: give one with --link")
        changes["director"] = policy.director.model_copy(update={"actions": actions})
    return policy.model_copy(update=changes)
