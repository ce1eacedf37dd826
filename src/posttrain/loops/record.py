"""What a step did -> the metrics of the dictionary. Reads only; nothing here steers the run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from itertools import groupby

import torch

from posttrain.algorithms.diagnostics import approx_kl, mismatch
from posttrain.loops.update import Update
from posttrain.packing import Batch
from posttrain.runs.metrics import Metrics
from posttrain.task import Abstain, Invalid, Score
from posttrain.trajectory import Source, Trajectory

WORD = re.compile(r"[^\w.-]+")


def record_rollout(metrics: Metrics, trajectories: Sequence[Trajectory], sources: dict[str, str]) -> None:
    """What became of the episodes. sources: task id -> name of its source."""
    episodes = [list(parts) for _, parts in groupby(trajectories, key=lambda t: t.episode_id)]
    metrics.record("rollout/episodes", len(episodes))
    for outcome, key in ((Score, "scored"), (Invalid, "invalid"), (Abstain, "abstained")):
        metrics.record(f"rollout/{key}", sum(isinstance(parts[-1].outcome, outcome) for parts in episodes))
    for parts in episodes:
        _record_episode(metrics, parts, sources[parts[-1].task_id])
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


def record_score(metrics: Metrics, place: str, episode: str, score: Score, source: str) -> None:
    """place: "reward" while training, "eval" in evaluation."""
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


def record_updates(metrics: Metrics, updates: Sequence[Update], kl_coef: float) -> None:
    metrics.record("train/skipped_updates", sum(u.report is None or u.report.skipped for u in updates))
    for done in updates:
        if done.report is None:
            continue
        metrics.record("train/loss", done.loss)
        metrics.record("train/grad_norm", done.report.grad_norm)
        metrics.record("train/grad_norm_max", done.report.grad_norm)
        metrics.record("train/lr", done.report.lr)
        if done.critic_report is not None:
            metrics.record("critic/loss", done.critic_loss)
            metrics.record("critic/grad_norm", done.critic_report.grad_norm)
            metrics.record("critic/lr", done.critic_report.lr)
        for part in done.parts:
            _record_part(metrics, part, kl_coef)
    first = next((u for u in updates if u.parts), None)
    if first is not None:
        _record_gap(metrics, first)


def _record_part(metrics: Metrics, part: Batch, kl_coef: float) -> None:
    mask = part.loss_mask
    count = int(mask.sum())
    if not count:
        return
    assert part.old_logprobs is not None
    logprobs = part.streams["logprobs"]
    metrics.record("train/trained_tokens", count)
    metrics.record("train/entropy", float(part.streams["entropy"][mask].mean()), count=count)
    metrics.record("train/approx_kl", approx_kl(logprobs, part.old_logprobs, mask), count=count)
    metrics.record("train/ratio_max", float((logprobs - part.old_logprobs)[mask].max().exp()))
    if "kl" in part.streams:
        metrics.record("ref/kl", float(part.streams["kl"][mask].mean()), count=count)
        assert part.weights is not None
        metrics.record("train/kl_loss", kl_coef * float((part.streams["kl"] * part.weights).sum()))


def _record_gap(metrics: Metrics, first: Update) -> None:
    """Sampler against trainer: the first update runs before any weight has changed."""
    logprobs = torch.cat([part.streams["logprobs"][part.loss_mask] for part in first.parts])
    rollout = torch.cat([part.rollout_logprobs[part.loss_mask] for part in first.parts])
    gap = mismatch(logprobs, rollout, torch.ones_like(logprobs, dtype=torch.bool))
    if gap:
        metrics.record("gap/mean", gap["mean_gap"], count=len(logprobs))
        metrics.record("gap/max", gap["max_gap"])
        metrics.record("gap/kl", gap["k3"], count=len(logprobs))
        metrics.record("gap/effective_sample_size", gap["ess"])


def word(name: str) -> str:
    """A name as one word of a metric key."""
    return WORD.sub("_", name)
