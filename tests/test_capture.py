"""CUDA graphs captured within a block, with a made-up graph: there is no card here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import delta
from delta.runtime.core import Core
from delta.runtime.op_times import OpTimes
from delta.runtime.swap import Swap

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that take down nothing."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda graph, fail=False: 1 / 0 if fail else None)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda graph: None)


def known(run: delta.evict | None) -> tuple[int, int]:
    """Storages and saved tensors that Delta knows of."""
    core = run._core if run is not None else None
    return (0, 0) if core is None else (len(core.slots), core.engine.learner.packs)


def trained(model: nn.Module, graph: object, run: delta.evict | None = None) -> list[Tensor]:
    """Steps with a forward and backward of another net in the middle, which is captured."""
    captured = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    found = []
    for number in range(7):
        torch.manual_seed(number)
        half = model[:3](torch.randn(64, 32))
        begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
        begin(graph)  # type: ignore[arg-type]
        before = known(run)
        inner = captured(torch.randn(4, 8))
        assert known(run) == before
        inner.sum().backward()
        end(graph)  # type: ignore[arg-type]
        model[3:](half).square().mean().backward()
        found += [parameter.grad.clone() for parameter in (*model.parameters(), *captured.parameters())]
        model.zero_grad()
    return found


@pytest.mark.parametrize("policy", ["delta", "recompute", "swap"])
def test_what_is_captured_passes_and_the_rest_goes_on(policy: str) -> None:
    torch.manual_seed(0)
    model, graph = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.Tanh()))), object()
    torch.manual_seed(0)
    plain = trained(model, graph)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    torch.manual_seed(0)
    with delta.evict(activations="30%", policy=chosen, device="cpu") as run:
        evicted = trained(model, graph, run)
    assert all(map(torch.equal, plain, evicted))
    assert sum(run.report().evictions.values()) > 0


def test_no_event_is_asked_about_and_nothing_refused_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of transfers nor of ops, though a handle dies and an optimizer steps: they are asked about afterwards."""
    asked, enforced = [], []
    monkeypatch.setattr(Swap, "busy", True)
    monkeypatch.setattr(Swap, "poll", lambda swap: asked.append(swap._core.capturing))
    monkeypatch.setattr(OpTimes, "tell", lambda times, wait: asked.append(core.capturing))
    monkeypatch.setattr(Core, "find_used", lambda core: None)
    before = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with delta.evict(activations="0%", policy=delta.load_policy("recompute", {"filter.min_bytes": 0})) as run:
        core = run._core
        assert core is not None
        weight.mul(2).sin().sum().backward()
        core.op_times.missing.append((-1, None))
        held = weight.mul(2).sin()
        torch.cuda.CUDAGraph.capture_begin(object())  # type: ignore[arg-type]
        monkeypatch.setattr(core.device, "enforce", enforced.append)
        asked.clear()
        del held
        optimizer.step()
        core.hear()
        assert not asked and True not in enforced
        torch.cuda.CUDAGraph.capture_end(object())  # type: ignore[arg-type]
        core.hear()
        assert asked and not any(asked)
        core.op_times.missing.clear()
    assert (torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end) == before


def test_a_write_that_is_announced_meanwhile_makes_no_record() -> None:
    weight = nn.Parameter(torch.ones(64))
    with delta.evict(activations="0%", policy=delta.load_policy("recompute", {"filter.min_bytes": 0})) as run:
        assert run._core is not None
        source = weight.detach() * 3
        kept = source.sin() * weight
        known = set(run._core.slots)
        torch.cuda.CUDAGraph.capture_begin(object())  # type: ignore[arg-type]
        torch._C._increment_version((source,))
        torch.cuda.CUDAGraph.capture_end(object())  # type: ignore[arg-type]
        assert set(run._core.slots) <= known
        del kept


def test_a_capture_that_goes_on_after_the_block_is_none_of_its_business() -> None:
    with delta.evict(activations="30%", device="cpu") as run:
        torch.cuda.CUDAGraph.capture_begin(object())  # type: ignore[arg-type]
    assert run._core is not None and not run._core.passes


def test_a_capture_that_cannot_begin_is_none() -> None:
    with delta.evict(activations="30%", device="cpu") as run:
        with pytest.raises(ZeroDivisionError):
            torch.cuda.CUDAGraph.capture_begin(object(), fail=True)  # type: ignore[arg-type, call-arg]
        assert run._core is not None and not run._core.capturing
