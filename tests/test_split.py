"""Convolution's backward in two calls: the same bits, the input gone in between, and only where nobody can miss it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, cast

import pytest
import torch
from covering import in_pairs
from exactly import STEPS, numbers_of, plain_numbers_of, trained
from inside import different
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import delta
from delta.runtime import split
from delta.runtime.demo_measure import AllocatedBytes
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.landing import landing
from delta.runtime.rawmem import sole_owner
from delta.runtime.storages import Storages

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")

# PyTorch leaves bfloat16 to oneDNN only where the processor has AVX-512 (or converts it by itself).
ONEDNN_HAS_BFLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
PROGRAMS: dict[str, tuple[int, Callable[[], list[Tensor]]]] = {}  # with how many inputs a step empties


def program(emptied: int) -> Callable[[Callable[[], list[Tensor]]], Callable[[], list[Tensor]]]:
    def add(function: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
        PROGRAMS[function.__name__] = emptied, function
        return function

    return add


def policy(**changes: Any) -> delta.Policy:
    return delta.load_policy("delta", {"filter.min_bytes": 0, "backward.split_convolutions": True, **changes})


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The storages that were emptied, by identity."""
    found: list[int] = []
    tell = Storages.emptied
    monkeypatch.setattr(Storages, "emptied", lambda of, storage: (found.append(storage._cdata), tell(of, storage)))
    yield found


# -- what PyTorch's op does -------------------------------------------------------------------------------------------
SHAPES = [
    ("1d", (2, 4, 9), (6, 4, 3), [1], [1], [1], False, [0]),
    ("2d", (2, 4, 8, 8), (6, 4, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0]),
    ("strided", (2, 4, 9, 8), (6, 4, 3, 2), [2, 1], [0, 1], [1, 1], False, [0, 0]),
    ("dilated", (2, 4, 9, 9), (6, 4, 3, 3), [1, 1], [2, 2], [2, 2], False, [0, 0]),
    ("one by one", (2, 4, 8, 8), (6, 4, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0]),
    ("transposed", (2, 4, 5, 5), (4, 6, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1]),
    ("3d", (2, 4, 5, 6, 7), (6, 4, 3, 3, 3), [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0]),
]


def layouts(dim: int) -> list[torch.memory_format]:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    return [torch.contiguous_format, *([last[dim]] if dim in last else [])]


CASES = [
    pytest.param(*shape[1:], dtype, layout, bias, id=f"{shape[0]}-{dtype}-{layout}-{bias}".replace("torch.", ""))
    for shape in SHAPES
    for dtype, layout, bias in product(
        (torch.float32, torch.float64, torch.bfloat16), layouts(len(shape[1])), (False, True)
    )
]


@pytest.fixture
def onednn(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether oneDNN's kernels are used, or ATen's own."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(request.param)
    yield request.param
    torch._C._set_mkldnn_enabled(before)


def devices() -> list[Any]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture
def same_order() -> Iterator[None]:
    """By default cuDNN may add up a gradient in any order, and does in some of the cases: two whole calls differ."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield


def expected(dim: int, dtype: torch.dtype, dilation: list[int], transposed: bool, onednn: bool, device: str) -> bool:
    """Where the second call is known to do without the input's bytes."""
    if dim == 3 or device == "cuda":
        return dim != 3
    onednn &= dtype is not torch.float64 and (dtype is not torch.bfloat16 or ONEDNN_HAS_BFLOAT16)
    return not onednn if transposed else onednn or max(dilation) == 1


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("size", "weights", "stride", "padding", "dilation", "transposed", "more", "dtype", "layout", "bias"), CASES
)
@pytest.mark.parametrize("onednn", [True, False], indirect=True)
def test_both_calls_give_the_bits_of_the_one_and_the_second_reads_no_input(
    size: tuple[int, ...],
    weights: tuple[int, ...],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    more: list[int],
    dtype: torch.dtype,
    layout: torch.memory_format,
    bias: bool,
    onednn: bool,
    device: str,
    same_order: None,
) -> None:
    torch.manual_seed(1)
    x = torch.randn(size, dtype=dtype, device=device).contiguous(memory_format=layout)
    w = torch.randn(weights, dtype=dtype, device=device).contiguous(memory_format=layout)
    shape = [weights[1 if transposed else 0]] if bias else None
    more_args = (shape, stride, padding, dilation, transposed, more, 1)
    grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *more_args[1:]))
    op = torch.ops.aten.convolution_backward.default
    whole = op(grad, x, w, *more_args, [True, True, bias])
    _, of_weight, of_bias = op(grad, x, w, *more_args, [False, True, bias])
    empties = split.reads_no_input([grad, x, w, *more_args, [True, True, bias]])
    assert empties == expected(len(size), dtype, dilation, transposed, bool(torch._C._get_mkldnn_enabled()), device)
    x.fill_(float("nan"))
    if empties:
        x.untyped_storage().resize_(0)
    of_input, _, _ = op(grad, x, w, *more_args, [True, False, False])
    assert different([part for part in whole if part is not None], [of_input, of_weight, *([of_bias] * bias)]) == []


# -- programs ---------------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Inputs of convolutions that nobody else saves: of `last`, `second` and, from a concatenation, `third`."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.third = nn.Conv2d(16, 8, 3, padding=1, bias=False, groups=groups)
        self.last = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        y = F.gelu(self.second(x))
        return self.last(F.avg_pool2d(self.third(torch.cat([x.sin(), y], 1)).square(), 2))


def picture() -> Tensor:
    return torch.randn(4, 3, 16, 16)


@program(emptied=2)  # x is saved by `sin`, too
def nobody_else_saves_them() -> list[Tensor]:
    model = Net()
    return trained(model, lambda: model(picture()).mean())


@program(emptied=2)
def channels_last() -> list[Tensor]:
    model = Net().to(memory_format=torch.channels_last)
    return trained(model, lambda: model(picture().to(memory_format=torch.channels_last)).mean())


@program(emptied=2 if ONEDNN_HAS_BFLOAT16 else 3)  # ATen's own transposed kernel does without, too
def autocast() -> list[Tensor]:
    model = Net()

    def loss_of() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(picture()).float().mean()

    return trained(model, loss_of)


@program(emptied=0)
def groups() -> list[Tensor]:
    """ATen's own kernels look at the addresses of the bytes there."""
    model = Net(groups=2)
    return trained(model, lambda: model(picture()).mean())


@program(emptied=0)
def layouts_differ() -> list[Tensor]:
    """The kernel brings the input into the weight's layout, and reads it for that."""
    first = nn.Conv2d(3, 8, 3)
    second = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    model = nn.ModuleList([first, second])
    return trained(model, lambda: second(F.avg_pool2d(first(picture()), 2)).mean())


@program(emptied=0)
def graph_is_kept() -> list[Tensor]:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)

    model = Net()
    return trained(model, lambda: model(picture()).mean(), twice)


@program(emptied=2)
def graph_is_kept_once() -> list[Tensor]:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    model = Net()
    return trained(model, lambda: model(picture()).mean(), twice)


@program(emptied=0)
def backward_is_differentiated() -> list[Tensor]:
    model = Net()

    def loss_of() -> Tensor:
        x = picture().requires_grad_()
        loss = model(x).mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return gradient.square().sum()

    def kept(loss: Tensor) -> None:
        loss.backward(retain_graph=True)

    return trained(model, loss_of, kept)


@program(emptied=0)
def program_has_them() -> list[Tensor]:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    found = []

    def loss_of() -> Tensor:
        x = conv(picture())
        pooled = F.avg_pool2d(x, 2)
        found.append(pooled)
        return conv(pooled).mean()

    return [*trained(conv, loss_of), *(pooled.detach() for pooled in found)]


@program(emptied=0)
def program_has_their_storages() -> list[Tensor]:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    found = []

    def loss_of() -> Tensor:
        pooled = F.avg_pool2d(conv(picture()), 2)
        found.append(pooled.untyped_storage())
        return conv(pooled).mean()

    return [*trained(conv, loss_of), *(torch.empty(0).set_(storage) for storage in found)]


@program(emptied=0)
def weights_alone_are_wanted() -> list[Tensor]:
    model = nn.Conv2d(3, 3, 3)
    return trained(model, lambda: model(picture()).mean())


@program(emptied=0)
def input_alone_is_wanted() -> list[Tensor]:
    conv, frozen = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3).requires_grad_(False)
    return trained(conv, lambda: frozen(F.avg_pool2d(conv(picture()), 2)).mean())


@program(emptied=1)
def two_read_one_input() -> list[Tensor]:
    """The second to run backward is the last that asks."""
    stem, one, other = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    model = nn.ModuleList([stem, one, other])

    def loss_of() -> Tensor:
        x = F.avg_pool2d(stem(picture()), 2)
        return (one(x).exp() * other(x).sin() + x[..., :5, :5]).mul(x[..., :5, :5]).mean()

    return trained(model, loss_of)


class Sees(TorchDispatchMode):
    """A mode of the program's that keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


@program(emptied=0)
def mode_of_the_program() -> list[Tensor]:
    model = Net()
    with Sees() as mode:
        found = trained(model, lambda: model(picture()).mean())
    return [*found, *mode.seen]


@in_pairs(name=PROGRAMS, share=["0%", "40%", "90%"], device=["cpu", "chaos:1"])
def test_the_bits_are_those_of_plain_pytorch(name: str, share: str, device: str, emptied: list[int]) -> None:
    wanted, function = PROGRAMS[name]
    plain = plain_numbers_of(function)
    with delta.evict(activations=share, policy=policy(), device=device) as run:
        found = numbers_of(function)
    assert different(plain, found) == []
    if share == "0%":  # else recipes of what was dropped may need the inputs still
        assert len(emptied) == wanted * STEPS
    else:
        assert len(emptied) <= wanted * STEPS
    assert run._core is not None
    assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_let_go_of_where_ops_can_run(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA letting go of a storage takes an op, and a thread of autograd's own runs backward. While it drops the
    modes of a node, no op can run."""
    release, ran = CpuDevice.release, []

    def released(self: CpuDevice, storage: torch.UntypedStorage, tensors: int = 0) -> None:
        ran.append(torch.empty(1))
        release(self, storage, tensors)

    def elsewhere(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    def program() -> list[Tensor]:
        model = Net(groups=groups)
        return trained(model, lambda: model(picture()).mean(), elsewhere)

    monkeypatch.setattr(CpuDevice, "release", released)
    plain = numbers_of(program)
    with delta.evict(activations="0%", policy=policy(), device="cpu"):
        assert different(plain, numbers_of(program)) == []
    assert ran


def test_only_a_policy_that_says_so_splits(emptied: list[int]) -> None:
    _, function = PROGRAMS["nobody_else_saves_them"]
    for chosen in (
        policy(**{"backward.split_convolutions": False}),
        policy(**{"filter.min_bytes": "1GiB"}),
    ):
        with delta.evict(activations="0%", policy=chosen, device="cpu"):
            numbers_of(function)
    assert emptied == []
    assert delta.load_policy("monet").backward.split_convolutions
    assert not delta.load_policy("delta").backward.split_convolutions


def test_the_device_hears_of_the_bytes_that_nobody_will_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a budget of resident bytes it returns the pages at once."""
    found: list[int] = []
    owned: list[bool] = []
    release = CpuDevice.release
    model = Net()
    with delta.evict(model, activations="0%", policy=policy(), device="cpu") as run:
        core = run._core
        assert core is not None

        def spy(device: CpuDevice, storage: torch.UntypedStorage, tensors: int = 0) -> None:
            found.append(tensors)
            owned.append(core.lock._is_owned())  # type: ignore[attr-defined]
            release(device, storage, tensors)

        monkeypatch.setattr(CpuDevice, "release", spy)
        model(picture()).mean().backward()
    assert found.count(1) == 2
    assert all(owned), "the daemon, in the core, may wait for a device that locks itself"


def test_a_storage_with_a_tensor_is_its_owner_s_where_that_is_counted() -> None:
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    assert sole_owner(storage, tensors=1) and not sole_owner(storage) and not sole_owner(storage, tensors=2)


def test_it_waits_for_whoever_is_in_the_core(monkeypatch: pytest.MonkeyPatch, emptied: list[int]) -> None:
    """The daemon takes samples: a handle that dies meanwhile leaves a note, one that is done with has to be gone."""
    original = split._Split._let_go

    def let_go(mode: Any, value: Tensor) -> None:
        core, inside, leaves = mode._handle().core, threading.Event(), threading.Timer(0.05, lambda: None)

        def stay() -> None:
            with core:
                inside.set()
                leaves.join()

        other = threading.Thread(target=stay)
        leaves.start()
        other.start()
        inside.wait()
        original(mode, value)
        other.join()

    monkeypatch.setattr(split._Split, "_let_go", let_go)
    model = Net()
    with delta.evict(model, activations="0%", policy=policy(), device="cpu"):
        model(picture()).mean().backward()
    assert len(emptied) == 2


# -- what it is for ---------------------------------------------------------------------------------------------------
class Wide(nn.Module):
    """A concatenation of two pictures that only a convolution reads, like the last one of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, 8, 1)
        self.conv = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.conv(torch.cat([x + 1, x - 1], 1))


INPUT_BYTES = 4 * 2 * 16 * 128 * 128


def backward_bytes(splits: bool) -> int:
    """The most that backward has above its start, in the last of some steps."""
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(2, 3, 128, 128)
    chosen = policy(**{"backward.split_convolutions": splits, "director.actions": ["keep", "swap"]})
    with delta.evict(activations="20%", policy=chosen, device="cpu"):
        for _ in range(STEPS):
            loss = model(x).mean()
            with AllocatedBytes() as allocated:
                loss.backward()
    return allocated.peak_bytes


@pytest.mark.usefixtures("one_thread")
def test_the_input_does_not_lie_beside_its_gradient() -> None:
    gc.collect()
    assert backward_bytes(splits=False) - backward_bytes(splits=True) >= 0.9 * INPUT_BYTES


# -- hooks and failures ------------------------------------------------------------------------------------------------
def test_a_backward_that_failed_in_between_cannot_ask_again(
    monkeypatch: pytest.MonkeyPatch, emptied: list[int]
) -> None:
    model = Net()
    original = split._Split._let_go

    def runs_out(mode: Any, value: Tensor) -> None:
        original(mode, value)
        raise torch.OutOfMemoryError("no memory for the gradient")

    def convolved() -> Tensor:
        return cast(Tensor, model.third(torch.cat([model.first(picture()), model.first(picture())], 1)))

    with delta.evict(model, activations="0%", policy=policy(), device="cpu") as run:
        y = convolved()
        with monkeypatch.context() as patch:
            patch.setattr(split._Split, "_let_go", runs_out)
            with pytest.raises(torch.OutOfMemoryError):
                y.backward(torch.ones_like(y))
        assert len(emptied) == 1
        with pytest.raises(delta.DeltaError, match="split_convolutions to false"):
            y.backward(torch.ones_like(y))
        assert torch._C._len_torch_dispatch_stack() <= 1, "the recorder"
        del y
        convolved().mean().backward()  # and training goes on
    assert run._core is not None
    assert run._core.engine.ledger.handles == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_hook_before_the_node_has_the_value_and_one_after_it_an_error() -> None:
    model, found = Net(), []
    with delta.evict(model, activations="0%", policy=policy(), device="cpu"):
        y = model.third(torch.cat([model.first(picture()), model.first(picture())], 1))
        node: Any = y.grad_fn
        before = node._saved_input.clone()
        node.register_prehook(lambda gradients: found.append(torch.equal(node._saved_input, before)))
        y.mean().backward()
        assert found == [True]

        y = model.third(torch.cat([model.first(picture()), model.first(picture())], 1))
        later: Any = y.grad_fn
        later.register_hook(lambda gradients, outputs: found.append(later._saved_input))
        with pytest.raises(delta.DeltaError, match="a hook of its node asks"):
            y.mean().backward()


def test_what_is_put_off_stays_on_the_host_whatever_the_default_device() -> None:
    """A storage of pages that something was read into cannot be emptied."""
    storage = landing(4 * 64, 16, 4096)
    value = torch.empty(0).set_(storage, 0, (8, 8), (8, 1))
    with torch.device("meta"):
        split._put_off(value, storage)
    assert (value.device.type, value.size()) == ("cpu", (8, 8))
    assert value.untyped_storage()._cdata != storage._cdata
