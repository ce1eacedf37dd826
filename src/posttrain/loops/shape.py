"""Rewards before credit is assigned, and tokens that do not train though the policy wrote them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from posttrain.algorithms.corrections import staleness_weights
from posttrain.algorithms.credit import EpisodeReturns, episode_returns
from posttrain.algorithms.shaping import (
    Change,
    changed,
    clipped,
    normalised_by_batch,
    normalised_by_group,
    normalised_by_running,
    overlong,
    stop_properly,
)
from posttrain.loops.learner import Learner
from posttrain.packing import Batch
from posttrain.trajectory import Source, StopReason, Trajectory

CUT_OFF = {StopReason.LENGTH, StopReason.CONTEXT_FULL, StopReason.MAX_TURNS, StopReason.DEADLINE}


def truncated_tokens(trajectories: Sequence[Trajectory], batch: Batch) -> Tensor:
    """[T] bool: tokens of episodes whose last turn the policy did not end itself."""
    last = {t.episode_id: t for t in trajectories}  # the later trajectory of an episode replaces the earlier one
    cut = {name for name, t in last.items() if _last_stop(t) in CUT_OFF}
    flags = torch.tensor([t.episode_id in cut for t in trajectories])
    return flags.repeat_interleave(torch.tensor(batch.lengths))


def _last_stop(trajectory: Trajectory) -> StopReason | None:
    written = [turn for turn in trajectory.turns if turn.who is Source.POLICY]
    return written[-1].stop_reason if written else None


def shape_rewards(batch: Batch, truncated: Tensor, learner: Learner) -> None:
    """Changes `batch.rewards` as `algorithm.shaping` says; the running normalisation remembers in `learner.running`."""
    config = learner.config.algorithm.shaping

    def apply(change_of: Callable[[EpisodeReturns], Change]) -> None:
        episodes = episode_returns(batch.rewards, batch.episode_index, batch.group_index)
        batch.rewards = changed(batch.rewards, batch.loss_mask, batch.episode_index, change_of(episodes))

    if config.truncated_factor is not None or config.truncated_reward is not None:
        factor, value = config.truncated_factor, config.truncated_reward
        apply(lambda episodes: stop_properly(episodes, truncated, factor=factor, value=value))
    if (length := config.overlong_length) is not None:
        buffer, weight = config.overlong_buffer, config.overlong_factor
        apply(lambda episodes: overlong(episodes, batch.loss_mask, max_length=length, buffer=buffer, factor=weight))
    if config.clip_low is not None and config.clip_high is not None:
        low, high = config.clip_low, config.clip_high
        apply(lambda episodes: clipped(episodes, low=low, high=high))
    if config.normalise != "none":
        apply(lambda episodes: _normalise(episodes, learner))


def _normalise(episodes: EpisodeReturns, learner: Learner) -> Change:
    config = learner.config.algorithm.shaping
    if config.normalise == "running":
        change, learner.running = normalised_by_running(episodes, learner.running, centre=config.centre)
        return change
    by = normalised_by_batch if config.normalise == "batch" else normalised_by_group
    return by(episodes, centre=config.centre)


def leave_out(batch: Batch, truncated: Tensor, learner: Learner) -> None:
    """Takes tokens that must not train out of `batch.loss_mask` and stores the off-policy factors [T] of the others.

    Called after advantages are computed, so that every episode counts in the baselines, and before loss weights are,
    so that denominators count only tokens that train.
    """
    config = learner.config.algorithm
    keep = batch.loss_mask.clone()
    if config.shaping.mask_truncated:
        keep &= ~truncated
    age = learner.policy.version - batch.policy_versions
    if config.max_staleness is not None:
        keep &= age <= config.max_staleness
    factors = torch.ones(len(batch))
    if config.staleness_decay < 1:
        version, decay = learner.policy.version, config.staleness_decay
        factors = factors * staleness_weights(batch.policy_versions, version, keep, decay=decay)
    if "correction" in config.functions:
        where = (batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, batch.episode_index)
        given = config.functions["correction"](*where, **config.options_of("correction"))
        keep &= given != 0
        factors = factors * given
    if config.correction is not None or config.staleness_decay < 1:
        batch.streams["factors"] = torch.where(keep, factors, 0.0)
    batch.streams["written"] = batch.loss_mask
    batch.loss_mask = keep
    assert batch.advantages is not None
    batch.advantages = torch.where(keep, batch.advantages, 0.0)
