"""The pages that the benchmarks fill, one for each device in docs/benchmarks/, and the README's sentence.

A result is kept beside its page as JSON; a test makes the figures again from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from delta.runtime import pages
from delta.runtime.bench import largest_view, view
from delta.runtime.bench.largest import LargestResult
from delta.runtime.bench.result import BenchResult

FOLDER = "docs/benchmarks"
README = "README.md"
DEVICES = ("cpu", "cuda")
HEADLINE_DEVICE = "cpu"


def page(device: str) -> str:
    """The page of a device."""
    return f"{FOLDER}/{device.partition(':')[0]}.md"


def result_file(device: str) -> str:
    return f"{FOLDER}/{device.partition(':')[0]}.json"


def largest_file(device: str) -> str:
    return f"{FOLDER}/max-batch-{device.partition(':')[0]}.json"


def figures(result: BenchResult) -> dict[str, dict[str, str]]:
    """Page -> name of a place -> what belongs there, for a result."""
    device = result.options.device
    found = {
        page(device): {
            "setting": view.markdown_setting(result),
            "ways": view.markdown_table(result),
            "goals": view.markdown_goals(result),
        }
    }
    sentence = view.headline(result)
    if device == HEADLINE_DEVICE and sentence is not None:
        found[README] = {"headline": sentence}
    return found


def largest_figures(result: LargestResult) -> dict[str, dict[str, str]]:
    """The same for a search of the largest batch."""
    return {page(result.options.device): {"max-batch": largest_view.markdown(result)}}


def nothing_measured(device: str) -> dict[str, str]:
    """What stands in the places of a page when nobody has measured on that device."""
    text = f"*Not measured on {'CUDA' if device == 'cuda' else 'a CPU'}.*"
    return dict.fromkeys(("setting", "ways", "goals", "max-batch"), text)


def write_bench(result: BenchResult, root: Path) -> list[Path]:
    """Fill the pages of the checkout at ``root`` and keep the result there. Returns the files written."""
    contents = figures(result)
    if README in contents:
        contents[README]["example"] = pages.run_example(pages.read_page(root / README))
    return _write(root, contents, result_file(result.options.device), pages.to_json(result.as_dict()))


def write_largest(result: LargestResult, root: Path) -> list[Path]:
    """The same for a search of the largest batch."""
    return _write(root, largest_figures(result), largest_file(result.options.device), pages.to_json(result.as_dict()))


def read_bench(path: Path) -> BenchResult:
    """A result from its JSON file. DeltaError if it is not one."""
    return BenchResult.from_dict(pages.read_json(path))


def read_largest(path: Path) -> LargestResult:
    return LargestResult.from_dict(pages.read_json(path))


def _write(root: Path, contents: Mapping[str, Mapping[str, str]], file: str, json: str) -> list[Path]:
    written = pages.write_filled(root, contents)
    (root / file).write_text(json, encoding="utf-8")
    return [*written, root / file]
