"""Specs for the tests, in the form that tools have: name, description, JSON schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.chat.calls import SYNTAXES, Attempt, Signatures, parse
from posttrain.trajectory import StopReason


@dataclass(frozen=True)
class Spec:
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


def spec(tool: str, /, *required: str, **properties: Any) -> Spec:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return Spec(tool, f"Does {tool}.", parameters)


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
SEARCH = spec("search", "query", query=TEXT)
SNIPPETS = spec(
    "snippet_search",
    "query",
    query={"type": "string", "description": "What to look for."},
    limit={"type": "integer", "minimum": 1, "default": 10},
    year=TEXT,
)
BROWSE = spec("browse_webpage", "url", url=TEXT, query=TEXT)
NOW = spec("now")
TOOLS = Signatures([SEARCH, SNIPPETS, BROWSE, NOW])


def calls(text: str, syntax: str, tools: Signatures | None = TOOLS, **options: Any) -> list[Attempt]:
    return parse(text, SYNTAXES[syntax], tools, **options)


def one(text: str, syntax: str, tools: Signatures | None = TOOLS, stop: StopReason | None = None) -> Attempt:
    """The only attempt of a text."""
    (found,) = calls(text, syntax, tools, stop_reason=stop)
    return found
