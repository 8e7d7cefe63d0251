"""Which op and module made what a step saved, and when it goes: as the timeline of a real training tells it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import delta
from delta.timeline import Event, read_timeline
from delta.timeline.steps import by_step

BATCH, WIDTH = 64, 16
OUT, HIDDEN, ROW = 4 * BATCH * WIDTH, 16 * BATCH * WIDTH, 4 * BATCH  # bytes


class Net(nn.Module):
    """Blocks of a norm and two linear layers, and a step of its own that is inside of none of them."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(block, range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return x.tanh()


def block(index: int) -> nn.Module:
    layers = {
        "norm": nn.LayerNorm(WIDTH),
        "up": nn.Linear(WIDTH, 4 * WIDTH),
        "act": nn.GELU(),
        "down": nn.Linear(4 * WIDTH, WIDTH),
    }
    return nn.Sequential(OrderedDict(layers))


def trained(path: Path, net: nn.Module | None, steps: int = 1, **given: Any) -> list[list[Event]]:
    """What of each step the timeline tells."""
    model, batch = Net(1) if net is None else net, torch.randn(BATCH, WIDTH)
    with delta.evict(net, timeline=path, **given):
        for _ in range(steps):
            model(batch).square().mean().backward()
            model.zero_grad()
    return by_step(read_timeline(path)[1])[1]


def bytes_by(events: list[Event], name: str) -> dict[str | None, int]:
    """Bytes of the storages saved, by a field of theirs."""
    nbytes: Counter[str | None] = Counter()
    storages = {e.fields["record"]: (e.fields.get(name), e.fields["nbytes"]) for e in events if e.ev == "saved"}
    for value, size in storages.values():
        nbytes[value] += size
    return dict(nbytes)


@pytest.mark.usefixtures("one_thread")
def test_what_is_saved_has_the_op_and_the_module_that_made_it(tmp_path: Path) -> None:
    first, *_ = trained(tmp_path / "run.jsonl", Net(1), activations="1TiB")
    assert bytes_by(first, "op") == {
        None: OUT,  # the batch, which the norm saves
        "aten.native_layer_norm": OUT + 2 * ROW,  # with mean and deviation
        "aten.addmm": HIDDEN,
        "aten.gelu": HIDDEN,
        "aten.tanh": OUT,  # saved by tanh, and by the loss that squares it
    }
    assert bytes_by(first, "module") == {
        None: OUT + OUT,  # tanh runs in the model, and in none of its named modules
        "blocks.0.norm": OUT + 2 * ROW,
        "blocks.0.up": HIDDEN,
        "blocks.0.act": HIDDEN,
    }


@pytest.mark.usefixtures("one_thread")
def test_without_a_model_there_are_ops_alone(tmp_path: Path) -> None:
    first, *_ = trained(tmp_path / "run.jsonl", None, activations="1TiB")
    assert bytes_by(first, "op")["aten.gelu"] == HIDDEN
    assert set(bytes_by(first, "module")) == {None}


@pytest.mark.usefixtures("one_thread")
def test_what_is_only_watched_has_no_names(tmp_path: Path) -> None:
    (of_the_step, _) = trained(tmp_path / "run.jsonl", Net())
    assert {event.ev for event in of_the_step} <= {"memory"}


STEADY = 8  # steps after which one follows its routine


def told(events: list[Event]) -> list[tuple[Any, ...]]:
    """What a step saved, in order."""
    fields = [event.fields for event in events if event.ev == "saved"]
    return [(each["nbytes"], each.get("op"), each.get("module")) for each in fields]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["recompute", "delta", "swap"])
def test_in_a_step_that_follows_its_routine_names_are_those_that_were_recorded(policy: str, tmp_path: Path) -> None:
    net, path = Net(), tmp_path / "run.jsonl"
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(net, activations="60%", policy=chosen, timeline=path) as run:
        for index in range(STEADY + 1):
            assert run._core is not None
            assert index < STEADY or run._core.engine.routine is not None
            net(torch.randn(BATCH, WIDTH)).square().mean().backward()
    parts = by_step(read_timeline(path)[1])[1]
    assert told(parts[STEADY]) == told(parts[0])
    assert {"blocks.3.act", "blocks.0.norm", None} <= {module for _, _, module in told(parts[STEADY])}
    assert {event.fields["action"] for event in parts[STEADY] if event.ev == "evicted"}


class Forked(nn.Module):
    """The saved tensor on `kept` dies before backward asks for what is made of that again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            kept = x.detach().tanh()
            x = x * kept.exp() + x * 0.5 * kept
        return x


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("policy", "make"), [("recompute", Net), ("delta", Net), ("recompute", Forked)])
def test_there_each_that_stayed_is_freed_once(policy: str, make: type[nn.Module], tmp_path: Path) -> None:
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    last = trained(tmp_path / "run.jsonl", make(), STEADY + 1, activations="60%", policy=chosen)[STEADY]
    stayed = {event.fields["record"] for event in last if event.ev == "saved"}
    stayed -= {event.fields["record"] for event in last if event.ev == "evicted"}
    freed = Counter(event.fields["record"] for event in last if event.ev == "freed")
    assert stayed and {record: freed[record] for record in stayed} == dict.fromkeys(stayed, 1)


@pytest.mark.usefixtures("one_thread")
def test_what_goes_at_its_save_is_told_after_it(tmp_path: Path) -> None:
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 0})
    for events in trained(tmp_path / "run.jsonl", Net(), STEADY + 1, activations="40%", policy=chosen)[:-1]:
        seen: set[int] = set()
        for event in events:
            if event.ev == "saved":
                seen.add(event.fields["record"])
            assert event.ev != "evicted" or event.fields["record"] in seen
