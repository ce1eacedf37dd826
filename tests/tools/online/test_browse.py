"""`browse_webpage` over real pages from a local server, and over the services that may fetch for it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.tools.online.config import OnlineToolConfig
from posttrain.tools.online.render import shown_ids
from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

from .calls import call, failure, tool
from .extraction import needs_trafilatura
from .stub import Reply, Request, Stub

HTML = (
    "<html><head><title>Bridges</title></head><body><nav>Home</nav><article>"
    + "".join(
        f"<p>Paragraph {n} tells of the river and its {n} ferries. They left at noon every day.</p>" for n in range(90)
    )
    + '<p>The Forth Bridge was opened in 1890. See <a href="https://a.example/">here</a>.</p></article></body></html>'
)


def browse(stub: Stub, **options: Any) -> Any:
    """Without worker processes, which take a second to start, unless asked for."""
    net = {"allow": (stub.place,), **options.pop("net", {})}
    return tool("browse_webpage", net=net, **{"workers": 0, **options})


@needs_trafilatura
class TestPages:
    def test_the_beginning_is_shown(self, stub: Stub):
        stub.on("/page", Reply(HTML, type="text/html; charset=utf-8"))
        result = call(browse(stub), url=f"{stub.url}/page")
        (page,) = result.data
        head, *_ = result.text.split("Snippet: ")
        assert head == f"<webpage id={page['id']}>\nTitle: Bridges\nURL: {stub.url}/page\n"
        assert result.text.endswith("...\n</webpage>")
        assert len(page["text"]) <= 2003
        assert page["chars"] > 5000
        assert "Forth" not in page["text"]
        assert shown_ids(result.text) == [page["id"]]
        assert "html" not in page

    def test_a_query_and_a_snippet_find_their_place(self, stub: Stub):
        stub.on("/page", Reply(HTML, type="text/html"))
        for arguments in ({"query": "when was the bridge opened"}, {"bm25_query": "bridge"},
                          {"snippet": "... Forth Bridge opened in 1890"}):  # fmt: skip
            (page,) = call(browse(stub), url=f"{stub.url}/page", **arguments).data
            assert "The Forth Bridge was opened in 1890." in page["text"], arguments
        (page,) = call(browse(stub), url=f"{stub.url}/page", snippet="nothing of the kind at all").data
        assert page["text"].startswith("Paragraph 0")

    def test_links_html_and_context_are_options(self, stub: Stub):
        stub.on("/page", Reply(HTML, type="text/html"))
        arguments = {"url": f"{stub.url}/page", "ignore_links": "false", "include_html": True, "query": "bridge"}
        (page,) = call(browse(stub, context_chars=300), **arguments).data
        assert "[here](https://a.example/)" in page["text"]
        assert page["html"] == HTML
        assert len(page["text"]) <= 700

    def test_a_real_page_through_the_wire(self, stub: Stub, shared_data: Path):
        folder = shared_data / "html_pages"
        with gzip.open(folder / "ground_truth.json.gz") as file:
            name, truth = next(iter(json.load(file).items()))
        packed = (folder / "html" / f"{name}.html.gz").read_bytes()
        stub.on("/page", Reply(packed, type="text/html", headers={"content-encoding": "gzip"}))
        (page,) = call(browse(stub, context_chars=50_000), url=f"{stub.url}/page").data
        words = set(truth["articleBody"].split())
        assert len(words & set(page["text"].split())) > 0.9 * len(words)

    def test_pages_are_read_in_worker_processes(self, stub: Stub):
        """The same text; one that takes too long is given up, and the next is read."""
        stub.on("/page", Reply(HTML.replace("river", "Fluß").encode("latin-1"), type="text/html; charset=latin-1"))
        stub.on("/pdf", Reply(b"%PDF-1.7", type="application/pdf"))
        deep = "<html><body>" + "<div>" * 300_000
        stub.on("/slow", Reply(deep + "<p>x" * 300_000, type="text/html"))

        async def run() -> None:
            made, here = browse(stub, workers=1, net={"seconds": 5}), browse(stub)
            arguments = {"url": f"{stub.url}/page", "include_html": True}
            assert (await made.call(arguments)).data == (await here.call(arguments)).data
            with pytest.raises(ToolError, match="cannot be read"):
                await made.call({"url": f"{stub.url}/pdf"})
            started = time.monotonic()
            with contextlib.suppress(ToolError):  # a fast machine reads it in time
                await made.call({"url": f"{stub.url}/slow"})
            assert time.monotonic() - started < 8
            assert "Fluß" in (await made.call(arguments)).text
            await asyncio.gather(made.close(), here.close())

        asyncio.run(run())

    def test_a_long_page_is_cut_and_says_so(self, stub: Stub):
        stub.on("/page", Reply(HTML, type="text/html"))
        (page,) = call(browse(stub, net={"max_bytes": 3000}), url=f"{stub.url}/page").data
        assert page["cut"] is True
        assert page["chars"] < 3000

    def test_a_page_without_text_is_a_failure(self, stub: Stub):
        stub.on("/page", Reply("<html><body><script>app()</script></body></html>", type="text/html"))
        assert "no text" in failure(browse(stub), url=f"{stub.url}/page").message

    def test_where_redirects_end_is_the_source(self, stub: Stub):
        stub.on("/old", Reply(status=301, headers={"location": "/page"}))
        stub.on("/page", Reply(HTML, type="text/html"))
        (page,) = call(browse(stub), url=f"{stub.url}/old").data
        assert page["url"] == f"{stub.url}/page"


@pytest.mark.parametrize(
    ("reply", "said", "transient", "wait"),
    [
        (Reply(status=404), "HTTP 404: not found", False, None),
        (Reply(status=400), "HTTP 400", False, None),
        (Reply(status=403, type="text/html"), "access refused", False, None),
        (Reply(status=429, headers={"retry-after": "30"}), "too many", True, 30.0),
        (Reply(status=503), "HTTP 503", True, None),
        (Reply(b"%PDF-1.7", type="application/pdf"), "application/pdf, which cannot be read", False, None),
        (Reply("x", promise=100, type="text/plain"), "broke off", True, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_answers_are_typed(stub: Stub, reply: Reply, said: str, transient: bool, wait: float | None):
    stub.on("/page", reply)
    error = failure(browse(stub), url=f"{stub.url}/page")
    assert error.status is CallStatus.FAILED
    assert said in error.message
    assert (error.transient, error.retry_after) == (transient, wait)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://[::1]:{port}/", "http://169.254.169.254/",
        "http://2130706433/", "http://0x7f.1/", "file:///etc/passwd", "http://user:x@example.org/", "http://example.org:22/",
    ],
)  # fmt: skip
def test_private_places_are_not_opened(url: str):
    with socket.socket() as secret:
        secret.bind(("127.0.0.1", 0))
        secret.listen()
        error = failure(tool("browse_webpage"), url=url.format(port=secret.getsockname()[1]))
        assert not error.transient
        secret.setblocking(False)
        with pytest.raises(BlockingIOError):
            secret.accept()


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "about blank", "/etc/passwd", "data:text/html,x", "mailto:a@b.c"]
)
def test_what_is_no_web_address(url: str):
    assert failure(tool("browse_webpage"), url=url).status is CallStatus.BAD_ARGUMENTS


def test_a_bare_host_is_opened_as_https():
    error = failure(tool("browse_webpage", net={"allow": ["nobody.invalid:443"]}), url="nobody.invalid/page?x=1")
    assert error.message == "nobody.invalid: no such host"


PUBLIC = "http://8.8.8.8/page"  # a literal, so that the check needs no name server; nobody connects to it


class TestServices:
    def test_crawl4ai(self, stub: Stub, monkeypatch: pytest.MonkeyPatch):
        markdown = {"raw_markdown": "# All\n\nof it", "fit_markdown": "the fitting part"}
        row = {"url": PUBLIC, "success": True, "markdown": markdown, "html": "<p>", "metadata": {"title": "T"}}
        stub.on("/crawl", Reply({"success": True, "results": [row]}))
        monkeypatch.setenv("CRAWL4AI_API_URL", stub.url)
        monkeypatch.setenv("CRAWL4AI_API_KEY", "crawl-key-1")
        made = tool("browse_webpage", fetcher="crawl4ai", net={"seconds": 20})
        (page,) = call(made, url=PUBLIC, query="fit", timeout_ms=90000).data
        assert (page["title"], page["text"], page["url"]) == ("T", "the fitting part", PUBLIC)
        assert stub.last.headers["x-api-key"] == "crawl-key-1"
        sent = stub.last.json["crawler_config"]["params"]
        assert stub.last.json["urls"] == [PUBLIC]
        assert (sent["page_timeout"], sent["cache_mode"]) == (20000, "bypass")
        generator = sent["markdown_generator"]["params"]
        assert generator["options"]["value"] == {"ignore_links": True}
        assert generator["content_filter"]["type"] == "BM25ContentFilter"
        assert generator["content_filter"]["params"]["user_query"] == "fit"

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            ({"results": [{"success": False, "error_message": "net::ERR_TIMED_OUT"}]}, "ERR_TIMED_OUT"),
            ({"results": []}, "no result"),
            ({"success": True}, "no result"),
            ([], "expected an object"),
            ({"results": [{"success": True, "markdown": None}]}, "no text"),
        ],
    )
    def test_crawls_that_failed(self, stub: Stub, answer: Any, said: str):
        stub.on("/crawl", Reply(answer))
        made = tool("crawl4ai_docker_fetch_webpage_content", base_url=stub.url)
        assert said in failure(made, url=PUBLIC).message

    def test_jina(self, stub: Stub, monkeypatch: pytest.MonkeyPatch):
        def read(request: Request) -> Reply:
            return Reply({"code": 200, "data": {"title": "T", "url": request.json["url"], "content": "text of it"}})

        stub.routes["/"] = read
        monkeypatch.setenv("JINA_API_KEY", "jina-key-1")
        (page,) = call(tool("jina_fetch_webpage_content", base_url=stub.url), webpage_url=PUBLIC).data
        assert (page["title"], page["text"], page["url"]) == ("T", "text of it", PUBLIC)
        assert stub.last.headers["authorization"] == "Bearer jina-key-1"
        assert stub.last.headers["x-retain-links"] == "none"

    def test_serper(self, stub: Stub, monkeypatch: pytest.MonkeyPatch):
        stub.on("/", Reply({"text": "plain", "markdown": "**bold**", "metadata": {"title": "T"}, "credits": 2}))
        monkeypatch.setenv("SERPER_API_KEY", "serper-key-1")
        made = tool("serper_fetch_webpage_content", base_url=stub.url)
        (page,) = call(made, webpage_url=PUBLIC, ignore_links=False).data
        assert page["text"] == "**bold**"
        assert stub.last.json == {"url": PUBLIC, "includeMarkdown": True}

    @pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://169.254.169.254/", "http://2130706433/", "file:///x"])
    def test_a_service_is_never_sent_to_private_places(self, stub: Stub, url: str):
        """It may stand in the operator's network, and would see more of it than the public does."""
        made = tool("crawl4ai_fetch_webpage_content", base_url=stub.url)
        assert not failure(made, url=url).transient
        assert not stub.requests


def test_the_own_fetcher_takes_no_service():
    with pytest.raises(ValueError, match="base_url and key_env belong to crawl4ai"):
        OnlineToolConfig(use="browse_webpage", options={"base_url": "http://127.0.0.1:1"})
