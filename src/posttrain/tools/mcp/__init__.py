"""MCP both ways: any server's tools in a run, and our tools for any client. Needs the extra `tools` (fastmcp).

`config` is importable without it.
"""
