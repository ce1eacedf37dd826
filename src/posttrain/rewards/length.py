"""Rewards of length, in tokens that the policy wrote: tool output never counts."""

from __future__ import annotations

from posttrain.task import Invalid, Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import Episode


def overlong(episode: Episode, task: Task, *, max_tokens: int, buffer: int, penalty: float = 1.0) -> Score:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), times `penalty`:

    0 up to `max_tokens - buffer`; then falling linearly; -penalty from `max_tokens` on.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer must be between 1 and max_tokens = {max_tokens}, got {buffer}")
    length = episode.policy_token_count
    share = min(max(length - (max_tokens - buffer), 0) / buffer, 1.0)
    return Score(-penalty * share, {"overlong": float(share > 0), "tokens": float(length)})


def target_length(
    episode: Episode, task: Task, *, target: int | None = None, scale: int = 8192, shorter_is_fine: bool = False
) -> Score | Invalid:
    """1 - |length - target| / scale, at least 0: open-instruct's `max_length`; `up_to_max_length` with
    shorter_is_fine.

    target: None = the task's own, its first accepted answer. Deviation: never below 0.
    """
    if target is None:
        if not task.ground_truth or not task.ground_truth[0].strip().isdigit():
            return Invalid("bad_ground_truth", f"task {task.id!r} names no target length: {task.ground_truth!r:.200}")
        target = int(task.ground_truth[0])
    length = episode.policy_token_count
    off = max(length - target, 0) if shorter_is_fine else abs(length - target)
    return Score(max(1.0 - off / scale, 0.0), {"tokens": float(length)})


def words_of_answer(episode: Episode, task: Task, *, low: int = 1, high: int = 600) -> Score:
    """1 while the last turn, without thoughts, has between `low` and `high` words, else 0."""
    words = len(outside_thoughts(episode.final_text).split())
    return Score(float(low <= words <= high), {"words": float(words)})
