"""Rewards chosen by a column of the row."""

from __future__ import annotations

import asyncio

import pytest

from posttrain.rewards import RewardError, score
from posttrain.rewards.config import RewardConfig, load_reward, load_rewards
from posttrain.rewards.scoring import check_tasks
from posttrain.task import Task

from .episodes import episode


def row(*golds: str, source: str = "default", reward: str | None = None, **extra) -> Task:
    return Task(id="row", prompt=(), ground_truth=golds, source=source, reward=reward, extra=extra)


def routed(**by):
    return load_reward(RewardConfig.model_validate({"by": by}))


def value(reward, text, task) -> float:
    return asyncio.run(score(reward, episode(text), task)).value


@pytest.mark.parametrize(
    ("source", "text", "gold"),
    [
        ("openai/gsm8k", "#### 7", "#### 7"),
        ("searchR1_nq", "<answer>Paris</answer>", "paris"),
        ("aime24", r"\boxed{025}", "25"),
        ("lighteval/MATH", r"\boxed{\frac12}", r"\frac{1}{2}"),
    ],
)
def test_verls_data_sources_are_known(source, text, gold):
    assert value(routed(), text, row(gold, source=source)) == 1


def test_ones_own_come_first_and_patterns_match():
    reward = routed(rewards={"searchR1_*": {"name": "f1"}})
    assert value(reward, "<answer>big Paris</answer>", row("paris", source="searchR1_nq")) == pytest.approx(2 / 3)


def test_p80_an_unknown_name_in_row_5000_is_found_before_anything_starts():
    tasks = [row("x", source="nq") for _ in range(5000)] + [row("x", source="hotpot_qa")]
    with pytest.raises(RewardError, match=r"'hotpot_qa'.*Did you mean 'hotpotqa'"):
        check_tasks({None: routed()}, tasks)


def test_a_default_takes_the_rest():
    reward = routed(default={"name": "em"})
    check_tasks({None: reward}, [row("x", source="whatever")])
    assert value(reward, "<answer>x</answer>", row("x", source="whatever")) == 1


def test_without_the_fields_names_only_ones_own_count():
    with pytest.raises(RewardError):
        check_tasks({None: routed(known_data_sets=False, rewards={"a": {"name": "em"}})}, [row("x", source="nq")])


def test_open_instructs_rows_name_several_with_an_answer_each():
    both = row("7", "8", dataset=["gsm8k", "string_matcher"])
    reward = routed(column="dataset")
    assert value(reward, "<answer>8</answer> #### 7", both) == 2
    assert value(reward, "<answer>7</answer> #### 7", both) == 1
    outcome = asyncio.run(score(reward, episode("<answer>8</answer> #### 7"), both))
    assert (outcome.components["gsm8k"], outcome.components["string_matcher"]) == (1, 1)


def test_several_share_all_answers_where_their_number_differs():
    task = row("Paris", "Paname", "Lutetia", dataset="string_matcher,string_f1")
    assert value(routed(column="dataset"), "<answer>Paname</answer>", task) == 2


def test_weights_scale_the_verifiers():
    reward = routed(column="dataset", rewards={"gsm8k": {"name": "gsm8k", "weight": 10.0}})
    assert value(reward, "#### 7", row("7", dataset="gsm8k")) == 10


def test_a_row_without_the_column_needs_a_default():
    with pytest.raises(RewardError, match="names no reward"):
        check_tasks({None: routed(column="dataset")}, [row("x")])


def test_the_reward_column_may_name_several():
    rewards = load_rewards(RewardConfig(), ["em,f1", "em"])
    task = row("Paris", reward="em,f1")
    check_tasks(rewards, [task])
    assert value(rewards["em,f1"], "<answer>Paris</answer>", task) == 2
    with pytest.raises(RewardError, match="unknown reward 'fq'"):
        load_rewards(RewardConfig(), ["em,fq"])


def test_by_excludes_the_other_ways():
    with pytest.raises(ValueError, match="either"):
        RewardConfig.model_validate({"name": "em", "by": {}})
    saved = RewardConfig.model_validate({"by": {"column": "dataset"}})
    assert RewardConfig.model_validate(saved.model_dump()) == saved
