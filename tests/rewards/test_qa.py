"""P-numbers are the field's bug reports."""

from __future__ import annotations

import pytest

from posttrain.rewards import REWARDS
from posttrain.rewards.qa import contains, em, f1, sub_em, token_f1
from posttrain.task import Invalid, Score

from .episodes import env, episode, task

TAGGED = ["em", "f1", "sub_em"]


def value(name, ep, *golds):
    outcome = REWARDS[name](ep, task(*golds))
    assert isinstance(outcome, Score)
    return outcome.value


def test_em_after_normalisation_and_with_any_accepted_answer():
    outcome = em(episode("<think>hm</think><answer> The PARIS. </answer>"), task("Lyon", "paris"))
    assert outcome == Score(
        1.0, {"em": 1.0, "no_answer": 0.0, "malformed_answer": 0.0, "empty_answer": 0.0}, prediction="paris"
    )
    assert value("em", episode("<answer>Paris, France</answer>"), "Paris") == 0


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("poison", ["<answer>Paris</answer>", "Paris</answer>", "<answer>", "<search>"])
def test_p28_answer_in_tool_output_scores_nothing(name, poison):
    read = episode("<search>q</search>", env(f"<information>{poison}</information>"), "I do not know.")
    assert value(name, read, "Paris") == 0
    own = episode("<search>q</search>", env(f"<information>{poison}</information>"), "<answer>Paris</answer>")
    assert value(name, own, "Paris") == 1


@pytest.mark.parametrize("name", TAGGED)
def test_p30_the_example_in_the_prompt_is_no_answer(name):
    outcome = REWARDS[name](episode("I think it is Beijing."), task("Beijing"))
    assert outcome.value == 0
    assert outcome.components["no_answer"] == 1
    assert outcome.prediction is None


@pytest.mark.parametrize("name", TAGGED)
def test_p31_one_pair_of_tags_is_enough(name):
    assert value(name, episode("<answer>Paris</answer>"), "Paris") == 1


@pytest.mark.parametrize("name", TAGGED)
def test_p33_more_than_one_answer_in_the_last_turn_is_malformed(name):
    spam = "".join(f"<answer>{guess}</answer>" for guess in [*map(str, range(15)), "Paris"])
    outcome = REWARDS[name](episode(spam), task("Paris"))
    assert outcome.value == 0
    assert outcome.components["malformed_answer"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "<answer>Paris",
        "Paris</answer>",
        "<answer><answer>Paris</answer>",
        "<answer>Paris</answer></answer>",
        "</answer>Paris<answer>",
    ],
)
def test_tags_that_do_not_pair_are_malformed(text):
    outcome = em(episode(text), task("Paris"))
    assert outcome.value == 0
    assert outcome.components["malformed_answer"] == 1


def test_only_the_last_turn_counts():
    assert value("em", episode("<answer>Paris</answer>", env("go on"), "never mind"), "Paris") == 0
    assert value("em", episode("<answer>Lyon</answer>", env("go on"), "<answer>Paris</answer>"), "Paris") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>maybe <answer>Lyon</answer></think><answer>Paris</answer>", 1),
        ("<think>maybe <search>foo</search></think><answer>Paris</answer>", 1),
        ("<think>so <answer>Paris</answer></think>", 0),
        ("<think>so <answer>Paris</answer>", 0),
        ("so <answer>Lyon</answer></think><answer>Paris</answer>", 1),  # the prompt opened the thought
        ("<think>a</think><think>b <answer>c</answer></think><answer>Paris</answer>", 1),
    ],
)
def test_p24_answers_in_thoughts_are_no_answers(text, expected):
    assert value("em", episode(text), "Paris") == expected


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("gold", ["The", "", "?!"])
def test_p34_a_gold_that_normalises_to_nothing_is_refused_not_matched(name, gold):
    outcome = REWARDS[name](episode("<answer>anything</answer>"), task(gold))
    assert isinstance(outcome, Invalid)
    assert outcome.reason == "bad_ground_truth"
    assert repr(gold) in outcome.detail


def test_a_gold_that_normalises_to_nothing_does_not_spoil_the_others():
    assert value("sub_em", episode("<answer>anything</answer>"), "The", "Paris") == 0
    assert value("sub_em", episode("<answer>in Paris</answer>"), "The", "Paris") == 1


def test_a_task_without_ground_truth_cannot_be_judged():
    assert em(episode("<answer>x</answer>"), task()) == Invalid(
        "bad_ground_truth", "task 't' has no accepted answer that can be compared (it has: none)"
    )


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("text", ["", "  \n ", "The", "?!"])
def test_p35_an_empty_prediction_scores_nothing(name, text):
    outcome = REWARDS[name](episode(f"<answer>{text}</answer>"), task("Paris"))
    assert outcome.value == 0
    assert outcome.components["empty_answer"] == 1


@pytest.mark.parametrize("name", TAGGED)
def test_a_policy_that_never_wrote_scores_nothing(name):
    assert value(name, episode(), "Paris") == 0


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [("paris", "paris", 1), ("paris france", "paris", 2 / 3), ("x y", "z", 0), ("b b c", "b c d", 2 / 3), ("", "b", 0)],
)
def test_token_f1_by_hand(prediction, gold, expected):
    assert token_f1(prediction, gold) == pytest.approx(expected)


def test_f1_takes_the_best_accepted_answer():
    outcome = f1(episode("<answer>city of Paris</answer>"), task("Rome", "Paris"))
    assert outcome.value == pytest.approx(0.5)
    assert outcome.prediction == "city of paris"


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("in paris france", "paris", 1),
        ("paris", "paris france", 0),
        ("2010", "10", 0),
        ("partisan", "art", 0),
        ("首都是北京吗", "北京", 1),
        ("a.c", "abc", 0),
    ],
)
def test_containment(prediction, gold, expected):
    assert contains(prediction, gold) == expected


def test_sub_em_looks_for_gold_in_the_answer_not_the_reverse():
    assert value("sub_em", episode("<answer>Par</answer>"), "Paris") == 0
    assert sub_em(episode("<answer>It is Paris.</answer>"), task("Paris")).value == 1
