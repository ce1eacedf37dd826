"""Semantic Scholar's Graph API: papers by keyword, and snippets of their text.

A key (S2_API_KEY) is optional; without one the public rate limit holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from posttrain.tools.online.arguments import Arguments, parse, spec_of
from posttrain.tools.online.render import Document, call_id, document, result_of
from posttrain.tools.online.service import Service, ServiceOptions, field, items, read_key
from posttrain.tools.protocol import ToolResult

BASE_URL = "https://api.semanticscholar.org/graph/v1"
KEY_ENV = "S2_API_KEY"
PAPER_FIELDS = "paperId,corpusId,url,title,abstract,authors,year,venue,citationCount,openAccessPdf,externalIds"
Year = Annotated[str | None, Field(description="Publication year or range: 2024, 2015-2020, 2015-, -2015")]
Venue = Annotated[str | None, Field(description="Venue, such as ACL or EMNLP")]


class SnippetArguments(Arguments):
    """DR-Tulu's, and the `fieldsOfStudy` that its prompt offers."""

    query: str = Field(min_length=1, description="What to find within the text of papers")
    year: Year = None
    paper_ids: str | None = Field(default=None, description="Comma-separated ids of papers to search within")
    venue: Venue = None
    fields_of_study: str | None = Field(
        default=None,
        alias="fieldsOfStudy",
        validation_alias=AliasChoices("fieldsOfStudy", "fields_of_study"),
        description="Comma-separated fields, such as Computer Science,Medicine",
    )
    limit: int = Field(default=10, ge=1, le=1000, description="Number of snippets")


class PaperArguments(Arguments):
    """DR-Tulu's."""

    query: str = Field(min_length=1, description="Search query")
    year: Year = None
    min_citation_count: int | None = Field(default=None, ge=0, description="Smallest number of citations")
    sort: str | None = Field(default=None, description="Such as citationCount:asc or publicationDate:desc")
    venue: Venue = None
    limit: int = Field(default=25, ge=1, description="Number of papers, at most 100")


class SnippetSearch:
    """`snippet_search`: passages of scientific papers."""

    def __init__(self, name: str, options: ServiceOptions) -> None:
        self.spec = spec_of(name, "Find passages in scientific papers that match a query.", SnippetArguments)
        self._service, self._headers = _open(name, options)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, SnippetArguments, arguments)
        params = {
            "query": asked.query,
            "year": asked.year,
            "paperIds": asked.paper_ids and ",".join(part.strip() for part in asked.paper_ids.split(",")),
            "venue": asked.venue,
            "fieldsOfStudy": asked.fields_of_study,
            "limit": asked.limit,
        }
        answer = await self._service.get("/snippet/search", params, self._headers)
        found = [_snippet(entry) for entry in items(self._service, answer, "data")]
        return result_of(found[: asked.limit], call_id(self.spec.name, arguments), self._service.cost())

    async def close(self) -> None:
        await self._service.close()


class PaperSearch:
    """`semantic_scholar_search`: papers with their abstracts."""

    def __init__(self, name: str, options: ServiceOptions) -> None:
        self.spec = spec_of(name, "Search for academic papers; gives titles and abstracts.", PaperArguments)
        self._service, self._headers = _open(name, options)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, PaperArguments, arguments)
        params = {
            "query": asked.query,
            "year": asked.year,
            "minCitationCount": asked.min_citation_count,
            "sort": asked.sort,
            "venue": asked.venue,
            "offset": 0,
            "limit": min(asked.limit, 100),
            "fields": PAPER_FIELDS,
        }
        answer = await self._service.get("/paper/search", params, self._headers)
        found = [_paper(entry) for entry in items(self._service, answer, "data")]
        return result_of(found[: asked.limit], call_id(self.spec.name, arguments), self._service.cost())

    async def close(self) -> None:
        await self._service.close()


def _open(name: str, options: ServiceOptions) -> tuple[Service, dict[str, str]]:
    key = read_key(name, options.key_env or KEY_ENV, required=options.key_env is not None)
    headers = {"x-api-key": key.value} if key.value else {}
    return Service(name, BASE_URL, options, (key,)), headers


def _snippet(entry: dict[str, Any]) -> Document:
    """A snippet that is only the paper's title again adds nothing."""
    text = "" if field(entry, "snippet", "snippetKind") == "title" else field(entry, "snippet", "text")
    more = {"corpus_id": field(entry, "paper", "corpusId"), "section": field(entry, "snippet", "section")}
    return document(field(entry, "paper", "title"), text, score=entry.get("score"), **more)


def _paper(entry: dict[str, Any]) -> Document:
    names = [author.get("name") for author in entry.get("authors") or [] if isinstance(author, dict)]
    return document(
        entry.get("title"),
        entry.get("abstract"),
        entry.get("url") or _open_access(entry),
        paper_id=entry.get("paperId"),
        year=entry.get("year"),
        venue=entry.get("venue") or None,
        citations=entry.get("citationCount"),
        authors=[name for name in names if name] or None,
        pdf=_open_access(entry),
    )


def _open_access(entry: dict[str, Any]) -> str | None:
    """The paper's PDF as the service knows it, or as its ids on arXiv and in the ACL Anthology tell."""
    known = field(entry, "openAccessPdf", "url")
    if known:
        return known
    if arxiv := field(entry, "externalIds", "ArXiv"):
        return f"https://arxiv.org/pdf/{arxiv}"
    acl = field(entry, "externalIds", "ACL")
    return f"https://www.aclweb.org/anthology/{acl}.pdf" if acl else None
