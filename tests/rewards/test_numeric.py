r"""P-numbers are the field's bug reports."""

from __future__ import annotations

from fractions import Fraction

import pytest

from posttrain.rewards.numeric import boxed, gsm8k, parse_number
from posttrain.task import Invalid

from .episodes import env, episode, task


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("so #### $12", "12"),
        ("#### -5.0", "-5"),
        ("#### −5", "-5"),
        ("#### 12" + " " * 320, "12"),
        ("#### 1,000.", "1000"),
        ("#### 12 apples\nThat is all.", "12"),
        ("#### **12**", "12"),
        ("#### Step 1\nadd\n#### 12", "12"),
        ("<think>#### 3</think>#### 12", "5 + 7 = 12\n#### 12"),
        ("#### 0.50", "1/2"),
    ],
)
def test_p37_gsm8k_compares_numbers(text, gold):
    assert gsm8k(episode(text), task(gold)).value == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("12", "no_answer"),
        ("<think>#### 12</think>", "no_answer"),
        ("####  ", "empty_answer"),
        ("#### twelve", "malformed_answer"),
        ("#### 1,2", "malformed_answer"),
        ("#### 9^9^9^9", "malformed_answer"),
        ("#### " + "9" * 5000, "malformed_answer"),
        ("#### 1e999999999", "malformed_answer"),
    ],
)
def test_gsm8k_says_why_there_is_no_number(text, problem):
    outcome = gsm8k(episode(text), task("12"))
    assert outcome.value == 0
    assert outcome.components[problem] == 1
    assert outcome.prediction is None


def test_gsm8k_wrong_number():
    outcome = gsm8k(episode("#### 13"), task("12"))
    assert (outcome.value, outcome.prediction) == (0, "13")


def test_gsm8k_reads_the_policy_only():
    assert gsm8k(episode("let me see", env("#### 12"), "done"), task("12")).value == 0


@pytest.mark.parametrize("rule", [gsm8k, boxed])
def test_a_gold_that_cannot_be_compared_is_invalid(rule):
    assert isinstance(rule(episode("#### 1 \\boxed{1}"), task()), Invalid)


def test_gsm8k_gold_must_be_a_number():
    assert gsm8k(episode("#### 1"), task("many")).reason == "bad_ground_truth"


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"\boxed{1,000}", "1000"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}"),
        (r"\boxed{-\frac{1}{2}}", "-1/2"),
        (r"\boxed{x^{2}+1}", "x^{2} + 1"),
        (r"\boxed{\text{East}}", "East"),
        (r"\boxed{\left(1, 2\right)}", "(1,2)"),
        (r"\boxed{3} or rather \boxed{4}", r"The answer is \boxed{4}."),
        (r"<think>\boxed{3}</think>\boxed{50\%}", "50"),
        (r"\boxed{\$5}", "5"),
    ],
)
def test_p38_boxed_compares_numbers_by_value_and_the_rest_as_text(text, gold):
    assert boxed(episode(text), task(gold)).value == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [(r"\boxed{\frac{1}{2}", "malformed_answer"), ("12", "no_answer"), (r"\boxed{ }", "empty_answer")],
)
def test_p38_boxed_says_why_there_is_no_answer(text, problem):
    outcome = boxed(episode(text), task("0.5"))
    assert outcome.value == 0
    assert outcome.components[problem] == 1


def test_boxed_wrong():
    assert boxed(episode(r"\boxed{x+2}"), task("x+1")).value == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12), ("+3", 3), (".5", Fraction(1, 2)), ("1,234,567.5", Fraction(2469135, 2)), ("€ 7", 7), ("50%", 50),
        ("3/4", Fraction(3, 4)), ("3/0", None), ("1,00", None), ("12,3456", None), ("", None), ("-", None),
        ("1.2.3", None),        ("٣", None), ("½", None), ("1 000", 1000), ("inf", None), ("nan", None), ("0x10", None),
    ],
)  # fmt: skip
def test_parse_number(text, number):
    assert parse_number(text) == number
