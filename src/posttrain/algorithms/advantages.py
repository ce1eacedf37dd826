"""How much better a token was than expected.

Group estimators (grpo, rloo) share three rules:
* A group is the episodes with one group index; each episode counts once, by the sum of its rewards.
* When the returns of a group are equal up to `tol * max(1, largest |return|)` the group has no signal: exactly 0.
* A group of one has no baseline: exactly 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algorithms.credit import EpisodeReturns, episode_returns, policy_rows, rewards_on_policy

EQUAL_TOLERANCE = 1e-6


def grpo(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    std: Literal["sample", "population", "none"] = "sample",
    eps: float = 1e-6,
    tol: float = EQUAL_TOLERANCE,
) -> Tensor:
    """A = (r - mean_G) / (std_G + eps).

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2. `std="none"` is the advantage of Dr. GRPO,
    Liu et al. 2025 (arXiv 2503.20783), section 3.2. "sample" divides the variance by n - 1, "population" by n.
    `values` is not used. Returns [T].
    """
    if std not in ("sample", "population", "none"):
        raise ValueError(f'std is {std!r}; expected "sample", "population" or "none"')
    episodes = episode_returns(rewards, episode_index, group_index)
    centred, size = _centre(episodes, tol)
    if std != "none":
        degrees = size - 1 if std == "sample" else size
        variance = _sum_by_group(centred.square(), episodes) / degrees.clamp(min=1)
        centred = torch.where(centred == 0, 0.0, centred / (variance.sqrt() + eps)[episodes.group])
    return episodes.spread(centred, mask, rewards)


def rloo(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    tol: float = EQUAL_TOLERANCE,
) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean_G).

    Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740), the RLOO estimator. `values` is not used. Returns [T].
    """
    episodes = episode_returns(rewards, episode_index, group_index)
    centred, size = _centre(episodes, tol)
    scale = size / (size - 1).clamp(min=1)
    return episodes.spread(centred * scale[episodes.group], mask, rewards)


def gae(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
) -> Tensor:
    """A_t = sum_k (gamma * lam)^k * delta_{t+k}, delta_t = r_t + gamma * V_{t+1} - V_t, V = 0 after the end.

    Schulman et al. 2016 (arXiv 1506.02438), equation 16. t counts the policy's tokens only: what the environment wrote
    between two turns is no time step. `values[t]` is the value of the state in which token t was chosen.
    `whiten` shifts and scales to mean 0, variance 1 over the policy tokens of the batch. Returns [T].
    """
    if values is None:
        raise ValueError("gae needs values: configure a critic, or take a group estimator such as grpo")
    rows = policy_rows(mask, episode_index)
    reward = rows.take(rewards_on_policy(rewards, mask, episode_index))  # [E, L]
    value = rows.take(values.detach())
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    delta = torch.where(rows.valid, reward + gamma * following - value, 0.0)
    advantages = _discounted_sum(delta, gamma * lam)
    if whiten:
        advantages = _whitened(advantages, rows.valid)
    return rows.put(advantages, rewards)


def gae_returns(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Tensor:
    """What the critic learns to predict: A_t + V_t, from advantages that are not whitened. Returns [T], 0 off-mask."""
    advantages = gae(rewards, mask, episode_index, group_index, values=values, gamma=gamma, lam=lam)
    return torch.where(mask, advantages + values.detach(), 0.0).to(rewards.dtype)


def reinforce(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the policy's tokens, without a baseline.

    Williams 1992, REINFORCE; Sutton & Barto 2018, equation 3.9. `values` is not used. Returns [T].
    """
    rows = policy_rows(mask, episode_index)
    reward = rows.take(rewards_on_policy(rewards, mask, episode_index))
    return rows.put(_discounted_sum(reward, gamma), rewards)


def has_signal(rewards: Tensor, episode_index: Tensor, group_index: Tensor, *, tol: float = EQUAL_TOLERANCE) -> Tensor:
    """[T] bool: False in groups whose returns are all equal up to `tol`, groups of one included."""
    episodes = episode_returns(rewards, episode_index, group_index)
    return _differs(episodes, tol)[episodes.group][episodes.episode_of_token]


def _differs(episodes: EpisodeReturns, tol: float) -> Tensor:
    """[G] bool: max - min > tol * max(1, max |r|)."""
    empty = torch.full((episodes.group_count,), torch.nan, dtype=torch.float64, device=episodes.returns.device)
    highest = empty.scatter_reduce(0, episodes.group, episodes.returns, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, episodes.group, episodes.returns, "amin", include_self=False)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return highest - lowest > tol * scale


def _centre(episodes: EpisodeReturns, tol: float) -> tuple[Tensor, Tensor]:
    """Returns minus their group's mean [E], exactly 0 without signal, and the group sizes [G]."""
    size = _sum_by_group(torch.ones_like(episodes.returns), episodes)
    mean = _sum_by_group(episodes.returns, episodes) / size
    centred = episodes.returns - mean[episodes.group]
    return torch.where(_differs(episodes, tol)[episodes.group], centred, 0.0), size


def _sum_by_group(values: Tensor, episodes: EpisodeReturns) -> Tensor:
    """[E] -> [G]"""
    total = torch.zeros(episodes.group_count, dtype=torch.float64, device=values.device)
    return total.index_add(0, episodes.group, values)


def _discounted_sum(rows: Tensor, discount: float) -> Tensor:
    """[E, L]: out_t = rows_t + discount * out_{t+1}; the part of a row that is not valid must be 0."""
    out = rows.clone()
    for t in range(rows.shape[1] - 2, -1, -1):
        out[:, t] += discount * out[:, t + 1]
    return out


def _whitened(rows: Tensor, valid: Tensor) -> Tensor:
    """[E, L] with mean 0 and sample variance 1 over the valid entries; equal entries give 0."""
    entries = rows[valid]
    if len(entries) < 2:
        return torch.zeros_like(rows)
    deviation = rows - entries.mean()
    std = entries.std()
    if float(std) <= EQUAL_TOLERANCE * max(1.0, float(entries.abs().max())):
        return torch.zeros_like(rows)
    return deviation / std
