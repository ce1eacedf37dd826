"""One step of this project on a given work: the loop's own collect, assign_credit and update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.work import Work
from transformers import PreTrainedTokenizerFast

from posttrain.chat import Renderer
from posttrain.config import RLConfig
from posttrain.envs import Action, Observation, Step
from posttrain.loops.collect import Collector, collect, usable
from posttrain.loops.credit import assign_credit
from posttrain.loops.learner import make_learner
from posttrain.loops.update import update
from posttrain.rewards.config import load_reward
from posttrain.rewards.scoring import Reward
from posttrain.rollout import Limits, RolloutSpec
from posttrain.sampler.native import NativeSampler, workers_for
from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.task import Task
from posttrain.trajectory import Episode, Trajectory


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step, and the tokens the policy wrote in it."""

    rollout: float
    train: float
    tokens: int

    @property
    def step(self) -> float:
        return self.rollout + self.train


class ForcedLengths:
    """A sampler whose turns have the lengths of the plan: no stop id, that many new tokens."""

    def __init__(self, inner: NativeSampler, work: Work, round_: int) -> None:
        self._inner, self._work, self._round = inner, work, round_
        self._turns: dict[str, int] = {}

    @property
    def version(self) -> int:
        return self._inner.version

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        assert session is not None
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        length = self._work.length(self._round, episode_number(session, self._work), turn)
        params = replace(params, max_new_tokens=length, stop_ids=frozenset(), stop_strings=())
        return await self._inner.sample(ids, params, seed=seed, session=session)

    def release(self, session: str) -> None:
        self._inner.release(session)


def episode_number(session: str, work: Work) -> int:
    """Sessions are called step/place/task/sample."""
    _, place, *_, sample = session.split("/")
    return int(place) * work.samples + int(sample)


class PlannedTools:
    """Answers every turn but the last with the planned text after the planned time."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, work: Work, round_: int, episode: int) -> None:
        self.max_turns = work.turns
        self._work, self._where = work, (round_, episode)
        self._turn = 0

    async def reset(self, task: Task) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Step:
        if self._turn == self._work.tool_turns:
            return Step(done=True)
        turn, self._turn = self._turn, self._turn + 1
        await asyncio.sleep(self._work.latency(*self._where, turn))
        return Step(observation=Observation(text=self._work.observation(*self._where, turn)))

    async def close(self) -> None:
        return None


def coin(episode: Episode, task: Task) -> float:
    """Some reward, so that every group has signal."""
    return float(sum(map(ord, episode.policy_texts[-1][-8:])) % 5)


class Ours:
    """Set up once, then `step` per round."""

    def __init__(
        self,
        folder: Path,
        work: Work,
        *,
        model: Mapping[str, Any] | None = None,  # further keys of these sections, and of the sampler
        batch: Mapping[str, Any] | None = None,
        sampler: Mapping[str, Any] | None = None,
    ) -> None:
        self.work = work
        self.config = RLConfig.model_validate(
            {
                "model": {"path": str(folder), **(model or {})},
                "data": {"train": "unused.jsonl"},  # the rows are the work
                "batch": {"prompts_per_step": work.prompts, "samples_per_prompt": work.samples, **(batch or {})},
                "optimizer": {"lr": 1e-5, "schedule": "constant"},
            }
        )
        self.learner = make_learner(self.config, optimizer_steps=1000)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # AutoTokenizer would make it a Qwen2Tokenizer
        self.renderer = Renderer(tokenizer)
        workers = workers_for(self.learner.policy.device)
        self.sampler = NativeSampler(self.learner.policy, tokenizer, **{"workers": workers, **(sampler or {})})
        self.rewards: dict[str | None, Reward] = {None: load_reward(coin)}

    def step(self, round_: int) -> Timing:
        trajectories: list[Trajectory] = []

        async def roll_out() -> None:
            trajectories.extend(await self.rollout(round_))

        started = time.perf_counter()
        asyncio.run(roll_out())  # which writes what a coroutine returns as a text, thrown away: 25 ms for all tokens
        rolled_out = time.perf_counter()
        batch = assign_credit(usable(trajectories), self.learner)
        updates = update(self.learner, batch, step=round_)
        if self.learner.policy.device.type == "cuda":
            torch.cuda.synchronize()
        done = time.perf_counter()
        assert len(updates) == 1
        assert updates[0].report is not None
        assert not updates[0].report.skipped
        tokens = sum(t.policy_token_count for t in trajectories)
        return Timing(rolled_out - started, done - rolled_out, tokens)

    async def rollout(self, round_: int) -> list[Trajectory]:
        work, made = self.work, iter(range(self.work.episodes))
        sampler = ForcedLengths(self.sampler, work, round_)
        limits = Limits(
            max_prompt_tokens=work.prompt_tokens,
            max_turn_tokens=work.turn_tokens[1],
            max_observation_tokens=max(work.observation_tokens, 1),
            max_episode_tokens=work.prompt_tokens + work.most_tokens + 1,
        )
        spec = RolloutSpec(
            make_env=lambda task: PlannedTools(work, round_, next(made)),
            sampler=sampler,
            renderer=self.renderer,
            limits=limits,
            params=SamplingParams(max_new_tokens=work.turn_tokens[1]),
        )
        tasks = [
            Task(id=f"t{place}", prompt=({"role": "user", "content": work.prompt(round_, place)},))
            for place in range(work.prompts)
        ]
        collector = Collector(spec=spec, rewards=self.rewards, seed=0)
        return await collect(tasks, collector, group_size=work.samples, step=round_)
