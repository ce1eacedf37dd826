"""The tools of a run: those of the config and of its MCP servers, inside their guards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from posttrain.config import ConfigError, EnvConfig, RLConfig, unknown_name
from posttrain.location import locate
from posttrain.tools.config import make_tools
from posttrain.tools.function import FunctionTool
from posttrain.tools.guards import Counted, Guard
from posttrain.tools.mcp.config import McpServerConfig
from posttrain.tools.protocol import Tool
from posttrain.tools.schema import ToolDefinitionError

_OPEN_MCP = "posttrain.tools.mcp.opening:open_guarded_mcp_tools"  # needs the extra `tools`: loaded when asked for


def open_tools(config: RLConfig) -> dict[str, Counted]:
    """Name -> tool. Raises ConfigError for what cannot be had."""
    try:
        tools = make_tools(config.tools)
    except ToolDefinitionError as error:
        raise ConfigError([f"tools: {error}"]) from error
    return tools | {tool.spec.name: tool for tool in _served(config.mcp, tools)}


def warm(tools: Mapping[str, Counted]) -> None:
    """Starts worker processes now, so that they are there when the policy calls."""
    for tool in tools.values():
        inner: Tool = tool
        while isinstance(inner, Guard):
            inner = inner.tool
        if isinstance(inner, FunctionTool):
            inner.warm()


def tools_for(env: EnvConfig, name: str, tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """Those that the option `tools` of an env names; all when it names none."""
    wanted = env.options.get("tools")
    if wanted is None:
        return dict(tools)
    for tool in wanted:
        if tool not in tools:
            raise ConfigError([unknown_name(f"tool in the options of env {name}", tool, tools)])
    return {tool: tools[tool] for tool in wanted}


def _served(servers: Sequence[McpServerConfig], taken: Iterable[str]) -> list[Counted]:
    if not servers:
        return []
    try:
        return asyncio.run(locate(_OPEN_MCP)(servers, taken))
    except Exception as error:  # a missing extra, a server that does not start, a tool that it lacks
        raise ConfigError([f"mcp: {error}"]) from error
