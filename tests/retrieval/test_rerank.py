from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.retrieval import Passage, RetrievalError
from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.encoder import EncoderError
from posttrain.retrieval.posts import HttpOptions
from posttrain.retrieval.rerank import CrossEncoder, HttpPairScorer, RerankConfig, RerankedRetriever, make_reranked

from .models import write_reranker
from .servers import PEOPLE, answer, app_server, raw_server

QUICK = HttpOptions(max_attempts=3, backoff_seconds=0.01, deadline_seconds=5)
TEXTS = [passage.contents for passage in PEOPLE]


def vllm_like(seen: list[dict[str, Any]]) -> FastAPI:
    """vLLM's /rerank: the score is how often the query occurs, answers sorted by score, as there."""
    app = FastAPI()

    @app.post("/rerank")
    async def rerank(request: Request) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        body = await request.json()
        seen.append(body)
        results = [
            {"index": i, "document": {"text": text}, "relevance_score": text.lower().count(body["query"]) / 10}
            for i, text in enumerate(body["documents"])
        ]
        results.sort(key=lambda row: -row["relevance_score"])
        return JSONResponse({"id": "rerank-1", "model": "m", "usage": {"total_tokens": 9}, "results": results})

    return app


@pytest.mark.parametrize("labels", [1, 2])
def test_scores_are_those_of_single_pairs(tmp_path: Path, labels: int):
    folder = write_reranker(tmp_path, labels=labels)
    config = RerankConfig(model=str(folder), pairs_per_batch=3, max_tokens=64, device="cpu")
    scores = asyncio.run(CrossEncoder(config).scores("engine", TEXTS))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for text, score in zip(TEXTS, scores, strict=True):
        with torch.inference_mode():
            pair = tokenizer("engine", text, truncation="longest_first", max_length=64, return_tensors="pt")
            logits = model(**pair).logits[0]
        expected = logits[0] if labels == 1 else torch.log_softmax(logits, 0)[1] - torch.log_softmax(logits, 0)[0]
        assert score == pytest.approx(expected.item(), abs=1e-5)


def test_a_classifier_of_many_labels_is_no_reranker(tmp_path: Path):
    with pytest.raises(EncoderError, match="has 3 labels"):
        CrossEncoder(RerankConfig(model=str(write_reranker(tmp_path, labels=3))))


def test_a_reranker_that_is_not_there(tmp_path: Path):
    with pytest.raises(EncoderError, match="holds no sequence classifier"):
        CrossEncoder(RerankConfig(model=str(tmp_path)))


class ByLength:
    """Shorter is better; fails on demand."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        self.asked.append(len(texts))
        return [-float(len(text)) for text in texts]

    async def close(self) -> None:
        pass


def test_candidates_are_fetched_and_the_best_are_kept():
    scorer = ByLength()
    reranked = RerankedRetriever(BM25Retriever.from_passages(PEOPLE), scorer, candidates=2)
    first, nothing = asyncio.run(reranked.retrieve(["wrote first", "unknown"], 1))
    assert (first, nothing) == ([Passage("p2", TEXTS[2], -float(len(TEXTS[2])))], [])
    assert scorer.asked == [2]
    assert len(asyncio.run(reranked.retrieve(["wrote the first engine in london"], 4))[0]) == 4
    asyncio.run(reranked.close())


def test_a_served_reranker():
    seen: list[dict[str, Any]] = []
    with app_server(vllm_like(seen)) as url:
        config = RerankConfig(url=url, served_model="bge", candidates=3, http=QUICK)
        reranked = make_reranked(BM25Retriever.from_passages(PEOPLE), config)
        (found,) = asyncio.run(reranked.retrieve(["charles babbage"], 2))
    assert [(passage.id, passage.score) for passage in found] == [("p1", 0.2), ("p0", 0.1)]
    assert seen[0]["model"] == "bge"
    assert seen[0]["query"] == "charles babbage"


def test_a_served_reranker_that_is_busy_is_asked_again():
    good = answer(json.dumps({"results": [{"index": 0, "relevance_score": 0.5}]}))
    with raw_server(answer("{}", status="503 Service Unavailable"), good) as server:
        scorer = HttpPairScorer(RerankConfig(url=server.url, http=QUICK))
        assert asyncio.run(scorer.scores("q", ["d"])) == [0.5]
    assert scorer.counters.retries == 1
    assert server.requests[0] == {"query": "q", "documents": ["d"]}


@pytest.mark.parametrize(
    "body",
    [
        '{"results": [{"index": 0, "relevance_score": 0.5}]}',  # one of two
        '{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 2, "relevance_score": 0.5}]}',
        '{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": NaN}]}',
        '{"results": [{"index": 0}, {"index": 1}]}',
        '{"data": []}',
        "[]",
    ],
)
def test_an_answer_without_every_score_is_a_failure(body: str):
    with raw_server(answer(body)) as server:
        scorer = HttpPairScorer(RerankConfig(url=server.url, http=QUICK))
        with pytest.raises(RetrievalError) as raised:
            asyncio.run(scorer.scores("q", ["a", "b"]))
    assert (raised.value.kind, raised.value.transient) == ("bad_payload", False)


def test_a_token_travels_and_must_be_there(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="environment variable NO_SUCH_TOKEN holds no token"):
        HttpPairScorer(RerankConfig(url="http://127.0.0.1:1", http=HttpOptions(token_env="NO_SUCH_TOKEN")))
    monkeypatch.setenv("RERANK_TOKEN", "secret")
    scorer = HttpPairScorer(RerankConfig(url="http://127.0.0.1:1", http=HttpOptions(token_env="RERANK_TOKEN")))
    assert scorer._posts.connect().headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("values", [{}, {"model": "a", "url": "http://b"}, {"url": "b:1"}, {"model": "a", "top": 3}])
def test_bad_sections_are_refused(values: dict[str, Any]):
    with pytest.raises(ValidationError):
        RerankConfig.model_validate(values)


def test_the_address_without_a_path_is_rerank():
    assert RerankConfig(url="http://127.0.0.1:8000").url == "http://127.0.0.1:8000/rerank"
    assert RerankConfig(url="http://127.0.0.1:8000/v1/rerank").url == "http://127.0.0.1:8000/v1/rerank"
