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
from posttrain.retrieval.client import HttpRetriever
from posttrain.retrieval.corpus import read_corpus
from posttrain.retrieval.index import build_index
from posttrain.retrieval.server import ServerLimits, create_app

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
    """Search-R1's example corpus, from the file to the answer, through `serve` on a free port of 127.0.0.1."""
    corpus = shared_data / "search_r1_example" / "corpus.jsonl"
    build_index(corpus, tmp_path / "index")
    program = "import sys; from posttrain.retrieval.server import serve; serve(sys.argv[1], port=0)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "index")], stderr=subprocess.PIPE, text=True
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
    finally:
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        process.stderr.close()
        process.wait(timeout=20)
    expected = BM25Retriever.from_passages(read_corpus(corpus)).search(body["queries"], 3)[0]
    assert [(hit["document"]["id"], hit["score"]) for hit in result[0]] == [(p.id, p.score) for p in expected]
    first = json.loads(corpus.read_text().splitlines()[0])
    assert result[0][0]["document"] == {"id": first["id"], "contents": first["contents"]}
