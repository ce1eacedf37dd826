"""What a judge's reply says: JSON among other text, a number on a scale, yes or no. Never a guess."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from posttrain.thought import outside_thoughts

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_STATED = (  # looked for in this order; the last of a kind counts
    re.compile(rf"\[\[\s*{_NUMBER}\s*\]\]"),
    re.compile(rf"(?i)\b(?:score|rating|grade|result)\b\W{{0,6}}{_NUMBER}\b"),
    re.compile(rf"{_NUMBER}\s*/\s*\d+\b"),
)
_ALONE = re.compile(rf"\W*{_NUMBER}\W*")
_VERDICT = re.compile(r"(?i)\b(?:correct|verdict|judge?ment|answer)\b\W{0,6}(yes|no|true|false|correct|incorrect)\b")
_YES = {"yes": True, "true": True, "correct": True, "1": True, "no": False, "false": False, "incorrect": False}


class UnreadableReply(ValueError):
    """The reply holds no verdict of the kind that was asked for."""


def read_json(text: str, *keys: str) -> dict[str, Any]:
    """The last JSON object in the text, outside thoughts, that has all `keys`. Raises UnreadableReply."""
    found = [value for value in json_objects(outside_thoughts(text)) if all(key in value for key in keys)]
    if not found:
        raise UnreadableReply(f"no JSON object with {', '.join(keys) or 'any key'} in {text[:200]!r}")
    return found[-1]


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a text, outermost ones, in order. Code fences and words around them do not matter."""
    decoder, position = json.JSONDecoder(), 0
    for _ in range(1000):  # braces tried: a text of braces must not take quadratic time
        position = text.find("{", position)
        if position < 0:
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position += 1
            continue
        if isinstance(value, dict):
            yield value


def read_number(text: str, low: float, high: float, key: str = "score") -> float:
    """A number between `low` and `high`: under `key` of a JSON object, in [[7]], behind "Rating:", in 7/10, or alone on
    the last line. Raises UnreadableReply where none is, or the one that is lies outside."""
    value = _number_in(outside_thoughts(text), key)
    if value is None or not math.isfinite(value):
        raise UnreadableReply(f"no number in {text[:200]!r}")
    if not low <= value <= high:
        raise UnreadableReply(f"{value:g} is not between {low:g} and {high:g}")
    return value


def read_yes(text: str, key: str = "correct") -> bool:
    """Yes or no: under `key` of a JSON object, behind "correct:" or "verdict:", or the only word of the last line."""
    visible = outside_thoughts(text)
    for value in reversed([found[key] for found in json_objects(visible) if key in found]):
        word = str(value).strip().lower()
        if word in _YES or word == "0":
            return _YES.get(word, False)
    words = [found[1].lower() for found in _VERDICT.finditer(visible)]
    last = (visible.strip().splitlines() or [""])[-1].strip(" .*!\"'").lower()
    words += [last] if last in _YES else []
    if not words:
        raise UnreadableReply(f"neither yes nor no in {text[:200]!r}")
    return _YES[words[-1]]


def _number_in(text: str, key: str) -> float | None:
    for value in reversed([found[key] for found in json_objects(text) if key in found]):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str) and (alone := _ALONE.fullmatch(value)):
            return float(alone[1])
    for pattern in _STATED:
        if found := pattern.findall(text):
            return float(found[-1])
    lines = text.strip().splitlines()
    alone = _ALONE.fullmatch(lines[-1]) if lines else None
    return float(alone[1]) if alone else None
