"""Llama's two forms: a bare JSON object (Llama 3.1 and on), and a list of Python calls (Llama 3.2 and 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.chat.calls.attempt import MAX_CALLS, Found, NotExpressible, shown
from posttrain.chat.calls.json_text import json_value, loads
from posttrain.chat.calls.objects import object_of, read_call
from posttrain.chat.calls.python_text import Bracketed, PythonProblem, PythonReader, bracketed, spelled
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signatures
from posttrain.chat.calls.syntax import NO_TOOLS, Call, Syntax, checked, reserved_tags

_OBJECT_START = re.compile(r'\{\s*"(?:name|parameters|arguments|type|function)"')
_LIST_START = re.compile(r"\[\s*[^\W\d][\w.\-]*\s*\(")
_NAME = re.compile(r"[\w.\-]*+")
_FULL_NAME = re.compile(r"[^\W\d][\w.\-]*+")
_KEY = re.compile(r"[^\W\d]\w*+")
_LOOK, _LOOK_LIST = 64, 256  # characters in which the start of a call shows itself
_RESERVED = reserved_tags(
    "think",
    literals=("<|python_", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|header_"),
)


class LlamaJson(Syntax):
    """`{"name": "f", "parameters": {...}}` as the whole turn, with or without `<|python_tag|>`: Llama 3.

    An object elsewhere in a turn is text; so is one whose first key is not a call's, or that has `name` and other keys
    but no parameters. Several calls stand behind each
    other, with `;`, `,` or nothing between. Behind `<|python_tag|>` also `tool.call(query="...")`, Llama's own form for
    built-in tools.
    """

    name = "llama3_json"
    openers = ("<|python_tag|>",)
    anchored = True
    stop_tokens = ("<|eom_id|>", "<|eot_id|>")
    result_head = "Result: "
    reserved = _RESERVED
    _lookout = Lookout(openers)

    @property
    def markers(self) -> tuple[str, ...]:
        return ('"name"', '"parameters"')

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        yield from scan.skip()
        if opener and (yield from scan.peek(1)) != "{":
            return [(yield from self._builtin(scan, start))]
        found: list[Found] = []
        while opener or _OBJECT_START.match((yield from scan.peek(_LOOK))):
            text = yield from json_value(scan)
            if not opener and not text.problem and _is_data(text.text):
                break
            opener = ""
            call = read_call(text, ("parameters", "arguments"), start=start, end=scan.position)
            if call.problem and not call.unfinished:
                scan.back(len((yield from scan.until(self._lookout))))
                call = replace(call, end=scan.position)
            found.append(call)
            if call.problem or len(found) > MAX_CALLS:
                break
            start = scan.position
            yield from scan.skip()
            if (yield from scan.peek(1)) in (";", ","):
                scan.at += 1
                yield from scan.skip()
        return found

    def _builtin(self, scan: Scan, start: int) -> Wait[Found]:
        name = yield from scan.run(_NAME)
        if not (yield from scan.peek(1)):
            return Found(start=start, end=scan.position, name=name, unfinished=True)
        problem = f"expected a JSON object behind {self.openers[0]}, got {shown(name, 24)}"
        if (yield from scan.peek(1)) == "(" and _FULL_NAME.fullmatch(name):
            text = yield from bracketed(scan)
            if not text.problem or text.unfinished:
                (found, *_) = _calls(name, text, start, whole=True) or [Found(start=start, end=scan.position)]
                return replace(found, start=start, end=scan.position)
            problem = text.problem
        scan.back(len((yield from scan.until(self._lookout))))
        return Found(start=start, end=scan.position, problem=problem)

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        return "; ".join(object_of(call, "parameters") for call in calls)


def _is_data(text: str) -> bool:
    """Whether a bare object is an answer that happens to have a name."""
    try:
        value = loads(text)
    except ValueError:
        return False
    return not value.keys() & {"parameters", "arguments"} and bool(value.keys() - {"name", "type"})


class LlamaPythonic(Syntax):
    """`[f(a=1), g(b="x")]` as the whole turn: Llama 3.2 and 4.

    A list elsewhere in a turn, or one that does not begin with a call, is text; Llama's tags `<|python_tag|>` and
    `<|python_start|>` may stand in front. Values without a name go to the tool's parameters in their order.
    """

    name = "llama_pythonic"
    openers = ("<|python_start|>", "<|python_tag|>")
    anchored = True
    stop_tokens = ("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")
    result_head = "Result: "
    reserved = _RESERVED
    _lookout = Lookout(openers)

    @property
    def markers(self) -> tuple[str, ...]:
        return ("[", "(")

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        yield from scan.skip()
        ahead = yield from scan.peek(_LOOK_LIST)
        if not _LIST_START.match(ahead):
            if not opener:
                return []
            scan.back(len((yield from scan.until(self._lookout))))
            cut = "[".startswith(ahead)
            problem = "" if cut else f"expected [tool(...)] behind {opener}, got {shown(ahead, 24)}"
            return [Found(start=start, end=scan.position, problem=problem, unfinished=cut)]
        begins = scan.position
        text = yield from bracketed(scan)
        if text.problem and not text.unfinished:
            scan.back(len((yield from scan.until(self._lookout))))
        if text.problem:
            return [Found(start=start, end=scan.position, problem=text.problem, unfinished=text.unfinished)]
        found = _calls("", text, begins)
        return [replace(found[0], start=start), *found[1:]]

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        return "[" + ", ".join(_spelled(name, checked(arguments)) for name, arguments in calls) + "]"


def _calls(name: str, text: Bracketed, base: int, *, whole: bool = False) -> list[Found]:
    """The calls of a bracketed text that begins at `base`; whole: it is the arguments of one call, of tool `name`."""
    if text.unfinished:
        return [Found(start=base, end=base + len(text.text), name=name, problem=text.problem, unfinished=True)]
    reader = PythonReader(name + text.text)
    found: list[Found] = []
    begins = 0
    try:
        if not whole:
            reader.expect("[", "in front of the calls")
        while whole or not reader.next_is("]"):
            reader.space()
            begins = reader.at
            call = reader.call()
            tool = call.name.removesuffix(".call") if whole else call.name
            found.append(
                Found(
                    start=base + call.start, end=base + call.end, name=tool, arguments=call.arguments,
                    positional=tuple(call.positional),
                )
            )  # fmt: skip
            if whole or len(found) > MAX_CALLS:
                break
            if not reader.next_is(","):
                reader.expect("]", "or a comma behind a call")
                break
    except PythonProblem as problem:
        found.append(Found(start=base + begins, end=base + len(text.text), problem=str(problem)))
    return found


def _spelled(name: str, arguments: Mapping[str, Any]) -> str:
    if not _FULL_NAME.fullmatch(name):
        raise NotExpressible(f"{name!r} cannot be called in Python")
    named = [f"{key}={spelled(value)}" for key, value in arguments.items() if _KEY.fullmatch(key)]
    others = {key: value for key, value in arguments.items() if not _KEY.fullmatch(key)}
    return f"{name}({', '.join([*named, *([f'**{spelled(others)}'] if others else [])])})"
