"""The shared prefix on a GPU: as in `prefix.py`, without padding, through FlashAttention on packed rows.

The first segment of a family is computed whole, the others from where they differ. Keys and values are laid out for
every segment whole (they are small beside everything else), queries are not: FlashAttention aligns a shorter sequence
of queries with the end of its keys.

    tokens  | p p p a a | p p p b b b |        rows  | p p p a a | b b b |        keys  | p p p a a | p p p b b b |
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.packing import Batch, families_of
from posttrain.trainer.flash_attention import packed_flash_attention


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """R rows for T tokens of S segments; tensors on the device."""

    token_of_row: Tensor  # [R] long
    row_of_token: Tensor  # [T] long: shared tokens have one row
    shared_rows: Tensor  # [P] long: rows that several tokens have, P >= 2, n >= 2: compilers take 0 and 1 for special
    tokens_of_shared: Tensor  # [P, n] long: these tokens; T where a row has fewer than n
    query_ends: Tensor  # [S + 1] int32
    key_ends: Tensor  # [S + 1] int32
    longest_query: int
    longest_key: int

    def rows_to_tokens(self, rows: Tensor) -> Tensor:
        """[R, ..] -> [T, ..]"""
        return RowsToTokens.apply(  # type: ignore[no-any-return]
            rows, self.row_of_token, self.token_of_row, self.shared_rows, self.tokens_of_shared
        )


def varlen_layout(batch: Batch, device: torch.device) -> VarlenLayout:
    lengths, total = batch.lengths, len(batch)
    starts = [0, *accumulate(lengths)]
    skipped, owners = [0] * len(lengths), list(range(len(lengths)))  # first tokens that stand in an owner's rows
    sharers: list[tuple[int, list[int]]] = []  # prefix length, starts of the segments
    for family in families_of(batch):
        if family.prefix:
            sharers.append((family.prefix, [starts[s] for s in family.segments]))
            for segment in family.segments[1:]:
                skipped[segment], owners[segment] = family.prefix, family.segments[0]
    queries = [length - skip for length, skip in zip(lengths, skipped, strict=True)]
    rows = [0, *accumulate(queries)]  # where those of a segment begin
    own = np.arange(total)  # slices of arrays: those of tensors take ten times as long
    spans = [
        span
        for s, skip in enumerate(skipped)
        for span in (own[rows[owners[s]] : rows[owners[s]] + skip], own[rows[s] : rows[s + 1]])
    ]
    row_of_token = torch.from_numpy(np.concatenate(spans))
    if sharers:
        widest = max(len(firsts) for _, firsts in sharers)
        tokens_of_shared = torch.cat([_tokens_of(prefix, firsts, widest, total) for prefix, firsts in sharers])
    else:  # two rows that are shared by nobody, or the only one twice
        tokens_of_shared = torch.tensor([[0, total], [min(1, total - 1), total]])
    token_of_row = torch.from_numpy(np.concatenate([own[starts[s] + k : starts[s + 1]] for s, k in enumerate(skipped)]))
    return VarlenLayout(
        token_of_row=token_of_row.to(device, non_blocking=True),
        row_of_token=row_of_token.to(device, non_blocking=True),
        shared_rows=row_of_token[tokens_of_shared[:, 0]].to(device, non_blocking=True),
        tokens_of_shared=tokens_of_shared.to(device, non_blocking=True),
        query_ends=_ends(queries, device),
        key_ends=_ends(lengths, device),
        longest_query=max(queries),
        longest_key=max(lengths),
    )


def _tokens_of(prefix: int, firsts: list[int], widest: int, nobody: int) -> Tensor:
    """[prefix, widest] tokens that are the same row, for segments that begin at `firsts`; `nobody` beyond them."""
    tokens = torch.arange(prefix)[:, None] + torch.tensor(firsts)
    return F.pad(tokens, (0, widest - len(firsts)), value=nobody)


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device, non_blocking=True)


@dataclass(slots=True)
class VarlenAttention:
    """CUDA, half precision, head size <= 256; see `use_varlen`."""

    traceable: ClassVar[bool] = True
    layout: VarlenLayout
    version: int  # of FlashAttention

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [1, H, R, D]
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [1, R, H, D]
        if softcap is not None or sinks is not None:
            raise NotImplementedError("varlen attention lacks soft caps and sinks; use_varlen tells when to use it")
        layout = self.layout
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        k, v = layout.rows_to_tokens(k), layout.rows_to_tokens(v)
        out = packed_flash_attention(
            (q, k, v),
            (layout.query_ends, layout.key_ends),
            (layout.longest_query, layout.longest_key),
            scaling=scaling,
            window=sliding_window,
            version=self.version,
        )
        return out[None]


class RowsToTokens(torch.autograd.Function):
    """See `VarlenLayout`. The gradient of a shared row is the float32 sum over its tokens, in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        row_of_token: Tensor,
        token_of_row: Tensor,
        shared_rows: Tensor,
        tokens_of_shared: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(token_of_row, shared_rows, tokens_of_shared)
        return rows.index_select(0, row_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        token_of_row, shared_rows, tokens_of_shared = ctx.saved_tensors
        grad_rows = grad.index_select(0, token_of_row)
        padded = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
        of_shared = padded[tokens_of_shared].float().sum(1).to(grad.dtype)
        return grad_rows.index_copy(0, shared_rows, of_shared), None, None, None, None
