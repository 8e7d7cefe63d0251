"""The table of who holds the memory, by op and by module."""

from __future__ import annotations

import pytest

from delta.errors import TimelineError
from delta.timeline import Event, to_holders

HEADER = {"policy": "delta", "device": "cpu"}


def saved(t_ns: int, record: int, nbytes: int, **names: str | None) -> Event:
    return Event(t_ns, "saved", {"record": record, "nbytes": nbytes, **names})


def evicted(t_ns: int, record: int, action: str) -> Event:
    return Event(t_ns, "evicted", {"record": record, "nbytes": 1, "action": action})


def step(index: int, start_ns: int, end_ns: int, mode: str = "observe") -> Event:
    fields = {"index": index, "mode": mode, "start_ns": start_ns, "end_ns": end_ns, "peak_bytes": 1}
    return Event(end_ns, "step", fields)


# Two steps of the same kind, and one that is only watched, in which something left over is replayed. Record 6 is saved
# twice, and 2 lives through both.
STEPS = [
    saved(1000, 1, 9, op="aten.exp", module="old"),
    saved(1000, 2, 9, op="aten.exp", module="old"),
    step(0, 1000, 2000),
    saved(3000, 2, 9, op=None),
    saved(3000, 3, 4000, op="aten.mm", module="a"),
    saved(3100, 4, 1000, op="aten.mm", module="b"),
    evicted(3200, 4, "swap"),
    saved(3200, 5, 3000, op="aten.gelu", module="b"),
    evicted(3200, 5, "recompute"),
    saved(3300, 6, 2000, op="aten.gelu", module="b"),
    saved(3400, 6, 2000, op="aten.gelu", module="b"),
    evicted(3500, 6, "encode"),
    evicted(3600, 4, "recompute"),  # once more: that it was swapped stands
    Event(4600, "freed", {"record": 3, "nbytes": 4000}),
    Event(4700, "freed", {"record": 4, "nbytes": 1000}),
    step(1, 3000, 5000, "planned"),
    Event(6500, "recomputed", {"record": 1, "nbytes": 9, "op": "aten.exp", "start_ns": 6400, "end_ns": 6500}),
    step(2, 6000, 7000, "idle"),
    Event(8000, "freed", {"record": 2, "nbytes": 9}),
]


def rows(table: str) -> list[list[str]]:
    """The cells of its rows; they stand at least two spaces apart."""
    lines = table.split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in (lines[0], *lines[2:])]


def test_ops_of_the_last_step_that_tells_them() -> None:
    table = to_holders(HEADER, STEPS, "op")
    assert table.startswith("policy delta on cpu, step 1 (planned) of 3, the last in which ops are known\n")
    assert rows(table) == [
        ["op", "storages", "saved", "kept", "swapped", "recomputed", "encoded", "on device"],
        ["aten.gelu", "2", "4.88 KiB", "-", "-", "2.93 KiB (1)", "1.95 KiB (1)", "100 ns"],  # (0 + 200) / 2
        ["aten.mm", "2", "4.88 KiB", "3.91 KiB (1)", "1000 B (1)", "-", "-", "850 ns"],  # (1600 + 100) / 2
        ["-", "1", "9 B", "9 B (1)", "-", "-", "-", "2 µs"],  # until the step's end
        ["total", "5", "9.77 KiB", "3.92 KiB (2)", "1000 B (1)", "2.93 KiB (1)", "1.95 KiB (1)", "780 ns"],
    ]


def test_modules_the_largest_first() -> None:
    got = rows(to_holders(HEADER, STEPS, "module"))
    assert [row[:3] for row in got[1:]] == [
        ["b", "3", "5.86 KiB"],
        ["a", "1", "3.91 KiB"],
        ["-", "1", "9 B"],
        ["total", "5", "9.77 KiB"],
    ]


@pytest.mark.parametrize(
    ("events", "by", "message"),
    [
        ([], "op", r"no step of this timeline tells the op of a saved tensor\. .*activations=\"1TiB\""),
        (STEPS[:1], "op", "no step of this timeline tells the op"),  # the step has not ended
        ([saved(1, 1, 9, op="aten.mm"), step(0, 0, 5)], "module", "tells the module .* given model="),
    ],
)
def test_a_timeline_without_names_is_refused(events: list[Event], by: str, message: str) -> None:
    with pytest.raises(TimelineError, match=message):
        to_holders(HEADER, events, by)
