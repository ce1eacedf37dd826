"""Scored trajectories -> a batch that can be learnt from: old log-probs, values, advantages, loss weights.

Order matters: weights are fixed over a whole mini-batch before groups without signal leave it, so that leaving them out
changes no gradient.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from posttrain.algorithms import VALUE_TARGETS
from posttrain.algorithms.kl import in_reward
from posttrain.algorithms.returns import gae_returns, whitened
from posttrain.loops.data_parallel import forward_together
from posttrain.loops.learner import Learner
from posttrain.loops.shape import leave_out, shape_rewards, truncated_tokens
from posttrain.packing import Batch, pack, select
from posttrain.runs.plugins import options_for
from posttrain.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The usable trajectories of a step, packed for the models. The loop's rank shares it with all others."""

    batch: Batch
    truncated: Tensor  # [T] bool, see `truncated_tokens`

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> PackedStep:
        batch = pack(trajectories)
        return cls(batch, truncated_tokens(trajectories, batch))


def assign_credit(trajectories: Sequence[Trajectory], learner: Learner) -> Batch:
    """Packs usable trajectories and gives every policy token its advantage."""
    return credited(PackedStep.of(trajectories), learner)


def credited(packed: PackedStep, learner: Learner) -> Batch:
    """The batch of a packed step with old log-probs, shaped rewards, advantages and, with a critic, values and returns.

    Changes the batch in place. On several ranks every one of them has to call it with the same one.
    """
    algorithm = learner.config.algorithm
    batch, truncated = packed.batch, packed.truncated
    batch.old_logprobs = old_logprobs(batch, learner)
    shape_rewards(batch, truncated, learner)
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        kl = kl_to_ref(batch, learner)
        batch.streams["reward_kl"] = kl
        batch.rewards = in_reward(batch.rewards, kl, batch.loss_mask, kl_coef=learner.kl_coef)
    if learner.critic is not None:
        batch.streams["values"] = forward_together(learner.critic.values, batch, learner)
    where = (batch.rewards, batch.loss_mask, batch.episode_index, batch.group_index)
    known = {"old_logprobs": batch.old_logprobs, **batch.streams}
    advantages = algorithm.functions["advantage"](*where, **algorithm.options_with("advantage", known))
    batch.advantages = whitened(advantages, batch.loss_mask) if algorithm.whiten else advantages
    if learner.critic is not None:
        target = VALUE_TARGETS.get(algorithm.advantage, gae_returns)
        discounts = options_for(target, algorithm.options_of("advantage"))
        batch.streams["returns"] = target(*where, values=batch.streams["values"], **discounts)
    leave_out(batch, truncated, learner)
    return batch


def old_logprobs(batch: Batch, learner: Learner) -> Tensor:
    """[T] log-probs of pi_old, the policy as it is before the updates of this batch; 0.0 off the loss mask.

    Taken from the sampler when it runs this very policy at this very version, because a forward would give the same
    numbers; and with `algorithm.old_logprobs: sampler`, where ratios are taken to the policy that sampled.
    """
    policy = learner.policy
    fresh = bool((batch.policy_versions[batch.loss_mask] == policy.version).all())
    bypass = learner.config.algorithm.old_logprobs == "sampler"
    if bypass or (learner.sampler_shares_weights and fresh):
        return torch.where(batch.loss_mask, batch.rollout_logprobs, 0.0)
    return forward_together(partial(policy.logprobs, temperature=learner.temperature), batch, learner)


def kl_to_ref(batch: Batch, learner: Learner) -> Tensor:
    """[T] KL of the frozen policy from the reference at policy tokens; keeps the reference's log-probs as a stream."""
    assert learner.ref is not None
    assert batch.old_logprobs is not None
    ref_logprobs = partial(learner.ref.logprobs, temperature=learner.temperature)
    batch.streams["ref_logprobs"] = forward_together(ref_logprobs, batch, learner)
    return learner.kl(batch.old_logprobs, batch.streams["ref_logprobs"], batch.loss_mask).detach()


def kl_of_some(batch: Batch, learner: Learner) -> tuple[float, int] | None:
    """Mean KL from the reference at the policy tokens of one segment of each group, and how many tokens these are.

    For a run whose loss has no KL: enough to see how far the policy has moved, at a fraction of a forward.
    """
    group_of = batch.of_segment(batch.group_index)
    some = select(batch, [group_of.index(group) for group in dict.fromkeys(group_of)])
    kl, count = kl_to_ref(some, learner), int(some.loss_mask.sum())
    return (float(kl[some.loss_mask].double().mean()), count) if count else None


def mini_batches(batch: Batch, learner: Learner, *, seed: str) -> list[Batch]:
    """The step's groups, shuffled by `seed` and dealt to at most the planned number of mini-batches.

    Every mini-batch has its loss weights; then its groups without signal are left out, and it may be empty.
    """
    group_of = batch.of_segment(batch.group_index)
    groups = sorted(set(group_of))
    random.Random(seed).shuffle(groups)
    count = learner.config.batch.mini_batches
    hands = [set(groups[start::count]) for start in range(count)]
    minis = [select(batch, [s for s, g in enumerate(group_of) if g in hand]) for hand in hands if hand]
    complete = [weighted(mini, learner) for mini in minis]
    return [without_silent_groups(mini) for mini in complete] if learner.silent_groups_may_go else complete


def weighted(mini: Batch, learner: Learner) -> Batch:
    """The mini-batch with loss weights [T] and, for losses that choose tokens of it (Clip-Cov), the stream `chosen`."""
    algorithm = learner.config.algorithm
    options = algorithm.options_with("aggregate", {"group_index": mini.group_index})
    weights = algorithm.functions["aggregate"](mini.loss_mask, mini.episode_index, **options)
    streams = mini.streams
    if (choose := algorithm.functions.get("choice")) is not None:
        options = algorithm.options_of("choice")
        streams = streams | {"chosen": choose(mini.old_logprobs, mini.advantages, mini.loss_mask, **options)}
    return replace(mini, weights=weights, streams=streams)


def without_silent_groups(mini: Batch) -> Batch:
    """Leaves out groups whose advantages are all 0; see `Learner.silent_groups_may_go`."""
    assert mini.advantages is not None
    loud = set(torch.bincount(mini.group_index[mini.advantages != 0]).nonzero().flatten().tolist())
    group_of = mini.of_segment(mini.group_index)
    return select(mini, [s for s, group in enumerate(group_of) if group in loud])
