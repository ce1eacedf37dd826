"""A trajectory in colours: who wrote which words, and where the answer stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from rich.text import Text

from posttrain.envs.budget import TextCodec
from posttrain.thought import THOUGHT
from posttrain.trajectory import Source, Trajectory

STYLES = {
    Source.PROMPT: "blue",
    Source.POLICY: "green",
    Source.ENV: "dim",
    Source.TEMPLATE: "dim italic",
    Source.INJECTED: "red",
}
ANSWER_STYLE = "bold black on bright_yellow"
REPLACEMENT = "\ufffd"  # what decoders show for an incomplete character
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), ord(REPLACEMENT))  # terminals obey these, too

_THOUGHT_OR_ANSWER = re.compile(rf"{THOUGHT}|<answer>(?P<answer>.*?)</answer>", re.DOTALL)


def colored(trajectory: Trajectory, renderer: TextCodec, *, first: int = 0) -> Text:
    """The tokens from position `first` on as text, one style per source.

    What the policy wrote between answer tags, outside its thoughts, stands out. Control characters show as pictures
    (U+241B for escape), so that no text can steer a terminal; otherwise `plain` is what the tokens decode to.
    """
    shown = Text()
    for source, text in pieces(trajectory, renderer, first=first):
        start = len(shown)
        shown.append(text.translate(VISIBLE), STYLES[source])
        if source is Source.POLICY:
            for found in _THOUGHT_OR_ANSWER.finditer(text):
                if found["answer"] is not None:
                    shown.stylize(ANSWER_STYLE, start + found.start("answer"), start + found.end("answer"))
    return shown


def pieces(trajectory: Trajectory, renderer: TextCodec, *, first: int = 0) -> Iterator[tuple[Source, str]]:
    """Runs of tokens of one source, decoded in their context: decoders drop the space before a first word. A character
    whose bytes are spread over two runs belongs to the second one."""
    ids, before = trajectory.token_ids, _complete(renderer, trajectory.token_ids[:first])
    for source, run in groupby(range(first, len(ids)), key=trajectory.source.__getitem__):
        end = list(run)[-1] + 1
        now = renderer.decode(ids) if end == len(ids) else _complete(renderer, ids[:end])
        yield source, now[len(before) :]
        before = now


def _complete(renderer: TextCodec, ids: list[int]) -> str:
    return renderer.decode(ids).rstrip(REPLACEMENT) if ids else ""
