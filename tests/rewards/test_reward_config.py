from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pydantic import ValidationError

from posttrain.rewards import REWARDS, RewardError, score
from posttrain.rewards.config import RewardConfig, load_reward, load_rewards
from posttrain.task import Abstain, Score
from posttrain.trajectory import CallStatus, ToolCall

from .episodes import env, episode, task

OPTIONS = {"overlong": {"max_tokens": 10, "buffer": 5, "penalty": -1.0}}
SEEN = env("<snippet id=a>The seven wonders of the world are seven</snippet>")
SAID = "<answer>7 <cite id=a>the seven wonders of the world</cite></answer> #### 7 \\boxed{7}"


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_row_loads_by_name_and_judges(name):
    reward = load_reward(RewardConfig(name=name, options=OPTIONS.get(name, {})))
    text = "<answer>7</answer> #### 7 \\boxed{7}" if name not in ("citations",) else SAID
    ran = ToolCall(name="search", arguments={}, status=CallStatus.OK)
    said = replace(episode("q", SEEN, text, env_reward=1.0), policy_token_count=8, calls=(ran,))
    outcome = asyncio.run(score(reward, said, task("7")))
    assert isinstance(outcome, Score)
    assert outcome.value > 0


def test_env_reward_abstains_when_the_env_gave_none():
    assert isinstance(REWARDS["env"](episode("x"), task()), Abstain)
    assert REWARDS["env"](episode("x", env_reward=0.0), task()).value == 0


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValidationError, match=r"unknown reward 'formt'\. Did you mean 'format'"):
        RewardConfig(name="formt")
    with pytest.raises(RewardError, match=r"unknown reward 'fromat'\. Did you mean 'format'"):
        load_reward("fromat")
    with pytest.raises(ValidationError, match="unknown reward 'en'"):
        RewardConfig.model_validate({"parts": {"a": {"name": "en"}}})


def test_options_reach_the_rule_and_unknown_ones_are_refused():
    config = RewardConfig(name="format", options={"structure_format_score": 0.4})
    outcome = asyncio.run(score(load_reward(config), episode("<answer>7</answer>"), task("7")))
    assert outcome.value == pytest.approx(0.6)
    with pytest.raises(RewardError, match="structure_score"):
        load_reward(RewardConfig(name="format", options={"structure_score": 0.4}))


@pytest.mark.parametrize(
    "bad",
    [
        {"nmae": "em"},
        {"seconds": 0},
        {"seconds": float("inf")},
        {"workers": 0},
        {"name": "em", "parts": {"a": {"name": "em"}}},
        {"options": {"x": 1}, "parts": {"a": {"name": "em"}}},
        {"parts": {"a": {"name": "em", "weight": 0.0}}},
        {"parts": {"a": {"name": "em", "weight": float("nan")}}},
        {"parts": {"a": {"weight": 1.0}}},
    ],
)
def test_configs_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(bad)


def test_p80_the_rewards_of_all_rows_are_found_before_anything_starts():
    rewards = load_rewards(RewardConfig(name="f1"), [None, "em", "em", "sub_em"])
    assert {key: reward.name for key, reward in rewards.items()} == {None: "f1", "em": "em", "sub_em": "sub_em"}
    with pytest.raises(RewardError, match="unknown reward 'sub_me'"):
        load_rewards(RewardConfig(), ["em", "sub_me"])


def test_a_bare_mapping_is_no_reward():
    with pytest.raises(RewardError, match="got dict; the section of a config becomes one by RewardConfig"):
        load_reward({"name": "em"})  # type: ignore[arg-type]
