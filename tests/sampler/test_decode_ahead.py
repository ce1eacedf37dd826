"""Decoding one step ahead of the reader gives what decoding step by step gives. The steps here are plain torch; those
of a GPU are held to the same in `test_cuda.py`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.sampler.decode_ahead import (
    LEADER,
    NUMBER,
    POSITION,
    ROW,
    SHARED,
    STREAM,
    TOGETHER,
    TOKEN,
    Columns,
    DecodeAhead,
    bucket_of,
    teams_for,
    teams_of,
)
from posttrain.sampler.draw import DrawSettings, draw
from posttrain.sampler.kv_cache import KVCache
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.sampler.randomness import uniforms
from posttrain.trainer.policy import Policy

from .tiny import CONFIGS, END, gap, play, policy, prompt, together


@dataclass
class PlainAttention:
    """One new token per sequence, a sequence at a time, keys read through the leader where they are shared."""

    cache: KVCache
    state: Tensor

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        keys, values = self.cache.layer(layer_idx)
        out = torch.empty(1, query.shape[2], query.shape[1], value.shape[-1])
        for b in range(query.shape[2]):
            row, position = int(self.state[ROW, b]), int(self.state[POSITION, b])
            leader, shared = int(self.state[LEADER, b]), int(self.state[SHARED, b])
            keys[row, :, position], values[row, :, position] = key[0, :, b], value[0, :, b]
            low = max(0, position + 1 - (how["sliding_window"] or position + 1))
            k, v = (
                torch.cat([x[leader, :, :shared], x[row, :, shared : position + 1]], dim=1)[:, low:]
                for x in (keys, values)
            )
            groups = query.shape[1] // key.shape[1]
            k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
            scores = (k @ query[0, :, b, :, None])[..., 0] * how["scaling"]
            out[0, b] = (scores.softmax(-1)[:, None] @ v)[:, 0]
        return out


@dataclass
class Done:
    result: list[list[float]]

    def read(self) -> list[list[float]]:
        return self.result


class PlainSteps:
    def __init__(self, model: Policy, cache: KVCache, columns: Columns) -> None:
        self.model, self.cache, self.columns = model, cache, columns
        self.sizes: list[int] = []
        self.forgotten = 0
        self.shared = 0  # tokens read through a leader, summed
        self.together = 0  # of them, those that a team reads

    def launch(self, size: int) -> Done:
        self.sizes.append(size)
        state, temperatures = self.columns.state[:, :size], self.columns.temperatures[:size]
        self.shared += int(state[SHARED].sum())
        self.together += self.read_by_teams(size)
        attention = PlainAttention(self.cache, state)
        hidden = self.model.hidden_states(state[TOKEN].clone(), state[POSITION].clone(), attention)[0]
        greedy = temperatures == 0
        settings = DrawSettings(torch.where(greedy, 1.0, temperatures)[:, None], greedy)
        ids, logprobs = draw(self.model.next_token_logits(hidden), uniforms(state[STREAM], state[NUMBER]), settings)
        state[TOKEN] = ids
        state[POSITION] += 1
        state[NUMBER] += 1
        return Done(torch.stack([ids.double(), logprobs.double()]).tolist())

    def read_by_teams(self, size: int) -> int:
        """Every column is in one team, of columns with its leader and its shared tokens, or in none and said to be."""
        state, members = self.columns.state[:, :size], [-1] * size
        for number, (leader, shared, *team) in enumerate(self.columns.teams.tolist()):
            assert (shared > 0) == (team[0] >= 0)
            for column in (c for c in team if c >= 0):
                assert number < teams_for(size)
                assert members[column] == -1
                members[column] = number
                assert state[LEADER : SHARED + 1, column].tolist() == [leader, shared]
        together = torch.where(torch.tensor(members) >= 0, state[SHARED], 0)
        assert state[TOGETHER].equal(together)
        assert bool((state[TOGETHER] <= state[POSITION]).all())
        return int(together.sum())

    def forget(self) -> None:
        self.forgotten += 1


def flying(model: Policy, **limits: Any) -> tuple[NativeSampler, PlainSteps]:
    sampler = NativeSampler(model, **limits)
    (engine,) = sampler.engines
    columns = Columns.of(engine.limits.max_batch, engine.cache.device)
    steps = PlainSteps(model, engine.cache, columns)
    engine._ahead = DecodeAhead(engine.cache, columns, steps)
    return sampler, steps


def several(sampler: NativeSampler, count: int, **params: Any) -> list[Sampled]:
    async def one(i: int) -> Sampled:
        settings = SamplingParams(max_new_tokens=3 + 5 * i % 23, **params)
        return await sampler.sample(prompt((9, 9, 30)[i % 3], i % 2), settings, seed=i, session=str(i))

    async def everyone() -> list[Sampled]:
        return await asyncio.gather(*map(one, range(count)))

    return asyncio.run(everyone())


@pytest.mark.parametrize("family", list(CONFIGS))
def test_ahead_draws_what_step_by_step_draws(family: str) -> None:
    model = policy(family)
    sampler, steps = flying(model)
    ahead, plain = several(sampler, 21), several(NativeSampler(model), 21)
    assert [s.ids for s in ahead] == [s.ids for s in plain]
    for a, b in zip(ahead, plain, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.stop_reason == b.stop_reason
    assert steps.shared > 0
    assert steps.together > 0
    assert max(steps.sizes) == 32
    assert min(steps.sizes) == 2
    assert set(steps.sizes) <= {2, 4, 8, 16, 32}
    assert 2 < sampler.stats().mean_batch <= 21


def test_temperatures_and_greedy_rows() -> None:
    model = policy()
    sampler, _ = flying(model)
    plain = NativeSampler(model)
    for settings in ({"temperature": 0.0}, {"temperature": 0.6}):
        assert [s.ids for s in several(sampler, 5, **settings)] == [s.ids for s in several(plain, 5, **settings)]


def test_more_requests_than_rows_and_a_stop_id() -> None:
    model = policy("qwen3")
    stops = frozenset(range(0, END, 9))
    sampler, _ = flying(model, max_batch=4)
    ahead, plain = several(sampler, 17, stop_ids=stops), several(NativeSampler(model), 17, stop_ids=stops)
    assert [(s.ids, s.stop) for s in ahead] == [(s.ids, s.stop) for s in plain]
    assert any(s.stop is not None for s in plain)


def test_turns_with_observations_equal_the_trainer() -> None:
    model = policy("gemma3")
    sampler, _ = flying(model)
    plays = [
        play(
            sampler,
            prompt((4, 23, 61)[i % 3]),
            SamplingParams(max_new_tokens=8),
            seed=i,
            session=str(i),
            observations=[prompt(7), prompt(12)],
        )
        for i in range(9)
    ]
    assert gap(model, together(*plays)) < 1e-4


def test_a_cancelled_request_is_gone_and_the_others_are_not() -> None:
    model = policy()
    sampler, _ = flying(model)

    async def scene() -> tuple[Sampled, int]:
        params = SamplingParams(max_new_tokens=40)
        stays = asyncio.create_task(sampler.sample(prompt(9), params, seed=1))
        goes = asyncio.create_task(sampler.sample(prompt(30), params, seed=2))
        while sampler.stats().tokens_generated < 10:  # noqa: ASYNC110 - the engine has no event to wait for
            await asyncio.sleep(0)
        goes.cancel()
        late = asyncio.create_task(sampler.sample(prompt(12), params, seed=3))
        await late
        return await stays, sampler.engines[0].slots.busy_count

    sampled, busy = asyncio.run(scene())
    assert busy == 0

    async def alone() -> Sampled:
        return await NativeSampler(model).sample(prompt(9), SamplingParams(max_new_tokens=40), seed=1)

    assert sampled.ids == asyncio.run(alone()).ids


def test_a_cache_that_grows_is_noticed() -> None:
    model = policy()
    sampler, steps = flying(model)
    several(sampler, 3)
    before = steps.forgotten
    several(sampler, 3)
    assert steps.forgotten == before, "the same work needs no new memory"

    async def long() -> Sampled:
        return await sampler.sample(prompt(300), SamplingParams(max_new_tokens=30), seed=0)

    asyncio.run(long())
    assert steps.forgotten > before


def test_teams_are_of_columns_that_share_most() -> None:
    """Leader's row and shared tokens of each column -> columns of each team."""
    families = [(0, 50), (3, 20), (0, 50), (3, 20), (9, 0), (0, 50), (7, 90), (0, 40)]
    assert teams_of(families, members=8, most=4) == [[0, 2, 5], [1, 3]]
    assert teams_of(families, members=2, most=4) == [[0, 2], [5], [1, 3]]
    assert teams_of(families, members=2, most=2) == [[0, 2], [5]]
    assert teams_of(families, members=2, most=1) == [[1, 3]]  # all columns of a family or none
    assert teams_of(families, members=1, most=4) == []
    assert teams_of([], members=8, most=4) == []


def test_batch_sizes_are_few() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 9, 16, 17, 49, 65, 100, 128, 256)] == [
        2,
        2,
        4,
        16,
        16,
        32,
        64,
        96,
        128,
        128,
        256,
    ]
