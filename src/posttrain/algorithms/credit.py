"""Where a reward belongs and which tokens form an episode: the bookkeeping under every advantage estimator.

All sums are float64, so that equal returns stay equal. Nothing here depends on the order of episodes in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """The policy's tokens of E episodes as rows, holes closed: [E, L], L the most policy tokens in one episode."""

    index: Tensor  # [E, L] long: position in the packed batch; 0 where not valid
    valid: Tensor  # [E, L] bool: rows are filled from the left

    @property
    def ends_turn(self) -> Tensor:
        """[E, L] bool: no policy token of the episode follows at once; True at an episode's last token, too."""
        ends = torch.ones_like(self.valid)
        ends[:, :-1] = ~self.valid[:, 1:] | (self.index[:, 1:] != self.index[:, :-1] + 1)
        return ends & self.valid

    def take(self, stream: Tensor) -> Tensor:
        """[T] -> [E, L] float64, 0 where not valid."""
        return torch.where(self.valid, stream.double()[self.index], 0.0)

    def put(self, rows: Tensor, like: Tensor) -> Tensor:
        """[E, L] -> [T] in the type of `like`, 0 at every token that the policy did not write."""
        packed = torch.zeros_like(like)
        packed[self.index[self.valid]] = rows[self.valid].to(like.dtype)
        return packed


def numbered(index: Tensor) -> tuple[Tensor, int]:
    """Renames the K distinct values of `index` [T] to 0..K-1, in ascending order. Returns (names [T] long, K)."""
    sorted_already = bool((index[1:] >= index[:-1]).all())  # in every batch whose segments came in order
    here = torch.arange(len(index), device=index.device)
    ordered, order = (index, here) if sorted_already else torch.sort(index, stable=True)
    first_of_its_kind = torch.ones_like(ordered, dtype=torch.long)
    first_of_its_kind[1:] = (ordered[1:] != ordered[:-1]).long()
    names = torch.empty_like(first_of_its_kind)
    names[order] = first_of_its_kind.cumsum(0) - 1
    return names, int(first_of_its_kind.sum())


def policy_rows(mask: Tensor, episode_index: Tensor) -> PolicyRows:
    """The compressed list of policy tokens of every episode that has one, in order of appearance."""
    positions = mask.nonzero().squeeze(1)  # [N]
    episodes, count = numbered(episode_index[positions])
    lengths = torch.bincount(episodes, minlength=count)  # [E]
    width = int(lengths.max()) if count else 0
    valid = torch.arange(width, device=mask.device)[None, :] < lengths[:, None]
    index = torch.zeros_like(valid, dtype=torch.long)
    index[valid] = positions[torch.argsort(episodes, stable=True)]
    return PolicyRows(index=index, valid=valid)


def rewards_on_policy(rewards: Tensor, mask: Tensor, episode_index: Tensor) -> Tensor:
    """Moves each reward to the policy token that earned it: the last one at or before it in its episode.

    A reward before the first policy token of an episode goes to that first one. In an episode without policy tokens it
    stays where it is. Returns [T] float64 with the same sum per episode.
    Raises ValueError on a reward that is not finite.
    """
    _require_finite(rewards)
    order = torch.argsort(episode_index, stable=True)
    episode, written = episode_index[order], mask[order]
    here = torch.arange(len(order), device=rewards.device)
    before = torch.where(written, here, -1).cummax(0).values
    after = torch.where(written, here, len(order)).flip(0).cummin(0).values.flip(0)
    has_before = (before >= 0) & (episode[before.clamp(min=0)] == episode)
    has_after = (after < len(order)) & (episode[after.clamp(max=len(order) - 1)] == episode)
    target = torch.where(has_before, before, torch.where(has_after, after, here))
    moved = torch.zeros(len(order), dtype=torch.float64, device=rewards.device)
    return moved.index_add(0, order[target], rewards[order].double())


@dataclass(frozen=True, slots=True)
class EpisodeReturns:
    """One entry per episode, however many segments it was packed into."""

    returns: Tensor  # [E] float64: the sum of its rewards, on whatever tokens they lie
    group: Tensor  # [E] long: 0..G-1
    group_count: int  # G
    episode_of_token: Tensor  # [T] long: 0..E-1

    def spread(self, values: Tensor, mask: Tensor, like: Tensor) -> Tensor:
        """[E] -> [T]: every policy token gets its episode's value, in the type of `like`; 0 off-mask."""
        return torch.where(mask, values[self.episode_of_token], 0.0).to(like.dtype)


def episode_returns(rewards: Tensor, episode_index: Tensor, group_index: Tensor) -> EpisodeReturns:
    """Sums rewards per episode and finds its group.

    Episodes whose tokens are all masked count too: they were sampled, so they belong to the baseline.
    Raises ValueError on a reward that is not finite and on an episode that lies in two groups.
    """
    _require_finite(rewards)
    episode_of_token, count = numbered(episode_index)
    group_of_token, group_count = numbered(group_index)
    returns = torch.zeros(count, dtype=torch.float64, device=rewards.device)
    returns = returns.index_add(0, episode_of_token, rewards.double())
    group = torch.zeros(count, dtype=torch.long, device=rewards.device)
    group[episode_of_token] = group_of_token
    if bool((group[episode_of_token] != group_of_token).any()):
        raise ValueError("the tokens of one episode carry different group indices; an episode belongs to one group")
    return EpisodeReturns(returns=returns, group=group, group_count=group_count, episode_of_token=episode_of_token)


def policy_lengths(mask: Tensor, episodes: EpisodeReturns) -> Tensor:
    """[E] float64: how many tokens of each episode the policy wrote."""
    return torch.zeros_like(episodes.returns).index_add(0, episodes.episode_of_token, mask.double())


def _require_finite(rewards: Tensor) -> None:
    bad = int((~torch.isfinite(rewards)).sum())
    if bad:
        raise ValueError(f"{bad} rewards are not finite; drop invalid episodes before credit is assigned")
