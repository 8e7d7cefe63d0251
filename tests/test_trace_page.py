"""docs/traces.md: its tables list what there is, its code runs."""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch
from test_readme import blocks, page, section, table, unquoted

from delta.cli import app
from delta.trace.format import HEADER, KINDS, VERSION_KEY

PAGE = "docs/traces.md"


def test_every_event_has_its_row() -> None:
    rows = table(section(PAGE, "The file"))
    found = {unquoted(kind)[0]: unquoted(names) for kind, names, _ in rows}
    assert found == {kind: [field.name for field in fields(cls)] for kind, cls in KINDS.items()}
    assert "(true)" in dict((row[0], row[1]) for row in rows)["`op`"]
    optional = [field.name for cls in KINDS.values() for field in fields(cls) if field.default is not MISSING]
    assert optional == [
        "replayable",
        "overwrites",
        "workspace_bytes",
        "again_ns",
        "encoded_bytes",
        "encode_ns",
        "decode_ns",
    ]


def test_the_header_is_complete() -> None:
    text = section(PAGE, "The file")
    assert all(f"`{name}`" in text for name in (VERSION_KEY, *HEADER))


def test_the_code_records_and_reads_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    record, analyse = blocks(page(PAGE), "python")
    exec(record, {"train": lambda: torch.ones(3, requires_grad=True).exp().sum().backward()})
    assert capsys.readouterr().out.startswith("trace step on cpu\n")
    exec(analyse, names := {})
    assert names["slowest"].cost_ns > 0 and names["peak_bytes"] > 12


def test_the_options_shown_exist() -> None:
    import typer

    (shown,) = blocks(page(PAGE), "shell")
    known = {option for command in typer.main.get_command(app).commands["trace"].params for option in command.opts}
    used = {word for line in shown.splitlines() for word in line.partition(" train.py")[0].split() if word[:2] == "--"}
    assert used and used <= known
