"""The chaos device: it must be late, out of order and poisonous, or it finds nothing."""

from collections.abc import Callable

import pytest
import torch

from delta.config import HostConfig
from delta.errors import HostFullError, SwapError
from delta.runtime.device import make_device
from delta.runtime.device.base import Ticket
from delta.runtime.device.chaos import POISON, ChaosDevice
from delta.runtime.rawmem import as_bytes

HOST = HostConfig()


def filled(nbytes: int = 64, value: int = 7) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(nbytes)
    as_bytes(storage).fill_(value)
    return storage


def all_are(storage: torch.UntypedStorage | None, value: int) -> bool:
    assert storage is not None
    return bool((as_bytes(storage) == value).all())


def polls_until_ready(device: ChaosDevice, ticket: Ticket, most: int = 50) -> int | None:
    return next((poll for poll in range(most) if device.ready(ticket)), None)


def behaviour(seed: int) -> list[object]:
    """What one seed does with one order of calls."""
    device = ChaosDevice(HOST, seed)
    tickets = [device.copy_out(filled()) for _ in range(10)]
    return [[device.ready(ticket) for ticket in tickets] for _ in range(6)]


def test_one_seed_behaves_the_same_every_time_and_another_differently() -> None:
    assert behaviour(3) == behaviour(3)
    assert behaviour(3) != behaviour(4)


def test_make_device_reads_the_seed() -> None:
    device = make_device("chaos:4", HOST)
    tickets = [device.copy_out(filled()) for _ in range(10)]
    assert [[device.ready(ticket) for ticket in tickets] for _ in range(6)] == behaviour(4)


def test_some_are_early_some_late_some_wait_for_wait() -> None:
    device = ChaosDevice(HOST, 0)
    polls = [polls_until_ready(device, device.copy_out(filled())) for _ in range(100)]
    assert polls.count(0) > 10
    assert polls.count(None) > 10
    assert sum(poll is not None and poll > 0 for poll in polls) > 10


def test_they_end_out_of_order() -> None:
    device = ChaosDevice(HOST, 0)
    tickets = [device.copy_out(filled()) for _ in range(20)]
    for _ in range(20):
        device.ready(tickets[0])
    ended = [ticket.finished_ns for ticket in tickets if ticket.finished_ns is not None]
    assert len(ended) > 5
    assert ended != sorted(ended)


@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
def test_some_end_when_another_begins(call: str) -> None:
    device = ChaosDevice(HOST, 0)
    whole = device.copy_out(filled())
    device.wait(whole)
    begun = [device.copy_in(whole.block) for _ in range(20)]
    under_way = [ticket for ticket in begun if ticket.finished_ns is None]
    for _ in range(10):
        getattr(device, call)(filled() if call == "copy_out" else whole.block)
    ended = sum(ticket.finished_ns is not None for ticket in under_way)
    assert 0 < ended < len(under_way)


def late(device: ChaosDevice, begin: Callable[[], Ticket]) -> Ticket:
    """A transfer that has not ended when it is returned."""
    return next(ticket for _ in range(100) if (ticket := begin()).finished_ns is None)


def test_a_destination_is_poison_until_its_data_is_there() -> None:
    device = ChaosDevice(HOST, 1)
    out = device.copy_out(filled())
    device.wait(out)
    back = late(device, lambda: device.copy_in(out.block))
    assert all_are(back.storage, POISON)
    device.wait(back)
    assert all_are(back.storage, 7)


def test_a_source_that_is_changed_before_the_end_is_a_wrong_host_copy() -> None:
    """The mistake this device is there to find: the device copy was let go too early."""
    device = ChaosDevice(HOST, 1)
    storage = filled()
    out = late(device, lambda: device.copy_out(storage))
    device.release(storage)
    device.wait(out)
    back = device.copy_in(out.block)
    device.wait(back)
    assert all_are(back.storage, POISON)


def test_released_storages_are_poison_unless_shared() -> None:
    device = ChaosDevice(HOST, 1)
    alone, shared = filled(), filled()
    tensor = as_bytes(shared)
    for storage in (alone, shared):
        device.release(storage)
    assert all_are(alone, POISON)
    assert bool((tensor == 7).all())


def test_host_room_is_poison_before_and_after() -> None:
    device = ChaosDevice(HOST, 1)
    out = late(device, lambda: device.copy_out(filled()))
    assert all_are(out.block.room, POISON)
    device.wait(out)
    assert all_are(out.block.room, 7)
    device.free(out.block)
    assert all_are(out.block.room, POISON)


def test_injected_failures_of_copies_out() -> None:
    device = ChaosDevice(HOST, 2, fail_out_every=3)
    storages = [filled(value=value) for value in range(6)]
    outs = [device.copy_out(storage) for storage in storages]
    for number, (storage, out) in enumerate(zip(storages, outs, strict=True), start=1):
        if number % 3:
            device.wait(out)
            continue
        for _ in range(2):
            with pytest.raises(SwapError, match="injected"):
                device.wait(out)
        with pytest.raises(SwapError, match="injected"):
            device.ready(out)
        assert all_are(storage, number - 1)
        device.free(out.block)
    assert device.host_bytes() == 4 * 64


def test_injected_failures_of_copies_in_can_be_asked_again() -> None:
    device = ChaosDevice(HOST, 2, fail_in_every=2)
    out = device.copy_out(filled())
    first = device.copy_in(out.block)
    second = device.copy_in(out.block)
    device.wait(first)
    with pytest.raises(SwapError, match="injected"):
        device.wait(second)
    assert second.storage is None
    third = device.copy_in(out.block)
    device.wait(third)
    assert all_are(third.storage, 7)


def test_a_copy_in_of_a_failed_copy_out_fails() -> None:
    device = ChaosDevice(HOST, 5, fail_out_every=1)
    out = late(device, lambda: device.copy_out(filled()))
    back = device.copy_in(out.block)
    with pytest.raises(SwapError, match="never completed"):
        device.wait(back)


def test_the_limit_can_be_set() -> None:
    device = ChaosDevice(HOST, 0, limit_bytes=100)
    device.copy_out(filled(64))
    with pytest.raises(HostFullError, match="64 B of 100 B"):
        device.copy_out(filled(64))


def test_stop_ends_everything_and_later_ones_at_once() -> None:
    device = ChaosDevice(HOST, 0)
    tickets = [device.copy_out(filled()) for _ in range(10)]
    device.stop()
    assert all(ticket.finished_ns is not None for ticket in tickets)
    assert device.copy_out(filled()).finished_ns is not None
