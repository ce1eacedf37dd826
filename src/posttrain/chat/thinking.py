"""Removing earlier thinking from a token history, by cutting tokens out: what stays keeps the ids it had."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.chat.decoding import REPLACEMENT
from posttrain.thought import THINK_CLOSE
from posttrain.trajectory import Source


def policy_runs(source: Sequence[Source]) -> list[tuple[int, int]]:
    """Spans [start, end) of consecutive policy tokens."""
    runs: list[tuple[int, int]] = []
    for position, who in enumerate(source):
        if who is not Source.POLICY:
            continue
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def strip_thinking(
    ids: Sequence[int],
    source: Sequence[Source],
    *,
    opening: Sequence[int],
    opening_text: str,
    decode: Callable[[Sequence[int]], str],
    encode: Callable[[str], list[int]],
) -> list[int] | None:
    """The history without the thinking of its policy turns, or None when there is none.

    ids, source: [L]. A turn loses everything up to its last `</think>` and the newlines behind it, and with it the
    `opening` that the template had written before the turn (`opening_text` decoded; empty for most templates).
    Only where a single token holds both the end of the thinking and the start of the answer, the rest of that token's
    text is encoded anew.
    """
    kept: list[int] = []
    position, changed = 0, False
    for start, end in policy_runs(source):
        before = list(ids[position:start])
        turn = list(ids[start:end])
        opened = bool(opening) and before[-len(opening) :] == list(opening)
        text = (opening_text if opened else "") + decode(turn)
        if THINK_CLOSE in text:
            changed = True
            before = before[: len(before) - len(opening)] if opened else before
            turn = _behind_thinking(turn, decode, encode)
        kept += before + turn
        position = end
    return [*kept, *ids[position:]] if changed else None


def _behind_thinking(
    turn: list[int], decode: Callable[[Sequence[int]], str], encode: Callable[[str], list[int]]
) -> list[int]:
    text = decode(turn)
    if THINK_CLOSE not in text:  # the template itself had closed an empty thinking block
        return turn
    cut = text.rindex(THINK_CLOSE) + len(THINK_CLOSE)
    cut += len(text[cut:]) - len(text[cut:].lstrip("\n"))
    low, high = 0, len(turn)  # the fewest tokens whose text reaches the cut
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(decode(turn[:middle])) >= cut else (middle + 1, high)
    while low < len(turn) and decode(turn[:low])[cut:].endswith(REPLACEMENT):  # never re-encode half a character
        low += 1
    straddling = decode(turn[:low])[cut:]
    return encode(straddling) + turn[low:]
