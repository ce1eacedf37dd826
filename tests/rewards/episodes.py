"""Episodes written as text, for tests of rewards."""

from __future__ import annotations

from posttrain.task import Task
from posttrain.trajectory import Episode, Segment, Source

PROMPT = Segment(Source.PROMPT, "Answer in tags, e.g. <answer> Beijing </answer>. Question: capital of France?\n")


def env(text: str) -> Segment:
    return Segment(Source.ENV, text)


def episode(*segments: str | Segment, env_reward: float | None = None) -> Episode:
    """Strings are the policy's turns."""
    parts = [part if isinstance(part, Segment) else Segment(Source.POLICY, part) for part in segments]
    return Episode(task_id="t", episode_id="e", segments=(PROMPT, *parts), env_reward=env_reward)


def task(*golds: str) -> Task:
    return Task(id="t", prompt=({"role": "user", "content": "?"},), ground_truth=golds)
