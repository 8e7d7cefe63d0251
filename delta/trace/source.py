"""The lines of a trace file, whoever wrote it: one JSON object each, plain or compressed, and where an error is."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any, Self

from delta.errors import TraceError

_GZIP = b"\x1f\x8b"


class Source:
    """Gives the objects of a file one after the other. Anything that is none: TraceError with file and line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.number = 0  # of the line read last
        try:
            self._raw = open(self.path, "rb")  # noqa: SIM115  # closed by __exit__
            packed = self._raw.peek(len(_GZIP)).startswith(_GZIP)
        except OSError as error:
            raise self._unreadable(error) from error
        self._lines: Iterator[bytes] = gzip.GzipFile(fileobj=self._raw) if packed else self._raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._raw.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        line = self._line()
        self.number += 1
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise self.error(f"not JSON ({error}); a trace has one JSON object on each line") from error
        if not isinstance(value, dict):
            raise self.error(f"{line[:40]!r} is not a JSON object; a trace has one on each line")
        return value

    def error(self, text: str) -> TraceError:
        """An error in the line read last."""
        return TraceError(f"trace {self.path!r}, line {self.number}: {text}")

    def cut_off(self, text: str) -> TraceError:
        """An error after the last line: something is missing there."""
        return TraceError(f"trace {self.path!r}: cut off after line {self.number}: {text}")

    def _line(self) -> bytes:
        try:
            line = next(self._lines)
        except EOFError as error:
            raise self.cut_off("the compressed data ends before its end mark") from error
        except (OSError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
            raise self._unreadable(error) from error
        return line

    def _unreadable(self, error: OSError | zlib.error) -> TraceError:
        why = getattr(error, "strerror", None) or error
        after = f" after line {self.number}" if self.number else ""
        return TraceError(f"trace {self.path!r}: cannot be read{after}: {why}")
