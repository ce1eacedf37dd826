"""The endpoint as an ASGI application: OpenAI's paths, its error JSON, its stream. Standard library only.

Who asks is told by the key, in `Authorization: Bearer KEY` or in the path: `/runs/KEY/v1/...`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import unquote

from posttrain.boundary.foreign_json import read_json
from posttrain.boundary.local import Message
from posttrain.endpoint.answer import Delta, Tell
from posttrain.endpoint.replies import Chunks, completion
from posttrain.endpoint.wire import CompletionRequest, Refusal, Reply, parse_chat, parse_text

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
MAX_BODY_BYTES = 32 << 20
QUIET_SECONDS = 5.0  # a stream with nothing to say shows this often that it is alive
MODEL = "policy"


class Respondent(Protocol):
    """Who answers the requests that come with one key."""

    async def answer(self, request: CompletionRequest, tell: Tell | None = None) -> Reply:
        """Raises Refusal. tell: gets the answer piece by piece, while it is sampled."""
        ...

    def post(self, body: Any) -> None:
        """What came to /v1/reward; raises Refusal."""
        ...


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class App:
    """An ASGI application. find: the key of a request (None: it has none) -> who answers it; None = nobody."""

    def __init__(self, find: Callable[[str | None], Respondent | None]) -> None:
        self._find = find

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._serve(scope, receive, send)
        except Refusal as refusal:
            await _send_json(send, refusal.status, refusal.as_json())
        except ClientGone:
            return

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        key, path = _address(scope)
        method = scope["method"]
        if path == "/healthz":
            return await _send_json(send, 200, {"status": "ok"})
        respondent = self._find(key)
        if respondent is None:
            reason = "no API key was sent" if key is None else "this API key is of no open run: it may be over"
            raise Refusal(reason, status=401, code="invalid_api_key")
        if path == "/models" or path.startswith("/models/"):
            return await _send_json(send, 200, _models(path))
        parse = {"/chat/completions": parse_chat, "/completions": parse_text, "/reward": None}.get(path, _nothing)
        if parse is _nothing:
            raise Refusal(f"there is no {method} {scope['path']} here", status=404)
        if method != "POST":
            raise Refusal(f"{path} wants POST, got {method}", status=405)
        body = _json(await _body(receive))
        if parse is None:
            respondent.post(body)
            return await _send_json(send, 200, {"status": "ok"})
        return await _answer(respondent, parse(body), receive, send)


def _nothing(body: Any) -> CompletionRequest:
    raise AssertionError


async def _answer(respondent: Respondent, request: CompletionRequest, receive: Receive, send: Send) -> None:
    """A client that leaves ends the sampling."""
    told: deque[Delta] = deque()
    news = asyncio.Event()

    def tell(delta: Delta) -> None:
        told.append(delta)
        news.set()

    job = asyncio.ensure_future(respondent.answer(request, tell if request.stream else None))
    gone = asyncio.ensure_future(_disconnected(receive))
    for end in (job, gone):
        end.add_done_callback(lambda _: news.set())
    try:
        if request.stream:
            return await _Stream(request, send).send_all(job, gone, told, news)
        await news.wait()
        if not job.done():
            raise ClientGone
        return await _send_json(send, 200, completion(request, job.result(), int(time.time())))
    finally:
        job.cancel()
        gone.cancel()


class _Stream:
    """Server-sent events. What is refused at once is refused by the status; what fails later, inside the stream."""

    def __init__(self, request: CompletionRequest, send: Send) -> None:
        self._send = send
        self._chunks = Chunks(request, secrets.token_hex(8), int(time.time()))
        self._started = False

    async def send_all(
        self, job: asyncio.Future[Reply], gone: asyncio.Future[None], told: deque[Delta], news: asyncio.Event
    ) -> None:
        """Raises Refusal before anything is sent, and ClientGone."""
        while not job.done():
            try:
                await asyncio.wait_for(news.wait(), QUIET_SECONDS)
            except TimeoutError:
                await self._say(b": waiting for the policy\n\n")
            if gone.done() and not job.done():
                raise ClientGone
            news.clear()
            while told:
                await self._say(*map(_event, self._chunks.of(told.popleft())))
        try:
            reply = job.result()
        except Refusal as refusal:
            if not self._started:
                raise
            return await _send_body(self._send, _event(refusal.as_json()), more=False)
        await self._say(*map(_event, self._chunks.end(reply)))
        return await _send_body(self._send, b"data: [DONE]\n\n", more=False)

    async def _say(self, *events: bytes) -> None:
        if not self._started:
            await _send_head(self._send, 200, b"text/event-stream")
            self._started = True
        await _send_body(self._send, b"".join(events), more=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _address(scope: Message) -> tuple[str | None, str]:
    """The key, and the path behind `/v1`."""
    path, key = scope["path"], None
    if path.startswith("/runs/"):
        key, _, rest = path.removeprefix("/runs/").partition("/")
        key, path = unquote(key), f"/{rest}"
    else:
        header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        kind, _, given = header.partition(" ")
        key = given.strip() if kind.lower() == "bearer" and given.strip() else None
    return key, "/" + path.removeprefix("/v1").strip("/")


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise Refusal(f"the body is longer than {MAX_BODY_BYTES} bytes", status=413)
        if not message.get("more_body"):
            return bytes(body)


def _json(body: bytes) -> Any:
    try:
        return read_json(body)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from error


def _models(path: str) -> dict[str, Any]:
    name = path.removeprefix("/models").strip("/")
    card = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "posttrain"}
    return card if name else {"object": "list", "data": [card]}


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


async def _send_json(send: Send, status: int, data: Any) -> None:
    body = json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")
    await _send_head(send, status, b"application/json", (b"content-length", str(len(body)).encode()))
    await _send_body(send, body, more=False)


async def _send_head(send: Send, status: int, content_type: bytes, *further: tuple[bytes, bytes]) -> None:
    """x-should-retry: clients of OpenAI's own make ask again otherwise, which would be another sample."""
    headers = [(b"content-type", content_type), (b"x-should-retry", b"false"), *further]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
