"""Calling a user's function as a tool: what it returned becomes a ToolResult, what it raised a ToolError.

Used in this process and in workers, so that a function behaves the same in both.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections import Counter
from typing import Any

from posttrain.boundary.redaction import redacted
from posttrain.coerce import coerce_text
from posttrain.task import EpisodeInvalid
from posttrain.tools.protocol import ToolError, ToolResult
from posttrain.trajectory import CallStatus

SHOWN_CHARACTERS = 500  # of what an exception says
SHOWN_TRACEBACKS = 3  # of one tool, in each process; further ones are logged for debugging only

log = logging.getLogger("posttrain")
_shown: Counter[str] = Counter()


def as_result(value: object) -> ToolResult:
    """A ToolResult as it is; anything else as its text, dicts and lists also as `data` when they are plain JSON."""
    if isinstance(value, ToolResult):
        return value
    return ToolResult(text=coerce_text(value), data=_plain(value) if isinstance(value, dict | list | tuple) else None)


def _plain(value: object) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


def as_error(name: str, error: BaseException) -> ToolError | EpisodeInvalid:
    """ToolError and EpisodeInvalid as they are; all else FAILED, transient when a connection or a time-out failed."""
    if isinstance(error, ToolError | EpisodeInvalid):
        return error
    _shown[name] += 1
    level = logging.WARNING if _shown[name] <= SHOWN_TRACEBACKS else logging.DEBUG
    log.log(level, "tool %s raised\n%s", name, redacted("".join(traceback.format_exception(error))))
    words = redacted(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    message = f"{name} failed with {words[:SHOWN_CHARACTERS]}"
    return ToolError(CallStatus.FAILED, message, transient=isinstance(error, ConnectionError | TimeoutError))
