"""Who holds the memory: what one step saved, by the op that made it or the module that op ran in.

Not covered: steps that are only watched. Of those a timeline has totals, and no single saved tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from delta.errors import TimelineError
from delta.text import aligned
from delta.timeline.format import Event, Header
from delta.timeline.steps import by_step
from delta.units import format_bytes, format_ns

GROUPINGS = ("op", "module")  # fields of `saved`
_FATES = {None: "kept", "swap": "swapped", "recompute": "recomputed", "encode": "encoded"}
_LEGEND = (
    "storages: each counts once, however many saved tensors are on it; kept to encoded: what became of them first;\n"
    "on device: mean time from the first save until they left the device, at the latest until the step's end;\n"
)
_UNKNOWN = {
    "op": "-: made by no op that was seen, as a batch is.",
    "module": "-: made outside of the modules that have a name.",
}
_WAY_OUT = {
    "op": "Steps that fit are only watched, and under policy keep no op is looked at.",
    "module": "Modules have names where delta.evict was given model=, and steps that fit are only watched.",
}
_ONE_STEP = 'A limit that is never reached (activations="1TiB") has the first step recorded, and nothing evicted.'


@dataclass(slots=True)
class _Storage:
    """One that was saved in the step."""

    name: str
    nbytes: int
    saved_ns: int
    left_ns: int  # the device, the first time; the end of the step if it stayed so long
    action: str | None = None  # by which it was evicted first


def to_holders(header: Header, events: Sequence[Event], by: str) -> str:
    """The table of the last step whose saved tensors have the field ``by``, one of `GROUPINGS`; TimelineError if there
    is none. The largest come first."""
    steps, parts = by_step(events)
    told = [index for index in range(len(steps)) if any(e.ev == "saved" and e.fields.get(by) for e in parts[index])]
    if not told:
        raise TimelineError(f"no step of this timeline tells the {by} of a saved tensor. {_WAY_OUT[by]} {_ONE_STEP}")
    step = steps[told[-1]].fields
    storages = _saved(parts[told[-1]], by, step["end_ns"])
    groups: dict[str, list[_Storage]] = {}
    for storage in storages:
        groups.setdefault(storage.name, []).append(storage)
    largest_first = sorted(groups.items(), key=lambda group: (-_total_bytes(group[1]), group[0]))
    head = (by, "storages", "saved", *_FATES.values(), "on device")
    cells = [head, *(_cells(name, group) for name, group in [*largest_first, ("total", storages)])]
    run = f"policy {header.get('policy', '?')} on {header.get('device', '?')}"
    which = f"step {step['index']} ({step['mode']}) of {len(steps)}, the last in which {by}s are known"
    table = aligned(cells, right=range(1, len(head)), rule=True)
    return "\n".join([f"{run}, {which}", "", table, "", _LEGEND + _UNKNOWN[by]])


def _saved(events: Iterable[Event], by: str, end_ns: int) -> list[_Storage]:
    """The storages that these events of a step tell of."""
    found: dict[int, _Storage] = {}
    for event in events:
        if event.ev == "saved":
            name = event.fields.get(by) or "-"
            found.setdefault(event.fields["record"], _Storage(name, event.fields["nbytes"], event.t_ns, end_ns))
        elif event.ev in ("evicted", "freed") and (storage := found.get(event.fields["record"])) is not None:
            if event.ev == "evicted" and storage.action is None:
                storage.action = event.fields["action"]
            storage.left_ns = min(storage.left_ns, event.t_ns)
    return list(found.values())


def _cells(name: str, storages: Sequence[_Storage]) -> tuple[str, ...]:
    mean_ns = sum(storage.left_ns - storage.saved_ns for storage in storages) // len(storages)
    fates = ([storage for storage in storages if storage.action == action] for action in _FATES)
    return (
        name,
        str(len(storages)),
        format_bytes(_total_bytes(storages)),
        *(f"{format_bytes(_total_bytes(fate))} ({len(fate)})" if fate else "-" for fate in fates),
        format_ns(mean_ns),
    )


def _total_bytes(storages: Iterable[_Storage]) -> int:
    return sum(storage.nbytes for storage in storages)
