"""Scored trajectories -> a batch that can be learnt from: old log-probs, values, advantages, loss weights.

Order matters: weights are fixed over a whole mini-batch before groups without signal leave it, so that leaving them out
changes no gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.algorithms.returns import gae_returns
from posttrain.loops.learner import Learner
from posttrain.packing import Batch, bins_of, pack, select
from posttrain.trajectory import Trajectory


def assign_credit(trajectories: Sequence[Trajectory], learner: Learner) -> Batch:
    """Packs usable trajectories and gives every policy token its advantage."""
    algorithm = learner.config.algorithm
    batch = pack(trajectories)
    batch.old_logprobs = old_logprobs(batch, learner)
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        batch.rewards = batch.rewards - algorithm.kl_coef * kl_to_ref(batch, learner)
    values = None
    if learner.critic is not None:
        values = by_micro_batch(learner.critic.values, batch, learner)
        batch.streams["values"] = values
    where = (batch.loss_mask, batch.episode_index, batch.group_index)
    options = algorithm.options_of("advantage")
    batch.advantages = algorithm.functions["advantage"](batch.rewards, *where, values=values, **options)
    if values is not None:
        discounts = {key: value for key, value in options.items() if key in ("gamma", "lam")}
        batch.streams["returns"] = gae_returns(batch.rewards, *where, values=values, **discounts)
    return batch


def old_logprobs(batch: Batch, learner: Learner) -> Tensor:
    """[T] log-probs of the policy that is frozen for this batch.

    Those of the sampler when it runs this very policy at this very version: they equal what a forward would give.
    """
    policy = learner.policy
    fresh = bool((batch.policy_versions[batch.loss_mask] == policy.version).all())
    if learner.sampler_shares_weights and fresh:
        return torch.where(batch.loss_mask, batch.rollout_logprobs, 0.0)
    return by_micro_batch(lambda part: policy.logprobs(part, learner.temperature), batch, learner)


def kl_to_ref(batch: Batch, learner: Learner) -> Tensor:
    """[T] KL of the frozen policy from the reference at policy tokens; keeps the reference's log-probs as a stream."""
    assert learner.ref is not None
    assert batch.old_logprobs is not None
    ref = learner.ref
    batch.streams["ref_logprobs"] = by_micro_batch(lambda part: ref.logprobs(part, learner.temperature), batch, learner)
    estimate = learner.config.algorithm.functions["kl_estimator"]
    return estimate(batch.old_logprobs, batch.streams["ref_logprobs"], batch.loss_mask)


def kl_of_some(batch: Batch, learner: Learner) -> tuple[float, int] | None:
    """Mean KL from the reference at the policy tokens of one segment of each group, and how many tokens these are.

    For a run whose loss has no KL: enough to see how far the policy has moved, at a fraction of a forward.
    """
    group_of = batch.of_segment(batch.group_index)
    some = select(batch, [group_of.index(group) for group in dict.fromkeys(group_of)])
    kl, count = kl_to_ref(some, learner), int(some.loss_mask.sum())
    return (float(kl[some.loss_mask].double().mean()), count) if count else None


@torch.no_grad()
def by_micro_batch(forward: Callable[[Batch], Tensor], batch: Batch, learner: Learner) -> Tensor:
    """[T] of a forward without gradients, computed a micro-batch at a time and put back in the batch's order."""
    out = torch.zeros(len(batch))
    for segments in bins_of(batch.lengths, learner.config.batch.tokens_per_micro_batch):
        part = select(batch, segments)
        out[batch.tokens_of(segments)] = forward(part).float().cpu()
    return out


def mini_batches(batch: Batch, learner: Learner, *, seed: str) -> list[Batch]:
    """The step's groups, shuffled by `seed` and dealt to at most the planned number of mini-batches.

    Every mini-batch has its loss weights; then its groups without signal are left out, and it may be empty.
    """
    groups = sorted(set(batch.group_index.tolist()))
    random.Random(seed).shuffle(groups)
    count = learner.config.batch.mini_batches
    hands = [set(groups[start::count]) for start in range(count)]
    group_of = batch.of_segment(batch.group_index)
    minis = [select(batch, [s for s, g in enumerate(group_of) if g in hand]) for hand in hands if hand]
    complete = [weighted(mini, learner) for mini in minis]
    return [without_silent_groups(mini) for mini in complete] if learner.silent_groups_may_go else complete


def weighted(mini: Batch, learner: Learner) -> Batch:
    algorithm = learner.config.algorithm
    aggregate = algorithm.functions["aggregate"]
    return replace(mini, weights=aggregate(mini.loss_mask, mini.episode_index, **algorithm.options_of("aggregate")))


def without_silent_groups(mini: Batch) -> Batch:
    """Leaves out groups whose advantages are all 0; see `Learner.silent_groups_may_go`."""
    assert mini.advantages is not None
    loud = set(mini.group_index[mini.advantages != 0].tolist())
    group_of = mini.of_segment(mini.group_index)
    return select(mini, [s for s, group in enumerate(group_of) if group in loud])
