"""The tools of MCP servers as tools of a run: `open_mcp_tools(configs)`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mcp_types
from fastmcp.client.client import CallToolResult

from posttrain.boundary.redaction import redacted
from posttrain.location import did_you_mean
from posttrain.task import EpisodeInvalid
from posttrain.tools.mcp.config import McpServerConfig
from posttrain.tools.mcp.connection import McpConnection
from posttrain.tools.protocol import FAILURES, ToolError, ToolResult, ToolSpec
from posttrain.trajectory import CallStatus

OURS = "posttrain"  # the key under which our own server sends what the protocol has no place for
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_NAME = 64


class McpToolError(Exception):
    """A server does not offer what the config asks for."""


class SharedConnection:
    """Closes the connection with the last tool of the server; a tool that is used again opens it."""

    def __init__(self, connection: McpConnection) -> None:
        self.connection = connection
        self._open = 0

    def taken(self) -> None:
        self._open += 1

    async def release(self) -> None:
        self._open -= 1
        if self._open == 0:
            await self.connection.close()


class McpTool:
    """One tool of a server, called `spec.name` here and `remote_name` there."""

    def __init__(self, shared: SharedConnection, offered: mcp_types.Tool, name: str) -> None:
        self.remote_name = offered.name
        self.spec = ToolSpec(
            name=name,
            description=(offered.description or offered.title or offered.name).strip(),
            parameters=_parameters(offered.input_schema),
        )
        self.config = shared.connection.config
        self._shared = shared
        self._holds = True
        shared.taken()

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        if not self._holds:
            self._holds = True
            self._shared.taken()
        answer = await self._shared.connection.call(self.remote_name, arguments)
        if answer.is_error:
            raise _error_of(answer)
        return _result_of(answer)

    async def close(self) -> None:
        if self._holds:
            self._holds = False
            await self._shared.release()


async def open_mcp_tools(configs: Sequence[McpServerConfig], taken: Iterable[str] = ()) -> list[McpTool]:
    """Connects to all servers at once and gives their tools, in order.

    A name that two servers offer, or that is in `taken`, gets the server's name before it: `time_convert`.
    Raises ToolError when a server cannot be started, McpToolError when it lacks a tool that its config names; then
    nothing is left running.
    """
    connections = [McpConnection(config) for config in configs]
    try:
        offered = await asyncio.gather(*map(_offered, connections))
        names = _names(offered, taken)
    except BaseException:
        await asyncio.gather(*(connection.close() for connection in connections))
        raise
    opened: list[McpTool] = []
    for connection, (_, tools) in zip(connections, offered, strict=True):
        shared = SharedConnection(connection)
        opened += [McpTool(shared, tool, names[id(tool)]) for tool in tools]
        if not tools:
            await connection.close()
    return opened


async def _offered(connection: McpConnection) -> tuple[str, list[mcp_types.Tool]]:
    config = connection.config
    tools = await connection.tools()
    server = _NOT_IN_NAMES.sub("_", config.name or await connection.server_name()).strip("_") or "mcp"
    if config.tools is None:
        return server, tools
    known = {tool.name: tool for tool in tools}
    missing = [name for name in config.tools if name not in known]
    if missing:
        near = did_you_mean(missing[0], known)
        raise McpToolError(f"the MCP server {config.shown} has no tool {missing[0]!r}.{near} It has {', '.join(known)}")
    return server, [known[name] for name in config.tools]


def _names(offered: Sequence[tuple[str, list[mcp_types.Tool]]], taken: Iterable[str]) -> dict[int, str]:
    """id(tool) -> a name that is valid in every call syntax and unique."""
    plain = [_clean(tool.name) for _, tools in offered for tool in tools]
    clashing = {name for name in plain if plain.count(name) > 1} | set(taken)
    names: dict[int, str] = {}
    used = set(taken)
    for server, tools in offered:
        for tool in tools:
            name = _clean(tool.name)
            name = _clean(f"{server}_{name}") if name in clashing else name
            number = 2
            while name in used:  # two servers of the same name
                name, number = _clean(f"{server}{number}_{tool.name}"), number + 1
            names[id(tool)] = name
            used.add(name)
    return names


def _clean(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:_MAX_NAME]


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The server's schema of an object; titles that only repeat names cost tokens and are left out."""
    cleaned = _without_titles(dict(schema))
    return {"type": "object", "properties": {}, **cleaned}


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    for key in ("properties", "$defs"):
        if isinstance(kept.get(key), dict):
            kept[key] = {
                name: _without_titles(value) if isinstance(value, dict) else value for name, value in kept[key].items()
            }
    return kept


def _result_of(answer: CallToolResult) -> ToolResult:
    ours = _ours(answer)
    data = answer.structured_content
    if ours is not None and isinstance(data, dict):
        data = data.get("data")
    more = ours or {}
    return ToolResult(
        text=text_of(answer.content),
        data=data,
        cost=more.get("cost") or {},
        cached=bool(more.get("cached")),
        attempts=_count(more, "attempts", least=1),
        bytes_cut=_count(more, "bytes_cut", least=0),
    )


def _error_of(answer: CallToolResult) -> ToolError | EpisodeInvalid:
    ours = _ours(answer) or {}
    if isinstance(ours.get("invalid"), str) and ours["invalid"].strip():
        return EpisodeInvalid(ours["invalid"], redacted(text_of(answer.content)))
    status = ours.get("status")
    known = CallStatus(status) if status in set(FAILURES) else CallStatus.FAILED
    return ToolError(
        known,
        redacted(text_of(answer.content)),
        transient=bool(ours.get("transient")),
        retry_after=ours.get("retry_after"),
        attempts=_count(ours, "attempts", least=1),
    )


def _count(more: Mapping[str, Any], key: str, *, least: int) -> int:
    """What a server of another make says under our key is not believed."""
    value = more.get(key)
    return max(least, value) if isinstance(value, int) else least


def _ours(answer: CallToolResult) -> dict[str, Any] | None:
    found = (answer.meta or {}).get(OURS)
    return found if isinstance(found, dict) else None


def text_of(content: Sequence[Any]) -> str:
    """The text of content blocks; what is no text is named in brackets."""
    return "\n".join(map(_block_text, content))


def _block_text(block: Any) -> str:
    match block:
        case mcp_types.TextContent():
            return block.text
        case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents() as resource):
            return resource.text
        case mcp_types.ResourceLink():
            return f"[{block.name}: {block.uri}]"
        case mcp_types.ImageContent() | mcp_types.AudioContent():
            return f"[{block.mime_type}, {len(block.data) * 3 // 4} bytes]"
        case _:
            return f"[{block.type}]"
