"""Calls written as Python, `[f(a=1), g(b="x")]`: read as text, never evaluated.

Values are literals: strings (also in triple quotes), numbers, True/False/None and their JSON spellings, lists, tuples
(as lists), dictionaries with text keys. `**{"a-b": 1}` passes names that are no identifiers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from posttrain.chat.calls.attempt import shown
from posttrain.chat.calls.json_text import MAX_DEPTH, MAX_SCALAR
from posttrain.chat.calls.scan import Scan, Wait

_PLAIN = re.compile(r"[\s\w.,:=*+\-]*+")
_BODY = {
    "'": re.compile(r"(?:[^'\\\n]++|\\.)*+", re.DOTALL),
    '"': re.compile(r'(?:[^"\\\n]++|\\.)*+', re.DOTALL),
    "'''": re.compile(r"(?:[^'\\]++|\\.|'(?!'')(?=..))*+", re.DOTALL),
    '"""': re.compile(r'(?:[^"\\]++|\\.|"(?!"")(?=..))*+', re.DOTALL),
}
_CLOSING = {"(": ")", "[": "]", "{": "}"}

_SPACE = re.compile(r"\s*+")
_NAME = re.compile(r"[^\W\d][\w.\-]*+")
_KEYWORD = re.compile(r"([^\W\d]\w*+)\s*+=(?!=)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?(?![\w.])")
_STRING = re.compile(
    r'"""((?:[^"\\]++|\\.|"(?!""))*+)"""|'
    r"'''((?:[^'\\]++|\\.|'(?!''))*+)'''|"
    r'"((?:[^"\\\n]++|\\.)*+)"|'
    r"'((?:[^'\\\n]++|\\.)*+)'",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_PLAIN_ESCAPES: dict[str, str] = dict(
    zip("ntrbfva\n\\'\"", ["\n", "\t", "\r", "\b", "\f", "\v", "\a", "", "\\", "'", '"'], strict=True)
)
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonProblem(ValueError):
    """What is wrong in a text that should be Python, and where."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


@dataclass(frozen=True, slots=True)
class Bracketed:
    """The text from an opening bracket to the one that closes it, or to what is wrong."""

    text: str
    problem: str = ""
    unfinished: bool = False


def bracketed(scan: Scan) -> Wait[Bracketed]:
    """Reads from the opening bracket that comes next to its closing one; brackets in strings do not count."""
    scan.mark()
    opened: list[str] = []
    while True:
        yield from scan.skip(_PLAIN)
        character = yield from scan.peek(1)
        if not character:
            return Bracketed(scan.taken(), "the brackets are not closed", unfinished=True)
        if character in _CLOSING:
            opened.append(_CLOSING[character])
            if len(opened) > MAX_DEPTH + 2:
                return Bracketed(scan.taken(), f"it is nested more than {MAX_DEPTH} deep")
        elif character in ")]}":
            if opened.pop() != character:
                return Bracketed(scan.taken(), f"{character} closes no bracket")
        elif character in "'\"":
            problem = yield from _string(scan)
            if problem is None:
                return Bracketed(scan.taken(), "a string is not closed", unfinished=True)
            if problem:
                return Bracketed(scan.taken(), problem)
            continue
        else:
            return Bracketed(scan.taken(), f"{character!r} cannot stand outside a string")
        scan.at += 1
        if not opened:
            return Bracketed(scan.taken())


def _string(scan: Scan) -> Wait[str | None]:
    """Reads a string. '' = read, None = the text ended inside, else what is wrong."""
    head = yield from scan.peek(3)
    quote = head[0]
    if head[:2] == quote * 2 and head != quote * 3:
        scan.at += 2
        return ""
    delimiter = head if head == quote * 3 else quote
    scan.at += len(delimiter)
    body = _BODY[delimiter]
    while True:
        found = body.match(scan.buffer, scan.at)
        assert found
        scan.at = found.end()
        rest = yield from scan.peek(1)
        if rest == "\\":
            if len((yield from scan.peek(2))) < 2:
                scan.at += 1
                return None
        elif not rest:
            return None
        elif rest == "\n" and delimiter == quote:
            return "a string in single quotation marks ends on its line"
        elif rest != quote:
            continue  # more text has come
        elif (yield from scan.peek(len(delimiter))) == delimiter:
            scan.at += len(delimiter)
            return ""
        else:
            scan.at += 1


@dataclass(slots=True)
class PythonCall:
    """`name(positional, key=value)` at [start, end) of the text."""

    name: str
    start: int
    end: int = 0
    positional: list[Any] = field(default_factory=list[Any])
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


class PythonReader:
    """Recursive descent over a complete text; every method raises PythonProblem."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._depth = 0

    def space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found
        self.at = found.end()

    def next_is(self, mark: str) -> bool:
        """Reads `mark` and the space in front of it if it comes next."""
        self.space()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def expect(self, mark: str, where: str) -> None:
        if not self.next_is(mark):
            raise self.problem(f"expected {mark} {where}")

    def problem(self, message: str) -> PythonProblem:
        seen = self.text[self.at : self.at + 24]
        return PythonProblem(f"{message}, got {shown(seen, 24)}" if seen else f"{message}, but it ends", self.at)

    def call(self) -> PythonCall:
        """`name(...)`."""
        self.space()
        found = _NAME.match(self.text, self.at)
        if not found:
            raise self.problem("expected the name of a tool")
        call = PythonCall(found[0], self.at)
        self.at = found.end()
        self.expect("(", f"behind {shown(call.name)}")
        while not self.next_is(")"):
            self._argument(call)
            if not self.next_is(","):
                self.expect(")", "or a comma behind an argument")
                break
        call.end = self.at
        return call

    def _argument(self, call: PythonCall) -> None:
        self.space()
        at = self.at
        if self.next_is("**"):
            named = self.value()
            if not isinstance(named, dict):
                raise PythonProblem("** stands in front of a dictionary", at)
        elif found := _KEYWORD.match(self.text, self.at):
            self.at = found.end()
            named = {found[1]: self.value()}
        elif call.arguments:
            raise self.problem("an argument without a name stands behind named ones")
        else:
            call.positional.append(self.value())
            return
        for key, value in named.items():
            if key in call.arguments:
                raise PythonProblem(f"the argument {shown(key)} stands twice", at)
            call.arguments[key] = value

    def value(self) -> Any:
        """A literal."""
        self.space()
        character = self.text[self.at : self.at + 1]
        if character in ("'", '"'):
            return self._text()
        if character in _CLOSING and character:
            return self._container(character)
        if found := _NUMBER.match(self.text, self.at):
            if len(found[0]) > MAX_SCALAR:
                raise PythonProblem("a number is too long", self.at)
            self.at = found.end()
            return float(found[0]) if set(found[0]) & set(".eE") else int(found[0])
        found = _NAME.match(self.text, self.at)
        if found and found[0] in _CONSTANTS:
            self.at = found.end()
            return _CONSTANTS[found[0]]
        raise self.problem(
            "expected a literal: a string in quotes, a number, True, False, None, a list or a dictionary"
        )

    def _text(self) -> str:
        found = _STRING.match(self.text, self.at)
        if not found:
            raise self.problem("a string is not closed")
        self.at = found.end()
        body = found[found.lastindex or 0]
        return _ESCAPE.sub(_unescaped, body) if "\\" in body else body

    def _container(self, opening: str) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PythonProblem(f"it is nested more than {MAX_DEPTH} deep", self.at)
        self.at += 1
        closing = _CLOSING[opening]
        items: list[Any] = []
        keys: list[str] = []
        commas = 0
        while not self.next_is(closing):
            items.append(self.value())
            if opening == "{":
                keys.append(self._key(items.pop()))
                items.append(self.value())
            if not self.next_is(","):
                self.expect(closing, "or a comma")
                break
            commas += 1
        self._depth -= 1
        if opening == "{":
            return dict(zip(keys, items, strict=True))
        return items[0] if opening == "(" and len(items) == 1 and not commas else items

    def _key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise PythonProblem(f"the key {shown(key)} of a dictionary is no string", self.at)
        self.expect(":", "behind the key of a dictionary")
        return key


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code or found[4]:
        number = int(code, 16) if code else int(found[4], 8)
        return chr(number) if number <= 0x10FFFF else found[0]
    return _PLAIN_ESCAPES.get(found[5], found[0])  # Python, too, leaves an unknown escape as it is


def literal(text: str) -> Any:
    """The value of a text that is one literal."""
    reader = PythonReader(text)
    value = reader.value()
    reader.space()
    if reader.at < len(text):
        raise reader.problem("expected the end")
    return value


def spelled(value: Any) -> str:
    """A JSON value as a Python literal on one line."""
    if isinstance(value, str):
        return _spelled_text(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_spelled_text(key)}: {spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(spelled, value)) + "]"
    return repr(value)


_SPELLING = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _spelled_text(text: str) -> str:
    return '"' + re.sub(r'[\\"\n\r\t]', lambda found: _SPELLING[found[0]], text) + '"'
