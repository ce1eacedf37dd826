from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.corpus import read_corpus


@pytest.fixture(scope="session")
def rag_bench(shared_data: Path) -> BM25Retriever:
    """10,739 real passages."""
    return BM25Retriever.from_passages(read_corpus(shared_data / "rag_bench" / "corpus.jsonl.gz"))
