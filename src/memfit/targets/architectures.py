"""Architectures of transformers:NAME as facts: class names and the fields that differ.

Facts only, from the published configurations: no weights, nothing downloaded, no imports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Task = Literal["causal_lm", "masked_lm", "seq2seq", "image_classification"]


# Without problem_type the first forward writes it into the configuration, which recompiles.
_IMAGENET = {
    "image_size": 224,
    "num_labels": 1000,
    "problem_type": "single_label_classification",
}


@dataclass(frozen=True)
class Architecture:
    """One row: classes of the transformers package, the task and the configuration's fields."""

    config_class: str
    model_class: str
    task: Task
    fields: dict[str, Any]
    optimizer: str = "adamw"


def _gpt2(n_embd: int, n_layer: int, n_head: int) -> Architecture:
    # Training needs no special tokens, and theirs would lie outside an overridden vocabulary.
    fields = {
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Architecture("GPT2Config", "GPT2LMHeadModel", "causal_lm", fields)


def _llama(**fields: Any) -> Architecture:
    return Architecture("LlamaConfig", "LlamaForCausalLM", "causal_lm", fields)


def _llama3(*, rope_factor: float, **fields: Any) -> Architecture:
    return _llama(
        vocab_size=128256,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        **fields,
    )


def _bert(hidden_size: int, layers: int, heads: int) -> Architecture:
    fields = {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
    }
    return Architecture("BertConfig", "BertForMaskedLM", "masked_lm", fields)


def _t5(d_model: int, layers: int, heads: int) -> Architecture:
    fields = {
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "d_kv": 64,
        "num_layers": layers,
        "num_heads": heads,
        "decoder_start_token_id": 0,
    }
    return Architecture("T5Config", "T5ForConditionalGeneration", "seq2seq", fields)


def _vit(hidden_size: int, layers: int, heads: int) -> Architecture:
    fields = {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
        **_IMAGENET,
    }
    return Architecture("ViTConfig", "ViTForImageClassification", "image_classification", fields)


def _resnet(*depths: int) -> Architecture:
    # ResNetConfig has no image_size of its own: here it only sizes the batch.
    fields = {"depths": list(depths), **_IMAGENET}
    return Architecture(
        "ResNetConfig", "ResNetForImageClassification", "image_classification", fields, "sgd"
    )


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama-160m": _llama(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
    ),
    # Llama 3.2 1B and 3B, Llama 3.1 8B
    "llama-1b": _llama3(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        tie_word_embeddings=True,
        rope_factor=32.0,
    ),
    "llama-3b": _llama3(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        head_dim=128,
        tie_word_embeddings=True,
        rope_factor=32.0,
    ),
    "llama-8b": _llama3(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        head_dim=128,
        rope_factor=8.0,
    ),
    "qwen2.5-0.5b": Architecture(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        "causal_lm",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    # Mistral 7B v0.3: no sliding window
    "mistral-7b": Architecture(
        "MistralConfig",
        "MistralForCausalLM",
        "causal_lm",
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_window": None,
        },
    ),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "distilbert": Architecture("DistilBertConfig", "DistilBertForMaskedLM", "masked_lm", {}),
    "t5-small": _t5(512, 6, 8),
    "t5-base": _t5(768, 12, 12),
    "vit-base": _vit(768, 12, 12),
    "vit-large": _vit(1024, 24, 16),
    "resnet-50": _resnet(3, 4, 6, 3),
    "resnet-152": _resnet(3, 8, 36, 3),
}
