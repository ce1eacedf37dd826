"""Mistral's two forms: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`; from v11 on `[TOOL_CALLS]f[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.chat.calls import json_text
from posttrain.chat.calls.attempt import MAX_CALLS, Found, NotExpressible, shown
from posttrain.chat.calls.json_text import dumps, json_value
from posttrain.chat.calls.objects import arguments_of, object_of, read_call
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signatures
from posttrain.chat.calls.syntax import NO_TOOLS, Call, Syntax, checked, reserved_tags

_ARRAY_START = re.compile(r'\[\s*\{\s*"(?:name|arguments|id)"')
_NAME = re.compile(r"[^\[{\n]*+")
_ID = re.compile(r"[^\[{\n]*+")
_LOOK = 64
_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(Syntax):
    """Reads both forms, also where the decoder has dropped `[TOOL_CALLS]` from in front of an array.

    v11: renders `[TOOL_CALLS]f[ARGS]{...}` instead of the array. `[CALL_ID]...` in front of `[ARGS]` is skipped; so is
    the `id` of an array's element.
    """

    openers = (_CALLS,)
    anchored = True
    stop_tokens = ("</s>",)
    result_head, result_tail = "[TOOL_RESULTS] ", " [/TOOL_RESULTS]"
    reserved = reserved_tags(
        "think",
        "s",
        brackets=("TOOL_CALLS", "ARGS", "CALL_ID", "TOOL_RESULTS", "TOOL_CONTENT", "INST", "AVAILABLE_TOOLS"),
    )
    _lookout = Lookout(openers)

    def __init__(self, name: str, *, v11: bool) -> None:
        self.name = name
        self._v11 = v11

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        yield from scan.skip()
        if not opener and not _ARRAY_START.match((yield from scan.peek(_LOOK))):
            return []
        character = yield from scan.peek(1)
        if not character:
            return [Found(start=start, end=scan.position, unfinished=True)]
        if character == "[" and (yield from scan.peek(len(_ARGS))) != _ARGS:
            found = yield from self._array(scan, start)
        elif character == "{":
            text = yield from json_value(scan)
            found = [read_call(text, ("arguments",), start=start, end=scan.position)]
        else:
            found = [(yield from self._named(scan, start))]
        if found and found[-1].problem and not found[-1].unfinished:
            scan.back(len((yield from scan.until(self._lookout))))
        return found

    def _array(self, scan: Scan, start: int) -> Wait[list[Found]]:
        scan.at += 1
        found: list[Found] = []
        while True:
            yield from scan.skip()
            character = yield from scan.peek(1)
            if character == "]":
                scan.at += 1
                return found or [Found(start=start, end=scan.position, problem="the list of calls is empty")]
            text = yield from json_value(scan)
            found.append(read_call(text, ("arguments",), start=start, end=scan.position))
            if found[-1].problem or len(found) > MAX_CALLS:
                return found
            start = scan.position
            yield from scan.skip()
            following = yield from scan.peek(1)
            if following == ",":
                scan.at += 1
            elif following not in ("]", ""):
                problem = f"expected a comma or ] behind a call, got {shown(following)}"
                return [*found, Found(start=start, end=scan.position, problem=problem)]

    def _named(self, scan: Scan, start: int) -> Wait[Found]:
        name = (yield from scan.run(_NAME)).strip()
        if (yield from scan.peek(len(_CALL_ID))) == _CALL_ID:
            scan.at += len(_CALL_ID)
            yield from scan.skip(_ID)
        mark = yield from scan.peek(len(_ARGS))
        if mark == _ARGS:
            scan.at += len(_ARGS)
            yield from scan.skip()
        elif len(mark) < len(_ARGS) and _ARGS.startswith(mark):
            scan.at += len(mark)
            problem = f"expected {_ARGS} behind the tool"
            return Found(start=start, end=scan.position, name=name, problem=problem, unfinished=True)
        elif not mark.startswith("{"):
            problem = f"expected {_ARGS} behind {shown(name, 40)}, got {shown(mark)}"
            return Found(start=start, end=scan.position, name=name, problem=problem)
        text = yield from json_value(scan)
        place = {"start": start, "end": scan.position, "name": name}
        if text.problem:
            return Found(**place, problem=text.problem, unfinished=text.unfinished)
        try:
            arguments = arguments_of(json_text.loads(text.text), _ARGS)
        except ValueError as error:
            return Found(**place, problem=str(error))
        return Found(**place, arguments=arguments, problem="" if name else "the name of the tool is missing")

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        if not self._v11:
            return f"{_CALLS} [{', '.join(object_of(call, 'arguments') for call in calls)}]"
        for name, _ in calls:
            if not name or name != name.strip() or _NAME.fullmatch(name) is None:
                raise NotExpressible(f"{name!r} cannot stand behind {_CALLS}")
        return "".join(f"{_CALLS}{name}{_ARGS}{dumps(checked(arguments))}" for name, arguments in calls)
