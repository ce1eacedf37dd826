from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from posttrain.retrieval import Passage, RetrievalError
from posttrain.retrieval.client import HttpOptions, HttpRetriever

from .servers import RawServer, Reply, answer, drip, found, hang, hang_up, raw_server, unused_url

T = TypeVar("T")
QUICK = HttpOptions(deadline_seconds=5, attempt_seconds=2, max_attempts=3, backoff_seconds=0.01)
HTML = answer("<html><body>502 Bad Gateway</body></html>", headers="content-type: text/html\r\n")


def run(client: HttpRetriever, work: Callable[[HttpRetriever], Awaitable[T]]) -> T:
    async def main() -> T:
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


def ask(client: HttpRetriever, queries: list[str], top_k: int = 1) -> list[list[Passage]]:
    return run(client, lambda it: it.retrieve(queries, top_k))


def failure(client: HttpRetriever, queries: list[str] | None = None) -> RetrievalError:
    with pytest.raises(RetrievalError) as caught:
        ask(client, queries or ["x"])
    assert caught.value.reason == "tool_down"
    return caught.value


def test_the_request_on_the_wire_and_the_answer():
    with raw_server(found) as server:
        client = HttpRetriever(server.url)
        assert ask(client, ["ä", "b"], 2) == [
            [Passage("d0", '"T"\nä 0', 1.0), Passage("d1", '"T"\nä 1', 0.0)],
            [Passage("d0", '"T"\nb 0', 1.0), Passage("d1", '"T"\nb 1', 0.0)],
        ]
    assert server.requests == [{"queries": ["ä", "b"], "topk": 2, "return_scores": True}]
    assert (client.counters.calls, client.counters.queries, client.counters.requests) == (1, 2, 1)
    assert client.counters.seconds > 0


def test_no_queries_no_request():
    client = HttpRetriever(unused_url())
    assert ask(client, []) == []
    assert client.counters.requests == 0


@pytest.mark.parametrize(
    "trouble",
    [
        answer("oops", status="500 Internal Server Error"),
        answer("busy", status="503 Service Unavailable"),
        answer("slow down", status="429 Too Many Requests"),
        HTML,
        answer('{"result": [[', promise=1000),
        answer('{"result": [['),
        hang_up,
    ],
)
def test_p59_passing_trouble_is_tried_again(trouble: Reply):
    with raw_server(trouble, trouble, found) as server:
        client = HttpRetriever(server.url, QUICK)
        assert ask(client, ["x"]) == [[Passage("d0", '"T"\nx 0', 1.0)]]
    assert (client.counters.requests, client.counters.retries) == (3, 2)
    assert not client.counters.failures


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        (HTML, "bad_payload", "expected JSON, got '<html><body>502 Bad Gateway"),
        (answer("{}", promise=1000), "bad_payload", "truncated answer"),
        (hang_up, "connection", "RemoteProtocolError"),
        (answer("it broke", status="500 Internal Server Error"), "http_status", "HTTP 500 .*'it broke'"),
        (answer("wait", status="429 Too Many Requests"), "http_status", "HTTP 429"),
    ],
)
def test_p59_lasting_trouble_is_a_typed_failure(trouble: Reply, kind: str, message: str):
    with raw_server(trouble) as server:
        client = HttpRetriever(server.url, QUICK)
        error = failure(client)
    assert error.kind == kind
    assert server.url in error.detail
    assert "gave up after 3 attempts" in error.detail
    assert re.search(message, error.detail)
    assert client.counters.failures == {kind: 1}
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (answer("no such page", status="404 Not Found"), "http_status"),
        (answer("who are you", status="401 Unauthorized"), "http_status"),
        (answer('{"detail": "bad"}', status="422 Unprocessable Entity"), "http_status"),
        (answer("", status="307 Temporary Redirect", headers="location: /other\r\n"), "http_status"),
        (answer('{"result": [[], []]}'), "bad_payload"),
        (answer('{"result": "x"}'), "bad_payload"),
        (answer('{"result": [[{"id": 1}]]}'), "bad_payload"),
    ],
)
def test_final_trouble_is_not_tried_again(trouble: Reply, kind: str):
    with raw_server(trouble) as server:
        client = HttpRetriever(server.url, QUICK)
        error = failure(client)
    assert (error.kind, len(server.requests), client.counters.retries) == (kind, 1, 0)


def test_p59_a_server_that_is_down():
    client = HttpRetriever(unused_url(), QUICK)
    error = failure(client)
    assert error.kind == "connection"
    assert client.counters.requests == 3


@pytest.mark.alone
@pytest.mark.parametrize("trouble", [hang, drip])
def test_a_slow_server_costs_no_more_than_the_deadline(trouble: Reply):
    options = HttpOptions(deadline_seconds=1.2, attempt_seconds=0.5, max_attempts=10, backoff_seconds=0.01)
    with raw_server(trouble) as server:
        client = HttpRetriever(server.url, options)
        started = time.monotonic()
        error = failure(client)
        seconds = time.monotonic() - started
    assert error.kind == "timeout"
    assert 1 < seconds < 4  # the machine may be busy
    assert 2 <= client.counters.requests <= 3


def test_a_hanging_attempt_is_tried_again():
    with raw_server(hang, found) as server:
        client = HttpRetriever(server.url, HttpOptions(attempt_seconds=0.2, backoff_seconds=0.01))
        assert len(ask(client, ["x"])) == 1
    assert client.counters.retries == 1


@pytest.mark.alone
def test_retry_after_is_honoured_within_the_deadline():
    wait = answer("", status="503 Service Unavailable", headers="retry-after: 1\r\n")
    with raw_server(wait, found) as server:
        started = time.monotonic()
        ask(HttpRetriever(server.url, QUICK), ["x"])
        assert time.monotonic() - started >= 1
    for_ever = answer("", status="503 Service Unavailable", headers="retry-after: 3600\r\n")
    with raw_server(for_ever) as server:
        started = time.monotonic()
        assert failure(HttpRetriever(server.url, QUICK)).status == 503
        assert time.monotonic() - started < 2


def test_delays_double_with_jitter_and_repeat_with_the_seed():
    def delays(seed: int) -> list[float]:
        options = HttpOptions(backoff_seconds=1, max_backoff_seconds=5)
        client = HttpRetriever("http://127.0.0.1:1", options, seed=seed)
        return [client._posts._delay(attempt, RetrievalError("timeout", "")) for attempt in range(1, 6)]

    assert delays(1) == delays(1) != delays(2)
    for delay, full in zip(delays(1), [1, 2, 4, 5, 5], strict=True):
        assert full / 2 <= delay <= full


def test_an_endless_answer_is_cut():
    with raw_server(answer(b" " * 5000)) as server:
        client = HttpRetriever(server.url, HttpOptions(max_response_bytes=1000))
        assert "answer longer than 1000 bytes" in failure(client).detail


def test_concurrent_calls_share_requests():
    with raw_server(found) as server:
        client = HttpRetriever(server.url, HttpOptions(max_queries_per_request=50))

        async def many(it: HttpRetriever) -> list[list[list[Passage]]]:
            return await asyncio.gather(*(it.retrieve([f"q{number % 80}"], 1) for number in range(160)))

        answers = run(client, many)
    assert [found[0][0].contents for found in answers] == [f'"T"\nq{number % 80} 0' for number in range(160)]
    assert sorted(len(request["queries"]) for request in server.requests) == [30, 50]
    assert (client.counters.calls, client.counters.queries, client.counters.requests) == (160, 160, 2)


def test_one_refused_query_does_not_fail_its_companions():
    async def picky(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        refused = "bad" in json.dumps(request)
        await (answer("{}", status="422 Unprocessable Entity") if refused else found)(request, writer)

    with raw_server(picky) as server:

        async def five(it: HttpRetriever) -> list[list[list[Passage]] | BaseException]:
            calls = [it.retrieve([word], 1) for word in ("a", "b", "bad", "c", "d")]
            return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = run(HttpRetriever(server.url, QUICK), five)
    assert [isinstance(outcome, RetrievalError) for outcome in outcomes] == [False, False, True, False, False]


def settled(server: RawServer) -> int:
    """Connections still open once the server has noticed who hung up."""
    for _ in range(200):
        if server.open_connections == 0:
            break
        time.sleep(0.01)
    return server.open_connections


def test_one_client_works_across_event_loops_and_leaks_no_connection():
    with raw_server(found) as server:
        client = HttpRetriever(server.url)
        for _ in range(3):
            asyncio.run(client.retrieve(["x"], 1))  # never closed: the loop's end closes it
            assert settled(server) == 0
    assert server.connections == 3


def test_one_client_works_in_several_threads():
    with raw_server(found) as server:
        client = HttpRetriever(server.url)
        answers: list[list[list[Passage]]] = []

        def work() -> None:
            answers.append(asyncio.run(client.retrieve(["x"], 1)))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert settled(server) == 0
    assert answers == [[[Passage("d0", '"T"\nx 0', 1.0)]]] * 4


def test_a_closed_client_may_be_used_again():
    with raw_server(found) as server:

        async def twice(it: HttpRetriever) -> None:
            await it.retrieve(["x"], 1)
            await it.close()
            await it.close()
            await it.retrieve(["x"], 1)

        run(HttpRetriever(server.url), twice)
        assert settled(server) == 0
    assert server.connections == 2


def test_connections_are_kept_between_calls_and_bounded():
    with raw_server(found) as server:
        options = HttpOptions(max_connections=2, max_queries_per_request=1)

        async def work(it: HttpRetriever) -> None:
            for number in range(5):
                await it.retrieve([f"first {number}"], 1)
            await it.retrieve([f"second {number}" for number in range(10)], 1)

        run(HttpRetriever(server.url, options), work)
    assert (len(server.requests), server.connections) == (15, 2)


def test_a_cancelled_call_leaves_no_task_behind_once_closed():
    arrived = threading.Event()

    async def tell_and_hang(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await hang(request, writer)

    with raw_server(tell_and_hang) as server:

        async def cancel(it: HttpRetriever) -> None:
            task = asyncio.create_task(it.retrieve(["x"], 1))
            await asyncio.to_thread(arrived.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await it.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        run(HttpRetriever(server.url), cancel)
        assert len(server.requests) == 1


def test_a_proxy_in_the_environment_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", unused_url())
    monkeypatch.setenv("http_proxy", unused_url())
    with raw_server(found) as server:
        assert len(ask(HttpRetriever(server.url, QUICK), ["x"])) == 1


def test_headers_are_sent_and_the_path_completed():
    client = HttpRetriever("http://127.0.0.1:8000", headers={"authorization": "Bearer x"})
    assert client.url == "http://127.0.0.1:8000/retrieve"
    assert HttpRetriever("http://h:1/search?x=1").url == "http://h:1/search?x=1"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h/retrieve", "http://", ""])
def test_urls_that_cannot_work(url: str):
    with pytest.raises(ValueError, match="URL"):
        HttpRetriever(url)


def test_top_k_below_one_is_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        ask(HttpRetriever(unused_url()), ["x"], 0)


def test_a_server_that_repeats_the_token_gives_it_to_nobody(monkeypatch: pytest.MonkeyPatch):
    """Neither in an error, which is logged, nor in a passage, which the policy reads."""
    monkeypatch.setenv("SEARCH", "s3cret-0123456789")  # no name that tells a secret
    options = HttpOptions(token_env="SEARCH", max_attempts=1)
    with raw_server(answer('{"detail": "Bearer s3cret-0123456789 is wrong"}', status="401 Unauthorized")) as server:
        error = failure(HttpRetriever(server.url, options))
    assert "s3cret" not in str(error)
    assert "[token]" in str(error)
    body = '{"result": [[{"document": {"id": "1", "contents": "for s3cret-0123456789"}, "score": 1}]]}'
    with raw_server(answer(body)) as server:
        assert ask(HttpRetriever(server.url, options), ["x"])[0][0].contents == "for [token]"


@pytest.mark.parametrize("body", ["[" * 100_000, '{"result": ' * 100_000])
def test_json_that_is_nested_without_end_is_a_bad_payload(body: str):
    with raw_server(answer(body)) as server:
        assert failure(HttpRetriever(server.url, HttpOptions(max_attempts=1))).kind == "bad_payload"
