"""Megatron-core (Shoeybi et al. 2019; Korthikanti et al. 2022) in the place of FSDP2: its layers, divided among ranks.

Layers, projections, mixture of experts and their communication are Megatron's: tensor parallel with its sequence
parallel between the layers, and expert parallel. Attention, rotary positions, embedding lookup rules and the head's
log-probs are those of every other backend, so that packed rows and shared prefixes go on as they do there. No pipeline:
its schedules own the loop over micro-batches, which here is the trainer's.

The module in Hugging Face layout stays: it has the names, the config and a shape for every weight, but no weights. Who
needs one is given it for a moment (`Policy.at_hand`), put together from the ranks that have its parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.trainer.attention import AttentionContext, PackedAttention, layout_of
from posttrain.trainer.distributed_optimizer import DistributedOptimizer, Piece, Shared, as_it_is
from posttrain.trainer.fused import LogitsRule, fused_logprobs
from posttrain.trainer.loading import ModelError
from posttrain.trainer.megatron_core import (
    Norm,
    Seen,
    check_model,
    collection,
    layer_config,
    megatron_core,
    sizes_of,
    submodules_of,
)
from posttrain.trainer.megatron_layout import Groups, half_view, heads_view, stacked_view
from posttrain.trainer.optimizer import OptimizerConfig
from posttrain.trainer.ranks import Ranks, TrainerConfig
from posttrain.trainer.vocabulary import Team, team_logprobs

DEVICES = ("cuda",)  # that its layers ask for by name
TRIED = 9  # tokens on which both have to agree before the run starts
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the norm of hidden states


class Undivided(Protocol):
    """What is needed of a policy."""

    module: nn.Module
    decoder: nn.Module

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


class MegatronDecoder(nn.Module):
    """The decoder and the head of `policy.module` as Megatron's layers, of which this rank has its part.

    Takes the weights out of the module, layer by layer; every rank has to make one. For a model that `check_model` lets
    pass.
    """

    def __init__(self, policy: Undivided, ranks: Ranks, trainer: TrainerConfig) -> None:
        super().__init__()
        module: Any = policy.module
        self._core = megatron_core()
        self.groups = Groups.of(ranks, trainer)
        self._sizes = sizes_of(module, trainer)
        self._plan = layer_config(self._core, module, trainer, policy.dtype)
        self._process_groups = collection(self._core, self.groups, trainer)
        self._device = policy.device
        self._recomputes = any(getattr(part, "gradient_checkpointing", False) for part in policy.decoder.modules())
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = policy.decoder.rotary_emb  # type: ignore[assignment]
        self._divides_words = len(module.get_input_embeddings().weight) % trainer.tensor_parallel == 0
        self.pieces: dict[int, Piece] = {}  # by the id of the parameter of the module
        self.shared: dict[nn.Parameter, Shared] = {}  # of every parameter here
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it lacks, and that experts are not cut
            self.layers = nn.ModuleList(
                self._layer(number, layer)
                for number, layer in enumerate(policy.decoder.layers)  # type: ignore[arg-type]
            )
        norm = Norm(config=self._plan, hidden_size=self._plan.hidden_size, eps=self._plan.layernorm_epsilon)
        self.norm = norm.to(self._device)
        self._take(policy.decoder.norm.weight, self.norm.weight)  # type: ignore[union-attr, arg-type]
        self._take_vocabulary(module)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """[1, R, K] last hidden states of one row of R tokens."""
        rows = len(token_ids)
        padded = F.pad(token_ids, (0, -rows % self._sizes.tensor))
        x = self._embedded(padded)
        cos, sin = self._rotary(x, position_ids=positions[None])
        seen = Seen(attention, cos, sin, rows)
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

    def optimizer(
        self, named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, total_steps: int | None
    ) -> DistributedOptimizer:
        """Of the trainable parameters of the module."""
        return DistributedOptimizer(named, config, total_steps, shared=self.shared, pieces=self.pieces)

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
    def at_hand(self, value: Tensor) -> Iterator[None]:
        """A context in which a parameter of the module holds its whole weight; every rank has to enter it."""
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
        submodules = submodules_of(self._core, sparse=sparse, normed=hasattr(source.self_attn, "q_norm"))
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
    gap = float((own - theirs).float().norm() / own.float().norm())
    if not gap <= TOLERANCE[policy.dtype]:
        raise ModelError(
            f"{type(module).__name__}: hidden states by Megatron's layers differ from the model's own by {gap:.3g} of "
            f"their norm (allowed {TOLERANCE[policy.dtype]}); set trainer.backend: fsdp2"
        )
    return made
