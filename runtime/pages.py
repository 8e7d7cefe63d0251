"""Figures in pages come from measurements, never from a keyboard.

A page marks a place with ``<!-- figure: NAME -->`` and ``<!-- /figure -->``; what stands between is made from a result
that is kept beside the page as JSON, or by running the page's own example. Tests make it again and compare.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from delta.errors import DeltaError
from delta.files import check_place, replace_file

_PLACE = re.compile(r"(<!-- figure: (?P<name>[\w-]+) -->\n)(?P<content>.*?)(<!-- /figure -->)", re.DOTALL)
_EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def facts_list(facts: Mapping[str, str]) -> str:
    """Facts as a list in Markdown."""
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items())


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


def write_filled(root: Path, contents: Mapping[str, Mapping[str, str]]) -> list[Path]:
    """Fill the places of the pages below ``root``, all or none. Returns the files written."""
    filled = {root / name: fill(read_page(root / name), places) for name, places in contents.items()}
    for path, text in filled.items():
        path.write_text(text, encoding="utf-8")
    return list(filled)


def to_json(values: Any, indent: int | None = 2) -> str:
    """The text of a JSON file, for people to look at too; without an indent it is one line."""
    return json.dumps(values, indent=indent) + "\n"


def read_json(path: Path) -> Any:
    """What a JSON file holds. DeltaError if it is none."""
    try:
        return json.loads(read_page(path))
    except ValueError as error:
        raise DeltaError(f"{path}: not JSON: {error}") from error


def read_page(path: Path) -> str:
    """The text of a file of the checkout."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DeltaError(f"{path} cannot be read: {error.strerror}; pages are written in a checkout only") from error


def write_file(path: Path, content: str) -> None:
    """Write a file that the caller of a command asked for, in the place of what it held. DeltaError if that cannot be:
    then it holds what it held."""
    try:
        replace_file(path, content.encode("utf-8"))
    except OSError as error:
        raise DeltaError(f"{path} cannot be written: {error.strerror or error}") from error


def check_file(path: Path) -> None:
    """DeltaError where `write_file` cannot write: before the hours that make the content."""
    try:
        check_place(path)
    except OSError as error:
        raise DeltaError(f"{path} cannot be written: {error.strerror}") from error
