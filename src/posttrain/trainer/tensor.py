"""Tensor parallelism: every layer over several ranks (Shoeybi et al. 2019, Megatron-LM), by DTensor.

Each of N ranks has 1 / N of the heads and of the MLP of every layer. Queries, keys, values, gate and up are divided by
what they give, the projections behind them by what they take; these give partial sums, which are added over the ranks:
one all-reduce behind attention and one behind the MLP, and one before each in the backward pass. What lies between
(hidden states and their norms) every rank has whole and computes alike. Embedding and head: see `vocabulary.py`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from posttrain.trainer.loading import ModelError
from posttrain.trainer.norms import with_own_forward

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")  # model_type of those whose layers `PLAN` names
BY_OUTPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
BY_INPUT = ("self_attn.o_proj", "mlp.down_proj")
NORMS_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")


def check_layers(module: nn.Module, size: int) -> None:
    """Raises ModelError for a model that `split_layer` would not divide evenly, or does not know."""
    config: Any = module.config
    config = config.get_text_config()
    name, kind = type(module).__name__, config.model_type
    if kind not in DECODERS:
        raise ModelError(
            f"trainer.tensor_parallel has no plan for {name} (model_type {kind}), only for {', '.join(DECODERS)}; "
            "leave it out: trainer.ranks shards any model"
        )
    counts = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }
    uneven = [f"{key} = {count}" for key, count in counts.items() if count % size]
    if uneven:
        raise ModelError(
            f"trainer.tensor_parallel = {size} does not divide {' and '.join(uneven)} of {name}; choose a divisor"
        )


def split_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """In place: this rank's part of a decoder layer whose whole every rank holds. Before it is sharded.

    Raises ModelError for a layer without one of the projections (those of an image tower, those that carry adapters).
    """
    trains = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
    parts = dict(layer.named_modules())
    missing = [name for name in (*BY_OUTPUT, *BY_INPUT) if not isinstance(parts.get(name), nn.Linear)]
    if missing:
        raise ModelError(
            f"trainer.tensor_parallel finds no plain {' or '.join(missing)} in {type(layer).__name__}; it cannot "
            "divide adapters or layers of another build: leave it out"
        )
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in BY_OUTPUT}
    plan |= {name: RowwiseParallel() for name in BY_INPUT}
    plan |= {"self_attn": _whole_input("hidden_states"), "mlp": _whole_input()}
    for name in NORMS_OF_HEADS:
        if name in parts:  # of this rank's heads: gradients are summed over the ranks. Which dimension is no matter
            with_own_forward(parts[name])
            plan[name] = SequenceParallel(use_local_output=True)
    parallelize_module(layer, mesh, plan, src_data_rank=None)  # None: every rank has loaded the same
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trains[name])


def _whole_input(keyword: str | None = None) -> PrepareModuleInput:
    """Hidden states made a DTensor once, for all projections that read them: their gradient is then added up once."""
    if keyword is None:
        return PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    how: dict[str, Placement] = {keyword: Replicate()}
    return PrepareModuleInput(input_kwarg_layouts=how, desired_input_kwarg_layouts=how)
