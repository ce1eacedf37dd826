"""Tools: what a policy may call. The contract is in `protocol`."""

from posttrain.tools.protocol import Tool, ToolError, ToolResult, ToolSpec

__all__ = ["Tool", "ToolError", "ToolResult", "ToolSpec"]
