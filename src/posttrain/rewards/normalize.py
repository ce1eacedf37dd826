"""One spelling for answers that mean the same."""

from __future__ import annotations

import re
import unicodedata

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ASCII_SYMBOLS = frozenset("$+<=>^`|~")  # SQuAD's punctuation is string.punctuation: these are symbols to Unicode


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces.

    The normalisation of SQuAD (Rajpurkar et al. 2016) as used by Search-R1, carried over to Unicode: NFKC first, case
    folding for lower case, every character of Unicode category P for punctuation. Punctuation is removed, not replaced
    by a space ("U.S." -> "us").
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    bare = "".join(char for char in folded if not _is_punctuation(char))
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _is_punctuation(char: str) -> bool:
    return char in _ASCII_SYMBOLS or unicodedata.category(char).startswith("P")
