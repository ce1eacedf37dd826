"""Web search: Google and Google Scholar through Serper, Google's Custom Search, and Bing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from posttrain.tools.online.arguments import Arguments, parse, spec_of
from posttrain.tools.online.render import Document, call_id, document, result_of
from posttrain.tools.online.service import Service, ServiceOptions, field, items, read_key
from posttrain.tools.protocol import ToolResult

SERPER_URL, SERPER_KEY = "https://google.serper.dev", "SERPER_API_KEY"
GOOGLE_URL, GOOGLE_KEY, GOOGLE_ENGINE = "https://www.googleapis.com/customsearch/v1", "GOOGLE_API_KEY", "GOOGLE_CSE_ID"
BING_URL, BING_KEY = "https://api.bing.microsoft.com/v7.0", "BING_SUBSCRIPTION_KEY"
MAX_QUERY_CHARS = 2048


class ScholarArguments(Arguments):
    """DR-Tulu's `serper_google_scholar_search`."""

    query: str = Field(min_length=1, description="Search query")
    num_results: int = Field(default=10, ge=1, le=100, description="Number of results to return")


class SearchArguments(ScholarArguments):
    """DR-Tulu's `serper_google_webpage_search`."""

    gl: str = Field(default="us", description="Country code of the results to prefer")
    hl: str = Field(default="en", description="Language of the user interface")


class SerperSearch:
    """`google_search`: web pages, as Google finds them."""

    def __init__(self, name: str, options: ServiceOptions) -> None:
        about = "Search the web with Google; gives titles, addresses and snippets of pages."
        self.spec = spec_of(name, about, SearchArguments)
        self._service, self._headers = _serper(name, options)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, SearchArguments, arguments)
        body = {"q": asked.query[:MAX_QUERY_CHARS], "num": asked.num_results, "gl": asked.gl, "hl": asked.hl}
        answer = await self._service.post("/search", {**body, "type": "search"}, self._headers)
        found = [_link(entry) for entry in items(self._service, answer, "organic")]
        cost = {**self._service.cost(), **_credits(answer)}
        return result_of(found[: asked.num_results], call_id(self.spec.name, arguments), cost)

    async def close(self) -> None:
        await self._service.close()


class SerperScholar:
    """`google_scholar`: papers, as Google Scholar finds them."""

    def __init__(self, name: str, options: ServiceOptions) -> None:
        self.spec = spec_of(name, "Search for academic papers with Google Scholar.", ScholarArguments)
        self._service, self._headers = _serper(name, options)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, ScholarArguments, arguments)
        body = {"q": asked.query[:MAX_QUERY_CHARS], "num": asked.num_results}
        answer = await self._service.post("/scholar", body, self._headers)
        found = [_link(entry) for entry in items(self._service, answer, "organic")]
        cost = {**self._service.cost(), **_credits(answer)}
        return result_of(found[: asked.num_results], call_id(self.spec.name, arguments), cost)

    async def close(self) -> None:
        await self._service.close()


class GoogleCustomSearch:
    """`google_custom_search`: Google's own JSON API, ten results a request; needs a key and a search engine's id."""

    def __init__(self, name: str, options: ServiceOptions) -> None:
        self.spec = spec_of(name, "Search the web with Google.", SearchArguments)
        key = read_key(name, options.key_env or GOOGLE_KEY)
        self._engine = read_key(name, GOOGLE_ENGINE, about="the id of a search engine")
        self._service = Service(name, GOOGLE_URL, options, (key,))
        self._headers = {"x-goog-api-key": key.value or ""}

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, SearchArguments, arguments)
        params = {"cx": self._engine.value, "q": asked.query[:MAX_QUERY_CHARS], "gl": asked.gl, "hl": asked.hl}
        found: list[Document] = []
        requests = 0
        while len(found) < asked.num_results:
            page = {"start": len(found) + 1, "num": min(10, asked.num_results - len(found))}
            answer = await self._service.get("", {**params, **page}, self._headers)
            entries = items(self._service, answer, "items")
            requests += 1
            found += map(_link, entries)
            if len(entries) < page["num"]:
                break
        return result_of(found, call_id(self.spec.name, arguments), self._service.cost(requests))

    async def close(self) -> None:
        await self._service.close()


class BingSearch:
    """`bing_search`: Bing's web search, version 7, or a service that speaks like it."""

    def __init__(self, name: str, options: ServiceOptions) -> None:
        self.spec = spec_of(name, "Search the web with Bing.", SearchArguments)
        key = read_key(name, options.key_env or BING_KEY)
        self._service = Service(name, BING_URL, options, (key,))
        self._headers = {"ocp-apim-subscription-key": key.value or ""}

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, SearchArguments, arguments)
        params = {"q": asked.query[:MAX_QUERY_CHARS], "count": min(asked.num_results, 50), "cc": asked.gl}
        answer = await self._service.get("/search", {**params, "setLang": asked.hl}, self._headers)
        entries = items(self._service, answer, "webPages", "value")
        found = [document(entry.get("name"), entry.get("snippet"), entry.get("url")) for entry in entries]
        return result_of(found[: asked.num_results], call_id(self.spec.name, arguments), self._service.cost())

    async def close(self) -> None:
        await self._service.close()


def _serper(name: str, options: ServiceOptions) -> tuple[Service, dict[str, str]]:
    key = read_key(name, options.key_env or SERPER_KEY)
    return Service(name, SERPER_URL, options, (key,)), {"x-api-key": key.value or ""}


def _link(entry: dict[str, Any]) -> Document:
    more = {key: entry[key] for key in ("date", "year", "publicationInfo", "citedBy") if entry.get(key) is not None}
    return {**document(entry.get("title"), entry.get("snippet"), entry.get("link")), **more}


def _credits(answer: Any) -> dict[str, float]:
    spent = field(answer, "credits")
    return {"credits": float(spent)} if isinstance(spent, int | float) else {}
