"""The demo's model and data: a byte-level GPT in plain PyTorch, and Python's standard library as its text.

Nothing here knows about Delta: this is the code a user would have before adding one line.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from delta.errors import DeltaError
from delta.units import at_least_one


@dataclass(frozen=True, slots=True)
class GptConfig:
    """The sizes of a GPT. Raises DeltaError for sizes that make no model."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    seq: int = 256
    vocabulary: int = 256

    def __post_init__(self) -> None:
        at_least_one(layers=self.layers, width=self.width, heads=self.heads, seq=self.seq, vocabulary=self.vocabulary)
        if self.width % self.heads:
            raise DeltaError(f"width={self.width}: must be a multiple of the {self.heads} attention heads")


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return joined


class Block(nn.Module):
    """Attention and a four times wider GELU MLP, each behind a layer norm and added to its input."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        wider: Tensor = x + self.mlp(self.mlp_norm(x))
        return wider


class Gpt(nn.Module):
    """Token and position embeddings, the blocks, a norm, and a linear head."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, seq, vocabulary) for the byte after each of ``tokens`` (batch, seq)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def next_byte_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Mean cross entropy of each byte of ``text`` (batch, seq + 1) given those before it."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def stdlib_bytes() -> bytes:
    """The source of the top-level modules of Python's standard library, a few MB, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    if not text:
        raise DeltaError(f"the demo trains on the standard library's .py files, but there are none in {root}")
    return text


class Batches:
    """Random windows of a text. Batch ``index`` is the same in every process that gives the same seed."""

    def __init__(self, text: bytes, *, batch: int, seq: int, seed: int) -> None:
        at_least_one(batch=batch)
        if len(text) <= seq + 1:
            raise DeltaError(f"seq={seq}: the text has only {len(text)} bytes, give a shorter sequence")
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch, self._seq, self._seed = batch, seq, seed

    def __getitem__(self, index: int) -> Tensor:
        """Bytes as int64, (batch, seq + 1)."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        starts = torch.randint(len(self._text) - self._seq - 1, (self._batch, 1), generator=generator)
        return self._text[starts + torch.arange(self._seq + 1)].long()
