"""What can be wrong with a chat template or with the messages given to it."""

from __future__ import annotations

from dataclasses import dataclass


class ChatError(ValueError):
    """A conversation that this tokenizer and template cannot express; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TokenAt:
    """A token of a rendered conversation; `id` and `text` are None past the end."""

    index: int
    id: int | None
    text: str | None

    def __str__(self) -> str:
        return "nothing (the render ends)" if self.id is None else f"{self.text!r} (id {self.id})"


class NotAppendOnly(ChatError):
    """The template rewrites history: what it renders later does not start with what the policy has seen."""

    def __init__(self, conversation: str, expected: TokenAt, found: TokenAt, context: str) -> None:
        self.conversation = conversation
        self.expected = expected
        self.found = found
        self.index = expected.index
        super().__init__(
            f"the chat template is not append-only in conversation {conversation!r}: {context}; "
            f"first differing token at index {expected.index}: expected {expected}, found {found}. "
            "Tokens the policy has seen would change behind its back. Use a template that only appends "
            "(set tokenizer.chat_template)"
            + (", or run without tool messages: probe(tools=False)." if conversation.startswith("tool") else ".")
        )
