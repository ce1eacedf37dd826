"""Dynamic sampling: groups are drawn until a step is full of those that have something to teach.

One call of `fill_step`
  consumes      tasks of the stream, as many per round as groups are missing
  waits for     each round as a whole
  unblocked by  enough groups inside the range, or the last round
  produces      all trajectories, those of groups outside the range too; never an error for want of groups
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.algorithms.filtering import accepted
from posttrain.config import AlgorithmConfig
from posttrain.loops.collect import Collector, collect
from posttrain.runs.metrics import Metrics
from posttrain.task import Score, Task
from posttrain.trajectory import Trajectory

log = logging.getLogger("posttrain")
LENGTHS = ("short", "medium", "long")


@dataclass(slots=True, kw_only=True)
class Filled:
    """What was rolled out for one step; `missing` groups could not be had."""

    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    rounds: int = 0
    missing: int = 0


async def fill_step(
    draw: Callable[[int], list[Task]],
    collector: Collector,
    algorithm: AlgorithmConfig,
    *,
    prompts: int,
    group_size: int,
    step: int,
) -> Filled:
    """One round without dynamic sampling; with it, at most `max_rounds`, each for the groups still missing."""
    config, filled, earlier = algorithm.dynamic_sampling, Filled(missing=prompts), Counter[str]()
    while filled.missing and filled.rounds < (1 if config is None else config.max_rounds):
        tasks = draw(filled.missing)
        found = await collect(tasks, collector, group_size=group_size, step=step, earlier=earlier)
        filled.trajectories += found
        filled.rounds += 1
        filled.missing -= len(tasks) if config is None else sum(inside(found, algorithm).values())
    if filled.missing:
        log.warning(
            "step %d: %d of %d groups after %d rounds of dynamic sampling; going on with these",
            step, prompts - filled.missing, prompts, filled.rounds,
        )  # fmt: skip
    return filled


def scores_by_group(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The scores of each group, an episode once; a group whose episodes all broke has none."""
    scores: dict[str, dict[str, float]] = {}
    for t in trajectories:
        group = scores.setdefault(t.group_id, {})
        if isinstance(t.outcome, Score):
            group[t.episode_id] = t.outcome.value
    return {group: list(values.values()) for group, values in scores.items()}


def mean_scores(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """By task id, over all groups of the task (an epoch may end within a step); a task without a score is left out."""
    task_of = {t.group_id: t.task_id for t in trajectories}
    scores: dict[str, list[float]] = {}
    for group, values in scores_by_group(trajectories).items():
        scores.setdefault(task_of[group], []).extend(values)
    return {task_id: sum(values) / len(values) for task_id, values in scores.items() if values}


def inside(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> dict[str, bool]:
    """Whether each group is one to learn from; all are without dynamic sampling."""
    config = algorithm.dynamic_sampling
    scores = scores_by_group(trajectories)
    if config is None:
        return dict.fromkeys(scores, True)
    return {group: accepted(values, low=config.low, high=config.high) for group, values in scores.items()}


def accepted_groups(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> list[Trajectory]:
    kept = inside(trajectories, algorithm)
    return [t for t in trajectories if kept[t.group_id]]


def record_filter(metrics: Metrics, filled: Filled, algorithm: AlgorithmConfig) -> None:
    """Accept rates by difficulty and by length, of all groups that were drawn."""
    config = algorithm.dynamic_sampling
    if config is None:
        return
    metrics.record("filter/rounds", filled.rounds)
    metrics.record("filter/missing", filled.missing)
    kept, scores = inside(filled.trajectories, algorithm), scores_by_group(filled.trajectories)
    for group, values in scores.items():
        mean = sum(values) / len(values) if values else None
        metrics.record("filter/accept_rate", float(kept[group]), id=group)
        metrics.record("filter/too_hard", None if mean is None else float(mean <= config.low), id=group)
        metrics.record("filter/too_easy", None if mean is None else float(mean >= config.high), id=group)
    tokens: Counter[str] = Counter()
    for t in filled.trajectories:
        tokens[t.group_id] += t.policy_token_count
    by_length = sorted(scores, key=lambda group: (tokens[group], group))
    for place, group in enumerate(by_length):
        third = LENGTHS[place * len(LENGTHS) // len(by_length)]
        metrics.record(f"filter/accept_rate/{third}", float(kept[group]), id=group)
