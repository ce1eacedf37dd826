from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from posttrain.retrieval.client import HttpRetriever
from posttrain.retrieval.config import RetrievalConfig, make_retriever
from posttrain.retrieval.index import build_index

from .servers import PEOPLE


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PEOPLE))
    return path


def test_a_corpus_and_its_index_answer_alike(corpus: Path, tmp_path: Path):
    build_index(corpus, tmp_path / "index")
    answers = [
        asyncio.run(make_retriever(RetrievalConfig(**source)).retrieve(["engine"], 2))
        for source in ({"corpus": corpus}, {"index": tmp_path / "index"})
    ]
    assert answers[0] == answers[1]
    assert [passage.id for passage in answers[0][0]] == ["p1", "p0"]


def test_a_url_makes_a_client_with_its_options():
    config = RetrievalConfig.model_validate({"url": "http://127.0.0.1:8000", "http": {"deadline_seconds": 5}})
    client = make_retriever(config, seed=3)
    assert isinstance(client, HttpRetriever)
    assert (client.url, client.options.deadline_seconds) == ("http://127.0.0.1:8000/retrieve", 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of corpus, index and url; got none of them"),
        ({"corpus": "a", "index": "b"}, r"got \[.corpus., .index.\]"),
        ({"url": "localhost:8000"}, "expected a URL such as http://.*, got .localhost:8000."),
        ({"corpus": "a", "topk": 3}, "topk"),
        ({"corpus": "a", "top_k": 0}, "top_k"),
        ({"corpus": "a", "b": 2}, "less than or equal to 1"),
        ({"url": "http://b", "http": {"deadline": 3}}, "deadline"),
        ({"url": "http://b", "http": {"max_attempts": 0}}, "max_attempts"),
        ({"url": "http://b", "kind": "dense"}, "kind dense does not go with url"),
        ({"corpus": "a", "kind": "remote"}, "kind remote does not go with corpus"),
        ({"corpus": "a", "kind": "dense"}, "an encoder belongs to a corpus of kind dense or hybrid"),
        ({"corpus": "a", "encoder": {"model": "m"}}, "an encoder belongs to a corpus of kind dense or hybrid"),
        ({"url": "http://b", "encoder": {"model": "m"}}, "the encoder is the server's business"),
        ({"corpus": "a", "rerank": {}}, "rerank needs exactly one of model and url"),
        ({"corpus": "a", "hybrid": {"k": -1}}, "k"),
    ],
)
def test_bad_sections_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        RetrievalConfig.model_validate(values)


def test_sections_of_the_page_are_configs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "retrieval.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    kinds = [RetrievalConfig.model_validate(yaml.safe_load(block)["retrieval"]).source for block in blocks]
    assert kinds == ["index", "corpus", "corpus", "url"]
