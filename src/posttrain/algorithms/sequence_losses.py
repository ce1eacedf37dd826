"""Surrogate losses whose ratio is that of a whole sequence: the geometric mean of its tokens' ratios.

A sequence is what `episode_index` tells apart. A micro-batch holds whole segments, so the loop passes the segment of
each token here: an episode whose history was rewritten is several sequences, each with a ratio of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.credit import numbered
from posttrain.algorithms.losses import check_clip, log_ratio


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """-min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean over the sequence of log pi - log pi_old)

    Zheng et al. 2025, Group Sequence Policy Optimization (arXiv 2507.18071), GSPO-token: the value of s is the
    sequence's, its gradient each token's own; the same as GSPO where A is one number per sequence. Clips
    are those of the paper, far below PPO's. Goes with the aggregate `sequence_mean`. Returns [T].
    """
    check_clip(clip_low, clip_high)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    sequence = sequence_means(log_ratio(logprobs, old_logprobs, mask), mask, episode_index).detach()
    own = torch.where(mask, logprobs - logprobs.detach(), 0.0)  # 0, with the token's gradient
    ratio = (sequence + own).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """-A * exp(mean over the sequence of clipped log rho), log rho <= clip_high where A > 0, >= -clip_low where A < 0

    Zhao et al. 2025, Geometric-Mean Policy Optimization (arXiv 2507.20673): one far token moves a geometric
    mean less than an arithmetic one. The clips are on the log-ratio, +-0.4 as in the paper. Goes with the aggregate
    `sequence_mean`. Returns [T].
    """
    check_clip(clip_low, clip_high)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    ratio = log_ratio(logprobs, old_logprobs, mask)
    pessimistic = torch.where(advantages > 0, ratio.clamp(max=clip_high), ratio)
    pessimistic = torch.where(advantages < 0, ratio.clamp(min=-clip_low), pessimistic)
    return -advantages * sequence_means(pessimistic, mask, episode_index).exp()


def sequence_means(values: Tensor, mask: Tensor, episode_index: Tensor) -> Tensor:
    """[T] the mean of `values` over the policy tokens of each token's sequence, with its gradient; 0 off-mask."""
    sequence, count = numbered(episode_index)
    zeros = torch.zeros(count, dtype=values.dtype, device=values.device)
    total = zeros.index_add(0, sequence, torch.where(mask, values, 0.0))
    length = zeros.index_add(0, sequence, mask.to(values.dtype))
    return torch.where(mask, (total / length.clamp(min=1))[sequence], 0.0)
