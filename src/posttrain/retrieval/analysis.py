"""Text -> terms, the same for passages and queries.

1. NFKC, then casefold: "Ｔｏｋｙｏ" = "TOKYO" = "tokyo", "Straße" = "STRASSE". Soft hyphens and joiners disappear.
2. A term is a maximal run of letters, digits, underscores and combining marks, two characters or longer.
3. With `bigrams`, scripts written without spaces (Han, kana, Hangul, Thai, Lao, Khmer, Burmese) give overlapping pairs
   of characters, and a lone character is a term of its own. Without, such a run is one term like any other: right for
   English text that quotes a foreign name (pairs would make that passage look long), useless for Chinese text.
4. Stop words are dropped. No stemming, accents count.

On ASCII text this is exactly bm25s' default tokeniser (lower case, `\\b\\w\\w+\\b`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby

ANALYZER = "nfkc-casefold-words/1"  # stored with every index; change it whenever terms change
_ASCII_WORDS = re.compile(r"\w\w+", re.ASCII).findall
_INVISIBLE = re.compile("[\u00ad\u200c\u200d\u2060\ufeff]")
_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Burmese, Khmer
    "\u1100-\u11ff\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff\uac00-\ud7ff"  # Hangul, kana
    "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"  # Han
)
_is_unspaced = re.compile(f"[{_UNSPACED}]").match
_find_unspaced = re.compile(f"[{_UNSPACED}]").findall


class Analyzer:
    """Turns text into terms; `stop_words` are compared after folding."""

    def __init__(self, stop_words: Iterable[str], *, bigrams: bool = False) -> None:
        self.stop_words = frozenset(stop_words)
        self.bigrams = bigrams

    def terms(self, text: str) -> list[str]:
        """The terms of `text` in order, repeats included."""
        stop_words = self.stop_words
        if text.isascii():
            return [word for word in _ASCII_WORDS(text.lower()) if word not in stop_words]
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        runs = _word_pattern().findall(_INVISIBLE.sub("", folded))
        terms = (
            (term for run in runs for term in _split(run)) if self.bigrams else (run for run in runs if len(run) > 1)
        )
        return [term for term in terms if term not in stop_words]


def needs_bigrams(texts: Iterable[str]) -> bool:
    """Is a fifth or more of the letters of a script without spaces? Decides for a corpus whose language nobody told."""
    letters = unspaced = 0
    for text in texts:
        letters += sum(map(str.isalnum, text))
        unspaced += 0 if text.isascii() else len(_find_unspaced(text))
    return unspaced * 5 >= letters > 0


def _split(run: str) -> Iterator[str]:
    for unspaced, group in groupby(run, key=lambda char: _is_unspaced(char) is not None):
        piece = "".join(group)
        if not unspaced:
            if len(piece) > 1:
                yield piece
        elif len(piece) == 1:
            yield piece
        else:
            yield from (piece[i : i + 2] for i in range(len(piece) - 1))


@cache
def _word_pattern() -> re.Pattern[str]:
    """Runs of word characters and combining marks; `\\w` alone would cut Hindi and Thai words at their vowel signs."""
    planes = (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0))  # where Unicode keeps its marks
    marks = "".join(chr(code) for code in planes if unicodedata.category(chr(code))[0] == "M")
    return re.compile(rf"\w+(?:[{marks}]+\w*)*")  # `[\w{marks}]+` is far slower: this tries marks only where \w ends
