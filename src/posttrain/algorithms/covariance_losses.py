"""Surrogate losses that hold back the few tokens which would cost most entropy: those where the log-prob and the
advantage are high together.

Which tokens these are is chosen over the whole mini-batch before it is split, from the frozen log-probs (`*_choice`);
otherwise it would depend on the split. A loss that is not given the choice makes it among the tokens it sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.losses import log_ratio, ppo_clip


def covariance(old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - mean log pi) * (A - mean A) over the policy tokens of the mini-batch. [T], 0 off-mask."""
    if not bool(mask.any()):
        return torch.zeros_like(old_logprobs)
    logprobs, advantages = old_logprobs.detach(), advantages.detach()
    product = (logprobs - logprobs[mask].mean()) * (advantages - advantages[mask].mean())
    return torch.where(mask, product, 0.0)


def clip_cov_choice(
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """[T] bool: of the tokens with cov_low < covariance < cov_high the largest, cov_share of all tokens, at least 1."""
    found = covariance(old_logprobs, advantages, mask)
    return _largest(found, mask & (found > cov_low) & (found < cov_high), mask, cov_share)


def kl_cov_choice(old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cov_share: float = 2e-4) -> Tensor:
    """[T] bool: the tokens of the largest covariance, cov_share of all tokens, at least 1."""
    return _largest(covariance(old_logprobs, advantages, mask), mask, mask, cov_share)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    chosen: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """-min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A), without gradient at the tokens of high covariance

    Cui et al. 2025, The Entropy Mechanism of RL for Reasoning Language Models (arXiv 2505.22617), Clip-Cov.
    Deviations: of the candidates those with the largest covariance, not a random draw, so that no result depends on the
    order; covariances are those of the frozen policy. Returns [T].
    """
    loss = ppo_clip(logprobs, old_logprobs, advantages, mask, episode_index, clip_low=clip_low, clip_high=clip_high)
    if chosen is None:
        chosen = clip_cov_choice(old_logprobs, advantages, mask)
    return torch.where(chosen.bool() & mask, loss.detach(), loss)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    chosen: Tensor | None = None,
    cov_kl_coef: float = 1.0,
) -> Tensor:
    """-rho * A, plus cov_kl_coef * |log pi - log pi_old| at the tokens of the largest covariance

    Cui et al. 2025, The Entropy Mechanism of RL for Reasoning Language Models (arXiv 2505.22617), KL-Cov. The
    chosen tokens are held near the frozen policy; no clip. The coefficient is the paper's 1; verl takes 0.1. Deviation:
    covariances are those of the frozen policy. Returns [T].
    """
    if chosen is None:
        chosen = kl_cov_choice(old_logprobs, advantages, mask)
    advantages = torch.where(mask, advantages.detach(), 0.0)
    distance = log_ratio(logprobs, old_logprobs, mask)
    return -advantages * distance.exp() + torch.where(chosen.bool() & mask, cov_kl_coef * distance.abs(), 0.0)


def _largest(found: Tensor, candidates: Tensor, mask: Tensor, share: float) -> Tensor:
    """[T] bool: the candidates with the largest values; equal ones come together, so that order decides nothing."""
    if not 0 <= share <= 1:
        raise ValueError(f"cov_share is a share of the tokens, from 0 to 1; got {share}")
    values = found[candidates]
    if not len(values):
        return torch.zeros_like(mask)
    wanted = min(len(values), max(1, int(share * int(mask.sum()))))
    return candidates & (found >= values.topk(wanted).values[-1])
