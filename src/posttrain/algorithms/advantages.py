"""Advantages from the other episodes of the group: the mean of what they earned is the baseline.

The rules on equal rewards and on groups of one stand in `groups`. `values` is not used by any of these. Whatever a row
returns is [T], the same number at every policy token of an episode, 0 off-mask.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algorithms.credit import EpisodeReturns, episode_returns, policy_lengths
from posttrain.algorithms.groups import (
    EQUAL_TOLERANCE,
    Singleton,
    Std,
    centred,
    differs,
    minus_baseline,
    normalised,
    sizes,
    spread_of,
    sum_by_group,
)
from posttrain.algorithms.returns import whitened


def grpo(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    std: Std = "sample",
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Tensor:
    """A = (r - mean_G) / (std_G + eps)

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2. "sample" divides the variance by n - 1,
    "population" by n, "none" leaves the division out.
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    return episodes.spread(normalised(episodes, std=std, eps=eps, singleton=singleton), mask, rewards)


def dr_grpo(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    singleton: Singleton = "zero",
) -> Tensor:
    """A = r - mean_G

    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2. Dividing by the std would
    favour questions that are nearly always or nearly never answered. The paper's loss goes with the aggregate
    `fixed_length`.
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    return episodes.spread(centred(episodes, singleton), mask, rewards)


def rloo(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    singleton: Singleton = "zero",
) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean_G)

    Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740), the RLOO estimator.
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    size = sizes(episodes)
    scale = torch.where(size == 1, 1.0, size / (size - 1).clamp(min=1))
    return episodes.spread(centred(episodes, singleton) * scale[episodes.group], mask, rewards)


def opo(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    singleton: Singleton = "zero",
) -> Tensor:
    """A = r - b_G, b_G = sum_i l_i * r_i / sum_i l_i, l_i the policy tokens of episode i

    Hao et al. 2025, On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585). The variance of the
    gradient grows with the length, so longer episodes weigh more in the baseline. Meant for exactly on-policy updates.
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    length = policy_lengths(mask, episodes)
    total = sum_by_group(length, episodes)
    baseline = sum_by_group(length * episodes.returns, episodes) / total.clamp(min=1.0)
    return episodes.spread(minus_baseline(episodes, baseline, singleton), mask, rewards)


def gpg(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    std: Std = "none",
    eps: float = 1e-6,
    alpha: Literal["signal", "nonzero_rewards"] = "signal",
) -> Tensor:
    """A = alpha * (r - mean_G) / F, alpha = episodes / episodes in groups with signal, F = 1 or std_G + eps

    Chu et al. 2025, Group Policy Gradient (arXiv 2504.02546): alpha makes up for groups that give
    no gradient. `alpha="nonzero_rewards"` is verl's: episodes / episodes whose reward is not 0.
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    if alpha == "signal":
        counted = differs(episodes)[episodes.group]
    elif alpha == "nonzero_rewards":
        counted = episodes.returns != 0
    else:
        raise ValueError(f'alpha is {alpha!r}; expected "signal" or "nonzero_rewards"')
    scale = len(counted) / counted.sum().clamp(min=1)
    return episodes.spread(scale * normalised(episodes, std=std, eps=eps), mask, rewards)


def reinforce_pp_baseline(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    singleton: Singleton = "zero",
    shift_silent: bool = False,
) -> Tensor:
    """A = (a - mean(a)) / std(a) over the policy tokens of the batch, a = r - mean_G

    Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), with baseline: the group gives the mean, the batch the std.
    Deviation: groups without signal stay exactly 0, though they count in mean and std; `shift_silent=True` moves them
    by -mean / std like all others, as verl does.
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    above = episodes.spread(centred(episodes, singleton), mask, rewards.double())
    scaled = whitened(above, mask)
    if not shift_silent:
        loud = differs(episodes) | ((sizes(episodes) == 1) & (singleton == "raw"))
        scaled = torch.where(loud[episodes.group][episodes.episode_of_token], scaled, 0.0)
    return scaled.to(rewards.dtype)


def maxrl(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
) -> Tensor:
    """A = (r - mean_G) / mean_G, and 0 where mean_G = 0

    Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning (arXiv 2602.02710): with rewards 0 and 1 the gradient
    of log p(success) instead of p(success), up to order n. Rewards are shares of success: a negative return is an
    error.
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    if bool((episodes.returns < 0).any()):
        raise ValueError(
            f"maxrl needs rewards >= 0, got a return of {float(episodes.returns.min())}; "
            "take dr_grpo, or leave out the penalties"
        )
    mean = sum_by_group(episodes.returns, episodes) / sizes(episodes)
    above = centred(episodes)
    scale = torch.where(mean > 0, mean, 1.0)
    return episodes.spread(above / scale[episodes.group], mask, rewards)


def best_of_group(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    std: Std = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """A = (r_best - r_second) / (std_G + eps) for the best episode of the group, 0 for all others

    Tang et al. 2025, Optimizing Language Models for Inference Time Objectives (arXiv 2503.19595), the leave-one-out
    gradient of the best of n: it is only the best episode that changes the maximum. Two that share the first place get
    0. verl calls it grpo_passk and divides by the std; `std="none"` is the paper's.
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    best, second, is_best = _first_two(episodes)
    tied = best - second <= EQUAL_TOLERANCE * torch.maximum(best.abs(), second.abs()).clamp(min=1.0)
    scale = spread_of(episodes, std) + (0.0 if std == "none" else eps)
    lead = torch.where(tied, 0.0, (best - second) / torch.where(tied, 1.0, scale))
    return episodes.spread(torch.where(is_best, lead[episodes.group], 0.0), mask, rewards)


def pass_at_k(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    k: int = 4,
    pass_above: float = 0.5,
) -> Tensor:
    """A = (1 - R) / s for passes, (1 - R - C(f-1, k-1) / C(n-1, k-1)) / s for failures; R = 1 - C(f, k) / C(n, k)

    Chen et al. 2025, Pass@k Training (arXiv 2508.10751), the analytic form: f of the n episodes fail, R is the mean
    over all subsets of k and s = sqrt(R (1 - R)) its std. An episode passes with a return above `pass_above`. Groups
    where R is 0 or 1 get exactly 0: none passes, or fewer than k fail; so does a group of no more than k.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    episodes = episode_returns(rewards, episode_index, group_index)
    passed = episodes.returns > pass_above
    size, failed = sizes(episodes), sum_by_group((~passed).double(), episodes)
    chosen = torch.full_like(size, float(k))
    none_passes = _subset_share(failed, size, chosen)
    others_fail = _subset_share((failed - 1).clamp(min=0), (size - 1).clamp(min=0), chosen - 1)
    silent = (none_passes <= 0) | (failed == size)
    scale = torch.where(silent, 1.0, (none_passes * (1 - none_passes)).clamp(min=0).sqrt())
    up, down = none_passes / scale, (none_passes - others_fail) / scale
    either = torch.where(passed, up[episodes.group], down[episodes.group])
    return episodes.spread(torch.where(silent[episodes.group], 0.0, either), mask, rewards)


def _first_two(episodes: EpisodeReturns) -> tuple[Tensor, Tensor, Tensor]:
    """The best and second best return of each group [G] (equal in a group of one), and who is the best [E]."""
    by_return = torch.argsort(episodes.returns, descending=True, stable=True)
    order = by_return[torch.argsort(episodes.group[by_return], stable=True)]  # by group, best first
    size = sizes(episodes).long()
    starts = size.cumsum(0) - size
    ranked = episodes.returns[order]
    is_best = torch.zeros_like(episodes.group, dtype=torch.bool)
    is_best[order[starts]] = True
    return ranked[starts], ranked[starts + (size > 1).long()], is_best


def _subset_share(part: Tensor, whole: Tensor, k: Tensor) -> Tensor:
    """C(part, k) / C(whole, k) [G]: the share of subsets of k that lie within the part; 0 when the part is smaller."""

    def log_choose(n: Tensor) -> Tensor:
        return torch.lgamma(n + 1) - torch.lgamma((n - k).clamp(min=0) + 1)

    return torch.where(part >= k, (log_choose(part) - log_choose(whole)).exp(), 0.0)
