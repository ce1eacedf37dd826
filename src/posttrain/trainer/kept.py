"""Fused log-probs on a CPU where the probabilities of all positions are small enough to be kept for the backward pass.

Computing the logits again costs a quarter more products and three more passes over them; that is worth its memory on a
device whose memory is short. Here blocks of rows are worked on while they are in the cache. Equations: see `fused.py`;
e = exp(z - max z) is kept, not yet divided by its sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.numba_code import numba_code
from posttrain.trainer.compiled_attention import takes

KEEP_AT_MOST = 1 << 24  # probabilities of a micro-batch: 64 MiB of float32
BLOCK = 1 << 19  # probabilities worked on at once: 2 MiB of float32, and not fewer than 64 rows

Head = tuple[Tensor, Tensor | None]  # weight and bias
Found = tuple[Tensor, Tensor, Tensor]  # sums of exponentials, log-probs, entropies


def worth_keeping(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `KeptLogprobs` can serve these inputs, without soft caps."""
    exact = hidden.dtype is weight.dtype and hidden.dtype in {torch.float32, torch.float64}
    size = hidden.shape[0] * weight.shape[0]
    return hidden.device.type == "cpu" and exact and size <= KEEP_AT_MOST and torch.is_grad_enabled()


class KeptLogprobs(torch.autograd.Function):
    """([N] log-probs, [N] entropies or nothing) for z = factor * (h W^T + b)."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, factor: float, with_entropy: bool):
        exponentials = hidden.new_empty(hidden.shape[0], weight.shape[0])
        sums, logprobs = hidden.new_empty(hidden.shape[0]), hidden.new_empty(hidden.shape[0])
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        passes = _passes(hidden, factor)
        for s in _blocks(hidden, weight):
            found = (sums[s], logprobs[s], entropy[s])
            passes.take(hidden[s], (weight, bias), targets[s], exponentials[s], found)
        ctx.save_for_backward(hidden, weight, bias, targets, exponentials, sums)
        ctx.factor, ctx.passes = factor, passes
        ctx.set_materialize_grads(False)  # an output that no loss reads costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs, grad_entropy):  # type: ignore[override]
        hidden, weight, bias, targets, exponentials, sums = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight) if wanted[1] else None
        d_bias = torch.zeros_like(bias) if wanted[2] else None
        grad = torch.zeros_like(sums) if grad_logprobs is None else grad_logprobs * ctx.factor
        for s in _blocks(hidden, weight):
            d_z = ctx.passes.give(exponentials[s], targets[s], sums[s], grad[s])
            if grad_entropy is not None:
                _add_entropy_gradient(d_z, exponentials[s], sums[s], grad_entropy[s] * ctx.factor)
            if d_hidden is not None:
                torch.mm(d_z, weight, out=d_hidden[s])
            if d_weight is not None:
                d_weight.addmm_(d_z.T, hidden[s])
            if d_bias is not None:
                d_bias += d_z.sum(0)
        return d_hidden, d_weight, d_bias, None, None, None


@dataclass(frozen=True, slots=True)
class TorchPasses:
    """What is done to a block of logits."""

    factor: float

    def take(self, hidden: Tensor, head: Head, targets: Tensor, exponentials: Tensor, found: Found) -> None:
        """Fills in the last two; of `found` entropies only if there is room for them."""
        sums, logprobs, entropy = found
        z = _logits(hidden, *head, self.factor)
        z.sub_(z.amax(-1, keepdim=True))
        torch.exp(z, out=exponentials)
        torch.sum(exponentials, -1, out=sums)
        lse = sums.log()
        logprobs.copy_(z.gather(-1, targets[:, None])[:, 0] - lse)
        if len(entropy):
            entropy.copy_(lse - z.mul_(exponentials).sum(-1).div_(sums))

    def give(self, exponentials: Tensor, targets: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
        """The gradient of z."""
        d_z = exponentials * (-grad / sums)[:, None]
        return d_z.scatter_add_(-1, targets[:, None], grad[:, None])


@dataclass(frozen=True, slots=True)
class CompiledPasses:
    """The same in a pass each (`logprobs_numba.py`)."""

    factor: float

    def take(self, hidden: Tensor, head: Head, targets: Tensor, exponentials: Tensor, found: Found) -> None:
        weight, bias = head
        if bias is None:
            torch.mm(hidden, weight.T, out=exponentials)
        else:
            torch.addmm(bias, hidden, weight.T, out=exponentials)
        arrays = [part.numpy() for part in (exponentials, targets, *found)]
        _kernels().take_logprobs(*arrays[:2], np.float32(self.factor), *arrays[2:])

    def give(self, exponentials: Tensor, targets: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
        d_z = torch.empty_like(exponentials)
        _kernels().give_logits(*(part.numpy() for part in (exponentials, targets, sums, grad, d_z)))
        return d_z


def _passes(hidden: Tensor, factor: float) -> TorchPasses | CompiledPasses:
    return CompiledPasses(factor) if factor > 0 and takes(hidden) else TorchPasses(factor)


def _kernels() -> Any:
    return numba_code("posttrain.trainer.logprobs_numba")


def _add_entropy_gradient(d_z: Tensor, exponentials: Tensor, sums: Tensor, grad: Tensor) -> None:
    """d_z -= grad * p * (log p + entropy); p log p is 0 where p is."""
    p = exponentials / sums[:, None]
    logp = p.clamp_min(torch.finfo(p.dtype).tiny).log_()
    entropy = -(p * logp).sum(-1, keepdim=True)
    d_z.sub_(logp.add_(entropy).mul_(p).mul_(grad[:, None]))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    if bias is not None:
        return torch.addmm(bias, hidden, weight.T, beta=factor, alpha=factor)
    z = torch.mm(hidden, weight.T)
    return z if factor == 1.0 else z.mul_(factor)


def _blocks(hidden: Tensor, weight: Tensor) -> list[slice]:
    rows = max(64, BLOCK // weight.shape[0])
    return [slice(start, min(start + rows, len(hidden))) for start in range(0, len(hidden), rows)]
