"""Text -> token ids at a single site, with control tokens that foreign text cannot spell.

Foreign text passes `guard` before a template sees it: a BREAK mark goes in front of every control-token string. After
rendering, the control strings without a mark are the template's own. Where no mark exists the tokenizer is used as it
is; otherwise a copy of it is used whose control tokens are spelled with characters that foreign text cannot hold, so
that the rest of the text keeps the exact ids of the joint render.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from posttrain.chat.errors import ChatError

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# Unicode noncharacters are never in interchanged text. Foreign text that holds one gets U+FFFD, as Unicode advises;
# so do lone surrogates, which no tokenizer takes.
BREAK, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
_RESERVED = dict.fromkeys([*range(0xFDD0, 0xFDF0), *range(0xD800, 0xE000)], "\ufffd")
_DELIMITER_SHAPE = re.compile(r"<[|｜].*[|｜]>|\[/?[A-Z_]+\]", re.DOTALL)
_ANCHORS = ("\n", ";", "a")


@dataclass(frozen=True, slots=True)
class Encoded:
    """ids [N] and the span [start, end) of characters that each covers in the marked text."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Encoder:
    """One tokenizer's single tokenisation site.

    `control`: string -> id of the tokens that no foreign text may become: every special token, delimiters such as
    `<|im_start|>`, and every added token that the chat template names (`<tool_call>`, `<think>`). The last kind is in
    `tags`: instructions name tags on purpose, so prompt text may contain them; environment text may not.
    The unknown token is not a control token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ChatError(
                f"{type(tokenizer).__name__} has no tokenizers-library backend, which is needed to keep control tokens "
                "apart from text; load it with AutoTokenizer(use_fast=True) or convert it to tokenizer.json"
            )
        self._tokenizer: Any = tokenizer
        self.control: dict[str, int] = {}
        self.tags: frozenset[str] = frozenset()
        self.special_ids: frozenset[int] = frozenset()
        self._read_control(template or "")
        self.control_ids = frozenset(self.control.values())
        self._patterns = {
            False: _alternation(self.control),
            True: _alternation([text for text in self.control if text not in self.tags]),
        }
        self.bos_id: int | None = tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else None
        self.adds_bos = self._tokenizer_adds_bos()

    def _read_control(self, template: str) -> None:
        tags: set[str] = set()
        special: set[int] = set()
        named = set(self._tokenizer.all_special_tokens)
        for token_id, token in self._tokenizer.added_tokens_decoder.items():
            text = token.content
            if not text or token_id == self._tokenizer.unk_token_id:
                continue
            if token.special or text in named:
                special.add(token_id)
            elif not _DELIMITER_SHAPE.fullmatch(text):
                if not text.strip() or text not in template:
                    continue  # an ordinary piece of vocabulary: a run of spaces, an HTML tag
                tags.add(text)
            self.control[text] = token_id
        self.tags = frozenset(tags)
        self.special_ids = frozenset(special)

    def guard(self, text: str, *, tags_allowed: bool = False) -> str:
        """The text with a BREAK in front of every control string, ready to be rendered by a template."""
        text = text.translate(_RESERVED)
        pattern = self._patterns[tags_allowed]
        while pattern.search(text):  # again: a break can uncover an overlapping occurrence
            text = pattern.sub(lambda match: BREAK + match[0], text)
        return text

    def find_control(self, marked: str, start: int = 0) -> re.Match[str] | None:
        """The first control string at or after `start` that the template itself wrote."""
        return self._patterns[False].search(marked, start)

    def encode(self, marked: str) -> Encoded:
        """Marked text -> ids. The control ids are exactly the unmarked control strings, in order; no BOS is added.

        Raises ChatError should the tokenizer produce any other control id.
        """
        expected = self._expected(marked)
        if BREAK not in marked:
            encoded = self._encode_plainly(marked)
            if self._controls(encoded.ids) == expected:
                return encoded
        encoded = self._encode_guarded(marked)
        if self._controls(encoded.ids) != expected:
            raise ChatError(
                f"the tokenizer yields control ids {self._controls(encoded.ids)} for a text that holds {expected}: "
                f"{marked!r:.200}; its vocabulary or normalizer produces control tokens from ordinary text"
            )
        return encoded

    def ids(self, marked: str) -> list[int]:
        """Those of `encode`, in half the time, for it need not be found out which characters each covers."""
        if BREAK in marked:
            return self.encode(marked).ids
        (output,) = self._plain_backend().encode_batch_fast([marked], add_special_tokens=False)
        ids: list[int] = output.ids
        return ids if self._controls(ids) == self._expected(marked) else self.encode(marked).ids

    def text(self, text: str) -> list[int]:
        """Foreign text in the middle of a sequence -> ids without any control id, BOS or artificial leading space."""
        marked = self.guard(text)
        if not marked:
            return []
        for anchor in _ANCHORS if self._invents_leading_space else ():
            lead = self.encode(anchor)
            encoded = self.encode(anchor + marked)
            count = len(lead.ids)
            if encoded.ids[:count] == lead.ids and all(start >= len(anchor) for start, _ in encoded.spans[count:]):
                return encoded.ids[count:]
        return self.ids(marked)

    def start(self, ids: Sequence[int]) -> list[int]:
        """The beginning of a sequence with exactly one BOS, where the model has one and expects it.

        Raises ChatError when the template wrote more than one.
        """
        leading = 0
        while self.bos_id is not None and leading < len(ids) and ids[leading] == self.bos_id:
            leading += 1
        if leading > 1:
            raise ChatError(
                f"the prompt starts with {leading} BOS tokens (id {self.bos_id}); the template must write one"
            )
        if leading == 0 and self.adds_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return list(ids)

    def _expected(self, marked: str) -> list[int]:
        return [self.control[match[0]] for match in self._patterns[False].finditer(marked)]

    def _controls(self, ids: Sequence[int]) -> list[int]:
        known = self.control_ids
        return [] if known.isdisjoint(ids) else [token_id for token_id in ids if token_id in known]

    def _encode_plainly(self, text: str) -> Encoded:
        output = self._plain_backend().encode(text, add_special_tokens=False)
        return Encoded(output.ids, output.offsets)

    def _plain_backend(self) -> Tokenizer:
        """The tokenizer's own, without what other calls may have set in it: transformers sets it before every call, and
        takes longer around the backend than a prompt does in it."""
        backend = self._tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens:
            backend.encode_special_tokens = False
        return backend

    def _encode_guarded(self, marked: str) -> Encoded:
        backend, real_ids = self._guarded_backend
        pieces: list[str] = []
        origin: list[int] = []  # for every character of the protected text, where it stands in the marked text
        position = 0
        for match in re.finditer(f"{BREAK}|{self._patterns[False].pattern}", marked):
            pieces.append(marked[position : match.start()])
            origin.extend(range(position, match.start()))
            spelled = "" if match[0] == BREAK else self._spelling[match[0]]
            pieces.append(spelled)
            origin.extend([match.start()] * (len(spelled) - 1) + [match.end() - 1] * bool(spelled))
            position = match.end()
        pieces.append(marked[position:])
        origin.extend(range(position, len(marked) + 1))
        output = backend.encode("".join(pieces), add_special_tokens=False)
        ids = [real_ids.get(token_id, token_id) for token_id in output.ids]
        return Encoded(
            ids, [(origin[start], origin[max(start, end - 1)] + (end > start)) for start, end in output.offsets]
        )

    @cached_property
    def _spelling(self) -> dict[str, str]:
        return {text: f"{OPEN}{number}{CLOSE}" for number, text in enumerate(self.control)}

    @cached_property
    def _guarded_backend(self) -> tuple[Tokenizer, dict[int, int]]:
        """A copy of the backend with re-spelled control tokens, and its control ids -> the real ones."""
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        spec["truncation"] = spec["padding"] = spec["post_processor"] = None
        for token in spec["added_tokens"]:
            token["content"] = self._spelling.get(token["content"], token["content"])
        _respell(spec["model"], self._spelling)
        backend = Tokenizer.from_str(json.dumps(spec))
        real_ids: dict[int, int] = {}
        for text, token_id in self.control.items():
            copied = backend.token_to_id(self._spelling[text])
            if copied is None:
                raise ChatError(f"control token {text!r} is missing from the tokenizer's own serialisation")
            real_ids[copied] = token_id
        return backend, real_ids

    @cached_property
    def _invents_leading_space(self) -> bool:
        tokens = self._plain_backend().encode("a", add_special_tokens=False).tokens
        return bool(tokens) and tokens[0].startswith("▁")

    def _tokenizer_adds_bos(self) -> bool:
        with_special = self._tokenizer("a", verbose=False)["input_ids"]
        return self.bos_id is not None and with_special[:1] == [self.bos_id]


def _alternation(texts: Sequence[str] | Mapping[str, int]) -> re.Pattern[str]:
    """Matches the longest of the texts that has no BREAK in front; never matches when there is none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"(?<!{BREAK})(?:{'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)")


def _respell(model: dict[str, Any], spelling: Mapping[str, str]) -> None:
    """Renames control tokens inside a serialised model, so that ordinary text cannot reach them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {spelling.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: [piece, score] pairs
        model["vocab"] = [[spelling.get(piece, piece), score] for piece, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = spelling.get(model["unk_token"], model["unk_token"])
    if isinstance(model.get("merges"), list):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [
            [a, b] for a, b in pairs if a + b not in spelling and a not in spelling and b not in spelling
        ]
