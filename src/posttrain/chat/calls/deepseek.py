"""DeepSeek's two forms: a fenced JSON object behind the tool's name (V3, R1), and the plain object (V3.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.chat.calls import json_text
from posttrain.chat.calls.attempt import MAX_CALLS, Found, NotExpressible, shown
from posttrain.chat.calls.json_text import JsonText, dumps, json_value
from posttrain.chat.calls.objects import arguments_of
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signatures
from posttrain.chat.calls.syntax import NO_TOOLS, Call, Syntax, checked, reserved_tags
from posttrain.trajectory import CallStatus

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE, _JSON_FENCE = "```", "```json"
_LINE = re.compile(r"[^\n<{]*+")


class DeepSeek(Syntax):
    """Reads both forms. v31: renders `name<｜tool▁sep｜>{...}` instead of `function<｜tool▁sep｜>name` and a fence."""

    openers = (_CALLS, _CALL, _CALL_END, _CALLS_END)
    stop_tokens = ("<｜end▁of▁sentence｜>",)
    result_head = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>"
    result_tail = "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    reserved = reserved_tags("think", literals=("<｜",))
    _head = Lookout((_SEP, _CALL, _CALL_END, _CALLS_END))
    _recover = Lookout((_CALL_END, _CALL))

    def __init__(self, name: str, *, v31: bool) -> None:
        self.name = name
        self._v31 = v31

    @property
    def markers(self) -> tuple[str, ...]:
        return (_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END)

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        if opener in (_CALL_END, _CALLS_END):
            return [Found(start=start, end=scan.position, problem=f"{opener} closes no call")]
        if opener == _CALLS:
            yield from scan.skip()
            ahead = yield from scan.peek(len(_CALL))
            if ahead != _CALL:
                return [(yield from self._no_call(scan, ahead, start))]
            scan.at += len(_CALL)
        found = [(yield from self._call(scan, start))]
        while not found[-1].unfinished and len(found) <= MAX_CALLS:
            begins = scan.position
            yield from scan.skip()
            ahead = yield from scan.peek(max(len(_CALL), len(_CALLS_END)))
            if ahead.startswith(_CALLS_END):
                scan.at += len(_CALLS_END)
            if not ahead.startswith(_CALL):
                break
            scan.at += len(_CALL)
            found.append((yield from self._call(scan, begins)))
        return found

    def _no_call(self, scan: Scan, ahead: str, start: int) -> Wait[Found]:
        if len(ahead) < len(_CALL) and _CALL.startswith(ahead):
            scan.at += len(ahead)
            return Found(start=start, end=scan.position, unfinished=True)
        if (yield from scan.peek(len(_CALLS_END))) == _CALLS_END:
            scan.at += len(_CALLS_END)
            return Found(
                start=start, end=scan.position, status=CallStatus.EMPTY, problem="there is no call in the block"
            )
        return Found(start=start, end=scan.position, problem=f"expected {_CALL}, got {shown(ahead, 24)}")

    def _call(self, scan: Scan, start: int) -> Wait[Found]:
        head, mark = yield from scan.text_until(self._head)
        if mark != _SEP:
            scan.back(len(mark) if mark == _CALL else 0)
            return Found(start=start, end=scan.position, problem=f"{_SEP} is missing", unfinished=not mark)
        yield from scan.skip()
        name, fenced = head.strip(), False
        if (yield from scan.peek(1)) != "{":
            name = (yield from scan.run(_LINE)).strip()
            yield from scan.skip()
            ahead = yield from scan.peek(len(_JSON_FENCE))
            if _JSON_FENCE.startswith(ahead):
                scan.at += len(ahead)
            elif ahead.startswith(_FENCE):
                scan.at += len(_FENCE)
            fenced = ahead.startswith(_FENCE)
        text = yield from self._arguments(scan, fenced)
        place = {"start": start, "name": name}
        if text.problem:
            if not text.unfinished:
                yield from scan.recover(self._recover, frozenset({_CALL}))
            return Found(**place, end=scan.position, problem=text.problem, unfinished=text.unfinished)
        try:
            arguments = arguments_of(json_text.loads(text.text), "arguments")
        except ValueError as error:
            return Found(**place, end=scan.position, problem=str(error))
        return Found(
            **place, end=scan.position, arguments=arguments, problem="" if name else "the name of the tool is missing"
        )

    def _arguments(self, scan: Scan, fenced: bool) -> Wait[JsonText]:
        yield from scan.skip()
        text = yield from json_value(scan)
        for mark in [_FENCE, _CALL_END] if fenced else [_CALL_END]:
            if text.problem:
                return text
            yield from scan.skip()
            ahead = yield from scan.peek(len(mark))
            if ahead == mark:
                scan.at += len(mark)
            elif len(ahead) < len(mark) and mark.startswith(ahead):
                scan.at += len(ahead)
                text = JsonText(text.text, f"{mark} is missing", unfinished=True)
            else:
                text = JsonText(text.text, f"expected {mark} behind the arguments, got {shown(ahead, 24)}")
        return text

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        return _CALLS + ("" if self._v31 else "\n").join(map(self._rendered, calls)) + _CALLS_END

    def _rendered(self, call: Call) -> str:
        name, arguments = call
        if not name or name != name.strip() or _LINE.fullmatch(name) is None:
            raise NotExpressible(f"{name!r} cannot stand in front of {_SEP}")
        text = dumps(checked(arguments))
        inner = f"{name}{_SEP}{text}" if self._v31 else f"function{_SEP}{name}\n{_FENCE}json\n{text}\n{_FENCE}"
        return f"{_CALL}{inner}{_CALL_END}"
