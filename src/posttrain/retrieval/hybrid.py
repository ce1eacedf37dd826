"""Several retrievers as one, by reciprocal rank fusion (Cormack et al. 2009, "Reciprocal Rank Fusion outperforms
Condorcet and individual Rank Learning Methods"): score(d) = sum over rankings of weight / (k + rank of d), k = 60.

Ranks count from 1. Scores of different retrievers never meet, so they need no common scale.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from posttrain.retrieval.protocol import Passage, Retriever, check_top_k

RRF_K = 60.0


def fuse(
    rankings: Sequence[Sequence[Passage]], top_k: int, *, k: float = RRF_K, weights: Sequence[float] | None = None
) -> list[Passage]:
    """The best `top_k` of all rankings; a passage is known by its id. Equal scores keep the order of the rankings."""
    scores: dict[str, float] = {}
    passages: dict[str, Passage] = {}
    for weight, ranking in zip(weights or [1.0] * len(rankings), rankings, strict=True):
        for rank, passage in enumerate(ranking, start=1):
            passages.setdefault(passage.id, passage)
            scores[passage.id] = scores.get(passage.id, 0.0) + weight / (k + rank)
    best = sorted(scores, key=lambda key: -scores[key])[:top_k]
    return [Passage(key, passages[key].contents, scores[key]) for key in best]


class HybridRetriever:
    """Asks all retrievers at once for `depth` passages each (or `top_k`, where that is more) and fuses the answers.

    A failure of one is a failure of the search: what it would have found is not known.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever],
        *,
        k: float = RRF_K,
        depth: int = 100,
        weights: Sequence[float] | None = None,
    ) -> None:
        if weights is not None and len(weights) != len(retrievers):
            raise ValueError(f"{len(weights)} weights for {len(retrievers)} retrievers")
        self.retrievers = tuple(retrievers)
        self.k, self.depth, self.weights = k, depth, weights

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        check_top_k(top_k)
        depth = max(self.depth, top_k)
        found = await asyncio.gather(*(retriever.retrieve(queries, depth) for retriever in self.retrievers))
        return [fuse(rankings, top_k, k=self.k, weights=self.weights) for rankings in zip(*found, strict=True)]

    async def close(self) -> None:
        await asyncio.gather(*(retriever.close() for retriever in self.retrievers))
