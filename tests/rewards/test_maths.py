"""Mathematical answers, against real samples with known verdicts."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.rewards import score, score_group
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.numeric import gsm8k, number
from posttrain.rewards.scoring import Reward
from posttrain.task import Invalid, Score

from .episodes import episode, task


@pytest.fixture(scope="module")
def maths() -> Iterator[Reward]:
    pytest.importorskip("math_verify")
    reward = load_reward(RewardConfig(name="math", seconds=20, workers=1))
    yield reward
    reward.close()


def value(reward: Reward, text: str, *golds: str) -> float:
    outcome = asyncio.run(score(reward, episode(text), task(*golds)))
    assert isinstance(outcome, Score), outcome
    return outcome.value


def rows(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1"),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"(3,\frac{\pi}{2})"),
        (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}"),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
        (r"<answer> $\frac{3}{6}$ </answer>", r"\frac{1}{2}"),
        ("So\n**Answer:** 12\n", "12"),
        (r"\boxed{1,000}", "1000"),
        (r"\boxed{12}", r"We see that it is \boxed{12}."),
        (r"\boxed{}, that is \boxed{7}", "7"),
    ],
)
def test_what_means_the_same_is_right(maths, answer, gold):
    assert value(maths, answer, gold) == 1


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\boxed{0.33}", r"\frac{1}{3}"),
        (r"\boxed{(1, 2)}", "(2, 1)"),
        (r"\boxed{x^2+1}", "x^2-1"),
        (r"\boxed{5, 6}", "5"),
        (r"\boxed{7", "7"),
        (r"\boxed{}", "7"),
        ("The answer is seven", "7"),
        (r"<think>\boxed{7}</think> I do not know", "7"),
        (r"\boxed{" + "7" * 5000 + "}", "7"),
    ],
)
def test_what_does_not_is_wrong(maths, answer, gold):
    assert value(maths, answer, gold) == 0


def test_p74_an_answer_that_cannot_be_evaluated_is_killed_and_invalid(maths):
    quick = load_reward(RewardConfig(name="math", seconds=3, workers=1))
    bomb, fine = episode(r"\boxed{9^{9^{9^{9}}}}"), episode(r"\boxed{1+x}")
    started = time.monotonic()
    first, second = asyncio.run(score_group(quick, [bomb, fine], task("x+1")))
    quick.close()
    assert isinstance(first, Invalid)
    assert first.reason == "reward_timeout"
    assert second == value_of_one()
    assert time.monotonic() - started < 20


def value_of_one() -> Score:
    flags = {"no_answer": 0.0, "malformed_answer": 0.0, "empty_answer": 0.0}
    return Score(1.0, {"math": 1.0, **flags}, "1+x")


def test_an_answer_of_a_group_is_compared_once(maths):
    outcomes = asyncio.run(score_group(maths, [episode(r"\boxed{1+x}")] * 8, task("x+1")))
    assert [outcome.value for outcome in outcomes] == [1.0] * 8


def test_no_accepted_answer_is_invalid_never_right(maths):
    outcome = asyncio.run(score(maths, episode(r"\boxed{1}"), task()))
    assert outcome.reason == "bad_ground_truth"


@pytest.mark.parametrize("form", ["25", "025", "25.0", "25.", "$25$", r"\text{25}", "+25"])
@pytest.mark.parametrize("gold", ["25", "25.0", "025"])
def test_aime_answers_are_integers_floats_and_texts(form, gold):
    assert number(episode(rf"So \boxed{{{form}}}."), task(gold)).value == 1


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Answer: 25", True),
        ("**Final Answer:** $25$", True),
        ("<answer>25</answer>", True),
        ("#### 25", True),
        (r"\boxed{24} Answer: 25", False),
        ("25", False),
        ("Answer: none, 25", False),
    ],
)
def test_where_the_number_may_stand(text, right):
    assert number(episode(text), task("25")).value == float(right)


def test_zero_is_an_answer():
    assert number(episode(r"\boxed{0}"), task("0")).value == 1
    assert number(episode(r"\boxed{1}"), task("0")).value == 0


def test_another_mark_and_the_last_number_of_a_text():
    assert gsm8k(episode("So A: 18"), task("Then\nA: 18"), mark="A:").value == 1
    assert gsm8k(episode("that makes 3 and 1,018."), task("1018"), last_number=True).value == 1
    assert gsm8k(episode("that makes 3 and 1,018."), task("1018")).components["no_answer"] == 1


def test_real_gsm8k_solutions_agree_with_their_flags(shared_data):
    pairs = [
        (gsm8k(episode(row[model]["solution"]), task(row["ground_truth"]), mark="A:").value, row[model]["is_correct"])
        for row in rows(shared_data / "gsm8k" / "model_solutions_first200.jsonl.gz")
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    ]
    assert len(pairs) == 800
    assert sum(bool(verdict) == flag for verdict, flag in pairs) == 800


def test_real_math_samples_agree_with_their_flags(shared_data, maths):
    agree = count = 0
    for row in rows(shared_data / "math" / "math_cot_8samples_first50.jsonl.gz"):
        outcomes = asyncio.run(score_group(maths, [episode(text) for text in row["code"]], task(row["gt"])))
        count += len(outcomes)
        agree += sum(o.value == flag for o, flag in zip(outcomes, row["score"], strict=True))
    assert (agree, count) == (400, 400)


def test_math500_solutions_reach_their_own_answers(shared_data, maths):
    found = rows(shared_data / "math" / "math500.jsonl.gz")[:150]
    assert [value(maths, row["solution"], row["answer"]) for row in found] == [1.0] * 150


def test_real_aime_and_amc_answers_accept_every_form(shared_data):
    for name in ("aime24", "amc23"):
        for line in (shared_data / "math" / f"{name}.jsonl").read_text().splitlines():
            answer = json.loads(line)["answer"]
            for form in (answer, float(answer), int(float(answer)), f"{int(float(answer)):03d}"):
                assert number(episode(rf"\boxed{{{form}}}"), task(str(answer))).value == 1
