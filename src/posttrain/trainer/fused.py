"""Hidden states -> log-prob of the target (and entropy), a chunk of positions at a time, forward and backward.

The [N, V] logits are never held at once: a chunk's logits live while it is worked on and are computed again in the
backward pass. Sums are in float32 whatever the dtype of the model. Not here: which positions count.

    z = cap * tanh(scale * (h W^T + b) / cap) / temperature         (scale 1, no cap: most models)
    logprob = z_y - lse(z),      entropy = lse(z) - sum_v p_v z_v
    d logprob / dz_v = 1[v = y] - p_v,      d entropy / dz_v = -p_v (log p_v + entropy)
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from posttrain.trainer.kept import KeptLogprobs, worth_keeping

LOGITS_PER_CHUNK = 1 << 24  # 64 MiB of float32 logits; a chunk has at least one position
LOGITS_PER_CUDA_CHUNK = 1 << 28  # there every chunk passes once over a gradient of the size of the head
VOCABULARY_BLOCK = 1024  # on a CPU: this many rows of the head stay in a core's cache while they meet all positions


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """What a model does to `h W^T` before it calls it logits."""

    scale: float = 1.0  # Cohere's logit_scale, 1 / Granite's logits_scaling
    softcap: float | None = None  # Gemma-2's final_logit_softcapping

    def apply(self, logits: Tensor) -> Tensor:
        """[.., V] in, float32 [.., V] out."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def fused_logprobs(
    hidden: Tensor,  # [N, K]
    weight: Tensor,  # [V, K]
    bias: Tensor | None,  # [V]
    targets: Tensor,  # [N] long
    *,
    temperature: float = 1.0,
    rule: LogitsRule | None = None,
    with_entropy: bool = False,
    logits_per_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """([N] log-probs of the targets, [N] entropies or None): float32 (float64 for float64 input), differentiable."""
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0 to have log-probs, got {temperature} (greedy sampling reports T=1)")
    if logits_per_chunk is None and (rule is None or rule.softcap is None) and worth_keeping(hidden, weight):
        factor = (1.0 if rule is None else rule.scale) / temperature
        kept = KeptLogprobs.apply(hidden, weight, bias, targets, factor, with_entropy)
        return kept[0], kept[1] if with_entropy else None  # type: ignore[index]
    rows = rows_per_chunk(hidden, weight.shape[0], logits_per_chunk)
    scaling = Scaling(temperature, rule or LogitsRule(), rows)
    function = implementation_for(hidden.device)
    logprobs, entropy = function.apply(hidden, weight, bias, targets, scaling, with_entropy)  # type: ignore[misc]
    return logprobs, entropy if with_entropy else None


def rows_per_chunk(hidden: Tensor, vocabulary: int, logits: int | None = None) -> int:
    """Positions worked on at once. logits: as many at a time instead of as many as serve the device."""
    return max(1, (logits or (LOGITS_PER_CUDA_CHUNK if hidden.is_cuda else LOGITS_PER_CHUNK)) // vocabulary)


def implementation_for(device: torch.device) -> type[torch.autograd.Function]:
    """Triton's kernels where they run; they come with torch's builds for CUDA only."""
    if device.type != "cuda" or find_spec("triton") is None:
        return FusedLogprobs
    from posttrain.trainer.cuda_logprobs import CudaLogprobs

    return CudaLogprobs


def head_product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[.., V] h W^T + b, for [.., K] hidden states, in their dtype.

    On a CPU a large head is taken a block of rows at a time: for few positions one product over all of them is bound
    by memory (16 x 640 x 262,144 in float32 on one core: 168 ms, in blocks 114 ms).
    """
    size = weight.shape[0]
    if hidden.device.type != "cpu" or size < 16 * VOCABULARY_BLOCK or torch.is_grad_enabled():
        return torch.nn.functional.linear(hidden, weight, bias)
    out = hidden.new_empty(*hidden.shape[:-1], size)
    for s in chunks(size, VOCABULARY_BLOCK):
        out[..., s] = torch.nn.functional.linear(hidden, weight[s], None if bias is None else bias[s])
    return out


@dataclass(frozen=True, slots=True)
class Scaling:
    """From `h W^T` to the distribution that is sampled from; `rows` is the chunk size."""

    temperature: float
    rule: LogitsRule
    rows: int


class FusedLogprobs(torch.autograd.Function):
    """See the module's docstring for the equations."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, scaling: Scaling, with_entropy: bool):
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.scaling = scaling
        ctx.set_materialize_grads(False)  # an output that no loss reads costs nothing
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        for s in chunks(hidden.shape[0], scaling.rows):
            z, _ = scaled_logits(hidden[s], weight, bias, scaling)
            lse = z.logsumexp(-1)
            logprobs[s] = z.gather(-1, targets[s, None])[:, 0] - lse
            if with_entropy:
                entropy[s] = lse - (z - lse[:, None]).exp_().mul_(z).sum(-1)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs, grad_entropy):  # type: ignore[override]
        hidden, weight, bias, targets = ctx.saved_tensors
        wide = torch.promote_types(hidden.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[2] else None
        for s in chunks(hidden.shape[0], ctx.scaling.rows):
            z, derivative = scaled_logits(hidden[s], weight, bias, ctx.scaling)
            d_z = _d_logits(z, targets[s], _part(grad_logprobs, s), _part(grad_entropy, s))
            d_z = d_z.mul_(derivative).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[s] = d_z @ weight
            if d_weight is not None:
                add_product(d_weight, d_z.T, hidden[s])
            if d_bias is not None:
                d_bias += d_z.sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without a second matrix of that size where the dtypes or the device allow it."""
    if total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _part(grad: Tensor | None, part: slice) -> Tensor | None:
    return None if grad is None else grad[part]


def chunks(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling
) -> tuple[Tensor, Tensor | float]:
    """([n, V] z, dz / d(h W^T)), float32 at least."""
    raw = head_product(hidden, weight, bias)  # in the model's dtype: the very logits of its own head
    z = scaling.rule.apply(raw)
    derivative: Tensor | float = scaling.rule.scale / scaling.temperature
    if scaling.rule.softcap is not None:
        derivative = (1 - (z / scaling.rule.softcap) ** 2) * derivative  # 1 - tanh^2
    return z if scaling.temperature == 1.0 else z / scaling.temperature, derivative


def _d_logits(z: Tensor, targets: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """[n, V] gradient with respect to z, given those of log-prob and entropy."""
    if grad_entropy is None and grad_logprobs is not None:  # the usual case, in the fewest passes
        d_z = z.softmax(-1).mul_(-grad_logprobs[:, None])
        return d_z.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    logp = z.log_softmax(-1)
    p = logp.exp()
    d_z = torch.zeros_like(p)
    if grad_entropy is not None:
        entropy = -(p * logp).sum(-1, keepdim=True)
        d_z -= grad_entropy[:, None] * p * (logp + entropy)
    if grad_logprobs is not None:
        d_z -= p * grad_logprobs[:, None]
        d_z.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    return d_z
