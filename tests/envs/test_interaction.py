import asyncio
from typing import Any

import pytest

from cases.parts import CHAT_TEMPLATE, byte_tokenizer, roll, spec
from posttrain.envs import Action, InteractionEnv, Reply
from posttrain.envs.interaction import CorrectingUser, interaction_kwargs
from posttrain.episodes import episode_of
from posttrain.task import EpisodeInvalid, Task
from posttrain.trajectory import Source, StopReason

QUESTION = ({"role": "user", "content": "6 x 7?"},)


def asked(truth: tuple[str, ...] = ("42",), **extra: Any) -> Task:
    return Task(id="q", prompt=QUESTION, ground_truth=truth, extra=extra)


def said(text: str) -> Action:
    return Action(text=text, stop_reason=StopReason.STOP_ID)


def played(env: InteractionEnv, task: Task, *turns: str) -> list[Any]:
    async def run() -> list[Any]:
        await env.reset(task)
        steps = [await env.step(said(turn)) for turn in turns]
        await env.close()
        return steps

    return asyncio.run(run())


def test_the_row_chooses_its_user() -> None:
    task = asked(interaction_kwargs={"name": "correcting", "query": "6 x 7?", "ground_truth": "42"})
    wrong, right = played(InteractionEnv(), task, "#### 41", "so #### 42")
    assert (wrong.done, wrong.reward) == (False, 0.0)
    assert wrong.observation.messages == ({"role": "user", "content": wrong.observation.messages[0]["content"]},)
    assert "not correct" in wrong.observation.messages[0]["content"]
    assert (right.done, right.reward, right.observation) == (True, 1.0, None)


def test_verls_place_for_the_kwargs_and_none_of_other_rows() -> None:
    kwargs = {"name": "scripted", "lines": ["Why?"], "ground_truth": None}
    task = asked(extra_info={"index": 3, "interaction_kwargs": kwargs})
    assert interaction_kwargs(task) == kwargs
    first, second = played(InteractionEnv(), task, "because", "really")
    assert first.observation.messages == ({"role": "user", "content": "Why?"},)
    assert (second.done, second.reward) == (True, None)


def test_the_user_gives_up_and_the_last_turn_has_its_score() -> None:
    env = InteractionEnv(default="correcting", options={"correcting": {"attempts": 2}})
    first, second = played(env, asked(), "#### 1", "#### 2")
    assert (first.done, second.done, second.reward) == (False, True, 0.0)


class Remembers:
    """A user of the test's own."""

    def __init__(self, *, word: str) -> None:
        self.word = word
        self.closed = False

    async def reply(self, messages: Any, task: Task) -> Reply:
        return Reply(text=f"{self.word} {len(messages)}", info={"heard": messages[-1]["content"]})

    async def close(self) -> None:
        self.closed = True


def test_a_user_of_ones_own_sees_the_whole_conversation() -> None:
    env = InteractionEnv(interactions={"mine": f"{__name__}:Remembers"}, max_turns=3)
    first, second = played(env, asked(interaction_kwargs={"name": "mine", "word": "hm"}), "a", "b")
    assert [s.observation.messages[0]["content"] for s in (first, second)] == ["hm 2", "hm 4"]
    assert second.info == {"heard": "b"}


@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        ({}, "names no interaction"),
        ({"name": "correctign"}, "Did you mean 'correcting'[?] Known: correcting, scripted"),
        ({"name": "scripted", "lines": ["x"], "colour": "red"}, "takes lines; the row also gives colour"),
    ],
)
def test_rows_that_ask_for_what_is_not_there(kwargs: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        played(InteractionEnv(), asked(interaction_kwargs=kwargs), "x")


def test_a_default_that_is_unknown_fails_when_the_env_is_made() -> None:
    with pytest.raises(ValueError, match="the env's options name the interaction 'nobody'"):
        InteractionEnv(default="nobody")
    with pytest.raises(ValueError, match="attempts must be >= 1"):
        CorrectingUser(attempts=0)


def test_p31_a_row_without_an_answer_is_invalid_not_wrong() -> None:
    with pytest.raises(EpisodeInvalid, match="no_ground_truth"):
        played(InteractionEnv(default="correcting"), asked(()), "#### 3")


def test_an_episode_token_by_token() -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    rollout = spec(["#### 41", "#### 42"], lambda task: InteractionEnv(default="correcting"), tokenizer=tokenizer)
    (trajectory,) = roll(rollout, the_task=asked())
    episode = episode_of(trajectory, rollout.renderer)
    policy = [s.text for s in episode.segments if s.source is Source.POLICY]
    assert [text.removesuffix(tokenizer.eos_token or "") for text in policy] == ["#### 41", "#### 42"]
    assert any("not correct" in s.text for s in episode.segments if s.source is Source.ENV)
    assert episode.env_reward == 1.0
