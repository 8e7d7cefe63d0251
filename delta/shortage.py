"""What to say when the limit cannot be held."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from delta.record import Host, Record
from delta.types import Kind
from delta.units import format_bytes

_REMEDIES = "a larger budget, a smaller batch, or a policy that may evict more (director.actions, filter.min_bytes)"


@dataclass(frozen=True, slots=True)
class Shortage:
    """A moment at which the limit could not be held, and what was resident then, in words."""

    limit_bytes: int
    needed_bytes: int
    parts: str
    on: str = "saved activations"  # what the limit is for
    device_bytes: int | None = None  # the budget that was given, where it is one on the device ...
    beside_bytes: int = 0  # ... of which so much is in use for other things
    reserve_bytes: int = 0  # ... or kept free

    @property
    def over_bytes(self) -> int:
        return self.needed_bytes - self.limit_bytes

    def __str__(self) -> str:
        """Of a limit that is an error where it is not held."""
        return f"{self._budget} cannot be held: {self._why} Give {_REMEDIES}."

    def in_step(self, index: int) -> str:
        """Of one that was not held in a step."""
        return (
            f"{self._budget} was not held in step {index}: {self._why} What came for the first time may bring one step "
            f"over it; where `steps_over` of the report goes on to grow, give {_REMEDIES}."
        )

    @property
    def _budget(self) -> str:
        if self.device_bytes is not None:
            return f"the budget of {format_bytes(self.device_bytes)} for the device"
        return f"the budget of {format_bytes(self.limit_bytes)} for {self.on}"

    @property
    def _why(self) -> str:
        limit, left = format_bytes(self.limit_bytes), ""
        if self.device_bytes is not None:
            beside, reserve = format_bytes(self.beside_bytes), format_bytes(self.reserve_bytes)
            left = (
                f"{beside} are in use for other things, {reserve} are kept in reserve, which leaves {limit} for saved "
                "activations, of which "
            )
        return f"{left}{format_bytes(self.needed_bytes)} have to be resident at once, made up of {self.parts}."


def parts_of(
    records: Iterable[Record],
    coming_bytes: int,
    kept_bytes: int,
    min_bytes: int,
    evictable: Callable[[Record], bool],
    in_use: Callable[[Record], bool],
) -> str:
    """What is resident, by the reason why it has not gone; `coming_bytes` are not there yet, `kept_bytes` have no
    record. `in_use`: it is others than Delta that keep the storage there, as the op that is saving it."""
    parts = {"what the next op makes": coming_bytes}
    parts |= {"in use by the op at hand": 0, "inputs of the step": 0, "smaller than filter.min_bytes": 0}
    parts |= {"still used by the program": 0, "kept by the plan": kept_bytes, "on the way out or back": 0}
    parts |= {"about to go": 0, "not evictable under this policy": 0, "encoded forms": 0}
    for rec in records:
        parts["encoded forms"] += rec.encoded_bytes
        if not rec.counted:
            continue
        if rec.pins:
            parts["in use by the op at hand"] += rec.nbytes
        elif rec.kind is Kind.SOURCE:
            parts["inputs of the step"] += rec.nbytes
        elif rec.nbytes < min_bytes:
            parts["smaller than filter.min_bytes"] += rec.nbytes
        elif rec.host in (Host.LEAVING, Host.COMING):
            parts["on the way out or back"] += rec.nbytes
        elif not rec.held or in_use(rec):
            parts["still used by the program"] += rec.nbytes
        elif evictable(rec):
            parts["about to go"] += rec.nbytes
        else:
            parts["not evictable under this policy"] += rec.nbytes
    said = [f"{format_bytes(nbytes)} {name}" for name, nbytes in parts.items() if nbytes]
    return ", ".join(said) or "nothing that could be named"
