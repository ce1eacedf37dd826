"""Which tools a server offers: built in, of the user's own code, and those of other MCP servers.

They are those of a run: the same entries, the same limits and caches around them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from posttrain.tools.config import TOOLS, ToolConfig, close_tools, make_tools
from posttrain.tools.guards import Counted
from posttrain.tools.mcp.config import McpServerConfig, read_server_list
from posttrain.tools.mcp.opening import open_guarded_mcp_tools
from posttrain.tools.online.config import BUILT_IN
from posttrain.tools.schema import ToolDefinitionError

log = logging.getLogger("posttrain")


class ToolOffer(BaseModel):
    """`tools`: as the `tools` section of a run. `mcp`: the same as there, or .json files that list servers.

    Without any, all built-in tools that can be had here: that there are keys for, and that this machine can isolate.
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


async def open_tools(offer: ToolOffer) -> list[Counted]:
    """All tools of the offer. Raises ToolDefinitionError and what `open_mcp_tools` raises; then nothing stays open."""
    if not offer.tools and not offer.mcp:
        return built_in_tools(lambda reason: log.warning("left out: %s", reason))
    opened = list(make_tools(offer.tools).values())
    try:
        return opened + await open_guarded_mcp_tools(offer.mcp, [tool.spec.name for tool in opened])
    except BaseException:
        await close_tools(opened)
        raise


def built_in_tools(leave_out: Callable[[str], None]) -> list[Counted]:
    """Every built-in tool that can be had here; `leave_out` is told why another one cannot."""
    opened: list[Counted] = []
    for name in (*BUILT_IN, *TOOLS):
        try:
            opened += make_tools([ToolConfig(name=name)]).values()
        except ToolDefinitionError as reason:
            leave_out(str(reason))
    return opened
