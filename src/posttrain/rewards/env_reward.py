"""The environment's own reward as the reward of the episode."""

from __future__ import annotations

from posttrain.task import Abstain, Score, Task
from posttrain.trajectory import Episode


def env(episode: Episode, task: Task) -> Score | Abstain:
    """The sum of what the environment gave; no opinion when it gave nothing."""
    if episode.env_reward is None:
        return Abstain("the environment gave no reward")
    return Score(episode.env_reward, {"env": episode.env_reward})
