"""Per-token estimates of KL(pi || ref) from the log-probs of sampled tokens, d = log pi - log ref.

Schulman 2020, Approximating KL Divergence (joschu.net/blog/kl-approx.html). As a term of the loss, k2 has the gradient
of the true KL in expectation; k1 has expectation 0 there and belongs into the reward. Every estimator is differentiable
in `logprobs`; `ref_logprobs` is constant. Here and in the reward "KL" is per token; sums and means are the aggregate's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8 keeps float32 finite when multiplied by an advantage


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d

    Schulman 2020, Approximating KL Divergence, k1: unbiased, may be negative. Returns [T].
    """
    return _log_ratio(logprobs, ref_logprobs, mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d^2 / 2

    Schulman 2020, Approximating KL Divergence, k2: biased, never negative. Returns [T].
    """
    return _log_ratio(logprobs, ref_logprobs, mask).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(-d) - 1 + d

    Schulman 2020, Approximating KL Divergence, k3: unbiased and never negative. -d is clamped to at most 20 before exp.
    Returns [T].
    """
    inverse = (-_log_ratio(logprobs, ref_logprobs, mask)).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(inverse) - inverse


def absolute(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """|d|

    Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593) take d itself; its size
    is the penalty of verl and Search-R1 under the name abs. Returns [T].
    """
    return _log_ratio(logprobs, ref_logprobs, mask).abs()


def in_reward(rewards: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """r_t - kl_coef * kl_t

    Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593), equation 2: the
    penalised reward of RLHF, at every policy token. Returns [T] without a graph.
    """
    return torch.where(mask, rewards - kl_coef * kl.detach(), rewards)


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """constant(value) + gradient - constant(gradient)

    Bengio et al. 2013, Estimating or Propagating Gradients Through Stochastic Neurons (arXiv 1308.3432): the number of
    one estimator with the gradient of another, as k3's small variance with k2's gradient, which is that of the true KL
    in expectation. verl writes it with a `+` behind the name. Returns [T].
    """
    return value.detach() + gradient - gradient.detach()


def bounded(kl: Tensor, limit: float) -> Tensor:
    """clip(kl, -limit, limit)

    Ouyang et al. 2022, InstructGPT (arXiv 2203.02155) has no such bound; verl, OpenRLHF and Search-R1 cut every
    estimate at 10. Beyond the limit the gradient is 0. Returns [T].
    """
    if limit <= 0:
        raise ValueError(f"the limit must be positive, got {limit}")
    return kl.clamp(-limit, limit)


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, episodes: int) -> float:
    """kl_coef * (1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon)

    Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593), section 2.2: the
    coefficient follows the KL that was measured over `episodes`. `kl` that is not finite leaves it as it is.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target and horizon must be positive, got {target=}, {horizon=}")
    if not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - ref_logprobs.detach(), 0.0)
