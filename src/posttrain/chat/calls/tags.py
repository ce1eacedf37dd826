"""Tags around a query: DR-Tulu's `<call_tool name="search" limit="5">query</call_tool>` and Search-R1's `<search>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.chat.calls.attempt import Attempt, Found, Framed, NotExpressible, shown
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signatures
from posttrain.chat.calls.syntax import NO_TOOLS, Call, Syntax, checked, reserved_tags
from posttrain.chat.calls.values import encode

_MOST_ATTRIBUTES = 64
_KEY = re.compile(r"[A-Za-z0-9_.\-]*+")
_KEY_START = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*+")
_VALUE = {'"': re.compile(r'[^"\n]*+'), "'": re.compile(r"[^'\n]*+")}
_ENTITIES = {"quot": '"', "apos": "'", "lt": "<", "gt": ">", "amp": "&", "#10": "\n", "#13": "\r"}
_ENTITY = re.compile(r"&(quot|apos|lt|gt|amp|#10|#13);")
_TO_ESCAPE = re.compile(r'["\n\r]|&(?=(?:quot|apos|lt|gt|amp|#10|#13);)')
_ESCAPED = {'"': "&quot;", "\n": "&#10;", "\r": "&#13;", "&": "&amp;"}


class AttributeTags(Syntax):
    """`<tag name="tool" key="value">main argument</tag>`: DR-Tulu's formats v20250824 and unified.

    The first `name` is the tool (a second one is an argument of that name); the text goes to the tool's main parameter,
    without blanks at its ends. Attribute values are in double or single quotes, on one line; in them, not in the text,
    `&quot; &apos; &lt; &gt; &amp; &#10; &#13;` stand for characters. DR-Tulu reads double quotes and no entities.
    """

    any_case = True
    in_turn = True

    def __init__(
        self, name: str, tag: str, also_closed_by: Sequence[str] = (), result_tag: str = "tool_output"
    ) -> None:
        self.name = name
        self.opening = f"<{tag}"
        self.closing = f"</{tag}>"
        self.stop_strings = (self.closing, *(f"</{other}>" for other in also_closed_by))
        self.openers = (self.opening, *self.stop_strings)
        self.result_head, self.result_tail = f"\n<{result_tag}>", f"</{result_tag}>\n\n"
        self.reserved = reserved_tags(tag, *also_closed_by, result_tag, "think")
        self.frame = reserved_tags(result_tag)
        self._lookout = Lookout(self.openers, any_case=True)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing)

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        if opener.lower() != self.opening:
            return [Found(start=start, end=scan.position, problem=f"{shown(opener)} closes no call")]
        following = yield from scan.peek(1)
        if following and (following.isalnum() or following in "_-"):
            return []  # another tag, such as <call_tools>
        attributes: list[tuple[str, str]] = []
        problem = yield from self._attributes(scan, attributes)
        if problem is None:
            return [Found(start=start, end=scan.position, unfinished=True, name=_tool(attributes))]
        if problem:
            yield from scan.recover(self._lookout, frozenset({self.opening}))
            return [Found(start=start, end=scan.position, problem=problem, name=_tool(attributes))]
        body, closed = yield from scan.text_until(self._lookout)
        if closed.lower() == self.opening:
            scan.back(len(closed))
        return [self._found(start, scan.position, attributes, body, (opener, closed))]

    def _attributes(self, scan: Scan, attributes: list[tuple[str, str]]) -> Wait[str | None]:
        """Reads up to `>`: '' = read, None = the text ended, else what is wrong."""
        while True:
            yield from scan.skip()
            character = yield from scan.peek(1)
            if not character:
                return None
            if character == ">":
                scan.at += 1
                return ""
            key = yield from scan.run(_KEY)
            if not _KEY_START.fullmatch(key):
                return f"{shown(key or character)} is no attribute" if character != "/" else "the tag needs a text"
            yield from scan.skip()
            equals = yield from scan.peek(1)
            if equals == "=":
                scan.at += 1
                yield from scan.skip()
            quote = (yield from scan.peek(1)) if equals == "=" else equals
            if not quote:
                return None
            if equals != "=" or quote not in _VALUE:
                return f'the attribute {shown(key)} needs a value in quotes: {key[:40]}="..."'
            scan.at += 1
            value = yield from scan.run(_VALUE[quote])
            end = yield from scan.peek(1)
            if not end:
                return None
            if end != quote:
                return f"the value of {shown(key)} is not closed by {quote} on its line"
            scan.at += 1
            if len(attributes) == _MOST_ATTRIBUTES:
                return f"a tag has at most {_MOST_ATTRIBUTES} attributes"
            attributes.append((key, _ENTITY.sub(lambda found: _ENTITIES[found[1]], value)))

    def _found(
        self, start: int, end: int, attributes: list[tuple[str, str]], body: str, tags: tuple[str, str]
    ) -> Found:
        opened, closed = tags
        name = _tool(attributes)
        arguments: dict[str, Any] = {}
        problem = (
            "" if name else f'the tag needs the attribute name="..." for the tool, as in {self.opening} name="tool">'
        )
        skipped = False
        for key, value in attributes:
            if key == "name" and not skipped:
                skipped = True
            elif key in arguments:
                problem = problem or f"the attribute {shown(key)} stands twice"
            else:
                arguments[key] = value
        if opened != self.opening or (closed.startswith("</") and closed not in self.stop_strings):
            problem = problem or "tags are written in lower case"
        if closed.lower() == self.opening:
            problem = problem or f"a call begins inside another one that {self.closing} has not closed"
        return Found(
            start=start, end=end, name=name, arguments=arguments, body=body.strip(), textual=True,
            problem=problem, unfinished=not closed,
        )  # fmt: skip

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        return "\n".join(self._rendered(name, checked(arguments), signatures) for name, arguments in calls)

    def _rendered(self, name: str, arguments: Mapping[str, Any], signatures: Signatures) -> str:
        texts = {key: encode(value, signatures.types(name, key)) for key, value in arguments.items()}
        main = signatures.main(name) if signatures.get(name) else "query"
        body = texts.get(main or "", "")
        if body and body == body.strip() and not self._lookout.pattern.search(body):
            del texts[main or ""]
        else:
            body = ""
        for key in texts:
            if not _KEY_START.fullmatch(key):
                raise NotExpressible(f"{key!r} cannot be the name of an attribute")
        attributes = [("name", name), *texts.items()]
        spelled = "".join(f' {key}="{_attribute(value)}"' for key, value in attributes)
        return f"{self.opening}{spelled}>{body}{self.closing}"


def _tool(attributes: Sequence[tuple[str, str]]) -> str:
    return next((value.strip() for key, value in attributes if key == "name"), "")


def _attribute(value: str) -> str:
    return _TO_ESCAPE.sub(lambda found: _ESCAPED[found[0]], value)


class PlainTags(Syntax):
    """`<tag>query</tag>`, one tag for each tool: Search-R1's `<search>`, DR-Tulu's legacy format, `<code>`.

    tools: tag -> tool. parameter: what the text is called where the tool's schema is not known. answer: the tag of the
    final answer: it ends a turn, and it cannot stand inside a call. The text loses the blanks at its ends.
    """

    any_case = True
    in_turn = True

    def __init__(
        self,
        name: str,
        tools: Mapping[str, str],
        *,
        answer: str | None = "answer",
        result_tag: str = "information",
        parameter: str = "query",
    ) -> None:
        self.name = name
        self.tools = dict(tools)
        self.answer = answer
        self.parameter = parameter
        closings = tuple(f"</{tag}>" for tag in tools)
        answers = (f"<{answer}>", f"</{answer}>") if answer else ()
        self.openers = (*(f"<{tag}>" for tag in tools), *closings)
        self.stop_strings = (*closings, *answers[1:])
        self.result_head, self.result_tail = f"\n\n<{result_tag}>", f"</{result_tag}>\n\n"
        self.frame = reserved_tags(result_tag)
        self.reserved = reserved_tags(*tools, result_tag, "think", *((answer,) if answer else ()))
        self._lookout = Lookout((*self.openers, *answers), any_case=True)

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        tag = opener.strip("</>").lower()
        tool = self.tools[tag] if tag in self.tools else self.tools[next(t for t in self.tools if t.lower() == tag)]
        if opener.startswith("</"):
            return [Found(start=start, end=scan.position, name=tool, problem=f"{shown(opener)} closes no call")]
        body, closed = yield from scan.text_until(self._lookout)
        if closed and not closed.startswith("</"):
            scan.back(len(closed))
        problem = ""
        if opener.strip("<>") not in self.tools:
            problem = f"the tag is <{next(t for t in self.tools if t.lower() == tag)}>, got {shown(opener)}"
        elif closed and closed != f"</{opener[1:]}":
            problem = f"{opener} must be closed by </{opener[1:]}, got {shown(closed)}"
        return [
            Found(
                start=start, end=scan.position, name=tool, body=body.strip(), textual=True,
                problem=problem, unfinished=not closed,
            )
        ]  # fmt: skip

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        return "\n".join(self._rendered(name, checked(arguments), signatures) for name, arguments in calls)

    def _rendered(self, name: str, arguments: Mapping[str, Any], signatures: Signatures) -> str:
        tag = next((tag for tag, tool in self.tools.items() if tool == name), None)
        if tag is None:
            raise NotExpressible(f"the syntax {self.name} has no tag for the tool {name!r}, only {self.tools}")
        main = (signatures.main(name) if signatures.get(name) else self.parameter) or ""
        if set(arguments) - {main}:
            raise NotExpressible(f"<{tag}> carries only {main!r}, got {sorted(arguments)}")
        body = encode(arguments[main], signatures.types(name, main)) if main in arguments else ""
        if body != body.strip() or self._lookout.pattern.search(body) or (main in arguments and not body):
            raise NotExpressible(f"{shown(body)} cannot stand between <{tag}> and </{tag}>")
        return f"<{tag}>{body}</{tag}>"

    def correction(self, attempt: Attempt, signatures: Signatures | None = None, *, turn: str = "") -> Framed:
        """In the first person and without a frame, as Search-R1 has it."""
        wants = [(f"to {tool}", self.parameter, tag) for tag, tool in self.tools.items()]
        wants += [("to give the final answer", "answer", self.answer)] if self.answer else []
        advice = [
            f"If I want {what}, I should put the {kind} between <{tag}> and </{tag}>. " for what, kind, tag in wants
        ]
        head, tail = "\nMy previous action is invalid", f". {''.join(advice)}Let me try again.\n"
        return Framed(f"{head}: " if attempt.detail else head, self.complaint(attempt), tail)
