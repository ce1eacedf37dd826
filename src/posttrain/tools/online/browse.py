"""`browse_webpage`: a page as text, cut to what a query or a search snippet is about."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import AliasChoices, Field

from posttrain.tools.online.arguments import Arguments, parse, spec_of
from posttrain.tools.online.content import Page
from posttrain.tools.online.fetchers import BrowseOptions, PageRequest, make_fetcher
from posttrain.tools.online.passages import about_query, around_snippet, beginning
from posttrain.tools.online.render import call_id, document, result_of
from posttrain.tools.protocol import ToolError, ToolResult
from posttrain.trajectory import CallStatus

_BARE_HOST = re.compile(r"[\w-]+(\.[\w-]+)+(:\d+)?([/?#]|$)")


class BrowseArguments(Arguments):
    """DR-Tulu's `crawl4ai_fetch_webpage_content`, and the snippet of a search result to show in its place."""

    url: str = Field(
        min_length=1, max_length=4096, validation_alias=AliasChoices("url", "webpage_url"), description="Page to open"
    )
    query: str | None = Field(
        default=None,
        validation_alias=AliasChoices("query", "bm25_query"),
        description="Show the passages of the page on this",
    )
    snippet: str | None = Field(default=None, description="Show the page around this text")
    ignore_links: bool = Field(default=True, description="Leave hyperlinks out")
    use_pruning: bool = Field(default=False, description="Main content only, where no query is given")
    bypass_cache: bool = Field(default=True, description="Do not take the page from the fetching service's cache")
    timeout_ms: int | None = Field(default=None, ge=1, description="Deadline for the page, below the configured one")
    include_html: bool = Field(default=False, description="Give the HTML to programs")


class BrowseWebpage:
    """Opens public pages only (`net`); whatever it finds is shown as one `<webpage>`."""

    def __init__(self, name: str, options: BrowseOptions) -> None:
        self.spec = spec_of(name, "Open a web page and read its text.", BrowseArguments)
        self._fetcher = make_fetcher(name, options)
        self._chars = options.context_chars

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        asked = parse(self.spec.name, BrowseArguments, arguments)
        page = await self._fetcher.page(
            PageRequest(
                url=with_scheme(asked.url),
                query=asked.query,
                links=not asked.ignore_links,
                prune=asked.use_pruning and asked.query is None,
                html=asked.include_html,
                bypass_cache=asked.bypass_cache,
                timeout_ms=asked.timeout_ms,
            )
        )
        if not page.text.strip():
            raise ToolError(CallStatus.FAILED, f"{self.spec.name}: the page holds no text")
        more = {"chars": len(page.text), "cut": True if page.cut else None}
        html = page.html if asked.include_html else None
        shown = document(page.title, self._shown(page, asked), page.url, kind="webpage", html=html, **more)
        return result_of([shown], call_id(self.spec.name, arguments), self._fetcher.cost())

    async def close(self) -> None:
        await self._fetcher.close()

    def _shown(self, page: Page, asked: BrowseArguments) -> str:
        if asked.snippet:
            found = around_snippet(page.text, asked.snippet, self._chars)
            if found is not None:
                return found
        if asked.query:
            return about_query(page.text, asked.query, self._chars)
        return beginning(page.text, self._chars)


def with_scheme(url: str) -> str:
    """`example.org/page` is opened as https; other things without a scheme are errors."""
    if "://" in url:
        return url
    if _BARE_HOST.match(url):
        return f"https://{url}"
    raise ToolError(CallStatus.BAD_ARGUMENTS, f"expected a web address such as https://example.org/, got {url[:200]!r}")
