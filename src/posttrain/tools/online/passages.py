"""The part of a text that a query or a search snippet is about. Pure functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.protocol import Passage

PASSAGE_CHARS = 600  # what a passage grows to, out of whole paragraphs and sentences
MIN_MATCH = 0.2  # word F1 below which a sentence is not the one that a snippet was taken from
GAP = "\n...\n"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\w+")


def beginning(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[:chars].strip() + "..."


def about_query(text: str, query: str, chars: int) -> str:
    """The passages that BM25 ranks highest, as many as fit into `chars`, in the order of the page.

    The beginning where no passage has a word of the query.
    """
    parts = passages(text, min(PASSAGE_CHARS, max(100, chars // 3)))
    if len(text) <= chars or not parts:
        return text
    try:
        index = BM25Retriever.from_passages([Passage(str(at), part) for at, part in enumerate(parts)])
    except ValueError:  # a page without a single word
        return beginning(text, chars)
    (ranked,) = index.search([query], len(parts))
    chosen: list[int] = []
    room = chars
    for passage in ranked:
        size = len(passage.contents) + len(GAP)
        if size <= room or not chosen:
            chosen.append(int(passage.id))
            room -= size
    return _joined(parts, sorted(chosen), chars) if chosen else beginning(text, chars)


def _joined(parts: Sequence[str], chosen: Sequence[int], chars: int) -> str:
    """Neighbours are joined as they stood; a gap is marked."""
    text = parts[chosen[0]]
    for before, at in itertools.pairwise(chosen):
        text += ("\n" if at == before + 1 else GAP) + parts[at]
    return beginning(text, chars)


def passages(text: str, size: int = PASSAGE_CHARS) -> list[str]:
    """Paragraphs, long ones cut between sentences and short ones put together, of about `size` characters each."""
    pieces = [piece for paragraph in text.split("\n") for piece in _cut(paragraph.strip(), size) if piece]
    merged: list[str] = []
    for piece in pieces:
        if merged and len(merged[-1]) + len(piece) < size:
            merged[-1] += "\n" + piece
        else:
            merged.append(piece)
    return merged


def _cut(paragraph: str, size: int) -> list[str]:
    if len(paragraph) <= size:
        return [paragraph]
    pieces = [""]
    for sentence in _SENTENCE_END.split(paragraph):
        for start in range(0, len(sentence), size):  # a sentence without an end is cut anywhere
            part = sentence[start : start + size]
            if pieces[-1] and len(pieces[-1]) + len(part) >= size:
                pieces.append(part)
            else:
                pieces[-1] = f"{pieces[-1]} {part}".strip()
    return pieces


def around_snippet(text: str, snippet: str, chars: int) -> str | None:
    """The sentence with the highest word F1 against `snippet`, and `chars` characters on either side.

    None where no sentence reaches F1 = 0.2: the page does not hold what the snippet says.
    """
    wanted = set(_WORD.findall(snippet.lower()))
    best, span = MIN_MATCH, None
    for start, end in sentence_spans(text):
        score = word_f1(wanted, set(_WORD.findall(text[start:end].lower())))
        if score > best:
            best, span = score, (start, end)
    return None if span is None else text[max(0, span[0] - chars) : span[1] + chars].strip()


def sentence_spans(text: str) -> list[tuple[int, int]]:
    ends = [found.span() for found in re.finditer(r"(?<=[.!?])\s+|\n+", text)]
    starts = [0, *(end for _, end in ends)]
    stops = [*(start for start, _ in ends), len(text)]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def word_f1(first: set[str], second: set[str]) -> float:
    common = len(first & second)
    return 2 * common / (len(first) + len(second)) if common else 0.0
