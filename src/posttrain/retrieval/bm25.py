"""BM25 in this process: scores precomputed by bm25s, looked up through its sparse columns.

Robertson's term saturation with Lucene's idf, ln(1 + (N - df + .5) / (df + .5)), which is positive for every term: a
score of 0 means that no term matched, and such a passage is never returned (Kamphuis et al. 2020, "Which BM25 do you
mean?"). bm25s' own `retrieve` breaks ties arbitrarily and costs more than the search itself on a small corpus, so only
its index is used. Where numba is installed, larger corpora are searched by compiled code.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from posttrain.numba_code import may_compile, numba_code
from posttrain.retrieval.analysis import Analyzer, needs_bigrams
from posttrain.retrieval.offload import InThread
from posttrain.retrieval.protocol import Passage, check_top_k


def import_alone(name: str) -> ModuleType:
    """A module, imported as if jax and numba were not installed.

    Where jax is, bm25s calls it while being imported, and jax then starts on the GPU and claims three quarters of its
    memory, beside a model that needs it. numba makes every start a quarter of a second longer. What they would do here
    (the top k of a query) is done below.
    """
    if name in sys.modules:
        return sys.modules[name]
    missing = object()
    hidden = {key: sys.modules.get(key, missing) for key in ("jax", "jax.lax", "numba")}
    sys.modules.update(dict.fromkeys(hidden))  # None makes `import` raise ImportError  # type: ignore[arg-type]
    try:
        return importlib.import_module(name)
    finally:
        for key, module in hidden.items():
            sys.modules.pop(key, None)
            if module is not missing:
                sys.modules[key] = module  # type: ignore[assignment]


bm25s = import_alone("bm25s")
logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG, which would show in every program that logs
COMPILED = "posttrain.retrieval.bm25_numba"
K1, B = 1.2, 0.6  # of passages about as long as each other; for long documents 1.5 and 0.75 are usual
ENGLISH_STOP_WORDS: tuple[str, ...] = tuple(bm25s.stopwords.STOPWORDS_EN)
LANGUAGE_SAMPLE = 256  # passages that decide whether the corpus is of a script without spaces
_CELLS_PER_CHUNK = 1 << 16  # queries x passages scored at once: 512 kB of float64 stays in the cache
_COMPILED_FROM = 2048  # passages; below, numpy takes microseconds and loading compiled code would be what one waits for
_COMPILED_TOP_K = 1000  # it keeps the best sorted by insertion: for a few
_CELLS_AT_ONCE = 1 << 17  # queries x passages that take about a millisecond; more is searched in a thread


@dataclass(frozen=True, slots=True)
class TermScores:
    """The score of every term in every passage that has it: a sparse [N passages, V terms] matrix in columns.

    Term `t` of `vocabulary` scores `data[indptr[t]:indptr[t+1]]` in the passages `indices[indptr[t]:indptr[t+1]]`,
    which ascend.
    """

    vocabulary: dict[str, int]
    data: NDArray[np.float32]  # [nnz]
    indices: NDArray[np.int32]  # [nnz]
    indptr: NDArray[np.int64]  # [V + 1]


def score_terms(texts: Iterable[str], analyzer: Analyzer, *, k1: float = K1, b: float = B) -> TermScores:
    """Reads every text once; raises ValueError when none of them has a term."""
    vocabulary: dict[str, int] = {}
    documents = [
        array("i", [vocabulary.setdefault(term, len(vocabulary)) for term in analyzer.terms(text)]) for text in texts
    ]
    if not vocabulary:
        raise ValueError(f"none of {len(documents)} passages has a searchable term (a word of two or more characters)")
    engine = bm25s.BM25(k1=k1, b=b, method="lucene")
    engine.index((documents, vocabulary), create_empty_token=False, show_progress=False)
    columns = engine.scores
    return TermScores(vocabulary, columns["data"], columns["indices"], columns["indptr"].astype(np.int64))


class BM25Retriever:
    """Searches `passages` by `scores`, in order of score; equal scores in order of the passages.

    A search of about a millisecond or less runs on the caller's thread without a single suspension, so that the course
    of episodes in a small world never depends on timing; a larger one runs in a worker thread, and the event loop goes
    on. Which of the two depends on numbers of queries and passages only. A query without a known term finds nothing:
    an empty list. A term that occurs twice in a query counts twice.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        scores: TermScores,
        analyzer: Analyzer,
        *,
        cached_queries: int = 4096,
        compiled: bool | None = None,
    ) -> None:
        """compiled: search by numba's code (None: where it is installed and the corpus is not small)."""
        self.passages = passages
        self.analyzer = analyzer
        self._scores = scores
        self._cache: dict[tuple[str, int], tuple[Passage, ...]] = {}  # insertion order = least recently used first
        self._cached_queries = cached_queries
        self._cache_lock = threading.Lock()
        self._queries_per_chunk = max(1, _CELLS_PER_CHUNK // len(passages))
        if compiled is None:  # numba is optional: numpy gives the same bits
            compiled = len(passages) >= _COMPILED_FROM and may_compile() and numba_code(COMPILED) is not None
        self._compiled = compiled
        self._thread = InThread(self.search)
        if self._compiled:
            self._search_compiled([[0]], 1)  # now, not in the first search: compiling takes seconds

    @classmethod
    def from_passages(
        cls,
        passages: Iterable[Passage],
        *,
        k1: float = K1,
        b: float = B,
        stop_words: Iterable[str] = ENGLISH_STOP_WORDS,
    ) -> BM25Retriever:
        """Indexes passages held in memory."""
        kept = list(passages)
        analyzer = Analyzer(stop_words, bigrams=needs_bigrams(passage.contents for passage in kept[:LANGUAGE_SAMPLE]))
        return cls(kept, score_terms((passage.contents for passage in kept), analyzer, k1=k1, b=b), analyzer)

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        if len(queries) * len(self.passages) <= _CELLS_AT_ONCE:
            return self.search(queries, top_k)
        return await self._thread.retrieve(queries, top_k)

    async def close(self) -> None:
        await self._thread.close()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """One list of at most `top_k` passages per query; a query's answer does not depend on its companions."""
        check_top_k(top_k)
        answers = self._cached(queries, top_k)
        missing = [query for query in dict.fromkeys(queries) if query not in answers]
        if missing:
            fresh = dict(zip(missing, self._search_uncached(missing, min(top_k, len(self.passages))), strict=True))
            answers |= fresh
            self._remember(fresh, top_k)
        return [list(answers[query]) for query in queries]

    def _cached(self, queries: Sequence[str], top_k: int) -> dict[str, tuple[Passage, ...]]:
        found: dict[str, tuple[Passage, ...]] = {}
        with self._cache_lock:
            for query in queries:
                if (query, top_k) in self._cache:
                    found[query] = self._cache[query, top_k] = self._cache.pop((query, top_k))
        return found

    def _remember(self, fresh: dict[str, tuple[Passage, ...]], top_k: int) -> None:
        with self._cache_lock:
            for query, passages in fresh.items():
                self._cache[query, top_k] = passages
            while len(self._cache) > self._cached_queries:
                del self._cache[next(iter(self._cache))]

    def _search_uncached(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        known = self._scores.vocabulary
        terms = [[known[term] for term in self.analyzer.terms(query) if term in known] for query in queries]
        if self._compiled and top_k <= _COMPILED_TOP_K:
            return self._search_compiled(terms, top_k)
        found: list[tuple[Passage, ...]] = []
        for start in range(0, len(terms), self._queries_per_chunk):
            chunk = terms[start : start + self._queries_per_chunk]
            found.extend(self._best(row, top_k) for row in self._passage_scores(chunk))
        return found

    def _search_compiled(self, terms: list[list[int]], top_k: int) -> list[tuple[Passage, ...]]:
        code = numba_code(COMPILED)
        assert code is not None
        scores = self._scores
        flat = np.array([term for query in terms for term in query], dtype=np.int64)
        starts = np.cumsum([0, *map(len, terms)])
        rows, values, filled = code.best_passages(
            scores.data, scores.indices, scores.indptr, flat, starts, len(self.passages), top_k
        )
        return [
            tuple(map(self._passage, row[:count], value[:count]))
            for row, value, count in zip(rows.tolist(), values.tolist(), filled.tolist(), strict=True)
        ]

    def _passage_scores(self, terms: list[list[int]]) -> NDArray[np.float64]:  # [Q, N]
        """Sums in float64 and in order of the query's terms, so that a batch gives the bits of single queries."""
        rows, width = len(terms), len(self.passages)
        columns = [term for query in terms for term in query]
        if not columns:
            return np.zeros((rows, width))
        indices, data, indptr = self._scores.indices, self._scores.data, self._scores.indptr
        starts, ends = indptr[columns].tolist(), indptr[[term + 1 for term in columns]].tolist()
        cells = np.concatenate([indices[start:end] for start, end in zip(starts, ends, strict=True)])
        values = np.concatenate([data[start:end] for start, end in zip(starts, ends, strict=True)])
        if rows > 1:
            offsets = [row * width for row, query in enumerate(terms) for _ in query]
            cells = cells + np.repeat(offsets, np.subtract(ends, starts))
        sums = np.asarray(np.bincount(cells, values, rows * width), dtype=np.float64)
        return sums.reshape(rows, width)

    def _best(self, scores: NDArray[np.float64], top_k: int) -> tuple[Passage, ...]:  # scores [N]
        candidates = np.flatnonzero(scores)
        values = scores[candidates]
        if len(values) > top_k:
            threshold = np.partition(values, len(values) - top_k)[len(values) - top_k]
            kept = values >= threshold  # may hold more than top_k where scores tie: the stable sort decides
            candidates, values = candidates[kept], values[kept]
        order = np.argsort(-values, kind="stable")[:top_k]
        return tuple(self._passage(int(candidates[i]), float(values[i])) for i in order)

    def _passage(self, row: int, score: float) -> Passage:
        passage = self.passages[row]
        return Passage(passage.id, passage.contents, score)
