"""Tiny random models of the shapes people train, built in-process from a seed."""

from __future__ import annotations

from typing import Any

from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from posttrain.trainer.policy import Policy

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,  # far from uniform, so that a wrong attention or scale shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def tiny_config(name: str, **overrides: Any) -> Any:
    """A transformers config of the architecture `name`."""
    build = {
        "llama": lambda: LlamaConfig(**SMALL | overrides),
        "llama_bias_mha": lambda: LlamaConfig(
            **SMALL | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True} | overrides
        ),
        "qwen2": lambda: Qwen2Config(**SMALL | overrides),
        "qwen2_window": lambda: Qwen2Config(
            **SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} | overrides
        ),
        "qwen3": lambda: Qwen3Config(**SMALL | {"tie_word_embeddings": True} | overrides),
        "gemma3": lambda: Gemma3TextConfig(
            **SMALL | {"layer_types": ALTERNATING, "sliding_window": 4, "query_pre_attn_scalar": 8} | overrides
        ),
        "mistral": lambda: MistralConfig(**SMALL | {"sliding_window": 5} | overrides),
        "gemma2": lambda: Gemma2Config(
            **SMALL
            | {"layer_types": ALTERNATING, "sliding_window": 4, "query_pre_attn_scalar": 8}
            | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
            | overrides
        ),
        "granite": lambda: GraniteConfig(**SMALL | {"logits_scaling": 4.0, "attention_multiplier": 0.3} | overrides),
        "cohere": lambda: CohereConfig(**SMALL | {"logit_scale": 0.25} | overrides),
        "moe": lambda: Qwen3MoeConfig(
            **SMALL
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
            | {"mlp_only_layers": [1], "decoder_sparse_step": 1}
            | overrides
        ),
        "gpt_oss": lambda: GptOssConfig(
            **SMALL
            | {"layer_types": ALTERNATING, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
            | overrides
        ),
    }
    return build[name]()


def tiny_policy(name: str = "qwen3", seed: int = 0, **overrides: Any) -> Policy:
    return Policy.random(tiny_config(name, **overrides), seed=seed)
