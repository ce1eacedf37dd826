"""A person in the simulated user's place: reads what the policy says, answers, corrects and scores it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from posttrain.config import ConfigError
from posttrain.deadline import in_thread
from posttrain.envs import Env, InteractionEnv
from posttrain.envs.interaction import Reply
from posttrain.rollout import Limits, RolloutSpec
from posttrain.task import Message, Task

HELP = "an empty line ends the conversation; /reward 0.5 scores what was said, then go on or end"
Ask = Callable[[], str | None]  # the next line of the person; None = no more will come
Say = Callable[[str], None]


class Person:
    """An `Interaction` that asks a person. say: shows what the policy said; None where it is shown already."""

    def __init__(self, ask: Ask, say: Say | None, complain: Say) -> None:
        self._ask, self._say, self._complain = ask, say, complain

    async def reply(self, messages: Sequence[Message], task: Task) -> Reply:
        if self._say is not None:
            self._say(str(messages[-1]["content"]))
        reward: float | None = None
        while True:
            line = await in_thread(self._ask)  # it may take as long as it likes, and can be interrupted
            if line is None or not line.strip():
                return Reply(done=True, reward=reward)
            if not line.startswith("/"):
                return Reply(text=line, reward=reward)
            reward = self._scored(line, reward)

    def _scored(self, line: str, before: float | None) -> float | None:
        command, _, number = line.strip().partition(" ")
        try:
            if command != "/reward":
                raise ValueError
            return float(number)
        except ValueError:
            self._complain(f"{line.strip()} is not understood: {HELP}")
            return before


def with_person(spec: RolloutSpec, person: Person) -> RolloutSpec:
    """The same rollout with `person` as its user, and without deadlines: people think, and fetch coffee."""

    def make_env(task: Task) -> Env:
        env = spec.make_env(task)
        assert isinstance(env, InteractionEnv), "checked by `check_has_user`"
        env.seat(person)
        return env

    limits = {name: _unhurried(one) for name, one in spec.env_limits.items()}
    return replace(spec, make_env=make_env, limits=_unhurried(spec.limits), env_limits=limits, play_otherwise=None)


def check_has_user(env: object, name: str) -> None:
    """Raises ConfigError for an env in which nobody could be replaced."""
    if not isinstance(env, InteractionEnv):
        raise ConfigError(
            [f"--you takes the place of a simulated user, and the env {name} ({type(env).__name__}) has none; "
             "choose one with env: {name: interaction}, by --env NAME where the config has several"]
        )  # fmt: skip


def _unhurried(limits: Limits) -> Limits:
    return limits.model_copy(update=dict.fromkeys(("call_seconds", "turn_seconds", "episode_seconds"), None))
