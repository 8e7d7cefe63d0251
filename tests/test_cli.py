"""`deltactl`: what each command prints, its exit codes, and scripts run under it."""

import inspect
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import delta
from delta.cli import app, demo
from delta.errors import SwapError
from delta.report import Report
from delta.timeline import Timeline

ROOT = Path(__file__).parents[1]


def deltactl(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="deltactl")


def refused(outcome: Result) -> str:
    """The message of a command that a DeltaError ended: exit code 2, text on stderr, no traceback."""
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("deltactl: ") and "Traceback" not in outcome.stderr
    return outcome.stderr.removeprefix("deltactl: ")


def test_help_names_every_command() -> None:
    text = deltactl("--help").output
    for command in ("demo", "run", "trace", "simulate", "compare", "policies", "timeline", "doctor"):
        assert command in text


def test_light_commands_do_not_import_torch() -> None:
    code = "from delta.cli import app; app(['policies'], standalone_mode=False); import sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *listed, modules = done.stdout.splitlines()
    assert "delta-paper" in "".join(listed)
    assert "'delta.cli'" in modules and "'torch'" not in modules


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["policies"], ["policies", "list"]])
def test_policies_lists_name_summary_and_source(arguments: list[str]) -> None:
    lines = deltactl(*arguments).output.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == delta.policies()
    assert f"keep               {delta.load_policy('keep').summary}" in lines
    assert f"optimal-checkpoint {delta.load_policy('optimal-checkpoint').summary}" in lines
    assert any(line.startswith(" ") and "DELTA: Memory-Efficient" in line for line in lines)


def test_policies_show_prints_the_file_with_its_comments(tmp_path: Path) -> None:
    text = (ROOT / "policies" / "swap.yaml").read_text()
    assert deltactl("policies", "show", "swap").output == text
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    assert deltactl("policies", "show", str(mine)).output == text


def test_policies_show_refuses_unknown_names() -> None:
    assert "no policy of that name" in refused(deltactl("policies", "show", "nope"))


# --- timeline ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def timeline_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    timeline = Timeline(path, {"policy": "delta", "device": "cpu"})
    timeline.emit("memory", 5, resident_bytes=100)
    timeline.emit("step", 9, index=0, mode="idle", start_ns=0, end_ns=9, peak_bytes=100)
    timeline.close()
    return path


def test_timeline_prints_a_table(timeline_file: Path) -> None:
    text = deltactl("timeline", str(timeline_file)).output
    assert text.startswith("policy delta on cpu, 1 steps, 2 events\n")
    assert "100 B" in text


def test_timeline_tells_who_holds_the_memory(timeline_file: Path, tmp_path: Path) -> None:
    path, trace = tmp_path / "named.jsonl", tmp_path / "trace.json"
    timeline = Timeline(path, {"policy": "delta", "device": "cpu"})
    timeline.emit("saved", 5, record=1, nbytes=2048, op="aten.mm", module="blocks.0")
    timeline.emit("step", 9, index=0, mode="observe", start_ns=0, end_ns=9, peak_bytes=2048)
    timeline.close()
    for by, name in (("op", "aten.mm"), ("module", "blocks.0")):
        lines = deltactl("timeline", str(path), "--by", by, "--chrome", str(trace)).output.splitlines()
        assert lines[0] == f"policy delta on cpu, step 0 (observe) of 1, the last in which {by}s are known"
        assert (lines[2].split()[0], lines[4].split()[:5]) == (by, [name, "1", "2", "KiB", "2"])
    assert trace.exists()
    assert "--by layer: allowed are op, module" in refused(deltactl("timeline", str(path), "--by", "layer"))
    assert "tells the op of a saved tensor" in refused(deltactl("timeline", str(timeline_file), "--by", "op"))
    both = deltactl("timeline", str(path), str(path), "--svg", str(tmp_path / "run.svg"), "--by", "op")
    assert "only --svg takes more than one" in refused(both)


def test_timeline_writes_what_is_asked_for(timeline_file: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "run.svg"
    outcome = deltactl("timeline", str(timeline_file), "--chrome", str(trace), "--svg", str(picture))
    assert (outcome.exit_code, outcome.output) == (0, "")
    assert any(item["name"] == "step 0 (idle)" for item in json.loads(trace.read_text())["traceEvents"])
    assert "run (peak 100 B)" in picture.read_text()


def test_timeline_draws_several_runs(timeline_file: Path, tmp_path: Path) -> None:
    other, picture = tmp_path / "plain.v2.jsonl", tmp_path / "both.svg"
    other.write_bytes(timeline_file.read_bytes())
    assert deltactl("timeline", str(timeline_file), str(other), "--svg", str(picture)).exit_code == 0
    assert "plain.v2 (peak 100 B)" in picture.read_text() and "run (peak 100 B)" in picture.read_text()
    assert "only --svg takes more than one" in refused(deltactl("timeline", str(timeline_file), str(other)))


def test_timeline_refuses_bad_files(timeline_file: Path, tmp_path: Path) -> None:
    assert "No such file" in refused(deltactl("timeline", str(tmp_path / "none.jsonl")))
    bad = str(tmp_path / "no" / "such" / "place.json")
    assert f"{bad!r} cannot be written" in refused(deltactl("timeline", str(timeline_file), "--chrome", bad))


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_defaults_are_those_of_its_options() -> None:
    from delta.runtime.demo import DemoOptions

    defaults = {name: parameter.default for name, parameter in inspect.signature(demo).parameters.items()}
    del defaults["as_json"]
    assert defaults == {field.name: field.default for field in fields(DemoOptions)}


def test_demo_refuses_bad_arguments() -> None:
    assert refused(deltactl("demo", "--steps", "0")).startswith("steps=0: must be at least 1")
    assert "8 apples" in refused(deltactl("demo", "--activations", "8 apples"))


@pytest.mark.parametrize(("gradients", "code"), [("a", 0), ("b", 1)])
def test_demo_prints_json_last_and_fails_on_different_gradients(
    monkeypatch: pytest.MonkeyPatch, gradients: str, code: int
) -> None:
    from delta.runtime import demo_view
    from delta.runtime.demo import DemoOptions, DemoResult, Side

    def outcome(options: DemoOptions) -> DemoResult:
        plain = Side(
            times_ns=(4,),
            losses=("0x1p+1",),
            gradients=("a",),
            parameters="p",
            start_rss_bytes=1,
            peak_rss_bytes=2,
            rss_method="VmHWM",
            counted_peak_bytes=8,
        )
        other = {"gradients": (gradients,), "report": {"peak_activation_bytes": 2}, "counted_peak_bytes": None}
        return DemoResult(options, {"plain": plain, "delta": _changed(plain, other)})

    monkeypatch.setattr(demo_view, "run_with_progress", outcome)
    done = deltactl("demo", "--steps", "1", "--json", "--timeline", "t.jsonl")
    assert done.exit_code == code
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["gradients_identical"] == (code == 0) and last["losses_identical"] is True
    wanted = {"step_time_ratio": 1.0, "peak_activation_ratio": 0.25, "peak_rss_ratio": 1.0}
    assert wanted.items() <= last.items()
    assert (last["steps"], last["timeline"]) == (1, "t.jsonl")


def _changed(side: Any, changes: dict[str, Any]) -> Any:
    from dataclasses import replace

    return replace(side, **changes)


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_says_that_a_spill_directory_lives_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta.runtime.monitor._file_system", lambda _: "tmpfs")
    assert "(tmpfs)" in (text := deltactl("doctor").output) and "spilling there saves none" in text


def test_doctor_tells_the_same_as_text_and_json() -> None:
    text, found = deltactl("doctor").output, json.loads(deltactl("doctor", "--json").output)
    cpu = found["devices"][0]
    assert cpu["name"] == "cpu" and cpu["problem"] is None
    assert cpu["out_bytes_per_s"] > 1e6 and cpu["in_bytes_per_s"] > 1e6
    assert found["versions"]["torch"] and found["versions"]["torch"] in text
    assert found["ram_bytes"] >= found["ram_available_bytes"] > 0
    assert "copies out" in text and found["spill_directory"] in text
    for item in found["missing"]:
        assert item["what"] in text and item["how"] in text


@pytest.mark.parametrize("lacks", [True, False])
def test_doctor_tells_of_huge_pages_where_they_help(monkeypatch: pytest.MonkeyPatch, lacks: bool) -> None:
    from delta.runtime import doctor

    monkeypatch.setattr(doctor, "heap_lacks_huge_pages", lambda: lacks)
    told = "start Python with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment" in deltactl("doctor").output
    assert told is lacks


def test_doctor_reports_a_device_that_fails_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from delta.runtime import doctor

    def broken(name: str, host: object) -> None:
        raise SwapError("no driver")

    monkeypatch.setattr(doctor, "make_device", broken)
    outcome = deltactl("doctor")
    assert outcome.exit_code == 0
    assert "not usable: no driver" in outcome.output


def test_doctor_tells_of_a_card_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(index: int) -> str:
        raise RuntimeError("card fell off the bus")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", fails)
    cpu, card = json.loads(deltactl("doctor", "--json").output)["devices"]
    assert cpu["problem"] is None
    assert card["name"] == "cuda:0" and card["problem"] == "not usable: card fell off the bus"


def test_doctor_tells_that_there_is_no_directory_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    outcome = deltactl("doctor")
    assert outcome.exit_code == 0, outcome.output
    assert "No usable temporary directory found in ['/tmp'], not writable" in outcome.output
    assert "device cpu" in outcome.output and "not usable: " in outcome.output


# --- run --------------------------------------------------------------------------------------------------------------


class FakeRun:
    """Stands for what `delta.evict` returns."""

    traces = ()

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.open = arguments, False

    def __enter__(self) -> "FakeRun":
        if self.arguments["budget"] == "bad":
            raise delta.BudgetError("budget='bad'")
        self.open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self.open = False

    def report(self) -> Report:
        return Report(policy="fake", device="cpu", steps=3)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """What a fake `delta.evict` has returned so far."""
    made: list[FakeRun] = []

    def evict(**arguments: Any) -> FakeRun:
        made.append(FakeRun(**arguments))
        return made[-1]

    monkeypatch.setitem(vars(delta), "evict", evict)
    return made


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def test_run_looks_like_the_interpreter_to_the_script(runs: list[FakeRun], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 5\n")
    path = script(
        tmp_path,
        "import sys, beside, pickle\nclass Local: pass\npickle.dumps(Local())\n"
        "print(__name__, sys.argv[1:], sys.path[0], beside.value, __file__)\n",
    )
    argv, search = sys.argv, sys.path
    done = deltactl("run", "--budget", "8GiB", path, "--steps", "3", "--", "-x")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"__main__ ['--steps', '3', '--', '-x'] {tmp_path} 5 {path}\n"
    assert runs[0].arguments == {
        "budget": "8GiB",
        "activations": None,
        "policy": "delta",
        "device": None,
        "timeline": None,
        "trace": None,
    }
    assert not runs[0].open
    assert sys.argv is argv and sys.path is search
    assert "policy fake on cpu\n  steps               3\n" in done.stderr


@pytest.mark.parametrize(
    ("given", "rank", "device"),
    [((), "1", "cuda:1"), ((), "2", None), ((), None, None), (("--device", "cpu"), "1", "cpu")],
)
def test_run_trains_on_the_card_of_its_rank_unless_told_otherwise(
    runs: list[FakeRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
    rank: str | None,
    device: str | None,
) -> None:
    """torchrun tells a script its rank; on which card it will train the script tells nobody before the block begins."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert deltactl("run", *given, script(tmp_path, "")).exit_code == 0
    assert runs[0].arguments["device"] == device


def test_run_writes_the_report(runs: list[FakeRun], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert deltactl("run", "--report", str(file), script(tmp_path, "")).exit_code == 0
    assert json.loads(file.read_text())["steps"] == 3


@pytest.mark.parametrize("place", ["no/r.json", "."])
def test_run_says_before_the_script_runs_that_there_can_be_no_report(
    runs: list[FakeRun], tmp_path: Path, place: str
) -> None:
    file = tmp_path / place
    bad = deltactl("run", "--report", str(file), script(tmp_path, "print('ran')"))
    assert refused(bad).startswith(f"report={str(file)!r}: cannot be written: give a file in a directory that exists")
    assert bad.stdout == ""


def test_a_script_of_a_relative_path_looks_as_under_the_interpreter(
    runs: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(__file__, sys.argv)\nraise ValueError\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ours = deltactl("run", "../train.py", "-x")
    own = subprocess.run([sys.executable, "../train.py", "-x"], capture_output=True, text=True)
    assert ours.stdout == own.stdout == f"{tmp_path}/here/../train.py ['../train.py', '-x']\n"
    assert ours.stderr.partition("policy")[0] == own.stderr
    assert own.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/here/../train.py", line 3')


@pytest.mark.parametrize(("safely", "found"), [((), True), (("-P",), False)])
def test_the_way_to_modules_is_as_under_the_interpreter(safely: tuple[str, ...], found: bool, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    text = "import sys, importlib.util as u\nprint(u.find_spec('beside') is not None, '/marker' in sys.path)"
    command = [sys.executable, *safely, "-m", "delta", "run", script(tmp_path, text)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["/marker", str(ROOT)])}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{found} True\n", done.stderr


@pytest.mark.parametrize(
    ("environment", "mark"),
    [({"WORLD_SIZE": "4", "RANK": "3"}, "-rank3"), ({"WORLD_SIZE": "1", "RANK": "0"}, ""), ({"WORLD_SIZE": "4"}, "")],
)
def test_each_of_several_processes_writes_files_of_its_own(
    runs: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], mark: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    files = ("--timeline", f"{tmp_path}/t.jsonl.gz", "--report", f"{tmp_path}/r.json")
    assert deltactl("run", *files, script(tmp_path, "")).exit_code == 0
    assert runs[0].arguments["timeline"] == f"{tmp_path}/t{mark}.jsonl.gz"
    assert [path.name for path in tmp_path.glob("*.json")] == [f"r{mark}.json"]
    deltactl("trace", "--output", f"{tmp_path}/step.jsonl.gz", script(tmp_path, ""))
    assert runs[1].arguments["trace"].path == tmp_path / f"step{mark}.jsonl.gz"


@pytest.mark.parametrize(("code", "text"), [(0, "exit()"), (7, "exit(7)"), (1, "exit('gone')")])
def test_run_passes_the_exit_code_through(runs: list[FakeRun], tmp_path: Path, code: int, text: str) -> None:
    done = deltactl("run", script(tmp_path, f"import sys\nsys.{text}\n"))
    assert done.exit_code == code
    assert "policy fake on cpu" in done.stderr


@pytest.mark.parametrize(
    ("text", "told", "code"),
    [("return 1 / 0", "ZeroDivisionError", 1), ("raise KeyboardInterrupt", "KeyboardInterrupt", 130)],
)
def test_run_shows_the_scripts_own_traceback(
    text: str, told: str, code: int, runs: list[FakeRun], tmp_path: Path
) -> None:
    done = deltactl("run", script(tmp_path, f"def f():\n    {text}\nf()\n"))
    assert done.exit_code == code
    assert done.stderr.startswith(
        f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 3, in <module>'
    )
    assert told in done.stderr and "runpy" not in done.stderr
    assert "policy fake on cpu" in done.stderr
    assert not runs[0].open


def test_run_shows_a_syntax_error(runs: list[FakeRun], tmp_path: Path) -> None:
    done = deltactl("run", script(tmp_path, "def f(:\n"))
    assert done.exit_code == 1
    assert "SyntaxError" in done.stderr and "runpy" not in done.stderr


def test_run_ends_on_an_error_of_delta_with_its_text(runs: list[FakeRun], tmp_path: Path) -> None:
    done = deltactl("run", script(tmp_path, "import delta\nraise delta.SwapError('disk full')\n"))
    assert done.exit_code == 2
    assert "deltactl: disk full" in done.stderr and "Traceback" not in done.stderr


def test_run_shows_where_a_script_has_changed_what_backward_needs(runs: list[FakeRun], tmp_path: Path) -> None:
    """Plain PyTorch would have raised there, too."""
    done = deltactl("run", script(tmp_path, "import delta\nraise delta.StorageModifiedError('changed')\n"))
    assert done.exit_code == 1
    assert f'File "{tmp_path}/train.py", line 2, in <module>' in done.stderr
    assert "StorageModifiedError: changed" in done.stderr


def test_run_refuses_what_cannot_run(runs: list[FakeRun], tmp_path: Path) -> None:
    assert "there is no such file" in refused(deltactl("run", str(tmp_path / "none.py")))
    assert runs == []
    assert refused(deltactl("run", "--budget", "bad", script(tmp_path, "print('ran')"))) == "budget='bad'\n"
