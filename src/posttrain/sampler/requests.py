"""What goes through the engine: requests, their limits, and what is counted on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from posttrain.sampler.draw import DrawSettings
from posttrain.sampler.protocol import Hear, Sampled, SamplingParams
from posttrain.sampler.randomness import stream_of
from posttrain.sampler.slots import Slot
from posttrain.sampler.stopping import StopRule
from posttrain.trajectory import StopReason

NO_WEIGHTS = -1  # the version of a sampler that has not been given any, or whose transfer failed half-way
SEED_MASK = (1 << 63) - 1  # engines take seeds that fit a signed 64-bit integer


class SamplerError(RuntimeError):
    """The engine could not go on; every request that was in it fails with this."""


@dataclass(slots=True, eq=False)
class Request:
    """A policy turn while it is sampled. `ids` is the prompt and what was sampled so far."""

    ids: list[int]
    prompt_length: int
    params: SamplingParams
    stream: int  # randomness.stream_of(seed)
    rule: StopRule
    limit: int  # the turn ends with LENGTH when `ids` has this many tokens
    session: str | None = None
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    slot: Slot | None = None  # None while it waits
    forked_from: Request | None = None  # the same ids are being prefilled there: only the last logits are shared
    result: Sampled | None = None
    hear: Hear | None = None  # told every token, on the thread of the engine

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt_length

    @property
    def missing(self) -> int:
        """Tokens whose keys are not cached yet; 1 for a request that is being decoded."""
        return len(self.ids) - (self.slot.cached if self.slot is not None else 0)


@dataclass(slots=True, kw_only=True)
class SamplerStats:
    """Counted since the sampler was made (or since `reset`). Tokens, unless said otherwise."""

    requests: int = 0  # turns finished
    tokens_generated: int = 0
    tokens_forwarded: int = 0  # through the model: prefilled and decoded
    tokens_prefilled: int = 0  # forwarded because they were not cached
    tokens_reused: int = 0  # taken from the cache: a session's past, a group's prompt, a shared prefix
    tokens_truncated_draw: int = 0  # drawn under top_p or top_k: their log-probs are renormalised
    cache_hits: int = 0  # requests that reused anything
    steps: int = 0  # forwards
    rows: int = 0  # sequences in those forwards, summed
    evictions: int = 0  # idle sessions whose cache was given up for memory
    preemptions: int = 0  # running requests that were put back for memory
    restarts: int = 0  # running requests that began anew because the weights changed
    flushes: int = 0  # times the whole cache was dropped because the policy's version changed

    @classmethod
    def total(cls, parts: Sequence[SamplerStats]) -> SamplerStats:
        return cls(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(cls)})

    def chosen(self, *names: str) -> dict[str, int]:
        """Some of them by name: what a sampler counts, where it does not count all."""
        return {name: getattr(self, name) for name in names}

    @property
    def mean_batch(self) -> float:
        """Sequences per forward; 0 before the first."""
        return self.rows / self.steps if self.steps else 0.0


def summed(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The counters of several samplers as one's."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine may use."""

    max_batch: int  # sequences in one forward
    tokens_per_step: int  # new tokens in one forward; longer prompts are prefilled in chunks
    kv_bytes: int  # memory for keys and values
    max_context: int  # tokens of a sequence, from the model


def new_request(
    ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    session: str | None,
    rule: StopRule,
    max_context: int,
    vocabulary: int,
) -> Request:
    """Raises ValueError for a prompt that is empty, leaves no room for a token, or has ids that the model has no
    embedding of: in a forward these would end every other request, too."""
    if not ids:
        raise ValueError("cannot continue an empty list of ids: give at least a start token")
    if len(ids) >= max_context:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the model's context is {max_context}: no token fits; "
            "end the episode (context_full) before asking"
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = next(i for i in ids if not 0 <= i < vocabulary)
        raise ValueError(
            f"the prompt has the id {wrong} and the model knows 0 to {vocabulary - 1}: is the tokenizer this model's?"
        )
    return Request(
        ids=list(ids),
        prompt_length=len(ids),
        params=params,
        stream=stream_of(seed),
        rule=rule,
        limit=min(len(ids) + params.max_new_tokens, max_context),
        session=session,
    )


def ends(request: Request) -> bool:
    """Whether the last token ends the turn; sets `result` if so."""
    new = request.ids[-1]
    stopped = None
    if new in request.rule.ids or new in request.rule.candidates:
        stopped = request.rule.after(request.ids[request.prompt_length :])
    if stopped is None and len(request.ids) >= request.limit:
        stopped = (StopReason.LENGTH, None)
    if stopped is None:
        return False
    request.result = Sampled(
        ids=request.ids[request.prompt_length :],
        logprobs=request.logprobs,
        versions=request.versions,
        stop_reason=stopped[0],
        stop=stopped[1],
    )
    return True


def refuse_truncation(params: SamplingParams, sampler: str) -> None:
    """Raises ValueError for top_p < 1 and top_k > 0. sampler: the class that would allow them when told to."""
    if params.top_p < 1 or params.top_k:
        raise ValueError(
            f"top_p={params.top_p}, top_k={params.top_k}: the trainer's log-probs are those of the whole "
            "distribution, so truncated samples would bias training; use top_p=1 and top_k=0, or "
            f'{sampler}(..., truncation="allow") for evaluation'
        )


def fail_all(futures: Iterable[asyncio.Future[Sampled]], error: BaseException, said: str) -> None:
    """Nobody is left waiting: SamplerError(said), or cancelled where that is what the engine's task was."""
    for future in futures:
        if future.done():
            continue
        if isinstance(error, asyncio.CancelledError):
            future.cancel()
            continue
        failure = SamplerError(said)
        failure.__cause__ = error
        future.set_exception(failure)


def draw_settings(requests: Sequence[Request], vocabulary: int, device: torch.device) -> DrawSettings:
    """The settings of n requests as tensors; None for a setting that is off in all of them."""
    params = [r.params for r in requests]
    temperatures = [p.temperature or 1.0 for p in params]
    column = (len(params), 1)
    return DrawSettings(
        temperature=torch.tensor(temperatures, device=device).view(column) if set(temperatures) != {1.0} else None,
        greedy=torch.tensor([p.temperature == 0 for p in params], device=device)
        if any(p.temperature == 0 for p in params)
        else None,
        top_k=torch.tensor([p.top_k or vocabulary for p in params], device=device).view(column)
        if any(p.top_k for p in params)
        else None,
        top_p=torch.tensor([p.top_p for p in params], device=device).view(column)
        if any(p.top_p < 1 for p in params)
        else None,
    )
