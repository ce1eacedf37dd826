"""Tools: what a policy may call. The contract is in `protocol`; `tool` makes one of a function.

What needs pydantic is loaded when it is first asked for: envs need the contract only, and load fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from posttrain.tools.protocol import Tool, ToolError, ToolResult, ToolSpec

if TYPE_CHECKING:
    from posttrain.tools.function import FunctionTool, function_tool, tool
    from posttrain.tools.schema import ToolDefinitionError

__all__ = [
    "FunctionTool",
    "Tool",
    "ToolDefinitionError",
    "ToolError",
    "ToolResult",
    "ToolSpec",
    "function_tool",
    "tool",
]
_HOMES = {
    "FunctionTool": "posttrain.tools.function",
    "ToolDefinitionError": "posttrain.tools.schema",
    "function_tool": "posttrain.tools.function",
    "tool": "posttrain.tools.function",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
