"""Asks a server that scores: JSON over HTTP with deadlines, retries, rate and concurrency limits, and counters.

A secret comes from an environment variable named in the config; it is sent as a bearer token and appears nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from posttrain.boundary.foreign_json import read_json
from posttrain.boundary.urls import VariableName, is_loopback, server_url
from posttrain.rewards.functions import RewardError
from posttrain.task import Invalid

Reason = Literal["service_timeout", "service_down", "service_refused", "service_bad_reply"]
_EXCERPT = 300  # characters of a reply in an error


class ServiceError(Exception):
    """A call that gave nothing. `reason` is a counted key; a `transient` one was worth trying again."""

    def __init__(self, reason: Reason, detail: str, *, transient: bool, retry_after: float = 0.0) -> None:
        super().__init__(detail)
        self.reason: Reason = reason
        self.detail = detail
        self.transient = transient
        self.retry_after = retry_after

    def as_invalid(self) -> Invalid:
        return Invalid(self.reason, self.detail)


class ServiceConfig(BaseModel):
    """How patient a reward is with the server that it asks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: PositiveFloat = Field(default=120.0, allow_inf_nan=False, description="one call, its retries included")
    attempt_seconds: PositiveFloat = Field(default=60.0, allow_inf_nan=False, description="one HTTP request")
    attempts: PositiveInt = 5
    backoff_seconds: float = Field(default=0.5, ge=0, description="before the first retry; doubles with each further")
    max_backoff_seconds: float = Field(default=15.0, ge=0)
    concurrency: PositiveInt = Field(default=16, description="requests at once")
    per_minute: PositiveInt | None = Field(default=None, description="requests; null = no such limit")
    key_env: VariableName | None = Field(
        default=None, description="environment variable that holds the key; never the key"
    )
    max_reply_bytes: PositiveInt = 16 << 20


@dataclass(slots=True)
class ServiceCounters:
    """Totals since construction, or since they were last taken."""

    calls: int = 0
    requests: int = 0  # HTTP requests, retries included
    retries: int = 0
    cached: int = 0  # calls answered from the disk cache
    unreadable: int = 0  # replies that held no verdict
    failures: Counter[str] = field(default_factory=Counter[str])  # calls that gave nothing, by reason
    seconds: float = 0.0  # waited, summed over concurrent calls

    def take(self) -> dict[str, float]:
        """The totals as values of the metric dictionary; they begin anew."""
        names = ("calls", "requests", "retries", "cached", "unreadable", "seconds")
        taken = {f"scorer/{name}": float(getattr(self, name)) for name in names}
        taken["scorer/failures"] = float(self.failures.total())
        taken |= {f"scorer/failures/{reason}": float(count) for reason, count in self.failures.items()}
        for name in names:
            setattr(self, name, type(getattr(self, name))())
        self.failures.clear()
        return taken


@dataclass(slots=True)
class _Session:
    http: httpx.AsyncClient
    room: asyncio.Semaphore
    guard: AsyncGenerator[None]


class JsonService:
    """POSTs JSON to one address and gives the JSON that comes back.

    Connection failures, time-outs, broken bodies, 408, 429 and 5xx are tried again with exponential back-off and
    jitter, Retry-After respected. Deadlines begin when a request may start, not while it waits for its turn. Raises
    `ServiceError`. Usable from several event loops, one after the other; connections close with their loop.
    """

    def __init__(self, url: str, config: ServiceConfig, counters: ServiceCounters | None = None) -> None:
        self.url = checked_url(url)
        self.config = config
        self.counters = counters or ServiceCounters()
        self._key = secret(config.key_env)
        self._random = random.Random(0)
        self._next_start = 0.0  # on the monotonic clock, for per_minute
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}

    async def post(self, body: Mapping[str, Any], read: Callable[[Any], Any] | None = None) -> Any:
        """read: turns the JSON into what the caller wants; a ServiceError that it raises is retried when transient."""
        session = await self._session()
        self.counters.calls += 1
        async with session.room:
            started = time.monotonic()
            try:
                async with asyncio.timeout(self.config.seconds):
                    ends = started + self.config.seconds
                    return await self._tries(lambda: self._attempt(session.http, body, read), ends)
            except TimeoutError:
                detail = f"{self.url}: no answer within {self.config.seconds:g} s, retries included"
                self.counters.failures["service_timeout"] += 1
                raise ServiceError("service_timeout", detail, transient=True) from None
            except ServiceError as error:
                self.counters.failures[error.reason] += 1
                raise
            finally:
                self.counters.seconds += time.monotonic() - started

    async def _tries(self, attempt: Callable[[], Awaitable[Any]], ends: float) -> Any:
        """ends: on the monotonic clock; a wait beyond it is not begun, so that the failure says what was seen."""
        for number in range(1, self.config.attempts + 1):
            await self._wait_for_start()
            try:
                return await attempt()
            except ServiceError as error:
                full = min(self.config.backoff_seconds * 2 ** (number - 1), self.config.max_backoff_seconds)
                delay = max(full * (0.5 + 0.5 * self._random.random()), error.retry_after)
                last = number == self.config.attempts or time.monotonic() + delay >= ends
                if last or not error.transient:
                    tried = f" (gave up after {number} attempts)" if number > 1 else ""
                    raise ServiceError(error.reason, error.detail + tried, transient=error.transient) from error
            self.counters.retries += 1
            await asyncio.sleep(delay)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _wait_for_start(self) -> None:
        """Spreads requests evenly: one every 60 / per_minute seconds."""
        if self.config.per_minute is None:
            return
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60.0 / self.config.per_minute
        await asyncio.sleep(start - now)

    async def _attempt(
        self, http: httpx.AsyncClient, body: Mapping[str, Any], read: Callable[[Any], Any] | None
    ) -> Any:
        self.counters.requests += 1
        try:
            async with asyncio.timeout(self.config.attempt_seconds):
                status, headers, content = await self._exchange(http, body)
        except TimeoutError:
            detail = f"{self.url}: no complete answer within {self.config.attempt_seconds:g} s"
            raise ServiceError("service_timeout", detail, transient=True) from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            detail = f"{self.url}: {type(error).__name__}: {error}"
            raise ServiceError("service_down", detail, transient=True) from error
        if not 200 <= status < 300:
            raise self._status_error(status, headers, content)
        try:
            value = read_json(content)
        except ValueError as error:
            detail = f"{self.url}: the answer is no JSON: {self._excerpt(content)}"
            raise ServiceError("service_bad_reply", detail, transient=True) from error
        return value if read is None else read(value)

    async def _exchange(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        async with http.stream("POST", self.url, json=body) as response:
            content = bytearray()
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > self.config.max_reply_bytes:
                    detail = f"{self.url}: answer longer than {self.config.max_reply_bytes} bytes"
                    raise ServiceError("service_bad_reply", detail, transient=False)
            return response.status_code, response.headers, bytes(content)

    def _status_error(self, status: int, headers: httpx.Headers, content: bytes) -> ServiceError:
        asked = headers.get("retry-after", "")
        transient = status in (408, 429) or status >= 500
        return ServiceError(
            "service_down" if transient else "service_refused",
            f"{self.url}: HTTP {status}: {self._excerpt(content)}",
            transient=transient,
            retry_after=float(asked) if asked.isascii() and asked.isdigit() else 0.0,
        )

    def _excerpt(self, content: bytes) -> str:
        """The beginning of a reply; some servers repeat the key that they refuse."""
        text = content.decode("utf-8", errors="replace")
        return (text.replace(self._key, "[key]") if self._key else text)[:_EXCERPT]

    async def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            self._sessions = {known: kept for known, kept in self._sessions.items() if not known.is_closed()}
            session = self._sessions[loop] = self._open_session()
            await anext(session.guard)
        return session

    def _open_session(self) -> _Session:
        http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=None,  # an attempt has one deadline of its own: httpx's restart with every byte
            limits=httpx.Limits(max_connections=self.config.concurrency),
            trust_env=not is_loopback(self.url),  # a proxy of the environment cannot reach this machine's own ports
        )
        return _Session(http, asyncio.Semaphore(self.config.concurrency), _closing(http))


async def _closing(http: httpx.AsyncClient) -> AsyncGenerator[None]:
    """Left suspended: an event loop that shuts down finishes its async generators, hence closes the connections."""
    try:
        yield
    finally:
        await http.aclose()


def secret(variable: str | None) -> str:
    """The key in an environment variable; '' when none is named. Raises RewardError when it is not set."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise RewardError(f"key_env names the environment variable {variable}, which is not set")
    return key


def checked_url(url: str) -> str:
    """Raises RewardError for what is no address of a server, and for one that holds a secret."""
    try:
        return str(server_url(url, "http://127.0.0.1:8000/get_reward", keys="the variable that key_env names"))
    except ValueError as error:
        raise RewardError(str(error)) from error
