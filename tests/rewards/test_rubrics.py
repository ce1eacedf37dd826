"""Rubrics: real items of the field, judged by a real HTTP server."""

from __future__ import annotations

import asyncio
import gzip
import json
import re

import pytest

from posttrain.rewards import RewardError, score, score_group
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.rubric_items import Rubric, RubricError, rubric_value, rubrics_of
from posttrain.rewards.scoring import check_tasks
from posttrain.task import Invalid, Score, Task

from .episodes import episode
from .servers import Reply, completion, says, stub

ITEMS = [
    {"description": "names the river", "weight": 2.0, "title": "river"},
    {"description": "names the year", "weight": 1.0},
    {"description": "praises itself", "weight": -1.0},
]
LABEL = json.dumps({"query": "Where and when?", "rubrics": ITEMS})


def rubric_task(label=LABEL) -> Task:
    return Task(id="t", prompt=({"role": "user", "content": "long prompt"},), ground_truth=(label,))


def grade_by_words(text: str) -> str:
    """Full marks when the last word of the statement stands in the response."""
    response = re.search(r"<response>(.*?)</response>", text, re.DOTALL)
    statement = re.search(r"<statement>(.*?)</statement>", text)
    assert response
    assert statement
    return json.dumps({"score": 2 * (statement[1].split()[-1] in response[1])})


def judged(url, text="<answer>the river in the year</answer>", label=LABEL, **options):
    base = {"url": url + "/v1", "model": "m", "backoff_seconds": 0.01}
    reward = load_reward(RewardConfig(name="rubric", options=base | options))
    return asyncio.run(score(reward, episode(text), rubric_task(label)))


@pytest.mark.parametrize(
    ("answer", "value"),
    [("river and year", 1.0), ("river", 2 / 3), ("year by itself", 0.0), ("itself", -1 / 3), ("nothing", 0.0)],
)
def test_value_is_the_weighted_share_and_bad_items_subtract(answer, value):
    with stub(says(grade_by_words)) as server:
        outcome = judged(server.url, f"<answer>{answer}</answer>")
    assert outcome.value == pytest.approx(value)
    assert len(server.requests) == 3
    assert "<question>Where and when?</question>" in server.requests[0]["messages"][0]["content"]


def test_one_call_for_all_items():
    with stub(completion('{"scores": [2, 1, 0]}')) as server:
        outcome = judged(server.url, calls="together")
    assert outcome.value == pytest.approx((2 * 1 + 1 * 0.5) / 3)
    text = server.requests[0]["messages"][0]["content"]
    assert "1. names the river\n2. names the year\n3. praises itself" in text
    assert len(server.requests) == 1


@pytest.mark.parametrize("reply", ['{"scores": [2, 1]}', '{"scores": [2, 1, 3]}', '{"score": 2}', "fine"])
def test_a_wrong_number_of_grades_is_unreadable(reply):
    with stub(completion(reply)) as server:
        assert judged(server.url, calls="together").reason == "service_bad_reply"
    assert len(server.requests) == 2


def test_no_answer_is_0_without_asking():
    with stub(completion("?")) as server:
        assert judged(server.url, "no tags here") == Score(0.0, {"rubric": 0.0, "no_answer": 1.0})
    assert server.requests == []


def test_an_item_without_a_judgement_invalidates_unless_some_may_fail():
    def one_fails(body):
        text = body["messages"][-1]["content"]
        return Reply({}, status=400) if "the year</statement>" in text else completion('{"score": 2}')

    with stub(one_fails) as server:
        strict = judged(server.url)
        lenient = judged(server.url, max_failed_share=0.25)
    assert isinstance(strict, Invalid)
    assert strict.reason == "service_refused"
    assert "1 of 3 rubric items" in strict.detail
    assert lenient.value == pytest.approx((2 - 1) / 2)
    assert lenient.components["items_failed"] == 1


def test_kinds_are_told_apart():
    label = json.dumps({"query": "q", "rubrics": ITEMS[:2], "rubrics_types": ["persistent", "adaptive"]})
    with stub(says(grade_by_words)) as server:
        outcome = judged(server.url, "<answer>river</answer>", label)
    assert outcome.components["rubric_persistent"] == 1
    assert outcome.components["rubric_adaptive"] == 0


def test_dr_tulus_divisor():
    items = {Rubric("a", 0.4): 1.0, Rubric("b", 0.2): 1.0}
    assert rubric_value(items) == pytest.approx(1.0)
    assert rubric_value(items, min_total_weight=1.0) == pytest.approx(0.6)
    assert rubric_value({Rubric("bad", -2.0): 1.0}) == -1
    assert rubric_value({}) == 0


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        ([{"description": "a"}, "b"], [1.0, 1.0]),
        ({"Answer Critical": [{"Ingredient": "a", "Handle": "h"}], "Valuable": [{"Ingredient": "b"}]}, [1.0, 0.5]),
        ({"rubric": [{"type": "Answer Critical", "rubric_item": "a"}, {"rubric_item": "b"}]}, [1.0, 1.0]),
        ({"dimension_weight": {"d": 0.5}, "criterions": {"d": [{"criterion": "a", "weight": 0.2}]}}, [0.1]),
    ],
)
def test_shapes(value, weights):
    for form in (value, json.dumps(value)):
        assert [item.weight for item in rubrics_of(form).items] == pytest.approx(weights)


@pytest.mark.parametrize(
    "value",
    ["Paris", "{}", "[]", '{"rubrics": [{"weight": 1}]}', '{"rubrics": [{"description": "a", "weight": "x"}]}',
     '{"rubrics": [{"description": "a", "weight": 0}]}', '{"rubrics": ["a"], "rubrics_types": ["x", "y"]}', "3"],
)  # fmt: skip
def test_what_holds_no_rubrics_is_refused_before_anything_starts(value):
    with pytest.raises(RubricError):
        rubrics_of(value)
    reward = load_reward(RewardConfig(name="rubric", options={"url": "http://127.0.0.1:1/v1", "model": "m"}))
    with pytest.raises(RewardError, match="task 't'"):
        check_tasks({None: reward}, [rubric_task(), rubric_task(value)])


def test_rubrics_may_stand_in_a_column_of_their_own():
    reward = load_reward(RewardConfig(name="rubric", options={"url": "http://127.0.0.1:1/v1", "model": "m"}))
    check_tasks({None: reward}, [Task(id="t", prompt=(), extra={"rubrics": ITEMS})])


def test_real_scholarqa_items(shared_data):
    with gzip.open(shared_data / "deep_research" / "scholarqa_cs_rubrics_dev.json.gz", "rt") as file:
        rows = json.load(file)
    sets = [rubrics_of(row) for row in rows]
    assert len(sets) == 75
    assert all(found.question == row["initial_prompt"] for found, row in zip(sets, rows, strict=True))
    for found in sets:
        assert sum(item.weight for item in found.items) == pytest.approx(0.6)
        assert rubric_value(dict.fromkeys(found.items, 1.0)) == pytest.approx(1.0)
        assert rubric_value(dict.fromkeys(found.items, 1.0), 1.0) == pytest.approx(0.6)


def test_real_deep_research_bench_criteria(shared_data):
    with gzip.open(shared_data / "deep_research" / "drb_criteria_ids_1_70.jsonl.gz", "rt", encoding="utf-8") as file:
        sets = [rubrics_of(line) for line in file]
    assert len(sets) == 70
    for found in sets:
        assert len(found.items) >= 10
        assert sum(item.weight for item in found.items) == pytest.approx(1.0, abs=1e-6)
        assert {item.title for item in found.items} == {
            "comprehensiveness", "insight", "instruction_following", "readability",
        }  # fmt: skip


def test_a_real_report_is_judged_by_real_items(shared_data):
    folder = shared_data / "deep_research"
    with gzip.open(folder / "drb_criteria_ids_1_70.jsonl.gz", "rt", encoding="utf-8") as file:
        criteria = {json.loads(line)["id"]: line for line in file}
    with gzip.open(folder / "drb_reports_claude37_40.jsonl.gz", "rt", encoding="utf-8") as file:
        report = next(row for row in map(json.loads, file) if row["id"] > 50)
    count = len(rubrics_of(criteria[report["id"]]).items)
    with stub(completion(json.dumps({"scores": [1] * count}))) as server:
        outcome = judged(server.url, f"<answer>{report['article']}</answer>", criteria[report["id"]], calls="together")
    assert outcome.value == pytest.approx(0.5)
    assert report["article"][:200] in server.requests[0]["messages"][0]["content"]


def test_a_group_is_judged_at_once_and_equal_answers_are_asked_once():
    with stub(says(grade_by_words)) as server:
        reward = load_reward(RewardConfig(name="rubric", options={"url": server.url + "/v1", "model": "m"}))
        group = [episode("<answer>river</answer>")] * 4 + [episode("<answer>year</answer>")]
        outcomes = asyncio.run(score_group(reward, group, rubric_task()))
    assert [round(o.value, 3) for o in outcomes] == [0.667] * 4 + [0.333]
    assert len(server.requests) == 6
