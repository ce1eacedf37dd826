"""Per-token estimates of KL(pi || ref) from the log-probs of sampled tokens, d = log pi - log ref.

Schulman 2020, Approximating KL Divergence (joschu.net/blog/kl-approx.html). As a term of the loss, k2 has the gradient
of the true KL in expectation; k1 has expectation 0 there and belongs into the reward. Every estimator is differentiable
in `logprobs`; `ref_logprobs` is constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8 keeps float32 finite when multiplied by an advantage


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d: unbiased, may be negative. Returns [T]."""
    return _log_ratio(logprobs, ref_logprobs, mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d^2 / 2: biased, never negative. Returns [T]."""
    return _log_ratio(logprobs, ref_logprobs, mask).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative. -d is clamped to at most 20 before exp. Returns [T]."""
    inverse = (-_log_ratio(logprobs, ref_logprobs, mask)).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(inverse) - inverse


def absolute(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """|d|. Returns [T]."""
    return _log_ratio(logprobs, ref_logprobs, mask).abs()


def in_reward(rewards: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """r_t - kl_coef * kl_t at every policy token: the penalised reward of RLHF. Returns [T] without a graph.

    Ziegler et al. 2019 (arXiv 1909.08593), equation 2.
    """
    return torch.where(mask, rewards - kl_coef * kl.detach(), rewards)


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - ref_logprobs.detach(), 0.0)
