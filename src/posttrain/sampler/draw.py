"""Logits -> sampled ids and their log-probs: inverse CDF with one given uniform number per row.

The log-prob of a row is that of the very distribution it was drawn from (temperature, and truncation where allowed), in
float32 like the trainer's. Knows nothing of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # tokens per block of the two-level search
ONE_LEVEL = 512  # vocabularies up to this size are searched in one go


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How each of n rows is drawn. None stands for the plain case on every row."""

    temperature: Tensor | None = None  # [n, 1] float32; greedy rows hold 1
    greedy: Tensor | None = None  # [n] bool
    top_k: Tensor | None = None  # [n, 1] long; V where off
    top_p: Tensor | None = None  # [n, 1] float32; 1 where off


def draw(logits: Tensor, uniforms: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    """([n] ids, [n] log-probs) of float32 `logits` [n, V], which are overwritten, and float64 `uniforms` [n]."""
    z = logits if settings.temperature is None else logits.div_(settings.temperature)
    if settings.top_k is not None or settings.top_p is not None:
        z = truncate(z, settings.top_k, settings.top_p)
    top = z.amax(-1, keepdim=True)
    weights = (z - top).exp_()
    ids, total = inverse_cdf(weights, uniforms)
    if settings.greedy is not None:
        ids = torch.where(settings.greedy, z.argmax(-1), ids)
    chosen = z.gather(-1, ids[:, None]) - top
    return ids, chosen[:, 0] - total.log().to(z.dtype)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """([n] index whose cumulative weight first exceeds uniform * total, [n] float64 total), weights [n, V] >= 0.

    Large vocabularies are searched in two levels, blocks and then one block: a running sum over all of V in float32
    would drift by 1e-5, in float64 it would cost more than the rest of sampling.
    """
    count, size = weights.shape
    if size <= ONE_LEVEL:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1]
        return _search(cumulative, uniforms * total), total
    padded = torch.nn.functional.pad(weights, (0, -size % BLOCK)) if size % BLOCK else weights
    blocks = padded.view(count, -1, BLOCK)
    masses = blocks.sum(-1)
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = uniforms * total
    block = _search(cumulative, target)
    before = cumulative.gather(-1, block[:, None])[:, 0] - masses.gather(-1, block[:, None])[:, 0]
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0]
    token = _search(inside.cumsum(-1, dtype=torch.float64), target - before)
    return (block * BLOCK + token).clamp_max(size - 1), total


def _search(cumulative: Tensor, target: Tensor) -> Tensor:
    """[n] first index with cumulative > target, [n, V] float64. Rounding can push the target out of [0, total): it is
    brought back, so that an index without weight is never taken. (NaN rows give some index; the log-prob is NaN.)"""
    below_total = cumulative[:, -1] * (1 - 2.0**-52)
    target = target.clamp_min(0.0).minimum(below_total)
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return index.clamp_max(cumulative.shape[-1] - 1)


def truncate(z: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """[n, V] with -inf outside the top k and then outside the smallest set of mass >= top_p; ties by lower id.

    The first token is always kept.
    """
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(z.shape[-1], device=z.device)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        keep &= rank < top_k
    if top_p is not None:
        probs = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= (probs.cumsum(-1, dtype=torch.float64) - probs) < top_p  # mass before the token: it is needed until p
    keep[:, 0] = True
    return z.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -torch.inf)
