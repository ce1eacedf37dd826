"""Short answers to questions: exact match, token F1, containment; of the tagged answer in the policy's last turn."""

from __future__ import annotations

import re
from collections import Counter

from posttrain.rewards.answers import best_over_answers
from posttrain.rewards.normalize import normalize_answer
from posttrain.task import Invalid, Score, Task
from posttrain.trajectory import Episode


def em(episode: Episode, task: Task) -> Score | Invalid:
    """1 when the answer equals an accepted one after `normalize_answer`, else 0."""
    return best_over_answers("em", episode, task, normalize=normalize_answer, compare=exact_match)


def f1(episode: Episode, task: Task) -> Score | Invalid:
    """Token F1 with the best accepted answer, after `normalize_answer` (Rajpurkar et al. 2016, section 6.1)."""
    return best_over_answers("f1", episode, task, normalize=normalize_answer, compare=token_f1)


def sub_em(episode: Episode, task: Task) -> Score | Invalid:
    """1 when an accepted answer stands inside the answer, after `normalize_answer`, else 0.

    Unlike Search-R1's, a match may not cut a Latin word or a number: "10" is not in "2010".
    """
    return best_over_answers("sub_em", episode, task, normalize=normalize_answer, compare=contains)


def exact_match(prediction: str, gold: str) -> float:
    return float(prediction == gold)


def token_f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over tokens split at spaces, counted with multiplicity."""
    predicted, wanted = prediction.split(), gold.split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0


def contains(prediction: str, gold: str) -> float:
    return float(re.search(rf"(?<![0-9a-z]){re.escape(gold)}(?![0-9a-z])", prediction) is not None)
