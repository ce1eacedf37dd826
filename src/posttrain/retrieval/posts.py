"""JSON posts to a server, with deadlines, retries, typed failures and counters."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field

from posttrain.boundary.urls import VariableName, is_loopback, server_url
from posttrain.retrieval.protocol import FailureKind, RetrievalError
from posttrain.retrieval.wire import excerpt

T = TypeVar("T")


class HttpOptions(BaseModel):
    """How patient the client is. Every limit counts seconds, queries or bytes, as its name says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deadline_seconds: float = Field(default=60.0, gt=0)  # one `retrieve`, its waits and retries included
    attempt_seconds: float = Field(default=20.0, gt=0)  # one HTTP request from connecting to its last byte
    max_attempts: int = Field(default=5, ge=1)
    backoff_seconds: float = Field(default=0.25, ge=0)  # before the first retry; doubles with every further one
    max_backoff_seconds: float = Field(default=8.0, ge=0)
    batch_window_seconds: float = Field(default=0.0, ge=0)  # how long a call waits for others to share its request
    max_queries_per_request: int = Field(default=128, ge=1)
    max_connections: int = Field(default=16, ge=1)
    max_response_bytes: int = Field(default=64 << 20, ge=1)
    token_env: VariableName | None = None  # environment variable with the bearer token, for a server that wants one


@dataclass(slots=True)
class HttpCounters:
    """Totals since construction."""

    calls: int = 0  # of `retrieve`
    queries: int = 0  # as asked; equal concurrent ones travel once
    requests: int = 0  # HTTP requests, retries included
    retries: int = 0
    failures: Counter[FailureKind] = field(default_factory=Counter)  # calls that raised, by kind
    seconds: float = 0.0  # waited by callers, summed over concurrent ones


class JsonPosts:
    """Posts JSON to one address.

    Connection failures, time-outs, broken bodies, 429 and 5xx are tried again with exponential back-off and jitter (the
    same delays for the same `seed`); other statuses and JSON of another shape are not. Raises `RetrievalError`.
    """

    def __init__(
        self,
        url: str,
        options: HttpOptions,
        counters: HttpCounters,
        *,
        seed: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.options, self.counters = url, options, counters
        self._random = random.Random(seed)
        own = bearer(options.token_env)
        self._headers = dict(headers or {}) | own
        self._token = own.get("authorization", "").removeprefix("Bearer ").encode()

    def connect(self) -> httpx.AsyncClient:
        """Connections for one event loop; whoever asked closes them."""
        return httpx.AsyncClient(
            headers=self._headers,
            timeout=None,  # every attempt has one deadline of its own: httpx's restart with every byte
            limits=httpx.Limits(max_connections=self.options.max_connections),
            trust_env=not is_loopback(self.url),  # a proxy of the environment cannot reach this machine's own ports
        )

    async def send(self, http: httpx.AsyncClient, payload: Mapping[str, Any], decode: Callable[[bytes], T]) -> T:
        """Tries until it works, the failure is final, or attempts or time have run out."""
        started = time.monotonic()
        ends = started + self.options.deadline_seconds
        for attempt in range(1, self.options.max_attempts + 1):
            try:
                return await self._attempt(http, payload, decode, ends - time.monotonic())
            except RetrievalError as error:
                delay = self._delay(attempt, error)
                last = attempt == self.options.max_attempts or time.monotonic() + delay >= ends
                if last or not error.transient:
                    raise _final(error, attempt, time.monotonic() - started) from error
            self.counters.retries += 1
            await asyncio.sleep(delay)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _delay(self, attempt: int, error: RetrievalError) -> float:
        """Seconds before the next attempt: half of the back-off is certain, half is drawn."""
        full = min(self.options.backoff_seconds * 2 ** (attempt - 1), self.options.max_backoff_seconds)
        return max(full * (0.5 + 0.5 * self._random.random()), error.retry_after_seconds or 0.0)

    async def _attempt(
        self, http: httpx.AsyncClient, payload: Mapping[str, Any], decode: Callable[[bytes], T], seconds_left: float
    ) -> T:
        self.counters.requests += 1
        seconds = min(self.options.attempt_seconds, seconds_left)
        try:
            async with asyncio.timeout(seconds):
                body = await self._post(http, payload)
        except TimeoutError:
            raise RetrievalError("timeout", f"{self.url}: no complete answer within {seconds:.3g} s") from None
        except httpx.TransportError as error:
            raise RetrievalError("connection", f"{self.url}: {type(error).__name__}: {error}") from error
        try:
            return decode(body)
        except RetrievalError as error:
            raise RetrievalError(error.kind, f"{self.url}: {error.message}", transient=error.transient) from error

    async def _post(self, http: httpx.AsyncClient, payload: Mapping[str, Any]) -> bytes:
        async with http.stream("POST", self.url, json=payload) as response:
            try:
                body = await self._read(response)
            except (httpx.TransportError, httpx.DecodingError) as error:  # headers came, the body did not
                raise RetrievalError("bad_payload", f"{self.url}: truncated answer ({error})") from error
        if response.is_success:
            return body
        raise _status_error(self.url, response, body)

    async def _read(self, response: httpx.Response) -> bytes:
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > self.options.max_response_bytes:
                limit = self.options.max_response_bytes
                raise RetrievalError("bad_payload", f"{self.url}: answer longer than {limit} bytes", transient=False)
        return bytes(body).replace(self._token, b"[token]") if self._token else bytes(body)


def bearer(token_env: str | None) -> dict[str, str]:
    """The header with the token that an environment variable holds; raises ValueError when it holds none."""
    if token_env is None:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not token:
        raise ValueError(f"the environment variable {token_env} holds no token; set it, or name no variable")
    return {"authorization": f"Bearer {token}"}


def endpoint(url: str, path: str = "/retrieve") -> str:
    """The address to post to: `path` where `url` has none. Raises ValueError for what is no HTTP address."""
    parsed = server_url(url, f"http://127.0.0.1:8000{path}", keys="the variable that http.token_env names")
    return str(parsed.copy_with(path=path)) if parsed.path in ("", "/") else str(parsed)


def _status_error(url: str, response: httpx.Response, body: bytes) -> RetrievalError:
    status = response.status_code
    detail = f"{url}: HTTP {status} {response.reason_phrase}: {excerpt(body)}"
    error = RetrievalError("http_status", detail, status=status, transient=status == 429 or status >= 500)
    asked = response.headers.get("retry-after", "")
    error.retry_after_seconds = float(asked) if asked.isascii() and asked.isdigit() else None
    return error


def _final(error: RetrievalError, attempts: int, seconds: float) -> RetrievalError:
    tried = f" (gave up after {attempts} attempts in {seconds:.1f} s)" if attempts > 1 else ""
    return RetrievalError(error.kind, error.message + tried, status=error.status, transient=error.transient)
