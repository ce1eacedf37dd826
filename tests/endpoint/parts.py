"""Small real parts: agents that talk HTTP to the endpoint, a scripted policy behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cases.parts import CHAT_TEMPLATE, byte_tokenizer, spec, task
from posttrain.endpoint import AgentEpisode, Host
from posttrain.endpoint.agent import ExternalAgent
from posttrain.episodes import episode_of
from posttrain.rollout import Limits, RolloutSpec, rollout_group
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.scripted import ScriptedSampler
from posttrain.task import Task
from posttrain.trajectory import Episode, Source, Trajectory

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def called(query: str, name: str = "look") -> str:
    """A call as Hermes models write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Played:
    """What became of a group."""

    trajectories: list[Trajectory]
    spec: RolloutSpec

    @property
    def only(self) -> Trajectory:
        (trajectory,) = self.trajectories
        return trajectory

    @property
    def episode(self) -> Episode:
        return episode_of(self.trajectories, self.spec.renderer)

    @property
    def texts(self) -> list[str]:
        return [self.spec.renderer.decode(t.token_ids) for t in self.trajectories]

    @property
    def written(self) -> list[list[str]]:
        """What trains, per trajectory, turn by turn."""
        return [
            [
                self.spec.renderer.decode([t.token_ids[i] for i in range(turn.start, turn.end)])
                for turn in t.turns
                if turn.end > turn.start and t.source[turn.start] is Source.POLICY
            ]
            for t in self.trajectories
        ]


def play(
    agent: Callable[..., Any] | None,
    script: Any,
    *,
    group_size: int = 1,
    the_task: Task | None = None,
    step: int = 0,
    limits: Limits | None = None,
    params: SamplingParams | None = None,
    sampler: Any = None,
    template: str = CHAT_TEMPLATE,
    **options: Any,
) -> Played:
    """Plays a group of episodes with the agent, over real HTTP."""
    tokenizer = byte_tokenizer(template)
    sampler = sampler or ScriptedSampler(script, tokenizer)
    external = ExternalAgent(agent=agent, **{"show_tools": False, **options})
    host = Host(external.host, external.port)
    rollout = replace(
        spec(None, tokenizer=tokenizer, sampler=sampler, limits=limits, params=params),
        play_otherwise=lambda ticket, made: AgentEpisode(ticket, made, external, host),
    )
    found = asyncio.run(
        rollout_group(the_task or task(), rollout, group_id="g", group_size=group_size, run_seed=7, step=step)
    )
    for trajectory in found:
        trajectory.check()
    return Played(found, rollout)


def in_turn(*lines: str) -> Callable[[Any], str]:
    """A script for any number of token sequences: the lines in the order of the calls."""
    left: list[str] = list(lines)
    return lambda call: left.pop(0)


def sources(trajectory: Trajectory) -> Sequence[str]:
    return [source.name for source in dict.fromkeys(trajectory.source)]
