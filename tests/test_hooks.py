"""What autograd gets in place of a saved tensor, from the user's side of the door."""

import _thread
import gc
import threading
import time
from contextlib import ExitStack, nullcontext

import pytest
import torch
from leaks import files_left
from models import CASES, train
from torch import nn
from torch.nn import functional as F

import delta
from delta.engine import Engine
from delta.replays import Replays
from delta.runtime import core, hooks
from delta.runtime.core import Core
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.worker import Worker
from delta.runtime.handle import Handle
from delta.runtime.hooks import Hooks
from delta.runtime.kept import Passed
from delta.runtime.view import View
from delta.runtime.watch import Watched

pytestmark = [pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"), pytest.mark.usefixtures("one_thread")]

POLICIES = ["delta", "swap", "recompute"]


def block(policy="delta", activations="0%", device="chaos:4", **more):
    """A block that evicts whatever it may."""
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0} | more)
    return delta.evict(activations=activations, policy=chosen, device=device)


def engine(run: delta.evict):
    return run._core.engine


def evictions(run: delta.evict) -> int:
    return sum(run.report().evictions.values())


# -- changed in place -------------------------------------------------------------------------------------------------
AUTOGRAD_S_WORDS = "one of the variables needed for gradient computation has been modified by an inplace operation"


def message_of(session, change=lambda y, x: y.add_(1)) -> str:
    x = torch.ones(4, requires_grad=True)
    with session:
        y = (x * 2).exp()
        z = y.sum()
        change(y, x)
        with pytest.raises(RuntimeError) as caught:
            z.backward()
    assert session is None or isinstance(session, nullcontext) or isinstance(caught.value, delta.StorageModifiedError)
    return str(caught.value)


@pytest.mark.parametrize("session", [*POLICIES, None], ids=lambda policy: policy or "watched only")
def test_a_saved_tensor_that_was_changed_is_refused_in_autograd_s_words(session):
    plain = message_of(nullcontext())
    found = message_of(block(session) if session else delta.evict(device="chaos:0"))
    assert plain.startswith(AUTOGRAD_S_WORDS)
    assert found.startswith(AUTOGRAD_S_WORDS)
    for words in ("[4]", "is at version 1; expected version 0 instead. Hint: "):
        assert words in plain
        assert words in found


def test_a_change_through_a_view_is_seen_too():
    assert AUTOGRAD_S_WORDS in message_of(block(), lambda y, x: y[1:].zero_())


def test_a_parameter_changed_before_backward_is_refused():
    """Parameters pass through the hooks, where autograd does not look any more."""
    w = nn.Parameter(torch.ones(4))
    x = torch.ones(4, requires_grad=True)
    with block():
        y = (x * w).sum()
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(delta.StorageModifiedError, match="version 1; expected version 0"):
            y.backward()


def test_training_goes_on_after_such_an_error():
    with block() as run:
        x = torch.ones(4, requires_grad=True)
        y = x.exp()
        z = y.sum()
        y.add_(1)
        with pytest.raises(delta.StorageModifiedError):
            z.backward()
        del y, z
        x.exp().sum().backward()
    assert torch.equal(x.grad, torch.ones(4).exp())
    assert engine(run).ledger.handles == 0


def test_a_change_that_backward_does_not_meet_is_no_error():
    x = torch.ones(4, requires_grad=True)
    with block():
        y = x.exp()
        z = (x * 3).sum()
        y.add_(1)
        z.backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))


# -- backward in all its ways -----------------------------------------------------------------------------------------
def deep(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(4):
        y = (y * x).sin().exp()
    return y.sum()


def same_as_plain(session, work) -> None:
    """`work(x)` returns tensors; those of a block must equal plain ones bit for bit."""
    results = []
    for around in (nullcontext(), session):
        x = torch.linspace(-1, 1, 60).requires_grad_()
        with around:
            results.append([*work(x), x.grad])
    for plain, found in zip(*results, strict=True):
        assert torch.equal(plain, found)
    assert evictions(session) > 0


@pytest.mark.parametrize("policy", POLICIES)
class TestBackward:
    def test_three_times_over_one_graph(self, policy):
        def work(x):
            loss = deep(x)
            gradients = []
            for again in (True, True, False):
                loss.backward(retain_graph=again)
                gradients.append(x.grad.clone())
            return gradients

        same_as_plain(block(policy), work)

    def test_twice(self, policy):
        def work(x):
            (gradient,) = torch.autograd.grad(deep(x), x, create_graph=True)
            gradient.pow(2).sum().backward()
            return [gradient.detach()]

        same_as_plain(block(policy), work)

    def test_of_a_part_of_the_graph(self, policy):
        def work(x):
            y = x.sin()
            z = y.exp()
            (first,) = torch.autograd.grad(z.sum(), y, retain_graph=True)
            (second,) = torch.autograd.grad(z.sum(), x)
            return [first, second]

        same_as_plain(block(policy), lambda x: [*work(x), *_touch(x)])

    def test_after_the_block_has_ended(self, policy):
        plain, x = (torch.linspace(-1, 1, 60).requires_grad_() for _ in range(2))
        deep(plain).backward()
        with block(policy) as run:
            loss = deep(x)
        assert threading.active_count() == 1, "nothing runs any more"
        loss.backward()
        assert torch.equal(x.grad, plain.grad)
        assert evictions(run) > 0
        assert engine(run).ledger.handles == 0

    def test_in_another_block(self, policy):
        """The graph of one session is walked while another is open."""
        plain, x = (torch.linspace(-1, 1, 60).requires_grad_() for _ in range(2))
        (deep(plain) + deep(plain)).backward()
        with block(policy) as first:
            loss = deep(x)
        with block(policy) as second:
            (deep(x) + loss).backward()
        assert torch.equal(x.grad, plain.grad)
        assert engine(first).ledger.handles == engine(second).ledger.handles == 0

    def test_in_another_thread(self, policy):
        plain, x = (torch.linspace(-1, 1, 60).requires_grad_() for _ in range(2))
        deep(plain).backward()
        with block(policy):
            thread = threading.Thread(target=deep(x).backward)
            thread.start()
            thread.join()
        assert torch.equal(x.grad, plain.grad)

    def test_of_several_forwards_at_once(self, policy):
        def work(x):
            losses = [deep(x * scale) for scale in (1.0, 0.5, 0.25)]
            torch.stack(losses).sum().backward()
            return losses

        same_as_plain(block(policy), work)

    def test_of_several_forwards_out_of_order(self, policy):
        def work(x):
            losses = [deep(x * scale) for scale in (1.0, 0.5, 0.25)]
            for number in (1, 0, 2):
                losses[number].backward()
            return losses

        same_as_plain(block(policy), work)

    def test_accumulating_gradients(self, policy):
        def work(x):
            for scale in (1.0, 0.5, 0.25):
                deep(x * scale).backward()
            return []

        session = block(policy)
        same_as_plain(session, work)
        assert session.report().steps == 3


def _touch(x):
    x.grad = torch.zeros_like(x)
    return []


# -- outside of backward ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", POLICIES)
def test_saved_tensors_can_be_looked_at(policy):
    x = torch.linspace(-1, 1, 60).requires_grad_()
    with block(policy) as run:
        y = (x * 2).exp()
        z = y.sin()
        expected = y.detach().clone()
        node = z.grad_fn
        del y
        torch.ones(1).sin()
        for _ in range(2):
            assert torch.equal(node._saved_self, expected)
        z.sum().backward()
    assert torch.equal(x.grad, expected.cos() * expected * 2)
    assert evictions(run) > 0


def test_a_forward_without_backward_leaves_nothing():
    with block() as run:
        for _ in range(3):
            loss = deep(torch.ones(60, requires_grad=True))
            assert engine(run).ledger.handles > 0
            del loss
            gc.collect()
            run.report()
            assert engine(run).ledger.handles == 0
            assert engine(run).ledger.resident_bytes == 0
            assert run._core.device.host_bytes() == 0
        with torch.no_grad():
            deep(torch.ones(60, requires_grad=True))
        assert engine(run).ledger.handles == 0
    assert run.report().steps == 3


class Knot:
    """Garbage that only a collection finds, and what it keeps alive until then."""

    def __init__(self, held):
        self.me, self.held = self, held


@pytest.fixture
def collections_within_decisions(monkeypatch):
    """As many new objects as bring about a collection are made right after answers of the engine."""

    def slowly(answer):
        def answered(*args):
            instructions = answer(*args)
            assert len([[] for _ in range(50_000)]) == 50_000
            return instructions

        return answered

    for part, name in ((Engine, "need"), (Replays, "before")):
        monkeypatch.setattr(part, name, slowly(getattr(part, name)))
    before = gc.get_threshold()
    gc.set_threshold(40_000)
    yield
    gc.enable()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collections_within_decisions")
@pytest.mark.parametrize("policy", ["swap", "recompute", "delta"])
def test_what_an_answer_of_the_engine_is_about_outlives_it(policy):
    """Forward's values are still there when backward begins, as garbage, until the first collection."""

    def gradient():
        x = made = torch.linspace(-1, 1, 60).requires_grad_()
        gc.disable()
        for _ in range(12):
            made = made.sin()
            Knot(made)
        loss = made.sum()
        gc.enable()
        loss.backward()
        return x.grad

    plain = gradient()
    with block(policy):
        assert [torch.equal(gradient(), plain) for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("collecting", [True, False])
def test_whether_garbage_is_collected_stays_the_programs_choice(collecting):
    seen = []
    try:
        if not collecting:
            gc.disable()
        with block() as run:
            y = deep(torch.ones(60, requires_grad=True))
            seen.append(gc.isenabled())
            y.register_hook(lambda _: seen.append(gc.isenabled()))
            y.sum().backward()
            with run._core, run._core:
                assert not gc.isenabled()
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [collecting] * 3


# -- the block --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "chaos:1"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind_and_a_new_block_works(when, device, spill_dir):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if when == "forward":
                raise ZeroDivisionError("of the model's own")
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("of the model's own")

    def step(run, x):
        with run:
            Fails.apply(x.sin().exp()).sin().sum().backward()

    x = torch.linspace(-1, 1, 6000).requires_grad_()
    run = block("swap", device=device, **{"host.spill_dir": str(spill_dir)})
    with pytest.raises(ZeroDivisionError, match="of the model's own"):
        step(run, x)
    gc.collect()
    assert evictions(run) > 0
    assert threading.active_count() == 1
    assert files_left(spill_dir) == []
    assert run._core.device.host_bytes() == 0
    assert engine(run).ledger.handles == 0
    assert torch._C._len_torch_dispatch_stack() == 0
    with block("swap", device=device, **{"host.spill_dir": str(spill_dir)}):
        x.sin().sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"model": "40%"}, delta.DeltaError, r"model='40%': a str is no torch.nn.Module.*activations=\"40%\""),
        ({"model": len}, delta.DeltaError, "model=<built-in function len>: .*@delta.evict"),
        ({"timeline": True}, delta.TimelineError, "timeline=True: give the path of a file"),
        ({"trace": 3}, delta.TraceError, "trace=3: give the path of a file, or a delta.trace.Recording"),
    ],
)
def test_what_is_of_another_type_is_refused_by_its_name(given, error, told):
    with pytest.raises(error, match=told):
        delta.evict(**given)


def test_a_nested_block_is_refused_and_the_outer_one_goes_on():
    x = torch.ones(60, requires_grad=True)
    with block() as run:
        loss = deep(x)
        with pytest.raises(delta.NestedSessionError, match="one at a time"), block():
            pytest.fail("entered")
        loss.backward()
    assert x.grad is not None
    assert evictions(run) > 0
    with block():
        deep(x).backward()


def test_a_block_is_refused_inside_itself():
    run = block()
    with run, pytest.raises(delta.NestedSessionError), run:
        pytest.fail("entered")


def test_a_block_is_left_once():
    run = block()
    for _ in range(2):
        with pytest.raises(delta.DeltaError, match=r"this block .* is not open"):
            run.__exit__(None, None, None)
        with run:
            pass


def test_one_object_may_be_entered_again():
    run = block()
    for _ in range(2):
        x = torch.ones(60, requires_grad=True)
        with run:
            deep(x).backward()
        assert evictions(run) > 0


def test_as_a_decorator():
    plain, x = (torch.linspace(-1, 1, 60).requires_grad_() for _ in range(2))
    run = block()

    @run
    def step(x):
        loss = deep(x)
        loss.backward()
        return loss.detach()

    deep(plain).backward()
    for _ in range(2):
        x.grad = None
        assert torch.equal(step(x), deep(plain).detach())
        assert torch.equal(x.grad, plain.grad)
    assert step.__name__ == "step"
    assert evictions(run) > 0


async def coroutine():
    pass


def generator():
    yield


async def asynchronous_generator():
    yield


@pytest.mark.parametrize("function", [coroutine, generator, asynchronous_generator])
def test_what_runs_after_its_call_has_returned_takes_no_decorator(function):
    with pytest.raises(delta.DeltaError, match=f"{function.__name__} is a generator or a coroutine.* inside of it"):
        block()(function)


def test_a_model_that_is_nowhere_yet():
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(delta.DeltaError, match=r"the model is on meta.* say where it will be, device="):
        delta.evict(model)
    with delta.evict(model, device="cpu"):
        model.to_empty(device="cpu")(torch.ones(1, 2)).sum().backward()


def test_without_a_budget_nothing_is_evicted_and_the_peak_is_known():
    x = torch.ones(100, requires_grad=True)
    with delta.evict(device="chaos:0") as run:
        x.sin().exp().sum().backward()
    # sin saves x, exp its result: two storages of 400 bytes
    assert run.report().peak_activation_bytes == run.report().unevicted_peak_activation_bytes == 800
    assert evictions(run) == 0


@pytest.mark.parametrize("limit", [{}, {"activations": "0%"}], ids=["watched", "recorded"])
def test_a_thread_of_autograd_s_may_save_with_no_caller_in_python(limit):
    """In a backward that is differentiated, on CUDA."""
    saved = []
    with delta.evict(device="cpu", **limit):
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(True)
        _thread.start_new_thread(saved.extend, (map(pack, [torch.ones(8)]),))
        deadline = time.monotonic() + 10
        while not saved and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(saved) == 1
        saved.clear()


# -- what is nobody's business ----------------------------------------------------------------------------------------
BATCH = 5
# x: 5 * 8 * 4 bytes; result of relu, which the second layer saves as well: 5 * 16 * 4 bytes
SAVED_BYTES = 160 + 320


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("activations", [None, 10**9, "100%", "50%"])
@pytest.mark.parametrize("given", [True, False])
def test_parameters_are_never_counted(activations, given):
    """Linear saves weight.t(), a plain tensor on the parameter's storage (832 bytes here)."""
    model = mlp()
    policy = delta.load_policy("delta", {"filter.min_bytes": 0})
    with delta.evict(model if given else None, activations=activations, policy=policy, device="chaos:0") as run:
        for _ in range(3):
            model(torch.randn(BATCH, 8)).sum().backward()
    assert run.report().unevicted_peak_activation_bytes == SAVED_BYTES


@pytest.mark.parametrize("activations", [None, 10**9])
def test_a_model_made_inside_the_block_is_recognised_as_well(activations):
    with delta.evict(activations=activations, device="chaos:0") as run:
        models = [mlp()]
        models[0](torch.randn(BATCH, 8)).sum().backward()
        models.append(mlp())
        models[1](torch.randn(BATCH, 8)).sum().backward()
    assert run.report().unevicted_peak_activation_bytes == SAVED_BYTES


def test_buffers_are_never_counted():
    """Batch norm in evaluation saves its running statistics."""
    norm = nn.BatchNorm1d(8).eval()
    with delta.evict(activations=10**9, device="chaos:0") as run:
        norm(torch.randn(BATCH, 8, requires_grad=True)).sum().backward()
    assert run.report().unevicted_peak_activation_bytes == BATCH * 8 * 4


@pytest.mark.parametrize("given", [True, False])
def test_buffers_of_a_model_made_inside_the_block_are_recognised_as_well(given):
    """After the search; and moving a module gives it other buffers than those it has registered."""
    first = nn.BatchNorm1d(8).eval()
    with delta.evict(first if given else None, activations=10**9, device="chaos:0") as run:
        first(torch.randn(BATCH, 8, requires_grad=True)).sum().backward()
        second = nn.BatchNorm1d(8).to(torch.float64).eval()
        second(torch.randn(BATCH, 8, requires_grad=True, dtype=torch.float64)).sum().backward()
    assert run.report().unevicted_peak_activation_bytes == BATCH * 8 * 8
    assert not torch.nn.modules.module._global_buffer_registration_hooks


def test_tied_weights_and_views_of_parameters_are_parameters():
    table = nn.Embedding(10, 8)
    with delta.evict(activations=10**9, device="chaos:0") as run:
        hidden = table(torch.arange(5))
        F.linear(hidden, table.weight[2:9]).sum().backward()
    # the embedding saves its 5 indices (40 bytes), the projection the hidden state (160 bytes)
    assert run.report().unevicted_peak_activation_bytes == 40 + 160


@pytest.fixture
def pack():
    with block() as run:
        yield Hooks(run._core).pack


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.ones(4)),
        lambda: torch.empty(0, 4),
        lambda: torch.tensor(True),
        lambda: torch.ones(4, device="meta"),
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.ones(4).as_subclass(type("Mine", (torch.Tensor,), {})),
    ],
    ids=["parameter", "empty", "flag", "other device", "sparse", "subclass"],
)
def test_what_is_left_alone(pack, make):
    tensor = make()
    packed = pack(tensor)
    assert type(packed) is Passed
    assert packed.tensor is tensor


def test_tensors_of_inference_mode_are_left_alone(pack):
    with torch.inference_mode():
        tensor = torch.ones(4)
    packed = pack(tensor)
    assert type(packed) is Passed
    assert packed.version == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_is_looked_after_comes_back_as_it_was(dtype):
    with block() as run:
        hooks = Hooks(run._core)
        whole = torch.ones(6, 8).to(dtype)
        view = whole.t()[1::2]
        packed = hooks.pack(view)
        assert type(packed) is Handle
        found = hooks.unpack(packed)
        assert (found.dtype, found.size(), found.stride()) == (view.dtype, view.size(), view.stride())
        assert found.storage_offset() == view.storage_offset()
        assert torch.equal(found, view)
        del packed


def test_a_handle_keeps_no_bytes():
    with block("recompute") as run:
        hooks = Hooks(run._core)
        packed = hooks.pack(torch.ones(100) * 2)
        torch.ones(1).sin()
        assert packed.counter.untyped_storage().nbytes() == 0
        assert engine(run).ledger.resident_bytes == 0
        del packed


# -- idle steps -------------------------------------------------------------------------------------------------------
def test_a_step_that_fitted_is_only_watched():
    with block(activations=10**9) as run:
        for _ in range(3):
            deep(torch.ones(60, requires_grad=True)).backward()
        hooks = Hooks(run._core)
        packed = hooks.pack(torch.ones(3))
        assert type(packed) is Watched
        del packed
    assert run.report().modes["idle"] >= 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_larger_batch_than_any_before_is_taken_over_in_the_middle(policy):
    """Small steps fit and are only watched; a ten times larger one does not, from some tensor on."""
    plain, x = (torch.linspace(-1, 1, 6000).requires_grad_() for _ in range(2))
    deep(plain).backward()
    small = torch.ones(600, requires_grad=True)
    with block(policy, activations=12 * 600 * 4 + 24_000 * 4) as run:
        for _ in range(2):
            deep(small).backward()
        deep(x).backward()
        assert evictions(run) > 0
        deep(small).backward()
    assert torch.equal(x.grad, plain.grad)
    if policy != "recompute":  # what was only watched has no recipe
        assert run.report().peak_activation_bytes < run.report().unevicted_peak_activation_bytes


def test_a_watched_backward_after_the_block_has_ended():
    plain, x = (torch.linspace(-1, 1, 60).requires_grad_() for _ in range(2))
    deep(plain).backward()
    with block(activations=10**9) as run:
        deep(torch.ones(60, requires_grad=True)).backward()
        loss = deep(x)
    loss.backward()
    assert torch.equal(x.grad, plain.grad)
    assert run.report().steps == 2


def test_training_in_every_mode_leaves_no_handle():
    with block("delta", activations="50%", device="cpu") as run:
        train(CASES["gpt"], 4)
        assert engine(run).ledger.handles == 0
        assert engine(run).ledger.resident_bytes == 0
        engine(run).ledger.validate()
    assert run._core.device.host_bytes() == 0


# -- on another device ------------------------------------------------------------------------------------------------
@pytest.fixture
def another_device(monkeypatch):
    """As on a machine with a card, while the program trains on its CPU."""
    monkeypatch.setattr(CpuDevice, "torch_device", torch.device("meta"))


@pytest.mark.usefixtures("another_device")
def test_a_training_on_another_device_than_the_one_looked_after_is_told_of_once():
    x = torch.ones(4, requires_grad=True)
    with (
        pytest.warns(RuntimeWarning, match='on cpu, and none on meta.*give device="cpu"') as told,
        block("recompute", device="cpu") as run,
    ):
        for _ in range(3):
            x.sin().sum().backward()
    assert len(told) == len(run.report().warnings) == 1


@pytest.mark.usefixtures("another_device")
def test_an_error_before_backward_says_so_too():
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError) as caught, block(device="cpu"):
        y = x.sin()
        raise torch.OutOfMemoryError("no room")
    assert ["on cpu, and none on meta" in note for note in caught.value.__notes__] == [True]
    del y


@pytest.mark.cuda
def test_what_is_elsewhere_beside_is_nobody_s_mistake():
    x, there = torch.ones(4, requires_grad=True, device="cuda"), torch.ones(4, requires_grad=True)
    with block(activations="100%", device="cuda") as run:
        for _ in range(2):
            other = there.sin()
            x.exp().sum().backward()
            other.sum().backward()
    assert run.report().warnings == ()
    with pytest.raises(ValueError, match="of the program's") as caught, block(device="cuda"):
        one, other = x.exp(), there.sin()
        raise ValueError("of the program's")
    assert not hasattr(caught.value, "__notes__")
    del one, other


# -- Python's lock ----------------------------------------------------------------------------------------------------
def test_no_alias_is_made_after_a_copy_has_been_asked_for(monkeypatch):
    """Its thread waits for Python's lock from then on, and would have it while the program waits."""
    calls: list[list[str]] = []

    def noting(owner, name, what):
        plain = getattr(owner, name)

        def noted(*args):
            calls[-1].append(what)
            return plain(*args)

        monkeypatch.setattr(owner, name, noted)

    def hook(name):
        plain = getattr(Hooks, name)

        def hooked(*args):
            calls.append([name])
            return plain(*args)

        monkeypatch.setattr(Hooks, name, hooked)

    for owner, name, what in (
        (hooks, "counter_of", "alias"),
        (core, "over", "alias"),
        (View, "over", "alias"),
        (Core, "go_on", "served"),
        (Worker, "submit", "copy"),
    ):
        noting(owner, name, what)
    hook("pack")
    hook("unpack")
    net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    with block("swap", "40%", "cpu"):
        for _ in range(4):
            calls.append([])
            net(torch.randn(32, 64)).sum().backward()
    saved = [what for name, *what in filter(None, calls) if name == "pack"]
    needed = [what for name, *what in filter(None, calls) if name == "unpack"]
    assert any(what[-2:] == ["alias", "copy"] for what in saved)
    assert not any("alias" in what[what.index("copy") :] for what in saved if "copy" in what)
    assert any("copy" in what[what.index("served") :] for what in needed if "served" in what)  # fetched beforehand
    assert not any("alias" in what[what.index("served") :] for what in needed if "served" in what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_view_knows_what_is_lazily_conjugated_and_negated(dtype):
    x = torch.randn(3, dtype=dtype)
    looks = [x, torch._neg_view(x), x[1:], torch._neg_view(x)[1:]]
    if dtype.is_complex:
        looks += [x.conj(), torch._neg_view(x.conj()), x.conj().imag, x.imag]
    for look in looks * 2:
        view = View.of(look)
        assert (view.conj, view.neg) == (look.is_conj(), look.is_neg())
        assert torch.equal(view.over(x.untyped_storage()), look)


# -- left in another thread -------------------------------------------------------------------------------------------
def in_another_thread(does) -> None:
    thread = threading.Thread(target=does)
    thread.start()
    thread.join()


@pytest.mark.parametrize("activations", ["0%", None])
def test_a_block_left_in_another_thread_says_so_and_does_nothing_more(activations):
    """As by a generator that is closed elsewhere. The thread that entered it keeps hooks and recorder, which pass."""
    x = torch.linspace(-1, 1, 64).requires_grad_()

    def gradient():
        y = (x * 2).exp().sin()
        return lambda: torch.autograd.grad(y.sum(), x)[0]

    expected, told = gradient()(), []

    def enters_and_stays():
        run = block(activations=activations, device="cpu")
        run.__enter__()
        before = gradient()

        def leaves():
            with pytest.raises(delta.DeltaError, match="in the thread that entered it") as caught:
                run.__exit__(None, None, None)
            told.append(str(caught.value))

        in_another_thread(leaves)
        saved = run._core.engine.ledger.handles + run._core.watch.count
        known = set(run._core.slots)
        after = gradient()
        assert set(run._core.slots) <= known
        assert run._core.engine.ledger.handles + run._core.watch.count == saved > 0
        assert torch.equal(after(), expected) and torch.equal(before(), expected)
        del before, after
        assert run._core.engine.ledger.handles == 0 and not run._core.slots
        with block(activations=activations, device="cpu") as again:  # the claim is given up
            assert torch.equal(gradient()(), expected)
        assert again.report().steps == 1
        told.append("all is well")

    in_another_thread(enters_and_stays)
    assert len(told) == 2
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_exception_that_leaves_a_block_in_another_thread_stays_what_it_is():
    told = []

    def enters_and_stays():
        run = block(activations="50%", device="cpu")
        run.__enter__()

        def leaves():
            with pytest.raises(ValueError, match="of the model") as caught, ExitStack() as stack:
                stack.push(run.__exit__)
                raise ValueError("of the model")
            told.extend(caught.value.__notes__)

        in_another_thread(leaves)

    in_another_thread(enters_and_stays)
    assert ["in the thread that entered it" in note for note in told] == [True]
