"""What is asked of Megatron-core: its layers without Transformer Engine, for the models whose layers they are.

Norms and attention are not its own, but put where it has a place for them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from posttrain.trainer.attention import AttentionContext
from posttrain.trainer.loading import ModelError
from posttrain.trainer.megatron_layout import Groups
from posttrain.trainer.ranks import TrainerConfig

DENSE = ("llama", "mistral", "qwen2", "qwen3")  # model_type of those whose layers are Megatron's under another name
SPARSE = ("qwen3_moe",)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the attention of every layer needs to know of a forward."""

    context: AttentionContext
    cos: Tensor  # [1, R, D]
    sin: Tensor
    rows: int  # R; behind them come rows that only make them divide among the ranks


class Norm(nn.Module):
    """RMSNorm as transformers computes it: Megatron's own without Transformer Engine knows no sequence parallel."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class ContextAttention(nn.Module):
    """Megatron's place for who sees whom, where the `AttentionContext` of the forward says it."""

    def __init__(self, *, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.index = layer_number - 1
        self.options: dict[str, Any] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Seen, **_: Any) -> Tensor:
        """[R + pad, 1, H * D] of queries, keys and values [R + pad, 1, H, D]."""
        seen, count = attention_mask, len(query)
        q, k, v = (x[: seen.rows].permute(1, 2, 0, 3) for x in (query, key, value))
        q, k = apply_rotary_pos_emb(q, k, seen.cos, seen.sin)
        out = seen.context.attend(self.index, q, k, v, **self.options)
        return F.pad(out.flatten(2).transpose(0, 1), (0, 0, 0, 0, 0, count - seen.rows))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model's attention, and of a team that divides it."""

    tensor: int  # ranks of a team
    heads: int
    keys: int  # key heads
    head: int  # numbers of a head


def sizes_of(module: Any, trainer: TrainerConfig) -> Sizes:
    config = module.config
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Sizes(trainer.tensor_parallel, heads, config.num_key_value_heads, head)


def check_model(module: Any, trainer: TrainerConfig) -> None:
    """Raises ModelError for a model that Megatron-core's layers do not compute, or that the ranks do not divide."""
    config, name = module.config, type(module).__name__
    kind = getattr(config, "model_type", None)
    if hasattr(module, "peft_config"):
        raise ModelError(
            "trainer.backend megatron trains all weights, no adapters; leave out model.lora or the backend"
        )
    if kind not in DENSE + SPARSE:
        raise ModelError(
            f"trainer.backend megatron has no layers for {name} (model_type {kind}), only for "
            f"{', '.join(DENSE + SPARSE)}; set trainer.backend: fsdp2, which divides any model"
        )
    extra = [key for key in ("attention_bias", "mlp_bias") if getattr(config, key, False)]
    if extra or config.hidden_act != "silu":
        what = ", ".join(extra) or f"hidden_act {config.hidden_act}"
        raise ModelError(f"trainer.backend megatron has no layers for {name} with {what}; set trainer.backend: fsdp2")
    counts = {"num_attention_heads": trainer.tensor_parallel, "num_key_value_heads": trainer.tensor_parallel}
    counts["intermediate_size"] = trainer.tensor_parallel
    if kind in SPARSE:
        counts["num_experts"] = trainer.expert_parallel
    elif trainer.expert_parallel > 1:
        raise ModelError(f"trainer.megatron.expert_parallel: {name} has no experts; leave it out")
    uneven = [
        f"{key} = {getattr(config, key)} by {size}" for key, size in counts.items() if getattr(config, key) % size
    ]
    if uneven:
        raise ModelError(
            f"trainer.tensor_parallel and trainer.megatron.expert_parallel do not divide {', '.join(uneven)} of "
            f"{name}; choose divisors"
        )


class _Core:
    """The names of Megatron-core that are used here."""

    def __init__(self) -> None:
        from megatron.core import parallel_state, tensor_parallel  # type: ignore[import-not-found]
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # type: ignore[import-not-found]
        from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-not-found]
        from megatron.core.transformer import attention, mlp  # type: ignore[import-not-found]
        from megatron.core.transformer.enums import AttnMaskType  # type: ignore[import-not-found]
        from megatron.core.transformer.moe import experts, moe_layer, router  # type: ignore[import-not-found]
        from megatron.core.transformer.spec_utils import ModuleSpec  # type: ignore[import-not-found]
        from megatron.core.transformer.transformer_config import TransformerConfig  # type: ignore[import-not-found]
        from megatron.core.transformer.transformer_layer import (  # type: ignore[import-not-found]
            TransformerLayer,
            TransformerLayerSubmodules,
        )

        self.parallel_state = parallel_state
        self.tensor_parallel, self.get_bias_dropout_add = tensor_parallel, get_bias_dropout_add
        self.ProcessGroupCollection, self.attention, self.mlp = ProcessGroupCollection, attention, mlp
        self.AttnMaskType, self.experts, self.moe_layer = AttnMaskType, experts, moe_layer
        self.ModuleSpec, self.TransformerConfig = ModuleSpec, TransformerConfig
        self.TransformerLayer, self.TransformerLayerSubmodules = TransformerLayer, TransformerLayerSubmodules

        class Router(router.TopKRouter):
            def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
                """There is none; Megatron's own, which would see that, is compiled for every layer."""

        self.Router = Router


def megatron_core() -> Any:
    try:
        with warnings.catch_warnings():  # it tells what else could be installed
            warnings.simplefilter("ignore")
            core = _Core()
    except ImportError as error:
        raise ModelError(
            f"trainer.backend is megatron, which cannot be imported ({error}); pip install 'posttrain[megatron]' "
            "(Python 3.12, CUDA), or set fsdp2"
        ) from error
    warnings.filterwarnings("ignore", "When using sequence parallelism it is recommended")  # a matter of speed
    return core


def collection(core: Any, groups: Groups, trainer: TrainerConfig) -> Any:
    """For Megatron's layers: no pipeline, no context parallel, experts whole."""
    if not core.parallel_state.model_parallel_is_initialized():  # its layers ask a few buffers of it
        core.parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=trainer.tensor_parallel,
            expert_model_parallel_size=trainer.expert_parallel,
            expert_tensor_parallel_size=1,
        )
    return core.ProcessGroupCollection(
        tp=groups.tensor,
        pp=groups.alone,
        cp=groups.alone,
        tp_cp=groups.tensor,
        dp=groups.data,
        dp_cp=groups.data,
        tp_dp_cp=groups.everyone,
        ep=groups.expert,
        expt_tp=groups.alone,
        tp_ep=groups.expert,
        expt_dp=groups.expert_data,
    )


def layer_config(core: Any, module: Any, trainer: TrainerConfig, dtype: torch.dtype) -> Any:
    config, sizes = module.config, sizes_of(module, trainer)
    sparse: dict[str, Any] = {}
    if config.model_type in SPARSE:
        sparse = {
            "num_moe_experts": config.num_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_pre_softmax": not config.norm_topk_prob,  # softmax over the chosen ones = all, made to sum to 1
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": trainer.expert_parallel,
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return core.TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=sizes.heads,
            num_query_groups=sizes.keys,
            kv_channels=sizes.head,
            ffn_hidden_size=config.intermediate_size,
            normalization="RMSNorm",
            layernorm_epsilon=config.rms_norm_eps,
            qk_layernorm=hasattr(module.get_decoder().layers[0].self_attn, "q_norm"),
            add_bias_linear=False,
            add_qkv_bias=module.get_decoder().layers[0].self_attn.q_proj.bias is not None,
            gated_linear_unit=True,
            activation_func=F.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=sizes.tensor,
            expert_tensor_parallel_size=1,
            sequence_parallel=sizes.tensor > 1,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            use_cpu_initialization=True,
            perform_initialization=False,
            transformer_impl="local",
            persist_layer_norm=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            gradient_accumulation_fusion=False,
            **sparse,
        )


def submodules_of(core: Any, *, sparse: bool, normed: bool) -> Any:
    """Of one layer: Megatron's own parts, but for norms and attention."""
    column, row = core.tensor_parallel.ColumnParallelLinear, core.tensor_parallel.RowParallelLinear
    projections = core.mlp.MLPSubmodules(linear_fc1=column, linear_fc2=row)
    if sparse:
        experts = partial(core.experts.SequentialMLP, submodules=projections)
        mlp = partial(
            core.moe_layer.MoELayer, submodules=core.moe_layer.MoESubmodules(experts=experts, router=core.Router)
        )
    else:
        mlp = partial(core.mlp.MLP.as_mlp_submodule, submodules=projections)
    attention = core.attention.SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=ContextAttention,
        linear_proj=row,
        q_layernorm=Norm if normed else None,
        k_layernorm=Norm if normed else None,
    )
    return core.TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=core.ModuleSpec(
            module=core.attention.SelfAttention,
            params={"attn_mask_type": core.AttnMaskType.causal},
            submodules=attention,
        ),
        self_attn_bda=core.get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=mlp,
        mlp_bda=core.get_bias_dropout_add,
    )
