"""The CUDA device's logic on a simulated card; and, where there is one, a real card."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from simulated_card import SimulatedCard, SimulatedStream
from torch.multiprocessing.reductions import StorageWeakRef

from delta.config import HostConfig
from delta.errors import BudgetError, HostFullError, SwapError
from delta.runtime import cudnn
from delta.runtime.device import make_device
from delta.runtime.device.base import Ticket
from delta.runtime.device.cuda import CudaDevice
from delta.runtime.host import PinnedPool, Slab
from delta.runtime.monitor import maps_memory
from delta.runtime.rawmem import as_bytes
from delta.units import Bytes

MIB = 2**20


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimulatedCard:
    monkeypatch.setattr("delta.runtime.cudnn._fell_back", Event())
    return SimulatedCard()


@pytest.fixture
def device(card: SimulatedCard) -> Iterator[CudaDevice]:
    device = CudaDevice(card, HostConfig(limit=Bytes(64 * MIB)))
    yield device
    device.close()
    assert card.slabs == 0


def filled(nbytes: int = 4096, value: int = 7) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(nbytes)
    as_bytes(storage).fill_(value)
    return storage


def all_are(storage: torch.UntypedStorage | None, value: int) -> bool:
    assert storage is not None
    return bool((as_bytes(storage) == value).all())


def holds(device: CudaDevice) -> list[bool]:
    """Of the copies in under way: whether the device keeps the destination alive."""
    return [flight.hold is not None for flight in device._flights["in"]]


def test_a_peak_between_two_looks_is_the_allocator_s_where_that_has_risen(card: SimulatedCard) -> None:
    """Else it is bounded by what was in use and all that was asked for since, and by the allocator's peak. The program
    may reset that peak at any time, and what counts all that was asked for."""
    card.use = (100, 500, 1000)
    device = CudaDevice(card, HostConfig(limit=Bytes(64 * MIB)))
    seen = []
    for use in [
        (200, 600, 1400),
        (200, 600, 1450),
        (150, 600, 2450),
        (150, 600, 2450),
        (300, 400, 2800),
        (120, 400, 50),
        (300, 350, 60),
    ]:
        card.use = use
        seen.append(device.in_use())
    assert seen == [(200, 600), (200, 250), (150, 600), (150, 150), (300, 500), (120, 400), (300, 300)]
    device.close()


def test_the_allocator_s_refusals_are_told(card: SimulatedCard, device: CudaDevice) -> None:
    assert device.refusals() == 0
    card.use = (0, 0, 0, 0, 3)
    assert device.refusals() == 3


def test_directions_have_a_stream_each(card: SimulatedCard, device: CudaDevice) -> None:
    out = device.copy_out(filled())
    device.wait(out)
    device.wait(device.copy_in(out.block))
    card.settle()
    assert card.ran == ["stream1", "stream2"]  # stream0 computes


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_out_comes_after_the_kernel_that_makes_its_source(seed: int) -> None:
    card = SimulatedCard(seed)
    device = CudaDevice(card, HostConfig(limit=Bytes(MIB)))
    storage = filled(value=0)
    card.kernel("makes", lambda: as_bytes(storage).fill_(9))
    out = device.copy_out(storage)
    device.wait(out)
    assert card.ran == ["makes", "stream1"]
    back = device.copy_in(out.block)
    device.wait(back)
    card.settle()
    assert all_are(back.storage, 9)
    device.close()


@pytest.mark.parametrize("seed", range(10))
def test_the_way_through_the_file_keeps_that_order_too(seed: int, spill_dir: Path) -> None:
    card = SimulatedCard(seed)
    device = CudaDevice(card, HostConfig(limit=Bytes(0), spill_dir=str(spill_dir)))
    storage = filled(value=0)
    card.kernel("makes", lambda: as_bytes(storage).fill_(9))
    out = device.copy_out(storage)
    device.wait(out)
    card.kernel("still reads", lambda: None)
    back = device.copy_in(out.block)
    device.wait(back)
    assert card.ran == ["makes", "stream1", "still reads", "stream2"]
    assert all_are(back.storage, 9)
    device.close()


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_in_comes_after_the_kernels_that_still_use_its_memory(seed: int) -> None:
    """The allocator gives out memory that earlier work in the compute stream may still read."""
    card = SimulatedCard(seed)
    device = CudaDevice(card, HostConfig(limit=Bytes(MIB)))
    out = device.copy_out(filled())
    device.wait(out)
    card.kernel("still reads", lambda: None)
    device.wait(device.copy_in(out.block))
    card.settle()
    assert card.ran == ["stream1", "still reads", "stream2"]
    device.close()


@pytest.mark.parametrize("seed", range(10))
def test_the_kernel_after_wait_sees_the_data(seed: int) -> None:
    card = SimulatedCard(seed)
    device = CudaDevice(card, HostConfig(limit=Bytes(MIB)))
    back = device.copy_in(device.copy_out(filled(value=3)).block)
    device.wait(back)  # does not stop the host: the stream waits
    seen: list[bool] = []
    card.kernel("uses", lambda: seen.append(all_are(back.storage, 3)))
    card.settle()
    assert seen == [True]
    assert card.ran == ["stream1", "stream2", "uses"]
    device.close()


def test_a_wait_for_a_copy_in_does_not_stop_the_host(card: SimulatedCard, device: CudaDevice) -> None:
    out = device.copy_out(filled())
    device.wait(out)
    back = device.copy_in(out.block)
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]  # no luck: nothing runs on its own
    device.wait(back)
    assert card.ran == ["stream1"]


def test_the_source_is_kept_until_the_event_has_passed(card: SimulatedCard, device: CudaDevice) -> None:
    storage = filled()
    alive = StorageWeakRef(storage)
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    device.copy_out(storage)  # nobody keeps the ticket either
    del storage
    device.used_bytes()
    assert not alive.expired()
    device.stop()
    assert alive.expired()


def test_a_destination_that_its_stream_waits_for_is_kept_by_its_owner_only(
    card: SimulatedCard, device: CudaDevice
) -> None:
    """From the wait on, the stream's own order protects the memory: holding it longer would only cost room."""
    out = device.copy_out(filled())
    device.wait(out)
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    back = device.copy_in(out.block)
    assert holds(device) == [True]
    device.wait(back)
    assert holds(device) == [False]
    assert card.shared == []


def test_a_wait_on_another_stream_shares_the_destination_with_it(card: SimulatedCard, device: CudaDevice) -> None:
    out = device.copy_out(filled())
    device.wait(out)
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    back = device.copy_in(out.block)
    card.compute = card.new_stream()  # as in a backward that runs under another stream
    device.wait(back)
    assert card.shared == [card.compute.name]
    assert holds(device) == [True]  # its home stream, which will get the memory back, does not wait
    seen: list[bool] = []
    card.kernel("uses", lambda: seen.append(all_are(back.storage, 7)))
    card.settle()
    assert seen == [True]


def test_a_copy_that_cannot_be_started_leaves_nothing(
    card: SimulatedCard, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: misaligned")

    good = device.copy_out(filled())
    used = device.host_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(card, "copy", fails)
        with pytest.raises(SwapError, match="copy out could not be started: CUDA error"):
            device.copy_out(filled())
        with pytest.raises(SwapError, match="copy in could not be started"):
            device.copy_in(good.block)
    assert device.host_bytes() == used
    device.wait(good)
    device.free(good.block)
    assert device.host_bytes() == 0


def test_no_memory_for_a_copy_in_is_the_callers_own_error(
    card: SimulatedCard, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError("CUDA out of memory")

    out = device.copy_out(filled())
    with monkeypatch.context() as patch:
        patch.setattr(card, "allocate", fails)
        with pytest.raises(torch.OutOfMemoryError):
            device.copy_in(out.block)
    back = device.copy_in(out.block)
    device.wait(back)
    card.settle()
    assert all_are(back.storage, 7)


def test_what_pinned_memory_cannot_hold_goes_to_the_file(card: SimulatedCard, spill_dir: Path) -> None:
    device = CudaDevice(card, HostConfig(limit=Bytes(8192), spill_dir=str(spill_dir)))
    outs = [device.copy_out(filled(8192, value)) for value in range(3)]
    assert [out.block.place for out in outs] == ["pinned", "file", "file"]
    assert device.host_bytes() == 3 * 8192
    for value, out in enumerate(outs):
        device.wait(out)
        back = device.copy_in(out.block)
        device.wait(back)
        card.settle()
        assert all_are(back.storage, value)
        device.free(out.block)
    assert device.host_bytes() == 0
    device.close()
    assert card.slabs == 0


@pytest.mark.parametrize("seed", range(10))
def test_room_that_was_given_back_is_used_again_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host works ahead of the card, by a whole step where nobody waits for it, and gives room back that a copy is
    still to read. The copy out that gets it comes after that one on the card: the host waits for nothing, and no more
    is pinned."""
    card = SimulatedCard(seed=seed)
    device = CudaDevice(card, HostConfig(limit=Bytes(3 * 4096)))
    stays = device.copy_out(filled(4096, 77))
    backs = []
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(card.random, "randrange", lambda *_: 0)  # the card comes to none of it
        for value in range(8):
            out = device.copy_out(filled(4096, value))
            backs.append(device.copy_in(out.block))
            device.free(out.block)
        assert card.ran == []
    assert card.slabs == 1
    for value, back in enumerate(backs):
        device.wait(back)
        card.settle()
        assert all_are(back.storage, value)
    assert all_are(brought_back(card, device, stays), 77)
    device.free(stays.block)
    device.trim()
    assert device.host_bytes() == 0
    device.close()
    assert card.slabs == 0


def test_what_copies_still_use_stays_pinned(card: SimulatedCard) -> None:
    """Also where its room has been offered to a copy that was too large for it. Only when nothing else can be had are
    they waited for."""
    device = CudaDevice(card, HostConfig(limit=Bytes(4 * 4096)))
    device._pool = PinnedPool(card.slab_source(), 4 * 4096, 4096)
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    out = device.copy_out(filled(4096, 1))
    back = device.copy_in(out.block)
    device.free(out.block)
    larger = device.copy_out(filled(8192, 2))
    for trim in (device.trim_host, device.trim_host, device.trim):
        trim()
        assert (card.ran, card.slabs, device.host_bytes()) == ([], 2, 8192)
    device.free(larger.block)
    largest = device.copy_out(filled(4 * 4096, 3))
    assert (len(card.ran), card.slabs) == (3, 1)
    device.wait(back)
    assert all_are(back.storage, 1)
    assert all_are(brought_back(card, device, largest), 3)
    device.free(largest.block)
    device.trim()
    assert card.slabs == 0
    device.close()


def test_room_that_somebody_will_still_read_is_not(card: SimulatedCard) -> None:
    device = CudaDevice(card, HostConfig(limit=Bytes(8192)))
    first = device.copy_out(filled(8192, 1))
    device.wait(first)
    back = device.copy_in(first.block)
    device.wait(back)
    device.free(first.block)
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    second = device.copy_out(filled(8192, 2))
    device.wait(second)
    assert all_are(back.storage, 1)
    assert all_are(brought_back(card, device, second), 2)
    with pytest.raises(HostFullError):
        device.copy_out(filled(8192, 3))
    device.close()


def brought_back(card: SimulatedCard, device: CudaDevice, out: Ticket) -> torch.UntypedStorage | None:
    back = device.copy_in(out.block)
    device.wait(back)
    card.settle()
    return back.storage


def test_an_unusable_spill_directory_is_heard_of_at_once(card: SimulatedCard, tmp_path: Path) -> None:
    with pytest.raises(SwapError, match="missing"):
        CudaDevice(card, HostConfig(spill_dir=str(tmp_path / "missing")))


def test_a_cap_limits_the_allocator_and_ends_with_the_device(card: SimulatedCard) -> None:
    """It may reserve a twentieth more than the budget, which its segments are not filled with."""
    device = CudaDevice(card, HostConfig())
    device.enforce(True)
    assert card.limited_to == 1.0, "no budget"
    for budget_bytes, fraction in [(2**28, 0.2625), (2**40, 1.0)]:
        device.cap(budget_bytes)
        assert card.limited_to == 1.0
        device.enforce(True)
        assert card.limited_to == pytest.approx(fraction)
        device.enforce(False)
        assert card.limited_to == 1.0
    device.cap(2**29)
    device.enforce(True)
    device.close()
    assert card.limited_to == 1.0


def test_another_budget_while_one_is_enforced_leaves_the_program_s_limit(card: SimulatedCard) -> None:
    device = CudaDevice(card, HostConfig())
    device.cap(2**28)
    device.enforce(True)
    device.cap(2**29)
    device.cap(None)
    assert card.limited_to == 1.0
    device.close()


@pytest.mark.parametrize("own_allocator", [True, False])
def test_segments_are_expandable_for_as_long_as_it_is_asked_for(card: SimulatedCard, own_allocator: bool) -> None:
    """Those of the kind that was are given back, which is nobody's affair where another allocator has them."""
    card.own_allocator = own_allocator
    device = CudaDevice(card, HostConfig())
    for on in (True, False, True):
        device.expand(on)
        assert card.expands == on
    assert card.emptied == (2 if own_allocator else 0)
    device.close()
    assert not card.expands


def test_where_nothing_is_refused_what_is_merely_reserved_goes_back(card: SimulatedCard) -> None:
    device = CudaDevice(card, HostConfig())
    emptied = []
    for budget_bytes, enforced, reserved_bytes in [
        (None, False, 300 * MIB),
        (200 * MIB, False, 210 * MIB),
        (200 * MIB, True, 211 * MIB),
        (200 * MIB, False, 211 * MIB),
    ]:
        device.cap(budget_bytes)
        device.enforce(enforced)
        card.use, card.emptied = (100 * MIB, 100 * MIB, 400 * MIB, reserved_bytes), 0
        assert device.in_use() == (100 * MIB, 100 * MIB)
        emptied.append(card.emptied)
    assert emptied == [0, 0, 0, 1]
    device.close()


def test_reserved_memory_goes_back_where_it_is_more_than_a_twentieth_above_the_peak(card: SimulatedCard) -> None:
    device = CudaDevice(card, HostConfig())
    emptied = []
    for reserved_bytes in (105, 106):
        card.use = (50, 100, 400, reserved_bytes)
        device.trim_reserved()
        emptied.append(card.emptied)
    assert emptied == [0, 1]
    device.close()


def test_what_cannot_be_given_back_is_not_tried_again_at_each_look(card: SimulatedCard) -> None:
    """Segments of it are in use. Once more of them is not, or enough was given back, it is worth a try."""
    device = CudaDevice(card, HostConfig())
    device.cap(200 * MIB)
    emptied = []
    for used_bytes, reserved_bytes in [
        (100, 300),
        (100, 300),
        (90, 300),
        (79, 300),
        (150, 300),
        (79, 300),
        (79, 200),
        (100, 300),
    ]:
        card.use, card.emptied = (used_bytes * MIB, 300 * MIB, 400 * MIB, reserved_bytes * MIB), 0
        device.in_use()
        emptied.append(card.emptied)
    assert emptied == [1, 0, 0, 1, 0, 0, 0, 1]
    device.close()


def test_with_another_allocator_there_is_no_budget_and_no_convolution_is_replayed(card: SimulatedCard) -> None:
    """It would not say what is in use, nor what it refuses."""
    CudaDevice(card, HostConfig()).close()
    assert not cudnn.fell_back()
    card.own_allocator = False
    device = CudaDevice(card, HostConfig())
    assert cudnn.fell_back() and device.memory_blocks() is None
    with pytest.raises(BudgetError, match=r"budget= needs PyTorch's own allocator.*give activations="):
        device.cap(2**28)
    device.close()


def test_what_the_program_may_reserve_at_most_stays_its_own_affair(card: SimulatedCard) -> None:
    card.limit(0.5)
    device = CudaDevice(card, HostConfig())
    for budget_bytes, fraction in [(2**28, 0.2625), (2**40, 0.5)]:
        device.cap(budget_bytes)
        device.enforce(True)
        assert card.limited_to == pytest.approx(fraction)
        device.enforce(False)
        assert card.limited_to == 0.5
    device.close()
    assert card.limited_to == 0.5


def test_a_card_that_nothing_can_be_pinned_for_is_an_error_of_delta_s(card: SimulatedCard) -> None:
    def refused(nbytes: int) -> Slab:
        raise RuntimeError("cudaHostRegister says error 801")

    card.slab_source = lambda: refused  # type: ignore[method-assign]
    device = CudaDevice(card, HostConfig())
    with pytest.raises(SwapError, match=r"no host memory can be pinned for .*: cudaHostRegister says error 801"):
        device.bandwidth()
    device.close()


def test_what_is_merely_reserved_goes_back_before_memory_is_refused(card: SimulatedCard) -> None:
    """Else the next forward would begin with what backward and the optimizer have left."""
    device = CudaDevice(card, HostConfig())
    device.cap(200 * MIB)
    for reserved_bytes, emptied in [(210 * MIB, 0), (211 * MIB, 1)]:
        card.use, card.emptied = (100 * MIB, 100 * MIB, 400 * MIB, reserved_bytes), 0
        device.enforce(True)
        device.enforce(True)
        assert card.emptied == emptied
        device.enforce(False)
        assert card.emptied == emptied
    device.close()


def test_of_a_large_budget_more_has_to_be_unused(card: SimulatedCard) -> None:
    """A fiftieth of what may be reserved: giving back has the host wait for the card."""
    device = CudaDevice(card, HostConfig())
    device.cap(2000 * MIB)
    for idle_bytes, emptied in [(41 * MIB, 0), (42 * MIB, 1)]:
        card.use, card.emptied = (2060 * MIB, 2060 * MIB, 2060 * MIB, 2060 * MIB + idle_bytes), 0
        device.in_use()
        assert card.emptied == emptied
    device.close()


def test_trim_unpins_and_empties_the_cache(card: SimulatedCard, device: CudaDevice) -> None:
    out = device.copy_out(filled())
    device.wait(out)
    device.free(out.block)
    assert card.slabs == 1
    device.trim()
    assert (card.slabs, card.emptied) == (0, 1)


def test_the_card_is_held_back_by_its_clock(card: SimulatedCard, device: CudaDevice) -> None:
    device.clock().hold_back(5_000)
    assert card.spun_ns == 5_000


def test_copies_end_in_order_unless_some_go_to_the_file(card: SimulatedCard, spill_dir: Path) -> None:
    for directory, in_order in ((None, True), (str(spill_dir), False)):
        device = CudaDevice(card, HostConfig(limit=Bytes(MIB), spill_dir=directory))
        assert device.in_order is in_order
        device.close()


def test_clock_events_are_used_again(card: SimulatedCard, device: CudaDevice) -> None:
    clock, made = device.clock(), []
    real = card.new_event
    card.new_event = lambda: made.append(1) or real()  # type: ignore[method-assign,func-returns-value]
    for _ in range(5):
        token = clock.stop(clock.start())
        card.settle()
        assert clock.elapsed_ns(token) is not None
    assert len(made) == 2


def test_the_clock_does_not_wait(card: SimulatedCard, device: CudaDevice) -> None:
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    token = device.clock().stop(device.clock().start())
    assert device.clock().elapsed_ns(token) is None
    card.settle()
    assert device.clock().elapsed_ns(token) == 10_000  # one tick of the simulated card


def test_the_clock_waits_if_it_is_told_to(card: SimulatedCard, device: CudaDevice) -> None:
    card.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    assert device.clock().wait_ns(device.clock().stop(device.clock().start())) == 10_000


def test_the_simulated_card_sees_use_after_free(card: SimulatedCard) -> None:
    storage, there = filled(), filled()
    card.copy(as_bytes(there), as_bytes(storage), card.compute)
    del storage
    with pytest.raises(AssertionError, match="freed"):
        card.settle()
    card.streams.clear()


def test_the_simulated_card_sees_streams_that_wait_for_each_other(card: SimulatedCard) -> None:
    first, second = card.new_stream(), card.new_stream()
    events = [card.new_event(), card.new_event()]
    later = SimulatedStream(card, "later")
    for event in events:
        event.record(later)
    first.wait_event(events[0])
    second.wait_event(events[1])
    with pytest.raises(AssertionError, match="for ever"):
        card.settle()


@pytest.mark.cuda
def test_a_real_card_under_compute() -> None:
    device = make_device("cuda", HostConfig())
    tensors = [torch.randn(1024, 1024, device="cuda") for _ in range(16)]
    wanted = [tensor.sum().item() for tensor in tensors]
    outs = []
    while tensors:
        tensor = tensors.pop(0)
        outs.append(device.copy_out(tensor.untyped_storage()))
        del tensor
        torch.mm(torch.randn(2048, 2048, device="cuda"), torch.randn(2048, 2048, device="cuda"))
    for out in outs:
        device.wait(out)
    backs = [device.copy_in(out.block) for out in outs]
    got = []
    for back in backs:
        device.wait(back)
        assert back.storage is not None
        got.append(as_bytes(back.storage).view(torch.float32).view(1024, 1024).sum().item())
    assert got == wanted
    device.close()


def allocator_settings() -> dict[str, object]:
    return dict(torch.cuda.memory._snapshot()["allocator_settings"])


@pytest.mark.cuda
@pytest.mark.parametrize("settings", ["", "garbage_collection_threshold:0.9", "expandable_segments:False"])
def test_the_allocator_of_a_real_card_expands_segments_where_the_program_has_not_decided(settings: str) -> None:
    """And is afterwards what it was."""
    if not maps_memory(torch.cuda.current_device()):
        pytest.skip("this card's driver cannot")
    torch._C._accelerator_setAllocatorSettings(settings)
    before = allocator_settings()
    try:
        device = make_device("cuda", HostConfig())
        device.expand(True)
        during = allocator_settings()
        assert during["expandable_segments"] is (settings != "expandable_segments:False")
        assert during["garbage_collection_threshold"] == before["garbage_collection_threshold"]
        kept = torch.empty(2**28, dtype=torch.uint8, device="cuda").fill_(7)
        [segment] = [
            each
            for each in torch.cuda.memory_snapshot()
            if each["address"] <= kept.data_ptr() < each["address"] + each["total_size"]
        ]
        assert segment["is_expandable"] is during["expandable_segments"]
        device.close()
        assert allocator_settings() == before
        assert kept.eq(7).all()
    finally:
        for each in ("expandable_segments:False", ""):
            torch._C._accelerator_setAllocatorSettings(each)


@pytest.mark.cuda
@pytest.mark.parametrize("expands", [None, True, False])
def test_settings_that_the_program_makes_under_a_limit_stay(expands: bool | None) -> None:
    """Expanding is no setting of its own unless it names it."""
    device = make_device("cuda", HostConfig())
    device.expand(True)
    named = "" if expands is None else f",expandable_segments:{expands}"
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:100" + named)
    device.close()
    try:
        after = allocator_settings()
        assert (after["max_split_size"], after["expandable_segments"]) == (100 * MIB, expands is True)
    finally:
        for settings in ("expandable_segments:False", ""):
            torch._C._accelerator_setAllocatorSettings(settings)
