"""Exact causal attention on a CPU, forward and backward, a block of queries at a time.

Queries may stand behind a prefix that is only keys and values. Grouped queries share their key head's product. Scores
are never held for more than one block and are computed again in the backward pass. Unlike torch's own kernel it takes
queries behind a prefix without a mask of queries x keys.

    S = scaling * Q K^T,  P = softmax(S over visible keys),  O = P V
    dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(P * dP)),  dQ = scaling * dS K,  dK = scaling * dS^T Q
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 64  # queries of a head at a time; what causality throws away is at most half of a block squared
SCORES_AT_ONCE = 1 << 18  # of all heads and sequences: 1 MiB, which stays in the cache


def causal_attention(
    query: Tensor,  # [N, H, L, D]
    key: Tensor,  # [N, Hkv, P + L, D]; the last L stand at the queries' own places
    value: Tensor,  # [N, Hkv, P + L, Dv]
    *,
    scaling: float,
    window: int | None = None,  # a query sees this many keys, its own included; None = all before it
    read: Tensor | None = None,  # [N, L] bool: where the result is read; elsewhere it may be 0
) -> Tensor:
    """[N, H, L, Dv], differentiable in query, key and value."""
    return CausalAttention.apply(query, key, value, scaling, window, read)  # type: ignore[no-any-return]


class CausalAttention(torch.autograd.Function):
    """See the module's docstring for the equations."""

    @staticmethod
    def forward(ctx: Any, query, key, value, scaling: float, window: int | None, read: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling, ctx.window, ctx.read = scaling, window, read
        q, k, v = _by_key_head(query, key, value)
        out = q.new_zeros(*q.shape[:3], v.shape[-1])
        for block in _blocks(q, k, window, read):
            block.put(out, torch.bmm(block.weights(scaling), block.keys(v)))
        return _by_query_head(out, query.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        q, k, v = _by_key_head(query, key, value)
        d_out = _grouped(grad_out, key.shape[1])
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in _blocks(q, k, ctx.window, ctx.read):
            weights = block.weights(ctx.scaling)
            d_o = block.take(d_out)
            block.keys(d_v).baddbmm_(weights.transpose(1, 2), d_o)
            d_weights = torch.bmm(d_o, block.keys(v).transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            block.put(d_q, torch.bmm(d_scores, block.keys(k)).mul_(ctx.scaling))
            block.keys(d_k).baddbmm_(d_scores.transpose(1, 2), block.queries, alpha=ctx.scaling)
        return _by_query_head(d_q, query.shape[1]), d_k.view_as(key), d_v.view_as(value), None, None, None


class _Block:
    """`first..last` of the queries of some (sequence, key head) pairs, and the keys that any of them sees."""

    def __init__(self, q: Tensor, k: Tensor, pairs: slice, span: tuple[int, int], window: int | None) -> None:
        self._pairs = pairs
        self._first, self._last = span
        self._key_tensor = k
        offset = k.shape[1] - q.shape[2]  # keys before the first query
        self._ends = offset + self._last
        self._low = 0 if window is None else max(0, offset + self._first - window + 1)
        self._offset, self._window = offset, window
        self.queries = self.take(q)

    def take(self, rows: Tensor) -> Tensor:
        """[B, group, L, d] -> [b, group * block, d]"""
        return rows[self._pairs, :, self._first : self._last].flatten(1, 2)

    def put(self, rows: Tensor, part: Tensor) -> None:
        """The reverse of `take`."""
        target = rows[self._pairs, :, self._first : self._last]
        target.copy_(part.view_as(target))

    def keys(self, tensor: Tensor) -> Tensor:
        """[B, P + L, d] -> [b, visible keys, d], a view"""
        return tensor[self._pairs, self._low : self._ends]

    def weights(self, scaling: float) -> Tensor:
        """[b, group * block, visible keys]"""
        keys = self.keys(self._key_tensor)
        empty = self.queries.new_empty(1)
        scores = torch.baddbmm(empty, self.queries, keys.transpose(1, 2), beta=0, alpha=scaling)
        count = self._last - self._first
        by_query = scores.view(len(scores), -1, count, scores.shape[-1])
        diagonal = by_query[..., -count:]  # the keys at the block's own places: the only ones that can be ahead
        diagonal += torch.full((count, count), -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
        if self._window is not None and self._ends - self._low > self._window:
            place = torch.arange(self._offset + self._first, self._ends, device=scores.device)
            behind = place[:, None] - torch.arange(self._low, self._ends, device=scores.device)
            by_query.masked_fill_(behind >= self._window, -torch.inf)
        return torch.softmax(scores, -1)


def _blocks(q: Tensor, k: Tensor, window: int | None, read: Tensor | None) -> Iterator[_Block]:
    """Blocks of at most QUERY_BLOCK queries and about SCORES_AT_ONCE scores; none where nothing is read."""
    pairs, group, length, _ = q.shape
    by_pair = None if read is None else read.repeat_interleave(pairs // len(read), dim=0)
    for first in range(0, length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, length)
        scores = group * (last - first) * (k.shape[1] - length + last)
        at_once = max(1, SCORES_AT_ONCE // scores)
        for start in range(0, pairs, at_once):
            some = slice(start, min(start + at_once, pairs))
            if by_pair is None or by_pair[some, first:last].any():
                yield _Block(q, k, some, (first, last), window)


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """([N * Hkv, H / Hkv, L, D], [N * Hkv, P + L, D], [N * Hkv, P + L, Dv]), contiguous."""
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (key, value))
    return _grouped(query, key.shape[1]), k, v


def _grouped(rows: Tensor, key_heads: int) -> Tensor:
    """[N, H, L, d] -> [N * Hkv, H / Hkv, L, d]"""
    count, heads, length, dim = rows.shape
    return rows.reshape(count * key_heads, heads // key_heads, length, dim)


def _by_query_head(rows: Tensor, heads: int) -> Tensor:
    """[N * Hkv, H / Hkv, L, d] -> [N, H, L, d]"""
    return rows.view(-1, heads, *rows.shape[2:])
