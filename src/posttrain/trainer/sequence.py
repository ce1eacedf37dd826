"""Sequence parallelism: one micro-batch over U ranks, each of which holds 1 / U of its rows, and so of the activations.

Embeddings, norms, MLPs and the head need nothing of other rows. Only attention does, in one of two ways:

Ulysses (Jacobs et al. 2023): an all-to-all turns some rows of all heads into all rows of some heads, and back. Which
rows those are, and who sees whom, is up to the attention context of one rank, which works on all rows.

Ring (Liu et al. 2023): keys and values of all rows come round, see `ring.py`; for more ranks than heads can be shared
out to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.packing import Batch
from posttrain.trainer.attention import AttentionContext, has_plain_scores
from posttrain.trainer.loading import ModelError
from posttrain.trainer.ranks import Ranks, TrainerConfig
from posttrain.trainer.ring import Ring, RingAttention, Rows


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share a micro-batch, and which of them this one is."""

    rank: int
    size: int
    group: Any
    parts: int = 1  # of every layer, of which this rank holds one
    kind: Literal["auto", "ulysses", "ring"] = "auto"

    @classmethod
    def of(cls, ranks: Ranks, config: TrainerConfig) -> SequenceGroup | None:
        """The group of this rank; None without sequence parallelism. Every rank has to call it.

        Members are neighbours or, with tensor parallelism, the nearest ranks that hold the same part of each layer.
        """
        size, apart = config.sequence_parallel, config.tensor_parallel
        if size == 1:
            return None
        firsts = [team + part for team in range(0, ranks.size, config.team) for part in range(apart)]
        members = [list(range(first, first + config.team, apart)) for first in firsts]
        group, _ = dist.new_subgroups_by_enumeration(members)
        return cls(ranks.rank // apart % size, size, group, apart, config.sequence_parallel_kind)

    def fitted(self, module: nn.Module) -> SequenceGroup:
        """With the kind that serves the model: Ulysses where its heads can be shared out, else the ring.

        Raises ModelError for one that neither serves, or not the kind that the config asks for.
        """
        config: Any = module.config
        config = config.get_text_config()
        name = type(module).__name__
        heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        heads, keys = heads // self.parts, keys // self.parts
        shares = not (heads % self.size or (keys % self.size and self.size % keys))
        if any(name.endswith("sinks") for name, _ in module.named_parameters()):
            raise ModelError(f"{name} has attention sinks; trainer.sequence_parallel cannot split them")
        if self.kind == "ulysses" and not shares:
            raise ModelError(
                f"trainer.sequence_parallel = {self.size} cannot share out {heads} heads and {keys} key heads of "
                f"{name}; choose a divisor of both, or trainer.sequence_parallel_kind: ring"
            )
        if self.kind == "ulysses" or (self.kind == "auto" and shares):
            return replace(self, kind="ulysses")
        if not has_plain_scores(module):
            raise ModelError(
                f"{name} caps its attention scores, which ring attention does not; choose a trainer.sequence_parallel "
                f"that divides {heads} heads and {keys} key heads"
            )
        return replace(self, kind="ring")

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the group tensors that each rank has filled in part, with 0 elsewhere.

        In the backward pass every rank gets the gradient of what it filled in.
        """
        return _Sum.apply(values, self.group)  # type: ignore[no-any-return]

    def own_rows(
        self, batch: Batch, of_row: Tensor, rows: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor, AttentionContext]:
        """(token of each row of this rank, row of each token on this rank or -1, attention context of its rows)

        of_row: [R] token of each row and rows: [T] row of each token in the layout of `context`, which has all rows.
        """
        count = len(of_row)
        each = -(-count // self.size)
        if self.kind == "ring":
            each += each % 2
            known = Rows.of(batch, of_row, rows).padded(each * self.size)
            order, place = balanced(self.size, each, of_row.device)
            context = RingAttention(Ring(self.rank, self.size, self.group), [known[o] for o in order.split(each)])
        else:
            order = place = torch.arange(each * self.size, device=of_row.device)
            context = _Ulysses(self, context, count)
        padded = torch.cat([of_row, of_row[:1].expand(each * self.size - count)])  # computed, and left out by attention
        first, rows = self.rank * each, place[rows]
        here = (rows >= first) & (rows < first + each)
        return padded[order[first : first + each]], torch.where(here, rows - first, -1), context

    def to_heads(self, x: Tensor) -> Tensor:
        """[1, H, R / U, D] -> [1, H / U, R, D]; of fewer heads than ranks several get the same."""
        if x.shape[1] < self.size:
            x = x.repeat_interleave(self.size // x.shape[1], dim=1)
        parts = _Exchange.apply(x[0].unflatten(0, (self.size, -1)), self.group)  # by rank whose rows they are
        return parts.transpose(0, 1).flatten(1, 2)[None]

    def to_rows(self, x: Tensor) -> Tensor:
        """[1, R, H / U, D] -> [1, R / U, H, D]"""
        parts = _Exchange.apply(x[0].unflatten(0, (self.size, -1)), self.group)  # by rank whose heads they are
        return parts.transpose(0, 1).flatten(1, 2)[None]


def balanced(ranks: int, each: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """([R] rows in the order of the ranks that hold `each`, [R] the place of each row in that order).

    A rank holds a stretch from the front and one from the back, so that of a long segment all see as many keys.
    """
    stretches = torch.arange(ranks * each, device=device).view(2 * ranks, each // 2)
    order = torch.stack([stretches[:ranks], stretches[ranks:].flip(0)], dim=1).flatten()
    return order, order.argsort()


@dataclass(frozen=True, slots=True)
class _Ulysses:
    """An `AttentionContext` for the rows of one rank; `inner` is that of all `count` rows."""

    ranks: SequenceGroup
    inner: AttentionContext
    count: int

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        qkv = (self.ranks.to_heads(x)[:, :, : self.count] for x in (query, key, value))
        out = self.inner.attend(layer_idx, *qkv, **options)
        missing = query.shape[2] * self.ranks.size - self.count
        return self.ranks.to_rows(nn.functional.pad(out, (0, 0, 0, 0, 0, missing)))


class _Exchange(torch.autograd.Function):
    """[U, ..]: the j-th part goes to rank j; what comes back is by rank, too. Its own inverse, and its own backward."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, parts.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


class _Sum(torch.autograd.Function):
    """See `SequenceGroup.sum`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        out = values.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
