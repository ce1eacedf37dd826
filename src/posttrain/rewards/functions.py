"""A user's reward function: found by name, checked, called, and its return value turned into outcomes.

Imported by the worker process too, so it stays with the standard library.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.location import LocationError, locate
from posttrain.task import Invalid, Outcome, Task, as_outcome, detached
from posttrain.trajectory import Episode

_DETAIL_CHARACTERS = 4000  # of a traceback, from its end


class RewardError(ValueError):
    """A reward that cannot be used at all: not found, wrong signature, wrong number of values. Stops the run."""


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """Where a function lives ("path.py:name" or "pkg.mod:name") and the options it is called with."""

    location: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def load(self) -> RewardFunction:
        return RewardFunction(load_function(self.location), self.options, name=self.location)


class RewardFunction:
    """A callable `(episode, task, **options)`, or `(episodes, task, **options) -> list` when its first parameter is
    called `episodes`.

    Raises RewardError at once when it cannot be called like that.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any] | None = None, name: str = "") -> None:
        self.function = function
        self.options = dict(options or {})
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 -- an object whose __call__ is async
        )
        self.is_batch = self._check_signature()

    def judge(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        """One outcome per episode; blocks, also for an async function. Whatever it raises becomes Invalid."""
        try:
            returned = self.call(episodes, task)
            if inspect.iscoroutine(returned):
                returned = asyncio.run(returned)
            return self.outcomes(returned, len(episodes))
        except RewardError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # of a loop of its own: this one waits for us
            return [reward_error(error)] * len(episodes)

    def call(self, episodes: Sequence[Episode], task: Task) -> Any:
        """The raw return value (a coroutine for async functions). Takes one episode unless the function is batch."""
        given: Any = list(episodes) if self.is_batch else episodes[0]
        return self.function(given, task, **detached(self.options))

    def outcomes(self, returned: Any, expected: int) -> list[Outcome]:
        """The return value of `call` as one outcome per episode; RewardError when a batch has another length."""
        if not self.is_batch:
            return [_outcome(returned)]
        values = list(returned)
        if len(values) != expected:
            raise RewardError(
                f"reward {self.name} returned {len(values)} values for {expected} episodes; a batch reward returns one "
                f"value per episode, None where it has no opinion"
            )
        return [_outcome(value) for value in values]

    def _check_signature(self) -> bool:
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return False  # a builtin without a signature: let the call tell
        try:
            signature.bind(None, None, **self.options)
        except TypeError as error:
            raise RewardError(
                f"reward {self.name}{signature} cannot be called as reward(episode, task"
                f"{''.join(f', {option}=...' for option in self.options)}): {error}"
            ) from error
        return next(iter(signature.parameters)) == "episodes"


def _outcome(value: object) -> Outcome:
    try:
        return as_outcome(value)
    except Exception as error:  # wrong type, or an array of several elements
        return reward_error(error)


def reward_error(error: BaseException) -> Invalid:
    """What a raising reward function makes of its sample, with the end of the traceback for people."""
    text = "".join(traceback.format_exception(error))
    return Invalid("reward_error", text[-_DETAIL_CHARACTERS:])


def load_function(location: str) -> Callable[..., Any]:
    """The function at "path.py:name" (from the working folder) or "pkg.mod:name". Raises RewardError."""
    try:
        function = locate(location)
    except LocationError as error:
        raise RewardError(f"reward {location!r}: {error}") from error
    if not callable(function):
        raise RewardError(f"reward {location!r} is of type {type(function).__name__}; expected a function")
    return function
