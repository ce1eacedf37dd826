"""PubMed through NCBI's E-utilities: esearch finds ids, efetch gives titles and abstracts, both as XML.

A key (NCBI_API_KEY) is optional and raises the rate limit from 3 to 10 requests a second. Fields are posted: in a URL
the key would land in logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from pydantic import Field

from posttrain.tools.online.arguments import Arguments, parse, spec_of
from posttrain.tools.online.render import Document, call_id, document, result_of
from posttrain.tools.online.service import Service, ServiceOptions, read_key
from posttrain.tools.protocol import ToolResult

BASE_URL = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils"
KEY_ENV = "NCBI_API_KEY"


class PubmedArguments(Arguments):
    """DR-Tulu's."""

    query: str = Field(min_length=1, description="Search query")
    limit: int = Field(default=10, ge=1, le=200, description="Number of papers")
    offset: int = Field(default=0, ge=0, description="Papers to skip")


class PubmedSearch:
    """`pubmed_search`: medical and biological papers with their abstracts."""

    def __init__(self, name: str, options: ServiceOptions) -> None:
        about = "Search for medical and biological papers in PubMed; gives titles and abstracts."
        self.spec = spec_of(name, about, PubmedArguments)
        key = read_key(name, options.key_env or KEY_ENV, required=options.key_env is not None)
        self._service = Service(name, BASE_URL, options, (key,))
        self._common = {"db": "pubmed", "tool": "posttrain", "api_key": key.value}

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, PubmedArguments, arguments)
        call = call_id(self.spec.name, arguments)
        form = {"term": asked.query, "retmax": asked.limit, "retstart": asked.offset, "sort": "relevance"}
        ids = await self._search(form)
        if not ids:
            return result_of([], call, self._service.cost(1))
        papers = await self._papers(ids[: asked.limit])
        return result_of(papers, call, self._service.cost(2))

    async def close(self) -> None:
        await self._service.close()

    async def _search(self, form: Mapping[str, Any]) -> list[str]:
        root = self._xml(await self._service.post_form("/esearch.fcgi", {**self._common, **form}), "eSearchResult")
        said = root.findtext("ERROR")
        if said:
            raise self._service.fail(" ".join(said.split())[:200], transient="rate" in said.lower())
        return [identifier.text for identifier in root.findall("./IdList/Id") if identifier.text]

    async def _papers(self, ids: list[str]) -> list[Document]:
        """In the order of `ids`, which is that of relevance; a paper that has vanished is left out."""
        form = {**self._common, "id": ",".join(ids), "retmode": "xml"}
        root = self._xml(await self._service.post_form("/efetch.fcgi", form), "PubmedArticleSet")
        found = {paper["paper_id"]: paper for paper in map(_paper, root.findall("PubmedArticle")) if paper is not None}
        return [found[identifier] for identifier in ids if identifier in found]

    def _xml(self, text: str, root: str) -> ElementTree.Element:
        if "<!ENTITY" in text:
            raise self._service.fail("the answer defines XML entities, which are not read")
        try:
            parsed = ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            raise self._service.fail("answered with something else than XML", transient=True) from error
        if parsed.tag != root:
            raise self._service.fail(f"expected {root}, got {parsed.tag}")
        return parsed


def _paper(entry: ElementTree.Element) -> Document | None:
    article, identifier = entry.find("./MedlineCitation/Article"), entry.findtext("./MedlineCitation/PMID")
    if article is None or not identifier:
        return None
    parts = [_labelled(part) for part in article.findall("./Abstract/AbstractText")]
    names = [_name(author) for author in article.findall("./AuthorList/Author")]
    date = article.find("./Journal/JournalIssue/PubDate")
    year = None if date is None else date.findtext("Year") or (date.findtext("MedlineDate") or "")[:4] or None
    return document(
        _text(article.find("ArticleTitle")),
        "\n".join(part for part in parts if part),
        f"https://pubmed.ncbi.nlm.nih.gov/{identifier}/",
        paper_id=identifier,
        year=year,
        venue=article.findtext("./Journal/Title"),
        authors=[name for name in names if name] or None,
    )


def _labelled(part: ElementTree.Element) -> str:
    label, text = part.get("Label"), _text(part)
    return f"{label}: {text}" if label and text else text


def _text(element: ElementTree.Element | None) -> str:
    """All text below: titles and abstracts carry italics and subscripts."""
    return "" if element is None else " ".join("".join(element.itertext()).split())


def _name(author: ElementTree.Element) -> str:
    last, first = author.findtext("LastName"), author.findtext("ForeName")
    return ", ".join(part for part in (last, first) if part) or author.findtext("CollectiveName") or ""
