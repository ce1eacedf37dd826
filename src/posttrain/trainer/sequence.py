"""One micro-batch over several ranks: Ulysses sequence parallelism (Jacobs et al. 2023).

Each of U ranks holds 1 / U of the rows, and so of the activations: embeddings, norms, MLPs and the head need nothing of
other rows. Only attention does; around it an all-to-all turns some rows of all heads into all rows of some heads, and
back. Which rows those are, and who sees whom, is up to the attention context of one rank, which works on all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.trainer.attention import AttentionContext
from posttrain.trainer.loading import ModelError
from posttrain.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share a micro-batch, and which of them this one is."""

    rank: int
    size: int
    group: Any

    @classmethod
    def of(cls, ranks: Ranks, size: int) -> SequenceGroup | None:
        """Neighbours in groups of `size`; every rank has to call it. None for groups of one."""
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size)
        return cls(ranks.rank % size, size, group)

    def check(self, module: nn.Module) -> None:
        """Raises ModelError for a model whose heads cannot be shared out."""
        config: Any = module.config
        config = config.get_text_config()
        heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        if heads % self.size or (keys % self.size and self.size % keys):
            raise ModelError(
                f"trainer.sequence_parallel = {self.size} cannot share out {heads} heads and {keys} key heads of "
                f"{type(module).__name__}; choose a divisor of both"
            )
        if any(name.endswith("sinks") for name, _ in module.named_parameters()):
            raise ModelError(
                f"{type(module).__name__} has attention sinks; trainer.sequence_parallel cannot split them"
            )

    def sum(self, values: Tensor) -> Tensor:
        """Of what each rank knows of a whole, 0 elsewhere: the whole. Gradients go to whoever knew."""
        return _Sum.apply(values, self.group)  # type: ignore[no-any-return]

    def own_rows(
        self, of_row: Tensor, rows: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor, AttentionContext]:
        """The token of each row of this rank, the row of each token here (-1: elsewhere), and their attention.

        of_row: [R] tokens by row, rows: [T] rows by token, for `context`, which sees all rows.
        """
        count = len(of_row)
        each = -(-count // self.size)
        first = self.rank * each
        padded = torch.cat([of_row, of_row[:1].expand(each * self.size - count)])  # computed, and left out by attention
        here = (rows >= first) & (rows < first + each)
        return padded[first : first + each], torch.where(here, rows - first, -1), _Ulysses(self, context, count)

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
