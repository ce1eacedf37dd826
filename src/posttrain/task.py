"""What is asked of the policy, and what came of it. Standard library only.

A reward is a `Score`, an `Invalid` (something broke: the sample must not train and must not enter a baseline) or an
`Abstain` (the scorer has no opinion). A failure is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

Message = dict[str, Any]  # {"role": ..., "content": ..., optionally "tool_calls", "name"}
MOST_REWARD = 1e30  # beyond it float32, in which advantages are computed, does not hold the sum over a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question for the policy.

    `id` is unique over all data of a run: groups are formed by it, never by position.
    `ground_truth` holds the accepted answers; empty means that the task has none (an env may score it itself).
    `extra` carries every further column of the row to env, reward and log.

    Code of users gets a copy (`own`): the row is there for the whole run, for every episode and epoch.
    """

    id: str
    prompt: tuple[Message, ...]
    ground_truth: tuple[str, ...] = ()
    source: str = "default"
    env: str | None = None
    reward: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def own(self) -> Task:
        """A copy for one episode or one judgement: what is written into its messages or columns stays there."""
        return replace(self, prompt=detached(self.prompt), extra=detached(dict(self.extra)))

    def validate(
        self, judge: Judge, *, answers: Sequence[str] | None = None, wrong: Sequence[str] = ("",), full: float = 1.0
    ) -> None:
        """Raises GoldRefused unless every accepted answer gets the full reward and no wrong one does. Without a model.

        judge(answer, task): what an episode is worth in which the policy gives `answer`: a number or an outcome, now or
        awaited. `posttrain.envs.trial.trial` makes one of reward and env. answers: instead of `ground_truth`, where
        that is no answer (a target, a rubric). In an event loop await `verdicts` instead.
        """
        right = self.ground_truth if answers is None else tuple(answers)
        if not right:
            raise GoldRefused(f"task {self.id} has no accepted answer: say answers=[...]")
        found = asyncio.run(self.verdicts(judge, (*right, *wrong)))
        for answer in right:
            outcome = found[answer]
            if not (isinstance(outcome, Score) and outcome.value >= full):
                raise GoldRefused(f"task {self.id}: the accepted answer {answer!r} got {_shown(outcome)}, not {full:g}")
        for answer in wrong:
            outcome = found[answer]
            if answer not in right and isinstance(outcome, Score) and outcome.value >= full:
                raise GoldRefused(f"task {self.id}: the wrong answer {answer!r} got {_shown(outcome)}")

    async def verdicts(self, judge: Judge, answers: Sequence[str] | None = None) -> dict[str, Outcome]:
        """Answer -> what the judge says of it; the accepted answers when none are given."""
        found: dict[str, Outcome] = {}
        for answer in self.ground_truth if answers is None else answers:
            said = judge(answer, self)
            found[answer] = as_outcome(await said if inspect.isawaitable(said) else said)
        return found


Judge = Callable[[str, Task], Any]


class GoldRefused(AssertionError):
    """A task whose accepted answers do not get the full reward, or whose wrong ones do."""


@dataclass(frozen=True, slots=True)
class Score:
    """A finite reward with the named parts it was made of; `prediction` is the extracted answer (for maj@k).

    `turns` rewards each turn of the policy by itself, besides `value`, which is the outcome: one number per entry of
    `Episode.policy_texts`, None where a turn earned nothing. They replace what the env gave to its turns.
    Numbers may be those of numpy and torch and become Python's. Raises TypeError and ValueError for what is none.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    prediction: str | None = None
    turns: Sequence[float | None] | None = None

    def __post_init__(self) -> None:
        value = _as_float(self.value)
        if not abs(value) <= MOST_REWARD:
            fix = "return Invalid(reason) when scoring failed"
            raise ValueError(f"a Score must be finite, and {MOST_REWARD:g} at most, got {value}; {fix}")
        _set(self, "value", value)
        _set(self, "components", _components(self.components))
        prediction: object = self.prediction
        if isinstance(prediction, str):
            _set(self, "prediction", storable(prediction))
        elif prediction is not None:
            raise TypeError(f"Score.prediction is a text or None, got {_seen(prediction)}")
        if self.turns is None:
            return
        turns = tuple(0.0 if turn is None else _as_float(turn) for turn in self.turns)
        if not all(abs(turn) <= MOST_REWARD for turn in turns):
            raise ValueError(f"rewards of turns must be finite, got {turns}; None says that a turn earned nothing")
        _set(self, "turns", turns)


@dataclass(frozen=True, slots=True)
class Invalid:
    """The sample is unusable: `reason` is a short counted key (`timeout`, `tool_down`), `detail` is for people.

    Whatever is given as detail (an exception, say) becomes text. Raises TypeError for a reason that is none.
    """

    reason: str
    detail: str = ""

    def __post_init__(self) -> None:
        _set(self, "reason", _reason(self.reason, "Invalid"))
        _set(self, "detail", storable(str(self.detail)))


@dataclass(frozen=True, slots=True)
class Abstain:
    """The scorer declines to judge; the sample leaves the baseline but is not an error."""

    reason: str = ""

    def __post_init__(self) -> None:
        if self.reason != "":
            _set(self, "reason", _reason(self.reason, "Abstain"))


Outcome = Score | Invalid | Abstain


class EpisodeInvalid(Exception):
    """Raised by an env or tool when an episode cannot be judged (server down, deadline passed); becomes `Invalid`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = _reason(reason, "EpisodeInvalid")
        self.detail = storable(str(detail))
        super().__init__(f"{self.reason}: {self.detail}" if self.detail else self.reason)


def as_outcome(value: object) -> Outcome:
    """Turns whatever a reward function returned into an `Outcome`.

    None -> Abstain; NaN, infinity and what float32 cannot sum -> Invalid; bool, int, float and one-element numpy or
    torch values -> Score; anything else -> TypeError, which the caller records as a reward error.
    """
    if isinstance(value, Score | Invalid | Abstain):
        return value
    if value is None:
        return Abstain("reward returned None")
    number = _as_float(value)
    if not math.isfinite(number):
        return Invalid("non_finite_reward", f"the reward function returned {number}")
    if abs(number) > MOST_REWARD:
        return Invalid("non_finite_reward", f"the reward function returned {number}; {MOST_REWARD:g} is the most")
    return Score(number)


def detached(value: Any) -> Any:
    """A copy of the dicts, lists, sets and tuples in `value`, at every depth; what they hold is the same.

    Not copy.deepcopy: it is several times slower, and fails for what cannot be copied, such as an open client.
    """
    kind = cast("type[object]", type(value))
    if kind is dict:
        return {key: detached(inner) for key, inner in value.items()}
    if kind is list:
        return [detached(inner) for inner in value]
    if kind is tuple:
        return tuple(detached(inner) for inner in value)
    return set(value) if kind is set else value


def storable(text: str) -> str:
    """The text, halves of characters in it written as \\udc80: files and terminals take no others."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _set(frozen: object, name: str, value: object) -> None:
    """In `__post_init__` of a class that is frozen for others."""
    object.__setattr__(frozen, name, value)


def _reason(reason: object, of: str) -> str:
    if isinstance(reason, str) and reason.strip():
        return storable(reason)
    raise TypeError(f"the reason of {of} is a short text such as 'timeout', got {_seen(reason)}")


def _components(given: object) -> dict[str, float]:
    """Numbers by name, without the parts that are None: not known."""
    try:
        parts = dict(cast("Mapping[str, object]", given))
        return {storable(name): _as_float(value) for name, value in parts.items() if value is not None}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"Score.components holds numbers by name, got {_seen(given)}") from error


def _seen(value: object) -> str:
    return f"{type(value).__name__}: {value!r:.200}"


def _as_float(value: object) -> float:
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    item = getattr(value, "item", None)  # numpy scalars, 0-d arrays and tensors; raises on more than one element
    if callable(item):
        return _as_float(item())
    raise TypeError(f"a reward must be a number, Score, Invalid, Abstain or None; got {_seen(value)}")


def _shown(outcome: Outcome) -> str:
    if isinstance(outcome, Score):
        return f"{outcome.value:g}"
    detail = f": {outcome.detail[-400:]}" if isinstance(outcome, Invalid) and outcome.detail else ""
    return f"{type(outcome).__name__} ({outcome.reason}{detail})"
