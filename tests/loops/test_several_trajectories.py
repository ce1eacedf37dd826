"""Episodes of several trajectories, by the config alone: compaction, forgotten thinking, sub-agents.

In each of them every sampled token trains once, in the context in which it was sampled, and the episode counts once in
the baseline of its group, however many trajectories it has.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from posttrain.config import RLConfig, parse_config
from posttrain.loops.collect import usable
from posttrain.loops.credit import assign_credit, mini_batches
from posttrain.packing import pack
from posttrain.runs.trajectories import read_trajectories
from posttrain.trainer.loading import model_path
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, Trajectory

from .toy import metric_rows, toy_config, trained

CODE = '''
import zlib

from posttrain.envs import Observation, Step


def odd(text):
    return zlib.crc32(text.encode()) % 2 == 1


class Compacting:
    """Three turns; after some of them all that was seen is replaced by a summary."""

    stop_strings, max_turns = (), 3

    async def reset(self, task):
        self.task = task
        return Observation()

    async def step(self, action):
        if odd(action.text):
            summary = {"role": "user", "content": f"{self.task.prompt[0]['content']} So far: {action.text[:8]}"}
            return Step(observation=Observation(history=(summary,)), reward=0.5)
        return Step(observation=Observation(text=" Go on. "), reward=0.25)

    async def close(self): ...


async def agent(task, base_url, api_key):
    """Asks again in the same conversation, or a sub-agent with a prompt of its own, or both at once."""
    import asyncio, httpx
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as http:
        async def ask(*messages):
            return (await http.post("/chat/completions", json={"messages": messages})).json()["choices"][0]["message"]
        first = await ask(task.prompt[0])
        again = ask(task.prompt[0], first, {"role": "user", "content": "And?"})
        if not odd(first["content"]):
            return len((await again)["content"]) / 10
        helper = {"role": "system", "content": "You help."}, {"role": "user", "content": first["content"]}
        said = await asyncio.gather(again, ask(*helper))
        return sum(len(message["content"]) for message in said) / 10


def length(episode, task):
    return float(sum(map(len, episode.policy_texts)) + len(episode.policy_texts))
'''
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = {"lines": ["Are you sure?", "Really?"]}


def forgetful_model(folder: Path) -> Path:
    """The packaged model with a template that drops earlier thinking."""
    policy = Policy.load("tiny_search_base", "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny_search_base"))
    tokenizer.chat_template = FORGETFUL
    policy.save(folder / "model", tokenizer)
    return folder / "model"


def config_of(kind: str, folder: Path, **algorithm: Any) -> RLConfig:
    own: dict[str, dict[str, Any]] = {
        "compaction": {"env": {"name": f"{folder}/functions.py:Compacting"}, "limits": {"max_turn_tokens": 6}},
        "thinking": {
            "env": {"name": "interaction", "options": {"default": "scripted", "options": {"scripted": TALK}}},
            "limits": {"max_turn_tokens": 8},
        },
        "sub_agents": {
            "env": {"name": "external", "options": {"agent": f"{folder}/functions.py:agent"}},
            "limits": {"max_turn_tokens": 6},
        },
    }
    if kind == "thinking":
        own[kind]["model"] = {"path": str(forgetful_model(folder)), "thinking": "strip_and_fork"}
    sections = own[kind] | {"run": {"steps": 1}, "algorithm": {"std": "none"} | algorithm}
    limits = {"max_episode_tokens": 256} | sections.pop("limits")
    return toy_config(folder, code=CODE, reward="length", limits=limits, **sections)


@pytest.fixture(scope="module", params=["compaction", "thinking", "sub_agents"])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Trajectory]]:
    """A run of one step and what it learnt from."""
    run = trained(config_of(request.param, tmp_path_factory.mktemp(request.param)))
    assert metric_rows(run)[1]["rollout/invalid"] == 0
    return run, read_trajectories(run.directory.trajectories / "step-000001.parquet")


def by_episode(found: list[Trajectory]) -> dict[str, list[Trajectory]]:
    episodes: dict[str, list[Trajectory]] = defaultdict(list)
    for one in found:
        episodes[one.episode_id].append(one)
    return episodes


def test_episodes_of_one_group_have_different_numbers_of_trajectories(done):
    """Else nothing below would be worth asking."""
    sizes = {len(parts) for parts in by_episode(done[1]).values()}
    assert len(sizes) > 1
    assert max(sizes) > 1


def test_each_token_has_the_probability_of_its_own_context(done):
    """Recomputed by the weights that sampled it, from the tokens of its trajectory and nothing else."""
    run, found = done
    before = Policy.load(run.config.model.path, "cpu")
    batch = pack(found)
    with torch.no_grad():
        again = before.logprobs(batch)
    assert batch.loss_mask.any()
    assert float((again - batch.rollout_logprobs)[batch.loss_mask].abs().max()) < 1e-4


def test_each_sampled_token_trains_once(done):
    """The turns of the parts are all turns, each in one part; what was said before stands there as context."""
    run, found = done
    row = metric_rows(run)[1]
    episodes = by_episode(found)
    written = [turn for one in found for turn in one.turns if turn.who is Source.POLICY and turn.end > turn.start]
    assert sum(one.policy_token_count for one in found) == sum(turn.end - turn.start for turn in written)
    assert row["rollout/policy_tokens"] * len(episodes) == pytest.approx(sum(t.policy_token_count for t in found))
    assert row["rollout/trajectories"] == pytest.approx(len(found) / len(episodes))
    for one in found:
        assert one.source[0] is Source.PROMPT
        assert len(one.turns) >= 1


def test_the_baseline_counts_each_episode_once(done):
    """A = R - mean over episodes, the same at every token of all parts; one token holds the outcome."""
    run, found = done
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for episode, parts in by_episode(found).items():
        paid = [reward for part in parts for reward in part.rewards or ()]
        assert sum(reward != 0 for reward in paid) == 1
        groups[parts[0].group_id][episode] = sum(paid)
    by_trajectory = []
    for one in found:
        returns = groups[one.group_id]
        expected = returns[one.episode_id] - statistics.mean(returns.values())
        given = [a for a, source in zip(one.streams["advantages"], one.source, strict=True) if source is Source.POLICY]
        assert given == pytest.approx([expected] * len(given), abs=1e-4)
        mates = [groups[other.group_id][other.episode_id] for other in found if other.group_id == one.group_id]
        by_trajectory.append(abs(statistics.mean(mates) - statistics.mean(returns.values())))
    rewards = [returned for returns in groups.values() for returned in returns.values()]
    assert metric_rows(run)[1]["reward/mean"] == pytest.approx(statistics.mean(rewards))
    assert max(by_trajectory) > 1e-3, "counting trajectories would have given another baseline"


@pytest.mark.parametrize("kind", ["compaction", "sub_agents"])
def test_an_episode_has_one_share_of_the_loss(tmp_path, kind):
    """With means by sequence: an episode's parts share its weight."""
    run = trained(config_of(kind, tmp_path, aggregate="sequence_mean"))
    found = read_trajectories(run.directory.trajectories / "step-000001.parquet")
    for one in found:
        one.streams.clear()
    assert len(found) > len(by_episode(found))
    (mini,) = mini_batches(assign_credit(usable(found), run.learner), run.learner, seed="s")
    assert mini.weights is not None
    count = int(mini.episode_index.max()) + 1
    shares = torch.zeros(count).index_add(0, mini.episode_index, mini.weights)
    assert shares.tolist() == pytest.approx([1 / count] * count, rel=1e-4)


def test_rewards_of_turns_stay_with_their_turns_in_all_parts(tmp_path):
    found = read_trajectories(
        trained(config_of("compaction", tmp_path, advantage="turn_grpo", turn_reward_coef=1.0)).directory.trajectories
        / "step-000001.parquet"
    )
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    turns: list[tuple[tuple[str, int], float, float]] = []
    for parts in by_episode(found).values():
        written = [(p, t) for p in parts for t in p.turns if t.who is Source.POLICY and t.end > t.start]
        assert len(written) == 3
        paid = [sum((p.rewards or ())[t.start : t.end]) for p, t in written]
        assert all(reward in (0.25, 0.5) for reward in paid[:-1])
        for number, (part, turn) in enumerate(written):
            key = (part.group_id, number)
            groups[key].append(sum(paid[number:]))
            turns.append((key, groups[key][-1], part.streams["advantages"][turn.end - 1]))
    for key, returned, advantage in turns:
        assert advantage == pytest.approx(returned - statistics.mean(groups[key]), abs=1e-4)


def test_the_whole_config_is_plain_text(tmp_path):
    """Nothing above needs more than a YAML file can hold."""
    for kind in ("compaction", "thinking", "sub_agents"):
        (tmp_path / kind).mkdir()
        config = config_of(kind, tmp_path / kind)
        assert parse_config(RLConfig, config.model_dump(mode="json", exclude_unset=True)) == config
