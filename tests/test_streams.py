"""Programs that compute on more than one stream of a card, and what Delta does for them on whichever is current."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from simulated_card import SimulatedCard, SimulatedStream
from torch.multiprocessing.reductions import StorageWeakRef

import delta
from delta.config import HostConfig
from delta.runtime.carrier import Carrier
from delta.runtime.codecs import Bits, _Bitmap
from delta.runtime.core import Core
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.cuda import CudaDevice
from delta.runtime.rawmem import as_bytes
from delta.runtime.rematerialise import Rematerialiser
from delta.units import Bytes

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
MIB = 2**20
SEEDS = range(20)


def a_device(card: SimulatedCard, spill_dir: Path | None = None) -> CudaDevice:
    """A device whose card computes on its first stream; what does not fit into pinned memory goes to the file."""
    host = HostConfig(limit=Bytes(0 if spill_dir else MIB), spill_dir=str(spill_dir) if spill_dir else None)
    device = CudaDevice(card, host)
    device.computes()
    return device


def on_another(card: SimulatedCard, device: CudaDevice) -> tuple[SimulatedStream, SimulatedStream]:
    """From here on the program computes on another stream. Returns the first one and that."""
    first = card.compute
    card.compute = card.new_stream()
    device.computes()
    return first, card.compute


@pytest.fixture
def card() -> SimulatedCard:
    return SimulatedCard()


def filled(card: SimulatedCard, value: int = 7) -> torch.UntypedStorage:
    storage = card.allocate(4096)
    as_bytes(storage).fill_(value)
    return storage


def all_are(storage: torch.UntypedStorage | None, value: int) -> bool:
    assert storage is not None
    return bool((as_bytes(storage) == value).all())


@pytest.fixture(params=["pinned", "file"])
def way(request: pytest.FixtureRequest, spill_dir: Path) -> Iterator[Callable[[SimulatedCard], CudaDevice]]:
    """Makes devices whose host tier is one or the other."""
    made: list[CudaDevice] = []

    def make(card: SimulatedCard) -> CudaDevice:
        made.append(a_device(card, spill_dir if request.param == "file" else None))
        return made[-1]

    yield make
    for device in made:
        device.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_out_comes_after_the_stream_that_makes_its_source(
    way: Callable[[SimulatedCard], CudaDevice], seed: int
) -> None:
    """It is asked for while another stream is current, which does not wait for the first."""
    card = SimulatedCard(seed)
    device = way(card)
    storage = filled(card, 0)
    card.kernel("makes", lambda: as_bytes(storage).fill_(9))
    on_another(card, device)
    out = device.copy_out(storage)
    device.wait(out)
    back = device.copy_in(out.block)
    device.wait(back)
    card.settle()
    assert all_are(back.storage, 9)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_let_go_of_is_not_used_again_while_another_stream_reads_it(seed: int) -> None:
    """Plainly it would have lived until backward, and nobody had to tell the allocator."""
    card = SimulatedCard(seed)
    device = a_device(card)
    storage, seen = filled(card), list[bool]()
    on_another(card, device)
    memory = card.given_out[-1]
    card.kernel("reads", lambda: seen.append(set(memory.content) == {7}))
    device.release(storage)
    del storage
    card.settle()
    assert seen == [True]
    assert memory.reused
    device.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_handed_out_is_not_used_again_while_the_stream_reads_it(seed: int) -> None:
    """Made on the first stream, and read on the other after Delta has let go of it."""
    card = SimulatedCard(seed)
    device = a_device(card)
    first, _ = on_another(card, device)
    card.compute, second = first, card.compute
    storage, seen = filled(card), list[bool]()
    memory = card.given_out[-1]
    card.compute = second
    device.meet()
    device.share(storage)
    card.kernel("reads", lambda: seen.append(set(memory.content) == {7}))
    del storage
    card.settle()
    assert seen == [True]
    device.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_after_meeting_a_stream_sees_what_the_others_made(seed: int) -> None:
    card = SimulatedCard(seed)
    device = a_device(card)
    made: list[str] = []
    card.kernel("replay", lambda: made.append("replay"))
    on_another(card, device)
    device.meet()
    card.kernel("backward", lambda: made.append("backward"))
    card.settle()
    assert made == ["replay", "backward"]
    device.close()


def test_a_stream_that_meets_the_others_is_one_of_them(card: SimulatedCard) -> None:
    device = a_device(card)
    card.compute = card.new_stream()
    device.meet()
    device.share(filled(card))
    assert card.shared == ["stream0", card.compute.name]
    device.close()


def test_with_one_stream_there_is_nothing_to_do(card: SimulatedCard) -> None:
    device = a_device(card)
    device.meet()
    storage = filled(card)
    device.share(storage)
    assert (list(card.compute.work), card.shared) == ([], [])
    device.release(storage)
    assert card.shared == ["stream0"], "which does nothing, unless it was allocated on another stream"
    device.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_simulated_card_uses_dropped_memory_again(seed: int) -> None:
    card = SimulatedCard(seed)
    filled(card)
    memory = card.given_out[-1]
    card.settle()
    assert memory.reused
    assert set(memory.content) == {0xEE}


# -- the source of a copy out that has not ended ----------------------------------------------------------------------
def no_luck(card: SimulatedCard) -> None:
    """From here on nothing runs on its own."""
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]


def test_to_let_go_after_a_copy_does_not_stop_the_host() -> None:
    card = SimulatedCard()
    device = a_device(card)
    no_luck(card)
    storage = filled(card)
    alive = StorageWeakRef(storage)
    out = device.copy_out(storage)
    device.let_go_after(out)
    del storage
    assert card.ran == []
    assert alive.expired(), "the device does not keep it either"
    device.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_its_memory_is_not_used_again_before_the_copy(seed: int, elsewhere: bool) -> None:
    """Allocated on the stream that computes or on another, which Delta never saw: that of a loader, say."""
    card = SimulatedCard(seed)
    device = a_device(card)
    computes = card.compute
    if elsewhere:
        card.compute = card.new_stream()
    storage = filled(card, 9)
    card.compute = computes
    memory = card.given_out[-1]
    out = device.copy_out(storage)
    device.let_go_after(out)
    del storage
    back = device.copy_in(out.block)
    device.wait(back)
    card.settle()
    assert all_are(back.storage, 9)
    assert memory.reused
    device.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_with_several_streams_the_copy_is_waited_for(seed: int) -> None:
    card = SimulatedCard(seed)
    device = a_device(card)
    storage = filled(card)
    on_another(card, device)
    out = device.copy_out(storage)
    device.let_go_after(out)
    assert out.finished_ns is not None
    device.close()


def test_a_copy_to_the_file_is_waited_for(spill_dir: Path) -> None:
    card = SimulatedCard()
    device = a_device(card, spill_dir)
    out = device.copy_out(filled(card))
    device.let_go_after(out)
    assert out.finished_ns is not None
    device.close()


# -- when the device is asked, in a training --------------------------------------------------------------------------
class Told:
    """Notes what a device is told, and what Delta does beside it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.shared: list[int] = []
        for name in ("computes", "meet"):
            patch.setattr(CpuDevice, name, lambda _, name=name: self.events.append(name))
        patch.setattr(CpuDevice, "share", lambda _, storage: self.shared.append(storage.data_ptr()))

    def beside(self, patch: pytest.MonkeyPatch, of: type, name: str) -> None:
        """Note the calls of a method, before it does its work."""
        does = getattr(of, name)

        def noted(*args: object) -> object:
            self.events.append(name)
            return does(*args)

        patch.setattr(of, name, noted)

    def before(self, name: str) -> set[str]:
        """What came right before each of those events."""
        return {before for before, event in pairwise(self.events) if event == name}


def test_a_need_meets_the_other_streams_before_anything_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.beside(monkeypatch, Core, "fetch")
    told.beside(monkeypatch, Rematerialiser, "bring_back")
    x = torch.randn(64, 64, requires_grad=True)
    with delta.evict(activations="0%", policy=delta.load_policy("recompute", {"filter.min_bytes": 0}), device="cpu"):
        y = x.sin().sin()
        assert told.events == ["computes"] * 4, "two ops that are recorded, and save something"
        y.sum().backward()
    assert told.before("bring_back") == {"meet"}
    assert told.before("meet") == {"fetch"}


def test_what_is_handed_out_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    told, given = Told(monkeypatch), list[int]()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.save_for_backward(value)
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            given.append(ctx.saved_tensors[0].untyped_storage().data_ptr())
            return gradient * 2

    x = torch.randn(64, 64, requires_grad=True)
    with delta.evict(activations="0%", policy=delta.load_policy("swap", {"filter.min_bytes": 0}), device="cpu"):
        Doubled.apply(x.sin()).sum().backward()
    assert given[0] in told.shared


def test_an_encoded_form_is_made_after_meeting_and_shared_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.beside(monkeypatch, Bits, "encode")
    formed = list[int]()
    decodes = _Bitmap.decode
    monkeypatch.setattr(
        _Bitmap,
        "decode",
        lambda form: formed.append(form.storage.data_ptr()) or decodes(form),  # type: ignore[func-returns-value]
    )
    x = torch.randn(64, 64, requires_grad=True)
    policy = delta.load_policy("delta", {"filter.min_bytes": 0, "director.actions": ["keep", "encode"]})
    with delta.evict(activations="0%", policy=policy, device="cpu"):
        torch.where(x > 0, x, -x).sum().backward()
    assert told.before("encode") == {"meet"}
    assert formed and set(formed) <= set(told.shared)


def test_a_value_is_preserved_after_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.beside(monkeypatch, Carrier, "_preserve")
    weight, batch = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    policy = delta.load_policy("recompute", {"filter.min_bytes": 0})
    with delta.evict(activations="0%", policy=policy, device="cpu"):
        loss = (weight * batch.sin().sin()).sin().sum()
        batch.zero_()
        loss.backward()
    assert {after for event, after in pairwise(told.events) if event == "_preserve"} == {"meet"}


def two_branches() -> list[torch.Tensor]:
    """A step whose branches run on two streams of a real card, as one would write it without Delta."""
    torch.manual_seed(5)
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    weights = [torch.randn(512, 512, device="cuda").div_(20).requires_grad_() for _ in range(8)]
    made = torch.randn(512, 512, device="cuda").sin()
    for left, right in zip(weights[::2], weights[1::2], strict=True):
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            one = (made @ left).tanh().sin()
        other = (made @ right).sigmoid().cos()
        here.wait_stream(aside)
        one.record_stream(here)
        made = one * other
    made.sum().backward()
    torch.cuda.synchronize()
    return [weight.grad for weight in weights if weight.grad is not None]


@pytest.mark.cuda
@pytest.mark.parametrize("policy", ["swap", "recompute", "delta"])
def test_two_streams_of_a_real_card(policy: str) -> None:
    plain = two_branches()
    with delta.evict(activations="0%", policy=delta.load_policy(policy, {"filter.min_bytes": 0}), device="cuda"):
        for _ in range(5):
            for mine, wanted in zip(two_branches(), plain, strict=True):
                assert torch.equal(mine, wanted)
