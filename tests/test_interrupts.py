"""Signals at any moment of a training: what Ctrl-C stops is run again, and what a handler computes is right."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import delta
from delta.runtime import interrupts
from delta.runtime.interrupts import Waiting

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")]

Handler = Callable[[int, FrameType | None], None]
PLACES = 20
HERE = os.path.dirname(delta.__file__)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*blocks)


@pytest.fixture
def handled() -> Iterator[Callable[[Handler], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler) and None
    signal.signal(signal.SIGUSR1, before)


def step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def signalled(run: Callable[[], object], at: int) -> int:
    """Run it, with a signal as Delta makes or has made its call of that number. How many there were."""
    calls = 0

    def hear(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(HERE):
            calls += 1
            if calls == at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

    # What hears of calls is none of the program's code that Delta calls: it has no place on the stack.
    sys.setprofile(FunctionType(hear.__code__, globals() | {"__name__": "sys"}, closure=hear.__closure__))
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def places(model: nn.Module) -> Iterator[int]:
    """From the first call of a step to its last one, as the step before had them."""
    for number in range(PLACES):
        yield 1 + number * signalled(lambda: step(model), 0) // PLACES


@pytest.mark.parametrize("policy", ["delta", "recompute", "swap"])
def test_what_is_stopped_anywhere_is_run_again(
    policy: str, model: nn.Module, handled: Callable[[Handler], None]
) -> None:
    stops: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        raise KeyboardInterrupt

    handled(stop)
    plain = step(model)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations="40%", policy=chosen, device="cpu") as run:
        for at in places(model):
            with suppress(KeyboardInterrupt):  # the next step may have fewer calls
                signalled(lambda: step(model), at)
            assert all(map(torch.equal, plain, step(model)))
    assert len(stops) > PLACES // 2
    model.zero_grad()
    assert run._core is not None
    assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)
    assert signal.getsignal(signal.SIGUSR1) is stop


def test_a_handler_may_compute_a_gradient(model: nn.Module, handled: Callable[[Handler], None]) -> None:
    other, given = nn.Linear(16, 16), torch.ones(4, 16)
    found: list[Tensor] = []

    def compute(*_: object) -> None:
        found.append(torch.autograd.grad(other(given).square().sum(), other.weight)[0])

    compute()
    handled(compute)
    plain = step(model)
    with delta.evict(activations="40%", policy=delta.load_policy("delta", {"filter.min_bytes": 0}), device="cpu"):
        for at in places(model):
            signalled(lambda: step(model), at)
            assert all(map(torch.equal, plain, step(model)))
    assert len(found) > PLACES // 2
    assert all(torch.equal(found[0], other) for other in found)


def test_a_handler_that_has_come_meanwhile_stays(handled: Callable[[Handler], None]) -> None:
    with delta.evict(device="cpu"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_what_the_program_does_in_backward_is_stopped_at_once(handled: Callable[[Handler], None]) -> None:
    """Its hook may wait for something that never comes."""
    reached: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        reached.append("handler")
        raise KeyboardInterrupt

    def hook(gradient: Tensor) -> None:
        reached.append("hook")
        signal.raise_signal(signal.SIGUSR1)
        reached.append("not reached")

    handled(stop)
    weight = torch.ones(4, requires_grad=True)
    with delta.evict(device="cpu"):
        middle = weight * 2
        middle.register_hook(hook)
        with pytest.raises(KeyboardInterrupt):
            (middle * middle).sum().backward()
    assert reached == ["hook", "handler"]


def under(name: str, body: str) -> Callable[..., Any]:
    """A function `called` of that body, in a module of that name."""
    there: dict[str, Any] = {"__name__": name, "contextmanager": contextmanager}
    exec(f"def called(inner):\n    {body}", there)
    return there["called"]  # type: ignore[no-any-return]


DELTA = "delta.runtime.core"


def test_all_that_wait_are_told_though_one_raises() -> None:
    heard: list[int] = []

    def first(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    waiting = Waiting({1: first, 2: lambda number, _: heard.append(number)})

    def come() -> None:
        waiting.came(1, sys._getframe(1))
        waiting.came(2, sys._getframe(1))
        assert heard == []

    with pytest.raises(KeyboardInterrupt):
        under(DELTA, "inner()")(come)
        _ = "goes on"
    assert heard == [1, 2]
    assert sys.gettrace() is None


def test_a_library_that_delta_has_called_is_delta_s_work() -> None:
    """Delta enters a context manager of its own by way of the standard library."""
    heard: list[str] = []
    waiting = Waiting({1: lambda *_: heard.append("handler")})

    def come() -> None:
        waiting.came(1, sys._getframe(1))

    def check() -> None:
        heard.append("in Delta still")

    within = under("contextlib", "inner[0](inner[1]); _ = 'goes on'")
    under(DELTA, "inner[0](inner[1:]); inner[-1]()")((within, under(DELTA, "inner()"), come, check))
    assert heard == ["in Delta still", "handler"]


@pytest.mark.parametrize(("waited_s", "heard"), [(0.9, 0), (1.1, 1)])
def test_a_ctrl_c_that_is_repeated_later_does_not_wait(
    waited_s: float, heard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    waiting = Waiting({signal.SIGINT: lambda number, _: calls.append(number)})

    def come() -> None:
        for at_s in (0.0, waited_s):
            monkeypatch.setattr(interrupts.time, "monotonic_ns", lambda at_s=at_s: int(at_s * 1e9))
            waiting.came(signal.SIGINT, sys._getframe(1))
        assert len(calls) == heard

    under(DELTA, "inner()")(come)
    _ = "goes on"
    assert len(calls) == 1


@pytest.mark.parametrize("raises", [True, False])
def test_what_comes_while_a_handler_has_delta_at_work_is_told_after_it(raises: bool) -> None:
    """Nothing is traced beneath a trace function, which is what called the handler."""
    heard: list[str] = []

    def work() -> None:
        waiting.came(2, sys._getframe(1))

    def first(number: int, frame: FrameType | None) -> None:
        under(DELTA, "inner()")(work)
        heard.append("first")
        if raises:
            raise KeyboardInterrupt

    waiting = Waiting({1: first, 2: lambda *_: heard.append("second")})
    with pytest.raises(KeyboardInterrupt) if raises else nullcontext():
        under(DELTA, "inner()")(lambda: waiting.came(1, sys._getframe(1)))
        _ = "goes on"
    assert heard == ["first", "second"]
    assert sys.gettrace() is None
    under(DELTA, "inner()")(work)
    _ = "goes on"
    assert heard == ["first", "second", "second"]


def test_a_stack_that_was_stopped_entering_a_block_leaves_it(
    handled: Callable[[Handler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handled(stop)
    settle = under("delta.runtime.settle", "inner[0].raise_signal(inner[0].SIGUSR1)")
    run = delta.evict(device="cpu")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), ExitStack() as stack:
        patch.setattr("delta.runtime.session.settle_kernels", partial(settle, (signal,)))  # no frame of its own
        stack.enter_context(run)
    assert signal.getsignal(signal.SIGUSR1) is stop
    with run:
        pass


def test_a_block_left_in_another_thread_says_so(handled: Callable[[Handler], None]) -> None:
    heard: list[int] = []
    errors: list[Exception] = []
    handled(lambda number, _: heard.append(number))
    run = delta.evict(device="cpu")
    run.__enter__()

    def leave() -> None:
        try:
            run.__exit__(None, None, None)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [delta.DeltaError]
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
