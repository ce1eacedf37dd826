"""The HTTP retrieval server: Search-R1's `POST /retrieve`, `GET /healthz`, and `GET /metrics` (Prometheus' text).

Needs the extra `serve`. Every refusal is JSON, {"detail": "what was wrong"}: 400 not JSON, 401 no or a wrong token, 413
body too long, 422 wrong shape or over a limit, 503 the retriever behind it failed.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictStr, ValidationError

from posttrain.boundary.local import LOOPBACK, guarded
from posttrain.retrieval.batching import Coalescer
from posttrain.retrieval.protocol import Passage, RetrievalError, Retriever
from posttrain.retrieval.server_metrics import ServerMetrics
from posttrain.retrieval.wire import encode_results

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
except ImportError as error:
    raise ImportError("the retrieval server needs fastapi and uvicorn: pip install 'posttrain[serve]'") from error

DEFAULT_TOP_K = 3  # Search-R1's
_NO_TOKEN = "this server wants its token: Authorization: Bearer ..."
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one request may ask for."""

    max_queries: int = 1024
    max_query_chars: int = 4096
    max_top_k: int = 100
    max_body_bytes: int = 16 << 20


class SearchRequest(BaseModel):
    """The body of `POST /retrieve`; further keys are ignored, as Search-R1's server does. `top_k` is `topk`."""

    queries: list[StrictStr]
    topk: int | None = Field(default=None, ge=1, validation_alias=AliasChoices("topk", "top_k"))
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
    token: str | None = None,
) -> FastAPI:
    """The application; `about` is added to what `/healthz` says.

    One batch of at most `max_batch_queries` is searched at a time; requests that come meanwhile share the next ones.
    With a `token`, `/retrieve` and `/metrics` want it as `Authorization: Bearer TOKEN`; `/healthz` answers everybody.
    """
    app = FastAPI(title="posttrain retrieval", openapi_url=None)
    desk = _Desk(retriever, limits or ServerLimits(), default_top_k, max_batch_queries)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  (FastAPI calls it)
        return await desk.answer(request, token)

    @app.get("/healthz")
    async def healthz() -> Response:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"status": "ok", **(about or {})})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if not _knows(request, token):
            return _refused(_Refusal(401, _NO_TOKEN))
        return PlainTextResponse(desk.metrics.render(), media_type="text/plain; version=0.0.4")

    return app


def serve(app: FastAPI, host: str = "127.0.0.1", port: int = 8000, *, open_to_all: bool = False) -> None:
    """Serves the application until interrupted; port 0 takes a free one, named in the log.

    open_to_all: the application wants no token; then an address other than this machine's own is worth a warning.
    """
    if open_to_all and host not in LOOPBACK:
        _LOG.warning("serving on %s without a token: whoever reaches this machine can search", host)
    uvicorn.run(guarded(app, host, has_token=not open_to_all), host=host, port=port, access_log=False)


class _Desk:
    """Answers requests to /retrieve and counts them."""

    def __init__(self, retriever: Retriever, limits: ServerLimits, default_top_k: int, max_batch_queries: int) -> None:
        self.metrics = ServerMetrics()
        self._retriever = retriever
        self._limits = limits
        self._default_top_k = default_top_k
        self._coalescer = Coalescer(self._search, max_queries=max_batch_queries, max_running=1)

    async def answer(self, request: Request, token: str | None) -> Response:
        started = time.perf_counter()
        try:
            if not _knows(request, token):
                raise _Refusal(401, _NO_TOKEN)
            asked = _parse(await _body(request, self._limits.max_body_bytes), self._limits)
            self.metrics.queries += len(asked.queries)
            results = await self._coalescer.submit(asked.queries, asked.topk or self._default_top_k)
            self.metrics.passages += sum(map(len, results))
            response = Response(
                json.dumps(encode_results(results, return_scores=asked.return_scores), ensure_ascii=False),
                media_type="application/json",
            )
        except _Refusal as refusal:
            response = _refused(refusal)
        except RetrievalError as error:
            response = JSONResponse({"detail": str(error)}, 503)
        self.metrics.requests[response.status_code] += 1
        self.metrics.request_seconds.observe(time.perf_counter() - started)
        return response

    async def _search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        started = time.perf_counter()
        try:
            return await self._retriever.retrieve(queries, top_k)
        finally:
            self.metrics.search_seconds.observe(time.perf_counter() - started)
            self.metrics.batch_queries.observe(len(queries))


def _knows(request: Request, token: str | None) -> bool:
    given = request.headers.get("authorization", "")
    return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def _refused(refusal: _Refusal) -> Response:
    headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else None
    return JSONResponse({"detail": refusal.detail}, refusal.status, headers)


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
