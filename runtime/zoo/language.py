"""Language models: the demo's GPT, and configurations of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from delta.runtime.demo_model import Batches, Gpt, GptConfig, next_byte_loss, stdlib_bytes
from delta.runtime.zoo.task import Batch, Task, blocks_of, generator, transformers


def byte_gpt(*, batch: int, seq: int, layers: int, width: int, heads: int, seed: int) -> Task:
    """The demo's GPT on the standard library's source."""
    model = Gpt(GptConfig(layers=layers, width=width, heads=heads, seq=seq))
    batches = Batches(stdlib_bytes(), batch=batch, seq=seq, seed=seed)

    def loss(given: Batch) -> Tensor:
        return next_byte_loss(model, given[0])

    return Task(model, lambda index: (batches[index],), loss, tuple(model.blocks))


def gpt2(
    *, batch: int, seq: int, layers: int, width: int, heads: int, vocabulary: int, seed: int, varied: bool = False
) -> Task:
    """GPT-2 with dropout; attention written out, so that autograd saves the scores."""
    config = transformers().GPT2Config(
        vocab_size=vocabulary,
        n_positions=seq,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,  # the defaults may lie outside a small vocabulary
        eos_token_id=None,
        use_cache=False,
        attn_implementation="eager",
    )
    model = transformers().GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it takes anyway, but not without a word
    return _next_token(model, "GPT2Block", batch, seq, vocabulary, seed, varied)


def gpt2_varied(**sizes: int) -> Task:
    """GPT-2 on batches of another length each step, from a half of ``seq`` up to all of it."""
    return gpt2(**sizes, varied=True)


def llama(*, batch: int, seq: int, layers: int, width: int, heads: int, vocabulary: int, seed: int) -> Task:
    """A Llama: grouped queries, rotary positions, SwiGLU, torch's fused attention."""
    config = transformers().LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=seq,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        use_cache=False,
    )
    return _next_token(transformers().LlamaForCausalLM(config), "LlamaDecoderLayer", batch, seq, vocabulary, seed)


def bert(*, batch: int, seq: int, layers: int, width: int, heads: int, vocabulary: int, seed: int) -> Task:
    """BERT with dropout, guessing the seventh of the tokens that is masked."""
    config = transformers().BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=seq,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        attn_implementation="eager",
    )
    model = transformers().BertForMaskedLM(config)

    def masked(index: int) -> Batch:
        random = generator(seed, index)
        tokens = torch.randint(1, vocabulary, (batch, seq), generator=random)
        hidden = torch.rand(batch, seq, generator=random) < 1 / 7
        return tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, -100)  # -100: not asked for

    return Task(model, masked, _with_labels(model), blocks_of(model, "BertLayer"))


def _next_token(
    model: nn.Module, block: str, batch: int, seq: int, vocabulary: int, seed: int, varied: bool = False
) -> Task:
    def tokens(index: int) -> Batch:
        random = generator(seed, index)
        length = int(torch.randint(seq // 2, seq + 1, (), generator=random)) if varied else seq
        drawn = torch.randint(vocabulary, (batch, length), generator=random)
        return drawn, drawn

    return Task(model, tokens, _with_labels(model), blocks_of(model, block))


def _with_labels(model: nn.Module) -> Any:
    def loss(given: Batch) -> Tensor:
        found: Tensor = model(given[0], labels=given[1]).loss
        return found

    return loss
