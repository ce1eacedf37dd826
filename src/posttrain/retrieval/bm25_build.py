"""BM25 scores of a corpus of any size in bounded memory, bit for bit those of bm25s.

Passages are counted in blocks, each sorted by term and written out; then the columns of the score matrix are made one
range of terms at a time, from the slice of that range in every block. In memory: the vocabulary, one block, one range,
and 12 bytes a passage.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from posttrain.retrieval.analysis import Analyzer
from posttrain.retrieval.bm25 import K1, B, TermScores

PASSAGES_PER_BLOCK = 1 << 15
SCORES_PER_RANGE = 1 << 22  # 4 M scores take about 200 MB while they are made


def write_scores(
    texts: Iterable[str],
    analyzer: Analyzer,
    folder: Path,
    *,
    k1: float = K1,
    b: float = B,
    passages_per_block: int = PASSAGES_PER_BLOCK,
    scores_per_range: int = SCORES_PER_RANGE,
) -> TermScores:
    """Writes data.npy, indices.npy and indptr.npy into `folder` and returns them, memory-mapped.

    Reads every text once; raises ValueError when none of them has a term.
    """
    counted = _Counted(folder / "blocks")
    vocabulary: dict[str, int] = {}
    terms, lengths = array("i"), array("i")
    for text in texts:
        found = [vocabulary.setdefault(term, len(vocabulary)) for term in analyzer.terms(text)]
        terms.extend(found)
        lengths.append(len(found))
        if len(lengths) == passages_per_block:
            counted.add(terms, lengths)
            terms, lengths = array("i"), array("i")
    counted.add(terms, lengths)
    if not vocabulary:
        raise ValueError(
            f"none of {counted.passages} passages has a searchable term (a word of two or more characters)"
        )
    indptr = counted.indptr(len(vocabulary))
    _write_columns(counted, indptr, folder, norms=_norms(counted.lengths(), k1, b), scores_per_range=scores_per_range)
    np.save(folder / "indptr.npy", indptr, allow_pickle=False)
    counted.remove()
    data, indices = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ("data.npy", "indices.npy"))
    return TermScores(vocabulary, data, indices, indptr)


class _Counted:
    """How often which term is in which passage, in files of one block of passages each, sorted by term and passage."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._lengths: list[NDArray[np.int32]] = []
        self._frequencies: list[NDArray[np.int64]] = []  # passages of the block that have the term, by term
        self._firsts: list[int] = []  # number of the first passage of each block
        self.passages = 0

    def add(self, terms: array[int], lengths: array[int]) -> None:
        if not lengths:
            return
        counts = np.asarray(lengths, dtype=np.int32)
        rows = np.repeat(np.arange(len(counts)), counts)
        cells = np.asarray(terms, dtype=np.int64) * len(counts) + rows
        cells, times = np.unique(cells, return_counts=True)
        found, rows = np.divmod(cells, len(counts))
        block = np.stack([found, rows + self.passages, times]).astype(np.int32)
        np.save(self._folder / f"{len(self._firsts)}.npy", block, allow_pickle=False)
        self._frequencies.append(np.bincount(found))
        self._lengths.append(counts)
        self._firsts.append(self.passages)
        self.passages += len(counts)

    def lengths(self) -> NDArray[np.int32]:  # [N] terms of every passage
        return np.concatenate(self._lengths)

    def indptr(self, terms: int) -> NDArray[np.int64]:  # [V + 1]
        frequencies = np.zeros(terms, dtype=np.int64)
        for block in self._frequencies:
            frequencies[: len(block)] += block
        return np.concatenate([[0], np.cumsum(frequencies)])

    def columns(self, first: int, last: int) -> NDArray[np.int32]:
        """[3, n]: term, passage and count for the terms first..last-1, sorted by term, then passage."""
        pieces = []
        for number in range(len(self._firsts)):
            block = np.load(self._folder / f"{number}.npy", mmap_mode="r", allow_pickle=False)
            start, end = np.searchsorted(block[0], [first, last])
            pieces.append(np.array(block[:, start:end]))
        cells = np.concatenate(pieces, axis=1)
        return cells[:, np.argsort(cells[0], kind="stable")]  # blocks are in order of their passages

    def remove(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()


def _norms(lengths: NDArray[np.int32], k1: float, b: float) -> NDArray[np.float64]:
    """What a passage's length adds to the divisor of its counts, [N]."""
    return k1 * ((1 - b) + b * lengths / lengths.mean())


def _write_columns(
    counted: _Counted, indptr: NDArray[np.int64], folder: Path, *, norms: NDArray[np.float64], scores_per_range: int
) -> None:
    frequencies = np.diff(indptr)
    known = {int(df): math.log(1 + (counted.passages - df + 0.5) / (df + 0.5)) for df in np.unique(frequencies)}
    with (folder / "data.npy").open("wb") as data, (folder / "indices.npy").open("wb") as indices:
        for stream, kind in ((data, "<f4"), (indices, "<i4")):
            header = {"descr": kind, "fortran_order": False, "shape": (int(indptr[-1]),)}
            np.lib.format.write_array_header_1_0(stream, header)
        first = 0
        while first < len(frequencies):
            enough = int(np.searchsorted(indptr, indptr[first] + scores_per_range, side="right")) - 1
            last = max(first + 1, enough)
            terms, rows, times = counted.columns(first, last)
            idf = np.array([known[df] for df in frequencies[first:last].tolist()], dtype=np.float32)
            counts = times.astype(np.float32)  # bm25s' own types, one by one
            scores = idf[terms - first] * (counts / (norms[rows] + counts))
            data.write(scores.astype(np.float32).tobytes())
            indices.write(rows.tobytes())
            first = last
