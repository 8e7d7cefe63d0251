"""The words every part of Delta shares: records, ops, actions, instructions.

Everything here is a plain value. A *record* stands for one version of one storage (rule 1 of the design: count and
move storages, not tensors); an *op* is one aten call that made records out of other records. Ids are integers, so the
same decisions run on a real device and in a simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """What becomes of a saved storage when room is needed."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"
    ENCODE = "encode"  # stays on the device in a smaller form that tells whoever may ask what the storage would


class Cost(StrEnum):
    """What a filter's score counts as the cost of evicting a record."""

    ACTION = "action"  # of the cheapest action, as the director counts it
    OWN = "own"  # of its op alone: h_DTR-local
    ANCESTORS = "ancestors"  # of its op and all missing ancestors: MSPS
    CLASSES = "classes"  # of its op and the union-find classes of its missing neighbours: h_DTR-eq
    MAKERS = "makers"  # of its op and the union-find classes of what that needs and also makes: Coop
    NEIGHBOURHOOD = "neighbourhood"  # of its op, all missing ancestors and all missing descendants: h_DTR with e*


class Leftover(StrEnum):
    """What becomes of a storage that no handle stands for but a recipe reads, or a replay made on its way."""

    HOLD = "hold"  # stays until room is needed
    DROP = "drop"  # goes at once, and is made again if it is asked for


class Kind(StrEnum):
    """Where a record's bytes come from, which decides whether they count and whether they may be evicted."""

    ACTIVATION = "activation"
    SOURCE = "source"  # seen first as an input: the caller made it and most likely still holds it
    PARAMETER = "parameter"  # parameters and buffers: never counted, never evicted


class Mode(StrEnum):
    """How a step is run (design, section 5)."""

    OBSERVE = "observe"
    IDLE = "idle"
    PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class Look:
    """How a saved tensor looks to policies for which sizes may differ: `structure` is equal where only they do."""

    structure: int = 0
    sizes: tuple[int, ...] = ()


ANY_LOOK = Look()


def leaves_recipe_only(action: Action, stand_in: bool) -> bool:
    """Whether nothing but its recipe is left of a storage's value. `stand_in`: its encoded form is not its value."""
    return action is Action.RECOMPUTE or (action is Action.ENCODE and stand_in)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """One recorded op. `inputs` and `outputs` are record ids; `cost_ns` is its own run time. `module`: the qualified
    name of the one it ran in, where that is known."""

    id: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost_ns: int
    replayable: bool
    overwrites: tuple[int, ...] = ()  # inputs whose storage the op writes in place: a replay works on a copy
    module: str = ""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A smaller form that a storage can be kept in: at most `nbytes`, and what it takes to make it and to decode it.

    It holds the same information, unless it is a `stand_in`: that answers nobody but the backward of the op that made
    the storage. For all others the storage is gone, and is made again by its recipe."""

    nbytes: int
    encode_ns: int
    decode_ns: int
    stand_in: bool = False

    @property
    def cost_ns(self) -> int:
        return self.encode_ns + self.decode_ns


@dataclass(frozen=True, slots=True)
class Link:
    """Measured speed of the way to the host tier, each direction on its own.

    `interference` is the share of a copy's time that is taken from compute: near 0 where copy engines do the work
    (CUDA), more where an I/O thread shares the cores with the ops (CPU). `copy_ns` is what each copy takes from compute
    whatever its size: where the host enqueues the work of a card, few large copies are better than many small ones.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    interference: float = 0.0
    copy_ns: float = 0.0

    def taken_ns(self, busy_ns: float, copies: int) -> float:
        """What so many copies, which keep the link busy for that long in all, take from compute."""
        return busy_ns * self.interference + copies * self.copy_ns

    def out_ns(self, nbytes: int) -> int:
        return int(nbytes * 1e9 / self.out_bytes_per_s)

    def in_ns(self, nbytes: int) -> int:
        return int(nbytes * 1e9 / self.in_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Hold:
    """Take a reference of Delta's own to the storage; an encoded form of it goes."""

    record: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of the device copy; the recipe, or the host copy that is whole already, brings it back."""

    record: int
    action: Action = Action.RECOMPUTE


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Begin the copy to the host; the device copy goes when it is complete. `wait`: its room is needed now."""

    record: int
    wait: bool = False


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Begin the copy back."""

    record: int


@dataclass(frozen=True, slots=True)
class AwaitOut:
    """The room of a running copy out is needed now: wait until it can be had, if it takes waiting."""

    record: int


@dataclass(frozen=True, slots=True)
class AwaitIn:
    """There is no room for a running copy back after all: wait for its end, at which it is let go of again."""

    record: int


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of the device copy, or of its encoded form: nothing needs it on the device any more."""

    record: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Make the encoded form, or the stand-in, then let go of the device copy. Both exist in between."""

    record: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Make the device copy again, then let go of the encoded form. Both exist in between."""

    record: int


@dataclass(frozen=True, slots=True)
class Preserve:
    """Clone the storage before an op overwrites it: a dropped record's recipe still reads this version."""

    record: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody can ask for the record any more: its host block and recipe go."""

    record: int


@dataclass(frozen=True, slots=True)
class FreeHost:
    """Nobody needs the copy on the host any more, though the program still has the storage: its host block goes."""

    record: int


Instruction = (
    Hold | Drop | SwapOut | SwapIn | AwaitOut | AwaitIn | Release | Encode | Decode | Preserve | Forget | FreeHost
)
