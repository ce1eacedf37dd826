"""Joins concurrent searches on one event loop into batches, and equal queries into one.

consumes: queries submitted by concurrent callers · waits for: `window_seconds` after the first of a batch (0 = until
the loop has run everyone who is ready), then for one of `max_running` places · unblocked by: that timer, a batch that
ends · produces: one shared answer per distinct query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from posttrain.retrieval.protocol import Passage, RetrievalError

Search = Callable[[list[str], int], Awaitable[list[list[Passage]]]]
Answer = asyncio.Future[list[Passage]]
_ABOUT_THE_REQUEST = (400, 413, 422)  # statuses that one query may bring upon its whole batch


class Coalescer:
    """Lives on the event loop of its first `submit`.

    A batch has at most `max_queries` queries of one `top_k`; at most `max_running` run at once, and what comes
    meanwhile gathers for the next. When a batch is refused for what it holds, it is halved until the refused query is
    alone, so that a query fails its own caller only.
    """

    def __init__(self, search: Search, *, max_queries: int, max_running: int = 16, window_seconds: float = 0.0) -> None:
        self._search = search
        self._max_queries = max_queries
        self._max_running = max_running
        self._window_seconds = window_seconds
        self._answers: dict[tuple[str, int], Answer] = {}  # submitted and not answered yet
        self._unsent: dict[int, list[str]] = {}  # by top_k
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """One list of passages per query; raises the failure of the first query that failed.

        Giving up (cancellation) leaves the batch running for its other callers.
        """
        answers = [self._answer(query, top_k) for query in queries]
        if answers:
            await asyncio.wait(answers)
        return [list(answer.result()) for answer in answers]

    async def close(self) -> None:
        """Stops what is running; callers that still wait get a `RetrievalError`."""
        self._unsent.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in self._answers.values():
            answer.set_exception(RetrievalError("connection", "the retriever was closed", transient=False))
        self._answers.clear()

    def _answer(self, query: str, top_k: int) -> Answer:
        known = self._answers.get((query, top_k))
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        if not self._unsent:
            loop.call_later(self._window_seconds, self._send)
        self._unsent.setdefault(top_k, []).append(query)
        answer: Answer = loop.create_future()
        answer.add_done_callback(_mark_retrieved)
        self._answers[query, top_k] = answer
        return answer

    def _send(self) -> None:
        while self._unsent and len(self._tasks) < self._max_running:
            top_k, queries = next(iter(self._unsent.items()))
            batch, rest = queries[: self._max_queries], queries[self._max_queries :]
            del self._unsent[top_k]
            if rest:
                self._unsent[top_k] = rest  # behind the other kinds of query
            task = asyncio.ensure_future(self._run(batch, top_k))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():  # cancelled: closed, or the loop is shutting down
            self._send()

    async def _run(self, queries: list[str], top_k: int) -> None:
        try:
            results = await self._search(queries, top_k)
            if len(results) != len(queries):
                raise ValueError(f"the retriever returned {len(results)} lists for {len(queries)} queries")
        except RetrievalError as error:
            if len(queries) > 1 and error.status in _ABOUT_THE_REQUEST:
                middle = len(queries) // 2
                await asyncio.gather(self._run(queries[:middle], top_k), self._run(queries[middle:], top_k))
            else:
                self._fail(queries, top_k, error)
        except Exception as error:  # a defect: raised in every caller, who would wait for ever otherwise
            self._fail(queries, top_k, error)
        else:
            for query, passages in zip(queries, results, strict=True):
                self._answers.pop((query, top_k)).set_result(passages)

    def _fail(self, queries: list[str], top_k: int, error: Exception) -> None:
        for query in queries:
            self._answers.pop((query, top_k)).set_exception(error)


def _mark_retrieved(answer: Answer) -> None:
    """A failure whose callers have all given up is no defect; without this asyncio would log it as one."""
    if not answer.cancelled():
        answer.exception()
