"""The tools of MCP servers inside the guards that their configs ask for: the same in a run and in `serve-tools`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posttrain.tools.config import guarded
from posttrain.tools.guards import Counted
from posttrain.tools.mcp.client import McpTool, open_mcp_tools
from posttrain.tools.mcp.config import McpServerConfig


async def open_guarded_mcp_tools(configs: Sequence[McpServerConfig], taken: Iterable[str] = ()) -> list[Counted]:
    """As `open_mcp_tools`."""
    return [_guarded(tool) for tool in await open_mcp_tools(configs, taken)]


def _guarded(tool: McpTool) -> Counted:
    return guarded(tool, tool.config.limits_of_a_call(), tool.config.cache)
