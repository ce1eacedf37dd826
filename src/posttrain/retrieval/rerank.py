"""A second look at what was found: every (query, passage) pair scored by a model, in process or behind vLLM's API."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification
from transformers.models.auto.tokenization_auto import AutoTokenizer

from posttrain.boundary.foreign_json import read_json
from posttrain.retrieval.encoder import DTYPES, EncoderError, ModelPlace, model_folder, pick_device
from posttrain.retrieval.posts import HttpCounters, HttpOptions, JsonPosts, endpoint
from posttrain.retrieval.protocol import Passage, RetrievalError, Retriever, check_top_k
from posttrain.retrieval.wire import excerpt


class RerankConfig(BaseModel):
    """A reranker behind the retriever: exactly one of `model`, loaded here, and `url`, of a server."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: ModelPlace | None = None
    # a sequence classifier: directory, hub name, or "pkg.mod:function" returning a directory
    url: str | None = None  # of a server with vLLM's POST /rerank (also Jina's and Cohere's)
    served_model: str | None = None  # the `model` that requests to `url` name
    candidates: int = Field(default=50, ge=1)  # passages fetched and scored per query
    max_tokens: int = Field(default=512, ge=8)  # of query and passage together; the passage is cut
    pairs_per_batch: int = Field(default=32, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"  # auto: the first GPU where there is one
    http: HttpOptions = Field(default_factory=HttpOptions)

    @field_validator("url")
    @classmethod
    def _speaks_http(cls, url: str | None) -> str | None:
        return None if url is None else endpoint(url, "/rerank")

    @model_validator(mode="after")
    def _one_scorer(self) -> RerankConfig:
        if (self.model is None) == (self.url is None):
            raise ValueError("rerank needs exactly one of model and url")
        return self


class PairScorer(Protocol):
    """Scores passages for a query: one finite number each, higher is better."""

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]: ...

    async def close(self) -> None: ...


class RerankedRetriever:
    """Fetches `candidates` passages per query (or `top_k`, where that is more) and returns the best by the scorer.

    Equal scores keep the retriever's order. A scorer that fails is a failure of the search.
    """

    def __init__(self, first: Retriever, scorer: PairScorer, *, candidates: int = 50) -> None:
        self.first, self.scorer, self.candidates = first, scorer, candidates

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        check_top_k(top_k)
        found = await self.first.retrieve(queries, max(top_k, self.candidates))
        return list(await asyncio.gather(*map(partial(self._best, top_k), queries, found)))

    async def close(self) -> None:
        await asyncio.gather(self.first.close(), self.scorer.close())

    async def _best(self, top_k: int, query: str, passages: list[Passage]) -> list[Passage]:
        if not passages:
            return []
        scores = await self.scorer.scores(query, [passage.contents for passage in passages])
        order = sorted(range(len(passages)), key=lambda i: -scores[i])[:top_k]
        return [Passage(passages[i].id, passages[i].contents, scores[i]) for i in order]


class CrossEncoder:
    """A sequence classifier of transformers that reads query and passage together.

    The score is the only logit of a model that has one, and the log-odds of label 1 of a model that has two. It runs in
    one worker thread. Raises EncoderError for a model that cannot be loaded or has other labels.
    """

    def __init__(self, config: RerankConfig) -> None:
        assert config.model is not None
        folder = model_folder(config.model)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=DTYPES[config.dtype])
        except (OSError, ValueError) as error:
            raise EncoderError(f"{folder} holds no sequence classifier that transformers can load: {error}") from error
        if model.config.num_labels not in (1, 2):
            raise EncoderError(
                f"{folder} has {model.config.num_labels} labels; a reranker has one score, or no and yes"
            )
        self.device = torch.device(pick_device(config.device))
        self._model = model.to(self.device).eval().requires_grad_(False)
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rerank")

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.score, query, list(texts))

    async def close(self) -> None:
        """Nothing to free: the idle thread ends with the program."""

    def score(self, query: str, texts: list[str]) -> list[float]:
        """One score per text, in order; batches hold texts of about one length."""
        scores = [0.0] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), self._config.pairs_per_batch):
            rows = order[start : start + self._config.pairs_per_batch]
            for row, score in zip(rows, self._batch(query, [texts[row] for row in rows]), strict=True):
                scores[row] = score
        return scores

    def _batch(self, query: str, texts: list[str]) -> list[float]:
        pairs = self.tokenizer(
            [query] * len(texts),
            texts,
            truncation="longest_first",
            max_length=self._config.max_tokens,
            padding=True,
            return_tensors="pt",
        ).to(self.device)
        with torch.inference_mode():
            logits = self._model(**pairs).logits.float()
        return (logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]).tolist()


class HttpPairScorer:
    """vLLM's `POST /rerank`, one request per query.

    Request   {"model": str, "query": str, "documents": [str]}
    Response  {"results": [{"index": int, "relevance_score": float}, ...]}, every document once, in any order
    """

    def __init__(self, config: RerankConfig, *, seed: int | None = None) -> None:
        assert config.url is not None
        self.url = config.url
        self.counters = HttpCounters()
        self._served_model = config.served_model
        self._posts = JsonPosts(config.url, config.http, self.counters, seed=seed)

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        payload: dict[str, Any] = {"query": query, "documents": list(texts)}
        if self._served_model is not None:
            payload["model"] = self._served_model
        self.counters.calls += 1
        self.counters.queries += 1
        async with self._posts.connect() as http:
            return await self._posts.send(http, payload, partial(decode_scores, documents=len(texts)))

    async def close(self) -> None:
        """Nothing to free: every call closes its connection."""


def decode_scores(body: bytes, *, documents: int) -> list[float]:
    """The score of every document, in their order; raises `RetrievalError` of kind `bad_payload`."""
    try:
        payload = read_json(body)
    except ValueError as error:
        raise RetrievalError("bad_payload", f"expected JSON, got {excerpt(body)}") from error
    try:
        scores = {int(row["index"]): float(row["relevance_score"]) for row in payload["results"]}
    except (KeyError, TypeError, ValueError) as error:
        wanted = '{"results": [{"index", "relevance_score"}, ...]}'
        raise RetrievalError("bad_payload", f"expected {wanted}, got {excerpt(body)}", transient=False) from error
    if sorted(scores) != list(range(documents)) or not all(map(math.isfinite, scores.values())):
        detail = f"expected a finite score for each of {documents} documents, got {excerpt(body)}"
        raise RetrievalError("bad_payload", detail, transient=False)
    return [scores[i] for i in range(documents)]


def make_reranked(first: Retriever, config: RerankConfig, *, seed: int | None = None) -> RerankedRetriever:
    """The reranker that the config names, behind `first`."""
    scorer = HttpPairScorer(config, seed=seed) if config.url is not None else CrossEncoder(config)
    return RerankedRetriever(first, scorer, candidates=config.candidates)
