"""The data object of training and its two guarded writers. Standard library only.

The token list is the only state of an episode. Sampled ids are appended verbatim with their log-probs; every other
token enters through `add_context` with its source. Nothing is inferred afterwards: the loss mask *is* the provenance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

from posttrain.task import Abstain, Outcome, detached

MOST_LOGPROB = 1e-4  # what rounding may make of 0


class Source(IntEnum):
    """Who wrote a token."""

    PROMPT = 0
    POLICY = 1  # sampled by the policy: these, and only these, train
    ENV = 2  # observations, tool output, simulated users
    TEMPLATE = 3  # chat-template separators and headers
    INJECTED = 4  # forced in by the loop (e.g. an end-of-turn token after a length stop)


class StopReason(StrEnum):
    """Why a turn ended. The first four come from the sampler and are never inferred; the rest end it unsampled."""

    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORT = "abort"
    CONTEXT_FULL = "context_full"  # no room for another token: no request was sent
    MAX_TURNS = "max_turns"
    DEADLINE = "deadline"


class CallStatus(StrEnum):
    """What became of one attempt of the policy to act on the world."""

    OK = "ok"
    MALFORMED = "malformed"
    EMPTY = "empty"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    TRUNCATED = "truncated"  # the turn was cut inside the call: never executed
    OVER_BUDGET = "over_budget"
    TIMEOUT = "timeout"
    FAILED = "failed"


_STATUSES = tuple(CallStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One attempted call; `seconds` is wall time in the tool. Raises TypeError or ValueError for other types."""

    name: str
    arguments: dict[str, Any]
    status: CallStatus
    detail: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for key, kind in (("name", str), ("arguments", dict), ("detail", str), ("seconds", int | float)):
            if not isinstance(getattr(self, key), kind):
                seen, expected = getattr(self, key), getattr(kind, "__name__", "number")
                raise TypeError(f"ToolCall.{key} is a {expected}, got {type(seen).__name__}: {seen!r:.200}")
        if self.status not in _STATUSES:
            raise ValueError(f"ToolCall.status is one of {', '.join(_STATUSES)}; got {self.status!r:.200}")
        object.__setattr__(self, "status", CallStatus(self.status))  # frozen for others


@dataclass(slots=True, kw_only=True)
class Turn:
    """The span [start, end) of token_ids written by one party, with every cut that was made."""

    who: Source
    start: int
    end: int
    stop_reason: StopReason | None = None  # policy turns: as the sampler reported it
    text: str | None = field(default=None, compare=False, repr=False)  # of its tokens, where somebody has read them
    calls: tuple[ToolCall, ...] = ()
    seconds: float = 0.0
    tokens_cut: int = 0
    bytes_cut: int = 0


class TrajectoryError(ValueError):
    """A write or a construction that would break the alignment of a trajectory."""


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One token sequence of one episode, L tokens. Lists marked [L] are aligned with `token_ids`."""

    task_id: str
    group_id: str  # episodes of one task in one step; the baseline is taken over it, by id
    episode_id: str  # several trajectories share it when history was rewritten
    token_ids: list[int] = field(default_factory=list[int])  # [L]
    source: list[Source] = field(default_factory=list[Source])  # [L]
    rollout_logprobs: list[float | None] = field(default_factory=list["float | None"])  # [L] None where not sampled
    policy_versions: list[int] = field(default_factory=list[int])  # [L] -1 where not sampled
    turns: list[Turn] = field(default_factory=list[Turn])
    rewards: list[float] | None = None  # [L] at the token that earned it; None = no credit known
    outcome: Outcome = field(default_factory=lambda: Abstain("not scored"))
    streams: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])  # further [L] lists
    info: dict[str, Any] = field(default_factory=dict[str, Any])  # for people and logs; algorithms must not read it

    def __post_init__(self) -> None:
        self.check()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def loss_mask(self) -> list[bool]:
        """[L] True where the policy sampled the token."""
        return [source is Source.POLICY for source in self.source]

    @property
    def policy_token_count(self) -> int:
        return self.source.count(Source.POLICY)

    def add_context(self, ids: Sequence[int], source: Source) -> None:
        """Appends tokens that the policy did not write."""
        if source is Source.POLICY:
            raise TrajectoryError("policy tokens enter only through add_sampled, with their log-probs")
        self._check_open()
        self.token_ids.extend(ids)
        self.source.extend([source] * len(ids))
        self.rollout_logprobs.extend([None] * len(ids))
        self.policy_versions.extend([-1] * len(ids))

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], version: int | Sequence[int]) -> None:
        """Appends tokens exactly as the sampler returned them.

        version: the optimizer steps behind the sampling weights, one for all ids or one per id.
        Raises TrajectoryError when a log-prob is missing, NaN or positive beyond rounding.
        """
        self._check_open()
        versions = [version] * len(ids) if isinstance(version, int) else version
        if not len(ids) == len(logprobs) == len(versions):
            raise TrajectoryError(f"{len(ids)} ids, {len(logprobs)} log-probs and {len(versions)} versions must align")
        if not _are_logprobs(logprobs):
            for position, logprob in enumerate(logprobs):
                check_logprob(logprob, position)
        if min(versions, default=0) < 0:
            raise TrajectoryError(f"policy versions must be >= 0, got {min(versions)}")
        self.token_ids.extend(ids)
        self.source.extend([Source.POLICY] * len(ids))
        self.rollout_logprobs.extend(logprobs)
        self.policy_versions.extend(versions)

    def check(self) -> None:
        """Raises TrajectoryError unless every [L] list is aligned and provenance is consistent."""
        length = len(self.token_ids)
        aligned: dict[str, Sequence[Any] | None] = {
            "source": self.source,
            "rollout_logprobs": self.rollout_logprobs,
            "policy_versions": self.policy_versions,
            "rewards": self.rewards,
            **{f"streams[{name!r}]": stream for name, stream in self.streams.items()},
        }
        for name, values in aligned.items():
            if values is not None and len(values) != length:
                raise TrajectoryError(f"{name} has {len(values)} entries for {length} tokens")
        for position, (source, logprob, version) in enumerate(
            zip(self.source, self.rollout_logprobs, self.policy_versions, strict=True)
        ):
            if source is Source.POLICY:
                check_logprob(logprob, position)
            if (source is Source.POLICY) != (version >= 0):
                raise TrajectoryError(f"token {position}: source {source.name} with policy version {version}")
            if source is not Source.POLICY and logprob is not None:
                raise TrajectoryError(f"token {position}: source {source.name} carries a log-prob")
        for turn in self.turns:
            if not 0 <= turn.start <= turn.end <= length:
                raise TrajectoryError(f"turn [{turn.start}, {turn.end}) lies outside the {length} tokens")

    def _check_open(self) -> None:
        if self.rewards is not None or self.streams:
            raise TrajectoryError("the trajectory is closed: rewards or streams were already attached")


def _are_logprobs(values: Sequence[float | None]) -> bool:
    """`check_logprob` of all of them, at the speed of builtins: a sum is finite only if all its parts are."""
    try:
        return math.isfinite(sum(values)) and max(values, default=0.0) <= MOST_LOGPROB  # type: ignore[arg-type]
    except TypeError:  # a None is there
        return False


def check_logprob(logprob: float | None, position: int) -> None:
    """A missing log-prob is an error, never 0.0."""
    if logprob is None or math.isnan(logprob):
        raise TrajectoryError(f"token {position} was sampled but its log-prob is missing ({logprob})")
    if logprob == -math.inf:
        raise TrajectoryError(f"token {position} was sampled, so its probability cannot be 0 (log-prob -inf)")
    if logprob > MOST_LOGPROB:
        raise TrajectoryError(f"token {position}: a log-prob cannot be positive, got {logprob}")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text by one party, as rewards and people see it."""

    source: Source
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a reward function sees: text by source, never tensors, never the ground truth's position.

    `turns` of the policy are separate segments even when nothing lies between them.
    """

    task_id: str
    episode_id: str
    segments: tuple[Segment, ...]
    stop_reason: StopReason | None = None
    calls: tuple[ToolCall, ...] = ()
    policy_token_count: int = 0
    env_reward: float | None = None  # sum of what the env gave; None = it gave none
    turn_rewards: tuple[float, ...] = ()  # what the env gave to each of `policy_texts`
    answer: str | None = None  # what an external agent returned as its answer

    def own(self) -> Episode:
        """A copy for one judgement: what is written into the arguments of its calls stays there."""
        if not self.calls:
            return self
        return replace(self, calls=tuple(replace(call, arguments=detached(call.arguments)) for call in self.calls))

    @property
    def policy_texts(self) -> tuple[str, ...]:
        """The policy's turns, in order."""
        return tuple(segment.text for segment in self.segments if segment.source is Source.POLICY)

    @property
    def final_text(self) -> str:
        """The policy's last turn ('' when it never wrote)."""
        texts = self.policy_texts
        return texts[-1] if texts else ""
