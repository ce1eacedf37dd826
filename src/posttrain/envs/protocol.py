"""What users write to make an agent's world: reset, step. Text and messages, never tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.task import Message, Task
from posttrain.trajectory import StopReason, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees next.

    Either `messages` (rendered by the chat template) or text: `head + text + tail`, where `text` is foreign (retrieved,
    typed, computed) and is cut to the observation budget, while `head` and `tail` are the env's own markup and stay
    whole. All of it is encoded so that none of it can become a control token.

    `history`, when not empty, replaces everything that the policy has seen so far (compaction, a removed observation):
    a further trajectory of the same episode is opened whose prompt is `history`; the tokens sampled before train in the
    context in which they were sampled.

    Raises TypeError for messages that are none.
    """

    text: str = ""
    head: str = ""
    tail: str = ""
    messages: tuple[Message, ...] = ()
    history: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        for key in ("messages", "history"):
            object.__setattr__(self, key, _messages(getattr(self, key), f"Observation.{key}"))  # frozen for others

    @property
    def has_text(self) -> bool:
        return (self.head, self.text, self.tail) != ("", "", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the policy: the text it wrote, without control tokens, and why it stopped.

    in_thought: the text begins inside a thought, because the prompt ended with `<think>` (as some templates do).
    """

    text: str
    stop_reason: StopReason
    in_thought: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The env's answer to an action. `reward` is credited to the last token of the action; None = none was given.

    `observation=None` without `done` after a stop string says that the turn is not over (the string was no call: it
    stood in a thought): the policy goes on writing and `step` is called again with the whole text of the turn.
    An observation that no further policy turn follows (`done`, or the last turn) is not written to the trajectory.
    Raises TypeError for other types than these: an env's mistake is found where it is made.
    """

    observation: Observation | None = None
    reward: float | None = None
    done: bool = False
    calls: tuple[ToolCall, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not isinstance(self.observation, Observation | None):
            raise TypeError(f"Step.observation is an Observation(text=...) or None, got {self.observation!r:.200}")
        if not isinstance(self.info, Mapping | None):
            raise TypeError(f"Step.info is a mapping, got {self.info!r:.200}")
        object.__setattr__(self, "done", _truth(self.done))  # frozen for others
        if not (isinstance(self.calls, tuple | list) and all(isinstance(call, ToolCall) for call in self.calls)):
            raise TypeError(f"Step.calls is a list of posttrain.trajectory.ToolCall, got {self.calls!r:.200}")
        object.__setattr__(self, "calls", tuple(self.calls))


def _messages(given: object, what: str) -> tuple[Message, ...]:
    if isinstance(given, tuple | list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in given
    ):
        return tuple(given)
    raise TypeError(f"{what} is a list of messages {{'role': 'user', 'content': 'text'}}, got {given!r:.200}")


def _truth(given: object) -> bool:
    """Also numpy's; a text such as "no" would be true."""
    value = given.item() if type(given).__module__ == "numpy" else given  # type: ignore[attr-defined]
    if isinstance(value, int):
        return bool(value)
    raise TypeError(f"Step.done is True or False, got {given!r:.200}")


async def awaited(method: Callable[..., Any], *arguments: Any) -> Any:
    """What a method of an env returns. TypeError for one that is not async."""
    made = method(*arguments)
    if not inspect.isawaitable(made):
        name = getattr(method, "__name__", "it")
        raise TypeError(f"{name} of an env has to be async: write `async def {name}`; it returned {made!r:.80}")
    return await made


def check_env(env: object) -> None:
    """Raises TypeError or ValueError for what the type of an env's attributes does not say, or says in vain."""
    name = type(env).__name__
    stops, turns = getattr(env, "stop_strings", ()), getattr(env, "max_turns", None)
    if isinstance(stops, str):
        raise TypeError(f"{name}.stop_strings is the text {stops!r}: each character would stop; write ({stops!r},)")
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise ValueError(f"{name}.stop_strings must hold texts of at least one character, got {stops!r}")
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise ValueError(f"{name}.max_turns must be a number of turns, 1 or more, got {turns!r}")


class Env(Protocol):
    """One episode's world; made anew for each episode.

    Raise `posttrain.task.EpisodeInvalid(reason, detail)` when the episode cannot be judged.
    """

    stop_strings: tuple[str, ...]  # the policy's turn ends at the first of these
    max_turns: int  # policy turns

    async def reset(self, task: Task) -> Observation:
        """Begins the episode. What it returns is shown after the task's prompt (or instead of it: `history`)."""
        ...

    async def step(self, action: Action) -> Step:
        """Answers one policy turn; called at most `max_turns` times, unless turns go on (see `Step`)."""
        ...

    async def close(self) -> None:
        """Frees what the env holds; called once, whatever happened."""
        ...
