"""The HTTP retrieval server: Search-R1's `POST /retrieve`, and `GET /healthz`. Needs the extra `serve`.

Every refusal is JSON, {"detail": "what was wrong"}: 400 not JSON, 413 body too long, 422 wrong shape or over a limit,
503 the retriever behind it failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, StrictBool, StrictStr, ValidationError

from posttrain.retrieval.batching import Coalescer
from posttrain.retrieval.index import load_index, read_manifest
from posttrain.retrieval.protocol import RetrievalError, Retriever
from posttrain.retrieval.wire import encode_results

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise ImportError("the retrieval server needs fastapi and uvicorn: pip install 'posttrain[serve]'") from error

DEFAULT_TOP_K = 3  # Search-R1's


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one request may ask for."""

    max_queries: int = 1024
    max_query_chars: int = 4096
    max_top_k: int = 100
    max_body_bytes: int = 16 << 20


class SearchRequest(BaseModel):
    """The body of `POST /retrieve`; further keys are ignored, as Search-R1's server does."""

    queries: list[StrictStr]
    topk: int | None = Field(default=None, ge=1)
    return_scores: StrictBool = False


class _Refusal(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def create_app(
    retriever: Retriever,
    *,
    default_top_k: int = DEFAULT_TOP_K,
    limits: ServerLimits | None = None,
    about: Mapping[str, Any] | None = None,
    max_batch_queries: int = 64,
) -> FastAPI:
    """The application; `about` is added to what `/healthz` says.

    One batch of at most `max_batch_queries` is searched at a time; requests that come meanwhile share the next ones,
    and `/healthz` gets its turn between two.
    """
    app = FastAPI(title="posttrain retrieval", openapi_url=None)
    checked = limits or ServerLimits()
    coalescer = Coalescer(retriever.retrieve, max_queries=max_batch_queries, max_running=1)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]  (FastAPI calls it)
        try:
            asked = _parse(await _body(request, checked.max_body_bytes), checked)
            results = await coalescer.submit(asked.queries, asked.topk or default_top_k)
        except _Refusal as refusal:
            return JSONResponse({"detail": refusal.detail}, refusal.status)
        except RetrievalError as error:
            return JSONResponse({"detail": str(error)}, 503)
        return JSONResponse(encode_results(results, return_scores=asked.return_scores))

    @app.get("/healthz")
    async def healthz() -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"status": "ok", **(about or {})})

    return app


def serve(
    index: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    default_top_k: int = DEFAULT_TOP_K,
    limits: ServerLimits | None = None,
    check_hashes: bool = True,
) -> None:
    """Serves a stored index until interrupted; port 0 takes a free one, named in the log.

    Raises `StoredIndexError` when the index is not what its manifest says.
    """
    retriever = load_index(index, check_hashes=check_hashes)
    manifest = read_manifest(Path(index))
    about = {"method": manifest["method"], "passages": manifest["counts"]["passages"]}
    app = create_app(retriever, default_top_k=default_top_k, limits=limits, about=about)
    uvicorn.run(app, host=host, port=port, access_log=False)


async def _body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _Refusal(413, f"the body is longer than {max_bytes} bytes; send fewer queries at once")
    return bytes(body)


def _parse(body: bytes, limits: ServerLimits) -> SearchRequest:
    try:
        asked = SearchRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        status = 400 if first["type"] == "json_invalid" else 422
        raise _Refusal(status, f"{where}: {first['msg']}" if where else first["msg"]) from error
    if len(asked.queries) > limits.max_queries:
        raise _Refusal(422, f"queries: {len(asked.queries)} at once, the limit is {limits.max_queries}")
    longest = max((len(query) for query in asked.queries), default=0)
    if longest > limits.max_query_chars:
        raise _Refusal(422, f"queries: one has {longest} characters, the limit is {limits.max_query_chars}")
    if asked.topk is not None and asked.topk > limits.max_top_k:
        raise _Refusal(422, f"topk: {asked.topk} is over the limit of {limits.max_top_k}")
    return asked
