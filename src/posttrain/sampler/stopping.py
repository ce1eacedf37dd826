"""Where a turn ends: stop ids and stop strings, looked for in generated tokens only.

A stop string is found at the token that completes it; that token is the last one kept, so ids, log-probs and text are
cut at the same place. Decoding text after every token would cost more than a small model's forward, so a table over
the vocabulary says once which tokens can complete a stop string, and text is looked at only after one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.sampler.protocol import SamplingParams
from posttrain.trajectory import StopReason

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
DECODE_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids to text: `texts[i]` is token i decoded alone, `decode` a list of ids decoded together."""

    texts: list[str]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Decodes every token of a Hugging Face tokenizer once (0.3 s for 262,144 tokens)."""

        def decode(ids: Sequence[int]) -> str:
            return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

        texts: list[str] = []
        for start in range(0, len(tokenizer), DECODE_CHUNK):
            rows = [[i] for i in range(start, min(start + DECODE_CHUNK, len(tokenizer)))]
            texts += tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cls(texts, decode)


@dataclass(frozen=True, slots=True)
class StopRule:
    """The stops of one request, ready to be asked after every token."""

    ids: frozenset[int]
    strings: tuple[str, ...]
    candidates: frozenset[int]  # tokens that can complete one of `strings`
    vocabulary: Vocabulary | None

    def after(self, generated: Sequence[int]) -> tuple[StopReason, int | str] | None:
        """The stop that the last token of `generated` completes. A stop id goes before a stop string."""
        last = generated[-1]
        if last in self.ids:
            return StopReason.STOP_ID, last
        if last in self.candidates and (found := self._string_in_tail(generated)) is not None:
            return StopReason.STOP_STRING, found
        return None

    def _string_in_tail(self, generated: Sequence[int]) -> str | None:
        """The stop string that ends first in the last few tokens' text (of two ending together, the longer)."""
        assert self.vocabulary is not None
        text = self.vocabulary.decode(self._tail(generated))
        ends = [(text.find(s) + len(s), -len(s), s) for s in self.strings if s in text]
        return min(ends)[2] if ends else None

    def _tail(self, generated: Sequence[int]) -> Sequence[int]:
        """Enough last tokens to hold the longest stop string. A character may take up to four tokens."""
        assert self.vocabulary is not None
        texts = self.vocabulary.texts
        need = 4 * max(map(len, self.strings)) + 8
        start = len(generated)
        while start and need > 0:
            start -= 1
            token = generated[start]
            need -= len(texts[token]) if token < len(texts) else 0
        return generated[start:]


class Stops:
    """Makes the rule of a request; remembers the candidate tokens of the stop strings it has met."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None
        self._candidates: dict[tuple[str, ...], frozenset[int]] = {}

    def rule(self, params: SamplingParams) -> StopRule:
        """Raises ValueError for stop strings when there is no tokenizer to read tokens with."""
        if not params.stop_strings:
            return StopRule(params.stop_ids, (), frozenset(), None)
        if self._vocabulary is None:
            if self._tokenizer is None:
                raise ValueError(
                    f"stop strings {params.stop_strings} need a tokenizer: construct the sampler with one, "
                    "or stop by ids only"
                )
            self._vocabulary = Vocabulary.of(self._tokenizer)
        strings = params.stop_strings
        if strings not in self._candidates:
            self._candidates[strings] = completing_tokens(self._vocabulary.texts, strings)
        return StopRule(params.stop_ids, strings, self._candidates[strings], self._vocabulary)


def completing_tokens(texts: Sequence[str], strings: Sequence[str]) -> frozenset[int]:
    """Every token within which one of `strings` could end; some that cannot are included, never the reverse.

    A string ends inside a token that contains it or starts with some ending of it. Tokens with incomplete characters
    always count; and since a decoder may drop a leading blank of a lone token, each is also tried with one.
    """
    endings = tuple({s[k:] for s in strings for k in range(len(s))})
    return frozenset(
        token
        for token, text in enumerate(texts)
        if REPLACEMENT in text
        or text.startswith(endings)
        or (" " + text).startswith(endings)
        or any(s in text for s in strings)
    )
