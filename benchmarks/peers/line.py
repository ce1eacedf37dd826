"""How a contender in its own environment talks to the harness: one JSON object a line, asked on stdin, answered on what
was stdout at the start (everything a library prints goes to stderr)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Line:
    """`ask` blocks for the next question, `answer` replies; None means that there are no more."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ask(self) -> dict[str, Any] | None:
        line = sys.stdin.readline()
        return json.loads(line) if line.strip() else None

    def answer(self, **values: Any) -> None:
        self._out.write(json.dumps(values) + "\n")
