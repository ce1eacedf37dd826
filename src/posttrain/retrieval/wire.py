"""Search-R1's retrieval JSON, both ways.

Request   {"queries": [str], "topk": int | null, "return_scores": bool = false}
Response  {"result": [[{"document": {"id", "contents"}, "score": float}, ...], ...]}   with scores
          {"result": [[{"id", "contents"}, ...], ...]}                                 without

Reading is lenient about what servers of the field do differently: documents with or without the `document` level, with
or without score or id, with `title` and `text`, or as plain strings; more passages than asked for are cut.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from posttrain.boundary.foreign_json import read_json
from posttrain.retrieval.protocol import Passage, RetrievalError, quoted


def encode_request(queries: Sequence[str], top_k: int) -> dict[str, Any]:
    return {"queries": [_encodable(query) for query in queries], "topk": top_k, "return_scores": True}


def encode_results(results: Sequence[Sequence[Passage]], *, return_scores: bool) -> dict[str, Any]:
    return {"result": [[_encoded(passage, return_scores) for passage in passages] for passages in results]}


def decode_results(body: bytes, *, queries: int, top_k: int) -> list[list[Passage]]:
    """One list of at most `top_k` passages per query; raises `RetrievalError` of kind `bad_payload`.

    A body that is no JSON may be the page of a proxy whose server restarts, so it is worth another try; JSON of another
    shape is another program, and is not.
    """
    try:
        payload = read_json(body)
    except ValueError as error:
        raise RetrievalError("bad_payload", f"expected JSON, got {excerpt(body)}") from error
    results = payload.get("result") if isinstance(payload, dict) else None
    if not isinstance(results, list):
        raise _wrong_shape(f'expected {{"result": [...]}}, got {excerpt(body)}')
    if len(results) != queries:
        raise _wrong_shape(f"expected one result per query ({queries}), got {len(results)}")
    return [_decoded_list(items, top_k) for items in results]


def excerpt(body: bytes, length: int = 120) -> str:
    """The beginning of a body on one line, for error messages."""
    text = " ".join(body[: 4 * length].decode("utf-8", errors="replace").split())
    return repr(text[:length]) + (" ..." if len(text) > length else "")


def _encoded(passage: Passage, return_scores: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if return_scores else document


def _decoded_list(items: object, top_k: int) -> list[Passage]:
    if not isinstance(items, list):
        raise _wrong_shape(f"expected a list of documents for each query, got {items!r:.120}")
    return [_decoded(item) for item in items[:top_k]]


def _decoded(item: object) -> Passage:
    document, score = item, None
    if isinstance(item, dict) and "document" in item:
        document, score = item["document"], item.get("score")
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict):
        raise _wrong_shape(f"expected a document with `contents`, got {item!r:.120}")
    contents = _contents(document)
    return Passage(_id(document, contents), contents, _score(score))


def _contents(document: dict[str, Any]) -> str:
    contents = document.get("contents")
    if contents is None and isinstance(document.get("text"), str):
        contents = quoted(str(document.get("title") or ""), document["text"])
    if not isinstance(contents, str):
        raise _wrong_shape(f"expected a document with `contents`, got {document!r:.120}")
    return _encodable(contents)


def _encodable(text: str) -> str:
    """JSON escapes can spell half a surrogate pair, which neither HTTP nor a tokenizer can encode; it becomes "?"."""
    return text.encode("utf-8", errors="replace").decode()


def _id(document: dict[str, Any], contents: str) -> str:
    """The server's id, or one made of the contents, so that a passage found twice can be recognised."""
    value = document.get("id", document.get("_id"))
    return hashlib.sha256(contents.encode()).hexdigest()[:16] if value is None else str(value)


def _score(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong_shape(f"expected a finite number as score, got {value!r:.40}")
    return float(value)


def _wrong_shape(detail: str) -> RetrievalError:
    return RetrievalError("bad_payload", detail, transient=False)
