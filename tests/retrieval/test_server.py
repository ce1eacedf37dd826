from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from posttrain.retrieval import Passage, RetrievalError
from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.client import HttpOptions, HttpRetriever
from posttrain.retrieval.corpus import read_corpus
from posttrain.retrieval.index import build_index
from posttrain.retrieval.server import ServerLimits, create_app, serve

from .servers import PEOPLE, app_server

LIMITS = ServerLimits(max_queries=5, max_query_chars=40, max_top_k=3, max_body_bytes=400)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_app(BM25Retriever.from_passages(PEOPLE), default_top_k=2, limits=LIMITS, about={"passages": 4})
    with app_server(app) as base:
        yield base


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def test_with_scores(http: httpx.Client):
    response = http.post("/retrieve", json={"queries": ["compiler", "unknown"], "topk": 1, "return_scores": True})
    assert response.status_code == 200
    ((hit,), nothing) = response.json()["result"]
    assert hit["document"] == {"id": "p2", "contents": PEOPLE[2].contents}
    assert hit["score"] > 0
    assert nothing == []


def test_without_scores_the_documents_themselves_are_listed(http: httpx.Client):
    response = http.post("/retrieve", json={"queries": ["compiler"], "topk": 1})
    assert response.json() == {"result": [[{"id": "p2", "contents": PEOPLE[2].contents}]]}


def test_top_k_is_topk(http: httpx.Client):
    asked = [{"queries": ["engine wrote"], name: 1} for name in ("topk", "top_k")]
    answers = [http.post("/retrieve", json=body).json() for body in asked]
    assert answers[0] == answers[1]
    assert len(answers[0]["result"][0]) == 1


@pytest.mark.parametrize("body", [{"queries": ["engine wrote"]}, {"queries": ["engine wrote"], "topk": None}])
def test_no_topk_is_the_servers_own(http: httpx.Client, body: dict[str, Any]):
    assert len(http.post("/retrieve", json=body).json()["result"][0]) == 2


def test_no_queries_no_results(http: httpx.Client):
    assert http.post("/retrieve", json={"queries": []}).json() == {"result": []}


def test_unknown_keys_are_ignored_as_search_r1s_server_does(http: httpx.Client):
    assert http.post("/retrieve", json={"queries": ["compiler"], "user": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        (b"{", 400, "Invalid JSON"),
        (b"", 400, "Invalid JSON"),
        (b'{"queries": ["\xff"]}', 400, "Invalid JSON"),
        (b'{"queries": ["\\ud800"]}', 400, "Invalid JSON"),
        (b"[]", 422, "object"),
        (b"{}", 422, "queries: Field required"),
        (b'{"queries": "one"}', 422, "queries: Input should be a valid"),
        (b'{"queries": [1]}', 422, "queries.0: Input should be a valid string"),
        (b'{"queries": ["x"], "topk": 0}', 422, "topk: Input should be greater than or equal to 1"),
        (b'{"queries": ["x"], "topk": "many"}', 422, "topk: Input should be a valid integer"),
        (b'{"queries": ["x"], "topk": 4}', 422, "topk: 4 is over the limit of 3"),
        (b'{"queries": ["a", "b", "c", "d", "e", "f"]}', 422, "queries: 6 at once, the limit is 5"),
        (b'{"queries": ["' + b"x" * 41 + b'"]}', 422, "queries: one has 41 characters, the limit is 40"),
        (b'{"queries": ["' + b"x" * 500 + b'"]}', 413, "the body is longer than 400 bytes"),
    ],
)
def test_bad_requests_get_json(http: httpx.Client, body: bytes, status: int, detail: str):
    response = http.post("/retrieve", content=body)
    assert response.status_code == status
    assert detail in response.json()["detail"]


def test_other_paths_and_methods_get_json(http: httpx.Client):
    assert (http.get("/retrieve").status_code, http.get("/retrieve").json()) == (405, {"detail": "Method Not Allowed"})
    assert http.post("/elsewhere").json() == {"detail": "Not Found"}


def test_health(http: httpx.Client):
    assert http.get("/healthz").json() == {"status": "ok", "passages": 4}


class Slow:
    """Takes its time, fails on "down", and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.batches.append(list(queries))
        await asyncio.sleep(0.1)
        if "down" in queries:
            raise RetrievalError("timeout", "the engine behind is slow")
        return [[Passage(query, query)] * top_k for query in queries]

    async def close(self) -> None:
        pass


def post_all(url: str, queries: list[str]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            return await asyncio.gather(*(client.post("/retrieve", json={"queries": [q], "topk": 1}) for q in queries))

    return asyncio.run(run())


def test_concurrent_requests_are_searched_together():
    slow = Slow()
    queries = [f"q{number}" for number in range(40)]
    with app_server(create_app(slow, max_batch_queries=16)) as url:
        responses = post_all(url, [*queries, *queries])
    assert [response.json()["result"][0][0]["id"] for response in responses] == [*queries, *queries]
    assert sorted(query for batch in slow.batches for query in batch) == sorted(queries)  # each once
    assert max(len(batch) for batch in slow.batches) <= 16
    assert len(slow.batches) <= 6  # what comes during the first search shares the next


def test_a_retriever_that_fails_is_a_503():
    with app_server(create_app(Slow())) as url:
        (response,) = post_all(url, ["down"])
    assert response.status_code == 503
    assert response.json() == {"detail": "tool_down: retrieval timeout: the engine behind is slow"}


def test_the_client_and_the_server_agree_with_the_index_itself(url: str):
    async def run() -> list[list[Passage]]:
        client = HttpRetriever(url)
        try:
            return await client.retrieve(["analytical engine", "unknown", "London"], 3)
        finally:
            await client.close()

    assert asyncio.run(run()) == BM25Retriever.from_passages(PEOPLE).search(
        ["analytical engine", "unknown", "London"], 3
    )


def test_a_served_index_in_its_own_process(shared_data: Path, tmp_path: Path):
    """Search-R1's example corpus, from the file to the answer, through the command on a free port of 127.0.0.1."""
    corpus = shared_data / "search_r1_example" / "corpus.jsonl"
    build_index(corpus, tmp_path / "index")
    program = "from posttrain.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "serve-search", str(tmp_path / "index"), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "running on" in line)
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert match is not None, line
        assert httpx.get(match[0] + "/healthz", trust_env=False).json() == {
            "status": "ok",
            "method": "bm25",
            "passages": 10,
        }
        body = {"queries": ["Who was Evan Morris a lobbyist for?"], "topk": 3, "return_scores": True}
        result = httpx.post(match[0] + "/retrieve", json=body, trust_env=False).json()["result"]
        for page in ({"host": "attacker.example"}, {"origin": "https://attacker.example"}):
            refused = httpx.post(match[0] + "/retrieve", json=body, headers=page, trust_env=False)
            assert (refused.status_code, "result" in refused.json()) == (403, False)
    finally:
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        process.stderr.close()
        process.wait(timeout=20)
    expected = BM25Retriever.from_passages(read_corpus(corpus)).search(body["queries"], 3)[0]
    assert [(hit["document"]["id"], hit["score"]) for hit in result[0]] == [(p.id, p.score) for p in expected]
    first = json.loads(corpus.read_text().splitlines()[0])
    assert result[0][0]["document"] == {"id": first["id"], "contents": first["contents"]}


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    with (
        app_server(create_app(BM25Retriever.from_passages(PEOPLE), token="s3cret")) as base,
        httpx.Client(base_url=base, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "bearer s3cret", "s3cret", "Bearer ünknown"])
def test_without_the_token_nothing_is_said(guarded: httpx.Client, header: str | None):
    headers = {} if header is None else {"authorization": header.encode()}
    answers = [
        guarded.post("/retrieve", json={"queries": ["compiler"]}, headers=headers),
        guarded.post("/retrieve", content=b"{", headers=headers),
        guarded.get("/metrics", headers=headers),
    ]
    assert [response.status_code for response in answers] == [401, 401, 401]
    assert answers[0].json() == {"detail": "this server wants its token: Authorization: Bearer ..."}
    assert answers[0].headers["www-authenticate"] == "Bearer"


def test_with_the_token_all_is_as_ever(guarded: httpx.Client):
    headers = {"authorization": "Bearer s3cret"}
    found = guarded.post("/retrieve", json={"queries": ["compiler"], "topk": 1}, headers=headers)
    assert found.json() == {"result": [[{"id": "p2", "contents": PEOPLE[2].contents}]]}
    assert guarded.get("/healthz").status_code == 200  # probes carry no token
    assert guarded.get("/metrics", headers=headers).status_code == 200


def test_the_client_sends_the_token(guarded: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    async def run(**options: Any) -> list[list[Passage]]:
        client = HttpRetriever(str(guarded.base_url), HttpOptions(**options))
        try:
            return await client.retrieve(["compiler"], 1)
        finally:
            await client.close()

    with pytest.raises(RetrievalError, match="HTTP 401"):
        asyncio.run(run())
    monkeypatch.setenv("SEARCH_TOKEN", "s3cret")
    assert asyncio.run(run(token_env="SEARCH_TOKEN"))[0][0].id == "p2"


def test_metrics_count_what_happened():
    with app_server(create_app(Slow())) as url, httpx.Client(base_url=url, trust_env=False) as client:
        assert 'requests_total{status="200"}' not in client.get("/metrics").text
        for body in ({"queries": ["a", "b"], "topk": 3}, {"queries": ["down"]}, {"queries": 1}):
            client.post("/retrieve", json=body)
        page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = page.text.splitlines()
    for line in (
        'posttrain_search_requests_total{status="200"} 1',
        'posttrain_search_requests_total{status="422"} 1',
        'posttrain_search_requests_total{status="503"} 1',
        "posttrain_search_queries_total 3",
        "posttrain_search_passages_total 6",
        "posttrain_search_request_seconds_count 3",
        'posttrain_search_search_seconds_bucket{le="0.1"} 0',
        'posttrain_search_search_seconds_bucket{le="0.25"} 2',
        'posttrain_search_batch_queries_bucket{le="1"} 1',
        'posttrain_search_batch_queries_bucket{le="2"} 2',
        'posttrain_search_batch_queries_bucket{le="+Inf"} 2',
        "posttrain_search_batch_queries_sum 3.000000",
    ):
        assert line in lines, line
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == {
        line.split("{")[0].split(" ")[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for line in lines
        if not line.startswith("#")
    }


def test_health_is_answered_while_a_search_runs():
    with app_server(create_app(Slow())) as url:

        async def run() -> tuple[float, float]:
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                search = asyncio.ensure_future(client.post("/retrieve", json={"queries": ["a"]}))
                await asyncio.sleep(0.02)
                started = asyncio.get_running_loop().time()
                await client.get("/healthz")
                health = asyncio.get_running_loop().time() - started
                await search
                return health, asyncio.get_running_loop().time() - started

        health, search = asyncio.run(run())
    assert health < search


def test_a_server_for_everybody_is_warned_about(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    app = create_app(BM25Retriever.from_passages(PEOPLE))
    serve(app, open_to_all=True)
    assert not caplog.records
    serve(app, "0.0.0.0", open_to_all=True)
    assert "without a token" in caplog.text
