"""The timeline: what is written is read back, what is damaged is refused, and the views show the right numbers."""

import gzip
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from delta.errors import TimelineError
from delta.timeline import EVENTS, Event, Series, Timeline, read_timeline, to_chrome, to_svg, to_table
from delta.timeline.axis import bytes_scale, seconds_scale
from delta.types import Action

HEADER = {"policy": "delta", "device": "cpu", "budget": {"activations_bytes": 100}, "torch": "2.13.0", "started": "now"}
FULL_HEADER = {"delta_timeline": 2, **HEADER}

# One step of 0..10 µs under a budget of 100 bytes, then a little after its end.
EVENTS_OF_A_STEP = [
    Event(1000, "saved", {"record": 1, "nbytes": 80, "op": "aten.mm", "module": "head"}),
    Event(1000, "memory", {"resident_bytes": 80, "unevicted_bytes": 80, "limit_bytes": 100}),
    Event(2000, "evicted", {"record": 1, "nbytes": 80, "action": "swap"}),
    Event(3500, "copied", {"record": 1, "nbytes": 80, "direction": "out", "start_ns": 2000, "end_ns": 3500}),
    Event(5000, "evicted", {"record": 2, "nbytes": 40, "action": "recompute"}),
    Event(7000, "copied", {"record": 1, "nbytes": 80, "direction": "in", "start_ns": 6000, "end_ns": 7000}),
    Event(7200, "waited", {"record": 1, "start_ns": 6900, "end_ns": 7200, "why": "copy in"}),
    Event(9000, "recomputed", {"record": 2, "nbytes": 40, "op": "aten.gelu", "start_ns": 8000, "end_ns": 9000}),
    Event(9500, "freed", {"record": 1, "nbytes": 80}),
    Event(
        10_000,
        "step",
        {
            "index": 0,
            "mode": "observe",
            "start_ns": 0,
            "end_ns": 10_000,
            "peak_bytes": 80,
            "unevicted_peak_bytes": 120,
        },
    ),
    Event(10_500, "freed", {"record": 2, "nbytes": 40}),
]


def write(path: Path, events: list[Event] = EVENTS_OF_A_STEP) -> Path:
    timeline = Timeline(path, HEADER)
    for event in events:
        timeline.emit(event.ev, event.t_ns, **event.fields)
    timeline.close()
    return path


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert read_timeline(path) == (FULL_HEADER, EVENTS_OF_A_STEP)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_the_step_uses_every_kind_of_event() -> None:
    assert {event.ev for event in EVENTS_OF_A_STEP} == set(EVENTS)


def test_the_table_of_events_is_frozen() -> None:
    with pytest.raises(TypeError):
        EVENTS["saved"] = EVENTS["freed"]  # type: ignore[index]
    with pytest.raises(TypeError):
        EVENTS["saved"].required["record"] = str  # type: ignore[index]


def test_flush_makes_events_readable_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    timeline = Timeline(path, HEADER)
    timeline.emit("freed", 5, record=1, nbytes=2)
    assert read_timeline(path)[1] == []
    timeline.flush()
    assert timeline.active
    assert read_timeline(path)[1] == [Event(5, "freed", {"record": 1, "nbytes": 2})]
    timeline.close()


def test_close_twice_and_emit_afterwards_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    timeline = Timeline(path, HEADER)
    timeline.close()
    timeline.close()
    timeline.emit("freed", 5, record=1, nbytes=2)
    timeline.flush()
    assert not timeline.active
    assert read_timeline(path) == (FULL_HEADER, [])


def test_without_a_path_nothing_is_kept() -> None:
    timeline = Timeline(None, HEADER)
    timeline.emit("no such event", 5)
    timeline.flush()
    timeline.close()
    assert not timeline.active


def test_text_enums_are_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", [Event(1, "evicted", {"record": 1, "nbytes": 2, "action": Action.SWAP})])
    assert read_timeline(path)[1][0].fields["action"] == "swap"


@pytest.mark.parametrize("path", ["no/such/directory/run.jsonl", "no/such/directory/run.jsonl.gz", "."])
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path, path: str) -> None:
    with pytest.raises(TimelineError, match=r"cannot be written: .*Give a file in a directory"):
        Timeline(tmp_path / path, HEADER)


def test_a_full_disk_ends_the_timeline_with_one_warning() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.warns(RuntimeWarning, match=r"'/dev/full' ends here, writing failed: .*No space left") as caught:
        timeline = Timeline("/dev/full", HEADER)
        timeline.emit("freed", 5, record=1, nbytes=2)
        timeline.flush()
        timeline.close()
    (warning,) = caught
    assert warning.filename == __file__, "not one of Delta's"
    assert not timeline.active


@pytest.mark.parametrize(
    ("ev", "fields", "message"),
    [
        ("bought", {}, "unknown event, known are saved,"),
        ("freed", {"record": 1}, "field 'nbytes' is missing"),
        ("freed", {"record": 1, "nbytes": 2, "colour": 3}, "field 'colour' is unknown, allowed are record, nbytes"),
    ],
)
def test_writing_a_wrong_event_is_refused(tmp_path: Path, ev: str, fields: dict[str, Any], message: str) -> None:
    timeline = Timeline(tmp_path / "run.jsonl", HEADER)
    timeline.emit(ev, 1, **fields)
    with pytest.raises(TimelineError, match=message):
        timeline.close()
    assert not timeline.active


HEADER_LINE = json.dumps(FULL_HEADER) + "\n"


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("", 1, "the file is empty"),
        ('{"delta_trace": 1}\n', 1, "this is a trace, for `deltactl simulate`; timeline= writes a timeline"),
        ('{"a": 1}\n', 1, "not a timeline: its first line must hold 'delta_timeline'"),
        ("hello\n", 1, "not JSON"),
        ("[1]\n", 1, "not a JSON object"),
        ('{"delta_timeline": 1}\n', 1, "delta_timeline is 1, this version of Delta reads 2"),
        ('{"delta_timeline": true}\n', 1, "delta_timeline is True"),
        (HEADER_LINE[:20], 1, "the file is cut off in this line"),
        (HEADER_LINE + '{"t_ns": 1, "ev"', 2, "the file is cut off in this line; remove the line to read the rest"),
        (HEADER_LINE + "\n", 2, "not JSON"),
        (HEADER_LINE + '{"t_ns": 1, "ev": "bought"}\n', 2, "unknown event 'bought', known are saved, evicted"),
        (HEADER_LINE + '{"t_ns": 1, "ev": ["x"]}\n', 2, "unknown event"),
        (HEADER_LINE + '{"ev": "freed", "record": 1, "nbytes": 2}\n', 2, "field 't_ns' is None"),
        (HEADER_LINE + '{"t_ns": 1, "ev": "freed", "record": 1}\n', 2, "event 'freed': field 'nbytes' is missing"),
        (HEADER_LINE + '{"t_ns": 1, "ev": "freed", "record": 1, "nbytes": "2"}\n', 2, "must be a whole number"),
        (HEADER_LINE + '{"t_ns": 1, "ev": "freed", "record": true, "nbytes": 2}\n', 2, "must be a whole number"),
        (HEADER_LINE + '{"t_ns": 1, "ev": "freed", "record": 1, "nbytes": -2}\n', 2, "must not be negative"),
        (HEADER_LINE + '{"t_ns": 1, "ev": "freed", "record": 1, "nbytes": 2, "x": 3}\n', 2, "field 'x' is unknown"),
        (HEADER_LINE + '{"t_ns": 1, "ev": "waited", "start_ns": 3, "end_ns": 2}\n', 2, "'end_ns' lies before"),
        (
            HEADER_LINE
            + '{"t_ns": 1, "ev": "copied", "record": 1, "nbytes": 2, "direction": "up", "start_ns": 1, "end_ns": 2}\n',
            2,
            "must be 'out' or 'in'",
        ),
        (
            HEADER_LINE + '{"t_ns": 1, "ev": "evicted", "record": 1, "nbytes": 2, "action": "keep"}\n',
            2,
            "field 'action' is 'keep', must be 'swap' or 'recompute' or 'encode'",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path: Path, content: str, line: int, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(TimelineError, match=message) as caught:
        read_timeline(path)
    assert str(caught.value).startswith(f"timeline {str(path)!r}, line {line}: ")


def test_an_optional_field_may_be_none(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(HEADER_LINE + '{"t_ns": 1, "ev": "memory", "resident_bytes": 1, "limit_bytes": null}\n')
    assert read_timeline(path)[1][0].fields["limit_bytes"] is None


def test_a_truncated_compressed_file_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "run.jsonl.gz").read_bytes()
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[:-12])
    with pytest.raises(TimelineError, match=r"line \d+: the compressed file is cut off"):
        read_timeline(cut)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TimelineError, match="line 1: not text"):
        read_timeline(binary)
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_text(HEADER_LINE)
    with pytest.raises(TimelineError, match="cannot be read: Not a gzipped file"):
        read_timeline(plain)
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(b"x" * 100)[:10] + b"\xff" * 20)
    with pytest.raises(TimelineError, match="cannot be read"):
        read_timeline(broken)
    with pytest.raises(TimelineError, match="cannot be read: No such file"):
        read_timeline(tmp_path / "none.jsonl")


def test_chrome_trace_golden() -> None:
    trace = to_chrome(FULL_HEADER, EVENTS_OF_A_STEP)
    names = {item["tid"]: item["args"]["name"] for item in trace["traceEvents"] if item["name"] == "thread_name"}
    body = [item for item in trace["traceEvents"] if item["ph"] != "M"]
    flat = [
        (item["ph"], names.get(item.get("tid")), item["name"], item["ts"], item.get("dur"), item["args"])
        for item in body
    ]
    # Microseconds from 0 ns, the start of the step.
    assert flat == [
        ("X", "steps", "step 0 (observe)", 0.0, 10.0,
         {"index": 0, "mode": "observe", "peak_bytes": 80, "unevicted_peak_bytes": 120}),
        ("C", None, "resident", 1.0, None, {"bytes": 80}),
        ("C", None, "unevicted", 1.0, None, {"bytes": 80}),
        ("C", None, "limit", 1.0, None, {"bytes": 100}),
        ("i", "evictions", "swap record 1", 2.0, None, {"record": 1, "nbytes": 80, "action": "swap"}),
        ("X", "link out", "record 1", 2.0, 1.5, {"record": 1, "nbytes": 80, "direction": "out"}),
        ("i", "evictions", "recompute record 2", 5.0, None, {"record": 2, "nbytes": 40, "action": "recompute"}),
        ("X", "link in", "record 1", 6.0, 1.0, {"record": 1, "nbytes": 80, "direction": "in"}),
        ("X", "stalls", "copy in", 6.9, 0.3, {"record": 1, "why": "copy in"}),
        ("X", "compute: recompute", "aten.gelu", 8.0, 1.0, {"record": 2, "nbytes": 40, "op": "aten.gelu"}),
        ("i", "frees", "record 1", 9.5, None, {"record": 1, "nbytes": 80}),
        ("i", "frees", "record 2", 10.5, None, {"record": 2, "nbytes": 40}),
    ]  # fmt: skip
    assert trace["otherData"] == FULL_HEADER
    assert {item["args"]["name"] for item in trace["traceEvents"] if item["name"] == "process_name"} == {"delta"}
    assert all(item["pid"] == 1 for item in trace["traceEvents"])
    json.dumps(trace)


def test_overlapping_slices_get_lanes_of_their_own() -> None:
    """Three copies out, 0-4, 2-6 and 4-8: the second overlaps the first, the third fits behind the first."""
    events = [
        Event(end, "copied", {"record": n, "nbytes": 1, "direction": "out", "start_ns": end - 4000, "end_ns": end})
        for n, end in ((1, 4000), (2, 6000), (3, 8000))
    ]
    items = to_chrome(FULL_HEADER, events)["traceEvents"]
    names = {item["tid"]: item["args"]["name"] for item in items if item["name"] == "thread_name"}
    placed = {item["name"]: names[item["tid"]] for item in items if item["ph"] == "X"}
    assert placed == {"record 1": "link out", "record 2": "link out (2)", "record 3": "link out"}


def test_an_empty_timeline_has_a_chrome_trace_and_a_table() -> None:
    assert {item["ph"] for item in to_chrome(FULL_HEADER, [])["traceEvents"]} == {"M"}
    assert to_table(FULL_HEADER, []).startswith("policy delta on cpu, 0 steps, 0 events")


def cells(table: str, label: str) -> list[str]:
    """The cells of a row; they stand at least two spaces apart."""
    row = next(line for line in table.splitlines() if line.startswith(f"{label} "))
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_table_numbers() -> None:
    copy = {"record": 3, "nbytes": 1000, "direction": "out", "start_ns": 15_000, "end_ns": 16_000}
    step = {"index": 1, "mode": "planned", "start_ns": 10_600, "end_ns": 20_000, "peak_bytes": 1024}
    second = [
        Event(15_000, "evicted", {"record": 3, "nbytes": 1000, "action": "swap"}),
        Event(16_000, "copied", copy),
        Event(20_000, "step", step),
    ]
    table = to_table(FULL_HEADER, EVENTS_OF_A_STEP + second)
    got = {label: cells(table, label) for label in ("0", "1", "total")}
    assert table.startswith("policy delta on cpu, 2 steps, 14 events")
    assert got["0"] == [
        *("0", "observe", "10 µs", "80 B", "120 B"),
        *("80 B", "80 B", "1 µs", "300 ns", "recompute 1, swap 1"),
    ]
    assert got["1"] == ["1", "planned", "9.4 µs", "1 KiB", "-", "1000 B", "0 B", "0 ns", "0 ns", "swap 1"]
    # 80 + 1000 bytes out; the larger of the peaks; 10 + 9.4 µs.
    assert got["total"] == [
        *("total", "19.4 µs", "1 KiB", "120 B"),
        *("1.05 KiB", "80 B", "1 µs", "300 ns", "recompute 1, swap 2"),
    ]
    assert "\nafter" not in table  # what followed step 0 belongs to step 1


def test_table_shows_what_came_after_the_last_step() -> None:
    late = Event(12_000, "waited", {"start_ns": 11_000, "end_ns": 12_000})
    assert "1 µs" in cells(to_table(FULL_HEADER, [*EVENTS_OF_A_STEP, late]), "after")


def svg_texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_svg_of_one_run_shows_the_run_without_eviction_and_the_budget() -> None:
    texts = svg_texts(to_svg([Series("a < b", FULL_HEADER, EVENTS_OF_A_STEP)]))
    for wanted in ("without eviction (peak 80 B)", "a < b (peak 80 B)", "budget (100 B)", "time [µs]", "step 0"):
        assert wanted in texts
    assert "saved activations [B]" in texts


def test_svg_of_two_runs_draws_each_and_stays_small() -> None:
    many = [Event(t, "memory", {"resident_bytes": t % 997, "unevicted_bytes": 5000}) for t in range(50_000)]
    svg = to_svg([Series("delta", FULL_HEADER, EVENTS_OF_A_STEP), Series("plain", FULL_HEADER, many)])
    texts = svg_texts(svg)
    assert "plain (peak 996 B)" in texts and "delta (peak 80 B)" in texts  # thinning never loses the peak
    assert not any("without eviction" in text for text in texts)
    assert len(svg) < 100_000


@pytest.mark.parametrize(("usual", "once", "height"), [(0, 100, "V74"), (100, 0, "V352")])
def test_svg_never_thins_out_a_spike(usual: int, once: int, height: str) -> None:
    """One sample of 50,000 differs, amid its column of pixels; the plot reaches from y=352 (0 B) to y=74 (100 B)."""
    events = [
        Event(t, "memory", {"resident_bytes": 100, "unevicted_bytes": once if t == 25_003 else usual})
        for t in range(50_000)
    ]
    paths = ET.fromstring(to_svg([Series("delta", FULL_HEADER, events)])).iter("{http://www.w3.org/2000/svg}path")
    (unfilled,) = (path.attrib["d"] for path in paths if path.attrib["fill"] == "none")
    assert height in unfilled


def test_svg_begins_with_the_first_step() -> None:
    """Memory at 5, 1000 and 1004 ns and a step from 1000 ns on: the picture spans 4 ns and shows no 500 bytes."""
    samples = [Event(t, "memory", {"resident_bytes": nbytes}) for t, nbytes in ((5, 500), (1000, 20), (1004, 30))]
    step = Event(1004, "step", {"index": 0, "mode": "idle", "start_ns": 1000, "end_ns": 1004, "peak_bytes": 30})
    texts = svg_texts(to_svg([Series("delta", FULL_HEADER, [*samples, step])]))
    assert "delta (peak 30 B)" in texts and "time [ns]" in texts
    assert {"0", "1", "2", "3", "4"} <= set(texts) and "5" not in texts


def test_svg_without_memory_events_is_refused() -> None:
    with pytest.raises(TimelineError, match="'delta' holds no memory events"):
        to_svg([Series("delta", FULL_HEADER, EVENTS_OF_A_STEP[:1])])


@pytest.mark.parametrize(
    ("largest", "unit", "labels"),
    [
        (1_430_000_000, "GiB", ["0", "0.5", "1", "1.5"]),
        (80, "B", ["0", "20", "40", "60", "80"]),
        (0, "B", ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (3 * 2**20, "MiB", ["0", "1", "2", "3"]),
    ],
)
def test_byte_axis(largest: int, unit: str, labels: list[str]) -> None:
    scale = bytes_scale(largest)
    assert (scale.unit, [label for _, label in scale.ticks]) == (unit, labels)
    assert scale.share(largest) <= 1.0


def test_time_axis_ends_at_the_last_sample() -> None:
    scale = seconds_scale(2_300_000_000)
    assert (scale.unit, scale.top) == ("s", 2_300_000_000)
    assert [label for _, label in scale.ticks] == ["0", "0.5", "1", "1.5", "2"]
