"""What one chat template does, found out once by rendering sentinels, and the rendering of real messages by it.

Knows text only; token ids are `encoding`'s. The policy's own turns are never rendered here except where they are part
of a prompt that came with the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from posttrain.boundary.foreign_json import read_json
from posttrain.chat.encoding import Encoder
from posttrain.chat.errors import ChatError
from posttrain.task import Message
from posttrain.thought import THINK_CLOSE, THINK_OPEN

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]

# Sentinels hold noncharacters, which guarded foreign text cannot.
USER, ANSWER, THOUGHT, LATER = (f"\ufdd3{letter}\ufdd4" for letter in "uatl")
_SLOT = re.compile("\ufdd5\\d+\ufdd6")
_ROLE = re.compile(r"[A-Za-z_]+")
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, AttributeError, KeyError, IndexError, ValueError)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows a policy turn: marked text that starts with the end-of-turn token, if there is one.

    content: spans [start, end) of characters that came from the messages; the rest is the template's.
    """

    text: str
    content: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Renders messages by the tokenizer's template and knows its habits.

    content_parts: messages must hold `[{"type": "text", "text": ...}]` instead of a string.
    argument_forms: how tool-call arguments may be given, "object" or "string"; empty when calls cannot be rendered.
    call_content: what the content of an assistant message must be when it holds nothing but calls, '' or None.
    end_of_turn: the control string that closes a policy turn; None when the next header does (GLM).
    turn_openers: without an end_of_turn, the control strings that a policy turn may stop at.
    forgets_thinking_after: the roles of a message after which earlier thinking is no longer rendered.
    generation_thinking: what the generation prompt holds from `<think>` on ('' when nothing).
    shows_tools: prompts describe the tools that they are given.
    reads_clock: prompts hold today's date.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, options: Mapping[str, Any]) -> None:
        self._tokenizer: Any = tokenizer
        self._encoder = encoder
        self._options = dict(options)
        self.content_parts = self._needs_parts()
        self.argument_forms, self.call_content = self._find_argument_forms()
        self._calls_before_tools = bool(self.argument_forms) and not self._shows(
            [*self._exchange(), self._plain("tool", LATER)], LATER
        )
        self.end_of_turn, self.turn_openers = self._find_end_of_turn()
        self.forgets_thinking_after = frozenset(role for role in ("user", "tool") if self._forgets_thinking(role))
        self.generation_thinking = self._find_generation_thinking()
        self.shows_tools = self._shows([self._plain("user", USER)], LATER, [_tool_named(LATER)])
        self.reads_clock = self._reads_clock()

    def prompt(self, messages: Sequence[Message], tools: Tools | None, *, generation: bool) -> str:
        """The marked text of a whole conversation."""
        for message in messages:
            self._check_role(message)
        prepared = [self._prepare(message) for message in messages]
        return self._render(prepared, self._prepare_tools(tools), generation=generation)

    def continuation(self, messages: Sequence[Message]) -> Continuation:
        """The marked text after a policy turn: separator, the messages rendered jointly, the generation prompt.

        It is what the template puts behind a sentinel answer, so no system prompt can come back and no real history is
        rendered. Raises ChatError for roles that the template refuses or drops.
        """
        for message in messages:
            self._check_role(message, in_delta=True)
        prepared = [self._prepare(message, foreign=True) for message in messages]
        text = self._behind_answer(prepared)
        slots, contents = self._with_slots(prepared)
        skeleton = self._behind_answer(slots)
        literals = _SLOT.split(skeleton)
        if len(literals) != len(contents) + 1:
            roles = [message["role"] for message in messages]
            raise ChatError(
                f"the chat template drops the content of messages with roles {roles}; "
                "send observations in a role that it renders (most know 'user')"
            )
        return Continuation(text, _align(text, literals, contents))

    def user_header(self) -> str:
        """What the template writes between an end of turn and a user's text."""
        text = self._behind_answer([self._plain("user", LATER)])
        header = text[: text.index(LATER)]
        return header.removeprefix(self.end_of_turn or "").lstrip()

    def opening(self) -> str:
        """What the template writes before the first user's text when no system message is given."""
        text = self._render([self._plain("user", USER)], None, generation=False)
        return text[: text.index(USER)]

    def drops_role(self, role: str) -> bool:
        """Whether the template takes messages of this role and silently leaves out their content."""
        later = self._plain(role, LATER)
        try:
            if role == "system":
                return LATER not in self._render([later, self._plain("user", USER)], None, generation=True)
            return LATER not in self._behind_answer([later])
        except ChatError:
            return False  # refused, not dropped

    def _render(self, prepared: Sequence[Message], tools: Tools | None, *, generation: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(prepared),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generation,
                **self._options,
            )
        except _RENDER_ERRORS as error:
            roles = [message.get("role") for message in prepared]
            raise ChatError(
                f"the chat template cannot render roles {roles}{' with tools' if tools else ''}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _shows(self, prepared: Sequence[Message], sentinel: str, tools: Tools | None = None) -> bool:
        try:
            return sentinel in self._render(prepared, tools, generation=True)
        except ChatError:
            return False

    def _behind_answer(self, prepared: Sequence[Message]) -> str:
        """What a render holds after a sentinel answer, from the end-of-turn token on."""
        tool_count = sum(message["role"] == "tool" for message in prepared)
        calls = tool_count if self._calls_before_tools else 0
        ids = [str(message.get("tool_call_id") or "") for message in prepared if message["role"] == "tool"]
        text = self._render([*self._exchange(calls, ids), *prepared], None, generation=True)
        if ANSWER not in text:
            raise ChatError("the chat template does not show an assistant message followed by an environment message")
        tail = text[text.rindex(ANSWER) + len(ANSWER) :]
        if self.end_of_turn is None:
            return tail.lstrip(" ") if self.turn_openers else tail
        if self.end_of_turn not in tail:
            raise ChatError(f"the chat template does not close a policy turn with {self.end_of_turn!r} here")
        return tail[tail.index(self.end_of_turn) :]

    def _exchange(self, calls: int = 0, call_ids: Sequence[str] = ()) -> list[Message]:
        answer = self._plain("assistant", ANSWER)
        if calls:
            answer = self._calling([call_ids[n] or f"call{n:05}" for n in range(calls)], ANSWER)
        return [self._plain("user", USER), answer]

    def _calling(self, call_ids: Sequence[str], value: str) -> Message:
        arguments: Any = {"key": value}
        if "object" not in self.argument_forms:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": "lookup", "arguments": arguments}
        calls = [{"type": "function", "id": call_id, "function": function} for call_id in call_ids]
        return {"role": "assistant", "content": self.call_content, "tool_calls": calls}

    def _plain(self, role: str, text: str) -> Message:
        content = [{"type": "text", "text": text}] if self.content_parts else text
        return {"role": role, "content": content}

    # What the template wants ------------------------------------------------------------------------------------------

    def _needs_parts(self) -> bool:
        for parts in (False, True):
            self.content_parts = parts
            if self._shows([self._plain("user", USER)], USER):
                return parts
        self.content_parts = False
        self._render([self._plain("user", USER)], None, generation=True)  # raises with the template's own reason
        raise ChatError("the chat template does not show the text of a user message, neither as a string nor as parts")

    def _find_argument_forms(self) -> tuple[frozenset[str], str | None]:
        """The accepted forms of arguments, and the content that an assistant message with calls must have."""
        forms: dict[str, Any] = {"object": {"key": ANSWER}, "string": json.dumps({"key": ANSWER}, ensure_ascii=False)}
        for content in ("", None):
            accepted: set[str] = set()
            for form, arguments in forms.items():
                call = {"type": "function", "id": "call00000", "function": {"name": "lookup", "arguments": arguments}}
                message = {"role": "assistant", "content": content, "tool_calls": [call]}
                # a string that a template quotes once more would come out with escaped quotation marks
                if self._shows_call(
                    [self._plain("user", USER), message], forms["string"] if form == "string" else ANSWER
                ):
                    accepted.add(form)
            if accepted:
                return frozenset(accepted), content
        return frozenset(), ""

    def _shows_call(self, prepared: Sequence[Message], sentinel: str) -> bool:
        try:
            text = self._render(prepared, None, generation=False)
        except ChatError:
            return False
        return sentinel in text and "lookup" in text

    def _find_end_of_turn(self) -> tuple[str | None, frozenset[str]]:
        closed = self._render(self._exchange(), None, generation=False)
        if ANSWER not in closed:
            raise ChatError("the chat template does not show the text of an assistant message")
        self.end_of_turn, self.turn_openers = None, frozenset()
        followers = [self._follower(role) for role in ("user", "tool")]
        openers = frozenset(follower for follower in followers if follower)
        closing = self._leading_control(closed[closed.rindex(ANSWER) + len(ANSWER) :])
        if closing is not None and followers[0] in (closing, None):
            return closing, frozenset()
        return None, openers

    def _follower(self, role: str) -> str | None:
        try:
            return self._leading_control(self._behind_answer([self._plain(role, LATER)]))
        except ChatError:
            return None

    def _leading_control(self, text: str) -> str | None:
        """The control string that the text starts with, white space aside."""
        start = len(text) - len(text.lstrip())
        match = self._encoder.find_control(text, start)
        return match[0] if match and match.start() == start else None

    def _forgets_thinking(self, role: str) -> bool:
        answer = self._plain("assistant", f"{THINK_OPEN}\n{THOUGHT}\n{THINK_CLOSE}\n\n{ANSWER}")
        try:
            text = self._render([self._plain("user", USER), answer, self._plain(role, LATER)], None, generation=True)
        except ChatError:
            return False
        return ANSWER in text and THOUGHT not in text

    def _find_generation_thinking(self) -> str:
        messages = [self._plain("user", USER)]
        bare = self._render(messages, None, generation=False)
        prompted = self._render(messages, None, generation=True)
        added = prompted[len(bare) :] if prompted.startswith(bare) else prompted[prompted.rindex(USER) :]
        return added[added.index(THINK_OPEN) :] if THINK_OPEN in added else ""

    def _reads_clock(self) -> bool:
        messages = [self._plain("user", USER)]
        options = {**self._options, "strftime_now": lambda _format: LATER}
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return LATER in text

    # Messages as the template wants them ------------------------------------------------------------------------------

    def _check_role(self, message: Message, *, in_delta: bool = False) -> None:
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise ChatError(f"a message needs a role such as 'user' or 'tool', got {role!r}")
        if in_delta and role == "assistant":
            raise ChatError("delta() takes the environment's messages; the policy's turns stay the ids it sampled")

    def _prepare(self, message: Message, *, foreign: bool = False) -> Message:
        """Guards every string and gives content and arguments the form that the template wants.

        foreign: tags such as <think> are guarded too, as they always are in tool messages.
        """
        guarded = {key: value for key, value in message.items() if value is not None or key == "content"}
        if message.get("tool_calls"):
            guarded["tool_calls"] = [self._argument_form(call) for call in message["tool_calls"]]
            guarded["content"] = message.get("content") or self.call_content
        guarded = self._guard(guarded, tags_allowed=not foreign and message["role"] != "tool")
        guarded["content"] = self._content_form(message["role"], guarded.get("content"))
        return guarded

    def _guard(self, value: Any, *, tags_allowed: bool) -> Any:
        if isinstance(value, str):
            return self._encoder.guard(value, tags_allowed=tags_allowed)
        if isinstance(value, Mapping):
            return {
                self._guard(key, tags_allowed=tags_allowed): self._guard(item, tags_allowed=tags_allowed)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._guard(item, tags_allowed=tags_allowed) for item in value]
        return value

    def _content_form(self, role: str, content: Any) -> Any:
        if content is None and role == "assistant":
            return None
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self.content_parts else content
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            return content if self.content_parts else "".join(part.get("text") or "" for part in content)
        raise ChatError(f"the content of a {role} message must be text or a list of text parts, got {content!r:.100}")

    def _argument_form(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or "name" not in function:
            raise ChatError(f"a tool call needs a function with name and arguments, got {call!r:.200}")
        if not self.argument_forms:
            raise ChatError("the chat template cannot render tool calls; give them as text of the assistant message")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and "string" not in self.argument_forms:
            arguments = _parse_arguments(arguments)
        elif not isinstance(arguments, str) and "object" not in self.argument_forms:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        return {"type": "function", **call, "function": function} if "function" in call else function

    def _prepare_tools(self, tools: Tools | None) -> Tools | None:
        if not tools:
            return None
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise ChatError("tools are JSON schemas: [{'type': 'function', 'function': {...}}]")
        return self._guard(tools, tags_allowed=False)

    def _with_slots(self, prepared: Iterable[Message]) -> tuple[list[Message], list[str]]:
        """The messages with numbered slots in place of their content, and the content by number."""
        contents: list[str] = []
        slotted: list[Message] = []
        for message in prepared:
            content = message["content"]
            texts = [part["text"] for part in content] if isinstance(content, list) else [content]
            slots = [f"\ufdd5{len(contents) + number}\ufdd6" for number in range(len(texts))]
            contents.extend(texts)
            parts = [{"type": "text", "text": slot} for slot in slots]
            slotted.append({**message, "content": parts if isinstance(content, list) else slots[0]})
        return slotted, contents


def _tool_named(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "Looks up.", "parameters": parameters}}


def _parse_arguments(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        raise ChatError(
            f"the chat template wants tool-call arguments as an object; {text!r:.200} is no JSON"
        ) from error


def _align(text: str, literals: Sequence[str], contents: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Where the contents stand in the rendered text, given the template's literals around them.

    A template may trim a content or write it as JSON. What cannot be placed is counted as content from there on.
    """
    if not text.startswith(literals[0]):
        return ((0, len(text)),)
    spans: list[tuple[int, int]] = []
    position = len(literals[0])
    for number, content in enumerate(contents):
        literal, last = literals[number + 1], number + 1 == len(contents)
        end = len(text) - len(literal) if last else _content_end(text, position, content, literal)
        if end < position or not text.startswith(literal, end):
            return (*spans, (position, len(text)))
        spans.append((position, end))
        position = end + len(literal)
    return tuple(spans)


def _content_end(text: str, start: int, content: str, literal: str) -> int:
    for form in (content, content.strip(), json.dumps(content, ensure_ascii=False), json.dumps(content)):
        if text.startswith(form + literal, start):
            return start + len(form)
    return text.find(literal, start)
