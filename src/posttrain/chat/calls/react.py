"""ReAct's text (Yao et al. 2022, arXiv:2210.03629): `Action: search[query]`, or `Action:` and `Action Input:`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.chat.calls.attempt import Found, NotExpressible, shown
from posttrain.chat.calls.json_text import dumps, json_value, loads
from posttrain.chat.calls.objects import arguments_of
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signatures
from posttrain.chat.calls.syntax import NO_TOOLS, Call, Syntax, checked
from posttrain.chat.calls.values import encode

_LABEL = re.compile(r"[ \t]{0,4}\d{0,4}[ \t]{0,4}:")
_INPUT = re.compile(r"Action Input[ \t]{0,4}\d{0,4}[ \t]{0,4}:")
_LINE = re.compile(r"[^\n]*+")
_BLANK = re.compile(r"[ \t]*+")
_NUMBERED = re.compile(r"^Action (\d{1,4})[ \t]*:", re.MULTILINE)
_WORDS = "Thought|Action Input|Action|Observation|Final Answer"


class ReAct(Syntax):
    """A line `Action: tool[text]`, or `Action: tool` and `Action Input: {...}` or a text; both may be numbered.

    The text of `tool[text]` is what stands between the first `[` and the last `]` of the line, unchanged; it goes to
    the tool's main parameter. `finish`: the action that ends an episode; it is known without a schema, and its text is
    the argument `answer`. Tools are found in any case of letters.

    A turn ends with `\\nObservation`, which the policy then has written itself: `result` goes on from there.
    """

    name = "react"
    openers = ("Action",)
    stop_strings = ("\nObservation",)
    in_turn = True
    names_any_case = True
    result_tail = "\n"
    reserved = re.compile(rf"(?m)^[ \t]{{0,8}}(?=(?:{_WORDS})[ \t]{{0,4}}\d{{0,4}}[ \t]{{0,4}}:)|<(?=/?think>)")
    _input_ends = Lookout(("\nObservation", "\nThought", "\nAction", "\nFinal Answer"))

    def __init__(self, name: str = "react", *, finish: str | None = "finish") -> None:
        self.name = name
        self.finish = finish

    @property
    def markers(self) -> tuple[str, ...]:
        return ("Action:", "Observation")

    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        if scan.before not in ("", "\n"):
            return []
        label = _LABEL.match((yield from scan.peek(16)))
        if not label:
            return []
        scan.at += label.end()
        line = yield from scan.run(_LINE)
        ended = not (yield from scan.peek(1))
        name, bracket, text = line.strip().partition("[")
        name = name.strip()
        if not bracket:
            return [(yield from self._with_input(scan, name, start))]
        place = {"start": start, "end": scan.position, "name": name}
        if ended and not text.endswith("]"):
            return [Found(**place, problem="the action has no ]", unfinished=True)]
        if not text.endswith("]") or not name:
            return [Found(**place, problem=f"an action is one line tool[text], got {shown(line.strip())}")]
        return [Found(**place, body=text[:-1], textual=True, if_not_cut=ended and text.count("[") >= text.count("]"))]

    def _with_input(self, scan: Scan, name: str, start: int) -> Wait[Found]:
        behind = scan.position
        yield from scan.skip()
        ahead = yield from scan.peek(32)
        label = _INPUT.match(ahead)
        if not label:
            cut = scan.ended and "Action Input:".startswith(ahead.rstrip(" :0123456789") or ahead)
            problem = "an action is tool[text], or a line with the tool and a line Action Input: {...}"
            return Found(start=start, end=behind, name=name, problem=problem, unfinished=cut)
        scan.at += label.end()
        yield from scan.skip(_BLANK)
        if (yield from scan.peek(1)) != "{":
            return (yield from self._text_input(scan, name, start))
        text = yield from json_value(scan)
        problem, arguments = text.problem, None
        if not problem:
            rest = (yield from scan.run(_LINE)).strip()
            problem = f"expected the end of the line behind the JSON object, got {shown(rest)}" if rest else ""
        if not problem:
            try:
                arguments = arguments_of(loads(text.text), "Action Input")
            except ValueError as error:
                problem = str(error)
        if not name:
            problem = problem or "the name of the tool is missing"
        return Found(
            start=start, end=scan.position, name=name, arguments=arguments, problem=problem, unfinished=text.unfinished
        )

    def _text_input(self, scan: Scan, name: str, start: int) -> Wait[Found]:
        body, mark = yield from scan.text_until(self._input_ends)
        scan.back(len(mark))
        return Found(start=start, end=scan.position, name=name, body=body.strip(), textual=True, if_not_cut=not mark)

    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        return "\n".join(self._rendered(call, signatures) for call in calls)

    def _rendered(self, call: Call, signatures: Signatures) -> str:
        name, arguments = call[0], checked(call[1])
        if not name or name != name.strip() or "[" in name or not _LINE.fullmatch(name):
            raise NotExpressible(f"{name!r} cannot be the name of a tool in this syntax")
        main = "answer" if name == self.finish else signatures.main(name) if signatures.get(name) else "query"
        if not arguments and main is None:
            return f"Action: {name}[]"
        if main is not None and list(arguments) == [main]:
            text = encode(arguments[main], signatures.types(name, main))
            if text and _LINE.fullmatch(text) and text.count("]") == text.count("["):
                return f"Action: {name}[{text}]"
        return f"Action: {name}\nAction Input: {dumps(arguments)}"

    def head(self, tool: str, turn: str) -> str:
        """`Observation: ` with the number of the last action if it has one, without what the policy wrote of it."""
        numbers = _NUMBERED.findall(turn)
        label = f"Observation{' ' + numbers[-1] if numbers else ''}: "
        return label.removeprefix("Observation") if turn.endswith(self.stop_strings[0]) else "\n" + label

    def how_results_come(self) -> str:
        finish = f" End with Action: {self.finish}[your answer]." if self.finish else ""
        return f"Write an action exactly as in the examples. The result comes back behind Observation:.{finish}"
