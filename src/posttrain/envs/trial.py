"""Plays what a policy might write through an env, as text: no model, no tokenizer. For tests of envs and rewards.

    task.validate(trial("my.py:reward", MyEnv))      # every accepted answer gets the full reward, an empty one does not

What tokens and limits do to the same answers is the business of `posttrain check`, which plays them in a real rollout.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from posttrain.coerce import coerce_text
from posttrain.envs.protocol import Action, Env, Observation, check_env
from posttrain.envs.single_turn import SingleTurnEnv
from posttrain.rewards.audit import TAGGED
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.scoring import Reward, for_evaluation, score
from posttrain.task import EpisodeInvalid, Invalid, Outcome, Task
from posttrain.trajectory import Episode, Segment, Source, StopReason, ToolCall

Form = str | Sequence[str] | Callable[[str, Task], Sequence[str]]


def trial(
    reward: RewardConfig | str | Callable[..., Any] | Reward,
    make_env: Callable[[], Env] = SingleTurnEnv,
    *,
    form: Form = TAGGED,
) -> Callable[[str, Task], Awaitable[Outcome]]:
    """A judge for `Task.validate`: what an episode is worth in which the policy gives an answer.

    reward: a function, a name, a location, a `reward:` section. make_env: called once per episode.
    form: how the policy gives it: a text with {answer}, several for several turns ("<search> {answer} </search>", ..),
    or a function of the answer and the task that returns the turns.
    """
    ready: Any = reward if hasattr(reward, "outcomes") else load_reward(reward)  # type: ignore[arg-type]

    async def judge(answer: str, task: Task) -> Outcome:
        env = make_env()
        check_env(env)
        try:
            episode = await played(env, task, _turns(form, answer, task.own()))
        except EpisodeInvalid as failure:
            return Invalid(failure.reason, failure.detail)
        finally:
            await env.close()
        return await score(for_evaluation(ready), episode, task)

    return judge


async def played(env: Env, task: Task, turns: Sequence[str]) -> Episode:
    """The episode of a policy that writes these turns. It ends when the env says so, or when nothing is left to say.

    A turn is cut behind the first of the env's stop strings, unless the env wants it to go on (see `Step`).
    Raises what the env raises.
    """
    task = task.own()  # as in a rollout: what the env writes into the prompt is shown, in this episode
    first = await env.reset(task)
    record = _Record(task)
    record.show(first)
    for text in turns[: env.max_turns]:
        for said, reason in _cuts(text, env.stop_strings):
            step = await env.step(Action(text=said, stop_reason=reason))
            record.act(said, reason, step.reward, step.calls)
            if step.observation is not None or step.done or reason is not StopReason.STOP_STRING:
                break
        record.end_turn()
        if step.done:
            break
        record.show(step.observation)
    return record.episode()


class _Record:
    """What becomes an `Episode`."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._segments = [Segment(Source.PROMPT, _joined(task.prompt))]
        self._calls: list[ToolCall] = []
        self._rewards: list[float] = []
        self._given = False
        self._turn = ("", 0.0)
        self._stop_reason: StopReason | None = None

    def show(self, observation: Observation | None) -> None:
        if observation is None:
            return
        if observation.history:
            self._segments.append(Segment(Source.PROMPT, _joined(observation.history)))
        text = coerce_text(observation.head) + coerce_text(observation.text) + coerce_text(observation.tail)
        self._segments += [Segment(Source.ENV, coerce_text(m.get("content"))) for m in observation.messages]
        self._segments += [Segment(Source.ENV, text)] if text else []

    def act(self, text: str, reason: StopReason, reward: float | None, calls: Sequence[ToolCall]) -> None:
        """The turn so far."""
        self._turn = (text, self._turn[1] + (reward or 0.0))
        self._given |= reward is not None
        self._stop_reason = reason
        self._calls += calls

    def end_turn(self) -> None:
        text, reward = self._turn
        self._segments.append(Segment(Source.POLICY, text))
        self._rewards.append(reward)
        self._turn = ("", 0.0)

    def episode(self) -> Episode:
        said = [segment.text for segment in self._segments if segment.source is Source.POLICY]
        return Episode(
            task_id=self._task.id,
            episode_id="trial",
            segments=tuple(self._segments),
            stop_reason=self._stop_reason,
            calls=tuple(self._calls),
            policy_token_count=sum(len(text.split()) for text in said),
            env_reward=sum(self._rewards) if self._given else None,
            turn_rewards=tuple(self._rewards),
        )


def _turns(form: Form, answer: str, task: Task) -> list[str]:
    if callable(form):
        return list(form(answer, task))
    return [text.format(answer=answer) for text in ([form] if isinstance(form, str) else form)]


def _cuts(text: str, stops: Sequence[str]) -> Iterator[tuple[str, StopReason]]:
    """The text up to each stop string, then as a whole, as a policy that ends its turn by itself."""
    position = 0
    while found := [text.find(stop, position) + len(stop) for stop in stops if stop in text[position:]]:
        position = min(found)
        yield text[:position], StopReason.STOP_STRING
    yield text, StopReason.STOP_ID


def _joined(messages: Sequence[Any]) -> str:
    return "\n".join(coerce_text(message.get("content")) for message in messages)
