"""OpenRLHF's HTTP reward: lists of texts go out, lists of numbers come back.

POST {"query": [prompt + response], "prompts": [...], "labels": [...]}
->   {"rewards": [float], "scores": [float], "extra_logs": {name: [float]}}; the last two may be missing
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field, PositiveInt, field_validator

from posttrain.rewards.functions import RewardError
from posttrain.rewards.service import JsonService, ServiceConfig, ServiceCounters, ServiceError
from posttrain.task import Invalid, Outcome, Score, Task, as_outcome
from posttrain.trajectory import Episode, Source


class RemoteConfig(ServiceConfig):
    """Options of the reward `http`."""

    url: str | tuple[str, ...] = Field(description="one server, or several that share the requests in turn")
    episodes_per_request: PositiveInt | None = Field(default=None, description="null = a group in one request")
    attempts: PositiveInt = 5
    backoff_seconds: float = Field(default=1.0, ge=0)
    seconds: float = Field(default=180.0, gt=0, allow_inf_nan=False)

    @field_validator("url")
    @classmethod
    def _not_empty(cls, url: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not url:
            raise ValueError("give at least one url")
        return url


class RemoteReward:
    """Scores a group through a server. A wrong count of values stops the run; a value that is not finite is Invalid."""

    def __init__(self, config: RemoteConfig, name: str = "http") -> None:
        urls = [config.url] if isinstance(config.url, str) else config.url
        self.name = name
        self.counters = ServiceCounters()
        self._size = config.episodes_per_request
        self._services = [JsonService(url, config, self.counters) for url in urls]
        self._turn = 0

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        size = self._size or len(episodes)
        parts = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        judged = await asyncio.gather(*(self._ask(part, task) for part in parts))
        return [outcome for part in judged for outcome in part]

    def close(self) -> None:
        return None

    async def _ask(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        service = self._services[self._turn % len(self._services)]
        self._turn += 1
        try:
            return outcomes_of(await service.post(request(episodes, task)), len(episodes), service.url)
        except ServiceError as error:
            return [error.as_invalid()] * len(episodes)


def request(episodes: Sequence[Episode], task: Task) -> dict[str, list[str]]:
    """The body of a request. `labels`: the accepted answer; of several, a JSON list; of none, ''."""
    label = task.ground_truth[0] if len(task.ground_truth) == 1 else json.dumps(task.ground_truth)
    prompts = [_text(episode, prompt_only=True) for episode in episodes]
    return {
        "query": [_text(episode) for episode in episodes],
        "prompts": prompts,
        "labels": [label if task.ground_truth else ""] * len(episodes),
    }


def outcomes_of(reply: Any, expected: int, url: str) -> list[Outcome]:
    """Raises RewardError when the lists have another length, ServiceError when the reply has another shape."""
    rewards = reply.get("rewards") if isinstance(reply, dict) else None
    if not isinstance(rewards, list):
        raise ServiceError("service_bad_reply", f"{url}: no list 'rewards' in the answer", transient=False)
    lists = {"rewards": rewards, "scores": reply.get("scores"), **(reply.get("extra_logs") or {})}
    for key, values in lists.items():
        if values is not None and (not isinstance(values, list) or len(values) != expected):
            count = len(values) if isinstance(values, list) else "no list of"
            raise RewardError(f"{url} returned {count} {key} for {expected} episodes; it must give one each, in order")
    logs = {key: values for key, values in lists.items() if key != "rewards" and values is not None}
    return [_outcome(value, {key: logs[key][i] for key in logs}) for i, value in enumerate(rewards)]


def _outcome(value: Any, logs: dict[str, Any]) -> Outcome:
    try:
        outcome = as_outcome(value)
    except TypeError as error:
        return Invalid("service_bad_reply", str(error))
    numbers = {key: float(log) for key, log in logs.items() if isinstance(log, int | float)}
    return replace(outcome, components=numbers) if isinstance(outcome, Score) else outcome


def _text(episode: Episode, prompt_only: bool = False) -> str:
    """All text of the episode, tool output included, or what stands before the policy's first turn."""
    pieces: list[str] = []
    for segment in episode.segments:
        if prompt_only and segment.source is Source.POLICY:
            break
        pieces.append(segment.text)
    return "".join(pieces)
