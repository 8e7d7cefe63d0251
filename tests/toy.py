"""A runtime without tensors: carries out the engine's instructions on sets of numbers, and checks the ledger each time.

What the program itself still uses is in `program`; a storage that neither the program nor Delta holds dies at once and
the engine is told so. Copies end when they are waited for, or when `copy_ends` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from builders import a_policy, an_op

from delta.budget import Budget
from delta.engine import Engine
from delta.layout import Layout
from delta.record import Host
from delta.types import (
    AwaitIn,
    AwaitOut,
    Decode,
    Drop,
    Encode,
    Encoding,
    Forget,
    FreeHost,
    Hold,
    Instruction,
    Kind,
    Link,
    OpInfo,
    Preserve,
    Release,
    SwapIn,
    SwapOut,
)
from delta.units import Bytes

LINK = Link(1e9, 1e9)  # one byte a ns


class Toy:
    """`toy.save(...)` and the like return the instructions of the event and of all that followed from it, in order."""

    def __init__(
        self,
        limit: Any,
        actions: Iterable[str] = ("keep", "swap", "recompute"),
        link: Link = LINK,
        layout: Layout | None = None,
        announced: bool = False,
        sees_peaks: bool = True,
        **sections: Any,
    ) -> None:
        budget = limit if isinstance(limit, Budget) else Budget(activations=Bytes(limit))
        policy = a_policy(**{"director": {"actions": list(actions)}} | sections)
        self.engine = Engine(policy, budget, link, announced, layout, sees_peaks=sees_peaks)
        self.engine.recording(True)
        self.now = 0
        self.program: set[int] = set()
        self.mine: set[int] = set()  # storages Delta holds
        self.encoded: set[int] = set()  # encoded forms
        self.unfit: set[int] = set()  # storages whose bytes have no encoded form, as turns out
        self.leaving: list[int] = []
        self.coming: list[int] = []
        self.replayed: list[int] = []  # first output of each replayed op
        self.host_room_left = True
        self.slow = False  # copies out are not waited for, whatever the engine says
        self._ops = 100
        self._said: list[Instruction] = []

    # -- the program --------------------------------------------------------------------------------------------------
    def source(self, record: int, nbytes: int, kind: Kind = Kind.SOURCE) -> None:
        """Something the caller made and holds."""
        self.program.add(record)
        self.engine.created(record, nbytes, kind, self.now)

    def op(self, made: int, nbytes: int, read: Iterable[int] = (), cost_ns: int = 10, **more: Any) -> OpInfo:
        """An op made a record out of others, and the program holds the result."""
        self.source(made, nbytes, Kind.ACTIVATION)
        return self.wrote([made], read, cost_ns=cost_ns, **more)

    def wrote(self, made: Iterable[int], read: Iterable[int], **more: Any) -> OpInfo:
        self._ops += 1
        op = an_op(self._ops, tuple(read), tuple(made), **more)
        self._do(self.engine.op_ran(op, self.now))
        return op

    def save(self, record: int, at: int, encoding: Encoding | None = None) -> list[Instruction]:
        self.now = at
        if encoding is not None:
            self.engine.encodable(record, encoding)
        return self._do(self.engine.saved(record, record, at))

    def let_go(self, *records: int) -> list[Instruction]:
        """The program uses these no more."""
        self.program -= set(records)
        for record in records:
            if record in self.mine:
                self.engine.loose(record)
        return self._do([]) + [i for record in records for i in self._died(record)]

    def need(self, record: int, at: int, maker_asks: bool = False) -> list[Instruction]:
        """Backward asks for a record: all of `need`, replays included, up to `served` and the prefetch after it.
        `maker_asks`: a stand-in is enough."""
        self.now = at
        done = self._do(self.engine.need(record, at, in_backward=True))
        now = self.engine.ledger.resolve(record)
        stood_in = maker_asks and now in self.encoded
        if stood_in:
            done += self._do(self.engine.allocating(self.engine.ledger[now].nbytes, at))
            self.engine.stood_in(now)
        elif not self.engine.ledger[now].held and self.engine.ledger[now].kind is not Kind.PARAMETER:
            walk = self.engine.replays.descend(record, at)
            while (op := walk.next(at)) is not None:
                done += self._replay(op)
            done += self._do(self.engine.replays.end_descent())
        if now in self.coming:
            done += self.copy_ends(now)
        assert stood_in or now in self.mine | self.program, f"record {now} was not brought back"
        done += self._do(self.engine.served(record))
        return done + self._do(self.engine.prefetch(at))

    def unsave(self, record: int) -> list[Instruction]:
        return self._do(self.engine.unsaved(record, self.now))

    def use(self, record: int, at: int, maker_asks: bool = False) -> list[Instruction]:
        """Needed, and done with."""
        return self.need(record, at, maker_asks) + self.unsave(record)

    def forward_again(self, at: int) -> list[Instruction]:
        """Something is made or saved outside of backward."""
        self.now = at
        return self._do(self.engine.forward_again(at)) if self.engine.step_ends.needed else []

    def copy_ends(self, record: int) -> list[Instruction]:
        """A copy out or back has ended."""
        if record in self.leaving:
            self.leaving.remove(record)
            return self._do(self.engine.transfers.copied_out(record))
        self.coming.remove(record)
        return self._do(self.engine.transfers.copied_in(record))

    def overwrite(self, old: int, new: int, read: Iterable[int], nbytes: int) -> list[Instruction]:
        """An op that reads `read` writes into the storage of `old`, which holds the version `new` from then on."""
        before = self.engine.before_overwrite(old)
        done = self._do(before)
        self.source(new, nbytes, Kind.ACTIVATION)
        preserved = any(isinstance(instruction, Preserve) for instruction in before)
        if not preserved:
            self.mine.discard(old)
        self.program.discard(old)
        done += self._do(self.engine.overwritten(old, new, preserved))
        self.wrote([new], read, overwrites=(old,))
        return done + self._do(self.engine.version_ended(old))

    # -- the machine --------------------------------------------------------------------------------------------------
    def _replay(self, op: OpInfo) -> list[Instruction]:
        done = self._do(self.engine.replays.before(op, self.now))
        for source in op.inputs:
            if source in self.coming:
                done += self.copy_ends(source)
        made, stolen = self.engine.replays.made_again(op), self.engine.replays.stealable(op)
        self.mine |= set(made)
        self.encoded -= set(made)
        self.mine -= stolen
        self.replayed.append(op.outputs[0])
        return done + self._do(self.engine.replays.replayed(op, made, stolen))

    def _do(self, instructions: Iterable[Instruction]) -> list[Instruction]:
        self.engine.ledger.validate()
        done: list[Instruction] = []
        for instruction in instructions:
            done.append(instruction)
            done += self._carry_out(instruction)
        return done

    def _carry_out(self, instruction: Instruction) -> list[Instruction]:
        match instruction:
            case Hold(record):
                assert record in self.program | self.mine
                self.mine.add(record)
                self.encoded.discard(record)
            case Drop(record, _) | Release(record):
                self.mine.discard(record)
                self.encoded.discard(record)
                return self._died(record)
            case Encode(record):
                assert record in self.mine
                if record in self.unfit:
                    return self._do(self.engine.encode_failed(record, self.now))
                encoding = self.engine.ledger[record].encoding
                assert encoding is not None
                self.engine.encoded(record, encoding.nbytes)
                self.encoded.add(record)
                self.mine.discard(record)
                return self._died(record)
            case Decode(record):
                self.encoded.remove(record)
                self.mine.add(record)
            case SwapOut(record, wait):
                assert record in self.mine
                if not self.host_room_left:
                    return self._do(self.engine.transfers.copy_out_failed(record, host_full=True))
                self.leaving.append(record)
                return self.copy_ends(record) if wait and not self.slow else []
            case SwapIn(record):
                assert self.engine.ledger[record].host is Host.COMING
                self.coming.append(record)
                self.mine.add(record)
            case AwaitOut(record):
                return self.copy_ends(record) if record in self.leaving else []
            case AwaitIn(record):
                return self.copy_ends(record) if record in self.coming else []
            case Preserve(record):
                self.mine.add(record)
                self.encoded.discard(record)
            case FreeHost(record):
                pass
            case Forget(record):
                assert record not in self.mine
                self.encoded.discard(record)
        return []

    def _died(self, record: int) -> list[Instruction]:
        if record in self.program | self.mine:
            return []
        return self._do(self.engine.storage_gone(record))
