"""Searches in a worker thread, so that an event loop goes on meanwhile: sampling, tool calls, other requests.

consumes: queries awaited on any event loop · waits for: the one worker thread · unblocked by: the search before it
ending · produces: the lists of the synchronous search, concurrent queries of one loop joined into one call of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from posttrain.retrieval.batching import Coalescer
from posttrain.retrieval.protocol import Passage, check_top_k

SyncSearch = Callable[[list[str], int], list[list[Passage]]]


class InThread:
    """A `Retriever` over a synchronous search; `search` runs in one thread, one call at a time."""

    def __init__(self, search: SyncSearch, *, max_queries: int = 256) -> None:
        self._search = search
        self._max_queries = max_queries
        self._thread: ThreadPoolExecutor | None = None
        self._coalescers: dict[asyncio.AbstractEventLoop, Coalescer] = {}

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        check_top_k(top_k)
        return await self._coalescer().submit(queries, top_k)

    async def close(self) -> None:
        """Waits for the search that is running; a later call starts a new thread."""
        coalescer = self._coalescers.pop(asyncio.get_running_loop(), None)
        if coalescer is not None:
            await coalescer.close()
        if self._thread is not None and not self._coalescers:
            thread, self._thread = self._thread, None
            await asyncio.to_thread(thread.shutdown)

    def _coalescer(self) -> Coalescer:
        loop = asyncio.get_running_loop()
        if loop not in self._coalescers:
            for known in list(self._coalescers):  # a copy: other threads may add theirs meanwhile
                if known.is_closed():
                    self._coalescers.pop(known, None)
            self._coalescers[loop] = Coalescer(self._run, max_queries=self._max_queries, max_running=1)
        return self._coalescers[loop]

    async def _run(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrieval")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._search, queries, top_k)
