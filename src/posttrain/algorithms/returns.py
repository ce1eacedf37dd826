"""Advantages in time: what follows a token decides what it is worth.

t counts the policy's tokens only: what the environment wrote between two turns is no time step. `discount="turn"`
applies gamma and lambda only from one turn to the next; a turn is a run of policy tokens with nothing between them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algorithms.credit import PolicyRows, numbered, policy_rows, rewards_on_policy
from posttrain.algorithms.groups import EQUAL_TOLERANCE

Discount = Literal["token", "turn"]


def gae(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    discount: Discount = "token",
) -> Tensor:
    """A_t = sum_k (gamma * lam)^k * delta_{t+k}, delta_t = r_t + gamma * V_{t+1} - V_t, V = 0 after the end

    Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation (arXiv 1506.02438),
    equation 16. `values[t]` is the value of the state in which token t was chosen. Returns [T].
    """
    if values is None:
        raise ValueError("gae needs values: configure a critic, or take a group estimator such as grpo")
    rows = policy_rows(mask, episode_index)
    reward = rows.take(rewards_on_policy(rewards, mask, episode_index))  # [E, L]
    value = rows.take(values.detach())
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    delta = torch.where(rows.valid, reward + _per_step(rows, gamma, discount) * following - value, 0.0)
    return rows.put(discounted_sum(delta, _per_step(rows, gamma * lam, discount)), rewards)


def gae_returns(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    discount: Discount = "token",
) -> Tensor:
    """What the critic learns to predict: A_t + V_t. Returns [T], 0 off-mask."""
    advantages = gae(rewards, mask, episode_index, group_index, values=values, gamma=gamma, lam=lam, discount=discount)
    return torch.where(mask, advantages + values.detach(), 0.0).to(rewards.dtype)


def reinforce(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    discount: Discount = "token",
) -> Tensor:
    """A_t = G_t = r_t + gamma * G_{t+1}, without a baseline

    Williams 1992, Simple Statistical Gradient-Following Algorithms (Machine Learning 8), the episodic form with rewards
    to go. `values` is not used. Returns [T].
    """
    rows = policy_rows(mask, episode_index)
    reward = rows.take(rewards_on_policy(rewards, mask, episode_index))
    return rows.put(discounted_sum(reward, _per_step(rows, gamma, discount)), rewards)


def reinforce_pp(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    discount: Discount = "token",
    stop_at_observations: bool = False,
) -> Tensor:
    """A_t = (G_t - mean(G)) / std(G) over the policy tokens of the batch, G_t = r_t + gamma * G_{t+1}

    Hu et al. 2025, REINFORCE++ (arXiv 2501.03262): the KL belongs into the reward (`kl_in: reward`).
    Equal returns everywhere give exactly 0. `stop_at_observations=True` is verl's recursion: a reward does not flow
    back over the environment's tokens, so that with gamma = 1 only the last turn learns from the outcome. Returns [T].
    """
    rows = policy_rows(mask, episode_index)
    reward = rows.take(rewards_on_policy(rewards, mask, episode_index))
    factor = _per_step(rows, gamma, discount)
    if stop_at_observations:
        factor = torch.where(rows.ends_turn, 0.0, factor)
    return whitened(rows.put(discounted_sum(reward, factor), rewards.double()), mask).to(rewards.dtype)


def remax(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    greedy_returns: Tensor | None = None,
) -> Tensor:
    """A_t = sum of the rewards from t on - r(greedy answer to the same prompt)

    Li et al. 2024, ReMax (arXiv 2310.10505). `greedy_returns` [T]: what the greedy episode of the token's
    group earned; NaN where it could not be judged: such an episode has no baseline and gets exactly 0. A difference
    below 1e-6 * max(1, |baseline|) is exactly 0, too. No group is needed. Returns [T].
    """
    if greedy_returns is None:
        raise ValueError("remax needs greedy_returns: the loop rolls out one greedy episode per prompt for it")
    rows = policy_rows(mask, episode_index)
    reward = rows.take(rewards_on_policy(rewards, mask, episode_index))
    baseline = rows.take(greedy_returns)
    above = discounted_sum(reward, torch.ones_like(reward)) - baseline
    silent = baseline.isnan() | (above.abs() <= EQUAL_TOLERANCE * baseline.abs().clamp(min=1.0))
    return rows.put(torch.where(silent, 0.0, above), rewards)


def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
) -> Tensor:
    """A_t = G_t - b_t, b_t = sum_G W_t * G_t / sum_G W_t, W_t = sum_{j<=t} (1 - 2 pi_j + sum_v pi_j(v)^2)

    Li et al. 2026, The Optimal Token Baseline (PMLR 306, li26hy): W_t stands for the squared norm of the score of all
    tokens up to t; the group's episodes are compared token by token, t counted in policy tokens. Without
    `sum_pi_squared` [T] the term is 1 - pi, as E[pi(token)] = sum_v pi(v)^2. Where returns are equal, or an episode is
    the only one that long, exactly 0 (verl leaves the tail of the longest without a baseline). Returns [T].
    """
    if old_logprobs is None:
        raise ValueError("optimal_token_baseline needs old_logprobs, the log-probs that the tokens were sampled with")
    rows = policy_rows(mask, episode_index)
    if not rows.valid.numel():
        return torch.zeros_like(rewards)
    reward = rows.take(rewards_on_policy(rewards, mask, episode_index))
    to_go = discounted_sum(reward, torch.ones_like(reward))
    probability = rows.take(old_logprobs.detach().clamp(max=0.0).exp())
    energy = 1 - probability if sum_pi_squared is None else 1 - 2 * probability + rows.take(sum_pi_squared)
    weight = torch.where(rows.valid, energy, 0.0).cumsum(1)
    group, count = numbered(group_index[rows.index[:, 0]])
    mean, silent = _baseline_by_step(to_go, weight, rows.valid, group, count)
    return rows.put(torch.where(silent[group], 0.0, to_go - mean[group]), rewards)


def discounted_sum(rows: Tensor, discount: Tensor) -> Tensor:
    """[E, L]: out_t = rows_t + discount_t * out_{t+1}; the part of a row that is not valid must be 0."""
    out = rows.clone()
    for t in range(rows.shape[1] - 2, -1, -1):
        out[:, t] += discount[:, t] * out[:, t + 1]
    return out


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """[T] with mean 0 and sample variance 1 over the masked-in entries, 0 elsewhere; equal entries give 0."""
    entries = values[mask]
    if len(entries) < 2:
        return torch.zeros_like(values)
    std = entries.std()
    if float(std) <= EQUAL_TOLERANCE * max(1.0, float(entries.abs().max())):
        return torch.zeros_like(values)
    return torch.where(mask, (values - entries.mean()) / std, 0.0)


def _per_step(rows: PolicyRows, factor: float, discount: Discount) -> Tensor:
    """[E, L] the factor between token t and t + 1: everywhere, or only at the last token of a turn."""
    if discount not in ("token", "turn"):
        raise ValueError(f'discount is {discount!r}; expected "token" or "turn"')
    everywhere = torch.full(rows.valid.shape, factor, dtype=torch.float64, device=rows.valid.device)
    return everywhere if discount == "token" else torch.where(rows.ends_turn, everywhere, 1.0)


def _baseline_by_step(to_go: Tensor, weight: Tensor, valid: Tensor, group: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """([G, L] weighted mean of the returns to go, [G, L] whether they are equal) over the episodes that have step t."""
    zeros = torch.zeros(count, to_go.shape[1], dtype=torch.float64, device=to_go.device)
    total = zeros.index_add(0, group, torch.where(valid, weight, 0.0))
    mean = zeros.index_add(0, group, torch.where(valid, weight * to_go, 0.0)) / torch.where(total > 0, total, 1.0)
    column = group[:, None].expand_as(to_go)
    highest = (zeros - torch.inf).scatter_reduce(0, column, torch.where(valid, to_go, -torch.inf), "amax")
    lowest = (zeros + torch.inf).scatter_reduce(0, column, torch.where(valid, to_go, torch.inf), "amin")
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return mean, ~(highest - lowest > EQUAL_TOLERANCE * scale) | (total <= 0)
