"""Ops, ledgers and step logs in few words, for tests of the pure part."""

from collections.abc import Iterable, Sequence
from typing import Any

from delta.config import Policy
from delta.ledger import Ledger
from delta.planner import StepLog
from delta.types import Kind, OpInfo


def an_op(number: int, inputs: Sequence[int], outputs: Sequence[int], **more: Any) -> OpInfo:
    """An op that can be replayed in 1 ns, unless told otherwise."""
    facts = {"name": "aten.f", "cost_ns": 1, "replayable": True} | more
    return OpInfo(id=number, inputs=tuple(inputs), outputs=tuple(outputs), **facts)


def a_ledger(nbytes: Sequence[int], ops: Iterable[OpInfo] = (), kinds: dict[int, Kind] | None = None) -> Ledger:
    """Records 0, 1, ... of these sizes, made by these ops."""
    ledger = Ledger()
    for record, size in enumerate(nbytes):
        ledger.create(record, size, (kinds or {}).get(record, Kind.ACTIVATION))
    for op in ops:
        ledger.add_op(op)
    return ledger


def a_chain(nbytes: Sequence[int], **more: Any) -> Ledger:
    """Record 0 is a source; op 100 + i makes record i + 1 out of record i."""
    ops = [an_op(100 + i, [i], [i + 1], **more) for i in range(len(nbytes) - 1)]
    return a_ledger(nbytes, ops, {0: Kind.SOURCE})


def a_policy(**sections: dict[str, Any]) -> Policy:
    """Policy `delta` with `min_bytes` 0, and these sections on top: `a_policy(budget={"strict": True})`."""
    return Policy.model_validate({"name": "test", "filter": {"min_bytes": 0}} | sections)


def a_log(
    ops: Sequence[OpInfo],
    nbytes: dict[int, int],
    saves: Sequence[tuple[int, int, int]],
    needs: Sequence[tuple[int, int]],
    releases: Sequence[tuple[int, int]],
    end_ns: int,
    kinds: dict[int, Kind] | None = None,
) -> StepLog:
    """A step. `saves`: record, time, ops run before it; `needs`: save order, time; `releases`: order, needs before."""
    return StepLog(
        ops=list(ops),
        saves=[record for record, _, _ in saves],
        save_ns=[at_ns for _, at_ns, _ in saves],
        ops_before=[before for _, _, before in saves],
        signatures=[record for record, _, _ in saves],
        needs=list(needs),
        releases=list(releases),
        nbytes=nbytes,
        kinds={record: Kind.ACTIVATION for record in nbytes} | (kinds or {}),
        end_ns=end_ns,
    )
