"""Token ids -> text for people, parsers and scorers. Ids are never changed by being read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class Decoder:
    """Reads ids back. `special_ids` are left out of the text that scorers see."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special_ids: frozenset[int]) -> None:
        self._tokenizer: Any = tokenizer
        self._backend: Any = self._tokenizer.backend_tokenizer
        self._special_ids = special_ids
        self._byte_level = "ByteLevel" in repr(self._backend.decoder)

    def text(self, ids: Sequence[int]) -> str:
        """Everything, control tokens included; a character cut in the middle shows as a replacement mark."""
        # the backend itself: transformers' own decode looks at every id first, which takes longer than decoding
        return self._backend.decode(ids, skip_special_tokens=False)

    def complete_text(self, ids: Sequence[int]) -> str:
        """Without special tokens, up to the last complete character."""
        special = self._special_ids
        kept = ids if special.isdisjoint(ids) else [token_id for token_id in ids if token_id not in special]
        text = self.text(kept)
        if text.endswith(REPLACEMENT) and _ends_inside_character(self._last_bytes(kept)):
            text = text.rstrip(REPLACEMENT)
        return text

    def _last_bytes(self, ids: Sequence[int], count: int = 4) -> bytes:
        """The bytes behind the last tokens, at least `count` where there are as many."""
        found = b""
        for token_id in reversed(ids):
            found = self._token_bytes(token_id) + found
            if len(found) >= count:
                break
        return found

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if self._byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # SentencePiece byte fallback
            return bytes([int(token[3:5], 16)])
        return token.encode("utf-8", errors="replace")


def _ends_inside_character(data: bytes) -> bool:
    """Whether UTF-8 data stops after a lead byte with some, but not all, of its continuation bytes."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return length > back
    return False


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte (the GPT-2 alphabet), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
