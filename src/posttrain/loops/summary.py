"""What became of evaluated episodes, counted once each: the numbers behind the table, the JSON and the metrics.

An episode counts once, however many turns, trajectories or rows it has. Only scored episodes enter reward, mean@k,
pass@k and maj@k; invalid ones and abstentions are counted beside them and are no zeros. A task with fewer than k scored
samples leaves pass@k (`Estimate.tasks` says how many are in it); mean@k and maj@k are over the scored samples of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from posttrain.algorithms.estimators import Estimate, clustered_mean, majority, pass_at_k
from posttrain.task import Abstain, Invalid, Outcome, Score, Task
from posttrain.trajectory import Source, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One episode of an evaluation."""

    task: Task
    id: str
    outcome: Outcome
    turns: int  # of the policy
    calls: int
    searches: int
    policy_tokens: int


def answered(tasks: Iterable[Task], trajectories: Sequence[Trajectory]) -> list[Answered]:
    """The episodes, in order; the trajectories of one stand side by side."""
    by_id = {task.id: task for task in tasks}
    found = []
    for name, run in groupby(trajectories, key=lambda t: t.episode_id):
        parts = list(run)
        turns = [turn for part in parts for turn in part.turns if turn.who is Source.POLICY]
        calls = [call for turn in turns for call in turn.calls]
        found.append(
            Answered(
                task=by_id[parts[-1].task_id],
                id=name,
                outcome=parts[-1].outcome,
                turns=len(turns),
                calls=len(calls),
                searches=sum(call.name == "search" for call in calls),
                policy_tokens=sum(part.policy_token_count for part in parts),
            )
        )
    return found


def scores_by_task(episodes: Iterable[Answered]) -> dict[str, list[Score]]:
    """Task id -> its scored samples, possibly none."""
    scores: dict[str, list[Score]] = {}
    for episode in episodes:
        of_task = scores.setdefault(episode.task.id, [])
        if isinstance(episode.outcome, Score):
            of_task.append(episode.outcome)
    return scores


def is_right(score: Score, right_from: float) -> bool:
    """Whether the reward is at least `right_from`, but for the rounding of a weighted sum (.7 + .2 + .1 < 1)."""
    return score.value >= right_from - 1e-9


def pass_values(scores: Mapping[str, Sequence[Score]], k: int, right_from: float) -> dict[str, float]:
    """Task id -> pass@k, for the tasks with at least k scored samples."""
    return {
        task: pass_at_k(len(of_task), sum(is_right(score, right_from) for score in of_task), k)
        for task, of_task in scores.items()
        if len(of_task) >= k
    }


def mean_values(scores: Mapping[str, Sequence[Score]]) -> dict[str, float]:
    """Task id -> mean reward of its scored samples."""
    return {task: math.fsum(s.value for s in of_task) / len(of_task) for task, of_task in scores.items() if of_task}


def majority_values(scores: Mapping[str, Sequence[Score]], right_from: float) -> dict[str, float]:
    """Task id -> chance that the majority is right; empty when the reward never reports a prediction."""
    if not any(score.prediction is not None for of_task in scores.values() for score in of_task):
        return {}
    return {
        task: majority([s.prediction for s in of_task], [is_right(s, right_from) for s in of_task])
        for task, of_task in scores.items()
        if of_task
    }


def shown_ks(samples: int) -> list[int]:
    """The k that tables and metrics show: powers of two, and all samples."""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All numbers of a set of episodes. None = nothing was scored, or not defined for this reward."""

    name: str
    tasks: int
    episodes: int
    scored: int
    invalid: dict[str, int]  # reason -> episodes
    abstained: int
    reward: Estimate | None  # mean over scored episodes
    components: dict[str, Estimate]
    pass_at: dict[int, Estimate]  # every k up to the samples of a task
    mean_at: Estimate | None  # over tasks: mean over the samples of each
    maj_at: Estimate | None
    turns: float  # per episode, like the following
    calls: float
    searches: float
    policy_tokens: float

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        record = asdict(self)
        record["pass_at"] = {str(k): estimate for k, estimate in record["pass_at"].items()}
        return record


def summarize(name: str, episodes: Sequence[Answered], *, samples: int, right_from: float) -> Summary:
    """samples: asked per task. right_from: the reward from which on a sample is right."""
    scores = scores_by_task(episodes)
    scored = [score for of_task in scores.values() for score in of_task]

    def over_tasks(values: Mapping[str, float]) -> Estimate | None:
        return clustered_mean([[value] for value in values.values()], samples=len(scored))

    passes = {k: over_tasks(pass_values(scores, k, right_from)) for k in range(1, samples + 1)}
    return Summary(
        name=name,
        tasks=len(scores),
        episodes=len(episodes),
        scored=len(scored),
        invalid=dict(sorted(Counter(e.outcome.reason for e in episodes if isinstance(e.outcome, Invalid)).items())),
        abstained=sum(isinstance(e.outcome, Abstain) for e in episodes),
        reward=clustered_mean([[score.value for score in of_task] for of_task in scores.values()]),
        components=dict(_components(scores)),
        pass_at={k: estimate for k, estimate in passes.items() if estimate is not None},
        mean_at=over_tasks(mean_values(scores)),
        maj_at=over_tasks(majority_values(scores, right_from)),
        turns=_mean(episodes, lambda e: e.turns),
        calls=_mean(episodes, lambda e: e.calls),
        searches=_mean(episodes, lambda e: e.searches),
        policy_tokens=_mean(episodes, lambda e: e.policy_tokens),
    )


def summarize_sources(episodes: Sequence[Answered], *, samples: int, right_from: float) -> list[Summary]:
    """One summary per source, by name."""
    sources: dict[str, list[Answered]] = {}
    for episode in episodes:
        sources.setdefault(episode.task.source, []).append(episode)
    return [summarize(name, sources[name], samples=samples, right_from=right_from) for name in sorted(sources)]


def _components(scores: Mapping[str, Sequence[Score]]) -> Iterator[tuple[str, Estimate]]:
    names = {name for of_task in scores.values() for score in of_task for name in score.components}
    for name in sorted(names):
        values = [[s.components[name] for s in of_task if name in s.components] for of_task in scores.values()]
        estimate = clustered_mean(values)
        if estimate is not None:
            yield name, estimate


def _mean(episodes: Sequence[Answered], number: Callable[[Answered], int]) -> float:
    return math.fsum(map(number, episodes)) / len(episodes) if episodes else math.nan
