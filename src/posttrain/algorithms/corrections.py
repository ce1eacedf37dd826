"""Weights for tokens that another policy sampled: pi is the trainer's frozen policy, mu what the sampler used.

The two differ when weights are stale, when the engine rounds otherwise, or for experts routed otherwise. A correction
is [T] without a graph, made once for a whole batch and multiplied into the loss per token. Where it is 0 the token (or
its sequence) is rejected: the loop takes it out of the mask, so that denominators follow. A sequence is an episode.
Every function raises ValueError when the sampler's log-prob of a policy token is missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.credit import numbered
from posttrain.algorithms.kl import MAX_LOG_RATIO, k1, k2, k3
from posttrain.algorithms.sequence_losses import sequence_means


def truncated_is(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, episode_index: Tensor, *, is_high: float = 2.0
) -> Tensor:
    """min(rho_t, is_high), rho_t = pi / mu of the token

    Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (fengyao.notion.site),
    truncated importance sampling; after Ionides 2008. Returns [T].
    """
    return torch.where(mask, token_ratio(logprobs, rollout_logprobs, mask).exp().clamp(max=is_high), 0.0)


def truncated_is_sequence(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, episode_index: Tensor, *, is_high: float = 2.0
) -> Tensor:
    """min(product over the sequence of rho_t, is_high)

    Liu et al. 2025, When Speed Kills Stability (richardli.xyz), sequence-level truncated importance sampling: unbiased
    but for the cut, where the token form is not. Returns [T], one number per sequence.
    """
    total = sequence_sums(token_ratio(logprobs, rollout_logprobs, mask), mask, episode_index)
    return torch.where(mask, total.clamp(max=MAX_LOG_RATIO).exp().clamp(max=is_high), 0.0)


def icepop(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    is_low: float = 0.5,
    is_high: float = 5.0,
) -> Tensor:
    """rho_t where is_low <= rho_t <= is_high, else 0

    Ling team 2025, Every Step Evolves (arXiv 2510.18855), IcePop: tokens on which the two disagree too far
    are left out, in both directions. Returns [T].
    """
    _check_window(is_low, is_high)
    ratio = token_ratio(logprobs, rollout_logprobs, mask).exp()
    return torch.where(mask & (ratio >= is_low) & (ratio <= is_high), ratio, 0.0)


def masked_is(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    is_low: float = 0.99,
    is_high: float = 1.01,
) -> Tensor:
    """rho_t where is_low <= exp(mean over the sequence of log rho) <= is_high, else 0 for the whole sequence

    Liu et al. 2025, When Speed Kills Stability (richardli.xyz), masked importance sampling with the geometric mean, the
    seq-mask-tis of OpenRLHF: rejection by what does not grow with the length. Returns [T].
    """
    _check_window(is_low, is_high)
    log_ratio = token_ratio(logprobs, rollout_logprobs, mask)
    mean = sequence_means(log_ratio, mask, episode_index).exp()
    return torch.where(mask & (mean >= is_low) & (mean <= is_high), log_ratio.exp(), 0.0)


def reject(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    *,
    statistic: str = "sequence_mean_k3",
    reject_low: float = float("-inf"),
    reject_high: float = 0.01,
) -> Tensor:
    """1 where reject_low <= statistic <= reject_high, else 0

    Liu et al. 2025, When Speed Kills Stability (richardli.xyz), rejection sampling. The statistic is made of
    KL(mu || pi) by k1, k2 or k3: "token_k3", "sequence_sum_k1", "sequence_mean_k2", "sequence_max_k3" and so on.
    Returns [T].
    """
    _check_window(reject_low, reject_high)
    scope, _, estimator = statistic.rpartition("_")
    if scope not in _SCOPES or estimator not in _ESTIMATES:
        known = ", ".join(f"{scope}_{estimator}" for scope in _SCOPES for estimator in _ESTIMATES)
        raise ValueError(f"statistic is {statistic!r}; expected one of {known}")
    log_ratio = token_ratio(logprobs, rollout_logprobs, mask)
    distance = _ESTIMATES[estimator](torch.zeros_like(log_ratio), log_ratio, mask)
    found = _SCOPES[scope](distance, mask, episode_index)
    return (mask & (found >= reject_low) & (found <= reject_high)).to(torch.float32)


def staleness_weights(policy_versions: Tensor, version: int, mask: Tensor, *, decay: float = 1.0) -> Tensor:
    """decay^(version - version that sampled the token)

    Fu et al. 2025, AReaL (arXiv 2505.24298) bounds the staleness; a weight that falls with it is the soft form. 1 on
    fresh tokens. Returns [T], 0 off-mask.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must lie in (0, 1], got {decay}")
    age = (version - policy_versions).clamp(min=0)
    return torch.where(mask, decay ** age.to(torch.float32), 0.0)


def token_ratio(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log mu [T] within +-MAX_LOG_RATIO, 0 off-mask. Raises ValueError on a missing log-prob."""
    missing = int(rollout_logprobs[mask].isnan().sum())
    if missing:
        raise ValueError(f"the sampler's log-prob is missing for {missing} of {int(mask.sum())} policy tokens")
    ratio = torch.where(mask, logprobs.detach() - rollout_logprobs.detach(), 0.0)
    return ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: Tensor, mask: Tensor, episode_index: Tensor) -> Tensor:
    """[T] the sum of `values` over the policy tokens of each token's sequence."""
    sequence, count = numbered(episode_index)
    total = torch.zeros(count, dtype=values.dtype, device=values.device)
    return total.index_add(0, sequence, torch.where(mask, values, 0.0))[sequence]


def sequence_largest(values: Tensor, mask: Tensor, episode_index: Tensor) -> Tensor:
    """[T] the largest of `values` over the policy tokens of each token's sequence; -infinity without any."""
    sequence, count = numbered(episode_index)
    lowest = torch.full((count,), -torch.inf, dtype=values.dtype, device=values.device)
    return lowest.scatter_reduce(0, sequence, torch.where(mask, values, -torch.inf), "amax")[sequence]


def _each_token(values: Tensor, mask: Tensor, episode_index: Tensor) -> Tensor:
    return values


def _check_window(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"the lower bound must lie below the upper one, got {low} and {high}")


_SCOPES = {
    "token": _each_token,
    "sequence_sum": sequence_sums,
    "sequence_mean": sequence_means,
    "sequence_max": sequence_largest,
}
_ESTIMATES = {"k1": k1, "k2": k2, "k3": k3}
