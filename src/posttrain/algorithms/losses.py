"""Surrogate losses of the policy, per token, to be minimised: those that look at one token at a time.

Masked tokens are replaced by constants before any non-linear operation, so that whatever stands there (NaN, infinity)
reaches neither the loss nor a gradient. Log-ratios are clamped before `exp`: beyond the clamp the gradient is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.kl import MAX_LOG_RATIO


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old [T], at most MAX_LOG_RATIO; 0 off-mask."""
    return torch.where(mask, logprobs - old_logprobs.detach(), 0.0).clamp(max=MAX_LOG_RATIO)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """-min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A), rho = pi / pi_old

    Schulman et al. 2017, Proximal Policy Optimization (arXiv 1707.06347), equation 7; with two clip sides
    as in Yu et al. 2025, DAPO (arXiv 2503.14476), equation 10. Returns [T].
    """
    check_clip(clip_low, clip_high)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    ratio = log_ratio(logprobs, old_logprobs, mask).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def ppo_dual_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float = 3.0,
) -> Tensor:
    """max(-rho * A, -clip(rho, 1 - clip_low, 1 + clip_high) * A), but at most -clip_dual * A where A < 0

    Ye et al. 2020, Mastering Complex Control in MOBA Games (arXiv 1912.09729), dual clip: one bad token cannot own the
    gradient. Returns [T].
    """
    if clip_dual <= 1:
        raise ValueError(f"clip_dual must be above 1, got {clip_dual}; 3.0 is the paper's value")
    loss = ppo_clip(logprobs, old_logprobs, advantages, mask, episode_index, clip_low=clip_low, clip_high=clip_high)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * clip_dual), loss)


def policy_gradient(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, episode_index: Tensor
) -> Tensor:
    """-A * log pi

    Williams 1992, Simple Statistical Gradient-Following Algorithms (Machine Learning 8), REINFORCE. `old_logprobs` is
    not used: for one update per batch. Returns [T].
    """
    advantages = torch.where(mask, advantages.detach(), 0.0)
    return -advantages * torch.where(mask, logprobs, 0.0)


def gpg(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, episode_index: Tensor) -> Tensor:
    """-A * log pi

    Chu et al. 2025, Group Policy Gradient (arXiv 2504.02546): no ratio, no clip, no KL. The same function
    as `reinforce`; what is new lies in the advantage `gpg`. Returns [T].
    """
    return policy_gradient(logprobs, old_logprobs, advantages, mask, episode_index)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
) -> Tensor:
    """-constant(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log pi, rho = pi / pi_old

    MiniMax 2025, MiniMax-M1 (arXiv 2506.13585), equation 4: the weight is clipped, so that every token keeps a
    gradient. As in the paper there is no lower bound (clip_low 1); verl takes 0.2 there. Returns [T].
    """
    check_clip(clip_low, clip_high)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    ratio = log_ratio(logprobs.detach(), old_logprobs, mask).exp()
    return -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * torch.where(mask, logprobs, 0.0)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """-(4 / tau) * sigmoid(tau * (rho - 1)) * A, rho = pi / pi_old, tau by the sign of A

    Gao et al. 2025, Soft Adaptive Policy Optimization (arXiv 2511.20347): a gate that closes smoothly
    instead of a clip; at rho = 1 the slope is 1. Returns [T].
    """
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(f"temperatures must be positive, got {tau_positive=}, {tau_negative=}")
    advantages = torch.where(mask, advantages.detach(), 0.0)
    ratio = log_ratio(logprobs, old_logprobs, mask).exp()
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def entropy_bonus(loss: Tensor, entropy: Tensor, mask: Tensor, *, entropy_coef: float) -> Tensor:
    """loss - entropy_coef * H

    Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning (arXiv 1602.01783). `entropy` is
    that of the distribution each token was drawn from, in nats; the gradient flows through it. Returns [T].
    """
    return loss - entropy_coef * torch.where(mask, entropy, 0.0)


def check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"expected 0 <= clip_low <= 1 and clip_high >= 0, got clip_low={clip_low}, {clip_high=}")
