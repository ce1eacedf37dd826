"""From the bytes of a page to its text. Reading HTML needs trafilatura (extra `tools`).

Runs in worker processes: imports nothing else that is slow.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Any

from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

HTML_TYPES = ("text/html", "application/xhtml+xml", "")
_TEXT_TYPES = ("application/json", "application/xml", "application/rss+xml", "application/atom+xml")

# Python knows them, browsers do not; the first two take hours for a long page, the others hide what a page says
_NO_ENCODINGS_OF_PAGES = {"punycode", "idna", "unicode-escape", "raw-unicode-escape", "utf-7", "charmap"}


@dataclass(frozen=True, slots=True)
class Page:
    """A page as text; `html` is what it was made of, where that is known."""

    url: str
    title: str
    text: str
    html: str | None = None
    cut: bool = False  # the page went on beyond the byte limit


def extract(body: bytes, content_type: str, charset: str | None, *, links: bool = False, prune: bool = False) -> Page:
    """The main content of a page; `links` keeps hyperlinks as markdown, `prune` drops what may be boilerplate.

    Raises ToolError for what is no text, such as a PDF or a picture.
    """
    text = decoded(body, charset)
    if content_type in HTML_TYPES and (content_type or looks_like_html(body)):
        return _from_html(text if text is not None else body, links=links, prune=prune)
    if content_type.startswith("text/") or content_type in _TEXT_TYPES or content_type.endswith(("+xml", "+json")):
        return Page("", "", text if text is not None else body.decode("utf-8", "replace"))
    kind = content_type or "no content type"
    raise ToolError(CallStatus.FAILED, f"the address leads to no web page but to {kind}, which cannot be read")


def decoded(body: bytes, charset: str | None) -> str | None:
    """The text in the announced encoding; None where none is announced, it fails, or pages have none such."""
    try:
        name = codecs.lookup(charset).name if charset else None
        return None if name is None or name in _NO_ENCODINGS_OF_PAGES else body.decode(name)
    except (LookupError, ValueError):
        return None


def looks_like_html(body: bytes) -> bool:
    return bool(re.search(rb"<(?:!doctype|html|head|body)\b", body[:2048], re.IGNORECASE))


def _from_html(html: str | bytes, *, links: bool, prune: bool) -> Page:
    try:
        import trafilatura
        import trafilatura.metadata
    except ImportError as error:
        raise ImportError("reading web pages needs trafilatura: pip install 'posttrain[tools]'") from error
    source = html if isinstance(html, str) else html.decode("utf-8", "replace")
    tree = trafilatura.load_html(html)
    if tree is None:
        return Page("", "", "", html=source)
    title = trafilatura.metadata.extract_metadata(tree).title or ""
    text = trafilatura.extract(tree, include_comments=False, include_links=links, favor_precision=prune)
    return Page("", title, (text or trafilatura.html2txt(html)).strip(), html=source)


def extract_in_worker(body: str, content_type: str, charset: str, links: bool, prune: bool) -> dict[str, Any]:
    """`extract` for a worker process, whose arguments are those of a tool: text and flags.

    Args:
        body: the bytes as Latin-1 text, which holds every byte
        content_type: as announced
        charset: as announced, or empty
        links: keep hyperlinks
        prune: drop what may be boilerplate
    """
    page = extract(body.encode("latin-1"), content_type, charset or None, links=links, prune=prune)
    return {"title": page.title, "text": page.text, "html": page.html}
