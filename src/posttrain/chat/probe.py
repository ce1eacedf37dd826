"""The start-up probe: does what we append, turn by turn, equal what the chat template renders at once?"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from posttrain.chat.errors import ChatError, NotAppendOnly, TokenAt
from posttrain.task import Message
from posttrain.thought import THINK_CLOSE, THINK_OPEN
from posttrain.trajectory import Source

_THINKING = re.compile(f"{THINK_OPEN}.*?{THINK_CLOSE}\\s*|{THINK_OPEN}\\s*$", re.DOTALL)

TOOL_SCHEMA = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class Verdict(StrEnum):
    """What the template does with a conversation."""

    APPEND_ONLY = "append_only"
    THINKING_DROPPED = "thinking_dropped"  # history differs by thinking alone: the thinking policy decides
    UNSUPPORTED = "unsupported"  # it cannot be rendered; such messages are refused when they come


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The verdict on every probed conversation; `reasons` says why one is not append-only."""

    verdicts: Mapping[str, Verdict] = field(default_factory=dict[str, Verdict])
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def drops_thinking(self) -> bool:
        return Verdict.THINKING_DROPPED in self.verdicts.values()


class Rendering(Protocol):
    """What the probe asks of a renderer."""

    def rendered(self, messages: Sequence[Message], tools: Any, *, generation: bool) -> list[int]: ...

    def delta(self, messages: Sequence[Message]) -> list[tuple[list[int], Source]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def end_of_turn_id(self) -> int | None: ...

    @property
    def shows_tools(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that the probe renders, and what it is meant to show."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    required: bool = False  # a template that cannot render it is refused


def conversations() -> dict[str, Conversation]:
    """The probed conversations by name; those with tools start with `tool`."""
    think = f"{THINK_OPEN}\nLet me see.\n{THINK_CLOSE}\n\n"
    ask, say = (lambda text: _message("user", text)), (lambda text: _message("assistant", text))
    result = lambda text: _message("tool", text, name="lookup", tool_call_id="call00000")  # noqa: E731
    tools: list[dict[str, Any]] = [TOOL_SCHEMA]
    return {
        "plain": Conversation([ask("Hello?"), say("Hello.")], required=True),
        "multi_turn": Conversation(
            [ask("One?"), say("Two."), ask("Three?"), say("Four."), ask("Five?"), say("Six.")], required=True
        ),
        "system": Conversation(
            [_message("system", "Be brief."), ask("One?"), say("Two."), ask("Three?"), say("Four.")]
        ),
        "thinking": Conversation(
            [ask("One?"), say(think + "Two."), ask("Three?"), say(think + "Four."), ask("Five?")], required=True
        ),
        "tool_text": Conversation(
            [
                ask("Colour?"),
                say("lookup: hue"),
                result("red"),
                say("lookup: sky"),
                result("blue"),
                say("Blue."),
                ask("Why?"),
            ],
            tools,
        ),
        "tool_result": Conversation([ask("Colour?"), _call("hue"), result("red"), say("Red."), ask("Why?")], tools),
        "tool_results_together": Conversation(
            [ask("Both?"), _call("a", "b"), result("red"), result("blue"), say("Red, blue.")], tools
        ),
        "tool_rounds": Conversation(
            [ask("Twice?"), _call("a"), result("red"), _call("b"), result("blue"), say("Done."), ask("More?")], tools
        ),
        "tool_thinking": Conversation(
            [ask("Colour?"), _call("hue", content=think + "Looking."), result("red"), say(think + "Red."), ask("Why?")],
            tools,
        ),
    }


def _message(role: str, text: str, **more: str) -> Message:
    return {"role": role, "content": text, **more}


def _call(*words: str, content: str = "") -> Message:
    calls = [
        {"type": "function", "id": f"call{n:05}", "function": {"name": "lookup", "arguments": {"word": word}}}
        for n, word in enumerate(words)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def probe(rendering: Rendering, *, tools: bool = True) -> ProbeReport:
    """Builds each conversation turn by turn and compares it with the template's own render.

    Raises NotAppendOnly at the first token that differs for another reason than dropped thinking, and ChatError when
    the template cannot render a plain conversation.
    """
    verdicts: dict[str, Verdict] = {}
    reasons: dict[str, str] = {}
    for name, conversation in conversations().items():
        if conversation.tools and not tools:
            continue
        try:
            difference = _probe_one(rendering, name, conversation)
        except NotAppendOnly:
            raise
        except ChatError as error:
            if conversation.required:
                raise
            verdicts[name], reasons[name] = Verdict.UNSUPPORTED, str(error)
            continue
        verdicts[name] = Verdict.THINKING_DROPPED if difference else Verdict.APPEND_ONLY
        if difference:
            reasons[name] = str(difference)
    return ProbeReport(verdicts, reasons)


def _probe_one(rendering: Rendering, name: str, conversation: Conversation) -> NotAppendOnly | None:
    """The first difference that dropped thinking explains, or None; raises any other."""
    explained: NotAppendOnly | None = None
    messages = conversation.messages
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        difference = _probe_turn(rendering, name, conversation, turn)
        explained = explained or difference
    return explained


def _probe_turn(rendering: Rendering, name: str, conversation: Conversation, turn: int) -> NotAppendOnly | None:
    """Checks that the context grows by exactly the policy's turn and the delta behind it."""
    messages = conversation.messages
    tools = conversation.tools if rendering.shows_tools else None
    seen = rendering.rendered(messages[:turn], tools, generation=True)
    done = _up_to_end_of_turn(
        rendering.rendered(messages[: turn + 1], tools, generation=False), rendering.end_of_turn_id
    )
    difference = _difference(
        rendering,
        name,
        seen,
        done[: len(seen)],
        f"the render with message {turn} does not start with the one before it",
    )
    if difference and not _strip(rendering.decode(done)).startswith(_strip(rendering.decode(seen))):
        raise difference
    following = _environment_messages(messages[turn + 1 :])
    if not following:
        return difference
    built = done + [token_id for ids, _ in rendering.delta(following) for token_id in ids]
    later = rendering.rendered(messages[: turn + 1 + len(following)], tools, generation=True)
    second = _difference(
        rendering, name, built, later, f"messages {turn + 1} to {turn + len(following)} rendered behind message {turn}"
    )
    if second and _strip(rendering.decode(built)) != _strip(rendering.decode(later)):
        raise second
    return difference or second


def _environment_messages(messages: Sequence[Message]) -> list[Message]:
    following: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            break
        following.append(message)
    return following


def _up_to_end_of_turn(ids: list[int], end_of_turn: int | None) -> list[int]:
    """Without what the template writes behind a finished turn: that belongs to the next delta."""
    if end_of_turn is None or end_of_turn not in ids:
        return ids
    return ids[: len(ids) - ids[::-1].index(end_of_turn)]


def _strip(text: str) -> str:
    return _THINKING.sub("", text)


def _difference(
    rendering: Rendering, name: str, expected: Sequence[int], found: Sequence[int], context: str
) -> NotAppendOnly | None:
    if list(expected) == list(found):
        return None
    index = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    index = min(len(expected), len(found)) if index is None else index
    token: Callable[[Sequence[int]], TokenAt] = lambda ids: (  # noqa: E731
        TokenAt(index, ids[index], rendering.decode([ids[index]])) if index < len(ids) else TokenAt(index, None, None)
    )
    return NotAppendOnly(name, token(expected), token(found), context)
