"""Qwen3-Coder's XML: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.chat.calls.attempt import Found, NotExpressible, shown
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signatures
from posttrain.chat.calls.syntax import NO_TOOLS, Call, Syntax, checked, reserved_tags
from posttrain.chat.calls.values import encode
from posttrain.trajectory import CallStatus

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^>\n<]*+")


class Qwen3Coder(Syntax):
    """Values are texts; one newline at each end of a value belongs to the markup.

    `</parameter>` closes a value only where `<parameter=` or `</function>` follows, and `</function>` within a value is
    text unless `</tool_call>` follows: so values may quote most markup. `<tool_call>` itself may be missing.
    """

    name = "qwen3_coder"
    openers = (_OPEN, _CLOSE, _FUNCTION)
    stop_tokens = ("<|im_end|>",)
    result_head, result_tail = "<tool_response>\n", "\n</tool_response>"
    reserved = reserved_tags(
        "tool_call", "tool_response", "function", "parameter", "think", literals=("<|im_start|>", "<|im_end|>")
    )
    frame = reserved_tags("tool_response", literals=("<|im_start|>", "<|im_end|>"))
    _value_ends = Lookout((_PARAMETER_END, _FUNCTION_END))
    _recover = Lookout((_CLOSE, _OPEN))

    @property
    def markers(self) -> tuple[str, ...]:
        return (_OPEN, _FUNCTION, _PARAMETER, _PARAMETER_END, _FUNCTION_END, _CLOSE)

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        if opener == _CLOSE:
            return [Found(start=start, end=scan.position, problem=f"{_CLOSE} closes no call")]
        name, arguments = "", dict[str, Any]()
        if opener == _OPEN:
            yield from scan.skip()
            if (yield from scan.peek(len(_CLOSE))) == _CLOSE:
                scan.at += len(_CLOSE)
                return [Found(start=start, end=scan.position, status=CallStatus.EMPTY, problem="the call is empty")]
            problem = yield from _expect(scan, _FUNCTION)
        else:
            problem = ""
        if problem == "":
            name = (yield from scan.run(_NAME)).strip()
            problem = yield from _expect(scan, ">")
        if problem == "":
            problem = yield from self._parameters(scan, arguments)
        if problem == "":
            yield from scan.skip()
            if opener == _OPEN or (yield from scan.peek(len(_CLOSE))) == _CLOSE:
                problem = yield from _expect(scan, _CLOSE)
        if problem:
            yield from scan.recover(self._recover, frozenset({_OPEN}))
        elif problem == "" and not name:
            problem = "the name of the tool is missing"
        return [
            Found(
                start=start, end=scan.position, name=name, arguments=arguments, textual=True,
                problem=problem or "", unfinished=problem is None,
            )
        ]  # fmt: skip

    def _parameters(self, scan: Scan, arguments: dict[str, Any]) -> Wait[str | None]:
        while True:
            yield from scan.skip()
            ahead = yield from scan.peek(len(_PARAMETER))
            if ahead != _PARAMETER:
                return (yield from _expect(scan, _FUNCTION_END, f"{_PARAMETER} or {_FUNCTION_END}"))
            scan.at += len(_PARAMETER)
            key = (yield from scan.run(_NAME)).strip()
            problem = yield from _expect(scan, ">")
            if problem != "":
                return problem
            value = yield from self._value(scan)
            if value is None:
                return None if scan.at == len(scan.buffer) else f"{_PARAMETER_END} is missing behind {shown(key)}"
            if not key or key in arguments:
                return f"the parameter {shown(key)} stands twice" if key else "a parameter has no name"
            arguments[key] = value

    def _value(self, scan: Scan) -> Wait[str | None]:
        """Reads through the `</parameter>` that closes the value; None: another tag or the end of the text is first."""
        begins = scan.position
        scan.mark()
        while True:
            mark = yield from scan.until(self._value_ends)
            ends = scan.position - len(mark) - begins
            if not mark:
                scan.taken()
                return None
            if mark == _PARAMETER_END:
                yield from scan.skip()
                ahead = yield from scan.peek(len(_PARAMETER))
                if ahead == _PARAMETER or _FUNCTION_END.startswith(ahead):
                    return _without_newlines(scan.taken()[:ends])
            else:
                yield from scan.skip()
                if (yield from scan.peek(len(_CLOSE))) == _CLOSE:
                    scan.taken()
                    return None

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        return "\n".join(self._rendered(name, checked(arguments), signatures) for name, arguments in calls)

    def _rendered(self, name: str, arguments: Mapping[str, Any], signatures: Signatures) -> str:
        for text in (name, *arguments):
            if not text or text != text.strip() or not _NAME.fullmatch(text):
                raise NotExpressible(f"{text!r} cannot be a name in this syntax")
        lines = [f"{_FUNCTION}{name}>"]
        for key, value in arguments.items():
            text = encode(value, signatures.types(name, key))
            if _AMBIGUOUS.search(text):
                raise NotExpressible(f"the value of {key!r} holds what would close it")
            lines.append(f"{_PARAMETER}{key}>\n{text}\n{_PARAMETER_END}")
        return "\n".join([_OPEN, *lines, _FUNCTION_END, _CLOSE])


_AMBIGUOUS = re.compile(r"</parameter>\s*+(?:<parameter=|</function>)|</function>\s*+</tool_call>")


def _expect(scan: Scan, mark: str, words: str = "") -> Wait[str | None]:
    """Reads `mark`: '' = read, None = the text ends before it is complete, else what is wrong."""
    ahead = yield from scan.peek(len(mark))
    if ahead == mark:
        scan.at += len(mark)
        return ""
    if len(ahead) < len(mark) and mark.startswith(ahead):
        scan.at += len(ahead)
        return None
    return f"expected {words or mark}, got {shown(ahead, 24)}"


def _without_newlines(text: str) -> str:
    text = text.removeprefix("\n")
    return text.removesuffix("\n")
