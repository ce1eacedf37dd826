"""Search-R1's format reward: the answer counts, and so does keeping to think, search, read, answer.

Jin et al. 2025 (arXiv 2505.15117), section 3. The structure is judged on the policy's turns and the environment's
replies, not on rendered text, so it does not depend on a chat template and cannot be fooled by tags in passages.
"""

from __future__ import annotations

import re

from posttrain.rewards.answers import PROBLEMS, turns_with_replies
from posttrain.rewards.normalize import normalize_answer
from posttrain.rewards.qa import contains, em
from posttrain.task import Invalid, Score, Task
from posttrain.trajectory import Episode

_TURN = re.compile(r"\s*<think>(.*?)</think>\s*<(search|answer)>(.*?)</\2>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|search|answer|information)>")


def search_format(
    episode: Episode,
    task: Task,
    *,
    structure_format_score: float = 0.2,
    final_format_score: float = 0.1,
    retrieval_score: float = 0.0,
) -> Score | Invalid:
    """Exact match shaped by format (s, f, r = the three options):

    | case | value |
    |---|---|
    | correct, valid structure | 1 |
    | correct, invalid structure | 1 - s |
    | wrong, valid, an accepted answer stands in what was retrieved | s + r |
    | wrong, valid, not retrieved | s |
    | wrong, invalid | f |
    | no single answer (none, several, not closed), invalid | 0 |
    """
    match = em(episode, task)
    if isinstance(match, Invalid):
        return match
    valid, found = has_search_structure(episode), was_retrieved(episode, task)
    answered = not match.components["no_answer"] and not match.components["malformed_answer"]
    if match.value:
        value = 1.0 if valid else 1.0 - structure_format_score
    elif valid:
        value = structure_format_score + (retrieval_score if found else 0.0)
    else:
        value = final_format_score if answered else 0.0
    problems = {problem: match.components[problem] for problem in PROBLEMS}
    components = {"em": match.value, "valid_structure": float(valid), "retrieved": float(found), **problems}
    return Score(value, components, match.prediction)


def has_search_structure(episode: Episode) -> bool:
    """Every turn is one thought, then one search (answered by the environment) or, in the last turn, one answer.

    Only white space may stand between the tags, and no tag inside another.
    """
    turns = list(turns_with_replies(episode))
    for number, (turn, reply) in enumerate(turns, start=1):
        match = _TURN.fullmatch(turn)
        if match is None or any(_TAG.search(match[part]) for part in (1, 3)):
            return False
        last = number == len(turns)
        if match[2] != ("answer" if last else "search"):
            return False
        if not last and "<information>" not in reply:
            return False
    return bool(turns)


def was_retrieved(episode: Episode, task: Task) -> bool:
    """Whether an accepted answer stands in the environment's text."""
    replies = " ".join(reply for _, reply in turns_with_replies(episode))
    seen = normalize_answer(_TAG.sub(" ", replies))
    return any(gold and contains(seen, gold) for gold in map(normalize_answer, task.ground_truth))
