"""Model families of `transformers`, tiny and with random weights: a model, and the inputs of one training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, TOKENS, VOCABULARY = 2, 12, 64
Inputs = Callable[[], dict[str, Tensor]]
Family = tuple[Callable[[], nn.Module], Inputs]

DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
    "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "pad_token_id": 0,
}  # fmt: skip
PATCHES = {
    "image_size": 16, "patch_size": 4, "num_channels": 3, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "num_labels": 5,
}  # fmt: skip
SEQUENCE_TO_SEQUENCE = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


# -- inputs of a step -------------------------------------------------------------------------------------------------
def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS))


def next_token() -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def padded_tokens() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[0, 7:] = 0
    return {"input_ids": _tokens(), "attention_mask": mask, "labels": _tokens()}


def translation() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "labels": _tokens()}


def labelled_images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 5, (BATCH,))}


def large_labelled_images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 5, (BATCH,))}


def segmented_images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 5, (BATCH, 32, 32))}


def captioned_images() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "pixel_values": torch.randn(BATCH, 3, 16, 16)}


def sounds_with_texts() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 800), "labels": torch.randint(3, VOCABULARY, (BATCH, 3))}


def spectrograms_with_texts() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 40), "labels": _tokens()}


# -- the families -----------------------------------------------------------------------------------------------------
def _of(model: str, config: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made: nn.Module = getattr(hf, model)(getattr(hf, config)(**settings))
        return made.train()

    return make


FAMILIES: dict[str, Family] = {
    # decoder only
    "gpt2": (
        _of("GPT2LMHeadModel", "GPT2Config", {
            "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
            "eos_token_id": 2,
        }),
        next_token,
    ),
    "opt": (
        _of("OPTForCausalLM", "OPTConfig", ENCODER | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1}),
        next_token,
    ),
    "gpt_neox": (_of("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER | {"hidden_dropout": 0.1}), next_token),
    "bloom": (
        _of("BloomForCausalLM", "BloomConfig", {
            "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        }),
        next_token,
    ),
    "llama": (_of("LlamaForCausalLM", "LlamaConfig", DECODER), next_token),
    "mistral": (_of("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 4}), next_token),
    "qwen2": (_of("Qwen2ForCausalLM", "Qwen2Config", DECODER), next_token),
    "gemma2": (_of("Gemma2ForCausalLM", "Gemma2Config", DECODER | {"sliding_window": 4}), next_token),
    "phi3": (_of("Phi3ForCausalLM", "Phi3Config", DECODER | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}), next_token),
    # mixture of experts: which rows an expert reads depends on data
    "mixtral": (
        _of("MixtralForCausalLM", "MixtralConfig", DECODER | {
            "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1, "output_router_logits": True,
        }),
        next_token,
    ),
    "qwen2_moe": (
        _of("Qwen2MoeForCausalLM", "Qwen2MoeConfig", DECODER | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }),
        next_token,
    ),
    # state space and recurrent
    "mamba": (
        _of("MambaForCausalLM", "MambaConfig", {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0,
        }),
        next_token,
    ),
    "mamba2": (
        _of("Mamba2ForCausalLM", "Mamba2Config", {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8,
            "head_dim": 8, "n_groups": 2, "chunk_size": 4, "pad_token_id": 0,
        }),
        next_token,
    ),
    "rwkv": (
        _of("RwkvForCausalLM", "RwkvConfig", {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64,
        }),
        next_token,
    ),
    # encoder only
    "bert": (_of("BertForMaskedLM", "BertConfig", ENCODER), padded_tokens),
    "roberta": (_of("RobertaForMaskedLM", "RobertaConfig", ENCODER), padded_tokens),
    "deberta_v2": (
        _of("DebertaV2ForMaskedLM", "DebertaV2Config", ENCODER | {
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "conv_kernel_size": 3,
        }),
        padded_tokens,
    ),
    "electra": (
        _of("ElectraForMaskedLM", "ElectraConfig", ENCODER | {"embedding_size": 16}),
        padded_tokens,
    ),
    # encoder and decoder
    "t5": (
        _of("T5ForConditionalGeneration", "T5Config", {
            "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 1,
            "num_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 0,
        }),
        translation,
    ),
    "bart": (_of("BartForConditionalGeneration", "BartConfig", SEQUENCE_TO_SEQUENCE), translation),
    # vision
    "vit": (_of("ViTForImageClassification", "ViTConfig", PATCHES), labelled_images),
    "swin": (
        _of("SwinForImageClassification", "SwinConfig", {
            "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
            "drop_path_rate": 0.2, "hidden_dropout_prob": 0.1, "num_labels": 5,
        }),
        large_labelled_images,
    ),
    "convnext": (
        _of("ConvNextForImageClassification", "ConvNextConfig", {
            "hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "patch_size": 2, "drop_path_rate": 0.3,
            "num_labels": 5,
        }),
        large_labelled_images,
    ),
    "resnet": (
        _of("ResNetForImageClassification", "ResNetConfig", {
            "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 5,
        }),
        large_labelled_images,
    ),
    "segformer": (
        _of("SegformerForSemanticSegmentation", "SegformerConfig", {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16, "num_labels": 5, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        }),
        segmented_images,
    ),
    # text and images, speech
    "clip": (
        _of("CLIPModel", "CLIPConfig", {
            "text_config": ENCODER | {"attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 2},
            "vision_config": PATCHES | {"attention_dropout": 0.1},
            "projection_dim": 16,
        }),
        captioned_images,
    ),
    "wav2vec2": (
        _of("Wav2Vec2ForCTC", "Wav2Vec2Config", ENCODER | {
            "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_length": 2,
            "mask_time_prob": 0.2, "layerdrop": 0.2, "ctc_zero_infinity": True,
        }),
        sounds_with_texts,
    ),
    "whisper": (
        _of("WhisperForConditionalGeneration", "WhisperConfig", SEQUENCE_TO_SEQUENCE | {
            "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32,
        }),
        spectrograms_with_texts,
    ),
}  # fmt: skip


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The model's own loss, else a contrastive one over the pairs of the batch."""
    output = model(**inputs)
    if getattr(output, "loss", None) is not None:
        return output.loss
    return F.cross_entropy(output.logits_per_image, torch.arange(BATCH))
