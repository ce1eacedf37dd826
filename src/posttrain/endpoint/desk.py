"""Answers requests of an agent: finds their context in the recording, applies the limits, samples, and records."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain.chat import Renderer
from posttrain.deadline import ends_in
from posttrain.endpoint.agent import ExternalAgent
from posttrain.endpoint.answer import Answer, Reading, Tell
from posttrain.endpoint.calls import CallForm
from posttrain.endpoint.recording import Context, Recording, Written
from posttrain.endpoint.wire import CompletionRequest, Refusal, Reply
from posttrain.rollout import RolloutSpec, Ticket, opens_thought
from posttrain.sampler.protocol import Hear, Sampled, SamplingParams, StreamingSampler
from posttrain.task import EpisodeInvalid
from posttrain.trajectory import StopReason, TrajectoryError

LENGTH_CODE = "context_length_exceeded"


class Desk:
    """Answers the requests of one episode, several at a time.

    on_failure: told what no answer can express (a sampler that failed, a deadline): the episode ends by it.
    ends: when the episode does, by the event loop's clock. refused_for: the limit for which the last request was.
    abandoned: answers whose client left before their end; what was sampled of them is no part of the recording.
    """

    def __init__(
        self, ticket: Ticket, spec: RolloutSpec, agent: ExternalAgent, on_failure: Callable[[Exception], None]
    ) -> None:
        if not isinstance(spec.renderer, Renderer):
            raise TypeError(f"an external agent's messages need a posttrain.chat.Renderer, got {spec.renderer!r:.80}")
        self.ends: float | None = None
        self.refused_for: StopReason | None = None
        self.abandoned = 0
        self._ticket, self._spec, self._limits, self._agent = ticket, spec, spec.limits, agent
        self._renderer, self._form = spec.renderer, CallForm(agent.syntax, spec.renderer)
        self.recording = Recording(ticket, self._renderer, self._form)
        self._on_failure = on_failure
        self._asked: Counter[str] = Counter()  # how often the same ids were to be continued
        self._jobs: set[asyncio.Future[Any]] = set()
        self._over = False

    def close(self) -> None:
        """Nothing is sampled for this episode any more."""
        if self._over:
            return
        self._over = True
        for job in self._jobs:
            job.cancel()
        for session in self.recording.sessions:
            self._spec.sampler.release(session)

    @property
    def idle(self) -> bool:
        """Nothing is being sampled."""
        return not self._jobs

    def check_open(self) -> None:
        if self._over:
            raise _over()

    async def answer(self, request: CompletionRequest, tell: Tell | None = None) -> Reply:
        """Samples, records and words what the policy says. tell: gets the answer while it is sampled. Raises Refusal.

        When the caller is cancelled, so is the sampling, and nothing of this answer is recorded.
        """
        self.check_open()
        params, trains = self._params(request)
        tools = request.tools if self._agent.show_tools and request.tools else None
        context = self.recording.context(request, tools)
        try:
            params = self._within_limits(context, params, request)
            seed = self._seed(context, request)
            answer = Answer(
                request, self._form, self._renderer, in_thought=opens_thought(context.ids, self._renderer),
                separate=self._agent.reasoning == "separate", seed=seed, tell=tell,
            )  # fmt: skip
            started = time.perf_counter()
            sampled = await self._sample(context, params, seed, None if tell is None else answer.hear)
            seconds = time.perf_counter() - started
            self.refused_for = None
            reading = answer.finish(sampled)
            written = Written(sampled=sampled, seconds=seconds, records=reading.records, trains=trains)
            thread = self.recording.commit(context, written)
            reply = self._reply(request, context, sampled, reading, seed)
            self.recording.remember(request, tools, thread, reply, reading.text)
            return reply
        finally:
            context.release()

    def _params(self, request: CompletionRequest) -> tuple[SamplingParams, bool]:
        """How the answer is sampled, and whether it trains: only what was sampled as the run samples does."""
        params, policy = self._spec.params, self._agent.other_sampling
        wanted = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        said = {key: value for key, value in wanted.items() if value is not None}
        other: dict[str, Any] = {key: value for key, value in said.items() if abs(value - getattr(params, key)) > 1e-6}
        if not other or policy == "ignore":
            return params, True
        if policy == "exclude":
            try:
                return replace(params, **other), False
            except ValueError as error:
                raise Refusal(str(error), param=next(iter(other))) from error
        key, value = next(iter(other.items()))
        raise Refusal(
            f"{key}={value:g}, but the run samples with {key}={getattr(params, key):g}, and trains on the "
            f"probabilities of that: leave {key} out, or set env.options.other_sampling to 'ignore' (the run's {key} "
            "is used) or 'exclude' (sampled as asked, and no part of training)",
            code="unsupported_value",
            param=key,
        )

    def _within_limits(self, context: Context, params: SamplingParams, request: CompletionRequest) -> SamplingParams:
        """Bounds and stops of this call. Raises Refusal where no token is left to it."""
        limits, length = self._limits, len(context.ids)
        max_turns = min(self._agent.max_turns, limits.max_turns or self._agent.max_turns)
        if self.recording.turns + len(self._jobs) >= max_turns:
            self.refused_for = StopReason.MAX_TURNS
            raise Refusal(f"all {max_turns} calls of this episode are used (max_turns)", code="max_turns_reached")
        if self.recording.turns == 0 and length > limits.max_prompt_tokens:
            limit = f"max_prompt_tokens={limits.max_prompt_tokens}"
            raise self._break(EpisodeInvalid("prompt_too_long", f"the prompt has {length} tokens, {limit}"))
        room = min(limits.max_turn_tokens, params.max_new_tokens, limits.max_episode_tokens - length)
        if room <= 0:
            self.refused_for = StopReason.CONTEXT_FULL
            raise Refusal(
                f"the conversation has {length} tokens; the limit is max_episode_tokens={limits.max_episode_tokens}",
                code=LENGTH_CODE,
                param="messages",
            )
        return replace(
            params,
            max_new_tokens=min(room, request.max_tokens or room),
            stop_strings=tuple(dict.fromkeys((*request.stop, *self._stops(request), *params.stop_strings))),
            stop_ids=params.stop_ids | self._stop_ids(request),
        )

    def _stops(self, request: CompletionRequest) -> tuple[str, ...]:
        return self._form.stop_strings if request.tools else ()

    def _stop_ids(self, request: CompletionRequest) -> frozenset[int]:
        if request.stop_ids is not None:
            return request.stop_ids
        return self._renderer.stop_ids | (self._form.stop_ids if request.tools else frozenset())

    def _seed(self, context: Context, request: CompletionRequest) -> int:
        """The seed of an answer, made from the ids that it continues and how often the same ids were continued before.

        So the order in which parallel calls arrive changes nothing. A request for token ids has the seed that it sent.
        """
        if request.token_ids and request.seed is not None:
            return request.seed
        ids = ",".join(map(str, context.ids))
        key = hashlib.blake2b(f"{ids}/{request.seed}".encode(), digest_size=16).hexdigest()
        again = self._asked[key]
        self._asked[key] += 1
        turn = hashlib.blake2b(f"{key}/{again}".encode(), digest_size=8).digest()
        return self._ticket.seed(int.from_bytes(turn))

    async def _sample(self, context: Context, params: SamplingParams, seed: int, hear: Hear | None) -> Sampled:
        """One answer of the sampler. What no answer can express ends the episode."""
        ends, name = self._nearest()
        job = asyncio.ensure_future(self._ask(context, params, seed, hear))
        self._jobs.add(job)
        try:
            async with asyncio.timeout_at(ends) as clock:
                sampled = await job
        except asyncio.CancelledError:
            if self._over:
                raise _over() from None
            self.abandoned += 1
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError) and clock.expired()
            failure = ("timeout", f"{name} passed while sampling") if late else (
                "sampler_error", f"{type(error).__name__}: {error}"
            )  # fmt: skip
            raise self._break(EpisodeInvalid(*failure)) from error
        finally:
            self._jobs.discard(job)
        if sampled.stop_reason is StopReason.ABORT:
            raise self._break(EpisodeInvalid("sampler_abort", "the sampler gave the request up"))
        if not 1 <= len(sampled.ids) <= params.max_new_tokens:
            detail = f"asked for 1 to {params.max_new_tokens} tokens, the sampler returned {len(sampled.ids)}"
            raise self._break(TrajectoryError(detail))
        return sampled

    async def _ask(self, context: Context, params: SamplingParams, seed: int, hear: Hear | None) -> Sampled:
        """Samples, streaming tokens to `hear` where the sampler can stream; else they are heard with the answer."""
        sampler, named = self._spec.sampler, {"seed": seed, "session": context.session}
        if hear is None or not isinstance(sampler, StreamingSampler):
            return await sampler.sample(context.ids, params, **named)

        def tell(token: int, logprob: float) -> None:
            if token not in params.stop_ids:
                hear(token, logprob)

        return await sampler.stream(context.ids, params, tell, **named)

    def _nearest(self) -> tuple[float | None, str]:
        named = ((ends_in(self._limits.turn_seconds), "turn_seconds"), (self.ends, "episode_seconds"))
        return min(((ends, name) for ends, name in named if ends is not None), default=(None, ""))

    def _break(self, failure: Exception) -> Refusal:
        """Ends the episode; the agent gets an error, and is cancelled."""
        self._on_failure(failure)
        return Refusal(str(failure), status=500, code="episode_failed")

    def _reply(
        self, request: CompletionRequest, context: Context, sampled: Sampled, reading: Reading, seed: int
    ) -> Reply:
        cut = sampled.stop_reason is StopReason.STOP_ID and not request.token_ids
        ids = sampled.ids[:-1] if cut else sampled.ids
        shown = zip(ids, sampled.logprobs, strict=False) if request.logprobs else ()
        return Reply(
            id=f"{seed:016x}",
            content=reading.content,
            calls=reading.calls,
            reasoning=reading.reasoning,
            finish_reason="tool_calls"
            if reading.calls
            else "length"
            if sampled.stop_reason is StopReason.LENGTH
            else "stop",
            tokens=tuple((self._renderer.decode([token]), logprob) for token, logprob in shown),
            prompt_tokens=len(context.ids),
            cached_tokens=context.reused,
            completion_tokens=len(sampled.ids),
            ids=tuple(ids) if request.token_ids else None,
        )


def _over() -> Refusal:
    return Refusal("this episode is over", status=410, code="episode_over")
