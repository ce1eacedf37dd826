"""A user's test of an env and a reward: the accepted answer gets the full reward, with no model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cases.parts import Shelf
from posttrain.envs import Action, Observation, SearchEnv, SingleTurnEnv, Step
from posttrain.envs.trial import played, trial
from posttrain.task import EpisodeInvalid, GoldRefused, Score, Task
from posttrain.trajectory import Episode, Source, StopReason

QUESTION = ({"role": "user", "content": "Where is the tower?"},)
TASK = Task(id="q", prompt=QUESTION, ground_truth=("Paris", "City of Paris"))


def search_env() -> SearchEnv:
    return SearchEnv(retriever=Shelf('"Tower"\nThe tower is in Paris.'), max_turns=2)


def test_gold_answers_of_a_search_env_score_with_no_model():
    TASK.validate(trial("em", search_env))
    TASK.validate(trial("em", search_env, form=["<search> tower </search>", "<answer> {answer} </answer>"]))
    TASK.validate(trial("em"))


def test_an_accepted_answer_that_is_refused_is_named():
    reversed_words = "<answer> {answer} is where it is </answer>"
    with pytest.raises(GoldRefused, match=r"task q: the accepted answer 'Paris' got 0, not 1"):
        TASK.validate(trial("em", search_env, form=reversed_words))
    with pytest.raises(AssertionError, match="has no accepted answer"):
        Task(id="e", prompt=QUESTION).validate(trial("em"))
    TASK.validate(trial("f1", form="<answer> {answer} now </answer>"), full=0.6)


def test_a_reward_that_pays_for_nothing_is_named():
    with pytest.raises(GoldRefused, match="the wrong answer '' got 1"):
        TASK.validate(lambda answer, task: 1.0)
    with pytest.raises(GoldRefused, match="the wrong answer 'Rome' got 1"):
        TASK.validate(trial("sub_em", form="<answer> Paris or {answer} </answer>"), answers=["Paris"], wrong=["Rome"])


def test_what_breaks_is_no_score():
    def raises(episode: Episode, task: Task) -> float:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(GoldRefused, match=r"(?s)Invalid \(reward_error.*ZeroDivisionError: by nothing"):
        TASK.validate(trial(raises))

    class Down(SearchEnv):
        async def step(self, action: Action) -> Step:
            raise EpisodeInvalid("tool_down", "no answer on port 80")

    with pytest.raises(GoldRefused, match="tool_down: no answer on port 80"):
        TASK.validate(trial("em", lambda: Down(retriever=Shelf("x"))))


def test_judges_may_be_awaited_and_return_any_outcome():
    async def judge(answer: str, task: Task) -> Any:
        return None if answer == "pass" else Score(float(answer in task.ground_truth))

    TASK.validate(judge)
    found = asyncio.run(TASK.verdicts(judge, ["Paris", "Rome", "pass"]))
    assert [type(outcome).__name__ for outcome in found.values()] == ["Score", "Score", "Abstain"]


class Steps:
    """Wants two turns, pays for each, and goes on where a stop string stands in brackets."""

    stop_strings, max_turns = ("END",), 3

    def __init__(self) -> None:
        self.heard: list[tuple[str, StopReason]] = []

    async def reset(self, task: Task) -> Observation:
        return Observation(text="Begin. ")

    async def step(self, action: Action) -> Step:
        self.heard.append((action.text, action.stop_reason))
        if action.text.endswith("(END"):
            return Step()
        if len(self.heard) > 2:
            return Step(reward=1.0, done=True)
        return Step(observation=Observation(messages=({"role": "user", "content": "Go on."},)), reward=0.25)

    async def close(self) -> None: ...


def test_turns_are_cut_and_recorded_as_a_rollout_does():
    env = Steps()
    episode = asyncio.run(played(env, TASK, ["one (END) two END three", "four", "never said"]))
    assert env.heard == [
        ("one (END", StopReason.STOP_STRING),
        ("one (END) two END", StopReason.STOP_STRING),
        ("four", StopReason.STOP_ID),
    ]
    assert episode.policy_texts == ("one (END) two END", "four")
    assert [s.source for s in episode.segments] == [Source.PROMPT, Source.ENV, Source.POLICY, Source.ENV, Source.POLICY]
    assert (episode.env_reward, episode.turn_rewards) == (1.25, (0.25, 1.0))


def test_a_form_may_depend_on_the_task():
    def form(answer: str, task: Task) -> list[str]:
        return [f"<search> {task.id} </search>", f"<answer> {answer} </answer>"]

    shelf = Shelf("x")
    TASK.validate(trial("em", lambda: SearchEnv(retriever=shelf, max_turns=2), form=form))
    assert set(shelf.queries) == {"q"}


def test_an_env_that_changes_its_task_is_tried_with_a_new_one_each_time():
    class Appends(SingleTurnEnv):
        async def reset(self, task):
            task.prompt[0]["content"] += " Think."
            return Observation()

    for _ in range(2):
        episode = asyncio.run(played(Appends(), TASK, ["x"]))
        assert episode.segments[0].text == "Where is the tower? Think."
    assert TASK.prompt[0]["content"] == "Where is the tower?"
