"""Who fetches a page: this process, a Crawl4AI server, Jina Reader, or Serper's scraper."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from posttrain.deadline import in_thread
from posttrain.tools.online.content import Page, extract, extract_in_worker
from posttrain.tools.online.net import Answer, Net
from posttrain.tools.online.service import (
    Key,
    NotConfigured,
    Service,
    ServiceOptions,
    field,
    items,
    read_key,
    status_error,
)
from posttrain.tools.pool import WorkerPool
from posttrain.tools.protocol import ToolError
from posttrain.tools.worker import WorkerJob
from posttrain.trajectory import CallStatus

_READING = WorkerJob(
    name="browse_webpage", location=f"{extract_in_worker.__module__}:{extract_in_worker.__name__}", memory_bytes=4 << 30
)
FetcherName = Literal["http", "crawl4ai", "jina", "serper"]
CRAWL4AI_URL, CRAWL4AI_KEY = "CRAWL4AI_API_URL", "CRAWL4AI_API_KEY"
JINA_URL, JINA_KEY = "https://r.jina.ai", "JINA_API_KEY"
SERPER_URL, SERPER_KEY = "https://scrape.serper.dev", "SERPER_API_KEY"


class BrowseOptions(ServiceOptions):
    """How `browse_webpage` reads pages; `base_url` and `key_env` are those of the fetcher's service."""

    fetcher: FetcherName = "http"
    workers: int = Field(default=2, ge=0)  # processes that read pages, killed past net.seconds; 0 = a thread
    context_chars: int = Field(default=2000, ge=100)  # shown of a page; on either side of a localised snippet

    @model_validator(mode="after")
    def _own_requests_have_no_service(self) -> BrowseOptions:
        if self.fetcher == "http" and (self.base_url is not None or self.key_env is not None):
            raise ValueError("fetcher http reads pages itself: base_url and key_env belong to crawl4ai, jina or serper")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """What a call asks of a fetcher."""

    url: str
    query: str | None = None
    links: bool = False
    prune: bool = False
    html: bool = False
    bypass_cache: bool = True
    timeout_ms: int | None = None


class Fetcher(Protocol):
    """Gives pages. Raises ToolError."""

    async def page(self, asked: PageRequest) -> Page: ...

    def cost(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


def make_fetcher(name: str, options: BrowseOptions) -> Fetcher:
    """Raises `NotConfigured` when a key or an address is missing."""
    makers: dict[FetcherName, Callable[[str, BrowseOptions], Fetcher]] = {
        "http": HttpFetcher,
        "crawl4ai": Crawl4aiFetcher,
        "jina": JinaFetcher,
        "serper": SerperFetcher,
    }
    return makers[options.fetcher](name, options)


class HttpFetcher:
    """Fetches the page itself and takes its main content out with trafilatura, in worker processes: a page that is made
    to be slow can be given up, and one that crashes a parser crashes a worker."""

    def __init__(self, name: str, options: BrowseOptions) -> None:
        self._name = name
        self._net = Net(options.net)
        self._pool = WorkerPool(_READING, size=options.workers) if options.workers else None

    async def page(self, asked: PageRequest) -> Page:
        headers = {"accept": "text/html, application/xhtml+xml, text/plain;q=0.8, */*;q=0.1"}
        answer = await self._net.fetch("GET", asked.url, headers=headers, redirects=True, cut=True)
        if not 200 <= answer.status < 300:
            error = status_error(self._name, answer)
            raise ToolError(CallStatus.FAILED, error.message, transient=error.transient, retry_after=error.retry_after)
        page = await self._read(answer, asked)
        return replace(page, url=answer.url, cut=answer.cut)

    async def _read(self, answer: Answer, asked: PageRequest) -> Page:
        if self._pool is None:
            kind, charset = answer.content_type, answer.charset
            return await in_thread(lambda: extract(answer.body, kind, charset, links=asked.links, prune=asked.prune))
        arguments = {
            "body": answer.body.decode("latin-1"),
            "content_type": answer.content_type,
            "charset": answer.charset or "",
            "links": asked.links,
            "prune": asked.prune,
        }
        try:
            async with asyncio.timeout(self._net.options.seconds):
                read = await self._pool.call(arguments)
        except TimeoutError:
            said = f"the page could not be read within {self._net.options.seconds:g} s"
            raise ToolError(CallStatus.TIMEOUT, said) from None
        return Page("", **read.data)

    def cost(self) -> dict[str, float]:
        return {"requests": 1.0}

    async def close(self) -> None:
        await self._net.close()
        if self._pool is not None:
            self._pool.close()


class _ByService:
    """A service that fetches in our place; it gets only URLs that this machine might open, too."""

    def __init__(self, name: str, base_url: str, options: BrowseOptions, key: Key) -> None:
        self.service = Service(name, base_url, options, (key,))
        self._public = Net(options.net)

    async def check(self, url: str) -> None:
        await self._public.check(url)

    def cost(self) -> dict[str, float]:
        return self.service.cost()

    async def close(self) -> None:
        await self.service.close()
        await self._public.close()


class Crawl4aiFetcher(_ByService):
    """Crawl4AI's server: a browser that runs scripts. Its own filters choose the content on a query or by pruning."""

    def __init__(self, name: str, options: BrowseOptions) -> None:
        base_url = options.base_url or os.environ.get(CRAWL4AI_URL)
        if not base_url:
            raise NotConfigured(f"{name} with crawl4ai needs the server's address: set {CRAWL4AI_URL} or base_url")
        key = read_key(name, options.key_env or CRAWL4AI_KEY, required=options.key_env is not None)
        super().__init__(name, base_url, options, key)
        self._headers = {"x-api-key": key.value} if key.value else {}
        self._timeout_ms = int(options.net.seconds * 1000)

    async def page(self, asked: PageRequest) -> Page:
        await self.check(asked.url)
        body = {"urls": [asked.url], "crawler_config": self._config(asked)}
        answer = await self.service.post("/crawl", body, self._headers)
        results = items(self.service, answer, "results")
        if not results:
            raise self.service.fail("the crawl gave no result")
        found = results[0]
        if not found.get("success"):
            raise self.service.fail(str(found.get("error_message") or "the page could not be opened")[:300])
        markdown = found.get("markdown")
        if isinstance(markdown, dict):
            markdown = markdown.get("fit_markdown") or markdown.get("raw_markdown")
        html = found.get("html") if asked.html else None
        return Page(found.get("url") or asked.url, field(found, "metadata", "title") or "", markdown or "", html)

    def _config(self, asked: PageRequest) -> dict[str, Any]:
        chosen: dict[str, Any] = {"options": {"type": "dict", "value": {"ignore_links": not asked.links}}}
        if asked.query:
            params: dict[str, Any] = {"user_query": asked.query, "bm25_threshold": 1.2}
            chosen["content_filter"] = {"type": "BM25ContentFilter", "params": params}
        elif asked.prune:
            params = {"threshold": 0.5, "threshold_type": "fixed", "min_word_threshold": 50}
            chosen["content_filter"] = {"type": "PruningContentFilter", "params": params}
        most = asked.timeout_ms if asked.timeout_ms is not None else self._timeout_ms
        run = {
            "cache_mode": "bypass" if asked.bypass_cache else "enabled",
            "page_timeout": min(most, self._timeout_ms),
            "excluded_tags": ["form", "header", "footer", "nav"],
            "exclude_social_media_links": True,
            "word_count_threshold": 10,
            "markdown_generator": {"type": "DefaultMarkdownGenerator", "params": chosen},
        }
        return {"type": "CrawlerRunConfig", "params": run}


class JinaFetcher(_ByService):
    """Jina Reader."""

    def __init__(self, name: str, options: BrowseOptions) -> None:
        key = read_key(name, options.key_env or JINA_KEY)
        super().__init__(name, JINA_URL, options, key)
        self._headers = {"authorization": f"Bearer {key.value}", "accept": "application/json"}

    async def page(self, asked: PageRequest) -> Page:
        await self.check(asked.url)
        headers = dict(self._headers)
        headers |= {} if asked.links else {"x-retain-links": "none"}
        headers |= {"x-no-cache": "true"} if asked.bypass_cache else {}
        data = field(await self.service.post("/", {"url": asked.url}, headers), "data")
        if not isinstance(data, dict):
            raise self.service.fail("expected an object at 'data'")
        return Page(data.get("url") or asked.url, data.get("title") or "", data.get("content") or "")


class SerperFetcher(_ByService):
    """Serper's scraper."""

    def __init__(self, name: str, options: BrowseOptions) -> None:
        key = read_key(name, options.key_env or SERPER_KEY)
        super().__init__(name, SERPER_URL, options, key)
        self._headers = {"x-api-key": key.value or ""}

    async def page(self, asked: PageRequest) -> Page:
        await self.check(asked.url)
        body = {"url": asked.url, "includeMarkdown": asked.links}
        answer = await self.service.post("/", body, self._headers)
        if not isinstance(answer, dict):
            raise self.service.fail("expected an object")
        text = answer.get("markdown") or answer.get("text") or ""
        return Page(asked.url, field(answer, "metadata", "title") or "", text)
