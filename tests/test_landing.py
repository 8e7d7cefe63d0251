"""Storages that what is read back lands in: in phase with the file, and otherwise as those they stand in for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import in_pairs
from exactly import STEPS, exact, numbers_of, trained
from inside import different
from torch import Tensor, nn

import delta
from delta.config import HostConfig
from delta.engine import Engine
from delta.runtime import landing as module
from delta.runtime import split
from delta.runtime.core import Core
from delta.runtime.device import cpu
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.landing import is_landing, landing
from delta.runtime.pieces import BLOCK_BYTES
from delta.runtime.rawmem import as_bytes, sole_owner
from delta.runtime.spill import SpillFile
from delta.runtime.storages import Storages
from delta.runtime.view import is_shared
from delta.totals import StepSummary
from delta.types import Mode

MIB = 2**20
Act = Callable[[Tensor], object]
pytestmark = pytest.mark.filterwarnings("ignore:the budget of")


def cut(nbytes: int) -> torch.UntypedStorage:
    """A landing that is no storage of the heap's."""
    for phase in range(0, BLOCK_BYTES, 64):
        if is_landing(storage := landing(nbytes, phase, BLOCK_BYTES)):
            return storage
    raise AssertionError("the heap gives every phase")


@pytest.mark.parametrize("nbytes", [1, 1000, MIB, MIB + 24])
@pytest.mark.parametrize("phase", [0, 64, 1024, BLOCK_BYTES - 64])
def test_it_begins_where_it_is_asked_to(nbytes: int, phase: int) -> None:
    storage = landing(nbytes, phase, BLOCK_BYTES)
    assert storage.data_ptr() % BLOCK_BYTES == phase
    assert storage.nbytes() == nbytes
    as_bytes(storage).fill_(7)
    assert bytes(as_bytes(storage).numpy()) == b"\7" * nbytes


def test_it_belongs_to_nobody_else() -> None:
    storage = cut(MIB)
    assert sole_owner(storage)
    tensor = as_bytes(storage)
    assert not is_shared(tensor)
    assert not sole_owner(storage)
    assert sole_owner(storage, tensors=1)


def test_what_is_borrowed_from_others_is_none() -> None:
    tensor = torch.from_numpy(np.zeros(1000))
    assert not is_landing(tensor.untyped_storage())
    assert is_shared(tensor)
    assert not sole_owner(tensor.untyped_storage(), tensors=1)


def test_its_memory_goes_with_it() -> None:
    storage = cut(MIB)
    tensor = as_bytes(storage)
    wholes = [each for each in gc.get_objects() if type(each) is torch.UntypedStorage]
    whole = weakref.ref(next(each for each in wholes if each.nbytes() == MIB + BLOCK_BYTES))
    del wholes, storage
    assert whole() is not None
    assert bool((tensor.fill_(3) == 3).all())
    assert module._cut
    del tensor
    gc.collect()
    assert whole() is None
    assert not module._cut


@pytest.mark.parametrize("dear", [True, False])
def test_the_way_that_takes_less_of_a_processor_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dear: bool
) -> None:
    """`dear`: the detour takes more."""
    spent_ns, asked = [0], list[bool]()
    mover = cpu._HeapMover(SpillFile(str(tmp_path)))

    def read() -> None:
        asked.append(mover._detour)
        spent_ns[0] += 1000 if mover._detour is dear else 900

    monkeypatch.setattr(cpu.time, "thread_time_ns", lambda: spent_ns[0])
    mover.choose_way(read)
    assert set(asked) == {True, False}
    assert mover._detour is not dear


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Everything is read straight, whatever that takes; of each destination so far, whether it was cut."""
    file = SpillFile(str(tmp_path))
    file.give_back(file.reserve(1))
    direct = file.direct
    file.close()
    if not direct:
        pytest.skip("the file system has a page cache that cannot be passed by")
    cut_so_far: list[bool] = []

    def seen_landing(nbytes: int, phase_bytes: int, block_bytes: int) -> torch.UntypedStorage:
        storage = landing(nbytes, phase_bytes, block_bytes)
        cut_so_far.append(is_landing(storage))
        return storage

    monkeypatch.setattr(cpu, "landing", seen_landing)
    monkeypatch.setattr(cpu, "_MIN_STRAIGHT_BYTES", 0)
    monkeypatch.setattr(cpu._HeapMover, "choose_way", lambda mover, read: setattr(mover, "_detour", False))
    return cut_so_far


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the inputs of convolutions have that went between two calls: nothing any more, but for what was cut."""
    found, tell = list[int](), Storages.emptied
    monkeypatch.setattr(Storages, "emptied", lambda of, storage: (found.append(storage.nbytes()), tell(of, storage)))
    return found


@pytest.mark.parametrize("nbytes", [1000, MIB, 5 * MIB + 24])
def test_what_is_read_lands_where_it_is_to_be(
    straight: list[bool], spill_copies: list[int], spill_dir: Path, nbytes: int
) -> None:
    device = CpuDevice(HostConfig(spill_dir=str(spill_dir)))
    device.bandwidth()
    sources = [torch.randint(256, (nbytes,), dtype=torch.uint8) for _ in range(3)]
    outs = [device.copy_out(source.untyped_storage()) for source in sources]
    for out in outs:
        device.wait(out)
    spill_copies.clear()
    backs = [device.copy_in(out.block) for out in outs]
    for back, source in zip(backs, sources, strict=True):
        device.wait(back)
        assert back.storage is not None
        assert torch.equal(as_bytes(back.storage), source)
        assert back.storage.data_ptr() % BLOCK_BYTES == source.data_ptr() % BLOCK_BYTES
    if nbytes >= MIB:
        assert sum(spill_copies) <= 3 * 2 * BLOCK_BYTES
    device.close()


class Cubed(torch.autograd.Function):
    """A function of the program's own, whose backward does something to what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Act) -> Tensor:
        own = x.clone()
        ctx.save_for_backward(own)
        ctx.act = act
        return own**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        made = grad * 3 * x**2
        ctx.act(x)
        return made, None


def nothing(x: Tensor) -> None:
    pass


def once(loss: Tensor) -> None:
    loss.backward()


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def program(act: Act = nothing, backward: Callable[[Tensor], None] = once) -> list[Tensor]:
    model = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))

    def loss_of() -> Tensor:
        x = torch.randn(64, 48)
        for layer in model:
            x = Cubed.apply(torch.tanh(layer(x)), act)
        return x.pow(2).mean()

    return trained(model, loss_of, backward)


def differentiated() -> list[Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(6)))

    def backward(loss: Tensor) -> None:
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(grad.pow(2).sum() for grad in grads)).backward()

    return trained(model, lambda: model(torch.randn(64, 48)).pow(2).mean(), backward)


@in_pairs(
    run=[program, partial(program, backward=twice), differentiated], policy=["swap", "delta"], share=["0%", "40%"]
)
def test_training_from_landings_gives_the_same_bits(
    straight: list[bool], run: Callable[[], list[Tensor]], policy: str, share: str
) -> None:
    exact(run, policy, "cpu", share)
    assert policy == "delta" or any(straight)


def test_the_program_may_resize_what_it_has_saved(straight: list[bool]) -> None:
    exact(partial(program, lambda x: x.untyped_storage().resize_(0)), "swap", "cpu", "0%")
    assert any(straight)


def convolved(dtype: torch.dtype) -> list[Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GELU()) for _ in range(4))).to(dtype)
    return trained(model, lambda: model(torch.randn(3, 6, 16, 16, dtype=dtype)).pow(2).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_input_of_a_convolution_goes_between_its_two_calls(
    straight: list[bool], emptied: list[int], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    program = partial(convolved, dtype)
    copies: list[torch.UntypedStorage] = []
    copy = Core._resizable
    monkeypatch.setattr(
        Core, "_resizable", lambda of, rec, storage: (copies.append(storage), copy(of, rec, storage))[1]
    )
    chosen = delta.load_policy("swap", {"filter.min_bytes": 1024, "backward.split_convolutions": True})
    with delta.evict(activations="0%", policy=chosen, device="cpu"):
        ours = numbers_of(program)
    assert different(numbers_of(program), ours) == []
    assert any(emptied) and any(straight) and not copies


def test_what_a_convolution_has_read_is_let_go_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its two calls the node in C++ has the tensor still, with the look it had, and nothing behind it."""
    monkeypatch.setattr(module, "_cut", {})
    storage = cut(4 * 6 * 8 * 8)
    value = torch.empty(0).set_(storage, 0, (1, 6, 8, 8), (384, 1, 48, 6)).fill_(1)
    alias, version = value.detach(), value._version
    split._put_off(value, storage)
    assert (value.size(), value.stride(), value.dtype) == (alias.size(), alias.stride(), torch.float32)
    assert (value._version, value.untyped_storage().nbytes()) == (version, storage.nbytes())
    assert value.untyped_storage()._cdata != storage._cdata
    del alias
    assert module._cut
    del storage
    assert not module._cut


def test_a_copy_for_the_program_finds_room(straight: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to its own code is copied first, and both are there for a moment: room is made for it."""
    peaks: list[int] = []
    step, limit_bytes = Engine._finish_step, 80_000

    def finished(of: Engine, mode: Mode, peak_bytes: int, unevicted_peak_bytes: int) -> StepSummary:
        peaks.append(peak_bytes)
        return step(of, mode, peak_bytes, unevicted_peak_bytes)

    monkeypatch.setattr(Engine, "_finish_step", finished)
    model = nn.ModuleList(nn.Linear(48, 48) for _ in range(8))

    def loss_of() -> Tensor:
        x = torch.randn(64, 48)
        for index, layer in enumerate(model):
            x = torch.tanh(layer(x))
            if index % 3 == 2:
                x = Cubed.apply(torch.cat([x, x, x], dim=1), nothing)[:, :48]
        return x.pow(2).mean()

    with delta.evict(activations=limit_bytes, policy=delta.load_policy("swap", {"filter.min_bytes": 0}), device="cpu"):
        trained(model, loss_of)
    assert any(straight) and len(peaks) == STEPS
    assert max(peaks) <= limit_bytes


class Landed(torch.autograd.Function):
    """The same values in a storage that was cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        storage = cut(x.numel() * x.element_size())
        return torch.empty(0).set_(storage, 0, x.shape, x.stride()).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("share", ["40%", "70%"])
def test_a_convolution_is_split_over_what_was_cut_for_others_too(share: str, emptied: list[int]) -> None:
    """What a backward has saved once more may be kept as it is."""
    convolutions = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))

    def steps() -> list[Tensor]:
        losses = []
        for index in range(10):
            x = torch.full((3, 6, 16, 16), 0.1 * index)
            for convolution in convolutions:
                x = convolution(Landed.apply(torch.tanh(x)))
            loss = x.pow(2).mean()
            del x
            loss.backward()
            losses.append(loss.detach())
        gradients = [parameter.grad.clone() for parameter in convolutions.parameters()]
        convolutions.zero_grad()
        return [*losses, *gradients]

    chosen = delta.load_policy("delta", {"filter.min_bytes": 1024, "backward.split_convolutions": True})
    plain = steps()
    with delta.evict(activations=share, policy=chosen, device="cpu"):
        ours = steps()
    assert different(plain, ours) == []
    assert any(emptied)


@pytest.mark.parametrize("policy", ["swap", "delta"])
def test_a_write_into_what_was_saved_is_refused_as_ever(straight: list[bool], policy: str) -> None:
    """By the second backward that reads it."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(lambda x: x.add_(1), twice)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with (
        delta.evict(activations="0%", policy=chosen, device="cpu"),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        program(lambda x: x.add_(1), twice)
