"""The pages: their code runs, their tables list what there is, and their figures are those of the measurement."""

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel

import delta
from delta.cli import app
from delta.config import Policy
from delta.errors import PolicyError
from delta.policies.loader import load
from delta.runtime.bench.pages import (
    DEVICES,
    figures,
    largest_figures,
    largest_file,
    nothing_measured,
    read_bench,
    read_largest,
    result_file,
)
from delta.runtime.bench.pages import page as page_of
from delta.runtime.pages import example, read_places
from delta.timeline import EVENTS
from delta.timeline.format import VERSION_KEY

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    """The text under a heading, up to the next heading of its level or above."""
    _, _, rest = page(name).partition(f"\n## {title}\n")
    assert rest, f"{name} has no section {title!r}"
    return rest.partition("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The rows of the first table of a text, heading and rule left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def unquoted(cell: str) -> list[str]:
    """What stands in backticks in a cell."""
    return re.findall(r"`([^`]*)`", cell)


# --- README -----------------------------------------------------------------------------------------------------------


def shape(output: str) -> list[str]:
    """The lines of an output without what differs from run to run: sizes, times, counts."""
    return [re.sub(r"  +.*", "", line.strip()) for line in output.splitlines()]


def test_the_ten_lines_print_what_the_page_says(one_thread: None) -> None:
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(example(page("README.md")), "README.md", "exec"), {})
    (shown,) = blocks(read_places(page("README.md"))["example"], "text")
    assert shape(shown) == shape(printed.getvalue())
    share = float(re.search(r"peak activations .*\((.*)% of unevicted\)", printed.getvalue())[1])
    assert 0 < share <= 40


def test_the_ten_lines_are_about_ten() -> None:
    assert len([line for line in example(page("README.md")).splitlines() if line and "import" not in line]) <= 10


def test_the_table_of_policies_is_what_is_shipped() -> None:
    rows = table(section("README.md", "Policies"))
    assert [unquoted(name)[0] for name, _, _ in rows] == delta.policies()
    for name, summary, source in rows:
        policy = load(unquoted(name)[0])
        assert summary == policy.summary
        assert ("10.1145/3689338" in policy.source) == ("10.1145/3689338" in source)


def test_the_table_of_commands_is_the_command_line() -> None:
    named = {unquoted(command)[0].split()[1] for command, _ in table(section("README.md", "Command line"))}
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert named == commands | {group.name for group in app.registered_groups}


def test_ten_sentences() -> None:
    assert len(re.findall(r"^\d+\. ", section("README.md", "How it works"), re.MULTILINE)) == 10


def test_the_first_screen_has_a_picture() -> None:
    (picture,) = re.findall(r"!\[.+\]\((.+)\)", page("README.md"))
    svg = page(picture)
    assert all(words in svg for words in ("plain PyTorch (peak ", "Delta with 40% (peak ", "budget ("))


# --- figures ----------------------------------------------------------------------------------------------------------


def measured(device: str) -> dict[str, dict[str, str]]:
    """Page -> name of a place -> what belongs there, by the results that are kept."""
    found = {page_of(device): nothing_measured(device)}
    if (ROOT / result_file(device)).exists():
        result = read_bench(ROOT / result_file(device))
        found = {name: found.get(name, {}) | places for name, places in figures(result).items()}
    if (ROOT / largest_file(device)).exists():
        found[page_of(device)] |= largest_figures(read_largest(ROOT / largest_file(device)))[page_of(device)]
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_figures_are_those_of_the_measurement(device: str) -> None:
    for name, places in measured(device).items():
        there = read_places(page(name))
        there.pop("example", None)
        assert there == places


def test_where_nothing_was_measured_the_page_says_so() -> None:
    text = page(page_of("cuda"))
    assert (ROOT / result_file("cuda")).exists() != ("*Not measured on CUDA.*" in text.partition("## Result")[0])


# --- docs -------------------------------------------------------------------------------------------------------------


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{name}.")
        else:
            yield prefix + name


def test_every_policy_key_has_its_row_and_its_default() -> None:
    rows = {unquoted(key)[0]: unquoted(default) for key, default, _, _ in table(section("docs/policies.md", "Keys"))}
    assert list(rows) == list(keys(Policy))
    assert rows.pop("name") == []
    defaults = {key: yaml.safe_load(default) for key, (default,) in rows.items()}
    assert load("keep", {**defaults, "name": "x"}) == Policy(name="x")


def test_every_score_and_value_is_named() -> None:
    rows = {unquoted(key)[0]: set(unquoted(values)) for key, _, values, _ in table(section("docs/policies.md", "Keys"))}
    schema = Policy.model_json_schema()["$defs"]
    assert rows["filter.score"] == set(schema["FilterConfig"]["properties"]["score"]["anyOf"][0]["enum"])
    assert rows["planner.kind"] == set(schema["PlannerConfig"]["properties"]["kind"]["anyOf"][0]["enum"])
    scores = [unquoted(name)[0] for name, _, _ in table(section("docs/policies.md", "Scores"))]
    assert scores == schema["FilterConfig"]["properties"]["score"]["anyOf"][0]["enum"]


def test_the_page_of_policies_says_what_happens(tmp_path: Path) -> None:
    text = page("docs/policies.md")
    overriding, *_, mistaken = blocks(text, "python")
    printed, *_, message = blocks(text, "text")
    out = StringIO()
    with redirect_stdout(out):
        exec(overriding, names := {})
    assert out.getvalue() == printed
    with pytest.raises(PolicyError) as caught:
        exec(mistaken, names)
    assert f"delta.errors.PolicyError: {caught.value}\n" == message
    (tmp_path / "big-host.yaml").write_text(blocks(text, "yaml")[0])
    policy = load(tmp_path / "big-host.yaml")
    assert policy.name == "big-host"
    assert (policy.rule_for("aten.convolution"), policy.rule_for("aten.relu", "layer4.1")) == ("swap", "keep")


def test_every_event_has_its_row() -> None:
    rows = table(section("docs/timeline.md", "Events"))
    found = {unquoted(kind)[0]: (unquoted(required), unquoted(optional)) for kind, required, optional, _ in rows}
    assert found == {name: (list(kind.required), list(kind.optional)) for name, kind in EVENTS.items()}


def test_the_timeline_page_reads_a_real_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with delta.evict(timeline="run.jsonl"):
        torch.ones(3, requires_grad=True).exp().sum().backward()
    (code,) = blocks(page("docs/timeline.md"), "python")
    exec(code, names := {})
    assert names["swapped"] == 0 and names["header"]["policy"] == "delta"
    header = section("docs/timeline.md", "Header")
    assert {VERSION_KEY, "policy", "device", "budget", "torch", "started"} == set(names["header"])
    assert all(f"`{key}`" in header for key in names["header"])


def test_the_pages_of_traces_and_of_the_simulator_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)))
    names: dict[str, Any] = {"train": lambda: net(torch.randn(512, 64)).square().mean().backward()}
    with redirect_stdout(StringIO()) as out:
        for name in ("docs/traces.md", "docs/simulator.md"):
            for code in blocks(page(name), "python"):
                exec(code, names)
    assert out.getvalue().startswith("trace step on cpu\n") and names["run"].status == "ok"
    assert names["slowest"].cost_ns > 0 < names["peak_bytes"]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page(name))
    local = [target for target in targets if "://" not in target]
    assert all(((ROOT / name).parent / target).exists() for target in local), local


@pytest.mark.parametrize("name", PAGES)
def test_files_that_are_named_exist(name: str) -> None:
    named = [
        path for path in unquoted(page(name)) if re.fullmatch(r"(runtime|delta|scripts|policies|docs)/[\w./-]+", path)
    ]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("half", ["delta", "runtime"])
def test_every_part_has_its_place_in_the_design(half: str) -> None:
    named = set(re.findall(r"`([\w*]+)/?`", section("docs/design.md", "4. Two halves")))
    parts = {path.stem for path in (ROOT / half).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    parts -= {"__init__", "__main__", "runtime", "policies"}
    assert {"demo*" if part.startswith("demo") else part for part in parts} - named == set()


NUMBERED = {  # how comments name a numbered part of docs/design.md, and how that part begins there
    r"section (\d+)(?![.\d])": "\n## {}. ",
    r"\brules? (\d+)": "\n{}. **",
    r"romises? P(\d)": "\n- **P{}, ",
}


@pytest.mark.parametrize("named", NUMBERED)
def test_what_comments_name_by_number_is_in_the_design(named: str) -> None:
    sources = [path for folder in ("delta", "runtime", "policies") for path in (ROOT / folder).rglob("*.py")]
    found = {number for path in sources for number in re.findall(named, path.read_text(encoding="utf-8"))}
    assert found
    design = page("docs/design.md")
    assert [number for number in sorted(found) if NUMBERED[named].format(number) not in design] == []
