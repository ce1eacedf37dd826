"""The sizes of a model from its config.json: no weight is loaded.

Parameters are counted on the meta device, where tensors have shapes and no memory, so they are those of the very
modules that would be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from posttrain.runs.model_shape import ModelShape
from posttrain.trainer.loading import LoraConfig, ModelError, load_config, model_path
from posttrain.trainer.lora import factor_sizes


class UnknownSizes(ModelError):
    """Memory cannot be estimated: not for this architecture, or not for the engine that divides the models."""


def shape_at(path: str, lora: LoraConfig | None = None) -> ModelShape:
    """Of the model at `path` (a directory, a packaged model or a hub id), with adapters where `lora` says so.

    Raises ModelError where there is none, and for adapters that do not fit it.
    """
    return shape_of(load_config(model_path(path)), lora)


def shape_like(sizes: Mapping[str, Any]) -> ModelShape:
    """Of a model described by the content of a config.json."""
    return shape_of(AutoConfig.for_model(**sizes))


def shape_of(config: Any, lora: LoraConfig | None = None) -> ModelShape:
    """Of a transformers config."""
    text = config.get_text_config()
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    try:
        shape = _shape(module, config, text, layers)
    except (AttributeError, ValueError) as error:
        raise UnknownSizes(
            f"{type(module).__name__} does not describe itself as Llama and its kin do ({error}): its memory cannot be "
            "estimated"
        ) from error
    if lora is None:
        return shape
    factors = factor_sizes(module, lora)
    numbers, width = sum(rank * (given + taken) for rank, given, taken in factors), sum(rank for rank, _, _ in factors)
    return replace(shape, adapters=numbers, adapter_width=-(-width // shape.layers))


def _shape(module: torch.nn.Module, config: Any, text: Any, layers: Sequence[torch.nn.Module]) -> ModelShape:
    heads = text.num_attention_heads
    active = int(getattr(text, "num_experts_per_tok", 0) or 0)
    width = getattr(text, "moe_intermediate_size", text.intermediate_size) * max(1, active)
    return ModelShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=int(width),
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        query_norms=any(name.endswith("q_norm.weight") for name, _ in module.named_parameters()),
        norms=sum(
            p.shape == (text.hidden_size,) and name.endswith("norm.weight") for name, p in layers[0].named_parameters()
        ),
        experts_per_token=active,
        parameters=_count(module),
        layer_parameters=max(_count(layer) for layer in layers),
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
