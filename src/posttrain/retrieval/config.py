"""Which retriever a run uses: the config section `retrieval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from posttrain.location import at_home
from posttrain.retrieval.bm25 import K1, B, BM25Retriever
from posttrain.retrieval.client import HttpOptions, HttpRetriever, endpoint
from posttrain.retrieval.corpus import EmptyPolicy, read_corpus
from posttrain.retrieval.dense import DenseRetriever
from posttrain.retrieval.encoder import Encoder, EncoderConfig
from posttrain.retrieval.hybrid import RRF_K, HybridRetriever
from posttrain.retrieval.opening import open_index
from posttrain.retrieval.protocol import Retriever
from posttrain.retrieval.rerank import RerankConfig, make_reranked
from posttrain.retrieval.storage import StoredIndexError, read_manifest

Kind = Literal["bm25", "dense", "hybrid", "remote"]
HomePath = Annotated[Path, AfterValidator(at_home)]


class HybridConfig(BaseModel):
    """Reciprocal rank fusion of BM25 and dense: a passage scores 1 / (k + rank) in each, summed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    k: float = Field(default=RRF_K, ge=0, allow_inf_nan=False)
    depth: int = Field(default=100, ge=1)  # passages that each of the two gives


class RetrievalConfig(BaseModel):
    """Exactly one of `corpus` (indexed at start, in memory), `index` (made by `posttrain index`) and `url`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind | None = None  # left out: what the index is; remote with a url; bm25 with a corpus
    corpus: HomePath | None = None
    # a file, or a function that returns its rows ("pkg.mod:function", "path.py:function")
    corpus_options: dict[str, Any] = {}  # keyword arguments of such a function
    index: HomePath | None = None
    url: str | None = None  # of a server that speaks Search-R1's POST /retrieve
    top_k: int = Field(default=3, ge=1)  # passages per query
    k1: float = Field(default=K1, ge=0, allow_inf_nan=False)  # BM25 over `corpus`; an index has its own
    b: float = Field(default=B, ge=0, le=1)
    empty: EmptyPolicy = "error"  # passages of `corpus` without a word
    encoder: EncoderConfig | None = None  # of kind dense and hybrid over `corpus`; an index knows its own
    effort: int | None = Field(default=None, ge=1)  # FAISS: lists probed (IVF) or candidates kept (HNSW)
    hybrid: HybridConfig = Field(default_factory=HybridConfig)
    rerank: RerankConfig | None = None
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
        if (self.kind == "remote") != (self.url is not None) and self.kind is not None:
            raise ValueError(f"kind {self.kind} does not go with {given[0]}: remote is what has a url")
        if self.corpus is not None and (self.kind in ("dense", "hybrid")) != (self.encoder is not None):
            raise ValueError("an encoder belongs to a corpus of kind dense or hybrid, and these need one")
        if self.corpus is not None and self.encoder is not None and self.encoder.model is None:
            raise ValueError("encoder.model is missing: name a directory, or a model of the hub")
        if self.url is not None and self.encoder is not None:
            raise ValueError("the encoder is the server's business: remove it, or the url")
        return self

    @property
    def source(self) -> Literal["corpus", "index", "url"]:
        return "corpus" if self.corpus is not None else "index" if self.index is not None else "url"


def make_retriever(config: RetrievalConfig, *, seed: int | None = None) -> Retriever:
    """Reads the corpus or opens the index or client that the config names; `seed` draws the client's retry delays."""
    first = _first(config, seed)
    return first if config.rerank is None else make_reranked(first, config.rerank, seed=seed)


def _first(config: RetrievalConfig, seed: int | None) -> Retriever:
    if config.url is not None:
        return HttpRetriever(config.url, config.http, seed=seed)
    if config.index is not None:
        return _stored(config, config.index)
    assert config.corpus is not None  # by construction
    passages = read_corpus(config.corpus, empty=config.empty, options=config.corpus_options)
    lexical = None if config.kind == "dense" else BM25Retriever.from_passages(passages, k1=config.k1, b=config.b)
    if config.encoder is None:
        assert lexical is not None
        return lexical
    dense = DenseRetriever.from_passages(passages, Encoder(config.encoder))
    if lexical is None:
        return dense
    return HybridRetriever([lexical, dense], k=config.hybrid.k, depth=config.hybrid.depth)


def _stored(config: RetrievalConfig, index: Path) -> Retriever:
    method = read_manifest(index)["method"]
    if config.kind not in (None, method):
        raise StoredIndexError(f"{index} is an index of kind {method}, retrieval.kind is {config.kind}; change one")
    return open_index(
        index, encoder=config.encoder, effort=config.effort, rrf_k=config.hybrid.k, depth=config.hybrid.depth
    )
