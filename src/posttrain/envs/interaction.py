"""A simulated user: answers, corrects and scores the policy, turn by turn.

    the row's prompt -> policy -> user -> policy -> ... until the user is done or `max_turns` is reached

Which user a row meets is the row's business: `interaction_kwargs` in its extra columns (or in `extra_info`, as verl's
files have it) names one of `interactions`, and what else stands there goes to its constructor. A user speaks through
the chat template and its words never train.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.envs.protocol import Action, Observation, Step
from posttrain.location import did_you_mean, locate
from posttrain.rewards.numeric import gsm8k
from posttrain.task import EpisodeInvalid, Message, Score, Task
from posttrain.trajectory import Episode, Segment, Source

UNLIMITED_TURNS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the user does about the policy's turn. `reward` is credited to that turn; None = none was given."""

    text: str = ""
    done: bool = False
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Interaction(Protocol):
    """A user of one episode; its constructor takes the row's `interaction_kwargs`, without the name."""

    async def reply(self, messages: Sequence[Message], task: Task) -> Reply:
        """`messages` is the conversation so far, the policy's newest turn last."""
        ...


class ScriptedUser:
    """Says the given lines one after the other and then leaves."""

    def __init__(self, *, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    async def reply(self, messages: Sequence[Message], task: Task) -> Reply:
        return Reply(text=self._lines.pop(0)) if self._lines else Reply(done=True)


class CorrectingUser:
    """Checks the number behind `####` as GSM8K does; ends with reward 1 when it is right, and else asks again."""

    def __init__(
        self,
        *,
        query: str = "",  # in verl's rows; the prompt holds it already
        ground_truth: str | None = None,  # None: the row's own
        wrong: str = "That is not correct. Think it over and give another answer after ####.",
        attempts: int = 3,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be >= 1, got {attempts}")
        self._truth = ground_truth
        self._wrong = wrong
        self._attempts = attempts

    async def reply(self, messages: Sequence[Message], task: Task) -> Reply:
        self._attempts -= 1
        judged = Task(
            id=task.id,
            prompt=task.prompt,
            ground_truth=task.ground_truth if self._truth is None else (str(self._truth),),
        )
        answer = Segment(Source.POLICY, str(messages[-1]["content"]))
        outcome = gsm8k(Episode(task_id=task.id, episode_id="", segments=(answer,)), judged)
        if not isinstance(outcome, Score):
            raise EpisodeInvalid("no_ground_truth", f"the user of task {task.id} does not know the answer: {outcome}")
        right = outcome.value == 1.0
        if right or not self._attempts:
            return Reply(done=True, reward=outcome.value)
        return Reply(text=self._wrong, reward=0.0)


INTERACTIONS: dict[str, Callable[..., Interaction]] = {
    "correcting": CorrectingUser,
    "scripted": ScriptedUser,
}


class InteractionEnv:
    """See the module's docstring.

    interactions: names that rows may use, each a name of `INTERACTIONS`, "pkg.mod:Class" or "path.py:Class"; the
    built-in ones are there under their own names. default: the one of rows that name none. options: constructor
    arguments by name, under those of the row.
    """

    stop_strings: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        interactions: Mapping[str, str] | None = None,
        default: str | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        max_turns: int = 4,
    ) -> None:
        self.max_turns = max_turns
        self._made = dict(INTERACTIONS) | {name: _located(place) for name, place in (interactions or {}).items()}
        self._default = default
        self._options = options or {}
        for name in (*([default] if default else []), *self._options):
            self._known(name, "the env's options name")
        self._user: Interaction | None = None
        self._seated: Interaction | None = None
        self._messages: list[Message] = []
        self._task: Task | None = None

    def check_task(self, task: Task) -> None:
        """Raises ValueError for a row whose user is not known, or does not take what the row gives it."""
        self._meant(task)

    def seat(self, user: Interaction) -> None:
        """`user` takes the place of whomever the row names, for as many turns as it likes."""
        self._seated, self.max_turns = user, UNLIMITED_TURNS

    async def reset(self, task: Task) -> Observation:
        if self._seated is None:
            factory, kwargs = self._meant(task)
            self._user = factory(**kwargs)
        else:
            self._user = self._seated
        self._task, self._messages = task, list(task.prompt)
        return Observation()

    async def step(self, action: Action) -> Step:
        assert self._user is not None
        assert self._task is not None
        self._messages.append({"role": "assistant", "content": action.text})
        reply = await self._user.reply(tuple(self._messages), self._task)
        message: Message = {"role": "user", "content": reply.text}
        self._messages.append(message)
        observation = None if reply.done else Observation(messages=(message,))
        return Step(observation=observation, reward=reply.reward, done=reply.done, info=reply.info)

    async def close(self) -> None:
        close = getattr(self._user, "close", None)
        if close is not None:
            await close()

    def _meant(self, task: Task) -> tuple[Callable[..., Interaction], dict[str, Any]]:
        """The user that the row asks for, and the arguments of its constructor."""
        kwargs = dict(interaction_kwargs(task))
        name = kwargs.pop("name", None) or self._default
        if name is None:
            raise ValueError(
                "the row names no interaction: give it interaction_kwargs: {name: ...}, or the env a default"
            )
        factory = self._known(name, "interaction_kwargs names")
        return factory, _taken(factory, {**self._options.get(name, {}), **kwargs}, name)

    def _known(self, name: Any, who: str) -> Callable[..., Interaction]:
        if name not in self._made:
            known, near = ", ".join(sorted(self._made)), did_you_mean(str(name), self._made)
            raise ValueError(
                f"{who} the interaction {name!r}, which is not known.{near} Known: {known}; your own goes into the "
                "env's options: interactions: {NAME: 'path.py:Class'}"
            )
        return self._made[name]


def interaction_kwargs(task: Task) -> Mapping[str, Any]:
    """Of the row, at the top or in verl's `extra_info`; empty when it has none. Raises ValueError for no mapping."""
    info = task.extra.get("extra_info")
    nested = info.get("interaction_kwargs") if isinstance(info, Mapping) else None
    found = task.extra.get("interaction_kwargs") or nested or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"interaction_kwargs must be an object with a name, got {found!r:.80}")
    return found


def _located(place: str) -> Callable[..., Interaction]:
    return INTERACTIONS[place] if place in INTERACTIONS else locate(place)


def _taken(factory: Callable[..., Interaction], given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Files have a column for what any row's user takes, None in the other rows: only what is None may go."""
    parameters = inspect.signature(factory).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    unknown = [key for key, value in given.items() if key not in parameters and value is not None]
    if unknown:
        raise ValueError(
            f"the interaction {name!r} takes {', '.join(parameters)}; the row also gives {', '.join(unknown)}"
        )
    return {key: value for key, value in given.items() if key in parameters and value is not None}
