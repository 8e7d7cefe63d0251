"""Files that are written for the caller: their names, and how one takes the place of another."""

import errno
import os
from contextlib import suppress
from pathlib import Path


def bare_name(path: Path) -> str:
    """The name without the endings of its kind: ``net.v2`` of ``net.v2.jsonl.gz``."""
    return Path(path.name.removesuffix(".gz")).stem


def marked(path: Path, mark: str) -> Path:
    """The file beside it with a mark in its name: ``run-2.jsonl.gz`` for ``run.jsonl.gz`` and ``2``."""
    bare = bare_name(path)
    return path.with_name(f"{bare}-{mark}{path.name.removeprefix(bare)}")


def target_of(path: Path) -> Path:
    """The file that a name stands for: symbolic links are followed. FileExistsError where something else is there, such
    as a directory or a device, which must not be replaced."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "there is something that is no regular file; give a file", str(path))
    return target


def check_place(path: Path) -> None:
    """OSError where `replace_file` could not write: to be told before what makes the content."""
    folder = target_of(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, "give a file in a directory that exists and is writable", str(path))


def replace_file(path: Path, content: bytes) -> None:
    """The file holds all of the content afterwards, or what it held before. OSError, also that of `target_of`."""
    target = target_of(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
