"""The search of `posttrain.retrieval.bm25` compiled by numba: the same sums in the same order, hence the same bits.

It touches only passages that have a term of the query, and holds no interpreter lock meanwhile.
"""

from __future__ import annotations

import numpy as np
from numba import njit  # pyright: ignore[reportMissingImports]
from numpy.typing import NDArray

Found = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]


@njit(nogil=True, cache=True)
def best_passages(data, indices, indptr, terms, starts, passages, top_k) -> Found:
    """Query q has the terms `terms[starts[q]:starts[q + 1]]`.

    Returns rows [Q, k], scores [Q, k] and how many of each row are filled [Q]: best first, equal scores by row.
    """
    queries = len(starts) - 1
    rows = np.empty((queries, top_k), dtype=np.int64)
    scores = np.empty((queries, top_k), dtype=np.float64)
    filled = np.zeros(queries, dtype=np.int64)
    sums = np.zeros(passages, dtype=np.float64)
    touched = np.empty(passages, dtype=np.int64)
    for query in range(queries):
        count = 0
        for term in terms[starts[query] : starts[query + 1]]:
            for cell in range(indptr[term], indptr[term + 1]):
                row = indices[cell]
                if sums[row] == 0.0 and data[cell] > 0.0:
                    touched[count] = row
                    count += 1
                sums[row] += data[cell]
        size = 0
        for i in range(count):
            size = _insert(rows[query], scores[query], size, touched[i], sums[touched[i]])
            sums[touched[i]] = 0.0
        filled[query] = size
    return rows, scores, filled


@njit(nogil=True, cache=True)
def _insert(rows, scores, size, row, score):
    """Keeps the best rows sorted; nearly every passage is worse than the last of a full list, and leaves at once."""
    full = size == len(rows)
    if full and not (score > scores[size - 1] or (score == scores[size - 1] and row < rows[size - 1])):
        return size
    place = size - 1 if full else size
    while place > 0 and (score > scores[place - 1] or (score == scores[place - 1] and row < rows[place - 1])):
        scores[place] = scores[place - 1]
        rows[place] = rows[place - 1]
        place -= 1
    scores[place] = score
    rows[place] = row
    return size if full else size + 1
