"""A credited batch -> optimizer steps: epochs, mini-batches, micro-batches, loss, backward, step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.algorithms.values import value_loss
from posttrain.loops.credit import mini_batches
from posttrain.loops.learner import Learner
from posttrain.packing import Batch, micro_batches
from posttrain.trainer.optimizer import StepReport, non_finite_segments
from posttrain.trainer.parallel import accumulate_gradients


@dataclass(slots=True, kw_only=True)
class Update:
    """What one mini-batch did. `parts` are its micro-batches with the streams `logprobs` and `entropy` as they were
    before the step; empty when no group had signal, and then nothing was updated."""

    epoch: int
    parts: list[Batch]
    loss: float = 0.0
    report: StepReport | None = None
    critic_loss: float | None = None
    critic_report: StepReport | None = None


def update(learner: Learner, batch: Batch, *, step: int) -> list[Update]:
    """All optimizer steps of one training step; as many as planned, whatever was left out."""
    plan = learner.config.batch
    updates: list[Update] = []
    for epoch in range(plan.epochs):
        seed = f"{learner.config.run.seed}/{step}/{epoch}"
        minis = mini_batches(batch, learner, seed=seed)
        for mini in minis:
            updates.append(_update_once(learner, mini, epoch))
        for _ in range(plan.mini_batches - len(minis)):
            updates.append(_pass_over(learner, epoch))
    return updates


def _update_once(learner: Learner, mini: Batch, epoch: int) -> Update:
    if not mini.segment_count:
        return _pass_over(learner, epoch)
    workers = learner.parallel_micro_batches
    budget = learner.config.batch.tokens_per_micro_batch
    parts = [part.to(learner.policy.device) for part in micro_batches(mini, budget, at_least=workers)]
    done = Update(epoch=epoch, parts=parts)
    parameters = [parameter for _, parameter in learner.policy.parameters()]
    losses = accumulate_gradients(lambda part: _policy_loss(learner, part), parts, parameters, workers=workers)
    done.loss = sum(losses)
    done.report = learner.optimizer.step()
    if not done.report.skipped:
        learner.policy.version += 1
    if learner.critic is not None and learner.critic_optimizer is not None:
        parameters = [parameter for _, parameter in learner.critic.parameters()]
        losses = accumulate_gradients(lambda part: _value_loss(learner, part), parts, parameters, workers=workers)
        done.critic_loss = sum(losses)
        done.critic_report = learner.critic_optimizer.step()
    return done


def _pass_over(learner: Learner, epoch: int) -> Update:
    """A planned update with nothing to learn from: the schedules move on, the weights do not."""
    learner.optimizer.pass_over()
    if learner.critic_optimizer is not None:
        learner.critic_optimizer.pass_over()
    return Update(epoch=epoch, parts=[])


def _policy_loss(learner: Learner, part: Batch) -> Tensor:
    """Sum over the micro-batch of (surrogate + kl_coef * KL) * weight; keeps what the metrics need as streams."""
    algorithm = learner.config.algorithm
    assert part.weights is not None
    logprobs, entropy = learner.policy.logprobs_and_entropy(part, learner.temperature)
    surrogate = algorithm.functions["loss"](
        logprobs,
        part.old_logprobs,
        part.advantages,
        part.loss_mask,
        part.episode_index,
        **algorithm.options_of("loss"),
    )
    part.streams |= {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "surrogate": surrogate.detach()}
    if learner.ref is not None and algorithm.kl_in == "loss":
        with torch.no_grad():
            ref_logprobs = learner.ref.logprobs(part, learner.temperature)
        kl = algorithm.functions["kl_estimator"](logprobs, ref_logprobs, part.loss_mask)
        part.streams["kl"] = kl.detach()
        surrogate = surrogate + algorithm.kl_coef * kl
    return (surrogate * part.weights).sum()


def _value_loss(learner: Learner, part: Batch) -> Tensor:
    assert learner.critic is not None
    assert learner.config.critic is not None
    assert part.weights is not None
    values = learner.critic.values(part)
    part.streams["new_values"] = values.detach()
    clip = learner.config.critic.value_clip
    loss = value_loss(values, part.streams["values"], part.streams["returns"], part.loss_mask, clip=clip)
    return (loss * part.weights).sum()


def offending_episodes(done: Update) -> list[int]:
    """Episode indices with non-finite numbers in an update whose gradients were not finite (all, if none shows any)."""
    found: list[int] = []
    for part in done.parts:
        shown = [part.streams["logprobs"], part.streams["surrogate"], part.advantages, part.old_logprobs]
        bad = non_finite_segments(part.segment_ids, part.loss_mask, *[values for values in shown if values is not None])
        episodes = part.of_segment(part.episode_index)
        found += [episodes[segment] for segment in bad]
    return found or [episode for part in done.parts for episode in part.of_segment(part.episode_index)]
