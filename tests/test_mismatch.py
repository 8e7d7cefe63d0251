"""When a replay cannot be right: what is never replayed, what is refused, and in which words (rules 6, 7 and 19)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import delta
from delta.errors import RecomputeMismatchError, StorageModifiedError
from delta.runtime.core import Core
from delta.runtime.opfacts import facts_of

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")

ROWS, COLUMNS = 16, 8
BIG = torch.ones(100, COLUMNS)


def block(policy: str = "recompute", device: str = "cpu") -> delta.evict:
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0, "planner.kind": "none"})
    return delta.evict(activations="0%", policy=chosen, device=device)


def recipes(run: delta.evict, *tensors: Tensor) -> list[bool]:
    """Whether the tensors' storages could be made again."""
    core = run._core
    return [core.slots[core.storages.known(tensor)].recipe is not None for tensor in tensors]


def batch() -> Tensor:
    return torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS)


# -- what is not replayed ---------------------------------------------------------------------------------------------
@torch.library.custom_op("delta_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("delta_tests::add_one_", mutates_args=("x",))
def add_one_(x: Tensor) -> None:
    x.add_(1)


def from_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.zeros((ROWS, COLUMNS), np.float32)) * x


def from_buffer(x: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(4 * COLUMNS), dtype=torch.float32) * x


def given_to_numpy(x: Tensor) -> Tensor:
    y = x * 2
    y.detach().numpy()
    return y * 3


def shared_with_processes(x: Tensor) -> Tensor:
    return torch.ones(COLUMNS).share_memory_() * x


NOT_REPLAYED: dict[str, Callable[[Tensor], Tensor]] = {
    "an operator of the program's own": torch.ops.delta_tests.doubled,
    "a size that depends on data": lambda x: x[x > 0],
    "positions found": lambda x: x.nonzero(),
    "different values": lambda x: x.detach().unique(),
    "largest values": lambda x: x.topk(3).values,
    "order": lambda x: x.sort().values,
    "memory of a numpy array": from_numpy,
    "memory of a buffer": from_buffer,
    "memory given to numpy": given_to_numpy,
    "memory shared with other processes": shared_with_processes,
    "a small part of something big": lambda x: BIG[:2] * x[0],
    "a subclass": lambda x: (nn.Buffer(x) * 2, torch.sparse.mm(x.to_sparse(), x.t()))[1],
}


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_what_has_no_recipe(name):
    with block() as run:
        x = torch.randn(ROWS, COLUMNS)
        made = NOT_REPLAYED[name](x)
        assert recipes(run, made) == [False]
        after = made.double() + 1
        assert recipes(run, after) == [True], "what is made of it is replayed from there"


@pytest.mark.parametrize("policy", ["recompute", "swap", "delta"])
@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_what_has_no_recipe_is_kept_or_swapped(name, policy):
    def run() -> list[Tensor]:
        x = batch().requires_grad_()
        made = NOT_REPLAYED[name](x.sin())
        floats = (made.double() + x.sum()).exp()
        floats.sin().exp().sum().backward()
        return [floats.detach(), x.grad]

    plain = run()
    with block(policy) as session:
        found = run()
    assert [torch.equal(*pair) for pair in zip(plain, found, strict=True)] == [True, True]
    assert sum(session.report().evictions.values()) > 0


def test_no_op_that_pytorch_marks_is_replayed():
    """Seeded ones are, from the generator's state; these have no bits or no size to promise."""
    marks = {torch.Tag.nondeterministic_bitwise, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    ops = [getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()]
    marked = [op for op in ops if marks & set(op.tags)]
    assert len(marked) > 10
    assert [op for op in marked if facts_of(op).replayable] == []


def test_an_operator_of_the_program_s_own_that_writes_is_a_write():
    def run() -> list[Tensor]:
        x, w = batch().requires_grad_(), batch().clone()
        y = (x + w).exp().sin()  # made of w, which changes before backward
        torch.ops.delta_tests.add_one_(w)
        y.sum().backward()
        return [x.grad, w]

    plain = run()
    for policy in ("recompute", "swap", "delta"):
        with block(policy):
            found = run()
        assert [torch.equal(*pair) for pair in zip(plain, found, strict=True)] == [True, True]


def test_what_another_thread_computes_is_not_recorded():
    def run() -> Tensor:
        x, box = batch().requires_grad_(), []
        thread = threading.Thread(target=lambda: box.append(x.exp().sin()))
        thread.start()
        thread.join()
        (box[0] * x.cos()).exp().sum().backward()
        return x.grad

    plain = run()
    for policy in ("recompute", "swap", "delta"):
        with block(policy):
            assert torch.equal(run(), plain)


# -- writes that nobody tells of --------------------------------------------------------------------------------------
def in_a_thread(write: Callable[[], object]) -> None:
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


class Meanwhile(torch.autograd.Function):
    """Its backward does something on the side, before those of what was made earlier."""

    @staticmethod
    def forward(ctx, x: Tensor, then: Callable[[], object]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        ctx.then()
        return gradient, None


def written_source(write: Callable[[Tensor], object], in_backward: bool = False) -> Tensor:
    """Something is read by an op whose result is dropped; then it is written. Autograd has not saved it."""
    source, x = torch.full((ROWS, COLUMNS), 0.5), batch().requires_grad_()
    y = (x + source).exp().sin().exp()
    if in_backward:
        y = Meanwhile.apply(y, lambda: write(source))
    else:
        write(source)
    y.sum().backward()
    return x.grad


SEEN: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda source: source.mul_(3),
    "through its data": lambda source: source.data.mul_(3),
    "through a detached view": lambda source: source.detach()[2:].zero_(),
    "as an output": lambda source: torch.ones(ROWS, COLUMNS, out=source),
    "in a list": lambda source: torch._foreach_mul_([source], 3.0),
    "in inference mode": torch.inference_mode()(lambda source: source.mul_(3)),
    "another storage put in place": lambda source: source.set_(torch.zeros(ROWS, COLUMNS)),
    "other data given": lambda source: setattr(source, "data", torch.zeros(ROWS, COLUMNS)),
}


@pytest.mark.parametrize("policy", ["recompute", "swap", "delta"])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", SEEN)
def test_a_write_that_is_seen_changes_nothing(name, policy, in_backward):
    plain = written_source(SEEN[name], in_backward)
    with block(policy, "chaos:1"):
        assert torch.equal(written_source(SEEN[name], in_backward), plain)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_write_by_another_thread_is_refused(in_backward):
    with (
        block() as run,
        pytest.raises(StorageModifiedError, match=r"aten\.add would read 512 bytes that were written after forward"),
    ):
        written_source(lambda source: in_a_thread(lambda: source.mul_(3)), in_backward)
    assert run._core.engine.ledger.handles == 0


def test_what_was_written_unseen_is_not_read_by_later_recipes():
    with block() as run:
        source = torch.ones(ROWS, COLUMNS)
        before = source * 2
        in_a_thread(lambda: source.mul_(3))
        after = source * 2
        assert recipes(run, before, after) == [True, False]


def test_training_goes_on_after_a_refusal():
    plain = written_source(lambda source: None)
    with block():
        with pytest.raises(StorageModifiedError):
            written_source(lambda source: in_a_thread(lambda: source.mul_(3)))
        assert torch.equal(written_source(lambda source: None), plain)


class Reuses(torch.autograd.Function):
    """Its backward works in the memory of what it saved."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(0).add_(gradient, alpha=2)


@pytest.mark.parametrize("policy", ["recompute", "swap", "delta"])
def test_a_backward_that_writes_what_others_saved_is_an_error_as_in_plain_training(policy):
    def run() -> None:
        y = batch().requires_grad_() * 3
        (Reuses.apply(y) + Reuses.apply(y)).sum().backward()

    words = "one of the variables needed for gradient computation has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=words):
        run()
    with block(policy, "chaos:1"), pytest.raises(RuntimeError, match=words):
        run()


@pytest.mark.parametrize("policy", ["recompute", "swap", "delta"])
def test_a_backward_that_writes_what_a_recipe_reads_changes_nothing(policy):
    def run() -> Tensor:
        x = batch().requires_grad_()
        y = x * 3
        held = y.detach()
        late = x + (y.detach().exp() * x).sin()  # its pieces are dropped, made of y, and needed after y is overwritten
        late = late.exp() + Reuses.apply(y)
        del y
        late.sum().backward()
        return torch.stack([x.grad, held])

    plain = run()
    with block(policy, "chaos:1"):
        assert torch.equal(run(), plain)


# -- settings that decide the bits -------------------------------------------------------------------------------------
def small_network() -> nn.Module:
    torch.manual_seed(2)
    convolutions = nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Conv2d(16, 8, 3), nn.Tanh()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(5408, 9))


def forward_without_onednn() -> list[Tensor]:
    """Another kernel, with other bits: a replay in backward has to take the one that forward took."""
    model, x = small_network(), torch.randn(2, 8, 30, 30)
    with torch.backends.mkldnn.flags(enabled=False):
        loss = model(x).exp().sum()
    loss.backward()
    return [p.grad for p in model.parameters()]


def forward_with_two_threads() -> list[Tensor]:
    torch.manual_seed(2)
    x = torch.randn(1000, 1000, requires_grad=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        y = (x.exp().sum() * x).sin().exp()
        torch.set_num_threads(1)
        y.sum().backward()
    finally:
        torch.set_num_threads(before)
    return [x.grad]


def forward_in_double_precision() -> list[Tensor]:
    x = batch().requires_grad_()
    torch.set_default_dtype(torch.float64)
    try:
        y = (x * torch.full((ROWS, COLUMNS), 0.3)).exp().sin()
    finally:
        torch.set_default_dtype(torch.float32)
    y.sum().backward()
    return [x.grad]


def forward_without_subnormal_numbers() -> list[Tensor]:
    x = (batch() * 1e-38).requires_grad_()
    torch.set_flush_denormal(True)
    try:
        y = (x * 0.5 * 1e38).sin().exp()
    finally:
        torch.set_flush_denormal(False)
    y.sum().backward()
    return [x.grad]


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize(
    "program",
    [
        forward_without_onednn,
        forward_with_two_threads,
        forward_in_double_precision,
        forward_without_subnormal_numbers,
    ],
)
@pytest.mark.parametrize("policy", ["recompute", "swap", "delta"])
def test_a_replay_runs_under_the_settings_of_forward(program, policy):
    plain = program()
    with block(policy):
        found = program()
    assert [torch.equal(*pair) for pair in zip(plain, found, strict=True)] == [True] * len(plain)


# By what `torch.backends` calls, which other tests may have frozen (`disable_global_flags`).
precision_of, set_precision = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
EVERYWHERE, MATMUL = ("generic", "all"), ("mkldnn", "matmul")


@pytest.fixture
def precisions() -> Iterator[None]:
    yield
    for backend, op in (EVERYWHERE, MATMUL, ("mkldnn", "conv")):
        set_precision(backend, op, "none")


@pytest.mark.usefixtures("precisions")
def test_after_a_replay_each_op_follows_what_is_set_for_all_as_before():
    model, x = small_network(), torch.randn(2, 8, 30, 30)
    with block("recompute") as run:
        set_precision(*EVERYWHERE, "ieee")
        loss = model(x).exp().sum()
        set_precision(*EVERYWHERE, "bf16")
        loss.backward()
        assert run.report().recomputed_bytes and precision_of(*MATMUL) == "bf16"
        set_precision(*EVERYWHERE, "ieee")
        assert precision_of(*MATMUL) == "ieee"


@pytest.mark.usefixtures("precisions")
def test_after_a_replay_an_op_has_the_precision_that_was_set_for_it_alone():
    model, x = small_network(), torch.randn(2, 8, 30, 30)
    with block("recompute") as run:
        set_precision(*MATMUL, "bf16")
        loss = model(x).exp().sum()
        set_precision(*MATMUL, "ieee")
        loss.backward()
        assert run.report().recomputed_bytes and precision_of(*MATMUL) == "ieee"
        set_precision(*EVERYWHERE, "bf16")
        assert precision_of(*MATMUL) == "ieee"


# -- results that are not what was recorded ---------------------------------------------------------------------------
def tampered(monkeypatch: pytest.MonkeyPatch, name: str, func: Callable[..., object]) -> None:
    """Every recipe of this op runs another function."""
    recorded = Core.recorded

    def record(self: Core, op, recipe, **untimed) -> None:
        if recipe is not None and op.name == name:
            recipe = dataclasses.replace(recipe, func=func)
        recorded(self, op, recipe, **untimed)

    monkeypatch.setattr(Core, "recorded", record)


@pytest.mark.parametrize(
    "func",
    [
        lambda x: x.double().exp(),
        lambda x: x[:3].exp(),
        lambda x: x.exp().t(),
        lambda x: torch.empty(100, COLUMNS)[:ROWS],
        lambda x: None,
    ],
    ids=["dtype", "shape", "strides", "storage", "nothing"],
)
@pytest.mark.parametrize("policy", ["recompute", "delta"])
def test_another_layout_than_recorded_is_refused_and_the_op_named(monkeypatch, policy, func):
    tampered(monkeypatch, "aten.exp", func)
    x = batch().requires_grad_()
    chosen = delta.load_policy(
        policy, {"filter.min_bytes": 0, "planner.kind": "none", "director.actions": ["keep", "recompute"]}
    )
    with delta.evict(activations="0%", policy=chosen, device="cpu") as run:
        with pytest.raises(RecomputeMismatchError, match=r"replaying aten\.exp gave .*, recorded was View"):
            x.sin().exp().sin().exp().sum().backward()
        x.grad = None
        x.sin().tanh().sum().backward()  # goes on
    assert run._core.engine.ledger.handles == 0
    expected = batch().requires_grad_()
    expected.sin().tanh().sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_the_error_tells_the_rule_that_helps(monkeypatch):
    """A policy with the rule that the error names keeps what the op makes."""
    tampered(monkeypatch, "aten.exp", lambda x: x.double().exp())
    x = batch().requires_grad_()
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 0, "rules": [{"op": "aten.exp", "action": "keep"}]})
    with delta.evict(activations="0%", policy=chosen, device="cpu"):
        x.sin().exp().sin().exp().sum().backward()
    expected = batch().requires_grad_()
    expected.sin().exp().sin().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_a_convolution_is_replayed_by_the_library_that_ran_it() -> None:
    """Without oneDNN it is NNPACK that takes a large batch, where the program lets it."""

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        given, weight, found = torch.randn(16, 8, 20, 20), torch.randn(8, 8, 3, 3, requires_grad=True), []
        with torch.backends.mkldnn.flags(enabled=False):
            for _ in range(3):
                x = given * 1.0
                for _ in range(3):
                    x = torch.conv2d(x, weight, padding=1).tanh()
                loss = x.square().sum()
                del x
                with torch.backends.nnpack.flags(enabled=False):
                    found += torch.autograd.grad(loss, weight)
        return found

    plain = trained()
    policy = delta.load_policy("recompute", {"filter.min_bytes": 0})
    with delta.evict(activations="20%", policy=policy, device="cpu"):
        evicted = trained()
    assert all(map(torch.equal, plain, evicted))
