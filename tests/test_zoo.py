"""The models that are measured: they train, alike in every process, and say what their blocks are."""

import pytest
import torch

from delta.errors import DeltaError
from delta.runtime import zoo
from delta.runtime.demo_measure import gradient_digest
from delta.runtime.zoo.task import Task

pytestmark = pytest.mark.usefixtures("one_thread")


def made(name: str, seed: int = 0) -> Task:
    if (package := zoo.ZOO[name].package) is not None:
        pytest.importorskip(package)
    return zoo.make(name, zoo.ZOO[name].tiny, seed)


def train(task: Task, index: int) -> str:
    torch.manual_seed(index)
    task.loss(task.batch(index)).backward()
    return gradient_digest(task.model)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_each_model_trains_and_two_processes_would_agree(name: str) -> None:
    task = made(name)
    first = train(task, 3)
    assert all(parameter.grad is not None for parameter in task.model.parameters())
    assert len(task.blocks) >= 2 and set(task.blocks) <= set(task.model.modules())
    assert train(made(name), 3) == first != train(made(name), 4)


def test_dropout_is_on_in_the_language_models() -> None:
    for name in ("gpt", "bert"):
        task = made(name)
        batch = task.batch(0)
        assert task.loss(batch).item() != task.loss(batch).item()


def test_lengths_vary_from_a_half_up_where_they_should() -> None:
    varied, steady = made("gpt-varied"), made("gpt")
    seq = zoo.ZOO["gpt"].tiny["seq"]
    lengths = {varied.batch(index)[0].shape[1] for index in range(20)}
    assert len(lengths) > 3 and min(lengths) >= seq // 2 and max(lengths) <= seq
    assert {steady.batch(index)[0].shape[1] for index in range(3)} == {seq}


def test_a_unet_joins_what_it_made_on_the_way_down() -> None:
    task = made("unet")
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t):
        task.loss(task.batch(0))
    width, pixels = zoo.ZOO["unet"].tiny["width"], zoo.ZOO["unet"].tiny["pixels"]
    assert (2, 2 * width, pixels, pixels) in saved


def test_sizes_are_those_of_the_device() -> None:
    assert zoo.sizes("unet", "cpu") == zoo.ZOO["unet"].cpu != zoo.sizes("unet", "cuda:1")
    assert zoo.sizes("unet", "cuda", tiny=True) == zoo.ZOO["unet"].tiny
    fitting = {name for name, each in zoo.ZOO.items() if each.cpu is not None}
    assert fitting == {*zoo.CPU_MODELS, "gpt-varied", "resnet101"}


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeltaError, match="model='vgg': known are byte-gpt, gpt, bert"):
        zoo.sizes("vgg", "cpu")
    monkeypatch.setattr(zoo, "find_spec", lambda package: None)
    with pytest.raises(DeltaError, match="model='llama-1b' is a configuration of transformers: pip install"):
        zoo.make("llama-1b", {}, 0)
    assert zoo.sizes("unet", "cpu")  # needs nothing
    monkeypatch.undo()
    pytest.importorskip("transformers")
    with pytest.raises(DeltaError, match="model='llama-1b' is too large for a CPU; those for one are byte-gpt"):
        zoo.sizes("llama-1b", "cpu")
