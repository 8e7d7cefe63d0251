"""What is wrong with the values of a policy, in words of its keys: pydantic's findings, one line for each."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from delta.errors import PolicyError


def mistakes(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """A line for each mistake: the key, the value that was given, what is allowed."""
    for details in error.errors(include_url=False):
        yield _mistake(dict(details), model)


def did_you_mean(given: object, allowed: Sequence[str]) -> str:
    """A sentence with the nearest of what is allowed; empty where none is near."""
    close = get_close_matches(str(given).lower(), allowed, n=1)
    if not close:  # "min_bytes" for "filter.min_bytes"
        close = [name for name in allowed if name.endswith(f".{given}")][:1]
    return f" Did you mean {close[0]!r}?" if close else ""


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all values of a model: ``filter.score``, ``filter.min_bytes``, …"""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def _mistake(details: dict[str, Any], model: type[BaseModel]) -> str:
    loc = [str(part) for part in details["loc"]]
    key = ".".join(loc)
    match details["type"]:
        case "extra_forbidden":
            allowed = _siblings(loc, model)
            hint = _where_it_belongs(loc[-1], model) or did_you_mean(loc[-1], allowed)
            return f"{key}={details['input']!r}: unknown key.{hint} Allowed: {', '.join(allowed)}."
        case "missing":
            return f"{key}: this key is missing, and has no default."
        case "value_error":
            inner = details["ctx"]["error"]
            # A size's own message begins with the last part of the key.
            prefix = ".".join(loc[:-1]) + "." if isinstance(inner, PolicyError) else f"{key}: " if key else ""
            return f"{prefix.removeprefix('.')}{inner}"
        case "model_type" | "model_attributes_type":
            keys = ", ".join(_siblings([*loc, ""], model))
            return f"{key}={details['input']!r}: must be a section with the keys {keys}."
        case "tuple_type":
            return f"{key}={details['input']!r}: must be a list, in brackets or with a dash before each item."
        case "too_short":
            return f"{key}={details['input']!r}: must name at least {details['ctx']['min_length']}."
        case _:
            message = details["msg"]
            return f"{key}={details['input']!r}: {message[0].lower()}{message[1:]}."


def _where_it_belongs(key: str, model: type[BaseModel]) -> str:
    """A sentence on a key of a section that stands outside of it: ``min_bytes``, or ``filter.min_bytes`` as one key."""
    dotted = [name for name in keys_of(model) if f".{name}".endswith(f".{key}") and "." in name]
    if not dotted:
        return ""
    section, _, last = dotted[0].partition(".")
    return f" It belongs into a section: {section}: {{{last}: ...}}."


def _siblings(loc: Sequence[str], model: type[BaseModel]) -> list[str]:
    """The keys that are allowed beside the last one of ``loc``."""
    for part in loc[:-1]:
        if part.isdigit():  # an index in `rules`
            continue
        annotation: Any = model.model_fields[part].annotation
        if not isinstance(annotation, type):
            annotation = annotation.__args__[0]
        model = annotation
    return list(model.model_fields)
