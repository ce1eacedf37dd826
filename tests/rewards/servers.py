"""Real HTTP servers on 127.0.0.1 that score as they are told, and keep what they were asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What is sent back: JSON unless `raw` is given; `promise` is a false Content-Length (then the line is cut)."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    seconds: float = 0.0
    promise: int | None = None


Answer = Callable[[dict[str, Any]], Reply]


@dataclass
class Stub:
    """The server's address and all requests in the order in which they came."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def stub(*answers: Answer | Reply) -> Iterator[Stub]:
    """Answers the n-th request with the n-th of `answers`, further ones with the last."""
    lock = threading.Lock()
    running = 0
    found = Stub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal running
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                found.requests.append(body)
                found.headers.append(dict(self.headers))
                answer = answers[min(len(found.requests), len(answers)) - 1]
                running += 1
                found.most_at_once = max(found.most_at_once, running)
            reply = answer if isinstance(answer, Reply) else answer(body)
            time.sleep(reply.seconds)
            with lock:
                running -= 1
            data = json.dumps(reply.body).encode() if reply.raw is None else reply.raw
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) if reply.promise is None else reply.promise))
                self.end_headers()
                self.wfile.write(data)
                if reply.promise is not None:
                    self.close_connection = True
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client gave up

        def log_message(self, format: str, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: str | None, **more: Any) -> Reply:
    """A chat completion of an OpenAI-compatible server."""
    message = {"role": "assistant", "content": text}
    return Reply({"id": "c", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}, **more)


def says(read: Callable[[str], str]) -> Answer:
    """A judge that looks at the question put to it."""
    return lambda body: completion(read(body["messages"][-1]["content"]))
