"""Answers a task set, every sample exactly once, with sampling settings of its own.

The seed of a sample is made from the run's seed, its task and its number: neither the order of the tasks nor what else
is being sampled decides what comes out, and a second evaluation of the same weights repeats the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from posttrain.config import EvalConfig
from posttrain.loops.collect import Collector, collect
from posttrain.loops.record import record_score, word
from posttrain.loops.summary import (
    Answered,
    Summary,
    answered,
    majority_values,
    mean_values,
    pass_values,
    scores_by_task,
    shown_ks,
    summarize,
    summarize_sources,
)
from posttrain.runs.metrics import Metrics
from posttrain.task import Abstain, Invalid, Score, Task
from posttrain.trajectory import Trajectory

EVALUATION_STEP = 0  # part of the seeds: training samples at steps from 1 on, so no evaluation repeats one of these


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was asked and what came back."""

    tasks: tuple[Task, ...]
    trajectories: tuple[Trajectory, ...]
    samples: int = 1  # per task
    right_from: float = 1.0  # see EvalConfig

    @cached_property
    def episodes(self) -> list[Answered]:
        return answered(self.tasks, self.trajectories)

    @cached_property
    def total(self) -> Summary:
        return summarize("all", self.episodes, samples=self.samples, right_from=self.right_from)

    @cached_property
    def sources(self) -> list[Summary]:
        return summarize_sources(self.episodes, samples=self.samples, right_from=self.right_from)

    def record(self, metrics: Metrics) -> None:
        """The metrics `eval/...`: a value per episode or per task, never per row."""
        for outcome, key in ((Score, "eval/scored"), (Invalid, "eval/invalid"), (Abstain, "eval/abstained")):
            metrics.record(key, sum(isinstance(episode.outcome, outcome) for episode in self.episodes))
        for episode in self.episodes:
            if isinstance(episode.outcome, Score):
                record_score(metrics, "eval", episode.id, episode.outcome, episode.task.source)
            if isinstance(episode.outcome, Invalid):
                metrics.record(f"eval/invalid/{word(episode.outcome.reason)}", 1)
            metrics.record("eval/turns", episode.turns, id=episode.id)
            metrics.record("eval/calls", episode.calls, id=episode.id)
            metrics.record("eval/searches", episode.searches, id=episode.id)
            metrics.record("eval/policy_tokens", episode.policy_tokens, id=episode.id)
        if self.samples > 1:
            self._record_samples(metrics)

    def _record_samples(self, metrics: Metrics) -> None:
        """What is only defined, or only differs from the mean, with several samples per task."""
        scores = scores_by_task(self.episodes)
        for k in shown_ks(self.samples):
            for task, value in pass_values(scores, k, self.right_from).items():
                metrics.record(f"eval/pass_at_{k}", value, id=task)
        for task, value in mean_values(scores).items():
            metrics.record(f"eval/mean_at_{self.samples}", value, id=task)
        for task, value in majority_values(scores, self.right_from).items():
            metrics.record(f"eval/maj_at_{self.samples}", value, id=task)


async def evaluate(tasks: Iterable[Task], collector: Collector, config: EvalConfig) -> Evaluation:
    """`config.samples_per_prompt` episodes of each of the first `config.max_tasks` tasks, scored."""
    chosen = tuple(islice(tasks, config.max_tasks))
    trajectories = await collect(chosen, collector, group_size=config.samples_per_prompt, step=EVALUATION_STEP)
    return Evaluation(
        tasks=chosen,
        trajectories=tuple(trajectories),
        samples=config.samples_per_prompt,
        right_from=config.right_from,
    )
