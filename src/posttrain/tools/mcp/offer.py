"""Which tools a server offers: built in, of the user's own code, and those of other MCP servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, field_validator

from posttrain.location import is_location
from posttrain.tools.config import TOOLS, ToolConfig, guarded, make_tool
from posttrain.tools.mcp.client import open_mcp_tools
from posttrain.tools.mcp.config import McpServerConfig, read_server_list
from posttrain.tools.online.config import BUILT_IN, OnlineToolConfig, make_online_tool
from posttrain.tools.online.service import NotConfigured
from posttrain.tools.protocol import Tool
from posttrain.tools.schema import ToolDefinitionError

log = logging.getLogger("posttrain")


def _kind(entry: Any) -> str:
    if isinstance(entry, str):
        return "name" if is_location(entry) or entry in TOOLS else "use"
    return "use" if isinstance(entry, OnlineToolConfig) or (isinstance(entry, dict) and "use" in entry) else "name"


OfferedTool = Annotated[
    Annotated[OnlineToolConfig, Tag("use")] | Annotated[ToolConfig, Tag("name")], Discriminator(_kind)
]


class ToolOffer(BaseModel):
    """`tools`: names of built-in tools, locations of functions, or mappings: with `use` an online tool under another
    name, else entries as in the `tools` section of a run, with their limits and caches.

    `mcp`: URLs, commands, .json files that list servers, or mappings. Without any, all built-in tools that can be had
    here: that there are keys for, and that this machine can isolate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tools: tuple[OfferedTool, ...] = ()
    mcp: tuple[McpServerConfig, ...] = ()

    @field_validator("mcp", mode="before")
    @classmethod
    def _read_lists(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        return [config for entry in given for config in _server_configs(entry)]


def _server_configs(entry: Any) -> list[Any]:
    if isinstance(entry, str) and entry.endswith(".json") and Path(entry).is_file():
        return list(read_server_list(Path(entry)))
    return [entry]


async def open_tools(offer: ToolOffer) -> list[Tool]:
    """All tools of the offer; closes what it has opened when one of them cannot be had."""
    opened: list[Tool] = []
    try:
        for config in offer.tools:
            opened.append(_made(config))
        if not offer.tools and not offer.mcp:
            opened += built_in_tools(lambda reason: log.warning("left out: %s", reason))
        opened += await open_mcp_tools(offer.mcp, [tool.spec.name for tool in opened])
    except BaseException:
        await close_tools(opened)
        raise
    return opened


def built_in_tools(leave_out: Callable[[str], None]) -> list[Tool]:
    """Every built-in tool that can be had here; `leave_out` is told why another one cannot."""
    opened: list[Tool] = []
    for config in (*(OnlineToolConfig(use=name) for name in BUILT_IN), *(ToolConfig(name=name) for name in TOOLS)):
        try:
            opened.append(_made(config))
        except (NotConfigured, ToolDefinitionError) as reason:
            leave_out(str(reason))
    return opened


def _made(config: OnlineToolConfig | ToolConfig) -> Tool:
    if isinstance(config, OnlineToolConfig):
        return make_online_tool(config)
    return guarded(make_tool(config), config)


async def close_tools(tools: list[Tool]) -> None:
    await asyncio.gather(*(tool.close() for tool in tools))
