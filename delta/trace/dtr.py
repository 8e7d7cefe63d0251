"""Reads a log of DTR as a trace.

The format is that of the logs published with M. Kirisame et al., *Dynamic Tensor Rematerialization* (ICLR 2021): JSON
lines, the key ``INSTRUCTION`` says what each is. Tensors have names; here each name refers to a storage, and views are
their storage. As in the authors' simulator, a `MUTATE` makes a new storage (copy on write), a storage is freed when no
name refers to it any more, constants never are, and what names refer to in the end has to be resident then.

Instructions before the annotation ``START`` build the model: what they leave behind is there before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from delta.trace.events import Backward, Constant, Event, Evictable, Free, Op, Result, Trace
from delta.trace.source import Source

KEY = "INSTRUCTION"
_KNOWN = ("ANNOTATE", "CALL", "CONSTANT", "COPY", "COPY_FROM", "MUTATE", "RELEASE")

Line = dict[str, Any]


def read_log(first: Line, rest: Source) -> Trace:
    """The trace of a log whose first line was read already. TraceError for what the format does not allow."""
    log = _Log(rest)
    log.take(first)
    for line in rest:
        log.take(line)
    name = Path(rest.path).name.removesuffix(".gz").removesuffix(".log")
    return Trace(name, Evictable.ALL, (*log.events, *log.results()))


class _Log:
    """The state between two instructions: which storage each name refers to, and how many names each storage has."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._sizes_bytes: list[int] = []  # by storage
        self._counts: list[int] = []
        self._constants: set[int] = set()
        self._names: dict[str, int] = {}
        self._started = False
        self.events: list[Event] = []

    def take(self, line: Line) -> None:
        """The next instruction, with the lines that belong to it."""
        match line.get(KEY):
            case "CONSTANT":
                self._constant(self._text(line, "NAME"))
            case "CALL":
                self._call(line)
            case "MUTATE":
                self._mutate(line)
            case "COPY":
                self._define(self._text(line, "DST"), self._storage(self._text(line, "SRC")))
            case "COPY_FROM":
                self._rebind(self._text(line, "DST"), self._storage(self._text(line, "SRC")))
            case "RELEASE":
                self._release(self._text(line, "NAME"))
            case "ANNOTATE":
                self._annotate(self._text(line, "ANNOTATION"))
            case unknown:
                raise self._source.error(f"{KEY} is {unknown!r}; expected here is one of {', '.join(_KNOWN)}")

    def results(self) -> Iterable[Result]:
        """What is still referred to, in the order of the names."""
        left = dict.fromkeys(self._names.values())
        return [Result(storage) for storage in left if storage not in self._constants]

    # -- instructions ---------------------------------------------------------------------------------------------
    def _constant(self, name: str) -> None:
        storage = self._new(self._memory_of(name))
        self._constants.add(storage)
        self.events.append(Constant(storage, self._sizes_bytes[storage]))
        self._define(name, storage)

    def _call(self, line: Line) -> None:
        name, cost_ns = self._text(line, "NAME"), self._whole(line, "TIME")
        inputs = [self._storage(argument) for argument in self._texts(line, "ARGS")]
        made = []
        for result in self._texts(line, "RESULT"):
            nbytes, alias = self._memory_of(result), self._alias_of(result, len(inputs))
            if alias < 0:
                made.append(self._new(nbytes))
            self._define(result, made[-1] if alias < 0 else inputs[alias])
        self._ran(name, inputs, made, cost_ns)

    def _mutate(self, line: Line) -> None:
        name, cost_ns, arguments = self._text(line, "NAME"), self._whole(line, "TIME"), self._texts(line, "ARGS")
        inputs = [self._storage(argument) for argument in arguments]
        mutated = self._positions(line, "MUTATE", len(arguments))
        made = [self._new(self._sizes_bytes[inputs[position]]) for position in mutated]
        self._ran(name, inputs, made, cost_ns)
        for position, storage in zip(mutated, made, strict=True):
            self._rebind(arguments[position], storage)

    def _annotate(self, annotation: str) -> None:
        """Other annotations are remarks. A log without ``START`` is a step from its first line on."""
        if annotation == "BACKWARD":
            self.events.append(Backward())
        elif annotation == "START" and not self._started:
            self._started = True
            self._constants = {storage for storage, count in enumerate(self._counts) if count}
            self.events = [Constant(storage, self._sizes_bytes[storage]) for storage in sorted(self._constants)]

    def _ran(self, name: str, inputs: Sequence[int], made: Sequence[int], cost_ns: int) -> None:
        sizes = tuple(self._sizes_bytes[storage] for storage in made)
        self.events.append(Op(name, tuple(dict.fromkeys(inputs)), tuple(made), sizes, cost_ns))

    # -- names and storages ---------------------------------------------------------------------------------------
    def _new(self, nbytes: int) -> int:
        self._sizes_bytes.append(nbytes)
        self._counts.append(0)
        return len(self._counts) - 1

    def _storage(self, name: str) -> int:
        storage = self._names.get(name)
        if storage is None:
            raise self._source.error(f"{name!r} refers to no storage: no line before defines it, or it was released")
        return storage

    def _define(self, name: str, storage: int) -> None:
        if name in self._names:
            raise self._source.error(f"{name!r} is defined twice")
        self._names[name] = storage
        self._counts[storage] += 1

    def _rebind(self, name: str, storage: int) -> None:
        old = self._storage(name)
        self._names[name] = storage
        self._counts[storage] += 1
        self._let_go(old)

    def _release(self, name: str) -> None:
        if name in self._names:  # the authors' logs release names that were never defined
            self._let_go(self._names.pop(name))

    def _let_go(self, storage: int) -> None:
        self._counts[storage] -= 1
        if not self._counts[storage] and storage not in self._constants:
            self.events.append(Free(storage))

    # -- fields ---------------------------------------------------------------------------------------------------
    def _memory_of(self, name: str) -> int:
        return self._whole(self._following("MEMORY", name), "MEMORY")

    def _alias_of(self, name: str, arguments: int) -> int:
        """The number of the argument that a result is a view of, or -1."""
        return self._whole(self._following("ALIAS", name), "ALIAS", least=-1, below=arguments)

    def _following(self, instruction: str, name: str) -> Line:
        """The next line, which says one thing about `name`."""
        line = next(self._source, None)
        if line is None:
            raise self._source.cut_off(f"{instruction} of {name!r} is missing")
        if line.get(KEY) != instruction or line.get("NAME") != name:
            raise self._source.error(f"{line.get(KEY)} of {line.get('NAME')!r}; expected is {instruction} of {name!r}")
        return line

    def _text(self, line: Line, key: str) -> str:
        value = line.get(key)
        if not isinstance(value, str):
            raise self._source.error(f"{key} is {value!r}, must be a text")
        return value

    def _texts(self, line: Line, key: str) -> list[str]:
        values = self._list(line, key)
        if not all(isinstance(value, str) for value in values):
            raise self._source.error(f"{key} is {values!r}, must be a list of texts")
        return values

    def _positions(self, line: Line, key: str, below: int) -> list[int]:
        return [self._whole({key: value}, key, below=below) for value in self._list(line, key)]

    def _list(self, line: Line, key: str) -> list[Any]:
        value = line.get(key)
        if not isinstance(value, list):
            raise self._source.error(f"{key} is {value!r}, must be a list")
        return value

    def _whole(self, line: Line, key: str, least: int = 0, below: int | None = None) -> int:
        """A whole number; in the authors' logs most are texts."""
        value = line.get(key)
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if type(number) is not int or number < least or (below is not None and number >= below):
            limit = "" if below is None else f" and below {below}"
            raise self._source.error(f"{key} is {value!r}, must be a whole number from {least} on{limit}")
        return number
