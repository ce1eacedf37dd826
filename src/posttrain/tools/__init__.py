"""Tools: what a policy may call. The contract is in `protocol`; `tool` makes one of a function."""

from posttrain.tools.function import FunctionTool, function_tool, tool
from posttrain.tools.protocol import Tool, ToolError, ToolResult, ToolSpec
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
