"""What Delta's Python costs: the states are what they are called, and the difference to plain PyTorch is found."""

import time
from typing import Any

import pytest

from delta.runtime.bench import hot_path
from delta.runtime.bench.decisions import KINDS, Net, eviction_ns, lines
from delta.runtime.bench.hot_path import STATES, measure
from delta.runtime.recorder import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_state_is_the_mode_it_is_called_after() -> None:
    found = measure(count=20, rounds=1, evictions=2)
    assert found.modes == {"watched": "idle", "observed": "observe", "planned": "planned"}
    assert set(found.op_ns) == set(found.pack_ns) == set(found.unpack_ns) == set(STATES)
    assert set(found.small_pack_ns) == set(found.small_unpack_ns) == set(STATES)
    assert found.decision_ns > 0
    assert f"ns for an op  {found.op_ns['watched']:>7.0f}".split() == str(found).splitlines()[2].split()[:5]


def test_what_an_op_costs_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Recorder.__torch_dispatch__

    def slow(self: Recorder, *arguments: Any) -> Any:
        until_ns = time.thread_time_ns() + 2_000_000
        while time.thread_time_ns() < until_ns:
            pass
        return honest(self, *arguments)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", slow)
    monkeypatch.setattr(hot_path, "_decisions", lambda *_: [1.0])
    found = measure(count=20, rounds=1)
    assert found.op_ns["observed"] > 1_500_000 > found.op_ns["watched"]


def test_an_eviction_is_of_one_storage() -> None:
    net = Net(20, *KINDS[0])
    before = net.missing
    net.evict()
    assert net.missing == before + 1
    assert eviction_ns(20, KINDS[0], 3) > 0


def test_the_table_of_decisions() -> None:
    head, *rows = lines([20, 30], evictions=1)
    assert head.split()[-2:] == ["20", "30"]
    assert [tuple(row[:15].split() + row[15:30].split()) for row in rows] == [kind[:2] for kind in KINDS]
    assert all(row[30:].startswith(kind[2]) for row, kind in zip(rows, KINDS, strict=True))
    assert all(float(cell) > 0 for row in rows for cell in row.split()[-2:])
