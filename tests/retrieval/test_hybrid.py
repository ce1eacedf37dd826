from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from posttrain.retrieval import Passage, RetrievalError
from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.hybrid import HybridRetriever, fuse

from .servers import PEOPLE


class Fixed:
    """Answers every query with the same passages; remembers how many it was asked for."""

    def __init__(self, *ids: str) -> None:
        self.found = [Passage(key, f"text of {key}", 1.0) for key in ids]
        self.asked: list[int] = []
        self.closed = False

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.asked.append(top_k)
        return [self.found[:top_k] for _ in queries]

    async def close(self) -> None:
        self.closed = True


def test_scores_are_the_formula():
    """Worked by hand with k = 60: b is second and first, a first and third, c only second."""
    first, second = Fixed("a", "b").found, Fixed("b", "c", "a").found
    fused = fuse([first, second], 10)
    assert [passage.id for passage in fused] == ["b", "a", "c"]
    assert [passage.score for passage in fused] == pytest.approx([1 / 62 + 1 / 61, 1 / 61 + 1 / 63, 1 / 62])
    assert fused[0].contents == "text of b"


def test_weights_and_k():
    fused = fuse([Fixed("a").found, Fixed("b").found], 2, k=0, weights=[1.0, 2.0])
    assert [(passage.id, passage.score) for passage in fused] == [("b", 2.0), ("a", 1.0)]


def test_equal_scores_keep_the_order_of_the_rankings():
    assert [passage.id for passage in fuse([Fixed("a").found, Fixed("b").found], 2)] == ["a", "b"]


def test_every_retriever_gives_its_depth_and_the_best_are_kept():
    parts = [Fixed(*"abcdef"), Fixed(*"fedcba")]
    hybrid = HybridRetriever(parts, depth=4)
    (found,) = asyncio.run(hybrid.retrieve(["q"], 2))
    assert len(found) == 2
    asyncio.run(hybrid.retrieve(["q"], 6))
    assert parts[0].asked == parts[1].asked == [4, 6]
    asyncio.run(hybrid.close())
    assert all(part.closed for part in parts)


def test_each_query_is_fused_alone():
    hybrid = HybridRetriever([BM25Retriever.from_passages(PEOPLE), Fixed()])
    found = asyncio.run(hybrid.retrieve(["compiler", "unknown", "london"], 1))
    assert [[passage.id for passage in passages] for passages in found] == [["p2"], [], ["p3"]]
    assert asyncio.run(hybrid.retrieve([], 1)) == []


def test_a_part_that_fails_fails_the_search():
    class Down(Fixed):
        async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
            raise RetrievalError("connection", "nobody there")

    with pytest.raises(RetrievalError, match="nobody there"):
        asyncio.run(HybridRetriever([Fixed("a"), Down()]).retrieve(["q"], 1))


def test_one_weight_for_each():
    with pytest.raises(ValueError, match="1 weights for 2 retrievers"):
        HybridRetriever([Fixed(), Fixed()], weights=[1.0])


def test_top_k_below_one_is_refused():
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        asyncio.run(HybridRetriever([Fixed("a")]).retrieve(["q"], 0))
