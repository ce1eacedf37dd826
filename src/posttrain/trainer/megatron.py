"""Megatron-core (Shoeybi et al. 2019; Korthikanti et al. 2022) in the place of FSDP2: its layers, divided among ranks.

Layers, projections, mixture of experts and their communication are Megatron's: tensor parallel with its sequence
parallel between the layers, and expert parallel. Attention, rotary positions, embedding lookup rules and the head's
log-probs are those of every other backend, so that packed rows and shared prefixes go on as they do there. No pipeline:
its schedules own the loop over micro-batches, which here is the trainer's.

The module in Hugging Face layout stays: it has the names, the config and a shape for every weight, but no weights. Who
needs one is given it for a moment (`sharding.AT_HAND`), put together from the ranks that have its parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from posttrain.trainer.attention import AttentionContext, PackedAttention, layout_of
from posttrain.trainer.fused import LogitsRule, fused_logprobs
from posttrain.trainer.loading import ModelError
from posttrain.trainer.megatron_layout import Groups, Piece, Shared, as_it_is, half_view, heads_view, stacked_view
from posttrain.trainer.ranks import Ranks, TrainerConfig
from posttrain.trainer.sharding import AT_HAND
from posttrain.trainer.vocabulary import Team, team_logprobs

DENSE = ("llama", "mistral", "qwen2", "qwen3")  # model_type of those whose layers are Megatron's under another name
SPARSE = ("qwen3_moe",)
DEVICES = ("cuda",)  # that its layers ask for by name
TRIED = 9  # tokens on which both have to agree before the run starts
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the largest hidden state


class Undivided(Protocol):
    """What is needed of a policy."""

    module: nn.Module
    decoder: nn.Module

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the attention of every layer needs to know of a forward."""

    context: AttentionContext
    cos: Tensor  # [1, R, D]
    sin: Tensor
    rows: int  # R; behind them come rows that only make them divide among the ranks


class MegatronDecoder(nn.Module):
    """The decoder and the head of `policy.module` as Megatron's layers, of which this rank has its part.

    Takes the weights out of the module, layer by layer; every rank has to make one. For a model that `check_model` lets
    pass.
    """

    def __init__(self, policy: Undivided, ranks: Ranks, trainer: TrainerConfig) -> None:
        super().__init__()
        module: Any = policy.module
        self._core = _megatron()
        self.groups = Groups.of(ranks, trainer)
        self._sizes = _sizes(module, trainer)
        self._plan = _layer_config(self._core, module, trainer, policy.dtype)
        self._process_groups = _collection(self._core, self.groups, trainer)
        self._device = policy.device
        self._recomputes = bool(getattr(policy.decoder, "gradient_checkpointing", False))
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = policy.decoder.rotary_emb  # type: ignore[assignment]
        self._divides_words = len(module.get_input_embeddings().weight) % trainer.tensor_parallel == 0
        self.pieces: dict[int, Piece] = {}  # by the id of the parameter of the module
        self.shared: dict[nn.Parameter, Shared] = {}  # of every parameter here
        with (
            warnings.catch_warnings()
        ):  # of what it lacks (Transformer Engine, Apex), and that one rank divides nothing
            warnings.simplefilter("ignore")
            self.layers = nn.ModuleList(
                self._layer(number, layer)
                for number, layer in enumerate(policy.decoder.layers)  # type: ignore[arg-type]
            )
        self.norm = _Norm(config=self._plan, hidden_size=self._plan.hidden_size, eps=self._plan.layernorm_epsilon)
        self._take(policy.decoder.norm.weight, self.norm.weight)  # type: ignore[union-attr, arg-type]
        self._take_vocabulary(module)
        setattr(module, AT_HAND, self._at_hand)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """[1, R, K] last hidden states of one row of R tokens."""
        rows = len(token_ids)
        padded = F.pad(token_ids, (0, -rows % self._sizes.tensor))
        x = self._embedded(padded)
        cos, sin = self._rotary(x, position_ids=positions[None])
        seen = _Seen(attention, cos, sin, rows)
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if self._recomputes else layer
            x, _ = run(x, attention_mask=seen)
        x = self.norm(x)
        if self._sizes.tensor > 1:  # False: what comes back, every rank of the team has whole
            gather = self._core.tensor_parallel.gather_from_sequence_parallel_region
            x = gather(x, tensor_parallel_output_grad=False, group=self.groups.tensor)
        return x[:rows].transpose(0, 1)

    def head_logprobs(
        self, hidden: Tensor, targets: Tensor, *, temperature: float, rule: LogitsRule, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `vocabulary.head_logprobs`."""
        how: dict[str, Any] = {"temperature": temperature, "rule": rule, "with_entropy": with_entropy}
        if not self._divides_words or self._sizes.tensor == 1:
            return fused_logprobs(hidden, self.head, None, targets, **how)
        group, size = self.groups.tensor, len(self.head)
        team = Team(group, dist.get_rank(group) * size, size)
        return team_logprobs(hidden, self.head, None, targets, team, **how)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """[R / T, 1, K]"""
        parallel, group = self._core.tensor_parallel, self.groups.tensor
        if not self._divides_words:
            return parallel.scatter_to_sequence_parallel_region(
                F.embedding(token_ids, self.words)[:, None], group=group
            )
        size = len(self.words)
        first = dist.get_rank(group) * size
        here = (token_ids >= first) & (token_ids < first + size)
        own = F.embedding(torch.where(here, token_ids - first, 0), self.words) * here[:, None]
        return parallel.reduce_scatter_to_sequence_parallel_region(own[:, None], group=group)

    @contextmanager
    def _at_hand(self, value: Tensor) -> Iterator[None]:
        """While it lasts, a parameter of the module has its whole weight; every rank has to ask. Others have theirs."""
        piece = self.pieces.get(id(value))
        if piece is None:
            yield
            return
        shell = value.data
        value.data = piece.read(lambda parameter: parameter.detach())
        try:
            yield
        finally:
            value.data = shell

    def _layer(self, number: int, source: Any) -> nn.Module:
        """Megatron's counterpart of a decoder layer, whose weights it takes."""
        sparse = hasattr(source.mlp, "experts")
        submodules = _submodules(self._core, sparse=sparse, normed=hasattr(source.self_attn, "q_norm"))
        layer = self._core.TransformerLayer(
            config=self._plan, submodules=submodules, layer_number=number + 1, pg_collection=self._process_groups
        )
        layer.to(self._device)
        attention = source.self_attn
        layer.self_attention.core_attention.options = {
            "scaling": attention.scaling,
            "sliding_window": getattr(attention, "sliding_window", None),
        }
        self._take(source.input_layernorm.weight, layer.input_layernorm.weight)
        self._take(source.post_attention_layernorm.weight, layer.pre_mlp_layernorm.weight)
        self._take_attention(attention, layer.self_attention)
        if sparse:
            self._take(source.mlp.gate.weight, layer.mlp.router.weight)
            self._take_experts(source.mlp.experts, layer.mlp.experts.local_experts)
        else:
            self._take_mlp(source.mlp, layer.mlp)
        return layer.train()

    def _take_attention(self, source: Any, here: Any) -> None:
        keys, size = self._sizes.keys // self._sizes.tensor, self._sizes.head
        each = self._sizes.heads // self._sizes.keys
        spans = {"q_proj": (0, each), "k_proj": (each, each + 1), "v_proj": (each + 1, each + 2)}
        for kind in ("weight", "bias"):
            fused = getattr(here.linear_qkv, kind)
            if fused is not None:
                views = [
                    (getattr(getattr(source, name), kind), heads_view(keys, *span, size))
                    for name, span in spans.items()
                ]
                self._divide(fused, views)
        self._divide(here.linear_proj.weight, [(source.o_proj.weight, as_it_is)], dim=1)
        for name, norm in (("q_norm", here.q_layernorm), ("k_norm", here.k_layernorm)):
            if norm is not None:
                self._take(getattr(source, name).weight, norm.weight)

    def _take_mlp(self, source: Any, here: Any) -> None:
        halves = [(source.gate_proj.weight, half_view(0)), (source.up_proj.weight, half_view(1))]
        self._divide(here.linear_fc1.weight, halves)
        self._divide(here.linear_fc2.weight, [(source.down_proj.weight, as_it_is)], dim=1)

    def _take_experts(self, source: Any, here: Sequence[Any]) -> None:
        """Of all experts, the next ones of this rank; gate and up lie as they do in Megatron's."""
        shared = Shared(self.groups.expert_data)
        for stack, name in ((source.gate_up_proj, "linear_fc1"), (source.down_proj, "linear_fc2")):
            own = [getattr(expert, name).weight for expert in here]
            self._fill(Piece(stack.shape, tuple((w, stacked_view) for w in own), self.groups.expert), stack, shared)

    def _take_vocabulary(self, module: Any) -> None:
        """Divided by words where the ranks divide these; else every rank has all of them and computes alike."""
        words, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
        parts = self._sizes.tensor if self._divides_words else 1
        shared = Shared(self.groups.data, self._sizes.tensor // parts)

        def part_of(whole: nn.Parameter) -> nn.Parameter:
            part = nn.Parameter(whole.new_empty(len(whole) // parts, *whole.shape[1:]))
            group = self.groups.tensor if parts > 1 else None
            self._fill(Piece(whole.shape, ((part, as_it_is),), group), whole, shared)
            return part

        tied = head is words
        self.words = part_of(words)
        self.head = self.words if tied else part_of(head)

    def _take(self, source: nn.Parameter, here: nn.Parameter) -> None:
        """Every rank has the whole of it, and for some rows a gradient of its own."""
        self._fill(Piece(source.shape, ((here, as_it_is),)), source, Shared(self.groups.everyone))

    def _divide(self, here: nn.Parameter, sources: list[tuple[nn.Parameter, Any]], dim: int = 0) -> None:
        for source, view in sources:
            piece = Piece(source.shape, ((here, view),), self.groups.tensor, dim)
            self._fill(piece, source, Shared(self.groups.data))

    @torch.no_grad()
    def _fill(self, piece: Piece, source: nn.Parameter, shared: Shared) -> None:
        """Gives Megatron's parameters their values; what is left of the source is its shape."""
        piece.write(source, lambda parameter: parameter.data)
        for parameter, _ in piece.views:
            if parameter in self.shared and parameter.requires_grad != source.requires_grad:
                raise ModelError(
                    "trainer.backend megatron has queries, keys and values (gate and up) in one; they train together "
                    "or not at all"
                )
            parameter.requires_grad_(source.requires_grad)
            self.shared[parameter] = shared
        self.pieces[id(source)] = piece
        source.data = source.new_empty(()).expand(source.shape)


@torch.no_grad()
def divide(policy: Undivided, ranks: Ranks, trainer: TrainerConfig) -> MegatronDecoder:
    """See `MegatronDecoder`. Raises ModelError, too, when a forward through it is not that of the whole model."""
    module: Any = policy.module
    check_model(module, trainer)
    if policy.device.type not in DEVICES:
        raise ModelError(
            f"trainer.backend megatron needs a GPU, and the model is on {policy.device}; set trainer.backend: fsdp2"
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.config.vocab_size, (TRIED,), generator=generator).to(policy.device)
    positions = torch.arange(TRIED, device=policy.device)
    attention = PackedAttention(layout_of([TRIED], policy.device))
    given = {"input_ids": ids[None], "position_ids": positions[None]}
    own = policy.decoder(**given, use_cache=False, attention=attention).last_hidden_state
    made = MegatronDecoder(policy, ranks, trainer)
    theirs = made(ids, positions, attention)
    gap = float((own - theirs).abs().max() / own.abs().max())
    if not gap <= TOLERANCE[policy.dtype]:
        raise ModelError(
            f"{type(module).__name__}: hidden states by Megatron's layers differ from the model's own by {gap:.3g} of "
            f"the largest (allowed {TOLERANCE[policy.dtype]}); set trainer.backend: fsdp2"
        )
    return made


class _Norm(nn.Module):
    """RMSNorm as transformers computes it: Megatron's own without Transformer Engine knows no sequence parallel."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class _Attention(nn.Module):
    """Megatron's place for who sees whom, where the `AttentionContext` of the forward says it."""

    def __init__(self, *, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.index = layer_number - 1
        self.options: dict[str, Any] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: _Seen, **_: Any) -> Tensor:
        """[R + pad, 1, H * D] of queries, keys and values [R + pad, 1, H, D]."""
        seen, count = attention_mask, len(query)
        q, k, v = (x[: seen.rows].permute(1, 2, 0, 3) for x in (query, key, value))
        q, k = apply_rotary_pos_emb(q, k, seen.cos, seen.sin)
        out = seen.context.attend(self.index, q, k, v, **self.options)
        return F.pad(out.flatten(2).transpose(0, 1), (0, 0, 0, 0, 0, count - seen.rows))


@dataclass(frozen=True, slots=True)
class _Sizes:
    tensor: int  # ranks of a team
    heads: int
    keys: int  # key heads
    head: int  # numbers of a head


def _sizes(module: Any, trainer: TrainerConfig) -> _Sizes:
    config = module.config
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return _Sizes(trainer.tensor_parallel, heads, config.num_key_value_heads, head)


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


def _megatron() -> Any:
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


def _collection(core: Any, groups: Groups, trainer: TrainerConfig) -> Any:
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


def _layer_config(core: Any, module: Any, trainer: TrainerConfig, dtype: torch.dtype) -> Any:
    config, sizes = module.config, _sizes(module, trainer)
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


def _submodules(core: Any, *, sparse: bool, normed: bool) -> Any:
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
        core_attention=_Attention,
        linear_proj=row,
        q_layernorm=_Norm if normed else None,
        k_layernorm=_Norm if normed else None,
    )
    return core.TransformerLayerSubmodules(
        input_layernorm=_Norm,
        self_attention=core.ModuleSpec(
            module=core.attention.SelfAttention,
            params={"attn_mask_type": core.AttnMaskType.causal},
            submodules=attention,
        ),
        self_attn_bda=core.get_bias_dropout_add,
        pre_mlp_layernorm=_Norm,
        mlp=mlp,
        mlp_bda=core.get_bias_dropout_add,
    )
