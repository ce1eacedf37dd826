"""Serves a reward model as OpenRLHF does: POST /get_reward; the reward `http` is its client."""

from __future__ import annotations

import hmac
import logging
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from posttrain.boundary.foreign_json import read_json
from posttrain.boundary.local import LOOPBACK, guarded
from posttrain.deadline import in_thread
from posttrain.rewards.model import ModelReward
from posttrain.task import Score

MAX_BODY_BYTES = 64 << 20
MAX_QUERIES = 4096
_LOG = logging.getLogger("posttrain")


def create_app(model: ModelReward, *, token: str | None = None) -> FastAPI:
    """`{"query": [prompt + response]}` -> `{"rewards": [...], "scores": [...]}`; null for what cannot be scored.

    Texts are encoded as they are: the client has applied a template, or none. With a `token`, requests need it as
    `Authorization: Bearer TOKEN`.
    """
    app = FastAPI(title="posttrain reward model", openapi_url=None)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  (FastAPI calls it)
        if token is not None and not _knows(request, token):
            return _refused(401, "Authorization: Bearer TOKEN is missing or wrong")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                return _refused(413, f"more than {MAX_BODY_BYTES} bytes")
        texts = _queries(bytes(body))
        if isinstance(texts, str):
            return _refused(400, texts)
        outcomes = await in_thread(lambda: model.score_texts(texts))
        values = [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes]
        return JSONResponse({"rewards": values, "scores": values})

    @app.get("/healthz")
    async def healthz() -> Response:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"status": "ok", "model": model.config.path})

    return app


def serve(app: FastAPI, host: str, port: int, *, open_to_all: bool) -> None:
    """Serves until interrupted; port 0 takes a free one, named in the log."""
    if open_to_all and host not in LOOPBACK:
        _LOG.warning("serving on %s without a token: whoever reaches this machine can use the model", host)
    uvicorn.run(guarded(app, host, has_token=not open_to_all), host=host, port=port, access_log=False)


def _queries(body: bytes) -> list[str] | str:
    """The texts, or what is wrong with the request."""
    try:
        value: Any = read_json(body)
    except ValueError as error:
        return f"no JSON: {error}"
    texts = value.get("query") if isinstance(value, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return 'expected {"query": [text, ...]}'
    return texts if len(texts) <= MAX_QUERIES else f"more than {MAX_QUERIES} texts"


def _knows(request: Request, token: str) -> bool:
    return hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode())


def _refused(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status)
