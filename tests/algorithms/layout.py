"""Packed batches for golden tests, written as lists of episodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Packed:
    rewards: Tensor  # [T]
    mask: Tensor  # [T]
    episode_index: Tensor  # [T]
    group_index: Tensor  # [T]

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.rewards, self.mask, self.episode_index, self.group_index


def packed(rewards: list[list[float]], masks: list[list[int]] | None = None, groups: list[int] | None = None) -> Packed:
    """One list of token rewards per episode; everything is policy text in one group unless said otherwise."""
    masks = masks or [[1] * len(episode) for episode in rewards]
    groups = groups or [0] * len(rewards)
    lengths = torch.tensor([len(episode) for episode in rewards], dtype=torch.long)
    return Packed(
        rewards=torch.tensor([r for episode in rewards for r in episode], dtype=torch.float32),
        mask=torch.tensor([bool(m) for episode in masks for m in episode], dtype=torch.bool),
        episode_index=torch.repeat_interleave(torch.arange(len(rewards)), lengths),
        group_index=torch.repeat_interleave(torch.tensor(groups, dtype=torch.long), lengths),
    )


def streams_for(name: str, batch: Packed) -> dict[str, Tensor]:
    """What the advantage `name` needs besides its four arguments, some numbers each."""
    place = torch.arange(len(batch.rewards))
    streams = {
        "remax": {"greedy_returns": torch.where(batch.group_index % 2 == 0, 0.25, 0.5)},
        "mt_grpo": {"outcome_rewards": batch.rewards / 2},
        "optimal_token_baseline": {"old_logprobs": -0.1 - (place * 7 % 5) / 4},
    }
    return streams.get(name, {})


def one_token_each(returns: list[float], groups: list[int] | None = None) -> Packed:
    """Episodes of a single policy token."""
    return packed([[value] for value in returns], groups=groups)


def close(actual: Tensor, expected: list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance, equal_nan=False
    )


def surrogate(fn, ratios, advantages, mask=None, index=None, **options):
    """Loss and gradient in the log-probs, for given ratios at old log-prob -1."""
    logprobs = (torch.tensor(ratios).log() - 1.0).requires_grad_()
    old = torch.full_like(logprobs, -1.0)
    keep = torch.ones(len(ratios), dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    index = torch.tensor(index or [0] * len(ratios))
    loss = fn(logprobs, old, torch.tensor(advantages), keep, index, **options)
    loss.sum().backward()
    return loss.detach(), logprobs.grad
