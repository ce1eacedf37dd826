"""A server as a sampler, for evaluation and generation: OpenAI's /v1/completions with token ids in and out.

Served by vLLM (`python -m vllm.entrypoints.openai.api_server`), SGLang (`python -m sglang.launch_server`) or `posttrain
serve`; all return the ids that were sampled when asked. What they stop at is looked at here once more, so that a turn
ends as with every other sampler. The weights are the server's own: `version` is 0, and nothing is trained by what it
says. The log-probs of a vLLM server are those of its `--logprobs-mode`; for temperatures other than 1 that must be
processed_logprobs. Those of SGLang are taken after the temperature and before top_p and top_k.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import httpx

from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.sampler.requests import SEED_MASK, Request, SamplerError, ends, new_request
from posttrain.sampler.stopping import Stops
from posttrain.trajectory import StopReason

MAX_STOPS = 16  # a server refuses more; the rest is found here, at the price of tokens sampled in vain
TRIES = 4
FIRST_PAUSE = 0.5  # seconds; doubles with each try
LONGEST_PAUSE = 5.0
AGAIN = frozenset({408, 429, 500, 502, 503, 504})
SHOWN = 300  # characters of an answer in an error
EXACTLY = {  # by `owned_by` of the model's card: sample as was asked, and answer with all that was sampled
    "vllm": {
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "top_k": 0,  # these, if not said, are the model's generation_config.json's
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
    "sglang": {  # without ignore_eos, under which it ignores stop_token_ids, too
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
}


class ServerSampler:
    """A `Sampler` on `url` (with /v1). model: the server's name for it; None = the first that it lists.

    tokenizer: needed for stop strings only. concurrency: requests at a time. headers: sent with each.
    """

    version = 0
    interruptible = False  # whether a turn that the server has broken off goes on by another request
    patience_seconds = 0.0  # for which a server that is not there is asked again, beyond the usual tries

    def __init__(
        self,
        url: str,
        tokenizer: Any | None = None,
        *,
        model: str | None = None,
        token: str | None = None,
        concurrency: int = 64,
        timeout_seconds: float = 600.0,
    ) -> None:
        if concurrency < 1 or timeout_seconds <= 0:
            raise ValueError(f"need concurrency >= 1 and timeout_seconds > 0, got {concurrency}, {timeout_seconds}")
        self.url = url.rstrip("/")
        self._stops = Stops(tokenizer)
        self._vocabulary = len(tokenizer) if tokenizer is not None else 1 << 62
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._model, self._card = model, dict[str, Any]()
        self._concurrency, self._timeout = concurrency, timeout_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None
        self._turns: asyncio.Semaphore
        self._introduced: asyncio.Lock
        self._guard: AsyncGenerator[None]

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        """Continues `ids` by one turn; cancelling the caller closes the connection, by which the server stops.

        Raises ValueError for a request that no server could serve, and SamplerError for what the server makes of it.
        """
        http = await self._client()
        request = new_request(
            ids,
            params,
            seed=seed,
            session=session,
            rule=self._stops.rule(params),
            max_context=int(self._card.get("max_model_len") or 1 << 62),
            vocabulary=self._vocabulary,
        )
        while not await self._extend(http, request, seed):
            pass
        assert request.result is not None
        return request.result

    def release(self, session: str) -> None:
        """Nothing is kept here; the server's cache is its own affair."""

    async def _extend(self, http: httpx.AsyncClient, request: Request, seed: int) -> bool:
        """Asks for what is left of the turn; whether that has ended it."""
        async with self._turns:
            version = self.version
            body = await self._ask(http, "POST", "/completions", self._body(request, seed))
        return self._read(request, body, version)

    def _body(self, request: Request, seed: int) -> dict[str, Any]:
        """A turn that goes on has other draws than one that was not broken off."""
        params = request.params
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.ids,
            "max_tokens": request.limit - len(request.ids),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": (seed + request.generated) & SEED_MASK,
            "logprobs": 1,
            "return_token_ids": True,
            "stop_token_ids": sorted(params.stop_ids),
        }
        body |= EXACTLY.get(str(self._card.get("owned_by")), {})
        if params.top_k:
            body["top_k"] = params.top_k
        if params.stop_strings:
            body["stop"] = list(params.stop_strings[:MAX_STOPS])
        return body

    def _read(self, request: Request, body: Any, version: int) -> bool:
        """Token by token, as if they came from an engine in this process; whether the turn has ended."""
        try:
            (choice,) = body["choices"]
            ids, reason = choice.get("token_ids"), choice["finish_reason"]
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SamplerError(f"{self.url} answered in another form: {str(body)[:SHOWN]}") from error
        if reason == "abort" and self.interruptible and not ids:
            return False
        if not ids or not logprobs or len(ids) != len(logprobs):
            raise SamplerError(
                f"{self.url} does not tell which tokens it sampled (token_ids, and a log-prob for each): only servers "
                "that understand return_token_ids can be used, such as vLLM, newer SGLang and posttrain serve"
            )
        for token, logprob in zip(ids, logprobs, strict=True):
            request.ids.append(int(token))
            request.logprobs.append(min(float(logprob), 0.0))
            request.versions.append(version)
            if ends(request):
                return True
        if self._goes_on(reason):
            return False
        if reason != "length":
            raise SamplerError(
                f"{self.url} ended a turn for {reason!r} after {len(ids)} tokens, with none of the stops that it was "
                f"asked for; its last id is {ids[-1]}"
            )
        request.result = Sampled(  # the server's own limit was nearer
            ids=request.ids[request.prompt_length :],
            logprobs=request.logprobs,
            versions=request.versions,
            stop_reason=StopReason.LENGTH,
        )
        return True

    def _goes_on(self, reason: str) -> bool:
        """Whether the rest of a turn that has met none of its stops is to be asked for by another request. SGLang ends
        one at the model's own end token, too."""
        if reason == "stop":
            return self._card.get("owned_by") == "sglang"
        return reason == "abort" and self.interruptible

    async def _client(self) -> httpx.AsyncClient:
        """The connections of the running loop. The first caller asks who the server is, and the others wait for it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._http is None:
            limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
            self._http = httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=limits)
            self._turns, self._introduced = asyncio.Semaphore(self._concurrency), asyncio.Lock()
            self._loop = loop
            self._guard = _closing(self._http)
            await anext(self._guard)  # an open generator is closed with the loop
        http = self._http
        async with self._introduced:
            if not self._card:
                self._card = _chosen(await self._ask(http, "GET", "/models"), self._model, self.url)
                self._model = str(self._card["id"])
        return http

    async def _ask(self, http: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer. Broken connections and busy servers are tried again: with a seed, that is no other
        sample. Raises SamplerError."""
        failure, number, end = "", 0, time.monotonic() + self.patience_seconds
        while number < TRIES or time.monotonic() < end:
            if number:
                await asyncio.sleep(min(FIRST_PAUSE * 2 ** (number - 1), LONGEST_PAUSE))
            number += 1
            try:
                answer = await http.request(method, f"{self.url}{path}", json=body)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if answer.is_success:
                return _json(answer)
            failure = f"status {answer.status_code}: {_message(answer)}"
            if answer.status_code not in AGAIN:
                break
        raise SamplerError(f"{method} {self.url}{path} failed: {failure}")


async def _closing(http: httpx.AsyncClient) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await http.aclose()


def _chosen(listed: Any, wanted: str | None, url: str) -> dict[str, Any]:
    """The card of the model."""
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list) or not cards:
        raise SamplerError(f"{url}/models lists no model: {str(listed)[:SHOWN]}")
    found = [card for card in cards if wanted is None or card.get("id") == wanted]
    if not found:
        names = ", ".join(str(card.get("id")) for card in cards)
        raise SamplerError(f"{url} has no model {wanted!r} (sampler.model); it has: {names}")
    return found[0]


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except json.JSONDecodeError as error:
        raise SamplerError(f"{answer.request.url} answered without JSON: {answer.text[:SHOWN]!r}") from error


def _message(answer: httpx.Response) -> str:
    """OpenAI's error text, or what there is."""
    try:
        body = answer.json()
        error = body.get("error", body)
        return str(error.get("message", error))[:SHOWN]
    except (json.JSONDecodeError, AttributeError):
        return answer.text[:SHOWN]
