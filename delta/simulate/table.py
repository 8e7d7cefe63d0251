"""Runs side by side: a table for the terminal, and a page with a plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from delta.errors import PlotError
from delta.simulate.simulation import Run
from delta.text import aligned
from delta.units import format_bytes, format_ns

_HEAD = (
    "trace",
    "policy",
    "budget",
    "overhead",
    "first",
    "peak",
    "swapped",
    "recomputed",
    "stalled",
    "free",
    "decisions",
)


def to_table(runs: Sequence[Run]) -> str:
    """A line for each run."""
    return aligned([_HEAD, *map(_row, runs)], right=range(2, len(_HEAD)), rule=True)


def _row(run: Run) -> tuple[str, ...]:
    overhead = f"{run.overhead:.4f}" if run.overhead is not None else run.status.value
    return (
        run.trace,
        run.policy,
        format_bytes(run.budget_bytes),
        overhead,
        f"{run.first_overhead:.4f}" if run.first_overhead is not None else "-",
        format_bytes(run.peak_bytes),
        format_bytes(run.swapped_bytes),
        format_ns(run.recomputed_ns),
        format_ns(run.stall_ns),
        f"{run.fragmentation:.1%}" if run.fragmentation is not None else "-",
        str(run.decisions),
    )


def to_grid(runs: Sequence[Run]) -> str:
    """For each trace a table of policies by budgets, with the overheads."""
    parts = []
    for trace in dict.fromkeys(run.trace for run in runs):
        of_trace = [run for run in runs if run.trace == trace]
        budgets = sorted({run.budget_bytes for run in of_trace}, reverse=True)
        rows = [(trace, *map(format_bytes, budgets))]
        for policy in dict.fromkeys(run.policy for run in of_trace):
            found = {run.budget_bytes: run for run in of_trace if run.policy == policy}
            rows.append((policy, *(_cell(found.get(budget)) for budget in budgets)))
        parts.append(aligned(rows, right=range(1, len(rows[0])), rule=True))
    return "\n\n".join(parts)


def _cell(run: Run | None) -> str:
    if run is None:
        return "-"
    return f"{run.overhead:.4f}" if run.overhead is not None else run.status.value


def check_plot(path: Path) -> None:
    """Raises PlotError where `write_plot` could not write its page, because plotly is missing or the place cannot be
    written: before the runs, which may take minutes."""
    try:
        from plotly import graph_objects  # noqa: F401
    except ImportError as error:
        raise PlotError("plots need plotly: pip install 'delta-evict[plot]'") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PlotError(
            f"--plot {str(path)!r}: cannot be written; give a file in a directory that exists and is writable"
        )


def write_plot(runs: Sequence[Run], path: Path) -> None:
    """A page with overhead over budget: a line for each trace and policy; runs that did not end are left out. Raises
    PlotError if the page cannot be written."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    figure.update_layout(xaxis_title="budget, GiB", yaxis_title="step time over plain")
    for trace, policy in dict.fromkeys((run.trace, run.policy) for run in runs):
        line = sorted(
            (run.budget_bytes, run.overhead)
            for run in runs
            if (run.trace, run.policy) == (trace, policy) and run.overhead is not None
        )
        budgets_gib = [nbytes / 2**30 for nbytes, _ in line]
        overheads = [overhead for _, overhead in line]
        figure.add_scatter(x=budgets_gib, y=overheads, mode="lines+markers", name=f"{trace}: {policy}")
    try:
        figure.write_html(path, include_plotlyjs=True)
    except OSError as error:
        raise PlotError(f"--plot {str(path)!r}: cannot be written: {error.strerror or error}") from error
