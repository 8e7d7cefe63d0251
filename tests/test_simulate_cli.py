"""`deltactl simulate` and `deltactl compare`: tables, JSON, plots, and what is refused."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from logs import chain, random_net
from typer.testing import CliRunner, Result

from delta.cli import app
from delta.simulate import Run, simulate
from delta.trace import Evictable, Trace, read, write
from delta.trace.events import Backward, Constant, Event, Free, Need, Op, Save, Unsave


def deltactl(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="deltactl")


def printed(*arguments: str) -> list[str]:
    outcome = deltactl(*arguments)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout.splitlines()


def refused(*arguments: str) -> str:
    outcome = deltactl(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("deltactl: ") and "Traceback" not in outcome.output
    return outcome.stderr.removeprefix("deltactl: ")


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(random_net(12, 0).write(tmp_path / "net.log"))


def test_json_has_an_object_for_each_run_with_every_field(log: str) -> None:
    policies = ("--policy", "dtr", "--policy", "delta", "--set", "filter.min_bytes=0")
    lines = printed("simulate", log, *policies, "--budget", "0.6", "--budget", "50%", "--json")
    runs = [json.loads(line) for line in lines]
    assert [run["policy"] for run in runs] == ["dtr", "dtr", "delta", "delta"]
    assert all(list(run) == [field.name for field in fields(Run)] for run in runs)
    base_ns = read(log).base_ns
    for run in runs:
        assert (run["trace"], run["base_ns"], run["allocator"]) == ("net", base_ns, "ideal")
        assert run["status"] == "ok" and run["peak_bytes"] <= run["budget_bytes"]
        assert run["overhead"] == run["total_ns"] / base_ns >= 1
        assert run["decision_ns"] > 0 < run["decisions"]
    assert runs[0]["budget_bytes"] > runs[1]["budget_bytes"]


def test_the_table_has_a_line_for_each_run_and_says_why_one_failed(log: str) -> None:
    head, rule, *rows = printed("simulate", log, "--policy", "dtr", "--budget", "1.0", "--budget", "0.3")
    assert head.split() == [
        *("trace", "policy", "budget", "overhead", "first", "peak"),
        *("swapped", "recomputed", "stalled", "free", "decisions"),
    ]
    assert set(rule) <= {"-", " ", "─"}
    assert rows[0].split()[:2] == ["net", "dtr"] and "1.0000" in rows[0]
    assert rows[1].split()[:2] == ["net", "dtr"]
    assert "infeasible" in rows[1] or "thrash" in rows[1]
    assert rows[2].startswith("net, dtr, ") and len(rows) == 3


def test_where_the_device_has_room_for_everything_no_share_of_it_is_free(tmp_path: Path) -> None:
    path, made = str(tmp_path / "step.jsonl"), range(1, 7)
    forward = [(Op("aten.gelu", (n - 1,), (n,), (100,), 10), Save(n), *[Free(n - 1)][: n - 1]) for n in made]
    backward = [(Need(n), Unsave(n)) for n in reversed(made)]
    write(Trace("step", Evictable.SAVED, (Constant(0, 100), *sum(forward, ()), Backward(), *sum(backward, ()))), path)
    arguments = ("simulate", path, "--policy", "recompute", "--set", "filter.min_bytes=0", "--budget", "60%")
    assert printed(*arguments)[2].split()[-2] == "-"
    run = json.loads(printed(*arguments, "--json")[0])
    assert run["fragmentation"] is None and run["decisions"] > 0


def test_a_budget_in_bytes(log: str) -> None:
    (line,) = printed("simulate", log, "--policy", "dtr", "--budget", "1MiB", "--json")
    assert json.loads(line)["budget_bytes"] == 2**20


def test_a_link_makes_swapping_possible(log: str) -> None:
    arguments = ("simulate", log, "--policy", "swap", "--budget", "0.6", "--set", "filter.min_bytes=0", "--json")
    assert "can only swap, and there is no link: give one with --link" in refused(*arguments)
    run = json.loads(printed(*arguments, "--link", "1GB/s")[0])
    assert run["status"] == "ok" and run["swapped_bytes"] > 0 == run["recomputed_ns"]
    slow = json.loads(printed(*arguments, "--link", "100MB/s")[0])
    assert slow["stall_ns"] > run["stall_ns"]


def test_overrides_reach_the_policy(log: str) -> None:
    overheads = set()
    for cost in ("own", "classes"):
        (line,) = printed(
            "simulate", log, "--policy", "dtr", "--budget", "0.5", "--set", f"filter.cost={cost}", "--json"
        )
        overheads.add(json.loads(line)["overhead"])
    assert len(overheads) == 2


def test_the_modelled_allocator_of_cuda(log: str) -> None:
    (line,) = printed("simulate", log, "--policy", "dtr", "--budget", "4MiB", "--allocator", "caching", "--json")
    assert json.loads(line)["allocator"] == "caching"


def test_a_trace_of_delta_is_taken_like_a_log(log: str, tmp_path: Path) -> None:
    copy = tmp_path / "net.jsonl.gz"
    write(read(log), copy)
    arguments = ("--policy", "dtr", "--budget", "0.5", "--json")
    first, second = (json.loads(printed("simulate", path, *arguments)[0]) for path in (log, str(copy)))
    assert first | {"decision_ns": 0} == second | {"decision_ns": 0}


def test_garbage_is_looked_for_less_while_a_step_is_simulated(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = gc.get_threshold(), []

    def watched(*arguments: Any) -> Run:
        seen.append(gc.get_threshold())
        return simulate(*arguments)

    monkeypatch.setattr("delta.simulate.simulate", watched)
    printed("simulate", log, "--policy", "dtr", "--budget", "0.8", "--json")
    assert seen[0][0] > before[0]
    assert gc.get_threshold() == before


def test_compare_prints_policies_by_budgets_for_each_trace(log: str, tmp_path: Path) -> None:
    other = str(chain(10).write(tmp_path / "chain.log"))
    arguments = ("--policy", "dtr", "--policy", "delta", "--budget", "0.5", "--budget", "1.0")
    text = "\n".join(printed("compare", log, other, *arguments))
    first, second = (part.splitlines() for part in text.split("\n\n"))
    for part, name in ((first, "net"), (second, "chain")):
        assert part[0].split()[0] == name
        assert [line.split()[0] for line in part[2:]] == ["dtr", "delta"]
        assert all(line.split()[1] == "1.0000" for line in part[2:]), "the larger budget first: nothing goes"


def test_compare_writes_a_page(log: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "plot.html"
    printed("compare", log, "--policy", "dtr", "--budget", "0.5", "--plot", str(page))
    assert "net: dtr" in page.read_text(encoding="utf-8")


def test_what_has_the_same_name_is_told_apart_by_what_was_given(log: str, tmp_path: Path) -> None:
    other, mine = tmp_path / "other" / "net.log", tmp_path / "mine.yaml"
    other.parent.mkdir()
    random_net(12, 1).write(other)
    mine.write_text("name: dtr\nfilter: {score: lru, cost: own}\ndirector: {actions: [keep, recompute]}\n")
    arguments = (log, str(other), "--policy", "dtr", "--policy", str(mine), "--policy", "coop", "--budget", "0.5")
    runs = [json.loads(line) for line in printed("simulate", *arguments, "--allocator", "caching", "--json")]
    labels = [(trace, policy) for trace in (log, str(other)) for policy in ("dtr", str(mine), "coop")]
    assert [(run["trace"], run["policy"]) for run in runs] == labels
    parts = "\n".join(printed("compare", *arguments, "--allocator", "caching")).split("\n\n")
    assert [[line.split()[0] for line in part.splitlines()] for part in parts] == [
        [label, "-" * len(max(label, str(mine), key=len)), "dtr", str(mine), "coop"] for label in (log, str(other))
    ]


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for plotly, which may not be installed: its page is empty but for one line."""

    class Figure:
        def update_layout(self, **given: Any) -> None: ...

        def add_scatter(self, **given: Any) -> None: ...

        def write_html(self, path: Path, **given: Any) -> None:
            path.write_text("page")

    graph_objects = SimpleNamespace(Figure=Figure)
    monkeypatch.setitem(sys.modules, "plotly", cast(ModuleType, SimpleNamespace(graph_objects=graph_objects)))


@pytest.mark.parametrize("place", ["no/p.html", "."])
def test_a_page_that_cannot_be_is_told_before_the_first_run(
    log: str, tmp_path: Path, place: str, drawing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta.simulate.simulate", None)
    page = tmp_path / place
    message = refused("compare", log, "--policy", "dtr", "--budget", "0.5", "--plot", str(page))
    assert message.startswith(f"--plot {str(page)!r}: cannot be written")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_a_page_that_fails_in_the_end_is_told(log: str, drawing: None) -> None:
    arguments = ("compare", log, "--policy", "dtr", "--budget", "0.5", "--plot", "/dev/full")
    assert "--plot '/dev/full': cannot be written: No space left on device" in refused(*arguments)


def test_plotly_that_is_missing_is_told_before_the_first_run(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("delta.simulate.simulate", None)
    message = refused("compare", log, "--policy", "dtr", "--budget", "0.5", "--plot", "p.html")
    assert message == "plots need plotly: pip install 'delta-evict[plot]'\n"


@pytest.mark.parametrize(
    "last", [["--budget", "0.01"], ["--policy", "swap", "--budget", "0.6"], ["--policy", "coop", "--budget", "0.6"]]
)
def test_nothing_runs_where_one_run_cannot_be(log: str, last: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta.simulate.simulate", None)
    assert refused("compare", log, "--policy", "dtr", "--budget", "0.5", *last)


def test_a_step_without_times_is_refused(log: str, tmp_path: Path) -> None:
    timeless = replace(read(log), name="still", events=tuple(map(_timeless, read(log).events)))
    path = tmp_path / "timeless.jsonl"
    write(timeless, path)
    message = refused("simulate", log, str(path), "--policy", "dtr", "--budget", "0.5")
    assert message.startswith("trace still: its ops take no time, so there is nothing to compare with")


def _timeless(event: Event) -> Event:
    return replace(event, cost_ns=0) if isinstance(event, Op) else event


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--budget", "0.01"], "its constants and what its largest op"),
        (["--budget", "lots"], "budget='lots'"),
        (["--budget", "0.5", "--link", "fast"], "link='fast'"),
        (["--budget", "0.5", "--allocator", "best"], "--allocator best: allowed are ideal, caching"),
        (["--budget", "0.5", "--set", "filter.cost"], "--set filter.cost: give KEY=VALUE"),
        (["--budget", "0.5", "--set", "filter.cst=own"], "unknown key. Did you mean 'filter.cost'?"),
        (
            ["--budget", "0.5", "--set", "filter.min_bytes=%50"],
            "--set filter.min_bytes=%50: not a value in YAML: expected",
        ),
        (["--budget", "0.5", "--set", "filter.min_bytes=!!int ''"], "--set filter.min_bytes=!!int '': not a value"),
    ],
)
def test_bad_options_are_refused(log: str, options: list[str], why: str) -> None:
    assert why in refused("simulate", log, "--policy", "dtr", *options)


def test_a_policy_that_needs_addresses_is_refused_where_there_are_none(log: str) -> None:
    message = refused("simulate", log, "--policy", "coop", "--budget", "0.5", "--allocator", "ideal")
    assert "policy coop" in message and "has no addresses" in message and "--allocator caching or slab" in message
    assert printed("simulate", log, "--policy", "coop", "--budget", "64MiB", "--allocator", "slab", "--json")


def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "no.log"
    path.write_text('{"INSTRUCTION": "JUMP"}\n')
    message = refused("simulate", str(path), "--policy", "dtr", "--budget", "0.5")
    assert "line 1" in message and "'JUMP'" in message
