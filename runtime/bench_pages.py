"""Figures in pages come from measurements, never from a keyboard.

A page marks a place with ``<!-- figure: NAME -->`` and ``<!-- /figure -->``; what stands between is made here from the
benchmark's result (kept beside the pages as JSON), from running the README's own example, or by drawing two real runs.
Tests make it again from the same JSON and compare.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from delta.errors import DeltaError
from delta.runtime.bench_measure import BenchResult
from delta.runtime.bench_view import headline, markdown_goals, markdown_setting, markdown_table
from delta.runtime.demo import DemoOptions
from delta.runtime.demo_process import WorkerProcess
from delta.timeline import Series, read_timeline, to_svg

COMMAND = "scripts/bench --write-docs"
NOT_MEASURED = f"*Not measured yet: `{COMMAND}` fills this in.*"
RESULT = "docs/benchmark.json"
_PLACE = re.compile(r"(<!-- figure: (?P<name>[\w-]+) -->\n)(?P<content>.*?)(<!-- /figure -->)", re.DOTALL)
_EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def figures(result: BenchResult) -> dict[str, dict[str, str]]:
    """Page -> name of a place -> what belongs there, for a result."""
    return {
        "README.md": {"headline": headline(result)},
        "docs/benchmark.md": {
            "setting": markdown_setting(result, COMMAND),
            "ways": markdown_table(result),
            "goals": markdown_goals(result),
        },
    }


def read_places(page: str) -> dict[str, str]:
    """Name of each place in a page -> what stands there."""
    return {place["name"]: place["content"].rstrip("\n") for place in _PLACE.finditer(page)}


def fill(page: str, contents: Mapping[str, str]) -> str:
    """The page with these places filled anew, others as they are. DeltaError for a place it does not have."""
    missing = contents.keys() - read_places(page).keys()
    if missing:
        raise DeltaError(f"no place <!-- figure: {min(missing)} --> ... <!-- /figure --> in the page to fill")
    return _PLACE.sub(
        lambda place: f"{place[1]}{contents.get(place['name'], place['content'].rstrip())}\n{place[4]}", page
    )


def example(readme: str) -> str:
    """The first Python block of a page."""
    found = _EXAMPLE.search(readme)
    if found is None:
        raise DeltaError("the page holds no ```python block to run")
    return found[1]


def run_example(readme: str) -> str:
    """What the page's first Python block prints, as a block of text. DeltaError if it fails."""
    done = subprocess.run([sys.executable, "-c", example(readme)], capture_output=True, text=True)
    if done.returncode:
        raise DeltaError(f"the example of the page fails:\n{done.stderr}")
    return f"```text\n{done.stdout.rstrip()}\n```"


def write_pages(result: BenchResult, root: Path) -> list[Path]:
    """Fill the pages of the checkout at ``root`` and keep the result there. Returns the files written."""
    contents = figures(result)
    pages = {name: _read(root / name) for name in contents}
    contents["README.md"]["example"] = run_example(pages["README.md"])
    filled = {root / name: fill(page, contents[name]) for name, page in pages.items()}
    filled[root / RESULT] = to_json(result)
    for path, text in filled.items():
        path.write_text(text, encoding="utf-8")
    return list(filled)


def to_json(result: BenchResult) -> str:
    """The result as the text of a JSON file."""
    return json.dumps(result.as_dict(), indent=2) + "\n"


def read_result(path: Path) -> BenchResult:
    """A result from its JSON file. DeltaError if it is not one."""
    try:
        values = json.loads(_read(path))
    except ValueError as error:
        raise DeltaError(f"{path}: not JSON: {error}") from error
    return BenchResult.from_dict(values)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DeltaError(f"{path} cannot be read: {error.strerror}; pages are written in a checkout only") from error


def draw_two_runs(options: DemoOptions) -> str:
    """The picture of the first screen: the same steps without and with the limit, one run after the other, as SVG."""
    limit = options.activations
    series = [_run(f"Delta with {limit}", options, limit), _run("plain PyTorch", options, None)]
    return to_svg(series, title=f"Saved activations of a GPT over {options.steps} training steps")


def _run(label: str, options: DemoOptions, activations: str | None) -> Series:
    """Train in a process of its own; its timeline. Without a limit Delta only watches, which is how plain gets one."""
    with tempfile.TemporaryDirectory() as directory:
        timeline = Path(directory, "run.jsonl")
        spec = replace(options.spec("delta"), activations=activations, timeline=str(timeline))
        with WorkerProcess(spec) as worker:
            worker.wait_ready()
            for index in range(options.steps):
                worker.ask({"do": "step", "index": index})
            worker.ask({"do": "finish"})
        return Series(label, *read_timeline(timeline))
