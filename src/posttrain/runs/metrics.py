"""The metric dictionary: every number that a run logs, declared once with what it counts and how it is reduced.

A value is recorded with its unit: an `episode` value with the episode's id, so that an episode of three trajectories
counts once; a `token` or `turn` value with the number of tokens or turns it is the mean of. None = not known, not kept.
`timing` metrics depend on the machine and go to timing.jsonl; all others are reproducible.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["episode", "group", "turn", "token", "step"]
Reducer = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What one value belongs to, how the values of a step become one number, and what the number says."""

    unit: Unit
    reducer: Reducer
    says: str
    timing: bool = False


class MetricError(ValueError):
    """A value that the metric dictionary does not allow."""


# `<name>` in a key stands for any one word, e.g. reward/component/<name>.
METRICS: dict[str, Metric] = {
    # what the policy was worth
    "reward/mean": Metric("episode", "mean", "reward of scored episodes"),
    "reward/max": Metric("episode", "max", "best reward"),
    "reward/min": Metric("episode", "min", "worst reward"),
    "reward/component/<name>": Metric("episode", "mean", "a named part of the score"),
    "reward/source/<name>": Metric("episode", "mean", "reward of the tasks of one source"),
    # what became of the episodes
    "rollout/episodes": Metric("step", "sum", "episodes rolled out"),
    "rollout/scored": Metric("step", "sum", "episodes with a score"),
    "rollout/invalid": Metric("step", "sum", "episodes that broke: in no baseline and no update"),
    "rollout/invalid/<reason>": Metric("step", "sum", "of these, by reason"),
    "rollout/abstained": Metric("step", "sum", "episodes that the scorer declined to judge"),
    "rollout/dropped": Metric("step", "sum", "scored episodes left out of the update"),
    "rollout/turns": Metric("episode", "mean", "policy turns"),
    "rollout/policy_tokens": Metric("episode", "mean", "tokens that the policy wrote"),
    "rollout/policy_tokens_max": Metric("episode", "max", "the longest episode, in tokens of the policy"),
    "rollout/total_tokens": Metric("episode", "mean", "all tokens of the episode"),
    "rollout/trajectories": Metric("episode", "mean", "token sequences; above 1 where history was rewritten"),
    "rollout/calls": Metric("episode", "mean", "tool calls attempted"),
    "rollout/searches": Metric("episode", "mean", "searches attempted"),
    "rollout/calls/<status>": Metric("episode", "mean", "tool calls by what became of them"),
    "rollout/stop/<reason>": Metric("episode", "mean", "share of episodes that ended for this reason"),
    "rollout/tokens_cut": Metric("step", "sum", "tokens cut from observations and turns"),
    "rollout/bytes_cut": Metric("step", "sum", "bytes cut from observations"),
    # the same by env, where rows name several
    "env/reward/<name>": Metric("episode", "mean", "reward of the tasks of one env"),
    "env/turns/<name>": Metric("episode", "mean", "policy turns in it"),
    "env/calls/<name>": Metric("episode", "mean", "tool calls attempted in it"),
    "env/policy_tokens/<name>": Metric("episode", "mean", "tokens that the policy wrote in it"),
    "env/invalid/<name>": Metric("episode", "mean", "share of its episodes that broke"),
    # tools, evaluation included
    "tools/calls/<name>": Metric("step", "sum", "calls of a tool, those from the cache included"),
    "tools/cached/<name>": Metric("step", "sum", "calls answered from the cache"),
    "tools/failed/<name>": Metric("step", "sum", "calls that gave no result"),
    "tools/retries/<name>": Metric("step", "sum", "attempts beyond the first of a call, a tool server's included"),
    "tools/bytes_cut/<name>": Metric("step", "sum", "bytes of results beyond limits.result_bytes"),
    "tools/seconds/<name>": Metric("step", "sum", "seconds in a tool, its waiting included", timing=True),
    "tools/cost/<unit>": Metric("step", "sum", "what all tools cost, by unit (requests, usd, ...)"),
    # groups
    "group/count": Metric("step", "sum", "groups of the step"),
    "group/no_signal": Metric("group", "mean", "share of groups whose rewards are all equal: skipped by the update"),
    "group/reward_std": Metric("group", "mean", "spread of rewards within a group"),
    "group/size": Metric("group", "mean", "usable episodes of a group"),
    # the update
    "train/loss": Metric("step", "mean", "policy loss of a mini-batch"),
    "train/kl_loss": Metric("step", "mean", "KL term of the loss, times kl_coef"),
    "train/advantage_mean": Metric("token", "mean", "advantage of policy tokens"),
    "train/advantage_std": Metric("step", "last", "spread of advantages over policy tokens"),
    "train/entropy": Metric("token", "mean", "entropy of the policy in nats at its own tokens"),
    "train/ratio_max": Metric("step", "max", "largest probability ratio to the frozen policy"),
    "train/clip_fraction": Metric("token", "mean", "share of tokens whose gradient was clipped away"),
    "train/clip_fraction_low": Metric("token", "mean", "of these, clipped below"),
    "train/clip_fraction_high": Metric("token", "mean", "of these, clipped above"),
    "train/approx_kl": Metric("token", "mean", "KL of the policy from the one frozen for this batch (k3)"),
    "train/grad_norm": Metric("step", "mean", "gradient norm before clipping"),
    "train/grad_norm_max": Metric("step", "max", "the largest of the step"),
    "train/lr": Metric("step", "last", "learning rate of the last optimizer step"),
    "train/optimizer_steps": Metric("step", "last", "updates since the start of the run"),
    "train/skipped_updates": Metric("step", "sum", "updates left out: gradients not finite, or nothing with signal"),
    "train/trained_tokens": Metric("step", "sum", "policy tokens in the update, per epoch"),
    "train/left_out_tokens": Metric("step", "sum", "policy tokens that do not train: cut off, too old, rejected"),
    "train/policy_version": Metric("step", "last", "optimizer steps behind the weights"),
    # distance to the reference model
    "ref/kl": Metric("token", "mean", "KL of the policy from the reference, by the chosen estimator"),
    "ref/kl_only": Metric("token", "mean", "share of trained tokens without advantage: the KL term alone moves them"),
    "ref/kl_coef": Metric("step", "last", "weight of the KL, as its controller has left it"),
    # dynamic sampling
    "filter/rounds": Metric("step", "sum", "rounds of drawing until the step was full"),
    "filter/missing": Metric("step", "sum", "groups that the step lacks after the last round"),
    "filter/accept_rate": Metric("group", "mean", "share of drawn groups with a mean score inside the range"),
    "filter/too_hard": Metric("group", "mean", "share at or below the range"),
    "filter/too_easy": Metric("group", "mean", "share at or above the range"),
    "filter/accept_rate/<length>": Metric("group", "mean", "accepted among the third of groups that is short, .."),
    "remax/no_baseline": Metric("step", "sum", "groups whose greedy episode could not be judged: they learn nothing"),
    # rewards that learn, and rewards that ask servers
    "rubric/active": Metric("step", "sum", "evolving rubric items in use, over all questions"),
    "rubric/generated": Metric("step", "sum", "items made since the start of the run"),
    "rubric/retired": Metric("step", "sum", "items given up since the start of the run"),
    "rubric/generations_failed": Metric("step", "sum", "groups for which no items could be made, since the start"),
    "scorer/calls": Metric("step", "sum", "questions put to servers that score", timing=True),
    "scorer/requests": Metric("step", "sum", "HTTP requests for them, retries included", timing=True),
    "scorer/retries": Metric("step", "sum", "requests that were repeated", timing=True),
    "scorer/cached": Metric("step", "sum", "questions answered from the disk cache", timing=True),
    "scorer/unreadable": Metric("step", "sum", "replies without a verdict", timing=True),
    "scorer/failures": Metric("step", "sum", "questions that stayed without an answer", timing=True),
    "scorer/failures/<reason>": Metric("step", "sum", "of these, by reason", timing=True),
    "scorer/seconds": Metric("step", "sum", "seconds waited for servers, summed over questions", timing=True),
    # the critic
    "critic/loss": Metric("step", "mean", "value loss of a mini-batch"),
    "critic/explained_variance": Metric("step", "last", "share of the variance of returns that values explain"),
    "critic/value_mean": Metric("token", "mean", "predicted value at policy tokens"),
    "critic/grad_norm": Metric("step", "mean", "gradient norm of the critic before clipping"),
    "critic/lr": Metric("step", "last", "learning rate of the critic"),
    # sampler against trainer: the first thing to look at when learning is strange
    "gap/mean": Metric("token", "mean", "|log-prob of the sampler - log-prob of the trainer|, same weights"),
    "gap/max": Metric("step", "max", "largest such difference"),
    "gap/kl": Metric("token", "mean", "KL between the two (k3)"),
    "gap/k1": Metric("token", "mean", "KL between the two (k1: signed)"),
    "gap/share_far": Metric("token", "mean", "share of tokens whose probabilities differ by more than a factor of 2"),
    "gap/correction": Metric("token", "mean", "off-policy factor of the tokens that train"),
    "gap/correction_max": Metric("step", "max", "the largest such factor"),
    "gap/effective_sample_size": Metric("step", "mean", "of the importance weights, as a share of the tokens"),
    "gap/staleness": Metric("token", "mean", "optimizer steps between sampling and training"),
    "gap/staleness_max": Metric("step", "max", "of the token whose weights were the oldest"),
    "weights/probe_gap": Metric("step", "max", "largest difference of a log-prob of a probe, after a transfer"),
    "weights/bytes": Metric("step", "sum", "bytes of weights given to samplers that have their own"),
    # the KV cache of the sampler, evaluation included: see docs/sampler.md. What is together in it depends on the clock
    "sampler/cache_hit_rate": Metric(
        "step", "mean", "share of prompt and history tokens whose keys were cached", timing=True
    ),
    "sampler/tokens_reused": Metric("step", "sum", "such tokens", timing=True),
    "sampler/tokens_prefilled": Metric(
        "step", "sum", "tokens computed because they were not cached, or no longer", timing=True
    ),
    "sampler/evictions": Metric(
        "step", "sum", "waiting episodes whose cache was given up for memory: it is computed again", timing=True
    ),
    "sampler/preemptions": Metric("step", "sum", "turns put back for memory while they were sampled", timing=True),
    "sampler/restarts": Metric("step", "sum", "turns whose cache was dropped because weights changed", timing=True),
    "sampler/batch_size": Metric("step", "mean", "sequences per forward", timing=True),
    # samplers that are processes of their own
    "cluster/sampler_restarts": Metric("step", "last", "samplers replaced since the ranks were started", timing=True),
    "cluster/asked_again": Metric(
        "step", "last", "requests put to another sampler because theirs was lost, since then", timing=True
    ),
    # data
    "data/consumed": Metric("step", "last", "tasks asked since the start of the run"),
    "data/epoch": Metric("step", "last", "passes over the training data"),
    "data/resting": Metric("step", "last", "tasks that the curriculum will pass over in the next epoch"),
    # evaluation
    "eval/reward": Metric("episode", "mean", "reward over the evaluation tasks that could be scored"),
    "eval/component/<name>": Metric("episode", "mean", "a named part of the score"),
    "eval/source/<name>": Metric("episode", "mean", "reward of one source"),
    "eval/pass_at_<k>": Metric("group", "mean", "probability that one of k samples is right"),
    "eval/mean_at_<k>": Metric("group", "mean", "reward: mean over the k samples of a task, then over tasks"),
    "eval/maj_at_<k>": Metric("group", "mean", "share of tasks whose most frequent answer is right"),
    "eval/scored": Metric("step", "sum", "evaluation episodes with a score"),
    "eval/invalid": Metric("step", "sum", "evaluation episodes that broke"),
    "eval/invalid/<reason>": Metric("step", "sum", "of these, by reason"),
    "eval/abstained": Metric("step", "sum", "evaluation episodes that the scorer declined to judge"),
    "eval/calls": Metric("episode", "mean", "tool calls attempted"),
    "eval/searches": Metric("episode", "mean", "searches attempted"),
    "eval/turns": Metric("episode", "mean", "policy turns"),
    "eval/policy_tokens": Metric("episode", "mean", "tokens that the policy wrote"),
    # time and memory: not reproducible
    "time/step": Metric("step", "sum", "seconds of the whole step", timing=True),
    "time/publish": Metric(
        "step", "sum", "seconds of giving weights to a sampler of its own, probe included", timing=True
    ),
    "time/rollout": Metric("step", "sum", "seconds of rolling out", timing=True),
    "time/reward": Metric("step", "sum", "seconds of scoring", timing=True),
    "time/logprobs": Metric("step", "sum", "seconds of old, reference and value forwards", timing=True),
    "time/update": Metric("step", "sum", "seconds of updates", timing=True),
    "time/eval": Metric("step", "sum", "seconds of evaluation", timing=True),
    "time/checkpoint": Metric("step", "sum", "seconds of writing the checkpoint", timing=True),
    "time/tools": Metric("episode", "mean", "seconds in tools", timing=True),
    "speed/sampled_tokens_per_second": Metric("step", "mean", "policy tokens per second of rolling out", timing=True),
    "speed/published_gib_per_second": Metric(
        "step", "mean", "weights given to the sampler, without probe", timing=True
    ),
    "speed/trained_tokens_per_second": Metric("step", "mean", "tokens per second of updates", timing=True),
    "memory/peak_gib": Metric("step", "max", "largest memory of the process or the GPU", timing=True),
}


def lookup(key: str) -> Metric:
    """The declaration of `key`. Raises MetricError naming the nearest one."""
    if key in METRICS:
        return METRICS[key]
    for pattern, metric in METRICS.items():
        if "<" in pattern and _matches(key, pattern):
            return metric
    near = difflib.get_close_matches(key, METRICS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise MetricError(f"no metric is called {key!r}{hint}. Metrics are declared in posttrain.runs.metrics.METRICS")


def _matches(key: str, pattern: str) -> bool:
    head, _, rest = pattern.partition("<")
    word, tail = key.removeprefix(head), rest.partition(">")[2]
    return key.startswith(head) and word.endswith(tail) and len(word) > len(tail) and "/" not in word


@dataclass(slots=True)
class _Values:
    values: list[float] = field(default_factory=list[float])
    counts: list[int] = field(default_factory=list[int])  # tokens or turns behind each value
    by_id: dict[str, float] = field(default_factory=dict[str, float])  # episode or group


class Metrics:
    """Collects the values of one step; `reduce` gives the row to log."""

    def __init__(self) -> None:
        self._recorded: dict[str, _Values] = {}

    def record(self, key: str, value: float | None, *, id: str | None = None, count: int | None = None) -> None:
        """id: of the episode or group, needed for these units and only for them; recorded again, the value must be the
        same. count: tokens or turns that `value` is the mean of. Raises MetricError."""
        unit = lookup(key).unit
        if (id is not None) != (unit in ("episode", "group")):
            raise MetricError(f"{key} counts per {unit}: record it {'with' if id is None else 'without'} an id")
        if (count is not None) != (unit in ("turn", "token")):
            raise MetricError(f"{key} counts per {unit}: record it {'with' if count is None else 'without'} a count")
        if value is None:
            return
        values = self._recorded.setdefault(key, _Values())
        if id is None:
            values.values.append(float(value))
            values.counts.append(1 if count is None else count)
        elif values.by_id.setdefault(id, float(value)) != value and not math.isnan(value):
            raise MetricError(f"{key}: {unit} {id} was recorded with {values.by_id[id]}, now with {value}")

    def reduce(self) -> dict[str, float]:
        """One number per recorded key, in the order of the keys' names: the order of recording changes nothing."""
        return {key: _reduced(key, self._recorded[key]) for key in sorted(self._recorded)}


def _reduced(key: str, recorded: _Values) -> float:
    values = recorded.values or [recorded.by_id[id] for id in sorted(recorded.by_id)]
    counts = recorded.counts or [1] * len(values)
    return _REDUCERS[lookup(key).reducer](values, counts)


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    total = sum(counts)
    return math.fsum(v * n for v, n in zip(values, counts, strict=True)) / total if total else math.nan


_REDUCERS: dict[Reducer, Callable[[Sequence[float], Sequence[int]], float]] = {
    "mean": _mean,
    "sum": lambda values, counts: math.fsum(values),
    "max": lambda values, counts: max(values),
    "min": lambda values, counts: min(values),
    "last": lambda values, counts: values[-1],
}


def split_timing(row: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """(reproducible metrics, timings)."""
    timing = {key: value for key, value in row.items() if lookup(key).timing}
    return {key: value for key, value in row.items() if key not in timing}, timing


def dictionary_markdown() -> str:
    """The metric dictionary as a table, for the documentation."""
    rows = [f"| `{key}` | {m.unit} | {m.reducer} | {m.says} |" for key, m in METRICS.items()]
    return "\n".join(["| metric | per | reduced by | says |", "|---|---|---|---|", *rows]) + "\n"
