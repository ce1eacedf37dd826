"""A credited batch -> optimizer steps: epochs, mini-batches, micro-batches, loss, backward, step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms.losses import entropy_bonus
from posttrain.algorithms.values import value_loss
from posttrain.loops.credit import mini_batches
from posttrain.loops.data_parallel import bins_for, descend_together
from posttrain.loops.learner import Learner
from posttrain.packing import Batch, select
from posttrain.trainer.optimizer import Optimizer, Stepper, StepReport, non_finite_segments
from posttrain.trainer.parallel import accumulate_gradients


@dataclass(slots=True, kw_only=True)
class Update:
    """What one planned optimizer step did.

    `parts` are its micro-batches; where the policy learnt they have the streams `logprobs` and `entropy` of the forward
    before the step. Empty when there was nothing to learn from. A report is None where no step was taken.
    """

    epoch: int
    lr: float
    parts: list[Batch]
    loss: float | None = None
    report: StepReport | None = None
    critic_loss: float | None = None
    critic_report: StepReport | None = None


def update(learner: Learner, batch: Batch | None, *, step: int) -> list[Update]:
    """All planned optimizer steps of one training step, in order; those with nothing to learn from are passed over.

    batch: credited, see `credit.credited`; None when the step has no usable episode. step: numbered from 1.
    """
    plan = learner.config.batch
    updates: list[Update] = []
    for epoch in range(plan.epochs):
        minis = [] if batch is None else mini_batches(batch, learner, seed=f"{learner.config.run.seed}/{step}/{epoch}")
        missing = [None] * (plan.mini_batches - len(minis))
        updates += [_update_once(learner, mini, epoch, step) for mini in [*minis, *missing]]
    return updates


def _update_once(learner: Learner, mini: Batch | None, epoch: int, step: int) -> Update:
    done = Update(epoch=epoch, lr=learner.optimizer.lr, parts=_micro_batches(learner, mini))
    if done.parts and learner.policy_learns(step):
        done.loss, done.report = _descend(learner, learner.optimizer, _policy_loss, done.parts)
        learner.policy.version += not done.report.skipped
    else:
        learner.optimizer.pass_over()
    if done.parts and learner.critic_optimizer is not None:
        done.critic_loss, done.critic_report = _descend(learner, learner.critic_optimizer, _value_loss, done.parts)
    elif learner.critic_optimizer is not None:
        learner.critic_optimizer.pass_over()
    return done


def mean_kl(batch: Batch | None, updates: Sequence[Update]) -> tuple[float, int] | None:
    """Mean KL from the reference that rewards or losses of a step were given, and of how many policy tokens it is."""
    if batch is not None and "reward_kl" in batch.streams:
        kl = [batch.streams["reward_kl"][batch.streams["written"]]]
    else:
        kl = [part.streams["kl"][part.loss_mask] for done in updates for part in done.parts if "kl" in part.streams]
    count = sum(map(len, kl))
    return (sum(float(values.double().sum()) for values in kl) / count, count) if count else None


def _micro_batches(learner: Learner, mini: Batch | None) -> list[Batch]:
    if mini is None or not bool(mini.loss_mask.any()):
        return []
    bins = bins_for(mini, learner, at_least=learner.parallel_micro_batches)
    device = learner.policy.device
    return [select(mini, segments).to(device, copy=True) for segments in bins]  # a user's loss may write into it


def _descend(
    learner: Learner, optimizer: Stepper, loss_of: Callable[[Learner, Batch], Tensor], parts: list[Batch]
) -> tuple[float, StepReport]:
    """Forward and backward of every micro-batch, then one optimizer step. Returns the loss of the whole mini-batch."""
    if learner.ranks.size > 1:
        learns = learner.policy if optimizer is learner.optimizer else learner.critic
        assert learns is not None
        return descend_together(learner, loss_of, parts, learns.module), optimizer.step()
    assert isinstance(optimizer, Optimizer)
    losses = accumulate_gradients(
        lambda part: loss_of(learner, part),
        parts,
        optimizer.named.values(),
        workers=learner.parallel_micro_batches,
        into=optimizer.masters,
    )
    return sum(losses), optimizer.step()


def _policy_loss(learner: Learner, part: Batch) -> Tensor:
    """Sum over the micro-batch of (surrogate * off-policy factor - entropy_coef * entropy + kl_coef * KL) * weight.

    Keeps what the metrics need as streams. A sequence, for losses that have a ratio per sequence, is a segment: it is
    never split, whatever the micro-batches.
    """
    algorithm = learner.config.algorithm
    assert part.weights is not None
    logprobs, entropy = learner.policy.logprobs_and_entropy(part, learner.temperature)
    surrogate = algorithm.functions["loss"](
        logprobs,
        part.old_logprobs,
        part.advantages,
        part.loss_mask,
        part.segment_ids,
        **algorithm.options_with("loss", part.streams),
    )
    if "factors" in part.streams:
        surrogate = surrogate * part.streams["factors"]
    part.streams |= {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "surrogate": surrogate.detach()}
    if algorithm.entropy_coef > 0:
        surrogate = entropy_bonus(surrogate, entropy, part.loss_mask, entropy_coef=algorithm.entropy_coef)
    if learner.kl_in_loss:
        kl = learner.kl(logprobs, _ref_logprobs(learner, part), part.loss_mask)
        part.streams["kl"] = kl.detach()
        surrogate = surrogate + learner.kl_coef * kl
    return (surrogate * part.weights).sum()


@torch.no_grad()
def _ref_logprobs(learner: Learner, part: Batch) -> Tensor:
    assert learner.ref is not None
    return learner.ref.logprobs(part, learner.temperature)


def _value_loss(learner: Learner, part: Batch) -> Tensor:
    assert learner.critic is not None
    assert learner.config.critic is not None
    assert part.weights is not None
    values = learner.critic.values(part)
    clip = learner.config.critic.value_clip
    loss = value_loss(values, part.streams["values"], part.streams["returns"], part.loss_mask, clip=clip)
    return (loss * part.weights).sum()


def offending_episodes(done: Update) -> list[int]:
    """Episode indices with non-finite numbers in an update whose gradients were not finite (all, if none shows any)."""
    found: list[int] = []
    for part in done.parts:
        shown = [part.streams.get("logprobs"), part.streams.get("surrogate"), part.advantages, part.old_logprobs]
        bad = non_finite_segments(part.segment_ids, part.loss_mask, *[values for values in shown if values is not None])
        episodes = part.of_segment(part.episode_index)
        found += [episodes[segment] for segment in bad]
    return found or [episode for part in done.parts for episode in part.of_segment(part.episode_index)]
