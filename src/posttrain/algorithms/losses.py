"""Surrogate losses of the policy, per token, to be minimised.

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
    """-min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A), rho = pi / pi_old.

    Schulman et al. 2017, PPO (arXiv 1707.06347), equation 7; two clip sides as in DAPO, Yu et al. 2025
    (arXiv 2503.14476), equation 10. Returns [T].
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
    """`ppo_clip`, but at most -clip_dual * A where A < 0, so that one bad token cannot own the gradient.

    Ye et al. 2020, Mastering Complex Control in MOBA Games (arXiv 1912.09729), dual-clip PPO. Returns [T].
    """
    if clip_dual <= 1:
        raise ValueError(f"clip_dual must be above 1, got {clip_dual}; 3.0 is the paper's value")
    loss = ppo_clip(logprobs, old_logprobs, advantages, mask, episode_index, clip_low=clip_low, clip_high=clip_high)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * clip_dual), loss)


def policy_gradient(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, episode_index: Tensor
) -> Tensor:
    """-A * log pi: the gradient of REINFORCE, Williams 1992. `old_logprobs` is not used. Returns [T]."""
    advantages = torch.where(mask, advantages.detach(), 0.0)
    return -advantages * torch.where(mask, logprobs, 0.0)


def check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"expected 0 <= clip_low <= 1 and clip_high >= 0, got clip_low={clip_low}, {clip_high=}")
