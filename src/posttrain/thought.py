"""What of a policy's text is thought: all between `<think>` and `</think>`. Standard library only.

A thought that is never closed runs to the end. A `</think>` that closes nothing closes a thought that the prompt
opened: all before it is thought.
"""

from __future__ import annotations

import re

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_OPENED_BY_PROMPT = rf"\A(?:[^<]++|<(?!/?think>))*+{THINK_CLOSE}"
THOUGHT = rf"{_OPENED_BY_PROMPT}|{THINK_OPEN}.*?(?:{THINK_CLOSE}|\Z)"  # a pattern for re.DOTALL
_THOUGHT = re.compile(THOUGHT, re.DOTALL)


def outside_thoughts(text: str) -> str:
    return _THOUGHT.sub("", text)


def ends_in_thought(text: str) -> bool:
    """Whether a thought is still open at the end of a text, given its opening tag if the prompt held that."""
    return text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)
