"""Where the endpoint listens: one HTTP server in the event loop of the rollout, open while any episode is.

Needs the extra `serve` (uvicorn).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from posttrain.boundary.local import Asgi
from posttrain.endpoint.app import App, Respondent

KEEP_ALIVE_SECONDS = 3600  # a connection that we close first is an error for the client that was about to use it
SHUTDOWN_SECONDS = 2


class EndpointError(RuntimeError):
    """The endpoint cannot be opened; says what to do."""


@dataclass(frozen=True, slots=True)
class EpisodeAddress:
    """Where an agent reaches its episode. The key is random, and no longer valid when the episode ends."""

    base_url: str
    api_key: str


class Listener:
    """A socket and the HTTP server on it."""

    def __init__(self, app: Asgi, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host, port
        self._server: Any = None
        self.url = ""

    async def start(self) -> None:
        """Raises EndpointError when the address is taken or uvicorn is missing."""
        try:
            import uvicorn
        except ImportError as error:
            raise EndpointError("the endpoint needs uvicorn: pip install 'posttrain[serve]'") from error
        config = uvicorn.Config(
            self._app, log_config=None, access_log=False, lifespan="off", ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )  # fmt: skip
        config.load()
        self._socket = _bound(self._host, self._port)
        name = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        # Not `serve`: it would take over the signals of the process, and wake up ten times a second.
        await self._server.startup(sockets=[self._socket])

    async def stop(self) -> None:
        await self._server.shutdown(sockets=[self._socket])
        self._socket.close()


class Host:
    """Gives episodes their addresses; the listener lives while any episode has one.

    host: 127.0.0.1 unless told otherwise: whoever reaches the port and knows a key can talk to the policy. port 0
    takes a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._address = (host, port)
        self._open: dict[str, Respondent] = {}
        self._listener: Listener | None = None
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changing = asyncio.Lock()
        self._seats: asyncio.Semaphore | None = None

    @asynccontextmanager
    async def seat(self, concurrency: int | None) -> AsyncIterator[None]:
        """Waits until fewer than `concurrency` agents run; None = no limit."""
        if concurrency is None:
            yield
            return
        if self._seats is None:
            self._seats = asyncio.Semaphore(concurrency)
        async with self._seats:
            yield

    @asynccontextmanager
    async def open(self, respondent: Respondent) -> AsyncIterator[EpisodeAddress]:
        """The address of one episode."""
        key = f"pt-{secrets.token_urlsafe(24)}"
        url = await self._enter()
        self._open[key] = respondent
        try:
            yield EpisodeAddress(f"{url}/v1", key)
        finally:
            del self._open[key]
            await self._leave()

    def _bind(self) -> None:
        """A host may be used from one event loop after another; what belongs to a loop is made anew."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._changing, self._seats = loop, asyncio.Lock(), None
            self._listener, self._users = None, 0

    async def _enter(self) -> str:
        self._bind()
        async with self._changing:
            if self._listener is None:
                listener = Listener(App(lambda key: None if key is None else self._open.get(key)), *self._address)
                await listener.start()
                self._listener = listener
            self._users += 1
            return self._listener.url

    async def _leave(self) -> None:
        self._users -= 1
        async with self._changing:
            if self._users == 0 and self._listener is not None:
                listener, self._listener = self._listener, None
                await listener.stop()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise EndpointError(
            f"cannot listen on {host}:{port}: {error}; choose another port, or 0 for a free one"
        ) from error
    bound.setblocking(False)
    return bound
