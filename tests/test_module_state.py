"""Promise P1 on modules that keep a state of their own: statistics, power iterations and random draws happen once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from exactly import STEPS, WAYS, Way, exact, some_ways, state_of
from torch import Tensor, distributed, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn, spectral_norm, weight_norm

import delta

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    # torch's own: an LSTM's flat weights under deepcopy, the old form of weight norm, modules still lazy
    pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning"),
]

Make = Callable[[], nn.Module]
Draw = Callable[[], Tensor]


def trained(make: Make, draw: Draw) -> list[Tensor]:
    """Some steps, one of them in evaluation mode and one in training mode without gradients; the state after each."""
    model, found = make(), []
    model(draw())  # lazy modules learn their shapes
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05) if list(model.parameters()) else None
    for step in range(STEPS + 1):
        model.train(step != STEPS)
        out = model(x := draw())
        with torch.no_grad():
            model(draw())
        if out.requires_grad:
            out.square().mean().backward()
        found += [out.detach().clone(), *state_of(model)]
        found += [x.grad] if x.requires_grad and x.is_leaf else []
        if optimiser is not None:
            optimiser.step()
            optimiser.zero_grad()
    return found


def values(*shape: int) -> Draw:
    return lambda: torch.randn(*shape, requires_grad=True)


class Each(nn.Module):
    """A function of a tensor as a module, after something that makes its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x).sin()).exp()


def between(kind: type[nn.Module], *args: float, **more: object) -> Make:
    """A module with activations around it."""
    return lambda: nn.Sequential(nn.Tanh(), kind(*args, **more), nn.Sigmoid())


def norm(kind: type[nn.Module], *args: int, **more: object) -> Make:
    return lambda: nn.Sequential(nn.Tanh(), kind(*args, **more), nn.ReLU(inplace=True), kind(*args, **more), nn.Tanh())


class Recurrent(nn.Module):
    """A recurrent network over packed sequences of several lengths."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.network = kind(6, 5, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([x.shape[1], 1, x.shape[1] - 1])
        packed = rnn.pack_padded_sequence(x.sin(), lengths, batch_first=True, enforce_sorted=False)
        made, _ = self.network(packed)
        return rnn.pad_packed_sequence(made, batch_first=True)[0].exp()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        made, weights = self.attention(x.sin(), x.cos(), x.exp(), key_padding_mask=x[..., 0] < -1)
        return made + weights.sum((1, 2))[:, None, None]


def attention_with_dropout(x: Tensor) -> Tensor:
    q = x.reshape(3, 1, 4, 6)
    return F.scaled_dot_product_attention(q.sin(), q.cos(), q, dropout_p=0.3, is_causal=True).reshape(12, 6)


def tokens() -> Tensor:
    return torch.randint(0, 9, (4, 5))


class Tables(nn.Module):
    """Embeddings that renormalise what is looked up, and ones with sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 6, max_norm=0.7, padding_idx=0)
        self.bag = nn.EmbeddingBag(9, 6, mode="sum", max_norm=0.5, sparse=sparse)
        self.other = nn.Embedding(9, 6, sparse=sparse, scale_grad_by_freq=not sparse)

    def forward(self, at: Tensor) -> Tensor:
        return (self.rows(at).mean(1) + self.bag(at) * self.other(at).tanh().sum(1)).exp()


def power_iterations(attach: Callable[[nn.Module], nn.Module]) -> Make:
    def make() -> nn.Module:
        convolution, linear = attach(nn.Conv1d(2, 4, 3)), attach(nn.Linear(16, 3))
        return nn.Sequential(nn.Unflatten(1, (2, 6)), convolution, nn.Tanh(), nn.Flatten(), linear, nn.Tanh())

    return make


MODULES: dict[str, tuple[Make, Draw]] = {
    "batch norm": (norm(nn.BatchNorm1d, 5), values(6, 5)),
    "batch norm of sequences": (norm(nn.BatchNorm1d, 5), values(6, 5, 3)),
    "batch norm of images": (norm(nn.BatchNorm2d, 3), values(4, 3, 4, 4)),
    "batch norm of volumes": (norm(nn.BatchNorm3d, 2), values(3, 2, 3, 3, 2)),
    "batch norm, cumulative": (norm(nn.BatchNorm2d, 3, momentum=None), values(4, 3, 4, 4)),
    "batch norm without statistics": (norm(nn.BatchNorm2d, 3, track_running_stats=False), values(4, 3, 4, 4)),
    "batch norm without weights": (norm(nn.BatchNorm1d, 5, affine=False), values(6, 5)),
    "batch norm in bfloat16": (lambda: norm(nn.BatchNorm1d, 5)().bfloat16(), lambda: torch.randn(6, 5).bfloat16()),
    "lazy batch norm": (norm(nn.LazyBatchNorm1d), values(6, 5)),
    "instance norm": (norm(nn.InstanceNorm2d, 3), values(4, 3, 4, 4)),
    "instance norm with statistics": (
        norm(nn.InstanceNorm1d, 3, affine=True, track_running_stats=True), values(4, 3, 5),
    ),
    "group norm": (norm(nn.GroupNorm, 2, 4), values(4, 4, 5)),
    "local response norm": (norm(nn.LocalResponseNorm, 2), values(4, 4, 5)),
    "rms norm": (norm(nn.RMSNorm, 5), values(4, 5)),
    "spectral norm, old form": (power_iterations(spectral_norm), values(3, 12)),
    "spectral norm": (power_iterations(parametrizations.spectral_norm), values(3, 12)),
    "weight norm, old form": (power_iterations(weight_norm), values(3, 12)),
    "weight norm": (power_iterations(parametrizations.weight_norm), values(3, 12)),
    "orthogonal weights": (
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh()), values(4, 6),
    ),
    "quantization whose range is observed": (
        lambda: nn.Sequential(nn.Linear(6, 8), FusedMovingAvgObsFakeQuantize(), nn.GELU(), nn.Linear(8, 3)),
        values(4, 6),
    ),
    "dropout": (lambda: Each(nn.Dropout(0.4)), values(4, 6)),
    "dropout in place": (lambda: Each(nn.Dropout(0.4, inplace=True)), values(4, 6)),
    "dropout of all": (lambda: Each(nn.Dropout(1.0)), values(4, 6)),
    "dropout of features": (between(nn.Dropout1d, 0.4), lambda: torch.randn(4, 3, 5, requires_grad=True)),
    "dropout of image features": (between(nn.Dropout2d, 0.4), values(4, 3, 2, 2)),
    "dropout of volume features": (between(nn.Dropout3d, 0.4), values(4, 3, 2, 2, 2)),
    "alpha dropout": (lambda: Each(nn.AlphaDropout(0.4)), values(4, 6)),
    "alpha dropout of features": (between(nn.FeatureAlphaDropout, 0.4), values(4, 3, 5)),
    "random slopes": (lambda: Each(nn.RReLU()), values(4, 6)),
    "random slopes in place": (lambda: Each(nn.RReLU(inplace=True)), values(4, 6)),
    "random pooling": (between(nn.FractionalMaxPool2d, 2, output_ratio=0.5), values(4, 3, 8, 8)),
    "a random choice": (lambda: Each(lambda x: F.gumbel_softmax(x, tau=0.5)), values(4, 6)),
    "a random hard choice": (lambda: Each(lambda x: F.gumbel_softmax(x, hard=True)), values(4, 6)),
    "a random number of each kind": (
        lambda: Each(
            lambda x: x * torch.rand_like(x) + torch.randn(4, 6) * x.detach().bernoulli(0.5) + x * torch.randperm(6)
            + x * torch.empty_like(x).exponential_() + torch.normal(x, 0.1)
            + torch.distributions.Normal(x, 1.0).rsample()
        ),
        values(4, 6),
    ),
    "attention with dropout": (lambda: Each(attention_with_dropout), values(12, 6)),
    "multi-head attention": (Attention, values(3, 4, 6)),
    "rnn": (lambda: Recurrent(nn.RNN), values(3, 3, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM), values(3, 2, 6)),  # short: with nothing kept they are replayed over and over
    "gru": (lambda: Recurrent(nn.GRU), values(3, 2, 6)),
    "embeddings": (lambda: Tables(sparse=False), tokens),
    "embeddings with sparse gradients": (lambda: Tables(sparse=True), tokens),
    "lazy layers": (
        lambda: nn.Sequential(nn.LazyConv1d(4, 3), nn.Flatten(), nn.LazyLinear(3), nn.Tanh()), values(4, 2, 6),
    ),
    "an encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.2, batch_first=True), values(3, 4, 6)),
}  # fmt: skip


class Program:
    """A module's training as a program that can be told from others."""

    def __init__(self, make: Make, draw: Draw) -> None:
        self.make, self.draw = make, draw

    def __call__(self) -> list[Tensor]:
        return trained(self.make, self.draw)


PROGRAMS = {name: Program(*made) for name, made in MODULES.items()}


def check(name: str, way: Way) -> None:
    report = exact(PROGRAMS[name], *way)
    assert report.steps >= STEPS
    assert way[2] != "0%" or sum(report.evictions.values()) > 0


@pytest.mark.parametrize(("name", "way"), some_ways(PROGRAMS), ids=str)
def test_state_gradients_and_random_numbers_are_those_of_plain_training(name, way):
    check(name, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_gradients_and_random_numbers_in_every_way(name, way):
    check(name, way)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.LazyBatchNorm1d])
@pytest.mark.parametrize("way", [way for way in WAYS if way[2] == "0%"], ids=str)
def test_a_batch_is_counted_once(kind, way):
    def program() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), kind(*([5] if kind is nn.BatchNorm1d else [])), nn.Tanh())
        for _ in range(STEPS):
            model(torch.randn(6, 5)).exp().sum().backward()
        assert model[2].num_batches_tracked.item() == STEPS
        return state_of(model)

    exact(program, *way)


# -- synchronised batch norm ------------------------------------------------------------------------------------------
@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def synchronised(training: bool) -> list[Tensor]:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Tanh(), nn.SyncBatchNorm(4), nn.Tanh()).train(training)
    found = []
    for _ in range(STEPS):
        model(torch.randn(6, 3, 5)).exp().sum().backward()
        found += state_of(model)
    return found


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("way", [way for way in WAYS if way[2] == "0%"], ids=str)
def test_synchronised_batch_norm_in_evaluation(way):
    exact(partial(synchronised, training=False), *way)


@pytest.mark.parametrize("way", [way for way in WAYS if way[2] == "0%"], ids=str)
def test_synchronised_batch_norm_without_a_group(way):
    exact(partial(synchronised, training=True), *way)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("session", [nullcontext, partial(delta.evict, activations="0%", device="cpu")])
def test_synchronised_batch_norm_does_not_train_in_a_group_on_the_cpu(session):
    """PyTorch's own limit: its statistics have kernels for accelerators only."""
    with session(), pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        synchronised(training=True)
