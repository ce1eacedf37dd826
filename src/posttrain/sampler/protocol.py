"""The contract between a rollout and whatever generates tokens: ids in, ids and log-probs out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from posttrain.trajectory import StopReason

MIN_TEMPERATURE = 1e-4  # below it logits overflow when they are divided by it; greedy is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one turn is sampled.

    The returned log-probs are those of the distribution sampled from, at `temperature`; the trainer applies the same
    temperature. `temperature=0` is greedy (log-probs are then reported at temperature 1).
    Generation ends at the first of: a stop id (kept as the last id), a stop string (the token completing it is the last
    id), `max_new_tokens`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}; end the episode instead")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or in [{MIN_TEMPERATURE}, inf), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 = off), got {self.top_k}")
        if any(not stop for stop in self.stop_strings):
            raise ValueError("an empty stop string would end every turn at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """n sampled tokens. `ids`, `logprobs` and `versions` are aligned; the stop id, if any, is the last id."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason
    stop: int | str | None = None  # which id or string stopped it


Hear = Callable[[int, float], None]  # called with every sampled id and its log-prob


class Sampler(Protocol):
    """Anything that continues token lists.

    `seed` fixes the randomness of this call alone: results do not depend on what else is being sampled.
    `session` names an episode whose earlier ids may still be cached; it is a hint and never changes a result.
    """

    @property
    def version(self) -> int:
        """Optimizer steps behind the current weights."""
        ...

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        """Continues `ids` by one turn: at least one token, at most `params.max_new_tokens`.

        Many calls run at the same time. When the caller is cancelled, the sampling is given up.
        """
        ...

    def release(self, session: str) -> None:
        """The episode is over: what was cached for it may go."""
        ...


@runtime_checkable
class StreamingSampler(Protocol):
    """A `Sampler` that can tell each token when it is sampled."""

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, hear: Hear, *, seed: int, session: str | None = None
    ) -> Sampled:
        """As `sample`; besides, calls `hear(id, logprob)` for every token as it is sampled, on the caller's event loop.

        All calls come before this returns.
        """
        ...


@runtime_checkable
class CountingSampler(Protocol):
    """A `Sampler` that says what it has done so far."""

    def counters(self) -> dict[str, int]:
        """Counters since it was made, by their names in `SamplerStats`; one that is not known is not there."""
        ...
