"""The figures of a step: for people, and to compare with what others computed."""

from __future__ import annotations

from dataclasses import dataclass

from delta.text import aligned
from delta.trace.events import Op, Save, Trace
from delta.trace.inventory import Inventory
from delta.units import format_bytes, format_ns


@dataclass(frozen=True, slots=True)
class Summary:
    """A step with nothing evicted. `peak_bytes` counts all that exists, constants too; `saved_peak_bytes` each storage
    that autograd saved, once (0 where the trace has no saves).
    """

    name: str
    device: str
    ops: int
    storages: int
    constant_bytes: int
    made_bytes: int  # by all ops
    saves: int
    base_ns: int
    peak_bytes: int
    saved_peak_bytes: int

    def __str__(self) -> str:
        rows = [
            ("ops", f"{self.ops}, {format_ns(self.base_ns)}"),
            ("storages", f"{self.storages}, {format_bytes(self.constant_bytes + self.made_bytes)}"),
            ("constants", format_bytes(self.constant_bytes)),
            ("peak", format_bytes(self.peak_bytes)),
        ]
        if self.saves:
            rows.append(("saved peak", f"{format_bytes(self.saved_peak_bytes)}, {self.saves} saved tensors"))
        where = f" on {self.device}" if self.device else ""
        return f"trace {self.name}{where}\n" + "\n".join(f"  {line}" for line in aligned(rows).splitlines())


def summary(trace: Trace) -> Summary:
    """Sum a trace up. ValueError if its events cannot happen in this order."""
    inventory = Inventory()
    for event in trace.events:
        inventory.take(event)
    ops = [event for event in trace.events if isinstance(event, Op)]
    return Summary(
        name=trace.name,
        device=trace.device,
        ops=len(ops),
        storages=len(inventory),
        constant_bytes=trace.constant_bytes,
        made_bytes=sum(sum(op.nbytes) for op in ops),
        saves=sum(isinstance(event, Save) for event in trace.events),
        base_ns=trace.base_ns,
        peak_bytes=inventory.peak_bytes,
        saved_peak_bytes=inventory.peak_saved_bytes,
    )
