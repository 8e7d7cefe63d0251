"""Names of files, and how one takes the place of another: whole, or not at all."""

import os
from pathlib import Path

import pytest

from delta.files import bare_name, marked, replace_file


@pytest.mark.parametrize(
    ("name", "bare", "second"),
    [
        ("run.jsonl", "run", "run-2.jsonl"),
        ("run.jsonl.gz", "run", "run-2.jsonl.gz"),
        ("net.v2.jsonl.gz", "net.v2", "net.v2-2.jsonl.gz"),
        ("step", "step", "step-2"),
        (".hidden.jsonl", ".hidden", ".hidden-2.jsonl"),
    ],
)
def test_names(name: str, bare: str, second: str) -> None:
    assert bare_name(Path("out", name)) == bare
    assert marked(Path("out", name), "2") == Path("out", second)


def test_a_file_is_replaced_and_links_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    replace_file(link, b"first")
    replace_file(link, b"second")
    assert link.is_symlink() and file.read_bytes() == b"second"
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        with pytest.raises(FileExistsError, match="no regular file"):
            replace_file(path, b"x")
    assert pipe.is_fifo() and sorted(tmp_path.iterdir()) == [link, pipe]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    replace_file(file, b"whole")

    def killed(self: Path, content: bytes) -> int:
        with self.open("wb") as part:
            part.write(content[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_file(file, b"other")
    assert file.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [file]
