"""Tables of the largest batches, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from delta.runtime import pages
from delta.runtime.bench.largest import SHARE, Found, LargestResult
from delta.runtime.side_by_side import STEPS_BEFORE
from delta.text import aligned

GOALS = {"resnet50": 2.25, "resnet101": 2.5}  # times plain's batch, on CUDA, at `SHARE` of plain's samples per second
_HEAD = (
    "model",
    "way",
    "largest batch",
    "/ plain",
    "samples/s",
    "/ plain",
    f"at {SHARE:.0%} of plain's samples/s",
    "/ plain",
)


def text(result: LargestResult) -> str:
    """For a terminal."""
    lines = [setting(result), "", aligned([_HEAD, *_rows(result)], right=range(2, len(_HEAD)), rule=True)]
    return "\n".join([*lines, *_notes(result)])


def markdown(result: LargestResult) -> str:
    """For a page."""
    facts = {"search": setting(result), **result.machine, "command": f"`{result.command}`"}
    parts = [pages.facts_list(facts), pages.table(_HEAD, _rows(result))]
    if notes := list(_notes(result)):
        parts.append("\n".join(f"- {line}" for line in notes))
    return "\n\n".join(parts)


def setting(result: LargestResult) -> str:
    """What was searched, in one line."""
    options = result.options
    what = "saved activations" if options.device == "cpu" else "what the allocator reserves"
    return (
        f"largest batch with {what} within {options.limit}, on {options.device}, within {options.precision:.0%}; "
        f"speeds from {options.steps} steps after {STEPS_BEFORE} others"
    )


def _notes(result: LargestResult) -> Iterator[str]:
    """Why a way has no row, and the goals."""
    yield from (f"{way}: {why}" for way, why in result.missing.items())
    yield from (f"{which}: failed: {why.partition(chr(10))[0]}" for which, why in result.failed.items())
    yield from goals(result)


def goals(result: LargestResult) -> Iterator[str]:
    """Goals of the papers' table that this result can tell of."""
    for found in result.found:
        policy = found.way in result.options.policies
        if result.options.device.startswith("cuda") and policy and found.model in GOALS:
            most = GOALS[found.model]
            verdict = "met" if found.fast_batch_ratio >= most else "missed"
            yield f"{found.model}, {found.way}: at least {most:.2f} x plain's batch: {verdict}"


def _rows(result: LargestResult) -> list[tuple[str, ...]]:
    return [_cells(found) for found in result.found]


def _cells(found: Found) -> tuple[str, ...]:
    return (
        found.model,
        found.way,
        str(found.batch),
        f"{found.batch_ratio:.2f}",
        f"{found.samples_per_s:.2f}",
        f"{found.speed_ratio:.2f}",
        str(found.fast_batch),
        f"{found.fast_batch_ratio:.2f}",
    )
