"""Real servers on 127.0.0.1: uvicorn with our app, and raw TCP servers that misbehave as told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import uvicorn
from fastapi import FastAPI

from posttrain.retrieval import Passage

PEOPLE = [
    Passage("p0", '"Ada Lovelace"\nAda Lovelace wrote the first program for the analytical engine of Charles Babbage.'),
    Passage("p1", '"Charles Babbage"\nCharles Babbage designed the analytical engine in London.'),
    Passage("p2", '"Grace Hopper"\nGrace Hopper wrote the first compiler at Harvard.'),
    Passage("p3", '"London"\nLondon is the capital of England.'),
]


@contextmanager
def app_server(app: FastAPI) -> Iterator[str]:
    """Runs the application under uvicorn in a thread and gives its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "uvicorn did not start"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


Reply = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    """Answers the n-th request with `replies[n]`, later ones with the last; keeps the bodies and counts connections."""

    replies: list[Reply]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    open_connections: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    length = int(head.split("content-length: ")[1].split("\r\n")[0])
                    body = json.loads(await reader.readexactly(length))
                    self.requests.append(body)
                    await self.replies[min(len(self.requests), len(self.replies)) - 1](body, writer)
                    if writer.is_closing():
                        break
        finally:
            self.open_connections -= 1
            writer.close()


@contextmanager
def raw_server(*replies: Reply) -> Iterator[RawServer]:
    """The server in a thread with its own event loop, so that clients may use and close theirs."""
    server = RawServer(list(replies))
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/retrieve"
        started.set()
        await stop.wait()
        listener.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@cache
def unused_url() -> str:
    """An address where nobody listens, nor can while these tests run."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    held.detach()
    return f"http://127.0.0.1:{port}/retrieve"


def answer(
    body: bytes | str,
    *,
    status: str = "200 OK",
    headers: str = "content-type: application/json\r\n",
    promise: int | None = None,
) -> Reply:
    """Sends `body`; `promise` is the content-length when it differs from the truth (then the line is cut)."""
    data = body.encode() if isinstance(body, str) else body
    length = len(data) if promise is None else promise

    async def reply(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n".encode() + data)
        await writer.drain()
        if promise is not None:
            writer.close()

    return reply


async def found(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """A healthy Search-R1 server: the contents repeat the query."""
    documents = [
        [
            {"document": {"id": f"d{i}", "contents": f'"T"\n{query} {i}'}, "score": 1.0 - i}
            for i in range(request["topk"])
        ]
        for query in request["queries"]
    ]
    await answer(json.dumps({"result": documents}))(request, writer)


async def hang(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Takes the request and says nothing."""
    await asyncio.sleep(60)


async def drip(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Sends a byte now and then: no read ever takes long, the answer never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    for _ in range(1000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def hang_up(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Closes the line without a word."""
    writer.close()
