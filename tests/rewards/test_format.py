from __future__ import annotations

import pytest

from posttrain.rewards.format import has_search_structure, search_format
from posttrain.task import Invalid

from .episodes import env, episode, task

SEARCH = "<think>where?</think>\n<search>capital of France</search>"
FOUND = env("\n\n<information>Doc 1(Title: France) Its capital is Paris.</information>\n\n")
NOTHING = env("\n\n<information>Doc 1(Title: Spain) Madrid.</information>\n\n")
RIGHT, WRONG = "<think>so</think><answer>Paris</answer>", "<think>so</think><answer>Rome</answer>"
OPTIONS = {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.3}


@pytest.mark.parametrize(
    ("ep", "expected"),
    [
        (episode(SEARCH, FOUND, RIGHT), 1.0),
        (episode(RIGHT), 1.0),
        (episode(SEARCH, FOUND, "<answer>Paris</answer>"), 0.8),
        (episode(SEARCH, FOUND, WRONG), 0.5),
        (episode(SEARCH, NOTHING, WRONG), 0.2),
        (episode(SEARCH, FOUND, "<answer>Rome</answer>"), 0.1),
        (episode(SEARCH, FOUND, "I give up."), 0.0),
        (episode(SEARCH, FOUND, "<think>so</think><answer>Paris"), 0.0),
        (episode(SEARCH, FOUND, RIGHT + "<answer>Paris</answer>"), 0.0),
        (episode(), 0.0),
    ],
)
def test_the_table(ep, expected):
    assert search_format(ep, task("Paris"), **OPTIONS).value == pytest.approx(expected)


def test_defaults_are_those_of_the_scripts():
    assert search_format(episode(SEARCH, FOUND, WRONG), task("Paris")).value == pytest.approx(0.2)
    assert search_format(episode(SEARCH, FOUND, "<answer>Rome</answer>"), task("Paris")).value == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("ep", "valid"),
    [
        (episode(SEARCH, FOUND, SEARCH, NOTHING, RIGHT), True),
        (episode(SEARCH, FOUND), False),  # ends in a search
        (episode(SEARCH, RIGHT), False),  # the search was never answered
        (episode(SEARCH, env("My previous action is invalid."), RIGHT), False),
        (episode("<search>q</search>", FOUND, RIGHT), False),  # no thought
        (episode("so <think>x</think><answer>Paris</answer>"), False),  # text between tags
        (episode("<think>x</think> so <answer>Paris</answer>"), False),
        (episode(RIGHT + "."), False),
        (episode("<think>a <search>b</search></think><answer>Paris</answer>"), False),  # a tag in a tag
        (episode("<think>a</think><think>b</think><answer>Paris</answer>"), False),
        (episode("<think>a</think><search>q</answer>"), False),
        (episode(RIGHT, env("<information></information>"), RIGHT), False),  # an answer before the end
        (episode("<think>x</think><information>Paris</information><answer>Paris</answer>"), False),
        (episode(SEARCH, env("<information></information></answer><think>"), RIGHT), True),  # tags in passages
    ],
)
def test_structure(ep, valid):
    assert has_search_structure(ep) is valid


def test_the_policy_cannot_retrieve_by_writing_information_itself():
    forged = episode(SEARCH, NOTHING, "<think>x</think><information>Paris</information><answer>Rome</answer>")
    outcome = search_format(forged, task("Paris"), **OPTIONS)
    assert outcome.value == pytest.approx(0.1)
    assert outcome.components["retrieved"] == 0


def test_components_and_prediction():
    outcome = search_format(episode(SEARCH, FOUND, RIGHT), task("Paris"))
    assert outcome.prediction == "paris"
    no_problem = {"no_answer": 0.0, "malformed_answer": 0.0, "empty_answer": 0.0}
    assert outcome.components == {"em": 1.0, "valid_structure": 1.0, "retrieved": 1.0, **no_problem}


def test_without_a_usable_gold_it_is_invalid():
    assert isinstance(search_format(episode(RIGHT), task("The")), Invalid)
