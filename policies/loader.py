"""Reads policies: a shipped name or a path, with overrides, to a validated `delta.config.Policy`.

Every failure is a `PolicyError` that names the file, the key, the value given and what is allowed.
"""

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from delta.config import Policy
from delta.errors import PolicyError
from delta.mistakes import did_you_mean, keys_of

DEFAULT = "delta"
_SUFFIX = ".yaml"
# What YAML's own makers of values raise besides YAMLError: for an impossible date or number, a text that is no
# `!!bool`, an empty `!!int`, a text that is no `!!timestamp`, a number in base 60 with too many places, a `!!set` that
# is a list, brackets a thousand deep.
_NO_VALUE = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)


def names() -> list[str]:
    """Names of the shipped policies, the default one first."""
    found = [entry.name for entry in files("delta.policies").iterdir() if entry.name.endswith(_SUFFIX)]
    return sorted((name.removesuffix(_SUFFIX) for name in found), key=lambda name: (name != DEFAULT, name))


def load(name_or_path: str | os.PathLike[str], overrides: Mapping[str, object] | None = None) -> Policy:
    """The policy of a shipped name (``"delta"``) or of a YAML file (``"my/policy.yaml"``), validated.

    ``overrides`` replaces single values after reading, by dotted key: ``{"filter.min_bytes": 0}``. Raises
    `PolicyError`.
    """
    if not isinstance(overrides, Mapping | None):
        raise PolicyError(
            f'overrides={overrides!r}: give a dict of keys and values, such as {{"filter.min_bytes": 0}}.'
        )
    where, text = _read(name_or_path)
    values = _parse(where, text)
    for key, value in (overrides or {}).items():
        _override(values, key, value)
    changed = f" with overrides {dict(overrides)}" if overrides else ""
    try:
        return Policy(**values)
    except PolicyError as error:
        raise PolicyError("\n".join(f"{where}{changed}: {line}" for line in str(error).splitlines())) from None


def _read(name_or_path: str | os.PathLike[str]) -> tuple[str, str]:
    """What to call the policy in messages, and its text."""
    if not isinstance(name_or_path, str | os.PathLike):
        raise PolicyError(
            f"policy={name_or_path!r}: give a name ({', '.join(names())}) or a path to a YAML file; delta.evict takes "
            "a delta.Policy as well."
        )
    given = os.fspath(name_or_path)
    if isinstance(name_or_path, str) and not _looks_like_path(given):
        if given not in names():
            raise PolicyError(
                f"policy={given!r}: no policy of that name is shipped.{did_you_mean(given, names())} "
                f"Give one of {', '.join(names())}, or a path to a YAML file (with its .yaml or a directory)."
            )
        where, data = given + _SUFFIX, (files("delta.policies") / (given + _SUFFIX)).read_bytes()
    else:
        where, data = given, _read_file(Path(given))
    try:
        return where, data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PolicyError(f"{where}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from None


def _looks_like_path(given: str) -> bool:
    return given.endswith((_SUFFIX, ".yml")) or os.sep in given or bool(os.altsep and os.altsep in given)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        shipped = ", ".join(names())
        raise PolicyError(f"policy={str(path)!r}: cannot read this file: {why}. Shipped: {shipped}.") from None


class _Loader(yaml.SafeLoader):
    """Plain YAML, but a key given twice in one mapping is an error (YAML itself lets the last one win in silence), and
    one that YAML takes for a number or a truth value is the text that it is for a policy."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the base class, after looking for duplicates."""
        seen: set[str] = set()
        for key, _ in node.value:
            problem = ""
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key must be a word"
            elif key.value in seen:
                problem = f"the key {key.value!r} is given twice: keep one"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


def _parse(where: str, text: str) -> dict[str, Any]:
    """The file's mapping, unchecked but for YAML itself."""
    try:
        values = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise PolicyError(f"{where}{line}: {_problem(error)}.") from None
    except (yaml.YAMLError, *_NO_VALUE) as error:
        raise PolicyError(f"{where}: not valid YAML: {_problem(error)}.") from None
    if not isinstance(values, dict):
        kind = "nothing" if values is None else f"a {type(values).__name__}"
        keys = ", ".join(Policy.model_fields)
        raise PolicyError(f"{where}: holds {kind}, a policy is a mapping with the keys {keys}.")
    return values


def parse_value(text: str, what: str) -> object:
    """The value of a single key, given as YAML on a command line. `what` names it in messages. Raises PolicyError."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, *_NO_VALUE) as error:
        raise PolicyError(f"{what}: not a value in YAML: {_problem(error)}. Quotes make a text of it.") from None


def _problem(error: Exception) -> str:
    """What is wrong, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        begun = f"{error.context}, " if error.context and error.problem.startswith("but ") else ""
        return begun + error.problem + (": YAML is indented with spaces" if r"'\t'" in error.problem else "")
    return next(iter(str(error).splitlines()), type(error).__name__)


def _override(values: dict[str, Any], key: str, value: object) -> None:
    """Put ``value`` at the dotted ``key``; sections the file leaves out are made."""
    allowed = list(keys_of(Policy))
    if inside := [name for name in allowed if name.startswith(f"{key}.")]:
        raise PolicyError(f"override {key!r}: a section. Override single values of it: {', '.join(inside)}.")
    if key not in allowed:
        raise PolicyError(f"override {key!r}: unknown key.{did_you_mean(key, allowed)} Allowed: {', '.join(allowed)}.")
    *sections, last = str(key).split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            return  # the file has something else than a section there: validation says so, and better
        values = inner
    values[last] = value
