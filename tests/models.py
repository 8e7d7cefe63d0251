"""Small models of the three kinds the exactness promise names, and a way to train one and keep every number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from delta.runtime.demo_model import Gpt, GptConfig, next_byte_loss

BATCH = 3


class Cnn(nn.Module):
    """ResNet-style: BatchNorm, in-place ReLU, a residual add in place, max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm0 = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8 * 8 * 8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norm0(self.stem(image))))
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.head(self.relu(y).flatten(1))


class Encoder(nn.Module):
    """BERT-style: embedding, post-norm encoder layers with dropout, a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers(self.tokens(tokens))[:, 0]))


@dataclass(frozen=True)
class Case:
    """A model and the loss of one step on random data."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]


def _gpt_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    return next_byte_loss(model, _beside(model, torch.randint(0, 256, (BATCH, 33), generator=generator)))


def _cnn_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    image = _beside(model, torch.randn(BATCH, 3, 16, 16, generator=generator))
    return F.cross_entropy(model(image), _classes(model, generator))


def _encoder_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    tokens = _beside(model, torch.randint(0, 64, (BATCH, 24), generator=generator))
    return F.cross_entropy(model(tokens), _classes(model, generator))


def _classes(model: nn.Module, generator: torch.Generator) -> Tensor:
    return _beside(model, torch.randint(0, 5, (BATCH,), generator=generator))


def _beside(model: nn.Module, data: Tensor) -> Tensor:
    return data.to(next(model.parameters()).device)


CASES = {
    "gpt": Case(lambda: Gpt(GptConfig(layers=3, width=64, heads=4, seq=32)), _gpt_loss),
    "cnn": Case(Cnn, _cnn_loss),
    "encoder": Case(Encoder, _encoder_loss),
}


@dataclass(frozen=True)
class Numbers:
    """Every number a training run leaves behind."""

    losses: list[Tensor]
    gradients: list[list[Tensor]]
    state: dict[str, Tensor]
    random: Tensor

    def differences(self, other: Numbers) -> list[str]:
        """What is not equal bit for bit, in words; empty where all is."""
        losses = enumerate(zip(self.losses, other.losses, strict=True))
        found = [f"loss of step {step}" for step, pair in losses if not _same(*pair)]
        for step, (mine, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            pairs = enumerate(zip(mine, theirs, strict=True))
            found += [f"gradient {index} of step {step}" for index, pair in pairs if not _same(*pair)]
        found += [name for name, value in self.state.items() if not _same(value, other.state[name])]
        return found if _same(self.random, other.random) else [*found, "random state"]


def _same(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and bool(
            torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))
        )
    )


def train(case: Case, steps: int, device: str = "cpu") -> Numbers:
    """Train from a fixed seed with momentum SGD; the caller opens `delta.evict` around it, or not."""
    torch.manual_seed(0)
    model = case.make().to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses, gradients = [], []
    for _ in range(steps):
        loss = case.loss(model, generator)
        loss.backward()
        losses.append(loss.detach().clone())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimiser.step()
        optimiser.zero_grad()
    random = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)
    return Numbers(losses, gradients, {k: v.clone() for k, v in model.state_dict().items()}, random)
