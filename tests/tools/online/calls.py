"""Calls a tool as a run would, and closes it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from posttrain.tools.online.config import OnlineToolConfig, make_online_tool
from posttrain.tools.protocol import Tool, ToolError, ToolResult


def tool(use: str, **options: Any) -> Tool:
    return make_online_tool(OnlineToolConfig(use=use, options=options))


def call(made: Tool, **arguments: Any) -> ToolResult:
    async def run() -> ToolResult:
        try:
            return await made.call(arguments)
        finally:
            await made.close()

    return asyncio.run(run())


def failure(made: Tool, **arguments: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        call(made, **arguments)
    return caught.value
