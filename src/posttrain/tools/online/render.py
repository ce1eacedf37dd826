"""How found documents are shown to the policy, and how they are cited: DR-Tulu's wrappers, in one place.

    <tool_output><snippet id=4f3a90c1-0>
    Title: Attention Is All You Need
    URL: https://example.org/attention
    Snippet: The dominant sequence transduction models ...
    </snippet></tool_output>

A page is shown as `<webpage id=4f3a90c1-0>`. An id is the id of the call and the position of the document, and a claim
cites it: `<cite id="4f3a90c1-0">The Transformer needs no recurrence.</cite>`; several ids are joined by commas.

A tool, which knows no episode, labels by its name and arguments, so that a repeated run writes the same ids. `CallIds`
labels the calls of one episode apart; `relabelled` puts such a label on a result.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from posttrain.tools.protocol import ToolResult

Kind = Literal["snippet", "webpage"]
Document = dict[str, Any]  # id, title, text, url, kind and what the service said beside
NOTHING_FOUND = "No results found for the query."
_OUR_TAGS = re.compile(r"<(?=/?(?:snippet|webpage|tool_output|cite)\b)", re.IGNORECASE)
_CITE = re.compile(r"<cite\s+ids?\s*=\s*(?:\"([^\"<>]*)\"|'([^'<>]*)'|([^\s\"'<>]+))\s*>", re.IGNORECASE)
_SHOWN = re.compile(r"^<(?:snippet|webpage) id=([^\s<>]+)>$", re.MULTILINE)


def document(title: object, text: object, url: object = "", *, kind: Kind = "snippet", **more: Any) -> Document:
    """A document whose fields are strings whatever the service sent; `more` is kept where it is not None."""
    kept = {key: value for key, value in more.items() if value is not None}
    return {"id": "", "title": _line(title), "text": _string(text), "url": _line(url), "kind": kind, **kept}


def result_of(documents: Sequence[Document], call: str, cost: Mapping[str, float]) -> ToolResult:
    """The documents as text under ids of the call; what is empty is left out."""
    found = [entry for entry in documents if entry["title"] or entry["text"] or entry["url"]]
    return relabelled(ToolResult(text=NOTHING_FOUND, data=found, cost=cost), call)


def relabelled(result: ToolResult, call: str) -> ToolResult:
    """The same documents under another call's ids. A result without documents is given back as it is."""
    if not (isinstance(result.data, list) and result.data and all(map(_is_document, result.data))):
        return result
    labelled = [{**entry, "id": f"{call}-{position}"} for position, entry in enumerate(result.data)]
    return replace(result, text="\n".join(map(shown, labelled)), data=labelled)


def shown(entry: Document) -> str:
    """One document in its wrapper. Wrapper tags inside are defused: a page must not forge a source or its end."""
    lines = [f"Title: {entry['title'] or 'No title available'}"]
    if entry["url"]:
        lines.append(f"URL: {entry['url']}")
    lines.append(f"Snippet: {entry['text'] or 'No content available'}")
    inside = _OUR_TAGS.sub("&lt;", "\n".join(lines))
    return f"<{entry['kind']} id={entry['id']}>\n{inside}\n</{entry['kind']}>"


def tool_output(text: str) -> str:
    """An observation of DR-Tulu's agent; its training loop puts a line break before and two after."""
    return f"<tool_output>{text}</tool_output>"


def call_id(name: str, arguments: Mapping[str, Any], salt: str = "") -> str:
    """Eight hexadecimal digits, the same for the same call."""
    text = json.dumps([name, dict(arguments), salt], sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()


class CallIds:
    """The ids of one episode's calls: no two are equal, and the same episode gives the same ones."""

    def __init__(self, seed: str = "") -> None:
        self._seed = seed
        self._given: set[str] = set()

    def next(self) -> str:
        number = len(self._given)
        for attempt in range(1 << 16):
            made = hashlib.blake2b(f"{self._seed}/{number}/{attempt}".encode(), digest_size=4).hexdigest()
            if made not in self._given:
                self._given.add(made)
                return made
        raise AssertionError("unreachable: 2^32 ids, of which an episode takes a few")


def cited_ids(text: str) -> list[str]:
    """The ids of every `<cite id=...>` in order, repeats included; quotes, spaces, commas and `ids=` are understood."""
    lists = ("".join(groups) for groups in _CITE.findall(text))
    return [name for joined in lists for name in re.split(r"[,\s]+", joined) if name]


def shown_ids(text: str) -> list[str]:
    """The ids under which documents stand in an observation."""
    return _SHOWN.findall(text)


def _is_document(entry: object) -> bool:
    return isinstance(entry, dict) and {"id", "title", "text", "url", "kind"} <= entry.keys()


def _string(value: object) -> str:
    return value.strip() if isinstance(value, str) else "" if value is None else str(value)


def _line(value: object) -> str:
    return " ".join(_string(value).split())
