"""Rubrics that grow from the differences within groups, and survive a restart."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from posttrain.rewards import RewardError, score_group
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.evolving import RubricBuffer, read_rubrics
from posttrain.rewards.rubric_items import Rubric
from posttrain.rewards.scoring import for_evaluation, load_states, states
from posttrain.rewards.verdicts import UnreadableReply
from posttrain.task import Score

from .episodes import episode
from .servers import Reply, completion, stub
from .test_rubrics import LABEL, grade_by_words, rubric_task

GROUP = [episode(f"<answer>{text}</answer>") for text in ("the river", "the year and a map", "nothing", "nothing")]


def item(text: str, title: str = "") -> dict[str, str]:
    return {"description": text, "title": title}


def server(*makes, fails: bool = False):
    """Judges by words, and makes the n-th list of items for the n-th group."""
    made = iter(makes)

    def answer(body):
        text = body["messages"][-1]["content"]
        if "tell the good ones from the bad ones" not in text:
            return completion(grade_by_words(text))
        if fails:
            return Reply({}, status=400)
        positive, negative = next(made)
        return completion(json.dumps({"question": "q", "positive_rubrics": positive, "negative_rubrics": negative}))

    return stub(answer)


def reward_at(url, **options):
    base = {"url": url + "/v1", "model": "m", "backoff_seconds": 0.01}
    return load_reward(RewardConfig(name="evolving_rubric", options=base | options))


def judge(reward, group=GROUP):
    return asyncio.run(score_group(reward, group, rubric_task()))


def test_items_grow_from_a_group_and_count_at_once():
    with server(([item("shows a map")], [item("says nothing")])) as http:
        reward = reward_at(http.url)
        outcomes = judge(reward)
    assert [round(o.value, 3) for o in outcomes] == [0.5, 0.5, -0.25, -0.25]
    assert outcomes[1].components["rubric_adaptive"] == 1
    assert reward.measures() == {
        "rubric/active": 2.0, "rubric/generated": 2.0, "rubric/retired": 0.0, "rubric/generations_failed": 0.0,
    }  # fmt: skip
    prompt = next(r["messages"][0]["content"] for r in http.requests if "tell the good" in r["messages"][0]["content"])
    assert prompt.count("<response>") == 3  # equal answers once, no empty ones
    assert "- names the river" in prompt


def test_an_item_that_tells_nothing_apart_is_retired_and_not_made_again():
    with server(([item("is in english")], []), ([item("is in english")], [])) as http:
        reward = reward_at(http.url)
        judge(reward)
        assert (reward.measures()["rubric/active"], reward.retired) == (0, 1)
        judge(reward)
        assert reward.generated == 1


def test_the_buffer_is_capped_by_spread():
    words = ["river", "year", "map", "nothing"]
    with server(([item(f"has {word}") for word in words], [])) as http:
        reward = reward_at(http.url, max_active=2)
        judge(reward)
    kept = [rubric.description for rubric in reward.buffer.items("Where and when?")]
    assert len(kept) == 2
    assert "has nothing" in kept  # half of the group: the largest spread
    assert reward.retired == 2


def test_a_generation_that_fails_leaves_the_group_judged():
    with server(fails=True) as http:
        reward = reward_at(http.url)
        assert all(isinstance(outcome, Score) for outcome in judge(reward))
    assert reward.generations_failed == 1


def test_a_group_that_agrees_teaches_nothing():
    with server() as http:
        reward = reward_at(http.url)
        judge(reward, [episode("<answer>river</answer>")] * 3 + [episode("no answer")])
    assert not any("tell the good" in r["messages"][0]["content"] for r in http.requests)


def test_a_restart_goes_on_with_the_same_buffer():
    with server(([item("shows a map")], [])) as http:
        first = reward_at(http.url)
        judge(first)
        saved = json.loads(json.dumps(states({None: first, "em": load_reward("em")})))
        second = reward_at(http.url)
        load_states({None: second, "em": load_reward("em")}, saved)
    assert second.state_dict() == first.state_dict()
    assert second.buffer.items("Where and when?") == first.buffer.items("Where and when?")
    with pytest.raises(RewardError, match="the checkpoint holds"):
        load_states({None: load_reward("em")}, saved)


def test_an_evaluation_uses_the_persistent_items_only_and_teaches_nothing():
    with server(([item("shows a map")], [])) as http:
        reward = reward_at(http.url)
        judge(reward)
        before = reward.state_dict()
        outcomes = judge(for_evaluation(reward))
    assert [round(o.value, 3) for o in outcomes] == [0.667, 0.333, 0.0, 0.0]
    assert reward.state_dict() == before


def test_inside_a_mixture_it_is_found_saved_and_frozen():
    with server(([item("shows a map")], [])) as http:
        options = {"url": http.url + "/v1", "model": "m"}
        parts = {"r": {"name": "evolving_rubric", "options": options}, "e": {"name": "dr_tulu_format"}}
        mixture = load_reward(RewardConfig.model_validate({"parts": parts}))
        judge(mixture)
        saved = states({None: mixture})
    assert list(saved) == ["default/0/evolving_rubric"]
    assert "default/0" not in str(states({None: for_evaluation(mixture)}))


def test_stats_of_a_buffer():
    buffer = RubricBuffer(max_active=2)
    a, b, c = Rubric("a"), Rubric("b"), Rubric("c")
    assert buffer.add("q", [a, b, c]) == 3
    assert buffer.add("q", [a]) == 0
    assert buffer.observe("q", {a: [0, 1], b: [0.4, 0.6], c: [1.0, 1.0]}) == 1
    entry = buffer.active["q"][a.key]
    assert (entry.groups, entry.grades, entry.mean, entry.spread) == (1, 2, 0.5, 0.5)
    assert buffer.observe("q", {a: [], b: []}) == 0
    again = RubricBuffer(max_active=2)
    again.load_state(json.loads(json.dumps(buffer.state_dict())))
    assert again.state_dict() == buffer.state_dict()


@pytest.mark.parametrize(
    "reply",
    ["", "[]", '{"rubrics": []}', '{"positive_rubrics": "a"}', '{"positive_rubrics": [{"title": "t"}]}', "{"],
)
def test_replies_that_hold_no_items_are_unreadable(reply):
    with pytest.raises(UnreadableReply):
        read_rubrics(reply)


def test_at_most_five_of_each_sign():
    many = [item(str(n)) for n in range(9)]
    made = read_rubrics(json.dumps({"positive_rubrics": many, "negative_rubrics": many}))
    assert [rubric.weight for rubric in made] == [1.0] * 5 + [-1.0] * 5
    assert {rubric.kind for rubric in made} == {"adaptive"}
    assert re.fullmatch(r"[0-9a-f]{12}", made[0].key)
    assert LABEL
