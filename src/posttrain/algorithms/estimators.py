"""What an evaluation says of a model: estimates over tasks that were sampled several times, and how sure they are.

Numbers, no tensors. A task's samples are those that could be scored; tasks are what the interval is taken over, because
samples of one task are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054  # two-sided 95 %


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `tasks` tasks with its 95 % interval; None where one task alone cannot tell."""

    mean: float
    low: float | None
    high: float | None
    tasks: int


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples is right, unbiased, when `right` of `samples` were: 1 - C(n-c, k) /
    C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1). Exact integers, so no product can lose digits.

    Raises ValueError unless 0 <= right <= samples and 1 <= k <= samples.
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"need 0 <= right <= samples and 1 <= k <= samples, got {right}, {samples} and k = {k}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(predictions: Sequence[str | None], right: Sequence[bool]) -> float:
    """Probability that the most frequent prediction is right (Wang et al. 2022, arXiv:2203.11171, majority vote).

    A sample without a prediction (None) has no vote; with no vote at all the task is not solved. Answers with equally
    many votes are drawn from at random, in expectation: the order of samples changes nothing. A prediction that was
    judged right in some samples and wrong in others (a reward of more than the answer) counts by its share.
    """
    votes: dict[str, list[bool]] = {}
    for prediction, judged in zip(predictions, right, strict=True):
        if prediction is not None:
            votes.setdefault(prediction, []).append(judged)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    winners = [judged for judged in votes.values() if len(judged) == most]
    return math.fsum(sum(judged) / most for judged in winners) / len(winners)


def clustered_mean(values: Sequence[Sequence[float]], samples: int | None = None) -> Estimate | None:
    """The mean over all values, and its interval when every inner sequence is one task. None without any value.

    samples: how many samples the values were made of, when they are not the samples themselves (pass@k of each task).

    Variance of the mean: sum over tasks of (S - m mean)^2 / M^2, where S is the sum of a task's m values and M counts
    all values (clustered standard error, Miller 2024, arXiv:2411.00640). Values that all lie in [0, 1] get Wilson's
    interval for the number of independent samples that would have this variance (the effective sample size of Korn and
    Graubard 1998): it does not shrink to a point when all are right. Others get the normal one, with n / (n - 1) tasks.
    """
    tasks = [task for task in values if len(task)]
    if not tasks:
        return None
    count = sum(map(len, tasks))
    mean = math.fsum(value for task in tasks for value in task) / count
    variance = math.fsum((math.fsum(task) - len(task) * mean) ** 2 for task in tasks) / count**2
    if all(0 <= value <= 1 for task in tasks for value in task):
        low, high = wilson(mean, effective_samples(mean, variance, len(tasks), samples or count))
        return Estimate(mean, low, high, len(tasks))
    if len(tasks) == 1:
        return Estimate(mean, None, None, 1)
    half = Z95 * math.sqrt(variance * len(tasks) / (len(tasks) - 1))
    return Estimate(mean, mean - half, mean + half, len(tasks))


def effective_samples(mean: float, variance: float, tasks: int, count: int) -> float:
    """How many independent 0/1 samples would give this variance of the mean: between `tasks` and `count`.

    Without any spread over tasks each of them says no more than one sample.
    """
    if variance <= 0:
        return tasks
    return min(max(mean * (1 - mean) / variance, tasks), count)


def wilson(share: float, samples: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share (Wilson 1927, JASA 22:209)."""
    z2 = Z95 * Z95
    centre = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = Z95 * math.sqrt(share * (1 - share) / samples + z2 / (4 * samples**2)) / (1 + z2 / samples)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))
