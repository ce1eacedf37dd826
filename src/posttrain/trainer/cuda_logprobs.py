"""Triton kernels for `fused.py` on a GPU: a chunk of logits is read once forward, and once backward, in place.

Forward leaves log-prob, log-sum-exp and entropy of every row; backward turns the logits, computed again, into their own
gradient. Logits stay in the model's dtype; every sum is in float32. Equations: see `fused.py`.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.trainer.fused import Scaling, add_product, chunks, head_product

BLOCK = 4096  # tokens of the vocabulary at a time


class CudaLogprobs(torch.autograd.Function):
    """`FusedLogprobs` with these kernels."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, scaling: Scaling, with_entropy: bool):
        ctx.scaling = scaling
        ctx.set_materialize_grads(False)
        parts = [
            row_statistics(head_product(hidden[s], weight, bias), targets[s], scaling, with_entropy=with_entropy)
            for s in chunks(hidden.shape[0], scaling.rows)
        ]
        statistics = torch.cat(parts, dim=1) if parts else hidden.new_empty(3, 0, dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, bias, targets, statistics)
        return statistics[0].clone(), statistics[2].clone() if with_entropy else statistics.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad_logprobs, grad_entropy):  # type: ignore[override]
        hidden, weight, bias, targets, statistics = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for s in chunks(hidden.shape[0], ctx.scaling.rows):
            grads = [None if grad is None else grad[s] for grad in (grad_logprobs, grad_entropy)]
            d_z = head_product(hidden[s], weight, bias)
            logits_to_gradient(d_z, targets[s], statistics[:, s].contiguous(), (grads[0], grads[1]), ctx.scaling)
            if d_hidden is not None:
                torch.mm(d_z, weight, out=d_hidden[s])
            if d_weight is not None:
                add_product(d_weight, d_z.T, hidden[s])
            if d_bias is not None:
                d_bias += d_z.sum(0, dtype=torch.float32)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def row_statistics(
    raw: Tensor,  # [n, V] h W^T
    targets: Tensor,  # [n] long
    scaling: Scaling,
    *,
    with_entropy: bool,
) -> Tensor:  # [3, n] float32: log-prob of the target, log-sum-exp, entropy (0 unless asked for)
    out = torch.empty(3, raw.shape[0], dtype=torch.float32, device=raw.device)
    _statistics[(raw.shape[0],)](
        raw, targets, out, raw.shape[1], raw.stride(0), out.stride(0), *_numbers(scaling),
        SOFTCAP=scaling.rule.softcap is not None, ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out


def logits_to_gradient(
    raw: Tensor,  # [n, V] h W^T; becomes its gradient
    targets: Tensor,
    statistics: Tensor,  # [3, n] of `row_statistics`
    gradients: tuple[Tensor | None, Tensor | None],  # [n] float32, of log-prob and entropy
    scaling: Scaling,
) -> None:
    grads = torch.stack([statistics.new_zeros(raw.shape[0]) if g is None else g for g in gradients])
    _gradient[(raw.shape[0], triton.cdiv(raw.shape[1], BLOCK))](
        raw, targets, statistics, grads, raw.shape[1], raw.stride(0), raw.shape[0], *_numbers(scaling),
        SOFTCAP=scaling.rule.softcap is not None, ENTROPY=gradients[1] is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def _numbers(scaling: Scaling) -> tuple[float, float, float]:
    return scaling.rule.scale, scaling.rule.softcap or 1.0, 1 / scaling.temperature


@triton.jit
def _capped(z, softcap):
    """softcap * tanh(z / softcap)"""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))


@triton.jit
def _statistics(
    raw, targets, out, size, stride, out_stride, scale, softcap, cold,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. Online: top, sum of exp(z - top), sum of exp(z - top) * z."""
    row = tl.program_id(0)
    start_of_row = raw + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        z = tl.load(start_of_row + token, mask=token < size, other=float("-inf")).to(tl.float32) * scale
        if SOFTCAP:
            z = tl.where(token < size, _capped(z, softcap), float("-inf"))
        z = z * cold
        higher = tl.maximum(tops, z)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp(tops - safe), tl.exp(z - safe)
        sums = sums * shrink + weight
        if ENTROPY:
            weighted = weighted * shrink + tl.where(weight > 0, weight * z, 0.0)
        tops = higher
    top = tl.max(tops, 0)
    shrink = tl.exp(tops - top)
    total = tl.sum(sums * shrink, 0)
    lse = top + tl.log(total)
    chosen = tl.load(start_of_row + target).to(tl.float32) * scale
    if SOFTCAP:
        chosen = _capped(chosen, softcap)
    tl.store(out + row, chosen * cold - lse)
    tl.store(out + out_stride + row, lse)
    entropy = 0.0
    if ENTROPY:
        entropy = lse - tl.sum(weighted * shrink, 0) / total
    tl.store(out + 2 * out_stride + row, entropy)


@triton.jit
def _gradient(
    raw, targets, statistics, grads, size, stride, rows, scale, softcap, cold,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row: logits out, gradient in."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = raw + row.to(tl.int64) * stride + token
    z = tl.load(place, mask=token < size, other=float("-inf")).to(tl.float32) * scale
    slope = scale * cold
    if SOFTCAP:
        z = _capped(z, softcap)
        ratio = z / softcap
        slopes = (1.0 - ratio * ratio) * slope
    z = z * cold
    logp = z - tl.load(statistics + rows + row)
    p = tl.exp(logp)
    grad_logprob = tl.load(grads + row)
    grad = tl.where(token == tl.load(targets + row), grad_logprob, 0.0) - grad_logprob * p
    if ENTROPY:
        entropy = tl.load(statistics + 2 * rows + row)
        grad -= tl.load(grads + rows + row) * tl.where(p > 0, p * (logp + entropy), 0.0)
    if SOFTCAP:
        grad *= slopes
    else:
        grad *= slope
    tl.store(place, grad.to(raw.dtype.element_ty), mask=token < size)
