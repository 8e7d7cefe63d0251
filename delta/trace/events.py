"""What happens in a training step, as instructions over storages: the common form of every trace.

A trace numbers its storages: one number is one version of one storage, as a record of the ledger is. Views have no
number of their own. A write in place makes a new number; the old one is freed when nothing refers to it.

What may be evicted is a property of the trace: in Delta's own traces what autograd saved (`Save` to `Unsave`), and
backward asks for it with `Need`; in a log of DTR every storage the program refers to, and an op that reads it needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from delta.types import Link


class Evictable(StrEnum):
    """Which storages of a trace may be evicted."""

    ALL = "all"  # everything the program made, whenever no op is using it
    SAVED = "saved"  # what autograd saved


@dataclass(frozen=True, slots=True)
class Constant:
    """A storage that is there before the step and stays: a parameter, a buffer, an input.

    It counts from where it stands in the trace. `Save` on one: autograd saved an input; parameters are never saved.
    """

    storage: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One op ran. `outputs` are new storages, `nbytes` their sizes; an op that only makes views has none.

    `overwrites`: inputs whose storage the op wrote in place, so that it holds the output now and a replay works on a
    copy. `overwrites[i]` became `outputs[i]`: no bytes are added, the old number is gone without a `Free`, and its
    handles count for the new one, as autograd's follow the storage. `workspace_bytes`: what the op needs besides,
    while it runs. `again_ns`: how long a replay takes where that is not `cost_ns`; 0 where it is.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nbytes: tuple[int, ...]
    cost_ns: int
    replayable: bool = True
    overwrites: tuple[int, ...] = ()
    workspace_bytes: int = 0
    again_ns: int = 0

    @property
    def replay_ns(self) -> int:
        """How long a replay takes."""
        return self.again_ns or self.cost_ns


@dataclass(frozen=True, slots=True)
class Save:
    """Autograd saved a tensor on the storage: one more handle.

    `encoded_bytes`: what the storage takes in its encoded form; 0 where it has none. The times are those of making the
    form and of decoding it.
    """

    storage: int
    encoded_bytes: int = 0
    encode_ns: int = 0
    decode_ns: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """Backward asks for a saved storage."""

    storage: int


@dataclass(frozen=True, slots=True)
class Unsave:
    """A handle died."""

    storage: int


@dataclass(frozen=True, slots=True)
class Free:
    """The program's last reference is gone, at most once for a storage; one with handles exists until they die too."""

    storage: int


@dataclass(frozen=True, slots=True)
class Result:
    """The program still refers to the storage when the step ends: it has to be resident then."""

    storage: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward begins."""


Event = Constant | Op | Save | Need | Unsave | Free | Result | Backward


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """What Delta's own work beside the step took on average for an event, in ns for which compute stood still.

    An op that gets a recipe, one that the recorder lets pass, a saved tensor, one that backward asks for, and a handle
    that dies. All 0 where it is not known, or where the host works ahead of the device.
    """

    op_ns: int = 0
    passed_ns: int = 0
    save_ns: int = 0
    need_ns: int = 0
    release_ns: int = 0


FREE = Bookkeeping()


@dataclass(frozen=True, slots=True)
class Trace:
    """One step. `link` is the measured way to the host tier, where one was measured."""

    name: str
    evictable: Evictable
    events: tuple[Event, ...]
    device: str = ""
    link: Link | None = None
    facts: dict[str, str] = field(default_factory=dict)  # versions, model, whatever the recorder noted
    bookkeeping: Bookkeeping = FREE

    @property
    def base_ns(self) -> int:
        """Time of all ops, nothing evicted."""
        return sum(event.cost_ns for event in self.events if isinstance(event, Op))

    @property
    def constant_bytes(self) -> int:
        return sum(event.nbytes for event in self.events if isinstance(event, Constant))
