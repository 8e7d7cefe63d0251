"""Random traces, and somebody else's count of what exists in one: from scratch after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st

from delta.trace import Evictable, Trace
from delta.trace.events import Backward, Constant, Event, Free, Need, Op, Result, Save, Unsave
from delta.types import Link

SIZES = st.integers(0, 1000)


@st.composite
def encodings(draw: st.DrawFn, nbytes: int) -> tuple[int, ...]:
    """Fields of a `Save`: none, or a smaller form of a storage and its times."""
    if nbytes < 2 or draw(st.booleans()):
        return ()
    return draw(st.integers(1, nbytes - 1)), draw(st.integers(0, 50)), draw(st.integers(0, 50))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A whole step in which everything may happen: writes in place, saves that outlive the program's references."""
    events: list[Event] = [Constant(number, draw(SIZES)) for number in range(draw(st.integers(1, 3)))]
    constants = set(range(len(events)))
    count, held, handles = len(events), set(constants), Counter[int]()
    sizes_of = {event.storage: event.nbytes for event in events if isinstance(event, Constant)}
    for _ in range(draw(st.integers(0, 25))):
        usable = sorted(held | {number for number in handles if handles[number]})
        kind = draw(st.sampled_from(["op", "op", "op", "save", "need", "unsave", "free", "backward"]))
        if kind == "op":
            inputs = draw(st.lists(st.sampled_from(usable), unique=True, max_size=3)) if usable else []
            overwrites = draw(st.lists(st.sampled_from(inputs), unique=True, max_size=2)) if inputs else []
            made = len(overwrites) + draw(st.integers(0, 2))
            outputs = tuple(range(count, count + made))
            sizes = tuple(draw(SIZES) for _ in outputs)
            cost_ns, workspace_bytes, again_ns = draw(st.integers(0, 10**9)), draw(SIZES), draw(st.integers(0, 9))
            replayable = draw(st.booleans())
            events.append(
                Op(
                    "op",
                    tuple(inputs),
                    outputs,
                    sizes,
                    cost_ns,
                    replayable,
                    tuple(overwrites),
                    workspace_bytes,
                    again_ns,
                )
            )
            for old, new in zip(overwrites, outputs, strict=False):
                handles[new] = handles.pop(old, 0)
            sizes_of |= dict(zip(outputs, sizes, strict=True))
            held = held - set(overwrites) | set(outputs)
            count += made
        elif kind == "save" and usable:
            handles[saved := draw(st.sampled_from(usable))] += 1
            events.append(Save(saved, *draw(encodings(sizes_of[saved]))))
        elif kind in ("need", "unsave") and (open_ := [number for number in handles if handles[number]]):
            number = draw(st.sampled_from(open_))
            events.append(Need(number) if kind == "need" else Unsave(number))
            handles[number] -= kind == "unsave"
        elif kind == "free" and (free := sorted(held - constants)):
            held.discard(gone := draw(st.sampled_from(free)))
            events.append(Free(gone))
        elif kind == "backward":
            events.append(Backward())
    events += [Unsave(number) for number in handles.elements()]
    events += [Result(number) for number in sorted(held - constants)]
    link = draw(st.none() | st.builds(Link, *[st.floats(1, 1e12)] * 2, st.floats(0, 1)))
    facts = draw(st.dictionaries(st.text(), st.text(), max_size=2))
    return Trace(draw(st.text()), draw(st.sampled_from(Evictable)), tuple(events), draw(st.text()), link, facts)


def peaks(events: Sequence[Event]) -> tuple[int, int]:
    """Most bytes that exist, and most that are saved, over all moments of a trace."""
    moments = [_bytes_after(events[: end + 1]) for end in range(len(events))]
    return max(live for live, _ in moments), max(saved for _, saved in moments)


def _bytes_after(events: Sequence[Event]) -> tuple[int, int]:
    sizes: dict[int, int] = {}
    heirs: dict[int, int] = {}
    for event in events:
        if isinstance(event, Constant):
            sizes[event.storage] = event.nbytes
        elif isinstance(event, Op):
            sizes |= dict(zip(event.outputs, event.nbytes, strict=True))
            heirs |= dict(zip(event.overwrites, event.outputs, strict=False))
    freed = {event.storage for event in events if isinstance(event, Free)}
    saves = Counter(_last(heirs, event.storage) for event in events if isinstance(event, Save))
    saves.subtract(_last(heirs, event.storage) for event in events if isinstance(event, Unsave))
    existing = [number for number in sizes if number not in heirs and (number not in freed or saves[number])]
    workspace_bytes = events[-1].workspace_bytes if isinstance(events[-1], Op) else 0
    return sum(map(sizes.get, existing)) + workspace_bytes, sum(sizes[number] for number in saves if saves[number])


def _last(heirs: dict[int, int], number: int) -> int:
    while number in heirs:
        number = heirs[number]
    return number
