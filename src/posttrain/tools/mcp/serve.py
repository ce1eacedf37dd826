"""The command behind `posttrain serve-tools`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from posttrain.tools.config import close_tools
from posttrain.tools.mcp.offer import ToolOffer, open_tools
from posttrain.tools.mcp.server import build_server, serve_http, serve_stdio
from posttrain.tools.online.service import NotConfigured


def serve(
    offer: ToolOffer,
    *,
    stdio: bool = False,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str | None = None,
    allowed_hosts: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Serves the tools until interrupted, or until standard input ends. `say` gets lines for people.

    Raises `NotConfigured` when a key, or the token that `token_env` names, is not in the environment.
    """
    token = os.environ.get(token_env, "").strip() if token_env else None
    if token_env and not token:
        raise NotConfigured(f"the server needs a token: set the environment variable {token_env}")

    logging.getLogger("fastmcp").setLevel(logging.WARNING)

    async def run() -> None:
        tools = await open_tools(offer)
        try:
            names = ", ".join(tool.spec.name for tool in tools) or "none"
            server = build_server(tools)
            if stdio:
                await serve_stdio(server)
            else:
                await serve_http(
                    server,
                    host=host,
                    port=port,
                    token=token,
                    allowed_hosts=allowed_hosts,
                    on_ready=lambda url: say(f"serving {len(tools)} tools at {url}: {names}"),
                )
        finally:
            await close_tools(tools)

    asyncio.run(run())
