"""Our tools for any MCP client, over streamable HTTP or stdio.

A failed call is an error result whose text says what the policy would read; `_meta.posttrain` carries the rest of a
result (cost, cached, attempts, bytes_cut) or an error (status, transient, retry_after, attempts), so that our own
client loses nothing, and does not try again what was tried here.
"""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from fastmcp import FastMCP
from fastmcp.tools import Tool as FastTool
from fastmcp.tools import ToolResult as FastResult
from pydantic import PrivateAttr
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse

from posttrain.boundary.local import LOOPBACK, Asgi, Message
from posttrain.task import EpisodeInvalid
from posttrain.tools.invoke import as_error
from posttrain.tools.mcp.client import OURS
from posttrain.tools.protocol import Tool, ToolError

HEALTH = "/health"
PATH = "/mcp"

log = logging.getLogger("posttrain")


class ServedTool(FastTool):
    """One of our tools as fastmcp sees it."""

    _tool: Tool = PrivateAttr()

    @classmethod
    def of(cls, tool: Tool) -> ServedTool:
        served = cls(name=tool.spec.name, description=tool.spec.description, parameters=tool.spec.parameters)
        served._tool = tool
        return served

    async def run(self, arguments: dict[str, Any]) -> FastResult:
        try:
            result = await self._tool.call(arguments)
        except Exception as raised:  # a fault of the tool is an error result, never the end of the server
            return _failure(as_error(self.name, raised))
        more = {
            "cost": dict(result.cost),
            "cached": result.cached,
            "attempts": result.attempts,
            "bytes_cut": result.bytes_cut,
        }
        return FastResult(content=result.text, structured_content={"data": result.data}, meta={OURS: more})


def _failure(error: ToolError | EpisodeInvalid) -> FastResult:
    if isinstance(error, EpisodeInvalid):  # the episode cannot be judged: others are told that the call failed
        return FastResult(content=str(error), is_error=True, meta={OURS: {"invalid": error.reason}})
    more = {
        "status": error.status.value,
        "transient": error.transient,
        "retry_after": error.retry_after,
        "attempts": error.attempts,
    }
    return FastResult(content=error.message, is_error=True, meta={OURS: more})


def build_server(tools: Sequence[Tool]) -> FastMCP:
    """A server with these tools. Raises ValueError when two have one name."""
    names = [tool.spec.name for tool in tools]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two tools are called {sorted(twice)[0]!r}; give one of them another name")
    server: FastMCP = FastMCP("posttrain", on_duplicate="error")
    for tool in tools:
        server.add_tool(ServedTool.of(tool))

    @server.custom_route(HEALTH, methods=["GET"])
    async def health(_: Request) -> PlainTextResponse:  # pyright: ignore[reportUnusedFunction]
        return PlainTextResponse("OK")

    return server


async def serve_stdio(server: FastMCP) -> None:
    """Until standard input ends."""
    await server.run_stdio_async(show_banner=False)


async def serve_http(
    server: FastMCP,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    allowed_hosts: Sequence[str] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Until interrupted. Port 0 takes a free one; `on_ready` gets the URL.

    token: a bearer token that every request must carry, /health aside.
    allowed_hosts: further names that clients may call this machine by; on a loopback address others are refused.
    """
    if token is None and host not in LOOPBACK:
        log.warning("the tool server listens on %s without a token: whoever reaches it can use its tools", host)
    guards = [Middleware(BearerToken, token=token)] if token is not None else []
    with _bound(host, port) as listening:
        if on_ready is not None:
            on_ready(f"http://{_in_url(host)}:{listening.getsockname()[1]}{PATH}")
        await server.run_http_async(
            show_banner=False,
            host=host,
            port=listening.getsockname()[1],
            path=PATH,
            middleware=guards,  # type: ignore[arg-type]
            stateless_http=True,
            host_origin_protection="auto",  # off by default: a page in a browser could reach a server on 127.0.0.1
            allowed_hosts=[*allowed_hosts, host] if allowed_hosts else None,
            sockets=[listening],
            uvicorn_config={"access_log": False, "log_level": "warning"},
        )


class BearerToken:
    """Answers 401 unless the request carries the token; compared in constant time."""

    def __init__(self, app: Asgi, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != HEALTH:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                headers = {"www-authenticate": "Bearer"}
                refusal = JSONResponse({"detail": "a valid bearer token is needed"}, 401, headers)
                await refusal(scope, receive, send)  # type: ignore[arg-type]
                return
        await self._app(scope, receive, send)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)  # from now on clients wait instead of being turned away
    except OSError as error:
        listening.close()
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening


class PortTaken(Exception):
    """The address to listen on cannot be had."""


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
