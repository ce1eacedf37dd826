"""Foreign text -> tokens within a budget, with a record of what was cut. Does not know who wrote the text, or why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.coerce import coerce_text
from posttrain.envs.protocol import Observation
from posttrain.task import Message
from posttrain.trajectory import Source

REPLACEMENT = "\ufffd"  # what decoders show for an incomplete or invalid character
CHARS_PER_TOKEN = 64  # text beyond this many characters per token of budget is not even encoded


class TextCodec(Protocol):
    """What envs and rollouts use of `posttrain.chat.Renderer`, whose methods of these names say what they do."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]: ...

    def delta(self, messages: Sequence[Message], *, after: int | None = None) -> list[tuple[list[int], Source]]: ...

    def closing(self, last_id: int | None) -> list[int]: ...

    def fork(
        self, token_ids: Sequence[int], source: Sequence[Source], messages: Sequence[Message]
    ) -> list[int] | None: ...

    def text(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def complete_text(self, ids: Sequence[int]) -> str: ...


class TokenBudget:
    """Spends up to `tokens` on pieces of text, in order; the first that does not fit is cut and ends with `marker`.

    `tokens_cut` counts what did not get in. For texts of more than CHARS_PER_TOKEN characters per token of budget it is
    a lower bound, because the rest is never encoded (10 MB of tool output would hold up every other episode).
    `bytes_cut` is counted on UTF-8. A character is never cut in half.
    """

    def __init__(self, codec: TextCodec, tokens: int, marker: str) -> None:
        self.codec = codec
        self.left = max(0, tokens)
        self.marker = marker
        self.tokens_cut = 0
        self.bytes_cut = 0

    def ids(self, text: str) -> list[int]:
        """The ids of as much of the text as the budget allows, marker included."""
        if not text:
            return []
        ids = self._encoded(text)
        if len(ids) <= self.left and len(text) <= self._longest:
            self.left -= len(ids)
            return ids
        kept, marker = self._cut(text, ids)
        return kept + marker

    def text(self, text: str) -> str:
        """The same, as text: unchanged when it fits."""
        if not text:
            return text
        ids = self._encoded(text)
        if len(ids) <= self.left and len(text) <= self._longest:
            self.left -= len(ids)
            return text
        kept, marker = self._cut(text, ids)
        return self.codec.decode(kept) + (self.marker if marker else "")

    @property
    def _longest(self) -> int:
        return CHARS_PER_TOKEN * max(self.left, 1)

    def _encoded(self, text: str) -> list[int]:
        return self.codec.text(text[: self._longest])

    def _cut(self, text: str, ids: list[int]) -> tuple[list[int], list[int]]:
        """The ids kept of the text and those of the marker; the budget is spent."""
        marker = self.codec.text(self.marker) if self.marker else []
        if len(marker) > self.left:
            marker = []
        kept = ids[: self.left - len(marker)]
        shown = self.codec.decode(kept) if kept else ""
        while shown.endswith(REPLACEMENT) and kept:
            kept = kept[:-1]
            shown = self.codec.decode(kept) if kept else ""
        self.left = 0
        self.tokens_cut += len(ids) - len(kept)
        self.bytes_cut += max(0, len(text.encode()) - len(shown.encode()))
        return kept, marker


@dataclass(frozen=True, slots=True, kw_only=True)
class CutObservation:
    """An observation within its budget: `ids` of its text, its `messages` ready to be rendered, what was cut."""

    ids: list[int]
    messages: list[Message]
    tokens_cut: int
    bytes_cut: int


class ObservationCutter:
    """Encodes observations for the episodes of one group; the markup that they share is encoded once.

    `max_tokens` bounds markup and foreign text together; the markup stays whole even when it alone exceeds it. What the
    chat template adds around messages is not counted.
    """

    def __init__(self, codec: TextCodec, *, max_tokens: int, cut_marker: str) -> None:
        self.codec = codec
        self.max_tokens = max_tokens
        self.cut_marker = cut_marker
        self._markup: dict[str, list[int]] = {"": []}

    def cut(self, observation: Observation) -> CutObservation:
        head, tail = self._markup_ids(observation.head), self._markup_ids(observation.tail)
        budget = TokenBudget(self.codec, self.max_tokens - len(head) - len(tail), self.cut_marker)
        body = budget.ids(coerce_text(observation.text))
        messages = [_within_budget(message, budget) for message in observation.messages]
        return CutObservation(
            ids=[*head, *body, *tail], messages=messages, tokens_cut=budget.tokens_cut, bytes_cut=budget.bytes_cut
        )

    def _markup_ids(self, markup: str) -> list[int]:
        text = coerce_text(markup)
        if text not in self._markup:
            self._markup[text] = self.codec.text(text)
        return self._markup[text]


def _within_budget(message: Message, budget: TokenBudget) -> Message:
    """The message with its content coerced to text and cut; lists of content parts are left to the template."""
    content = message.get("content")
    return message if isinstance(content, list) else {**message, "content": budget.text(coerce_text(content))}
