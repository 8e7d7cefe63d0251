"""Transfers under way and storages in use, and which of them are asked about."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from delta.runtime import attached
from delta.runtime.attached import Attached
from delta.runtime.core import Core
from delta.runtime.swap import Swap


@dataclass
class Asked:
    """A device whose transfers have ended as a test says; notes those it is asked about."""

    in_order: bool
    ended: set[int]
    asked: list[int] = field(default_factory=list)

    def ready(self, ticket: int) -> bool:
        self.asked.append(ticket)
        return ticket in self.ended


@pytest.mark.parametrize(
    ("in_order", "ended", "asked"),
    [(True, {1, 2, 11}, [1, 2, 3, 11, 12]), (False, {1, 3, 12}, [1, 2, 3, 4, 11, 12]), (True, set(), [1, 11])],
)
def test_where_transfers_end_in_order_nobody_asks_about_those_behind_one_under_way(
    monkeypatch: pytest.MonkeyPatch, in_order: bool, ended: set[int], asked: list[int]
) -> None:
    """Dozens may be under way, and it is asked at each saved tensor."""
    device, found = Asked(in_order, ended), list[int]()
    slots = {n: SimpleNamespace(going=n, coming=None) for n in (1, 2, 3, 4)}
    slots |= {n: SimpleNamespace(going=None, coming=n) for n in (11, 12)}
    swap = Swap(cast(Core, SimpleNamespace(device=device, slots=slots)))
    swap._going, swap._coming = [1, 2, 3, 4], [11, 12]
    for end in ("_out_ended", "_back_ended"):
        monkeypatch.setattr(Swap, end, lambda _, record, *more: found.append(cast(Any, record)))
    swap.poll()
    assert device.asked == asked
    assert set(found) == ended


def test_of_many_storages_in_use_a_few_are_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest at once, and each of the others before long; all of them where it is not said that few will do."""
    looked_at, loose = list[int](), list[int]()
    slots = {n: SimpleNamespace(alive=lambda n=n: n, storage=n) for n in range(40)}
    monkeypatch.setattr(attached, "sole_owner", lambda storage: looked_at.append(storage) or storage in (20, 39))
    saved = Attached(cast(Any, slots), loose.append)
    for n in range(40):
        saved.add(n)
    saved.look(few=True)
    assert (len(looked_at), loose) == (16, [39])
    for _ in range(4):
        saved.look(few=True)
    assert loose == [39, 20]
    assert set(looked_at) == set(range(40))
    assert sorted(saved.records) == [n for n in range(40) if n not in (20, 39)]
    looked_at.clear()
    saved.look()
    assert len(looked_at) == 38
    saved.given_out(7)
    saved.given_out(20)
    assert sorted(saved.records) == [n for n in range(40) if n != 39], "each is there once"
