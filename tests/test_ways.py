"""The ways of today that Delta is compared with: each does what it is known for, and gives plain's bits."""

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from delta.errors import DeltaError
from delta.runtime import ways, zoo
from delta.runtime.demo_measure import gradient_digest
from delta.runtime.zoo.task import Task

pytestmark = pytest.mark.usefixtures("one_thread")


def task() -> Task:
    return zoo.make("byte-gpt", zoo.ZOO["byte-gpt"].tiny, 0)


def train(mode: str) -> tuple[str, int]:
    """The gradients' digest, and the calls of the first linear layer's forward."""
    trained, calls = task(), []
    linear = next(module for module in trained.model.modules() if isinstance(module, nn.Linear))
    around = ways.prepare(mode, trained, None)
    linear.register_forward_hook(lambda *_: calls.append(1))
    with around():
        trained.loss(trained.batch(0)).backward()
    return gradient_digest(trained.model), len(calls)


@pytest.mark.parametrize(("mode", "runs"), [("checkpoint", 2), ("sac", 2), ("save_on_cpu", 1), ("delta", 1)])
def test_each_way_gives_the_bits_of_plain(mode: str, runs: int) -> None:
    plain, once = train("plain")
    assert train(mode) == (plain, runs) and once == 1


class Matmuls(TorchDispatchMode):
    """Counts those that run, below the modes of others."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def matmuls(mode: str) -> int:
    trained = task()
    around = ways.prepare(mode, trained, None)
    with Matmuls() as seen, around():
        trained.loss(trained.batch(0)).backward()
    return seen.count


def test_selective_checkpointing_does_no_matmul_twice() -> None:
    assert matmuls("sac") == matmuls("plain") < matmuls("checkpoint")


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways.unavailable("checkpoint", "cpu") is None
    assert ways.unavailable("compile", "cpu") == "not available on cpu: compared on CUDA only"
    monkeypatch.setattr(ways, "find_spec", lambda name: None)
    assert ways.unavailable("offloader", "cuda") == "not available: trl is not installed"
    assert ways.unavailable("compile", "cuda:0") is None


def test_the_offloader_is_one_context_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def get(model: nn.Module, **options: Any) -> AbstractContextManager[None]:
        made.append(options)
        return nullcontext()

    module = ModuleType("trl.models.activation_offloading")
    module.get_act_offloading_ctx_manager = get  # type: ignore[attr-defined]
    for name in ("trl", "trl.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    around = ways.prepare("offloader", task(), None)
    assert around() is around() and made == [{"warn_if_no_head": False}]


def test_compile_gets_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as config

    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda model: compiled.append(model))
    monkeypatch.setattr(config, "activation_memory_budget", 1.0)
    trained = task()
    ways.prepare("compile", trained, "30%")
    assert config.activation_memory_budget == 0.3 and compiled == [trained.model]
    with pytest.raises(DeltaError, match="a share such as 50%, not '2GiB'"):
        ways.prepare("compile", trained, "2GiB")
