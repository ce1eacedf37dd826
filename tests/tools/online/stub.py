"""A real HTTP server on 127.0.0.1 that replays recorded answers and misbehaves as told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def form(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(self.body.decode()).items()}


@dataclass(frozen=True)
class Reply:
    body: bytes | str | dict[str, Any] | list[Any] = b""
    status: int = 200
    type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    promise: int | None = None  # content-length, where it is a lie
    wait: float = 0.0  # seconds before the answer

    @property
    def data(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


Route = Callable[[Request], Reply]


@dataclass
class Stub:
    """`routes` maps paths to answers; the last request counts."""

    routes: dict[str, Route] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    drips: int = 0

    @property
    def place(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def last(self) -> Request:
        return self.requests[-1]

    def on(self, path: str, *replies: Reply) -> None:
        """The n-th request to `path` gets the n-th reply, later ones the last."""
        left = list(replies)
        self.routes[path] = lambda _: left.pop(0) if len(left) > 1 else left[0]


def handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def answer(self) -> None:
            split = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            query = {key: values[0] for key, values in parse_qs(split.query, keep_blank_values=True).items()}
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = Request(self.command, split.path, query, headers, body)
            stub.requests.append(request)
            route = stub.routes.get(split.path, lambda _: Reply({"error": "no such path"}, status=404))
            with suppress(ConnectionError):
                self.send(route(request))

        def send(self, reply: Reply) -> None:
            if reply.wait:
                time.sleep(reply.wait)
            data = reply.data
            self.send_response(reply.status)
            length = len(data) if reply.promise is None else reply.promise
            for key, value in {"content-type": reply.type, "content-length": str(length), **reply.headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)
            if reply.promise is not None:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler


@contextmanager
def stub_server() -> Iterator[Stub]:
    stub = Stub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stub))
    server.daemon_threads = True
    server.block_on_close = False
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
