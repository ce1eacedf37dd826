"""The tool of tiny_tools.yaml: a search over the fictional world, as a plain function."""

from __future__ import annotations

import asyncio
from functools import cache

from posttrain.envs.search import format_passages
from posttrain.envs.tiny_world import passages
from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.protocol import Passage


def search(query: str, seed: int = 0, top_k: int = 2) -> str:
    """Finds what is written about a person, place or organisation.

    Args:
        query: its name, or a few words
    """
    (found,) = asyncio.run(index(seed).retrieve([query], top_k))
    return format_passages(found)


@cache
def index(seed: int) -> BM25Retriever:
    """Built once per worker process."""
    return BM25Retriever.from_passages([Passage(row["id"], row["contents"]) for row in passages(seed)])
