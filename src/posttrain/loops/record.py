"""What a step did -> the metrics of the dictionary. Reads only; nothing here steers the run."""

from __future__ import annotations

import inspect
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from posttrain.algorithms.diagnostics import approx_kl, clip_fraction, mismatch
from posttrain.algorithms.values import explained_variance
from posttrain.config import AlgorithmConfig
from posttrain.data import TaskStream
from posttrain.loops.learner import Learner
from posttrain.loops.update import Update
from posttrain.packing import Batch
from posttrain.rewards import Reward
from posttrain.rewards.scoring import leaves
from posttrain.rewards.service import ServiceCounters
from posttrain.runs.metrics import Metrics
from posttrain.task import Abstain, Invalid, Score
from posttrain.tools.guards import Counted
from posttrain.trajectory import Source, Trajectory

WORD = re.compile(r"[^\w.-]+")


def record_rollout(
    metrics: Metrics,
    trajectories: Sequence[Trajectory],
    kept: Sequence[Trajectory],
    sources: Mapping[str, str],
    envs: Mapping[str, str] | None = None,
) -> None:
    """What became of the episodes. kept: those that may train. sources, envs: task id -> name of its source and, where
    there are several, of its env."""
    episodes = [list(parts) for _, parts in groupby(trajectories, key=lambda t: t.episode_id)]
    metrics.record("rollout/episodes", len(episodes))
    for outcome, key in ((Score, "scored"), (Invalid, "invalid"), (Abstain, "abstained")):
        metrics.record(f"rollout/{key}", sum(isinstance(parts[-1].outcome, outcome) for parts in episodes))
    for parts in episodes:
        _record_episode(metrics, parts, sources[parts[-1].task_id])
        if envs:
            _record_in_env(metrics, parts, envs[parts[-1].task_id])
    _record_shares(metrics, episodes)
    scored = {t.episode_id for t in trajectories if isinstance(t.outcome, Score)}
    metrics.record("rollout/dropped", len(scored - {t.episode_id for t in kept}))
    turns = [turn for t in trajectories for turn in t.turns]
    metrics.record("rollout/tokens_cut", sum(turn.tokens_cut for turn in turns))
    metrics.record("rollout/bytes_cut", sum(turn.bytes_cut for turn in turns))


def _record_episode(metrics: Metrics, parts: list[Trajectory], source: str) -> None:
    name, outcome = parts[-1].episode_id, parts[-1].outcome
    turns = [turn for t in parts for turn in t.turns if turn.who is Source.POLICY]
    calls = [call for turn in turns for call in turn.calls]
    metrics.record("rollout/turns", len(turns), id=name)
    metrics.record("rollout/calls", len(calls), id=name)
    metrics.record("rollout/searches", sum(call.name == "search" for call in calls), id=name)
    metrics.record("rollout/trajectories", len(parts), id=name)
    tokens = sum(t.policy_token_count for t in parts)
    metrics.record("rollout/policy_tokens", tokens, id=name)
    metrics.record("rollout/policy_tokens_max", tokens, id=name)
    metrics.record("rollout/total_tokens", sum(map(len, parts)), id=name)
    metrics.record("time/tools", sum(call.seconds for call in calls), id=name)
    if isinstance(outcome, Invalid):
        metrics.record(f"rollout/invalid/{word(outcome.reason)}", 1)
    if isinstance(outcome, Score):
        record_score(metrics, "reward", name, outcome, source)


def _record_in_env(metrics: Metrics, parts: list[Trajectory], env: str) -> None:
    name, outcome = parts[-1].episode_id, parts[-1].outcome
    turns = [turn for t in parts for turn in t.turns if turn.who is Source.POLICY]
    metrics.record(f"env/turns/{word(env)}", len(turns), id=name)
    metrics.record(f"env/calls/{word(env)}", sum(len(turn.calls) for turn in turns), id=name)
    metrics.record(f"env/policy_tokens/{word(env)}", sum(t.policy_token_count for t in parts), id=name)
    metrics.record(f"env/invalid/{word(env)}", float(isinstance(outcome, Invalid)), id=name)
    if isinstance(outcome, Score):
        metrics.record(f"env/reward/{word(env)}", outcome.value, id=name)


def _record_shares(metrics: Metrics, episodes: list[list[Trajectory]]) -> None:
    """How episodes ended and what became of their calls; every kind that occurs is counted in every episode."""
    turns = {parts[-1].episode_id: [turn for t in parts for turn in t.turns] for parts in episodes}
    ends = {name: turns_of[-1].stop_reason if turns_of else None for name, turns_of in turns.items()}
    calls = {name: [call.status for turn in turns_of for call in turn.calls] for name, turns_of in turns.items()}
    for reason in {reason for reason in ends.values() if reason is not None}:
        for name, end in ends.items():
            metrics.record(f"rollout/stop/{reason}", float(end is reason), id=name)
    for status in {status for statuses in calls.values() for status in statuses}:
        for name, statuses in calls.items():
            metrics.record(f"rollout/calls/{status}", statuses.count(status), id=name)


def record_score(metrics: Metrics, place: str, episode: str, score: Score, source: str) -> None:
    """Records what a score consists of under `place`/...: "reward" while training, "eval" in an evaluation."""
    for key in ("reward/mean", "reward/max", "reward/min") if place == "reward" else ("eval/reward",):
        metrics.record(key, score.value, id=episode)
    metrics.record(f"{place}/source/{word(source)}", score.value, id=episode)
    for name, value in score.components.items():
        metrics.record(f"{place}/component/{word(name)}", value, id=episode)


def record_groups(metrics: Metrics, batch: Batch, trajectories: Sequence[Trajectory]) -> None:
    """Groups of the usable trajectories, and which of them have something to teach."""
    assert batch.advantages is not None
    returns: dict[str, dict[str, float]] = {}
    for t in trajectories:
        if isinstance(t.outcome, Score):
            returns.setdefault(t.group_id, {})[t.episode_id] = t.outcome.value
    loud = set(batch.group_index[batch.advantages != 0].tolist())
    metrics.record("group/count", len(returns))
    for index, (group, values) in enumerate(returns.items()):
        metrics.record("group/size", len(values), id=group)
        metrics.record("group/reward_std", statistics.pstdev(values.values()), id=group)
        metrics.record("group/no_signal", float(index not in loud), id=group)


def record_credit(metrics: Metrics, batch: Batch, version: int) -> None:
    """What is learnt from: advantages, values, and how old the weights were that sampled. version: of the policy."""
    mask, count = batch.loss_mask, int(batch.loss_mask.sum())
    written = batch.streams["written"]
    metrics.record("train/left_out_tokens", int(written.sum()) - count)
    if "greedy_returns" in batch.streams:
        unjudged = batch.group_index[batch.streams["greedy_returns"].isnan()]
        metrics.record("remax/no_baseline", len(set(unjudged.tolist())))
    if not count:
        return
    if "factors" in batch.streams:
        factors = batch.streams["factors"][mask].double()
        metrics.record("gap/correction", float(factors.mean()), count=count)
        metrics.record("gap/correction_max", float(factors.max()))
    assert batch.advantages is not None
    advantages = batch.advantages[mask].double()
    metrics.record("train/advantage_mean", float(advantages.mean()), count=count)
    metrics.record("train/advantage_std", float(advantages.std(correction=0)))
    staleness = (version - batch.policy_versions[mask]).double()
    metrics.record("gap/staleness", float(staleness.mean()), count=count)
    metrics.record("gap/staleness_max", float(staleness.max()))
    if "values" in batch.streams:
        values, returns = batch.streams["values"], batch.streams["returns"]
        metrics.record("critic/explained_variance", explained_variance(values, returns, mask))
        metrics.record("critic/value_mean", float(values[mask].double().mean()), count=count)


def record_updates(
    metrics: Metrics, updates: Sequence[Update], algorithm: AlgorithmConfig, kl_coef: float | None = None
) -> None:
    """What the updates of a step did. kl_coef: of the adaptive controller; None = that of the config."""
    kl_coef = algorithm.kl_coef if kl_coef is None else kl_coef
    reports = [done.report for done in updates if done.report is not None]
    metrics.record("train/skipped_updates", len(updates) - sum(not report.skipped for report in reports))
    for report in reports:
        metrics.record("train/grad_norm", report.grad_norm)
        metrics.record("train/grad_norm_max", report.grad_norm)
    for done in updates:
        metrics.record("train/lr", done.lr)
        metrics.record("train/loss", done.loss)
        if done.critic_report is not None:
            metrics.record("critic/loss", done.critic_loss)
            metrics.record("critic/grad_norm", done.critic_report.grad_norm)
            metrics.record("critic/lr", done.critic_report.lr)
    learnt = [done for done in updates if done.report is not None]
    for done in learnt:
        parts = [part for part in done.parts if bool(part.loss_mask.any())]
        for part in parts:
            _record_part(metrics, part, clip_range(algorithm))
        _record_kl(metrics, [part for part in parts if "kl" in part.streams], kl_coef)
    if learnt:
        _record_gap(metrics, learnt[0])


def clip_range(algorithm: AlgorithmConfig) -> tuple[float, float] | None:
    """(low, high) of a loss that clips ratios."""
    parameters = inspect.signature(algorithm.functions["loss"]).parameters
    if not {"clip_low", "clip_high"} <= parameters.keys():
        return None
    given = algorithm.options_of("loss")
    low, high = (given.get(side, parameters[side].default) for side in ("clip_low", "clip_high"))
    return low, high


def _record_part(metrics: Metrics, part: Batch, clip: tuple[float, float] | None) -> None:
    mask, count = part.loss_mask, int(part.loss_mask.sum())
    assert part.old_logprobs is not None
    assert part.advantages is not None
    logprobs = part.streams["logprobs"]
    metrics.record("train/trained_tokens", count)
    metrics.record("train/entropy", float(part.streams["entropy"][mask].mean()), count=count)
    metrics.record("train/approx_kl", approx_kl(logprobs, part.old_logprobs, mask), count=count)
    metrics.record("train/ratio_max", float((logprobs - part.old_logprobs)[mask].max().exp()))
    if clip is None:
        return
    low, high = clip
    for key, sides in (
        ("train/clip_fraction", (low, high)),
        ("train/clip_fraction_low", (low, math.inf)),
        ("train/clip_fraction_high", (math.inf, high)),
    ):
        share = clip_fraction(logprobs, part.old_logprobs, part.advantages, mask, clip_low=sides[0], clip_high=sides[1])
        metrics.record(key, share, count=count)


def _record_kl(metrics: Metrics, parts: list[Batch], kl_coef: float) -> None:
    """parts: the micro-batches of one update that have a KL term."""
    for part in parts:
        mask, count = part.loss_mask, int(part.loss_mask.sum())
        assert part.advantages is not None
        metrics.record("ref/kl_only", float((part.advantages[mask] == 0).double().mean()), count=count)
    terms = [float((part.streams["kl"] * part.weights).sum()) for part in parts if part.weights is not None]
    metrics.record("train/kl_loss", kl_coef * sum(terms) if terms else None)


def record_rewards(metrics: Metrics, rewards: Mapping[str | None, Reward]) -> None:
    """What rewards that ask servers, or learn, say of themselves. Counters of a server begin anew with each step."""
    for leaf in {id(leaf): leaf for reward in rewards.values() for leaf in leaves(reward)}.values():
        for key, value in getattr(leaf, "measures", dict[str, float])().items():
            metrics.record(key, value)
        counters: ServiceCounters | None = getattr(leaf, "counters", None)
        if counters is not None:
            for key, value in counters.take().items():
                metrics.record(key, value)


def record_progress(metrics: Metrics, learner: Learner, stream: TaskStream) -> None:
    if learner.ref is not None and learner.config.algorithm.kl_coef > 0:
        metrics.record("ref/kl_coef", learner.kl_coef)
    metrics.record("train/policy_version", learner.policy.version)
    metrics.record("train/optimizer_steps", learner.optimizer.steps_done)
    metrics.record("data/consumed", stream.drawn)
    metrics.record("data/epoch", min(stream.epochs.values()))
    if stream.curriculum is not None:
        metrics.record("data/resting", stream.resting)


def _record_gap(metrics: Metrics, first: Update) -> None:
    """Sampler against trainer: the first update runs before any weight has changed."""
    logprobs = torch.cat([part.streams["logprobs"][part.loss_mask] for part in first.parts])
    rollout = torch.cat([part.rollout_logprobs[part.loss_mask] for part in first.parts])
    gap = mismatch(logprobs, rollout, torch.ones_like(logprobs, dtype=torch.bool))
    if gap:
        metrics.record("gap/mean", gap["mean_gap"], count=len(logprobs))
        metrics.record("gap/max", gap["max_gap"])
        metrics.record("gap/kl", gap["k3"], count=len(logprobs))
        metrics.record("gap/k1", gap["k1"], count=len(logprobs))
        metrics.record("gap/share_far", gap["share_far"], count=len(logprobs))
        metrics.record("gap/effective_sample_size", gap["ess"])


def record_sampler(metrics: Metrics, done: Mapping[str, int]) -> None:
    """done: counters of `SamplerStats` since the last row; the sampler may lack some, and then so does the row."""
    for name in ("tokens_prefilled", "tokens_reused", "evictions", "preemptions", "restarts"):
        metrics.record(f"sampler/{name}", done.get(name))
    computed, reused = done.get("tokens_prefilled", 0), done.get("tokens_reused", 0)
    if computed + reused:
        metrics.record("sampler/cache_hit_rate", reused / (computed + reused))
    if done.get("steps") and "rows" in done:
        metrics.record("sampler/batch_size", done["rows"] / done["steps"])


def record_tools(metrics: Metrics, tools: Mapping[str, Counted]) -> None:
    """What was called since the last time."""
    cost: dict[str, float] = {}
    for name, tool in tools.items():
        taken = tool.counters.drain()
        metrics.record(f"tools/calls/{word(name)}", taken.calls)
        metrics.record(f"tools/cached/{word(name)}", taken.cached)
        metrics.record(f"tools/failed/{word(name)}", taken.failed)
        metrics.record(f"tools/retries/{word(name)}", taken.retries)
        metrics.record(f"tools/bytes_cut/{word(name)}", taken.bytes_cut)
        metrics.record(f"tools/seconds/{word(name)}", taken.seconds)
        for unit, amount in taken.cost.items():
            cost[unit] = cost.get(unit, 0.0) + amount
    for unit, amount in cost.items():
        metrics.record(f"tools/cost/{word(unit)}", amount)


def word(name: str) -> str:
    """A name as one word of a metric key."""
    return WORD.sub("_", name)
