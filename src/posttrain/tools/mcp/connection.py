"""A connection to one MCP server that comes back when the server has died.

It lives on an event loop of its own, in a thread: runs use several event loops one after the other, and a server must
not be started anew for each. A child is started on a leash (`leash`), so that nothing of it is left, however we end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import mcp_types
from fastmcp import Client
from fastmcp.client.client import CallToolResult
from fastmcp.client.transports import ClientTransport, StdioTransport, StreamableHttpTransport
from fastmcp.exceptions import FastMCPError
from mcp.shared.exceptions import MCPError

from posttrain.boundary.leash import on_leash, sweep
from posttrain.boundary.processes import TOKEN
from posttrain.boundary.redaction import redacted
from posttrain.deadline import in_thread
from posttrain.tools.mcp.config import McpServerConfig
from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

T = TypeVar("T")
MAX_BACKOFF_SECONDS = 8.0
CALM_SECONDS = 60.0  # without a failure, after which restarts are counted from the beginning
PING_SECONDS = 5.0
CLOSE_SECONDS = 10.0  # the protocol's own steps of ending a child take at most seven
_BROKEN = (RuntimeError, OSError, EOFError, httpx2.HTTPError, FastMCPError)  # what a lost connection may raise

log = logging.getLogger("posttrain")


class Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="posttrain-mcp", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaited from any event loop; cancelling it cancels the work there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def run_blocking(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class McpConnection:
    """`tools` and `call` from any event loop, many at once. Both raise ToolError. Opened when first used, and again
    when used after a `close`."""

    def __init__(self, config: McpServerConfig) -> None:
        self.config = config
        self._opening = threading.Lock()
        self._open: _Open | None = None

    @property
    def restarts(self) -> int:
        """Of a server that had been up, since it was opened."""
        return 0 if self._open is None else self._open.link.restarts

    async def tools(self) -> list[mcp_types.Tool]:
        """What the server offers, started or connected to if it is not."""
        opened = self._opened()
        return await opened.loop.run(opened.link.tools())

    async def server_name(self) -> str:
        opened = self._opened()
        return await opened.loop.run(opened.link.server_name())

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Raises ToolError: TIMEOUT past the deadline, BAD_ARGUMENTS where the protocol refuses them, FAILED with
        `transient` when the server was lost (the next call finds it again)."""
        opened = self._opened()
        return await opened.loop.run(opened.link.call(tool, dict(arguments)))

    async def close(self) -> None:
        """Ends the connection and the child; may be called twice."""
        opened, self._open = self._open, None
        if opened is not None:
            await in_thread(opened.end)

    def _opened(self) -> _Open:
        with self._opening:
            if self._open is None:
                loop, link = Loop(), _Link(self.config)
                # the finalizer also runs at the end of the program, when nobody has closed us
                self._open = _Open(loop, link, weakref.finalize(self, _end, loop, link))
            return self._open


@dataclass(frozen=True, slots=True)
class _Open:
    loop: Loop
    link: _Link
    end: Callable[[], Any]


def _end(loop: Loop, link: _Link) -> None:
    try:
        loop.run_blocking(link.close(), CLOSE_SECONDS)
    except TimeoutError:
        log.warning("the MCP server %s did not end in time and is killed", link.config.shown)
    finally:
        sweep(link.token)
        loop.stop()


class _Link:
    """The state of a connection; everything here runs on its own loop."""

    def __init__(self, config: McpServerConfig) -> None:
        self.config = config
        self.token = secrets.token_hex(8) if config.command is not None else None
        self.restarts = 0
        self._client: Client[Any] | None = None
        self._lock: asyncio.Lock | None = None
        self._was_up = False
        self._failures = 0  # in a row
        self._failed_at = 0.0
        self._errors: Path | None = None  # what the child wrote to stderr

    async def tools(self) -> list[mcp_types.Tool]:
        client = await self._connected()
        return await self._guarded(client, client.list_tools(), self.config.start_seconds)

    async def server_name(self) -> str:
        client = await self._connected()
        info = client.initialize_result
        return info.server_info.name if info is not None else "mcp"

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        client = await self._connected()
        return await self._guarded(client, client.call_tool(tool, arguments, raise_on_error=False))

    async def close(self) -> None:
        async with self._exclusive():
            await self._drop()

    async def _guarded(self, client: Client[Any], work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        seconds = self.config.call_seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            await self._look_after(client)
            said = f"{self.config.label} gave no answer within {seconds:g} s"
            raise ToolError(CallStatus.TIMEOUT, said, transient=True) from None
        except MCPError as error:
            if _is_end(error):
                raise await self._lost(client, error) from error
            status = CallStatus.BAD_ARGUMENTS if error.code == mcp_types.INVALID_PARAMS else CallStatus.FAILED
            raise ToolError(status, redacted(f"{self.config.label}: {error.message}")) from error
        except _BROKEN as error:
            raise await self._lost(client, error) from error

    async def _look_after(self, client: Client[Any]) -> None:
        """A server that does not even answer a ping is given up: it hangs."""
        try:
            async with asyncio.timeout(min(PING_SECONDS, self.config.call_seconds)):
                await client.ping()
        except MCPError as error:
            if _is_end(error):
                await self._give_up(client)
        except (TimeoutError, *_BROKEN):
            log.warning("the MCP server %s answers no more; it will be started anew", self.config.shown)
            await self._give_up(client)

    async def _lost(self, client: Client[Any], error: BaseException) -> ToolError:
        await self._give_up(client)
        return self._failed(f"{self.config.label} ended during the call", error)

    def _failed(self, said: str, error: BaseException | None, *, transient: bool = True) -> ToolError:
        """The policy reads what happened; the operator, in the log and in a note, also what the server said."""
        failure = ToolError(CallStatus.FAILED, said, transient=transient)
        reason = f" ({error})" if error is not None else ""
        failure.add_note(redacted(f"the MCP server {self.config.shown}{reason}{self._last_words()}"))
        log.warning("%s: %s", said, failure.__notes__[0])
        return failure

    async def _give_up(self, client: Client[Any]) -> None:
        """Calls that fail together count as one failure."""
        async with self._exclusive():
            if self._client is client:
                self._count_failure()
                await self._drop()

    def _count_failure(self) -> None:
        now = time.monotonic()
        self._failures = 1 if now - self._failed_at > CALM_SECONDS else self._failures + 1
        self._failed_at = now

    async def _connected(self) -> Client[Any]:
        if self._client is not None and self._client.is_connected():
            return self._client
        async with self._exclusive():
            if self._client is not None and self._client.is_connected():
                return self._client
            await self._drop()
            await self._wait_for_turn()
            self._client = await self._start()
            self.restarts += self._was_up
            self._was_up = True
            return self._client

    async def _wait_for_turn(self) -> None:
        """Raises ToolError once the restarts are used up; they come back after a while without a failure."""
        if self._failures and time.monotonic() - self._failed_at > CALM_SECONDS:
            self._failures = 0
        if self._failures > self.config.max_restarts:
            said = f"{self.config.label} failed {self._failures} times in a row and is not started again"
            raise self._failed(said, None, transient=False)
        if self._failures > 1:
            await asyncio.sleep(min(self.config.backoff_seconds * 2 ** (self._failures - 2), MAX_BACKOFF_SECONDS))

    async def _start(self) -> Client[Any]:
        client: Client[Any] = Client(self._transport(), timeout=None, init_timeout=self.config.start_seconds)
        try:
            async with asyncio.timeout(self.config.start_seconds):
                await client.__aenter__()
        except (TimeoutError, MCPError, *_BROKEN) as error:
            self._count_failure()
            with contextlib.suppress(MCPError, *_BROKEN):
                await client.close()
            sweep(self.token)
            raise self._failed(f"{self.config.label} did not start", error) from error
        return client

    def _transport(self) -> ClientTransport:
        config = self.config
        if config.url is not None:
            token = config.token()
            return StreamableHttpTransport(
                config.address(), headers={"Authorization": f"Bearer {token}"} if token else None
            )
        assert config.command is not None, "a server has a url or a command"
        environment = {"LANG": "C.UTF-8", **config.child_environment(), TOKEN: self.token or ""}
        program, *arguments = on_leash(config.command, *config.args)
        return StdioTransport(
            program,
            arguments,
            env=environment,
            cwd=None if config.cwd is None else str(config.cwd),
            keep_alive=False,
            log_file=self._error_file(),
        )

    def _error_file(self) -> Path:
        if self.config.log is not None:
            self.config.log.parent.mkdir(parents=True, exist_ok=True)
            self._errors = self.config.log
        elif self._errors is None:
            folder = Path(tempfile.mkdtemp(prefix="posttrain-mcp-"))
            weakref.finalize(self, _remove, folder)
            self._errors = folder / "stderr.txt"
        else:
            self._errors.unlink(missing_ok=True)
        return self._errors

    def _last_words(self, chars: int = 300) -> str:
        """The end of what the child wrote to stderr."""
        if self._errors is None or not self._errors.is_file():
            return ""
        text = self._errors.read_text(encoding="utf-8", errors="replace")[-5000:].strip()
        return f": {' '.join(text.split())[-chars:]}" if text else ""

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(MCPError, *_BROKEN):  # it is being thrown away because it is broken
                await client.__aexit__(None, None, None)
            sweep(self.token)

    def _exclusive(self) -> asyncio.Lock:
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock


def _is_end(error: MCPError) -> bool:
    """The client's own error for a connection that has ended; servers use the same code for errors of theirs."""
    return error.code == mcp_types.CONNECTION_CLOSED and error.message.strip().lower() == "connection closed"


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink(missing_ok=True)
    folder.rmdir()
