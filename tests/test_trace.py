"""Trace files: exact round trips, and a clear error with file and line for anything else."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import peaks, traces

from delta.errors import TraceError
from delta.trace import Evictable, Recording, Trace, read, summary, write
from delta.trace.events import Backward, Bookkeeping, Constant, Free, Need, Op, Result, Save, Unsave
from delta.types import Link

TRACE = Trace(
    name="step",
    evictable=Evictable.SAVED,
    events=(
        Constant(0, 4096),
        Op("aten.mm", (0,), (1,), (1024,), 2_000_000),
        Save(1),
        Op("aten.relu_", (1,), (2,), (1024,), 500_000, False, (1,), 64),
        Free(2),
        Backward(),
        Need(2),
        Op("aten.mul", (2,), (3,), (1024,), 1_000_000),
        Unsave(2),
        Result(3),
    ),
    device="cpu",
    link=Link(1e9, 2e9, 0.25),
    facts={"torch": "2.13.0"},
)
TEXT = (
    '{"delta_trace":1,"name":"step","evictable":"saved","device":"cpu",'
    '"link":{"out_bytes_per_s":1000000000.0,"in_bytes_per_s":2000000000.0,"interference":0.25},'
    '"facts":{"torch":"2.13.0"}}\n'
    '{"ev":"constant","storage":0,"nbytes":4096}\n'
    '{"ev":"op","name":"aten.mm","inputs":[0],"outputs":[1],"nbytes":[1024],"cost_ns":2000000}\n'
    '{"ev":"save","storage":1}\n'
    '{"ev":"op","name":"aten.relu_","inputs":[1],"outputs":[2],"nbytes":[1024],"cost_ns":500000,"replayable":false,'
    '"overwrites":[1],"workspace_bytes":64}\n'
    '{"ev":"free","storage":2}\n'
    '{"ev":"backward"}\n'
    '{"ev":"need","storage":2}\n'
    '{"ev":"op","name":"aten.mul","inputs":[2],"outputs":[3],"nbytes":[1024],"cost_ns":1000000}\n'
    '{"ev":"unsave","storage":2}\n'
    '{"ev":"result","storage":3}\n'
    '{"end":10}\n'
)


def refused(path: Path) -> str:
    """What is said about a file that cannot be read, after its name."""
    with pytest.raises(TraceError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"trace {str(path)!r}")
    return text.removeprefix(f"trace {str(path)!r}").removeprefix(", ").removeprefix(": ")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "step.jsonl"


# --- round trips ------------------------------------------------------------------------------------------------------


def test_the_file_is_as_documented(file: Path) -> None:
    write(TRACE, file)
    assert file.read_text() == TEXT
    assert read(file) == TRACE


@pytest.mark.parametrize("name", ["step.jsonl", "step.jsonl.gz"])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces())
def test_round_trips_are_exact(tmp_path: Path, name: str, trace: Trace) -> None:
    path = tmp_path / name
    write(trace, path)
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    assert read(str(path)) == trace
    assert [left.name for left in tmp_path.iterdir() if left.name.endswith(".part")] == []


def test_the_content_says_whether_a_file_is_compressed(tmp_path: Path) -> None:
    write(TRACE, tmp_path / "a.gz")
    packed = (tmp_path / "a.gz").rename(tmp_path / "a.jsonl")
    plain = tmp_path / "b.gz"
    plain.write_text(TEXT)
    assert read(packed) == read(plain) == TRACE


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    write(TRACE, tmp_path / "a.gz")
    write(TRACE, tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


# --- writing that fails -----------------------------------------------------------------------------------------------


def test_what_cannot_happen_is_not_written(file: Path) -> None:
    file.write_text("before")
    with pytest.raises(TraceError, match=re.escape("event 1, Free(storage=7): storage 7 is unknown here")):
        write(Trace("t", Evictable.ALL, (Constant(0, 1), Free(7))), file)
    with pytest.raises(TraceError, match="still saved"):
        write(Trace("t", Evictable.ALL, (Constant(0, 1), Save(0))), file)
    with pytest.raises(TraceError, match="'out_bytes_per_s' is nan, must be a finite number"):
        write(Trace("t", Evictable.ALL, (), link=Link(float("nan"), 1.0)), file)
    assert file.read_text() == "before"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="cannot be written: No such file"):
        write(TRACE, tmp_path / "no" / "step.jsonl")

    def full(self: Path, data: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TraceError, match="cannot be written: No space left"):
        write(TRACE, tmp_path / "step.jsonl")
    assert list(tmp_path.iterdir()) == []


# --- foreign and damaged files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cut off after line 0: the file is empty"),
        (b"step,ns\n1,2\n", "line 1: not JSON"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "line 1: not JSON"),
        (b"[1, 2]\n", "line 1: b'[1, 2]\\n' is not a JSON object"),
        (
            b'{"delta_timelines": 1}\n',
            "line 1: neither a trace of Delta, whose first line has 'delta_trace', nor a",
        ),
        (b'{"delta_timeline": 1}\n', "line 1: this is a timeline, for `deltactl timeline`; `deltactl trace` records a"),
        (b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_other_files_are_refused(file: Path, content: bytes, said: str) -> None:
    file.write_bytes(content)
    assert refused(file).startswith(said)


def test_places_that_are_no_files_are_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(tmp_path / "none")
    assert "Is a directory" in refused(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_off_anywhere_is_refused(file: Path, packed: bool) -> None:
    whole = gzip.compress(TEXT.encode()) if packed else TEXT.encode()
    for end in range(len(whole) - (not packed)):  # without its last line end a plain file still says that it is whole
        file.write_bytes(whole[:end])
        assert refused(file)


def test_a_damaged_compressed_file_is_refused(file: Path) -> None:
    whole = bytearray(gzip.compress(TEXT.encode()))
    whole[-6] ^= 1
    file.write_bytes(whole)
    assert "CRC check failed" in refused(file)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gives_another_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(TEXT.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged"
    path.write_bytes(bytes(content))
    try:
        read(path)
    except TraceError as error:
        assert re.match(rf"trace {str(path)!r}(, line \d+: |: cut off after line \d+: )", str(error))


def changed(line: int, change: dict[str, Any] | None) -> str:
    """The file with some fields of a line changed (None: left out), or the line left out."""
    lines = TEXT.splitlines()
    if change is None:
        del lines[line - 1]
    else:
        fields = json.loads(lines[line - 1]) | change
        lines[line - 1] = json.dumps({key: value for key, value in fields.items() if value is not None})
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (1, {"delta_trace": 6}, "line 1: delta_trace is 6; this version of Delta reads 1 to 5"),
        (1, {"bookkeeping": {}}, "line 1: the header has 'bookkeeping', which is unknown; known are name, evictable"),
        (1, {"delta_trace": 3, "bookkeeping": 3}, "line 1: the header: 'bookkeeping' is 3, must be an object"),
        (
            1,
            {"delta_trace": 3, "bookkeeping": {"op_ns": 1.5}},
            "line 1: 'bookkeeping': 'op_ns' is 1.5, must",
        ),
        (
            1,
            {"delta_trace": 3, "bookkeeping": {"op": 1}},
            "line 1: 'bookkeeping' has 'op', which is unknown",
        ),
        (4, {"encoded_bytes": 1}, "line 4: save has 'encoded_bytes', which is unknown; known are storage"),
        (1, {"delta_trace": True}, "line 1: delta_trace is True"),
        (1, {"who": 1}, "line 1: the header has 'who', which is unknown; known are name, evictable, device"),
        (1, {"device": None}, "line 1: the header: 'device' is missing"),
        (1, {"name": 3}, "line 1: the header: 'name' is 3, must be a text"),
        (1, {"evictable": "some"}, "line 1: 'evictable' is 'some', must be all or saved"),
        (1, {"facts": {"a": 1}}, "line 1: 'facts' is {'a': 1}, must have texts only"),
        (1, {"link": [1]}, "line 1: the header: 'link' is [1], must be an object or null"),
        (1, {"link": {"out_bytes_per_s": 1}}, "line 1: 'link': 'in_bytes_per_s' is missing"),
        (1, {"link": {"out_bytes_per_s": 0, "in_bytes_per_s": 1, "interference": 0}}, "line 1: 'link' is {"),
        (
            1,
            {"delta_trace": 5, "link": {"out_bytes_per_s": 1, "in_bytes_per_s": 1, "interference": 0, "copy_ns": -1}},
            "line 1: 'link' is {",
        ),
        (
            1,
            {"delta_trace": 4, "link": {"out_bytes_per_s": 1, "in_bytes_per_s": 1, "interference": 0, "copy_ns": 1}},
            "line 1: 'link' has 'copy_ns', which is unknown",
        ),
        (1, {"link": {"out_bytes_per_s": 1, "in_bytes_per_s": 1, "interference": 2}}, "line 1: 'link' is {"),
        (1, {"link": {"out_bytes_per_s": 10**400}}, "line 1: 'link': 'out_bytes_per_s' is 1000"),
        (1, {"link": {"out_bytes_per_s": "1"}}, "line 1: 'link': 'out_bytes_per_s' is '1', must be a finite number"),
        (3, {"ev": "jump"}, "line 3: 'ev' is 'jump'; known are constant, op, save, need, unsave, free, result, back"),
        (3, {"ev": None}, "line 3: 'ev' is None"),
        (3, {"ev": [1]}, "line 3: 'ev' is [1]"),
        (3, {"cost": 3}, "line 3: op has 'cost', which is unknown; known are name, inputs, outputs"),
        (3, {"cost_ns": None}, "line 3: op: 'cost_ns' is missing"),
        (3, {"cost_ns": -1}, "line 3: op: 'cost_ns' is -1, must be a whole number, not negative"),
        (3, {"cost_ns": 1.5}, "line 3: op: 'cost_ns' is 1.5"),
        (3, {"cost_ns": True}, "line 3: op: 'cost_ns' is True"),
        (3, {"inputs": 0}, "line 3: op: 'inputs' is 0, must be a list of whole numbers"),
        (3, {"inputs": ["0"]}, "line 3: op: 'inputs' is ['0']"),
        (3, {"nbytes": [-5]}, "line 3: op: 'nbytes' is [-5]"),
        (3, {"nbytes": [1, 2]}, "line 3: 1 outputs, but 2 sizes"),
        (3, {"replayable": 1}, "line 3: op: 'replayable' is 1, must be true or false"),
        (3, {"inputs": [5]}, "line 3: storage 5 is unknown here"),
        (2, {"nbytes": -1}, "line 2: constant: 'nbytes' is -1, must be a whole number, not negative"),
        (8, None, "line 11: the trace ends with 10 events, 9 were read: lines are missing"),
        (12, None, 'cut off after line 11: the last line of a whole trace is {"end":10}'),
        (12, {"end": 9}, "line 12: the trace ends with 9 events, 10 were read"),
        (12, {"end": 10.0}, "line 12: the trace ends with 10.0 events"),
        (10, {"storage": 3}, "line 10: storage 3 has no saved tensor that could die"),
    ],
)
def test_damage_is_told_with_its_line(file: Path, line: int, change: dict[str, Any] | None, said: str) -> None:
    file.write_text(changed(line, change))
    assert refused(file).startswith(said)


def test_a_step_that_is_not_whole_is_refused(file: Path) -> None:
    file.write_text(changed(10, None).replace('"end":10', '"end":9'))
    assert refused(file) == "line 11: the step ends while storage 2 is still saved"


def test_nothing_may_follow_the_end(file: Path) -> None:
    file.write_text(TEXT + '{"ev":"backward"}\n')
    assert refused(file) == 'line 13: {"ev":"backward"} stands after the end of the trace'


# --- the figures of a step --------------------------------------------------------------------------------------------


def test_summary_by_hand() -> None:
    found = summary(TRACE)
    assert (found.ops, found.storages, found.saves, found.base_ns) == (3, 4, 1, 3_500_000)
    assert (found.constant_bytes, found.made_bytes) == (4096, 3072)
    assert (found.peak_bytes, found.saved_peak_bytes) == (4096 + 2048, 1024)
    assert str(found) == (
        "trace step on cpu\n"
        "  ops         3, 3.5 ms\n"
        "  storages    4, 7 KiB\n"
        "  constants   4 KiB\n"
        "  peak        6 KiB\n"
        "  saved peak  1 KiB, 1 saved tensors"
    )


def test_summary_without_saves() -> None:
    text = str(summary(Trace("log", Evictable.ALL, (Constant(0, 2048),))))
    assert text == "trace log\n  ops        0, 0 ns\n  storages   1, 2 KiB\n  constants  2 KiB\n  peak       2 KiB"


@settings(deadline=None)
@given(traces())
def test_summary_has_the_peaks(trace: Trace) -> None:
    found = summary(trace)
    assert (found.peak_bytes, found.saved_peak_bytes) == peaks(trace.events)


# --- what to record ---------------------------------------------------------------------------------------------------


def test_recorded_steps_are_numbered_from_the_second_on() -> None:
    recording = Recording(Path("out/step.jsonl.gz"), steps=3)
    assert [str(recording.file(n)) for n in range(3)] == [f"out/step{n}.jsonl.gz" for n in ("", "-2", "-3")]
    assert Recording(Path("step")).file(1) == Recording("step").file(1) == Path("step-2")
    assert replace(Recording("a", skip=1, steps=2), path="b") == Recording("b", 1, 2)


@pytest.mark.parametrize(("skip", "steps"), [(-1, 1), (0, 0), (0, 1.5), ("1", 1)])
def test_numbers_of_steps_that_make_no_sense_are_refused(skip: Any, steps: Any) -> None:
    with pytest.raises(TraceError, match=re.escape(f"skip={skip!r}, steps={steps!r}: skip none")):
        Recording(Path("t"), skip, steps)


def test_a_recording_goes_to_a_file() -> None:
    with pytest.raises(TraceError, match="path=3: give the path of a file"):
        Recording(cast(Any, 3))


def test_a_new_field_makes_a_new_version(tmp_path: Path) -> None:
    """A trace without encoded forms is a file of version 1."""
    file = tmp_path / "step.jsonl"
    forms = Trace("t", Evictable.SAVED, (Constant(0, 80), Save(0, 10, 3, 4), Unsave(0)))
    write(forms, file)
    assert file.read_text().splitlines()[0].startswith('{"delta_trace":2,')
    assert '{"ev":"save","storage":0,"encoded_bytes":10,"encode_ns":3,"decode_ns":4}' in file.read_text()
    assert read(file) == forms
    known = replace(forms, bookkeeping=Bookkeeping(op_ns=7, release_ns=2))
    write(known, file)
    assert file.read_text().splitlines()[0].startswith('{"delta_trace":3,')
    assert read(file) == known
    again = Trace("t", Evictable.SAVED, (Op("norm", (), (0,), (80,), 9, again_ns=3), Save(0), Unsave(0)))
    write(again, file)
    assert file.read_text().splitlines()[0].startswith('{"delta_trace":4,')
    assert read(file) == again
    file.write_text(file.read_text().replace('{"delta_trace":4,', '{"delta_trace":3,'))
    with pytest.raises(TraceError, match="op has 'again_ns', which is unknown"):
        read(file)
    with pytest.raises(TraceError, match="storage 0 takes 80 bytes encoded, no less than as it is"):
        write(Trace("t", Evictable.SAVED, (Constant(0, 80), Save(0, 80), Unsave(0))), file)
