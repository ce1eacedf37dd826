"""Which tools a server offers: built in, of the user's own code, and those of other MCP servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from posttrain.location import is_location, locate
from posttrain.tools.function import FunctionTool, function_tool
from posttrain.tools.mcp.client import open_mcp_tools
from posttrain.tools.mcp.config import McpServerConfig, read_server_list
from posttrain.tools.online.config import BUILT_IN, OnlineToolConfig, make_online_tool
from posttrain.tools.online.service import NotConfigured
from posttrain.tools.protocol import Tool

log = logging.getLogger("posttrain")


class FunctionToolConfig(BaseModel):
    """A function of the user's: "package.module:name" or "path/to/file.py:name"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str
    name: str | None = Field(default=None, min_length=1)  # what the policy calls it; default: the function's name
    options: dict[str, Any] = {}  # arguments that the policy neither sees nor gives

    @model_validator(mode="before")
    @classmethod
    def _from_location(cls, given: Any) -> Any:
        return {"function": given} if isinstance(given, str) else given


def _kind(entry: Any) -> str:
    if isinstance(entry, str):
        return "function" if is_location(entry) else "use"
    return "function" if isinstance(entry, FunctionToolConfig) or "function" in entry else "use"


ToolConfig = Annotated[
    Annotated[OnlineToolConfig, Tag("use")] | Annotated[FunctionToolConfig, Tag("function")], Discriminator(_kind)
]


class ToolOffer(BaseModel):
    """`tools`: names of online tools, locations of functions, or mappings with `use` or `function`.

    `mcp`: URLs, commands, .json files that list servers, or mappings. Without any, all built-in tools that the
    environment has keys for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tools: tuple[ToolConfig, ...] = ()
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
            opened.append(_function(config) if isinstance(config, FunctionToolConfig) else make_online_tool(config))
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
    for name in BUILT_IN:
        try:
            opened.append(make_online_tool(OnlineToolConfig(use=name)))
        except NotConfigured as reason:
            leave_out(str(reason))
    return opened


async def close_tools(tools: list[Tool]) -> None:
    await asyncio.gather(*(tool.close() for tool in tools))


def _function(config: FunctionToolConfig) -> Tool:
    """The function, or a tool or decorated function that stands at the location."""
    found = locate(config.function)
    if isinstance(found, FunctionTool) or not isinstance(found, Tool):
        function = found.function if isinstance(found, FunctionTool) else found
        if isinstance(found, FunctionTool) and not config.options and config.name is None:
            return found
        return function_tool(function, name=config.name, options=config.options, location=config.function)
    return found
