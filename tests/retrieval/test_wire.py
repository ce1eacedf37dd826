from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.retrieval import Passage, RetrievalError
from posttrain.retrieval.wire import decode_results, encode_request, encode_results


def decode(result: Any, queries: int = 1, top_k: int = 3) -> list[list[Passage]]:
    return decode_results(json.dumps({"result": result}).encode(), queries=queries, top_k=top_k)


def test_the_request_is_search_r1s():
    assert encode_request(["a", "b"], 3) == {"queries": ["a", "b"], "topk": 3, "return_scores": True}


def test_half_a_surrogate_pair_in_a_query_is_replaced():
    assert encode_request(["a\ud800b"], 1)["queries"] == ["a?b"]


def test_results_with_and_without_scores_are_search_r1s():
    results = [[Passage("1", '"T"\nx', 0.5)], []]
    document = {"id": "1", "contents": '"T"\nx'}
    assert encode_results(results, return_scores=True) == {"result": [[{"document": document, "score": 0.5}], []]}
    assert encode_results(results, return_scores=False) == {"result": [[document], []]}


@pytest.mark.parametrize(
    ("item", "passage"),
    [
        ({"document": {"id": "1", "contents": "x", "url": "u"}, "score": 2}, Passage("1", "x", 2.0)),
        ({"document": {"id": 1, "contents": "x"}}, Passage("1", "x")),
        ({"document": {"id": "1", "contents": "x"}, "score": None}, Passage("1", "x")),
        ({"id": "1", "contents": "x"}, Passage("1", "x")),
        ({"_id": "1", "title": "T", "text": "x"}, Passage("1", '"T"\nx')),
        ({"id": "1", "text": "x"}, Passage("1", '""\nx')),
        ("x", Passage("2d711642b726b044", "x")),
        ({"document": "x", "score": 0.5}, Passage("2d711642b726b044", "x", 0.5)),
        ({"document": {"contents": "x"}}, Passage("2d711642b726b044", "x")),  # Search-R1's web search servers
        ({"id": "1", "contents": "\ud800"}, Passage("1", "?")),
    ],
)
def test_the_documents_of_the_field(item: Any, passage: Passage):
    assert decode([[item]]) == [[passage]]


def test_more_passages_than_asked_for_are_cut():
    assert [passage.id for passage in decode([[{"id": i, "contents": "x"} for i in range(9)]], top_k=2)[0]] == [
        "0",
        "1",
    ]


@pytest.mark.parametrize("body", [b"<html>502 Bad Gateway</html>", b"", b'{"result": [[', b"\xff\xfe\x00", b"nope"])
def test_p59_what_is_no_json_is_worth_another_try(body: bytes):
    with pytest.raises(RetrievalError, match="expected JSON, got") as caught:
        decode_results(body, queries=1, top_k=1)
    assert (caught.value.kind, caught.value.transient) == ("bad_payload", True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], r'expected {"result": \[...\]}'),
        ({"detail": "no"}, r'expected {"result": \[...\]}, got \'{"detail": "no"}\''),
        ({"result": {"0": []}}, r"expected {"),
        ({"result": []}, r"one result per query \(1\), got 0"),
        ({"result": [[], []]}, r"one result per query \(1\), got 2"),
        ({"result": ["x"]}, r"a list of documents for each query, got 'x'"),
        ({"result": [[3]]}, r"a document with `contents`, got 3"),
        ({"result": [[{"id": 1}]]}, r"a document with `contents`"),
        ({"result": [[{"document": {"id": 1, "contents": None}}]]}, r"a document with `contents`"),
        ({"result": [[{"document": None, "score": 1}]]}, r"a document with `contents`"),
        ({"result": [[{"document": "x", "score": "high"}]]}, r"a finite number as score, got 'high'"),
        ({"result": [[{"document": "x", "score": True}]]}, r"a finite number as score"),
        ({"result": [[{"document": "x", "score": float("nan")}]]}, r"a finite number as score, got nan"),
    ],
)
def test_p59_json_of_another_shape_is_final(body: Any, message: str):
    with pytest.raises(RetrievalError, match=message) as caught:
        decode_results(json.dumps(body).encode(), queries=1, top_k=3)
    assert (caught.value.kind, caught.value.transient) == ("bad_payload", False)


passages = st.builds(Passage, st.text(min_size=1), st.text(), st.floats(allow_nan=False, allow_infinity=False))


@settings(deadline=None)
@given(st.lists(st.lists(passages, max_size=3), max_size=3))
def test_what_is_encoded_is_decoded(results: list[list[Passage]]):
    body = json.dumps(encode_results(results, return_scores=True)).encode()
    assert decode_results(body, queries=len(results), top_k=3) == results
