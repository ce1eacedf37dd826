"""From bytes to text, over real pages."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pace import allowed
from posttrain.tools.online.content import extract
from posttrain.tools.protocol import ToolError

from .extraction import needs_trafilatura


def shingles(text: str, size: int = 4) -> Counter[tuple[str, ...]]:
    """The measure of the benchmark that the pages come from: runs of four words, with their counts."""
    words = re.findall(r"\w+", text)
    return Counter(tuple(words[at : at + size]) for at in range(max(1, len(words) - size + 1)) if words)


def f1(truth: str, found: str) -> float:
    expected, given = shingles(truth), shingles(found)
    common = (expected & given).total()
    total = expected.total() + given.total()
    return 2 * common / total if total else 1.0


def stored(path: Path) -> Any:
    with gzip.open(path) as file:
        return json.load(file)


@needs_trafilatura
def test_main_content_of_real_pages(shared_data: Path):
    """At least as good as the shipped output of an earlier trafilatura on the same pages: every second of 121."""
    folder = shared_data / "html_pages"
    truth, shipped = stored(folder / "ground_truth.json.gz"), stored(folder / "output_trafilatura.json.gz")
    assert len(truth) == 121
    truth = dict(list(truth.items())[::2])
    ours, pruned, titled, started = [], [], 0, time.process_time()
    for name, expected in truth.items():
        body = gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes())
        page = extract(body, "text/html", None)
        ours.append(f1(expected["articleBody"], page.text))
        titled += bool(page.title)
        if len(ours) % 4 == 0:
            pruned.append(f1(expected["articleBody"], extract(body, "text/html", None, prune=True).text))
    reference = statistics.mean(f1(truth[name]["articleBody"], shipped[name]["articleBody"]) for name in truth)
    print(f"{len(truth)} pages: mean F1 {statistics.mean(ours):.3f}, pruned {statistics.mean(pruned):.3f}, ", end="")
    print(f"shipped {reference:.3f}; {(time.process_time() - started) / len(truth) / 1.25 * 1000:.0f} ms a page")
    assert statistics.mean(ours) >= reference
    assert statistics.mean(pruned) >= reference
    assert titled >= 57


@needs_trafilatura
def test_odd_pages_are_read_without_a_fault(shared_data: Path):
    for path in sorted((shared_data / "html_pages" / "trafilatura_resources").iterdir()):
        body = path.read_bytes()
        body = gzip.decompress(body) if path.suffix == ".gz" else body
        kind = {".xml": "application/xml", ".atom": "application/atom+xml", ".rss": "application/rss+xml"}
        page = extract(body, kind.get(path.suffix, "text/html"), None)
        assert page.text, path.name


@needs_trafilatura
def test_links_are_left_out_unless_asked_for():
    filler = "<p>" + "Words of a long paragraph that is the content of this page. " * 8 + "</p>"
    html = f'<html><body><article>{filler}<p>See <a href="https://a.example/x">the source</a> now.</p></article>'
    assert "a.example" not in extract(html.encode(), "text/html", "utf-8").text
    assert "[the source](https://a.example/x)" in extract(html.encode(), "text/html", "utf-8", links=True).text


@needs_trafilatura
@pytest.mark.parametrize(
    ("body", "charset", "expected"),
    [
        ("<html><body><p>Grüße aus Köln, sagte sie gestern Abend.</p>".encode("latin-1"), "iso-8859-1", "Grüße"),
        ("<html><body><p>Grüße aus Köln, sagte sie gestern Abend.</p>".encode(), "no-such-charset", "Grüße"),
        ("<html><body><p>Grüße aus Köln, sagte sie gestern Abend.</p>".encode(), "ascii", "Grüße"),
        ('<html><head><meta charset="windows-1251"></head><body><p>Привет, мир</p>'.encode("cp1251"), None, "Привет"),
    ],
)
def test_encodings(body: bytes, charset: str | None, expected: str):
    assert expected in extract(body, "text/html", charset).text


@needs_trafilatura
@pytest.mark.parametrize("body", [b"", b"<", b"<html>", b"\x00\xff" * 100, b"<html>" + b"<div>" * 20000, b"<html><p>x"])
def test_broken_html_gives_some_text_or_none(body: bytes):
    assert isinstance(extract(body, "text/html", None).text, str)


@pytest.mark.parametrize("kind", ["application/pdf", "image/png", "application/octet-stream", ""])
def test_what_is_no_text_is_an_error(kind: str):
    with pytest.raises(ToolError, match="cannot be read"):
        extract(b"%PDF-1.7", kind, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/ld+json", "application/atom+xml"])
def test_plain_text_is_taken_as_it_is(kind: str):
    assert extract(b'{"a": "<b>"}', kind, None).text == '{"a": "<b>"}'


@pytest.mark.alone
@pytest.mark.parametrize("charset", ["punycode", "idna", "unicode_escape", "raw_unicode_escape", "utf-7", "zip", "os"])
def test_an_encoding_that_is_none_of_a_page_is_not_used(charset: str):
    """Python's punycode takes hours for a megabyte; its escapes turn harmless text into tags."""
    started = time.process_time()
    page = extract(b"plain \\u003csnippet " + b"a" * 1_000_000 + b"-bcd9", "text/plain", charset)
    assert page.text.startswith("plain \\u003csnippet aaa")
    assert time.process_time() - started < allowed(0.5)
