"""A sampler without a model: turns come from a script. For demonstrations, dry runs and tests of everything around it.

It keeps the whole contract of a real sampler: stops, cuts, log-probs aligned with ids, versions. The log-probs are made
up but exact (multiples of 1/64, the same in any float format) and depend only on the seed and the token's index.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.sampler.protocol import Hear, Sampled, SamplingParams
from posttrain.sampler.randomness import uniform
from posttrain.sampler.stopping import Stops
from posttrain.trajectory import StopReason

Turn = str | Sequence[int]  # text, or token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCall:
    """What a script sees when it is asked for a turn."""

    ids: tuple[int, ...]  # everything so far
    params: SamplingParams
    seed: int
    session: str | None
    turn: int  # how many turns this session was given before; 0 without a session


class ScriptedSampler:
    """Replays `script`: a list of turns (one per call of a session) or a function of the call.

    A turn is cut at the first stop or at `max_new_tokens`. One that runs out earlier ends with a stop id: `end_id`, or
    the smallest of the request's; it is an error when there is none.
    `delay` seconds are slept before each answer, or, where it is streamed, while its tokens are told: a slow engine,
    for tests of limits.
    """

    def __init__(
        self,
        script: Sequence[Turn] | Callable[[ScriptedCall], Turn],
        tokenizer: Any | None = None,
        *,
        end_id: int | None = None,
        version: int = 0,
        delay: float | Callable[[ScriptedCall], float] = 0.0,
    ) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._delay = delay
        self._stops = Stops(tokenizer)
        self._turns: Counter[str] = Counter()
        self.version = version  # the caller may count it up, as a trainer would
        self.calls: list[ScriptedCall] = []
        self.released: list[str] = []

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        """Raises ValueError for an empty prompt, and IndexError when a list of turns has no more."""
        call, version = self._called(ids, params, seed, session), self.version
        await asyncio.sleep(self._seconds(call))
        return self._answer(call, version)

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, hear: Hear, *, seed: int, session: str | None = None
    ) -> Sampled:
        """See `StreamingSampler`; raises as `sample` does."""
        call = self._called(ids, params, seed, session)
        sampled = self._answer(call, self.version)
        for token, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
            await asyncio.sleep(self._seconds(call) / len(sampled.ids))
            hear(token, logprob)
        return sampled

    def _called(self, ids: Sequence[int], params: SamplingParams, seed: int, session: str | None) -> ScriptedCall:
        if not ids:
            raise ValueError("cannot continue an empty list of ids")
        turn = 0 if session is None else self._turns[session]
        call = ScriptedCall(ids=tuple(ids), params=params, seed=seed, session=session, turn=turn)
        self.calls.append(call)
        if session is not None:
            self._turns[session] += 1
        return call

    def _seconds(self, call: ScriptedCall) -> float:
        return self._delay(call) if callable(self._delay) else self._delay

    def _answer(self, call: ScriptedCall, version: int) -> Sampled:
        new, reason, stop = self._cut(self._tokens(call), call.params)
        logprobs = [made_up_logprob(call.seed, index) for index in range(len(new))]
        return Sampled(ids=new, logprobs=logprobs, versions=[version] * len(new), stop_reason=reason, stop=stop)

    def release(self, session: str) -> None:
        self.released.append(session)
        self._turns.pop(session, None)

    def _tokens(self, call: ScriptedCall) -> list[int]:
        if callable(self._script):
            turn = self._script(call)
        elif call.turn < len(self._script):
            turn = self._script[call.turn]
        else:
            raise IndexError(f"the script has {len(self._script)} turns; session {call.session!r} asks for one more")
        if not isinstance(turn, str):
            return list(turn)
        if self._tokenizer is None:
            raise ValueError("a script of text needs a tokenizer; write the turns as token ids, or pass one")
        return list(self._tokenizer.encode(turn, add_special_tokens=False))

    def _cut(self, tokens: list[int], params: SamplingParams) -> tuple[list[int], StopReason, int | str | None]:
        rule = self._stops.rule(params)
        for count in range(1, min(len(tokens), params.max_new_tokens) + 1):
            stopped = rule.after(tokens[:count])
            if stopped is not None:
                return tokens[:count], *stopped
        if len(tokens) >= params.max_new_tokens:
            return tokens[: params.max_new_tokens], StopReason.LENGTH, None
        if self._end_id is None and not params.stop_ids:
            raise ValueError(
                "the scripted turn ran out before any stop: end it with a stop string, or give the sampler an end_id "
                "or the request stop_ids"
            )
        end = min(params.stop_ids) if self._end_id is None else self._end_id
        return [*tokens, end], StopReason.STOP_ID, end


def made_up_logprob(seed: int, index: int) -> float:
    """A multiple of 1/64 in [-4, 0)."""
    return -(1 + int(uniform(seed, index) * 256)) / 64
