"""Coop on real tensors: with the heap's own addresses, without any, and with those of a card that is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from exactly import exact, state_of
from simulated_card import SimulatedCard
from torch import Tensor, nn
from torch.nn import functional as F

from delta.candidates import Candidates
from delta.config import HostConfig
from delta.runtime.addresses import DeviceAddresses
from delta.runtime.device import make_device
from delta.runtime.device.accelerator import blocks_of
from delta.runtime.device.base import MemoryBlock
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.cuda import CudaDevice
from delta.runtime.slots import Slot, StorageRef
from delta.types import Action
from delta.units import Bytes

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")


class Block(nn.Module):
    """Convolution, batch norm, and an activation and a sum that are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu_(self.norm(self.first(x)))
        return F.relu_(self.second(F.dropout(inside, 0.2)).add_(x))


def train() -> Sequence[Tensor]:
    """A few steps of a small residual net."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        model(torch.randn(2, 4, 12, 12)).square().mean().backward()
        steps.step()
    return state_of(model)


def train_in_place() -> Sequence[Tensor]:
    """Versions of one storage, each of which something dropped was made of."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(16, 16))
    for _ in range(3):
        x = torch.randn(32, 16) @ weight
        kept = []
        for _ in range(4):
            kept.append((x * 1.5).sin())
            x = (x + 0.1).mul_(0.9).relu_() @ weight
        torch.stack([*kept, x]).square().mean().backward()
    assert weight.grad is not None
    return [weight.grad.clone()]


@pytest.mark.parametrize("device", ["cpu", "chaos:1"])
@pytest.mark.parametrize("share", ["0%", "40%"])
@pytest.mark.parametrize("program", [train, train_in_place])
def test_it_trains_to_the_same_bits_without_addresses(program: Any, device: str, share: str) -> None:
    report = exact(program, "coop", device, share)
    assert report.evictions.get(Action.RECOMPUTE.value, 0) > 0
    assert report.swapped_out_bytes == 0


@pytest.fixture
def heap_addresses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A CPU device that tells where the records lie, as one segment; how many went together, each time."""
    slots: dict[str, Any] = {}
    went: list[int] = []

    def memory_blocks(self: CpuDevice) -> list[MemoryBlock]:
        alive = [slot.alive() for slot in slots.get("slots", {}).values()]
        found = sorted({s.data_ptr(): s.nbytes() for s in alive if s is not None and s.nbytes()}.items())
        return [MemoryBlock(address, nbytes, 0, free=False) for address, nbytes in found]

    def follow(self: DeviceAddresses, known: Any) -> None:
        slots["slots"] = known
        original_follow(self, known)

    def window(self: Candidates, *args: Any) -> Any:
        victims = original_window(self, *args)
        went.append(len(victims))
        return victims

    original_follow, original_window = DeviceAddresses.follow, Candidates.together
    monkeypatch.setattr(CpuDevice, "memory_blocks", memory_blocks)
    monkeypatch.setattr(DeviceAddresses, "follow", follow)
    monkeypatch.setattr(Candidates, "together", window)
    yield went


@pytest.mark.parametrize("share", ["10%", "40%"])
@pytest.mark.parametrize("program", [train, train_in_place])
def test_it_trains_to_the_same_bits_with_addresses(program: Any, share: str, heap_addresses: list[int]) -> None:
    report = exact(program, "coop", "cpu", share)
    assert report.evictions.get(Action.RECOMPUTE.value, 0) > 0
    assert max(heap_addresses) > 0, "windows were found"


# -- addresses ---------------------------------------------------------------------------------------------------------
SNAPSHOT = [
    {
        "device": 0,
        "address": 4096,
        "blocks": [{"size": 512, "state": "active_allocated"}, {"size": 1536, "state": "inactive"}],
    },
    {"device": 1, "address": 0, "blocks": [{"size": 2048, "state": "inactive"}]},
    {"device": 0, "address": 1024, "blocks": [{"size": 1024, "state": "active_pending_free"}]},
]


def test_the_blocks_of_a_snapshot() -> None:
    assert blocks_of(SNAPSHOT, 0) == [
        MemoryBlock(1024, 1024, 1024, free=False),
        MemoryBlock(4096, 512, 4096, free=False),
        MemoryBlock(4608, 1536, 4096, free=True),
    ]


def test_blocks_are_told_by_the_records_in_them() -> None:
    """On the simulated card: a record's, somebody else's, and free."""
    card = SimulatedCard()
    device = CudaDevice(card, HostConfig(limit=Bytes(2**20)))
    mine, others = card.allocate(256), card.allocate(512)
    ref = StorageRef(mine, lambda _: None)
    ref.key, ref.record = 0, 7
    addresses = DeviceAddresses(device)
    addresses.follow({7: Slot(ref)})
    (area,) = addresses.areas(100)
    assert (area.need_bytes, area.pages) == (100, False)
    found = {place.nbytes: place.records for place in area.places}
    assert found == {256: (7,), 512: (-1,)}
    assert all(a.segment < b.segment for a, b in pairwise(area.places))
    del others
    card.given_out[1].used = []
    assert {place.nbytes: place.records for place in addresses.areas(100)[0].places} == {256: (7,), 512: ()}
    device.close()


@pytest.mark.parametrize("name", ["cpu", "chaos:1"])
def test_the_heap_has_no_addresses_to_tell(name: str) -> None:
    device = make_device(name, HostConfig())
    assert device.memory_blocks() is None
    device.close()
