"""What is done to rewards before credit is assigned: penalties, clipping, normalisation. All of it is one form,

    r' = scale * r at every token, plus shift at the last policy token,

with one scale and one shift per episode, so that rewards on turns keep their place. `Change` is [E] in the order of
ascending episode index; changes follow one another, each looking at what the one before left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.algorithms.credit import EpisodeReturns, episode_returns, policy_lengths
from posttrain.algorithms.groups import EQUAL_TOLERANCE, differs, sizes, sum_by_group


@dataclass(frozen=True, slots=True)
class Change:
    """scale and shift [E] float64, one entry per episode."""

    scale: Tensor
    shift: Tensor


def changed(rewards: Tensor, mask: Tensor, episode_index: Tensor, change: Change) -> Tensor:
    """scale * r + shift at the last policy token of the episode

    The shift of an episode without policy tokens goes to its last token. Returns [T].
    """
    episodes = episode_returns(rewards, episode_index, torch.zeros_like(episode_index))
    place = torch.arange(len(rewards), device=rewards.device)
    rank = place + len(rewards) * mask.long()  # policy tokens beat all others, then the later wins
    last = torch.full_like(change.shift, -1, dtype=torch.long)
    last = last.scatter_reduce(0, episodes.episode_of_token, rank, "amax") % max(len(rewards), 1)
    scaled = rewards.double() * change.scale[episodes.episode_of_token]
    return scaled.index_add(0, last, change.shift).to(rewards.dtype)


def stop_properly(
    episodes: EpisodeReturns, truncated: Tensor, *, factor: float | None = None, value: float | None = None
) -> Change:
    """r * factor, or `value` instead of r, where the episode was cut off

    Hu et al. 2024, OpenRLHF (arXiv 2405.11143), stop_properly_penalty_coef: from 0 to 1 a factor, below 0 the new
    reward. `truncated` [T] bool.
    """
    if (factor is None) == (value is None):
        raise ValueError("stop_properly takes either a factor or a value")
    cut = torch.zeros(len(episodes.returns), dtype=torch.bool, device=truncated.device)
    cut[episodes.episode_of_token[truncated]] = True
    scale = torch.where(cut, 0.0 if factor is None else factor, torch.ones_like(episodes.returns))
    shift = torch.where(cut, 0.0 if value is None else value, torch.zeros_like(episodes.returns))
    return Change(scale, shift)


def overlong(episodes: EpisodeReturns, mask: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Change:
    """r - factor * clip((length - (max_length - buffer)) / buffer, 0, 1)

    Yu et al. 2025, DAPO (arXiv 2503.14476), equation 13, soft overlong punishment; length is the policy's tokens.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"expected 0 < buffer <= max_length, got {buffer=}, {max_length=}")
    excess = (policy_lengths(mask, episodes) - (max_length - buffer)) / buffer
    return Change(torch.ones_like(excess), -factor * excess.clamp(0.0, 1.0))


def clipped(episodes: EpisodeReturns, *, low: float, high: float) -> Change:
    """clip(r, low, high) of the whole episode

    Mnih et al. 2015, Human-level control through deep reinforcement learning (Nature 518). OpenRLHF clips at +-10, and
    after the baseline; here it is the reward that is clipped.
    """
    if not low < high:
        raise ValueError(f"expected low < high, got {low} and {high}")
    return Change(torch.ones_like(episodes.returns), episodes.returns.clamp(low, high) - episodes.returns)


@dataclass(frozen=True, slots=True)
class Running:
    """Count, mean and sum of squared distances of all returns seen so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def with_(self, returns: Tensor) -> Running:
        """Chan et al. 1983: two sets of numbers become one, exactly but for rounding."""
        count = float(len(returns))
        if not count:
            return self
        mean, total = float(returns.mean()), self.count + count
        squares = float((returns - mean).square().sum())
        distance = mean - self.mean
        between = distance**2 * self.count * count / total
        return Running(total, self.mean + distance * count / total, self.squares + squares + between)

    @property
    def std(self) -> float:
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


def normalised_by_batch(episodes: EpisodeReturns, *, centre: bool = True, eps: float = 1e-8) -> Change:
    """(r - mean) / (std + eps) over the episodes of the batch

    Stiennon et al. 2020, Learning to summarize from human feedback (arXiv 2009.01325), reward normalisation; whitening.
    `centre=False` only divides. Equal rewards are centred and not divided.
    """
    everything = EpisodeReturns(
        episodes.returns, torch.zeros_like(episodes.group), min(1, len(episodes.returns)), episodes.episode_of_token
    )
    return normalised_by_group(everything, centre=centre, eps=eps)


def normalised_by_group(episodes: EpisodeReturns, *, centre: bool = True, eps: float = 1e-8) -> Change:
    """(r - mean_G) / (std_G + eps) over the episodes of the group

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2, as a change of the reward. Equal rewards, and a
    group of one, are centred and not divided.
    """
    size = sizes(episodes)
    mean = sum_by_group(episodes.returns, episodes) / size
    squares = sum_by_group((episodes.returns - mean[episodes.group]).square(), episodes)
    std = (squares / (size - 1).clamp(min=1)).sqrt() + eps
    scale = torch.where(differs(episodes), 1 / std, 1.0)
    return _affine(mean[episodes.group], scale[episodes.group], centre)


def normalised_by_running(
    episodes: EpisodeReturns, running: Running, *, centre: bool = True, eps: float = 1e-8
) -> tuple[Change, Running]:
    """(r - mean) / (std + eps) over all episodes so far, this batch included

    Engstrom et al. 2020, Implementation Matters in Deep Policy Gradients (arXiv 2005.12729), reward scaling. Returns
    the change and what to remember. While all returns were equal it only centres.
    """
    seen = running.with_(episodes.returns)
    std = seen.std
    scale = 1 / (std + eps) if std > EQUAL_TOLERANCE * max(1.0, abs(seen.mean)) else 1.0
    ones = torch.ones_like(episodes.returns)
    return _affine(seen.mean * ones, scale * ones, centre), seen


def _affine(mean: Tensor, scale: Tensor, centre: bool) -> Change:
    return Change(scale, -mean * scale if centre else torch.zeros_like(mean))


Normalisation = Literal["none", "batch", "group", "running"]
