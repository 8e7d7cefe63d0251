"""One version of one storage, as the ledger knows it: `Ledger` alone changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from delta.types import Encoding, Kind


class LedgerError(AssertionError):
    """An illegal transition: a defect in Delta, never the user's fault."""


class Host(Enum):
    """State of a record's host copy."""

    NONE = "none"
    LEAVING = "leaving"  # copy out running; the device copy must stay
    WHOLE = "whole"
    COMING = "coming"  # copy back running; the host copy stays whole until it ends

    __hash__ = object.__hash__  # of one by its name is a call of Python's, several for each copy


@dataclass(slots=True)
class Record:
    """One version of one storage. `users` are the live ops that read it; `op` is the one that made it."""

    id: int
    nbytes: int
    kind: Kind
    op: int | None = None
    handles: int = 0
    alive: bool = True
    held: bool = False
    host: Host = Host.NONE
    pins: int = 0
    users: set[int] = field(default_factory=set)
    saved_at: int = -1  # order of its first save in this step; -1: never saved in it
    stretch: int = 0  # of forward and backward in which it was last saved (`step_ends.py`)
    used_ns: int = 0  # last access, for staleness
    encoding: Encoding | None = None  # the smaller form it can be kept in
    being_encoded: bool = False  # that form has been asked for; held until it is there
    encoded_bytes: int = 0  # of that form while it exists; never while the record is held
    accounted_bytes: int = 0  # of it in the totals

    @property
    def depended_on(self) -> bool:
        """Whether it matters what its bytes are: it is saved, there is a copy of them, or a recipe reads or makes it.
        Else the next version can go on as this record."""
        return self.handles > 0 or self.host is not Host.NONE or bool(self.users) or self.op is not None

    @property
    def counted(self) -> bool:
        """Whether its bytes count as resident activations."""
        return self.alive and self.kind is not Kind.PARAMETER and (self.handles > 0 or self.held)

    @property
    def resident_bytes(self) -> int:
        """What it adds to the resident activations: its device copy, and its encoded form."""
        return self.nbytes + self.encoded_bytes if self.counted else self.encoded_bytes

    @property
    def available(self) -> bool:
        """Whether Delta can have its bytes without replaying anything."""
        return self.held or self.host is not Host.NONE or (self.encoded_bytes > 0 and not self.stood_in_for)

    @property
    def missing(self) -> bool:
        """Whether its bytes are nowhere: a replay has to make them."""
        return not self.available and not self.alive

    @property
    def stood_in_for(self) -> bool:
        """Whether its encoded form is there and is not its value."""
        return self.encoded_bytes > 0 and self.encoding is not None and self.encoding.stand_in

    @property
    def is_root(self) -> bool:
        """Whether a replay starts from it and never makes it: a parameter that is there."""
        return self.kind is Kind.PARAMETER and self.alive
