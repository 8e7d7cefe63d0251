"""Where the device has no memory for what Delta brings back: all that can go goes, and it is tried once more. Only then
the error is the user's, and nothing is lost."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from models import CASES, train
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch.utils._python_dispatch import TorchDispatchMode

import delta
from delta.runtime import cudnn, rematerialise
from delta.runtime.codecs import _Bitmap
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.recompute import replay
from delta.runtime.rematerialise import Rematerialiser

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]
STEPS = 3


def policy(name: str, **more: object):
    return delta.load_policy(name, {"filter.min_bytes": 0, **more})


class Memory:
    """Runs out for the calls whose numbers `short` says."""

    def __init__(self, does: Callable, short: Callable[[int], bool]) -> None:
        self.does, self.short, self.calls = does, short, 0

    def __call__(self, *args: object) -> object:
        self.calls += 1
        if self.short(self.calls):
            raise torch.OutOfMemoryError("no memory")
        return self.does(*args)


def for_copies_back(patch: pytest.MonkeyPatch, short: Callable[[int], bool]) -> Memory:
    memory = Memory(CpuDevice.copy_in, short)
    patch.setattr(CpuDevice, "copy_in", lambda *args: memory(*args))
    return memory


def for_replays(patch: pytest.MonkeyPatch, short: Callable[[int], bool]) -> Memory:
    memory = Memory(replay, short)
    patch.setattr(rematerialise, "replay", memory)
    return memory


@pytest.mark.parametrize("window", ["auto", 0])
def test_a_copy_back_without_memory_is_asked_for_when_the_value_is_needed(monkeypatch, window):
    plain = train(CASES["gpt"], STEPS)
    memory = for_copies_back(monkeypatch, lambda call: call % 3 == 0)
    with delta.evict(activations="40%", policy=policy("swap", **{"prefetch.window": window}), device="cpu") as run:
        evicted = train(CASES["gpt"], STEPS)
    assert plain.differences(evicted) == []
    assert memory.calls > 6
    assert run.report().oom_rescues == 0, "the second time there was memory"


def test_a_copy_back_that_twice_finds_no_memory_makes_room(monkeypatch):
    plain = train(CASES["gpt"], STEPS)
    memory = for_copies_back(monkeypatch, lambda call: call % 6 in (4, 5))
    chosen = policy("swap", **{"prefetch.window": 0})
    with delta.evict(activations="40%", policy=chosen, device="cpu") as run:
        evicted = train(CASES["gpt"], STEPS)
    assert plain.differences(evicted) == []
    assert run.report().oom_rescues == memory.calls // 6 > 0


@pytest.mark.parametrize("name", ["recompute", "dtr"])
def test_a_replay_without_memory_makes_room_and_is_run_once_more(monkeypatch, name):
    plain = train(CASES["gpt"], STEPS)
    memory = for_replays(monkeypatch, lambda call: call % 4 == 0)
    with delta.evict(activations="40%", policy=policy(name), device="cpu") as run:
        evicted = train(CASES["gpt"], STEPS)
    assert plain.differences(evicted) == []
    assert run.report().oom_rescues == memory.calls // 4 > 0


@pytest.mark.parametrize(("name", "short_of"), [("swap", for_copies_back), ("recompute", for_replays)])
def test_where_there_is_none_the_error_is_the_user_s_and_nothing_is_lost(monkeypatch, name, short_of):
    plain = train(CASES["gpt"], STEPS)
    with delta.evict(activations="40%", policy=policy(name), device="cpu") as run:
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="no memory"):
            short_of(patch, lambda call: call > 5)
            train(CASES["gpt"], STEPS)
        assert pins(run) == 0
        evicted = train(CASES["gpt"], STEPS)
    assert plain.differences(evicted) == []
    assert run._core is not None
    assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)


@pytest.mark.parametrize(("share", "recorded"), [("0%", True), ("100%", False)])
def test_only_where_somebody_makes_room_is_memory_refused(monkeypatch, share, recorded):
    """In backward nobody hears of an op that finds none, nor where steps are only watched."""
    enforced, seen = [False], []
    monkeypatch.setattr(CpuDevice, "enforce", lambda self, on: enforced.__setitem__(0, on))
    x = torch.linspace(-1, 1, 600).requires_grad_()
    x.register_hook(lambda _: seen.append(enforced[0]))
    with delta.evict(activations=share, policy=policy("recompute"), device="cpu"):
        for _ in range(3):
            loss = x.sin().exp().sin().sum()
            seen.append(enforced[0])
            loss.backward()
    assert seen == [recorded, False] * 3
    assert not enforced[0]


@pytest.mark.parametrize("before", [True, False])
def test_where_code_is_compiled_nothing_is_refused(monkeypatch, before):
    """Its kernels ask for memory below the recorder, so nobody would make room and ask again."""
    enforced = list[bool]()
    monkeypatch.setattr(CpuDevice, "enforce", lambda self, on: enforced.append(on))
    monkeypatch.setattr(convert_frame.output_codes, "seen_ids", {1} if before else set())
    x = torch.linspace(-1, 1, 600).requires_grad_()
    told = len(callback_handler.start_callbacks)
    with delta.evict(budget="90%", policy=policy("recompute"), device="cpu"):
        loss = x.sin().exp()
        assert enforced[-1] is not before
        callback_handler.run_start_callbacks(CallbackArgs(CallbackTrigger.DYNAMO, "0/0"))
        assert not enforced[-1]
        loss = loss.sin()
        assert not enforced[-1], "it may be called again at any time"
        loss.sum().backward()
    assert len(callback_handler.start_callbacks) == told


def test_where_weights_are_gathered_nothing_is_refused(monkeypatch):
    enforced = list[bool]()
    monkeypatch.setattr(CpuDevice, "enforce", lambda self, on: enforced.append(on))
    monkeypatch.setattr("delta.runtime.switch.may_be_sharded", lambda: True)
    with delta.evict(budget="90%", policy=policy("recompute"), device="cpu"):
        torch.linspace(-1, 1, 600).requires_grad_().sin().exp().sum().backward()
    assert True not in enforced


class DrawsInVain(TorchDispatchMode):
    """Ops of forward that draw find no memory for what they have drawn, every so often."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.draws, self.failures = every, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and torch._C._current_graph_task_id() == -1:
            self.draws += 1
            if self.draws % self.every == 0:
                self.failures += 1
                raise torch.OutOfMemoryError("no memory")
        return result


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("share", ["0%", "60%"])
def test_an_op_that_draws_and_finds_no_memory_draws_the_same_again(share, every):
    """While steps are recorded, noted and passed, with gradients and without."""

    def steps() -> list[torch.Tensor]:
        torch.manual_seed(3)
        found, x = list[torch.Tensor](), torch.linspace(-1, 1, 600).requires_grad_()
        for _ in range(6):
            with torch.no_grad():
                noise = torch.nn.functional.dropout(torch.ones(600))
            loss = torch.nn.functional.dropout(torch.nn.functional.dropout(x.sin()).exp() * noise).sin().sum()
            loss.backward()
            found += [loss.detach(), x.grad.clone(), torch.rand(1)]
        return found

    plain = steps()
    with DrawsInVain(every) as memory, delta.evict(activations=share, policy=policy("recompute"), device="cpu") as run:
        evicted = steps()
    assert all(map(torch.equal, plain, evicted))
    assert memory.failures > 6 and run.report().oom_rescues == memory.failures


def pins(run: delta.evict) -> int:
    assert run._core is not None
    return sum(rec.pins for rec in run._core.engine.ledger.records.values())


def test_a_replay_that_may_have_overwritten_what_it_reads_is_not_run_again(monkeypatch):
    """The sum is made in the storage of the product, which nobody else wants."""

    failed = []

    def fails_late(recipe, *args):
        made = replay(recipe, *args)
        if recipe.facts.name == "aten.add_" and not failed:
            failed.append(recipe)
            raise torch.OutOfMemoryError("no memory")
        return made

    monkeypatch.setattr(rematerialise, "replay", fails_late)
    weight = torch.randn(64, requires_grad=True)
    with delta.evict(activations="0%", policy=policy("recompute"), device="cpu"):
        loss = (weight * 2).add_(1).sin().sum()
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            loss.backward()


def test_no_memory_to_decode_to_is_the_user_s_error_and_nothing_stays_pinned(monkeypatch):
    x = torch.randn(64, 64, requires_grad=True)
    chosen = policy("delta", **{"director.actions": ["keep", "encode"]})

    def full(_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with delta.evict(activations="0%", policy=chosen, device="cpu") as run:
        loss = torch.where(x > 0, x, -x).sum()
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="no memory"):
            patch.setattr(_Bitmap, "decode", full)
            loss.backward(retain_graph=True)
        assert pins(run) == 0
        loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(x > 0, 1.0, -1.0))


def test_what_is_left_of_an_op_is_looked_at_again_after_making_room(monkeypatch):
    """A batch norm's output may be made from the statistics that its call left; to make room they may go, too."""
    looks, leaves = list[str](), Rematerialiser._left
    monkeypatch.setattr(Rematerialiser, "_left", lambda *args: looks.append(args[1].name) or leaves(*args))
    memory = for_replays(monkeypatch, lambda call: call == 2)  # the sine, the batch norm, the batch norm again
    norm, x = torch.nn.BatchNorm2d(8), torch.randn(4, 8, 16, 16, requires_grad=True)
    with delta.evict(activations="0%", policy=policy("recompute"), device="chaos:3") as run:
        norm(x.sin()).cos().sum().backward()
    assert memory.calls == 3
    assert looks == ["aten.native_batch_norm"] * 2
    assert run.report().oom_rescues == 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_convolution_whose_replay_finds_no_memory_to_work_with_is_replayed_again(monkeypatch, times):
    """cuDNN takes another algorithm then, and says nothing; the allocator counts it. It would do so again in the same
    thread, where it has that one in mind now."""
    refusals, replays, threads = [0], list[str](), list[int]()
    monkeypatch.setattr(cudnn, "_fell_back", threading.Event())

    def counted(recipe, *args):
        replays.append(recipe.facts.name)
        if recipe.facts.name == "aten.convolution":
            threads.append(threading.get_ident())
        refusals[0] += recipe.facts.name == "aten.convolution" and replays.count("aten.convolution") <= times
        return replay(recipe, *args)

    monkeypatch.setattr(rematerialise, "replay", counted)
    monkeypatch.setattr(CpuDevice, "refusals", lambda _: refusals[0])
    x, weight = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3, requires_grad=True)
    with delta.evict(activations="0%", policy=policy("recompute"), device="cpu") as run:
        loss = torch.nn.functional.conv2d(x, weight).sin().sum()
        if times == 1:
            loss.backward()
            assert replays.count("aten.convolution") == 2
        else:
            with pytest.raises(torch.OutOfMemoryError, match=r"aten.convolution found no memory for the algorithm"):
                loss.backward()
    assert run.report().oom_rescues == 1
    assert len(set(threads)) == len(threads) == 2 and threads[0] == threading.get_ident()


def test_an_error_for_want_of_memory_that_leaves_the_block_says_what_was_held():
    weight = nn.Parameter(torch.ones(1024))
    with pytest.raises(torch.OutOfMemoryError) as caught, delta.evict(activations="90%", device="cpu"):
        kept = (weight * 2).square()  # saves 4 KiB
        raise torch.OutOfMemoryError("out of memory")
    del kept
    told = "4 KiB of the device's memory were saved activations"
    assert [note.startswith(told) for note in caught.value.__notes__] == [True]


class Short(TorchDispatchMode):
    """Has no memory for the first `sin`; notes whether `ref` is dead when it is run."""

    def __init__(self, ref):
        super().__init__()
        self.ref, self.dead = ref, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sin.default:
            self.dead.append(self.ref() is None)
            if len(self.dead) == 1:
                raise torch.OutOfMemoryError("no room")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False])
def test_garbage_is_collected_before_memory_is_said_to_be_missing(grad):
    """A cycle of the program's keeps a storage alive that nobody can reach. `grad`: the op is recorded."""
    x, cycle = torch.ones(16, requires_grad=True), [torch.randn(16)]
    cycle.append(cycle)
    gc.disable()
    try:
        short = Short(weakref.ref(cycle[0]))
        del cycle
        with short, delta.evict(activations="50%", device="cpu", policy="recompute"), torch.set_grad_enabled(grad):
            x.sin()
    finally:
        gc.enable()
    assert short.dead == [False, True]
