"""What a run did, in figures: the answer of ``run.report()``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from delta.text import aligned
from delta.units import format_bytes, format_ns

_LEGEND = (
    "activations: bytes of unique storages that autograd has saved, parameters and buffers left out;",
    "unevicted: what they would have been had nothing been evicted; stalled: waiting for copies, and encoding;",
    "overhead: time spent in Delta's own hooks and decisions, replays and stalls left out.",
)


_NOTHING_SAVED = (
    "  nothing was saved for backward: forward has to run inside of the block, in its thread, on its device, with\n"
    "  gradients on"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of a run so far. Bytes and nanoseconds are sums over all steps; a peak is the largest of any step.

    ``device`` is empty where the block has not been entered and none was named. ``budget_bytes`` is the limit for
    activations or device, None when there was none (watch only); ``steps_over`` counts steps that were over it by more
    than one percent. ``modes`` and ``evictions`` count steps by mode and evictions by action.
    ``unevicted_peak_activation_bytes`` is what the peak would have been had nothing been evicted,
    ``encoded_bytes_saved`` what encoded forms took less. ``stall_ns`` went into waiting for copies and encoding,
    ``overhead_ns`` into Delta's own hooks and decisions, replays and stalls left out. ``oom_rescues`` counts ops that
    found no device memory and ran once more after evictions. ``plans`` counts plans made, and plans found again when a
    step began; ``longest_plan_ns`` is the longest that took. ``str()`` has all of it as a table.
    """

    policy: str
    device: str
    steps: int = 0
    modes: Mapping[str, int] = field(default_factory=dict)
    peak_activation_bytes: int = 0
    unevicted_peak_activation_bytes: int = 0
    peak_device_bytes: int = 0
    budget_bytes: int | None = None
    steps_over: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    recomputed_bytes: int = 0
    encoded_bytes_saved: int = 0
    recompute_ns: int = 0
    stall_ns: int = 0
    overhead_ns: int = 0
    oom_rescues: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)
    plans: Mapping[str, int] = field(default_factory=dict)
    longest_plan_ns: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dict."""
        return {**asdict(self), "warnings": list(self.warnings)}

    def __str__(self) -> str:
        table = aligned([(f"  {name}", value) for name, value in self._rows()])
        notes = [f"  warning: {text}" for text in self.warnings]
        if self.device and not self.unevicted_peak_activation_bytes:
            notes.append(_NOTHING_SAVED)
        where = f" on {self.device}" if self.device else ", not entered yet"
        return "\n".join([f"policy {self.policy}{where}", table, *notes, *_LEGEND])

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("steps", _counts(self.steps, self.modes)),
            ("peak activations", format_bytes(self.peak_activation_bytes) + self._share()),
            ("unevicted peak", format_bytes(self.unevicted_peak_activation_bytes)),
            ("peak device memory", format_bytes(self.peak_device_bytes)),
            ("budget", "none" if self.budget_bytes is None else format_bytes(self.budget_bytes) + self._over()),
            ("swapped out / in", f"{format_bytes(self.swapped_out_bytes)} / {format_bytes(self.swapped_in_bytes)}"),
            ("recomputed", f"{format_bytes(self.recomputed_bytes)} in {format_ns(self.recompute_ns)}"),
            ("saved by encoding", format_bytes(self.encoded_bytes_saved)),
            ("stalled", format_ns(self.stall_ns)),
            ("overhead", format_ns(self.overhead_ns)),
            ("plans", _counts(sum(self.plans.values()), self.plans) + self._planning()),
            ("evictions", _counts(sum(self.evictions.values()), self.evictions)),
            ("OOM rescues", str(self.oom_rescues)),
        ]

    def _over(self) -> str:
        return f", not held in {self.steps_over} of the steps" if self.steps_over else ""

    def _share(self) -> str:
        if not self.unevicted_peak_activation_bytes:
            return ""
        return f" ({self.peak_activation_bytes / self.unevicted_peak_activation_bytes:.1%} of unevicted)"

    def _planning(self) -> str:
        return "".join(f", {how} in {format_ns(ns)} at most" for how, ns in sorted(self.longest_plan_ns.items()))


def _counts(total: int, parts: Mapping[str, int]) -> str:
    inside = ", ".join(f"{name} {count}" for name, count in sorted(parts.items()))
    return f"{total} ({inside})" if inside else str(total)
