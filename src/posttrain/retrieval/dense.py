"""Search by vectors: the inner product of a query's and a passage's encoding, exactly or through FAISS."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from posttrain.retrieval.encoder import Encoder
from posttrain.retrieval.offload import InThread
from posttrain.retrieval.protocol import Passage, check_top_k

Vectors = NDArray[np.float32] | NDArray[np.float16]
Hits = tuple[NDArray[np.float32], NDArray[np.int64]]  # scores and rows, both [Q, k], best first; row -1 = nothing found
_ROWS_AT_ONCE = 1 << 14  # of a shard: 64 queries x 16,384 scores are 4 MB
_TRAINING_VECTORS_PER_LIST = 256  # FAISS uses no more than that
_LOG = logging.getLogger(__name__)


class VectorSearch(Protocol):
    """Finds the rows whose vectors have the largest inner product with a query's."""

    dimensions: int

    def __len__(self) -> int: ...

    def search(self, queries: NDArray[np.float32], top_k: int) -> Hits: ...


class ExactVectors:
    """All inner products, one piece of a shard at a time; needs no FAISS. Shards may be memory maps.

    Equal scores come in order of the rows.
    """

    def __init__(self, shards: Sequence[Vectors]) -> None:
        self.shards = shards
        self.dimensions = shards[0].shape[1]

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def search(self, queries: NDArray[np.float32], top_k: int) -> Hits:
        top_k = min(top_k, len(self))
        scores = np.full((len(queries), top_k), -np.inf, dtype=np.float32)
        rows = np.full((len(queries), top_k), -1, dtype=np.int64)
        for first, block in self._blocks():
            fresh = queries @ block.T
            # columns that are among the best of any query so far; later rows lose ties, so > it is. Soon few are.
            columns = np.flatnonzero((fresh > scores[:, -1:]).any(axis=0))
            merged = np.concatenate([scores, fresh[:, columns]], axis=1)
            numbers = np.concatenate([rows, np.broadcast_to(columns + first, (len(rows), len(columns)))], axis=1)
            order = np.argsort(-merged, axis=1, kind="stable")[:, :top_k]
            scores, rows = np.take_along_axis(merged, order, 1), np.take_along_axis(numbers, order, 1)
        return scores, rows

    def _blocks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        first = 0
        for shard in self.shards:
            for start in range(0, len(shard), _ROWS_AT_ONCE):
                block = np.asarray(shard[start : start + _ROWS_AT_ONCE], dtype=np.float32)
                yield first + start, block
            first += len(shard)


class FaissVectors:
    """A FAISS index of any kind in its own file, memory-mapped where its kind can be. Needs the extra `dense`.

    effort: lists probed (IVF) or candidates kept (HNSW); more finds more of the true neighbours and takes longer.
    """

    def __init__(self, path: Path, *, mmap: bool = True, effort: int | None = None) -> None:
        faiss = import_faiss()
        self.index = _read_faiss(faiss, path, mmap)
        self.dimensions = int(self.index.d)
        self.distance_is_score = self.index.metric_type == faiss.METRIC_INNER_PRODUCT
        _set_effort(faiss, self.index, effort)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def search(self, queries: NDArray[np.float32], top_k: int) -> Hits:
        scores, rows = self.index.search(np.ascontiguousarray(queries), min(top_k, len(self)))
        return (scores if self.distance_is_score else -scores), rows


class DenseRetriever:
    """Encodes queries and searches vectors, in a worker thread: concurrent calls share one batch of the encoder.

    A blank query finds nothing. Raises ValueError when the vectors are not of this encoder's dimensions or not as many
    as the passages.
    """

    def __init__(self, passages: Sequence[Passage], encoder: Encoder, vectors: VectorSearch) -> None:
        if vectors.dimensions != encoder.dimensions:
            raise ValueError(
                f"the vectors have {vectors.dimensions} dimensions, {encoder.settings.name} makes "
                f"{encoder.dimensions}; search them with the encoder that made them"
            )
        if len(vectors) != len(passages):
            raise ValueError(f"{len(vectors)} vectors for {len(passages)} passages; build the index again")
        self.passages = passages
        self.encoder = encoder
        self.vectors = vectors
        self._thread = InThread(self.search)

    @classmethod
    def from_passages(cls, passages: Iterable[Passage], encoder: Encoder) -> DenseRetriever:
        """Encodes passages held in memory."""
        kept = list(passages)
        _LOG.info("encoding %d passages with %s", len(kept), encoder.settings.name)
        return cls(kept, encoder, ExactVectors([encoder.encode([passage.contents for passage in kept], "passage")]))

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return await self._thread.retrieve(queries, top_k)

    async def close(self) -> None:
        await self._thread.close()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """One list of at most `top_k` passages per query."""
        check_top_k(top_k)
        asked = [query for query in dict.fromkeys(queries) if query.strip()]
        if not asked:
            return [[] for _ in queries]
        scores, rows = self.vectors.search(self.encoder.encode(asked, "query"), top_k)
        found = dict(zip(asked, map(self._passages, rows.tolist(), scores.tolist()), strict=True))
        return [list(found.get(query, ())) for query in queries]

    def _passages(self, rows: list[int], scores: list[float]) -> list[Passage]:
        found = [(self.passages[row], score) for row, score in zip(rows, scores, strict=True) if row >= 0]
        return [Passage(passage.id, passage.contents, score) for passage, score in found]


def write_faiss(shards: Sequence[Vectors], kind: str, path: Path, on_progress: Callable[[int], None]) -> dict[str, Any]:
    """Builds a FAISS index of the shards' vectors and writes it; returns what it is.

    kind: flat, ivf (4 sqrt(N) lists), hnsw (32 links), or a string of FAISS' index_factory ("IVF4096,PQ64"). Holds the
    vectors in memory, as FAISS does, except for what a string compresses.
    """
    faiss = import_faiss()
    total, dimensions = sum(map(len, shards)), shards[0].shape[1]
    lists = max(1, min(int(4 * math.sqrt(total)), total // 39))  # FAISS wants 39 training vectors a list
    factory = {"flat": "Flat", "ivf": f"IVF{lists},Flat", "hnsw": "HNSW32,Flat"}.get(kind, kind)
    try:
        index = faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(f"FAISS knows no index {kind!r} of {dimensions} dimensions: {error}") from error
    if not index.is_trained:
        index.train(_sample(shards, total, lists * _TRAINING_VECTORS_PER_LIST))
    for shard in shards:
        index.add(np.ascontiguousarray(shard, dtype=np.float32))
        on_progress(int(index.ntotal))
    faiss.write_index(index, str(path))
    return {"factory": factory, "faiss": faiss.__version__}


def import_faiss() -> Any:
    try:
        import faiss  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("this kind of vectors needs faiss: pip install 'posttrain[dense]'") from error
    return faiss


def _sample(shards: Sequence[Vectors], total: int, wanted: int) -> NDArray[np.float32]:
    """Every n-th vector."""
    step = max(1, total // max(1, wanted))
    return np.concatenate([np.asarray(shard[::step], dtype=np.float32) for shard in shards])


def _read_faiss(faiss: Any, path: Path, mmap: bool) -> Any:
    names = ("IO_FLAG_MMAP_IFC", "IO_FLAG_MMAP") if mmap else ()  # the first maps more kinds, and came later
    for flag in [getattr(faiss, name) for name in names if hasattr(faiss, name)]:
        try:
            return faiss.read_index(str(path), flag)
        except RuntimeError:
            continue  # this kind cannot be mapped so
    try:
        return faiss.read_index(str(path))
    except RuntimeError as error:
        raise ValueError(f"{path} is no FAISS index that {faiss.__version__} reads: {str(error)[:200]}") from error


def _set_effort(faiss: Any, index: Any, effort: int | None) -> None:
    kind = faiss.downcast_index(index)
    if hasattr(kind, "hnsw"):
        kind.hnsw.efSearch = effort or 128
    elif hasattr(kind, "nprobe"):
        kind.nprobe = effort or max(1, kind.nlist // 8)
