"""Idle mode: steps that fit are only watched, and a batch larger than any before is still held."""

import threading
import weakref
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import nn

import delta
from delta.runtime.core import Core
from delta.runtime.hooks import Hooks
from delta.units import Bytes

WIDTH, LAYERS = 64, 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])


def step(net: nn.Module, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    net.zero_grad()
    net(torch.randn(rows, WIDTH, generator=generator)).pow(2).sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def saved_bytes(rows: int) -> int:
    net = model()
    with delta.evict(device="cpu") as run:
        step(net, rows)
    return run.report().peak_activation_bytes


def policy(spill_dir):
    return delta.load_policy("delta", {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir)})


def test_without_a_budget_every_step_is_idle_and_counted():
    net = model()
    with delta.evict(device="cpu") as run:
        for _ in range(3):
            step(net, 32)
    report = run.report()
    rows_bytes = 32 * WIDTH * 4
    # The input, and each layer's two results but the last one, whose square's input it is, are saved once each.
    assert report.peak_activation_bytes == rows_bytes * (1 + 2 * LAYERS)
    assert report.modes == {"idle": 3}
    assert report.evictions == {} and report.swapped_out_bytes == 0


def test_a_larger_batch_than_any_before_is_held(spill_dir):
    limit = int(saved_bytes(32) * 1.5)
    plain = [step(model(), rows) for rows in (32, 32, 128, 32, 128, 128)]
    net = model()
    evicted, peaks = [], []
    with delta.evict(activations=limit, policy=policy(spill_dir), device="cpu") as run:
        for rows in (32, 32, 128, 32, 128, 128):
            evicted.append(step(net, rows))
            peaks.append(run.report().peak_activation_bytes)
    for mine, its in zip(plain, evicted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, its, strict=True))
    modes = run.report().modes
    assert modes["idle"] >= 1 and modes["planned"] >= 1
    assert peaks[1] <= limit
    # The first large batch meets hooks that only watch: it may pass the limit by what one op saves at a time.
    assert peaks[-1] <= limit + 2 * 128 * WIDTH * 4


class Norms(nn.Module):
    """Kernels that ask for memory by the dispatcher, and fill it by themselves; their results are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.InstanceNorm2d(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.relu_(norm(layer(x)))
        return x


def norms_trained(between: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, found = Norms(), []
    for rows in (1, 1, 8, 8):
        net.zero_grad()
        net(torch.randn(rows, 4, 6, 6)).square().mean().backward()
        found += [p.grad.clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]
        between()
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("after", range(1, 22))
def test_what_a_kernel_calls_is_not_recorded_where_the_recorder_comes_in_the_middle_of_an_op(after, monkeypatch):
    """By a hook of what the op has saved of its arguments, since that is too much, be it the first of a step or the
    last."""
    plain = norms_trained()
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 0})

    def too_much(core: Core, tensor: torch.Tensor) -> bool:
        return core.watch.count == after and core.engine.totals.steps == 2

    monkeypatch.setattr(Core, "watched_too_much", too_much)
    with delta.evict(activations="1MiB", policy=chosen, device="cpu") as run:

        def between() -> None:
            if run._core.engine.totals.steps == 2:
                run._core.engine.budget.activations = Bytes(1)

        evicted = norms_trained(between)
    assert all(map(torch.equal, evicted, plain))
    assert run.report().modes == {"observe": 3, "idle": 1}


@pytest.mark.parametrize("limit", ["activations", "budget"])
def test_a_batch_that_will_not_fit_is_recorded_from_its_first_save(limit, measured):
    """What is only recomputed has to be, to go at all: the limit holds in the first such step, and nobody is warned."""
    rows, nbytes = (32, 32, 32, 96, 32, 96, 96), int(saved_bytes(32) * 1.5)
    plain, net = [step(model(), n) for n in rows], model()
    chosen = delta.load_policy("recompute", {"filter.min_bytes": 0, "budget.reserve": 0})
    limits = {"activations": Bytes(nbytes)} if limit == "activations" else {"budget": Bytes(measured + 2 * nbytes)}
    found, evictions = [], []
    with delta.evict(policy=chosen, device="cpu", **limits) as run:
        for n in rows:
            found.append(step(net, n))
            evictions.append(sum(run.report().evictions.values()))
    assert all(
        torch.equal(mine, theirs) for a, b in zip(found, plain, strict=True) for mine, theirs in zip(a, b, strict=True)
    )
    assert evictions[2] == 0 < evictions[3] == evictions[4] < evictions[6]
    assert run.report().modes["idle"] >= 3
    if limit == "activations":
        assert run.report().peak_activation_bytes <= nbytes


def test_it_is_asked_at_the_first_the_second_the_fourth_storage_of_a_step(monkeypatch):
    """What is left over from the step before is none of its own."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        Core, "watched_too_much", lambda core, _: asked.append((core.watch.storages, core.watch.step_bytes))
    )
    x = torch.ones(4, requires_grad=True)
    with delta.evict(device="cpu") as run:
        left = []
        for _ in range(4):
            left.append((x * 2).exp())
            (x * 3).exp().sum().backward()
        asked.clear()
        made = [(x * k).exp() for k in range(9)]
        assert asked == [(1, 16), (2, 32), (4, 64), (8, 128)]
        del made
    assert run.report().peak_activation_bytes == (len(left) + 9) * 16


def test_a_watched_tensor_changed_in_place_is_told():
    with delta.evict(device="cpu"):
        x = torch.randn(4, requires_grad=True)
        y = x.exp()
        loss = y.sin().sum()
        y.add_(1)
        with pytest.raises(delta.StorageModifiedError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("size", [4, 0])
def test_an_output_that_is_saved_and_dropped_dies(size):
    """Tanh saves its result, whose graph has tanh in it. Nothing is saved of an empty one: it is passed through."""
    with delta.evict(device="cpu") as run:
        y = torch.randn(size, requires_grad=True).tanh()
        dies = weakref.ref(y.untyped_storage())
        del y
        assert dies() is None
        assert run._core.watch.resident_bytes == 0


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_a_hand_over_that_fails_midway_leaves_the_count_right(spill_dir, monkeypatch):
    """As by Ctrl-C. Training goes on with the next step, and what had been saved can still be used."""
    limit, calls = int(saved_bytes(32) * 1.5), []
    plain = [step(model(), rows) for rows in (32, 32, 128)]
    net = model()
    with delta.evict(activations=limit, policy=policy(spill_dir), device="cpu") as run:
        for _ in range(2):
            step(net, 32)
        real = Hooks._handle

        def fails_at_the_third(*given):
            calls.append(given)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return real(*given)

        x = torch.linspace(-1, 1, 32).requires_grad_()
        before = x.exp().sin()
        monkeypatch.setattr(Hooks, "_handle", fails_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            step(net, 128)
        watch = run._core.watch
        assert (watch.count, watch.resident_bytes, watch._users) == (0, 0, {})
        (grad,) = torch.autograd.grad(before.sum(), x)
        evicted = [step(net, rows) for rows in (32, 32, 128)]
    assert torch.equal(grad, x.exp().cos() * x.exp())
    for mine, its in zip(plain, evicted, strict=True):
        assert all(map(torch.equal, mine, its))


def test_what_is_resident_is_what_live_saved_tensors_take() -> None:
    """Sin saves what it is given. Those that die in forward are counted out late, and in time for the next peak."""
    random, saved = Random(0), list[tuple[int, torch.Tensor]]()
    given = [torch.randn(random.randint(2, 100), requires_grad=True) for _ in range(30)]
    peak_bytes = 0
    with delta.evict(device="cpu") as run:
        assert run._core is not None
        watch, dead_at_once = run._core.watch, 0
        for _ in range(300):
            if saved and random.random() < 0.4:
                for _ in range(random.randint(1, 3)):
                    if len(saved) > 1:
                        saved.pop(random.randrange(len(saved)))
                dead_at_once = max(dead_at_once, len(watch._dead))
            else:
                which = random.randrange(30)
                saved.append((which, given[which].sin()))
            bytes_now = sum(given[which].untyped_storage().nbytes() for which in {which for which, _ in saved})
            peak_bytes = max(peak_bytes, bytes_now)
            if random.random() < 0.3:
                assert watch.resident_bytes == bytes_now
        assert dead_at_once > 3 and run._core.engine.totals.steps == 0
        assert watch.peak_bytes == peak_bytes
        saved.clear()
        assert (watch.count, watch.resident_bytes, watch._users, watch._dead) == (0, 0, {}, [])
        assert run._core.engine.totals.steps == 1
    assert run.report().peak_activation_bytes == peak_bytes


def test_saved_tensors_that_die_in_other_threads_are_counted_out() -> None:
    x = torch.randn(16, requires_grad=True)
    with delta.evict(device="cpu") as run:
        assert run._core is not None
        watch, steps = run._core.watch, 20
        for step_ in range(steps):
            shares = [[x.sin() for _ in range(50)] for _ in range(4)]
            more: list[torch.Tensor] = []
            threads = [threading.Thread(target=share.clear) for share in shares]
            for thread in threads:
                thread.start()
                more.append(x.sin())
            for thread in threads:
                thread.join()
            assert run._core.engine.totals.steps == step_
            more.clear()
            assert (watch.count, watch.resident_bytes, watch._users) == (0, 0, {})
            assert run._core.engine.totals.steps == step_ + 1


def test_what_is_left_over_of_another_step_is_none_of_this_one() -> None:
    x = torch.randn(16, requires_grad=True)
    with delta.evict(device="cpu") as run:
        assert run._core is not None
        watch, totals = run._core.watch, run._core.engine.totals
        left_over = [x.exp() for _ in range(3)]
        for _ in range(3):  # from the third one on it is known that a step is one forward and one backward
            x.sin().sum().backward()
        saved = [x.sin() for _ in range(3)]
        steps = totals.steps
        assert watch.count == 3 and steps > 0
        left_over.clear()
        saved.pop()
        assert watch.resident_bytes == 64 and (watch.count, totals.steps) == (2, steps)
        saved.clear()
        assert (watch.count, watch._users, totals.steps) == (0, {}, steps + 1)


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_what_is_left_over_of_a_step_that_was_looked_after_takes_room(spill_dir) -> None:
    large, small = torch.randn(1000, requires_grad=True), torch.randn(10, requires_grad=True)
    with delta.evict(activations=6000, policy=policy(spill_dir), device="cpu") as run:
        assert run._core is not None
        left_over = (large * 2).sin()
        for _ in range(4):
            small.sin().sum().backward()
        saved = small.sin()
        assert run._core.watch.count == 1 and run._core.engine.ledger.handles == 1
        more = (large * 3).sin()
        assert run._core.watch.count == 0, "both together are too much, so all are looked after"
        (left_over.sum() + more.sum() + saved.sum()).backward()


def test_the_end_of_a_watched_step_waits_for_nobody() -> None:
    """It may come in a collection of garbage, in a thread that somebody in the core waits for."""
    net = model()
    with delta.evict(device="cpu") as run:
        core = run._core
        assert core is not None
        step(net, 8)
        saved = [net(torch.ones(8, WIDTH)).sum()]
        with core:
            collector = threading.Thread(target=saved.clear)
            collector.start()
            collector.join(10)
            waits = collector.is_alive()
        collector.join()
        assert not waits
        assert run.report().modes == {"idle": 2}
