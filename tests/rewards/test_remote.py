"""OpenRLHF's HTTP reward, byte for byte."""

from __future__ import annotations

import asyncio
import math

import pytest

from posttrain.rewards import RewardError, score_group
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.task import Abstain, Invalid, Score

from .episodes import PROMPT, env, episode, task
from .servers import Reply, stub

TWO = [episode("<answer>a</answer>"), episode("q", env("found"), "b")]


def judged(url, episodes=TWO, golds=("a",), **options):
    reward = load_reward(RewardConfig(name="http", options={"url": url, "backoff_seconds": 0.01, **options}))
    return asyncio.run(score_group(reward, episodes, task(*golds)))


def test_request_and_answer_are_openrlhfs():
    reply = Reply({"rewards": [0.5, 1], "scores": [0, 1], "extra_logs": {"length": [3, 4]}})
    with stub(reply) as server:
        outcomes = judged(server.url + "/get_reward")
    prompt = PROMPT.text
    assert server.requests == [
        {
            "query": [prompt + "<answer>a</answer>", prompt + "qfoundb"],
            "prompts": [prompt, prompt],
            "labels": ["a", "a"],
        }
    ]
    assert outcomes == [Score(0.5, {"scores": 0.0, "length": 3.0}), Score(1.0, {"scores": 1.0, "length": 4.0})]


@pytest.mark.parametrize(("golds", "label"), [((), ""), (("a", "b"), '["a", "b"]')])
def test_labels_are_texts(golds, label):
    with stub(Reply({"rewards": [0, 0]})) as server:
        judged(server.url, golds=golds)
    assert server.requests[0]["labels"] == [label] * 2


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], []])
def test_p76_a_wrong_count_names_both(values):
    with (
        stub(Reply({"rewards": values})) as server,
        pytest.raises(RewardError, match=f"returned {len(values)} rewards for 2"),
    ):
        judged(server.url)


def test_p76_so_does_a_wrong_count_of_logs():
    with (
        stub(Reply({"rewards": [1, 2], "extra_logs": {"x": [1]}})) as server,
        pytest.raises(RewardError, match="1 x for 2"),
    ):
        judged(server.url)


def test_p77_values_that_are_no_numbers_are_no_zeros():
    with stub(Reply(raw=b'{"rewards": [NaN, null]}')) as server:
        first, second = judged(server.url)
    assert first == Invalid("non_finite_reward", f"the reward function returned {math.nan}")
    assert isinstance(second, Abstain)


@pytest.mark.parametrize("body", [[1, 2], {"reward": [1, 2]}, {"rewards": 1.0}, "x"])
def test_another_shape_is_invalid_by_name(body):
    with stub(Reply(body)) as server:
        outcomes = judged(server.url)
    assert [outcome.reason for outcome in outcomes] == ["service_bad_reply"] * 2


def test_a_server_that_is_down_makes_samples_invalid_never_zero():
    with stub(Reply({}, status=500)) as server:
        outcomes = judged(server.url, attempts=2)
    assert [outcome.reason for outcome in outcomes] == ["service_down"] * 2


def test_servers_share_the_requests():
    with stub(Reply({"rewards": [1]})) as one, stub(Reply({"rewards": [2]})) as two:
        outcomes = judged([one.url, two.url], episodes_per_request=1)
    assert sorted(outcome.value for outcome in outcomes) == [1.0, 2.0]
    assert len(one.requests) == len(two.requests) == 1
