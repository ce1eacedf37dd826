"""Calls as JSON objects, `{"name": ..., "arguments": {...}}`, and the tags that Hermes and Qwen put around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.chat.calls import json_text
from posttrain.chat.calls.attempt import Found, NotExpressible, shown
from posttrain.chat.calls.json_text import JsonText, dumps, json_value
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signatures
from posttrain.chat.calls.syntax import NO_TOOLS, Call, Syntax, checked, reserved_tags
from posttrain.trajectory import CallStatus


def read_call(text: JsonText, keys: Sequence[str], *, start: int, end: int) -> Found:
    """`{"name": ..., KEY: {...}}` as a call; KEY is one of `keys`, its value an object or the JSON text of one."""
    if text.problem:
        return Found(start=start, end=end, problem=text.problem, unfinished=text.unfinished)
    try:
        name, arguments = _name_and_arguments(json_text.loads(text.text), keys)
    except ValueError as error:
        return Found(start=start, end=end, problem=str(error))
    return Found(start=start, end=end, name=name, arguments=arguments)


def _name_and_arguments(value: Any, keys: Sequence[str]) -> tuple[str, dict[str, Any]]:
    wanted = f'{{"name": ..., "{keys[0]}": {{...}}}}'
    if not isinstance(value, dict):
        raise ValueError(f"a call is one JSON object {wanted}, got {shown(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f'the key "name" must hold the name of a tool: {wanted}')
    key = next((key for key in keys if key in value), None)
    if key is None:
        raise ValueError(f'the key "{keys[0]}" is missing: {wanted}')
    return name, arguments_of(value[key], key)


def arguments_of(value: Any, key: str) -> dict[str, Any]:
    """An object, or a string that holds the JSON of one."""
    if isinstance(value, str):
        try:
            value = json_text.loads(value)
        except ValueError as error:
            raise ValueError(f'"{key}" is a string that is no JSON object: {error}') from None
    if not isinstance(value, dict):
        raise ValueError(f'"{key}" must be an object, got {shown(value)}')
    return value


class HermesJson(Syntax):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3, and verl's `hermes`."""

    name = "hermes"
    openers = ("<tool_call>", "</tool_call>")
    any_case = True
    stop_tokens = ("<|im_end|>",)
    result_head, result_tail = "<tool_response>\n", "\n</tool_response>"
    reserved = reserved_tags("tool_call", "tool_response", "think", literals=("<|im_start|>", "<|im_end|>"))
    frame = reserved_tags("tool_response", literals=("<|im_start|>", "<|im_end|>"))
    _lookout = Lookout(openers, any_case=True)

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        opening, closing = self.openers
        if opener.lower() == closing:
            return [Found(start=start, end=scan.position, problem=f"{shown(opener)} closes no call")]
        yield from scan.skip()
        if (yield from scan.peek(len(closing))) == closing:
            scan.at += len(closing)
            return [Found(start=start, end=scan.position, status=CallStatus.EMPTY, problem="the call is empty")]
        text = yield from json_value(scan)
        yield from scan.skip()
        rest = "" if text.problem else (yield from scan.peek(len(closing)))
        if rest == closing:
            scan.at += len(closing)
        elif not text.problem and rest and closing.startswith(rest) and scan.ended:
            text = JsonText(text.text, f"{closing} is not complete", unfinished=True)
        elif not text.problem:
            problem = (
                f"expected {closing} behind the JSON object, got {shown(rest, 24)}" if rest else "it is not closed"
            )
            text = JsonText(text.text, problem, unfinished=not rest)
        if text.problem and not text.unfinished:
            yield from scan.recover(self._lookout, frozenset({opening}))
        if opener != opening:
            text = JsonText(text.text, f"the tag is {opening}, got {shown(opener)}", text.unfinished)
        return [read_call(text, ("arguments",), start=start, end=scan.position)]

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        opening, closing = self.openers
        return "\n".join(f"{opening}\n{object_of(call, 'arguments')}\n{closing}" for call in calls)


def object_of(call: Call, key: str) -> str:
    """`{"name": ..., KEY: {...}}` on one line."""
    name, arguments = call
    if not name:
        raise NotExpressible("a call needs the name of a tool")
    return dumps({"name": name, key: checked(arguments)})
