"""Which answers do rewards take for right that are not, and the other way round."""

from __future__ import annotations

import asyncio

import pytest

from posttrain.rewards.audit import BOXED, MAKERS, MARKED, TAGGED, Audit, Form, audit, frame_of, written
from posttrain.rewards.config import load_reward
from posttrain.task import Task

NAMES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito", "Accra", "Delhi", "Minsk", "Dakar", "Havana", "Sofia"]


def tasks(golds=NAMES) -> list[Task]:
    return [Task(id=str(i), prompt=({"role": "user", "content": "?"},), ground_truth=(g,)) for i, g in enumerate(golds)]


def audited(reward, frame=TAGGED, golds=NAMES) -> Audit:
    loaded = load_reward(reward)
    return asyncio.run(audit(tasks(golds), lambda task: loaded, form=Form(frame=frame)))


def accepted(found: Audit) -> set[str]:
    return {kind for kind, tally in found.tallies.items() if not tally.right and tally.wrong}


@pytest.mark.parametrize("reward", ["em", "f1"])
def test_strict_rewards_accept_the_right_answers_only(reward):
    found = audited(reward)
    assert (found.false_rejects, found.false_accepts) == (0, 0)
    assert found.false_accept_rate == 0.0
    assert found.tallies["gold"].count == len(NAMES)
    assert found.tallies.keys() == MAKERS.keys()


@pytest.mark.parametrize(("reward", "frame"), [("gsm8k", MARKED), ("boxed", BOXED), ("number", BOXED)])
def test_numbers(reward, frame):
    found = audited(reward, frame, [str(number) for number in range(10, 30)])
    assert found.false_rejects == 0
    assert accepted(found) == set()


def test_containment_pays_for_lists_repetitions_and_pasting():
    found = audited("sub_em")
    assert found.false_rejects == 0
    assert accepted(found) == {"all_listed", "gold_repeated", "observation_pasted"}
    assert found.tallies["all_listed"].wrong == len(NAMES)
    assert len(found.tallies["all_listed"].examples) == 3


def test_p28_p33_rewards_of_the_careless_kind_are_found_out():
    def anywhere(episode, task):
        return float(task.ground_truth[0].lower() in " ".join(s.text for s in episode.segments).lower())

    def any_tag(episode, task):
        return float(f"<answer> {task.ground_truth[0]} </answer>" in episode.final_text)

    assert {"observation_has_answer", "answer_in_thought", "tag_spam"} <= accepted(audited(anywhere))
    assert accepted(audited(any_tag)) == {"answer_in_thought", "tag_spam"}


def test_a_wrong_form_and_failures_are_false_rejects():
    found = audited("em", MARKED)
    assert found.false_reject_rate == 1.0

    def breaks(episode, task):
        raise OSError("down")

    broken = audited(breaks)
    assert broken.tallies["gold"].invalid == broken.false_rejects == len(NAMES)
    assert "reward_error" in broken.tallies["gold"].examples[0]


def test_tasks_without_an_answer_are_counted():
    loaded = load_reward("em")
    found = asyncio.run(audit([*tasks(), Task(id="n", prompt=())], lambda task: loaded))
    assert (found.tasks, found.skipped) == (len(NAMES) + 1, 1)
    nothing = asyncio.run(audit([], lambda task: loaded))
    assert nothing.false_accept_rate is None


def test_every_accepted_answer_is_tried_and_the_result_is_repeatable():
    loaded = load_reward("em")
    several = [Task(id="a", prompt=(), ground_truth=("Paris", "Paname", "Lutetia")), *tasks()]
    first = asyncio.run(audit(several, lambda task: loaded))
    assert first.tallies["gold"].count == len(NAMES) + 3
    assert asyncio.run(audit(several, lambda task: loaded)).as_dict() == first.as_dict()


def test_forms_of_answers():
    assert frame_of(["em", "format"]) == TAGGED
    assert frame_of(["math"]) == BOXED
    assert frame_of(["em", "gsm8k"]) == f"{TAGGED}\n{MARKED}"
    assert frame_of(["code"]) is None
    assert frame_of([]) == TAGGED
    assert written("6 * 3 = 18\n#### 18") == "18"
    assert written(r"so it is \boxed{\frac12}") == r"\frac12"
    assert written("Paris") == "Paris"
