"""JSON of others: a server's answer, a request, what a program in the sandbox printed. Standard library only."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes | bytearray) -> Any:
    """The value. ValueError for whatever is wrong with the text, also for one that is nested too deeply: by itself
    `json.loads` raises RecursionError there, and whoever expects no more than ValueError falls over."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
