"""JSON inside a turn: where a value ends is decided by the grammar of RFC 8259, so no tag in a string can end it.

A value is refused at the first character that JSON does not allow; what is wrong there is said in words.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from posttrain.chat.calls.attempt import shown
from posttrain.chat.calls.scan import Scan, Wait

MAX_DEPTH = 32
MAX_SCALAR = 400  # characters of a number
_TOKEN = re.compile(
    r'[ \t\n\r]*+(?:([{}\[\]:,])|("(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+")|([-+.\w]++))'
)
_SCALAR_GROUP = 3
_BLANK = re.compile(r"[ \t\n\r]*+")
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ITEMS = re.compile(  # numbers and words of a list, each with its comma: what most long lists are made of
    r"(?:[ \t\n\r]*+(?:-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,99})?(?:[eE][-+]?[0-9]{1,9})?|true|false|null)"
    r"[ \t\n\r]*+,)*+"
)
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_STRING, _SCALAR_KIND, _DONE = '"', "0", "done"
_TOO_LONG = "a number is too long"

# What may come next, by what is expected: value, value or ']', key, key or '}', colon, comma or the closing bracket.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA = "value", "item", "key", "first key", "colon", "comma"
_TOO_DEEP = "nothing"
_OPENS = {"{": _KEY_OR_END, "[": _VALUE_OR_END}
_CLOSES = {"}": "{", "]": "["}
_VALUES = {**_OPENS, _STRING: _COMMA, _SCALAR_KIND: _COMMA}
_NEXT: dict[str, dict[str, str]] = {
    _VALUE: _VALUES,
    _VALUE_OR_END: {**_VALUES, "]": _COMMA},
    _KEY: {_STRING: _COLON},
    _KEY_OR_END: {_STRING: _COLON, "}": _COMMA},
    _COLON: {":": _VALUE},
    _COMMA: {",": _VALUE, "}": _COMMA, "]": _COMMA},
    _TOO_DEEP: {},
}
_EXPECTED = {
    _VALUE: "a value",
    _VALUE_OR_END: "a value or ]",
    _KEY: "another key",
    _KEY_OR_END: "a key in double quotes or }",
    _COLON: "a colon behind the key",
    _COMMA: "a comma or the closing bracket",
}


@dataclass(frozen=True, slots=True)
class JsonText:
    """A value's text, up to its end or to what is wrong; `problem` says what. unfinished: the text ended inside."""

    text: str
    problem: str = ""
    unfinished: bool = False


class _Grammar:
    """What may come next: `state`, and the brackets that are open."""

    def __init__(self) -> None:
        self.state = _VALUE
        self.open: list[str] = []
        self.too_long = False

    def take(self, kind: str) -> bool:
        """Goes on behind a token. False: it is not allowed here."""
        after = _NEXT[self.state].get(kind)
        if after is None:
            return False
        if kind in _OPENS:
            if len(self.open) == MAX_DEPTH:
                self.state = _TOO_DEEP
                return False
            self.open.append(kind)
        elif kind in _CLOSES:
            if self.open[-1] != _CLOSES[kind]:
                return False
            self.open.pop()
        elif kind == "," and self.open[-1] == "{":
            after = _KEY
        self.state = after if after != _COMMA or self.open else _DONE
        return True

    def complaint(self, seen: str) -> str:
        if self.too_long:
            return _TOO_LONG
        if self.state == _TOO_DEEP:
            return f"it is nested more than {MAX_DEPTH} deep"
        if self.state in (_KEY, _VALUE) and seen[:1] in ("}", "]") and self.open:
            return f"there is a comma too many in front of {seen[0]}" if self.state == _KEY else "a value is missing"
        if seen.startswith("`"):
            return "JSON stands here without a code fence"
        if seen.startswith("'"):
            return "strings are in double quotes, not in single quotes"
        return f"expected {_EXPECTED.get(self.state, 'the end')}, got {shown(seen, 24)}"


def json_value(scan: Scan) -> Wait[JsonText]:
    """Reads one JSON value and no more; stands at the offending character when it is none."""
    grammar = _Grammar()
    scan.mark()
    while grammar.state != _DONE:
        if not _take_tokens(scan, grammar):
            seen = yield from scan.peek(24)
            return JsonText(scan.taken(), grammar.complaint(seen.lstrip(" \t\n\r") or seen))
        if grammar.state == _DONE:
            break
        yield from scan.skip(_BLANK)
        if scan.at == len(scan.buffer):
            return JsonText(scan.taken(), "the JSON is not complete", unfinished=True)
        token = _TOKEN.match(scan.buffer, scan.at)
        if token and (token.lastindex != _SCALAR_GROUP or token.end() < len(scan.buffer)):
            continue  # more text has come
        if scan.buffer[scan.at] == '"' and grammar.state not in (_COLON, _COMMA):
            problem = yield from _long_string(scan)
            if problem is None:
                return JsonText(scan.taken(), "a JSON string is not closed", unfinished=True)
            if problem:
                return JsonText(scan.taken(), problem)
            grammar.take(_STRING)
        elif token is None:
            seen = yield from scan.peek(24)
            return JsonText(scan.taken(), grammar.complaint(seen))
        elif scan.ended:  # a number or word that the end of the text may have cut
            scan.at = len(scan.buffer)
            return JsonText(scan.taken(), "the JSON is not complete", unfinished=True)
        elif len(scan.buffer) - scan.at > MAX_SCALAR:
            return JsonText(scan.taken(), _TOO_LONG)
        else:
            yield
    return JsonText(scan.taken())


def _take_tokens(scan: Scan, grammar: _Grammar) -> bool:
    """Reads the complete tokens of the buffer. False: the next one is not allowed there."""
    buffer, at, size = scan.buffer, scan.at, len(scan.buffer)
    take, match = grammar.take, _TOKEN.match
    while found := match(buffer, at):
        group = found.lastindex
        if group == _SCALAR_GROUP:
            if found.end() == size and (grammar.open or not scan.ended):
                break  # the number may go on
            word = found[_SCALAR_GROUP]
            if len(word) > MAX_SCALAR or not _SCALAR.fullmatch(word):
                grammar.too_long = len(word) > MAX_SCALAR
                scan.at = found.start(_SCALAR_GROUP)
                return False
            kind = _SCALAR_KIND
        else:
            kind = found[1] if group == 1 else _STRING
        if not take(kind):
            scan.at = found.start(group or 0)
            return False
        at = found.end()
        if kind == "," and grammar.state == _VALUE and (items := _ITEMS.match(buffer, at)):
            at = items.end()
        if grammar.state == _DONE:
            break
    scan.at = at
    return True


def _long_string(scan: Scan) -> Wait[str | None]:
    """Reads a string that does not end in the buffer, or holds what it may not. '' = read, None = the text ended."""
    scan.at += 1
    while True:
        found = _INSIDE.match(scan.buffer, scan.at)
        assert found
        scan.at = found.end()
        rest = yield from scan.peek(1)
        if not rest:
            return None
        if rest == '"':
            scan.at += 1
            return ""
        if rest == "\\":
            escape = yield from scan.peek(6)
            if _ESCAPE.match(escape):
                continue
            if len(escape) < 6 and re.fullmatch(r"\\(?:u[0-9a-fA-F]*)?", escape):
                scan.at += len(escape)
                return None
            return f"{shown(escape[:2], 12)} is no escape in a JSON string"
        if rest < " ":
            return f"a JSON string cannot hold {rest!r} itself; write it as an escape"


def loads(text: str) -> Any:
    """The value of a JSON text; ValueError says what is wrong (also for a key that stands twice, and NaN)."""
    try:
        return json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for index, key in enumerate(keys) if key in keys[:index]) if len(keys) < 1000 else "a key"
        raise ValueError(f"the key {shown(double)} stands twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def flaw(value: Any) -> str:
    """What makes a value unfit to be sent on as JSON: depth, numbers that are not finite, half surrogate pairs."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return f"it is nested more than {MAX_DEPTH} deep"
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if not item.isascii() and re.search("[\ud800-\udfff]", item):
                    return "a string holds half of a surrogate pair"
            elif isinstance(item, float):
                if not math.isfinite(item):
                    return "a number is too large"
            elif isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = inner
    return ""


def dumps(value: Any) -> str:
    """A value as JSON on one line, characters as they are; ValueError for NaN and what JSON does not know."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
