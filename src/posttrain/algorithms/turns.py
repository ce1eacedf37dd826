"""Credit by turn: every turn of an episode earns its own rewards and gets its own advantage.

A turn is a run of policy tokens with nothing between them. A reward belongs to the turn at or before it; the outcome
lies on the last one. gamma is per turn: tokens of one turn share one number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algorithms.credit import (
    EpisodeReturns,
    PolicyRows,
    episode_returns,
    numbered,
    policy_rows,
    rewards_on_policy,
)
from posttrain.algorithms.groups import Std, normalised
from posttrain.algorithms.returns import discounted_sum


def turn_grpo(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    std: Std = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """A_k = (G_k - mean) / (std + eps) over the k-th turns of the group, G_k = r_k + gamma * G_{k+1} over turns

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.3 (process supervision), with turns as steps.
    Deviation: turns are compared with the turns of the same number, not all with all, so that late turns are not judged
    by what early ones still had before them. A turn that only one episode reached gets exactly 0. Returns [T].
    """
    turns = turn_returns(rewards, mask, episode_index, group_index, gamma=gamma)
    return turns.spread(normalised(turns, std=std, eps=eps), mask, rewards)


def mt_grpo(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    outcome_rewards: Tensor | None = None,
    turn_weight: float = 1.0,
    std: Std = "sample",
) -> Tensor:
    """A_k = A_outcome + turn_weight * A_turn,k: outcomes and the k-th turns' own rewards, each normalised by the group

    Zeng et al. 2025, Reinforcing Multi-Turn Reasoning via Turn-Level Credit Assignment (arXiv 2505.11821).
    `outcome_rewards` [T] is the part of `rewards` that is the outcome; the rest are the turns' own. Returns [T].
    """
    if outcome_rewards is None:
        raise ValueError(
            "mt_grpo needs outcome_rewards: set algorithm.turn_reward_coef, so that turns have rewards too"
        )
    own = turn_returns(rewards - outcome_rewards, mask, episode_index, group_index, gamma=0.0)
    episodes = episode_returns(outcome_rewards, episode_index, group_index)
    outcome = episodes.spread(normalised(episodes, std=std, eps=1e-6), mask, rewards.double())
    turn = own.spread(normalised(own, std=std, eps=1e-6), mask, rewards.double())
    return (outcome + turn_weight * turn).to(rewards.dtype)


def turn_gae(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Tensor:
    """A_k = sum_j (gamma * lam)^j * delta_{k+j} over turns, delta_k = r_k + gamma * V_{k+1} - V_k, V_k before turn k

    Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation (arXiv 1506.02438),
    equation 16, with a whole turn as the action; V_k is the value at the first token of the turn. Returns [T].
    """
    if values is None:
        raise ValueError("turn_gae needs values: configure a critic, or take a group estimator such as turn_grpo")
    turns = _Turns.of(rewards, mask, episode_index)
    return turns.rows.put(turns.back_to_tokens(turns.gae(values, gamma, lam)), rewards)


def turn_gae_returns(
    rewards: Tensor,
    mask: Tensor,
    episode_index: Tensor,
    group_index: Tensor,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Tensor:
    """What the critic learns with `turn_gae`: A_k + V_k, the same target at every token of a turn. Returns [T]."""
    turns = _Turns.of(rewards, mask, episode_index)
    target = turns.gae(values, gamma, lam) + turns.first_of(values)
    return turns.rows.put(turns.back_to_tokens(target), rewards)


def turn_returns(
    rewards: Tensor, mask: Tensor, episode_index: Tensor, group_index: Tensor, *, gamma: float
) -> EpisodeReturns:
    """An entry per turn with its discounted return; its group is made of the turns of that number in the group.

    A last entry, alone in its group, stands for the tokens that belong to no turn.
    """
    turns = _Turns.of(rewards, mask, episode_index)
    to_go = discounted_sum(turns.reward, torch.full_like(turns.reward, gamma))
    number = turns.number[turns.rows.valid]  # [N] of every policy token
    episode = torch.arange(len(turns.number), device=mask.device)[:, None].expand_as(turns.number)[turns.rows.valid]
    width = turns.reward.shape[1]
    entry_of, count = numbered(episode * width + number)
    returns = torch.zeros(count + 1, dtype=torch.float64, device=mask.device)
    returns[entry_of] = to_go[episode, number]
    tokens = turns.rows.index[turns.rows.valid]
    group, groups = numbered(group_index[tokens] * (width + 1) + number)
    group_of_entry = torch.full((count + 1,), groups, dtype=torch.long, device=mask.device)
    group_of_entry[entry_of] = group
    entry_of_token = torch.full_like(episode_index, count)
    entry_of_token[tokens] = entry_of
    return EpisodeReturns(
        returns=returns, group=group_of_entry, group_count=groups + 1, episode_of_token=entry_of_token
    )


class _Turns:
    """The policy's tokens as rows, the number of each one's turn [E, L], and the reward of each turn [E, K]."""

    def __init__(self, rows: PolicyRows, token_rewards: Tensor) -> None:
        self.rows = rows
        starts = rows.ends_turn.roll(1, 1)
        starts[:, :1] = False
        self.number = starts.long().cumsum(1)  # 0 for the first turn
        self.count = int(self.number.max()) + 1 if self.number.numel() else 1
        self.reward = self._by_turn(token_rewards)

    @classmethod
    def of(cls, rewards: Tensor, mask: Tensor, episode_index: Tensor) -> _Turns:
        rows = policy_rows(mask, episode_index)
        return cls(rows, rows.take(rewards_on_policy(rewards, mask, episode_index)))

    def gae(self, values: Tensor, gamma: float, lam: float) -> Tensor:
        """[E, K]"""
        value = self.first_of(values)
        following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
        delta = self.reward + gamma * following - value
        return discounted_sum(delta, torch.full_like(delta, gamma * lam))

    def first_of(self, values: Tensor) -> Tensor:
        """[T] -> [E, K]: the value at the first token of each turn, 0 where there is no such turn."""
        is_first = torch.ones_like(self.rows.valid)
        is_first[:, 1:] = self.rows.ends_turn[:, :-1]
        return self._by_turn(torch.where(is_first, self.rows.take(values.detach()), 0.0))

    def back_to_tokens(self, by_turn: Tensor) -> Tensor:
        """[E, K] -> [E, L]"""
        return by_turn.gather(1, self.number)

    def _by_turn(self, by_token: Tensor) -> Tensor:
        """[E, L] -> [E, K] sums"""
        total = torch.zeros(len(by_token), self.count, dtype=torch.float64, device=by_token.device)
        return total.scatter_add(1, self.number, by_token)
