"""Tool calls in what the policy writes, for the agent to see; and what the agent sends back, for the policy to read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from posttrain.boundary.foreign_json import read_json
from posttrain.chat import Renderer
from posttrain.chat.calls import SYNTAXES, CallParser, NotExpressible, Signatures, stop_ids
from posttrain.endpoint.wire import Refusal
from posttrain.task import Message
from posttrain.tools.protocol import ToolSpec
from posttrain.trajectory import Source

ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 9  # what the strictest template (Mistral's) takes: letters and digits only
NO_SYNTAX = "none"
Tools = Sequence[dict[str, Any]]
Pieces = list[tuple[list[int], Source]]


class CallForm:
    """How one policy writes calls, and how it is shown tools and results: a syntax of `posttrain.chat.calls`.

    name: of the syntax; "none" takes all that is written as text.
    """

    def __init__(self, name: str, renderer: Renderer) -> None:
        self._syntax = None if name == NO_SYNTAX else SYNTAXES[name]
        self._renderer = renderer
        vocabulary = renderer.tokenizer.get_vocab()
        self.stop_strings: tuple[str, ...] = self._syntax.stop_strings if self._syntax else ()
        self.stop_ids = stop_ids(self._syntax, vocabulary) if self._syntax else frozenset[int]()
        marks = self._syntax.markers if self._syntax else ()
        # Some models write calls with special tokens, which are no part of a turn's text otherwise.
        self._special = any(m in vocabulary and not renderer.complete_text([vocabulary[m]]) for m in marks)

    def text(self, ids: Sequence[int]) -> str:
        """What the policy wrote, with the marks of its calls."""
        return self._renderer.decode(ids) if self._special else self._renderer.complete_text(ids)

    def parser(self, tools: Tools, *, in_thought: bool) -> CallParser | None:
        """Finds calls of `tools` in one turn, outside thoughts; None where none can be written. Raises Refusal."""
        if self._syntax is None or not tools:
            return None
        return CallParser(self._syntax, signatures_of(tools), in_thought=in_thought, withdraws=False)

    def results(self, messages: Sequence[Message], turn: str) -> Pieces | None:
        """Tool results that go on with the policy's open turn; None where the chat template renders messages."""
        if self._syntax is None or not self._syntax.in_turn or any(m["role"] != "tool" for m in messages):
            return None
        pieces: Pieces = []
        for message in messages:
            framed = self._syntax.result(message.get("name", ""), message["content"], turn=turn)
            pieces += [(self._renderer.text(part), Source.ENV) for part in (framed.head, framed.text, framed.tail)]
        return pieces

    def prompt(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """A whole conversation. Tools that the chat template does not describe are described in the system message."""
        if self._syntax is not None and self._syntax.in_turn:
            messages = [self._spelled(message) for message in messages]
        if tools and self._syntax is not None and not self._renderer.shows_tools:
            text = self._syntax.instructions(signatures_of(tools))
            first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
            shown = text if first is None else f"{first['content']}\n\n{text}"
            messages, tools = [{"role": "system", "content": shown}, *rest], None
        return self._renderer.prompt(messages, tools)

    def _spelled(self, message: Message) -> Message:
        """A message of a rewritten history in words: templates know nothing of calls inside a turn."""
        assert self._syntax is not None
        if message["role"] == "tool":
            return {"role": "user", "content": str(self._syntax.result(message.get("name", ""), message["content"]))}
        if not message.get("tool_calls"):
            return message
        functions = [call["function"] for call in message["tool_calls"]]
        try:
            calls = self._syntax.render([(f["name"], read_json(f["arguments"])) for f in functions])
        except (NotExpressible, ValueError) as error:
            raise Refusal(f"an earlier call cannot be shown to the policy: {error}", param="messages") from error
        return {"role": "assistant", "content": (message["content"] or "") + calls}


def signatures_of(tools: Tools) -> Signatures:
    """Raises Refusal for tools that are none."""
    try:
        return _signatures(json.dumps(list(tools), sort_keys=True))
    except ValueError as error:
        raise Refusal(str(error), param="tools") from error


@lru_cache(maxsize=64)
def _signatures(tools: str) -> Signatures:
    functions = [tool["function"] for tool in json.loads(tools)]
    return Signatures(
        ToolSpec(
            name=function["name"],
            description=function.get("description", ""),
            parameters=function.get("parameters") or {"type": "object", "properties": {}},
        )
        for function in functions
    )


def call_id(seed: int, number: int) -> str:
    """The id of the `number`-th call of a turn; depends on nothing but the turn's seed."""
    digest = int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest())
    letters: list[str] = []
    for _ in range(ID_LENGTH):
        digest, rest = divmod(digest, len(ID_LETTERS))
        letters.append(ID_LETTERS[rest])
    return "".join(letters)
