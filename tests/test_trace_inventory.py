"""The inventory: bytes by hand, against a naive count, and every event that cannot happen."""

import pytest
from hypothesis import given, settings
from traces import peaks, traces

from delta.trace import Trace
from delta.trace.events import Backward, Constant, Event, Free, Need, Op, Result, Save, Unsave
from delta.trace.inventory import Inventory

WEIGHT, BATCH = Constant(0, 100), Constant(1, 10)


def op(inputs: tuple[int, ...], outputs: dict[int, int], overwrites: tuple[int, ...] = (), workspace: int = 0) -> Op:
    return Op("op", inputs, tuple(outputs), tuple(outputs.values()), 5, True, overwrites, workspace)


def after(*events: Event) -> Inventory:
    inventory = Inventory()
    for event in events:
        inventory.take(event)
    return inventory


def test_bytes_by_hand() -> None:
    events = [WEIGHT, BATCH, op((0, 1), {2: 20}), Save(2), op((2,), {3: 30}, workspace=7), Free(2), Free(3)]
    inventory = after(*events)
    assert (inventory.live_bytes, inventory.saved_bytes) == (130, 20)  # 2 lives on for autograd
    assert (inventory.peak_bytes, inventory.peak_saved_bytes) == (167, 20)
    assert len(inventory) == 4
    inventory.take(Unsave(2))
    assert (inventory.live_bytes, inventory.saved_bytes) == (110, 0)
    inventory.end()


def test_two_saves_on_a_storage_count_once() -> None:
    inventory = after(WEIGHT, op((0,), {1: 8}), Save(1), Save(1), Unsave(1))
    assert (inventory.saved_bytes, inventory.peak_saved_bytes) == (8, 8)
    with pytest.raises(ValueError, match="the step ends while storage 1 is still saved"):
        inventory.end()


def test_what_is_overwritten_becomes_the_output_with_its_handles() -> None:
    inventory = after(WEIGHT, op((0,), {1: 8}), Save(1), op((1,), {2: 8, 3: 1}, overwrites=(1,)))
    assert (inventory.live_bytes, inventory.peak_bytes, inventory.saved_bytes) == (109, 109, 8)
    inventory.take(Free(2))
    inventory.take(Need(2))
    inventory.take(Unsave(2))
    assert inventory.live_bytes == 101
    with pytest.raises(ValueError, match="storage 1 is gone here"):
        inventory.take(op((1,), {}))


@settings(deadline=None)
@given(traces())
def test_peaks_are_those_of_a_naive_count(trace: Trace) -> None:
    inventory = after(*trace.events)
    inventory.end()
    assert (inventory.peak_bytes, inventory.peak_saved_bytes) == peaks(trace.events)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Constant(1, 1), "storage 1 is made twice"),
        (Constant(9, -1), "storage 9 has -1 bytes"),
        (Constant(-9, 1), "storage -9 has 1 bytes: neither may be negative"),
        (op((9,), {}), "storage 9 is unknown here"),
        (op((3,), {}), "storage 3 is gone here"),
        (op((), {0: 1}), "storage 0 is made twice"),
        (Op("op", (), (9,), (1, 2), 5), "1 outputs, but 2 sizes"),
        (Op("op", (), (), (), -1), "negative"),
        (Op("op", (), (), (), 1, workspace_bytes=-1), "negative"),
        (op((1,), {}, overwrites=(1,)), "has no output to become"),
        (op((1,), {9: 1}, overwrites=(2,)), "storage 2 is overwritten, but no input"),
        (op((1,), {8: 1, 9: 1}, overwrites=(1, 1)), "storage 1 is gone here"),
        (Save(9), "storage 9 is unknown here"),
        (Save(3), "storage 3 is gone here"),
        (Need(1), "storage 1 is needed, but not saved"),
        (Unsave(1), "storage 1 has no saved tensor that could die"),
        (Free(0), "storage 0 is a constant"),
        (Free(2), "storage 2 is freed twice"),
        (Free(3), "storage 3 is gone here"),
        (Result(3), "storage 3 is gone here"),
    ],
)
def test_what_cannot_happen_is_refused(event: Event, why: str) -> None:
    inventory = after(WEIGHT, op((0,), {1: 8, 2: 8, 3: 8}), Save(2), Free(2), Free(3), Backward())
    with pytest.raises(ValueError, match=why):
        inventory.take(event)


def test_results_come_last() -> None:
    inventory = after(WEIGHT, op((0,), {1: 8}), Result(1), Result(0))
    with pytest.raises(ValueError, match="only results may follow"):
        inventory.take(Backward())
