from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from posttrain.retrieval import Passage, RetrievalError
from posttrain.retrieval.batching import Coalescer


def echo(queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return [[Passage(query, f"{query} {top_k}")] for query in queries]


class Recorder:
    """A search that answers with the query and refuses the word "bad" as a server would."""

    def __init__(self, status: int = 422, seconds: float = 0.01) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.status = status
        self.seconds = seconds

    async def __call__(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        self.batches.append((queries, top_k))
        await asyncio.sleep(self.seconds)
        if "bad" in queries:
            raise RetrievalError("http_status", "refused", status=self.status, transient=False)
        return echo(queries, top_k)


def test_concurrent_calls_share_a_batch_and_equal_queries_travel_once():
    search = Recorder()

    async def run() -> list[list[list[Passage]]]:
        batches = Coalescer(search, max_queries=10)
        return await asyncio.gather(
            batches.submit(["a", "b"], 2), batches.submit(["b"], 2), batches.submit(["a"], 3), batches.submit([], 2)
        )

    assert asyncio.run(run()) == [echo(["a", "b"], 2), echo(["b"], 2), echo(["a"], 3), []]
    assert search.batches == [(["a", "b"], 2), (["a"], 3)]


def test_a_query_in_flight_is_joined():
    search = Recorder(seconds=0.3)

    async def run() -> None:
        batches = Coalescer(search, max_queries=10)
        first = asyncio.create_task(batches.submit(["a"], 1))
        await asyncio.sleep(0.005)
        assert await batches.submit(["a"], 1) == await first

    asyncio.run(run())
    assert search.batches == [(["a"], 1)]


def test_batches_are_bounded():
    search = Recorder()

    async def run() -> list[list[Passage]]:
        return await Coalescer(search, max_queries=3).submit(list("abcdefgh"), 1)

    assert asyncio.run(run()) == echo("abcdefgh", 1)
    assert [len(queries) for queries, _ in search.batches] == [3, 3, 2]


def test_what_comes_while_all_places_are_taken_shares_the_next_batch():
    search = Recorder(seconds=0.3)

    async def run() -> None:
        batches = Coalescer(search, max_queries=10, max_running=1)
        calls = [asyncio.create_task(batches.submit(["a"], 1))]
        await asyncio.sleep(0.005)
        for word in "bcd":
            calls.append(asyncio.create_task(batches.submit([word], 1)))
            await asyncio.sleep(0)
        assert await asyncio.gather(*calls) == [echo([word], 1) for word in "abcd"]

    asyncio.run(run())
    assert search.batches == [(["a"], 1), (["b", "c", "d"], 1)]


def test_a_window_collects_later_calls():
    search = Recorder()

    async def run() -> None:
        batches = Coalescer(search, max_queries=10, window_seconds=0.3)
        first = asyncio.create_task(batches.submit(["a"], 1))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, batches.submit(["b"], 1))

    asyncio.run(run())
    assert search.batches == [(["a", "b"], 1)]


def test_a_refused_query_fails_its_own_caller_only():
    search = Recorder()

    async def run() -> list[list[list[Passage]] | BaseException]:
        batches = Coalescer(search, max_queries=100)
        calls = [batches.submit([word], 1) for word in ("a", "bad", "c", "d", "e")]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert isinstance(outcomes[1], RetrievalError)
    assert [outcomes[i] for i in (0, 2, 3, 4)] == [echo([word], 1) for word in "acde"]


def test_a_refusal_of_the_whole_server_is_not_repeated_query_by_query():
    search = Recorder(status=404)

    async def run() -> list[list[list[Passage]] | BaseException]:
        batches = Coalescer(search, max_queries=100)
        return await asyncio.gather(*(batches.submit([w], 1) for w in ("a", "bad", "c")), return_exceptions=True)

    assert all(isinstance(outcome, RetrievalError) for outcome in asyncio.run(run()))
    assert len(search.batches) == 1


def test_a_defect_reaches_every_caller():
    async def broken(queries: list[str], top_k: int) -> list[list[Passage]]:
        return echo(queries, top_k)[1:]

    async def run() -> list[list[list[Passage]] | BaseException]:
        batches = Coalescer(broken, max_queries=100)
        return await asyncio.gather(*(batches.submit([w], 1) for w in "ab"), return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [str(outcome) for outcome in outcomes] == ["the retriever returned 1 lists for 2 queries"] * 2


def test_a_caller_that_gives_up_does_not_take_the_others_along():
    search = Recorder(seconds=0.3)

    async def run() -> list[list[Passage]]:
        batches = Coalescer(search, max_queries=10)
        impatient = asyncio.create_task(batches.submit(["a", "b"], 1))
        patient = asyncio.create_task(batches.submit(["a"], 1))
        await asyncio.sleep(0.005)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        return await patient

    assert asyncio.run(run()) == echo(["a"], 1)


def test_closing_tells_those_who_wait_and_leaves_it_usable():
    search = Recorder(seconds=0.3)

    async def run() -> list[list[Passage]]:
        batches = Coalescer(search, max_queries=10)
        waiting = asyncio.create_task(batches.submit(["a"], 1))
        await asyncio.sleep(0.005)
        await batches.close()
        with pytest.raises(RetrievalError, match="the retriever was closed"):
            await waiting
        return await batches.submit(["b"], 1)

    assert asyncio.run(run()) == echo(["b"], 1)


def test_closing_before_anything_was_sent():
    search = Recorder()

    async def run() -> None:
        batches = Coalescer(search, max_queries=10)
        waiting = asyncio.create_task(batches.submit(["a"], 1))
        await asyncio.sleep(0)
        await batches.close()
        with pytest.raises(RetrievalError, match="the retriever was closed"):
            await waiting
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert search.batches == []
