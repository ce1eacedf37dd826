"""A reward function rewards turns: from its return value to the advantages of their tokens, through a real run."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from posttrain.rewards import RewardError
from posttrain.runs.trajectories import read_trajectories
from posttrain.task import Score
from posttrain.trajectory import Source, Trajectory

from .toy import metric_rows, toy_config, trained

CODE = """
import zlib

from posttrain.envs import Observation, Step
from posttrain.task import Score


class Talk:
    stop_strings, max_turns = (), 3

    async def reset(self, task):
        return Observation()

    async def step(self, action):
        return Step(observation=Observation(text=" Go on. "), reward=100.0)

    async def close(self): ...


def earned(text):
    return zlib.crc32(text.encode()) % 100 / 100


def by_turn(episode, task):
    assert episode.turn_rewards == (100.0,) * len(episode.policy_texts), "what the env gave can be read"
    *firsts, last = map(earned, episode.policy_texts)
    return Score(earned(episode.final_text), turns=[*firsts, None])


def outcome_only(episode, task):
    return Score(1.0)


def one_too_many(episode, task):
    return Score(0.0, turns=[0.0] * (len(episode.policy_texts) + 1))
"""
LIMITS = {"max_turn_tokens": 4, "max_episode_tokens": 128}


def run_of(folder: Path, reward: dict[str, Any], **algorithm: Any) -> list[Trajectory]:
    """The trajectories of the first step of a run in `Talk`."""
    config = toy_config(
        folder, code=CODE, env={"name": f"{folder}/functions.py:Talk"}, limits=LIMITS, run={"steps": 1},
        algorithm=algorithm,
    )  # fmt: skip
    config = config.model_copy(update={"reward": type(config.reward).model_validate(reward)})
    run = trained(config)
    assert metric_rows(run)[1]["rollout/invalid"] == 0
    return read_trajectories(run.directory.trajectories / "step-000001.parquet")


def ends(trajectory: Trajectory) -> list[int]:
    return [turn.end - 1 for turn in trajectory.turns if turn.who is Source.POLICY and turn.end > turn.start]


def lying(trajectory: Trajectory) -> dict[int, float]:
    """The rewards on the tokens that have one."""
    assert trajectory.rewards is not None
    return {place: reward for place, reward in enumerate(trajectory.rewards) if reward}


def test_each_turn_is_paid_at_its_last_token_and_compared_with_the_same_turns_of_the_group(tmp_path):
    found = run_of(
        tmp_path, {"name": f"{tmp_path}/functions.py:by_turn"}, advantage="turn_grpo", std="none", turn_reward_coef=0.5
    )  # fmt: skip
    to_go: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one in found:
        assert isinstance(one.outcome, Score)
        assert one.outcome.turns is not None
        paid = [0.5 * (turn or 0.0) for turn in one.outcome.turns]
        paid[-1] += one.outcome.value
        expected = {end: reward for end, reward in zip(ends(one), paid, strict=True) if reward}
        assert lying(one) == pytest.approx(expected)
        for number in range(len(paid)):
            to_go[one.group_id, number].append(sum(paid[number:]))
    place: dict[tuple[str, int], int] = defaultdict(int)
    for one in found:
        turns = [turn for turn in one.turns if turn.who is Source.POLICY and turn.end > turn.start]
        assert len(turns) == 3
        for number, turn in enumerate(turns):
            returns = to_go[one.group_id, number]
            mine = returns[place[one.group_id, number]]
            place[one.group_id, number] += 1
            given = one.streams["advantages"][turn.start : turn.end]
            assert given == pytest.approx([mine - statistics.mean(returns)] * len(given), abs=1e-5)


def test_outcome_and_turns_are_normalised_apart(tmp_path):
    """mt_grpo sees which part of the rewards is the outcome; without turns of the function the env's are taken."""
    found = run_of(
        tmp_path, {"name": f"{tmp_path}/functions.py:by_turn"}, advantage="mt_grpo", std="none", turn_reward_coef=1.0
    )  # fmt: skip
    for group in {one.group_id for one in found}:
        outcomes = [one.outcome for one in found if one.group_id == group]
        mean = statistics.mean(outcome.value for outcome in outcomes)  # type: ignore[union-attr]
        for one in (one for one in found if one.group_id == group):
            last = one.streams["advantages"][ends(one)[-1]]
            assert last == pytest.approx(one.outcome.value - mean, abs=1e-5)  # type: ignore[union-attr]
    (tmp_path / "env").mkdir()
    of_env = run_of(
        tmp_path / "env", {"name": f"{tmp_path}/env/functions.py:outcome_only"}, advantage="mt_grpo",
        turn_reward_coef=1.0,
    )  # fmt: skip
    assert [list(lying(one).values()) for one in of_env] == [[100.0, 100.0, 101.0]] * len(of_env)


def test_parts_of_a_mixture_are_summed_by_weight(tmp_path):
    place = f"{tmp_path}/functions.py"
    parts = {"turns": {"name": f"{place}:by_turn", "weight": 2.0}, "length": {"name": f"{place}:outcome_only"}}
    found = run_of(tmp_path, {"parts": parts}, advantage="turn_grpo", turn_reward_coef=1.0)
    for one in found:
        assert isinstance(one.outcome, Score)
        assert one.outcome.turns is not None
        last = one.outcome.components["turns"]
        assert one.outcome.value == pytest.approx(2 * last + 1)
        assert list(lying(one).values()) == pytest.approx([*[t for t in one.outcome.turns if t][:2], 2 * last + 1])


def test_rewards_of_turns_are_never_dropped(tmp_path):
    with pytest.raises(RewardError, match="turn_reward_coef is 0"):
        run_of(tmp_path, {"name": f"{tmp_path}/functions.py:by_turn"})


def test_another_number_of_turns_is_an_error_of_the_reward(tmp_path):
    config = toy_config(
        tmp_path, code=CODE, reward="one_too_many", env={"name": f"{tmp_path}/functions.py:Talk"}, limits=LIMITS
    )
    with pytest.raises(RuntimeError, match=r"Score.turns has 4 rewards for the 3 turns"):
        trained(config)
