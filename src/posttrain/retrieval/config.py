"""Which retriever a run uses: the config section `retrieval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.client import HttpOptions, HttpRetriever, endpoint
from posttrain.retrieval.corpus import EmptyPolicy, read_corpus
from posttrain.retrieval.index import load_index
from posttrain.retrieval.protocol import Retriever


class RetrievalConfig(BaseModel):
    """Exactly one of `corpus` (indexed at start, in memory), `index` (made by `posttrain index`) and `url`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: Path | None = None  # a file, or a function that returns its rows ("pkg.mod:function", "path.py:function")
    corpus_options: dict[str, Any] = {}  # keyword arguments of such a function
    index: Path | None = None
    url: str | None = None  # of a server that speaks Search-R1's POST /retrieve
    top_k: int = Field(default=3, ge=1)  # passages per query
    k1: float = Field(default=1.5, ge=0, allow_inf_nan=False)  # BM25 over `corpus`; an index has its own
    b: float = Field(default=0.75, ge=0, le=1)
    empty: EmptyPolicy = "error"  # passages of `corpus` without a word
    http: HttpOptions = Field(default_factory=HttpOptions)

    @field_validator("url")
    @classmethod
    def _speaks_http(cls, url: str | None) -> str | None:
        return None if url is None else endpoint(url)

    @model_validator(mode="after")
    def _one_source(self) -> RetrievalConfig:
        given = [name for name in ("corpus", "index", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"retrieval needs exactly one of corpus, index and url; got {given or 'none of them'}")
        return self

    @property
    def source(self) -> Literal["corpus", "index", "url"]:
        return "corpus" if self.corpus is not None else "index" if self.index is not None else "url"


def make_retriever(config: RetrievalConfig, *, seed: int | None = None) -> Retriever:
    """Reads the corpus or opens the index or client that the config names; `seed` draws the client's retry delays."""
    if config.url is not None:
        return HttpRetriever(config.url, config.http, seed=seed)
    if config.index is not None:
        return load_index(config.index)
    assert config.corpus is not None  # by construction
    passages = read_corpus(config.corpus, empty=config.empty, options=config.corpus_options)
    return BM25Retriever.from_passages(passages, k1=config.k1, b=config.b)
