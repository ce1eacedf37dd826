"""A client of Search-R1's `/retrieve` with deadlines, retries, typed failures and counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from posttrain.retrieval.batching import Coalescer
from posttrain.retrieval.posts import HttpCounters, HttpOptions, JsonPosts, endpoint
from posttrain.retrieval.protocol import Passage, RetrievalError, check_top_k
from posttrain.retrieval.wire import decode_results, encode_request

__all__ = ["HttpCounters", "HttpOptions", "HttpRetriever", "endpoint"]


@dataclass(slots=True)
class _Session:
    """What belongs to one event loop."""

    http: httpx.AsyncClient
    coalescer: Coalescer
    guard: AsyncGenerator[None]


class HttpRetriever:
    """Searches through an HTTP server.

    Concurrent calls share requests. Connection failures, time-outs, broken bodies, 429 and 5xx are tried again with
    exponential back-off and jitter (the same delays for the same `seed`); other statuses and JSON of another shape are
    not. Raises `RetrievalError`. Usable from several event loops, one after the other or each in its thread: each has
    its own connections, closed by `close` or when the loop shuts down (`asyncio.run` does that).
    """

    def __init__(
        self,
        url: str,
        options: HttpOptions | None = None,
        *,
        seed: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = endpoint(url)
        self.options = options or HttpOptions()
        self.counters = HttpCounters()
        self._posts = JsonPosts(self.url, self.options, self.counters, seed=seed, headers=headers)
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        check_top_k(top_k)
        counters, started = self.counters, time.monotonic()
        counters.calls += 1
        counters.queries += len(queries)
        try:
            session = await self._session()
            async with asyncio.timeout(self.options.deadline_seconds):
                return await session.coalescer.submit(queries, top_k)
        except TimeoutError:
            counters.failures["timeout"] += 1
            detail = f"{self.url}: no answer within {self.options.deadline_seconds:g} s, retries included"
            raise RetrievalError("timeout", detail) from None
        except RetrievalError as error:
            counters.failures[error.kind] += 1
            raise
        finally:
            counters.seconds += time.monotonic() - started

    async def close(self) -> None:
        """Closes this event loop's connections; a later call opens new ones."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.guard.aclose()

    async def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for known in list(self._sessions):  # a copy: other threads may add theirs meanwhile
                if known.is_closed():
                    self._sessions.pop(known, None)
            session = self._sessions[loop] = self._open_session()
            await anext(session.guard)
        return session

    def _open_session(self) -> _Session:
        options = self.options
        http = self._posts.connect()
        coalescer = Coalescer(
            lambda queries, top_k: self._search(http, queries, top_k),
            max_queries=options.max_queries_per_request,
            max_running=options.max_connections,
            window_seconds=options.batch_window_seconds,
        )
        return _Session(http, coalescer, _closing(http, coalescer))

    async def _search(self, http: httpx.AsyncClient, queries: list[str], top_k: int) -> list[list[Passage]]:
        decode = partial(decode_results, queries=len(queries), top_k=top_k)
        return await self._posts.send(http, encode_request(queries, top_k), decode)


async def _closing(http: httpx.AsyncClient, coalescer: Coalescer) -> AsyncGenerator[None]:
    """Started once and left suspended: an event loop that shuts down finishes its async generators, hence this one."""
    try:
        yield
    finally:
        await coalescer.close()
        await http.aclose()
