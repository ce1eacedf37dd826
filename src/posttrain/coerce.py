"""Whatever a tool or a user's env returned -> text. Standard library only."""

from __future__ import annotations

import json


def coerce_text(value: object) -> str:
    """The text form of a foreign value; never raises for str, None, bytes, JSON-like values and exceptions.

    None -> ''; bytes -> UTF-8 with replacement marks; an exception -> 'Type: message'; dict, list, numbers -> JSON.
    Anything else -> str(value). Lone surrogates, which no tokenizer can encode, become replacement marks.
    """
    return _as_text(value).encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, dict | list | tuple | bool | int | float):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
