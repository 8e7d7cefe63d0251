"""`scripts/bench planning`: the step it plans, and its table."""

import re

import pytest
from typer.testing import CliRunner

from delta.errors import DeltaError
from delta.runtime.bench import __main__ as command_line
from delta.runtime.bench import plans
from delta.types import Action


def test_a_row_of_blocks() -> None:
    graph = plans.blocks(3, 2**20)
    assert len(graph.saved) == 3 * plans.SAVED_BY_BLOCK and len(graph.needs) == len(graph.saved)
    assert graph.end_ns == 3 * sum(op.cost_ns for op in graph.ops)
    assert all(before <= after for before, after in zip(graph.need_ns, graph.need_ns[1:], strict=False))
    statistics = [node for node in graph.nodes if not node.evictable and not node.rooted]
    assert len(statistics) == 3 * 4, "mean and 1 / std of two layer norms"
    assert sum(graph.nodes[node].nbytes for node in graph.saved) == graph.unevicted_bytes > 3 * 2**27


def test_the_table_says_how_long_and_how_good() -> None:
    lines = list(plans.table([60], "delta"))
    assert lines[0].split()[:2] == ["storages", "limit"]
    cells = [re.split(r"  +", line.strip()) for line in lines[2:]]
    assert [row[:2] for row in cells] == [["60", "50%"], ["60", "30%"], ["60", "20%"]]
    for row in cells:
        at_once, searched, bound, over, peak = (float(cell.rstrip("%")) for cell in (row[3], row[5], *row[6:]))
        assert 0 < bound <= searched <= at_once
        assert over == pytest.approx(100 * (searched / bound - 1), abs=0.6) and peak <= 1


def test_only_what_the_policy_allows_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[tuple[Action, ...]]()
    timed = plans._timed
    monkeypatch.setattr(plans, "_timed", lambda planner, task: seen.add(task.allowed) or timed(planner, task))
    assert list(plans.table([20], "recompute"))
    assert seen == {(Action.KEEP, Action.RECOMPUTE)}


@pytest.mark.parametrize("command", ["planning", "decisions"])
@pytest.mark.parametrize("numbers", ["many", "5", "1000,-3"])
def test_numbers_that_are_none_are_refused(command: str, numbers: str) -> None:
    option = "--storages" if command == "planning" else "--live"
    done = CliRunner().invoke(command_line.app, [command, option, numbers])
    assert isinstance(done.exception, DeltaError)
    wrong = numbers.rpartition(",")[2]
    assert str(done.exception) == f"{option[2:]}='{wrong}': give numbers from 10 on, such as 1000,3000"
