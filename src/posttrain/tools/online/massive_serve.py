"""Massive-serve: dense retrieval over large collections behind `POST /search`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from posttrain.tools.online.arguments import Arguments, parse, spec_of
from posttrain.tools.online.render import Document, call_id, document, result_of
from posttrain.tools.online.service import NotConfigured, Service, ServiceOptions, field
from posttrain.tools.protocol import ToolError, ToolResult
from posttrain.trajectory import CallStatus


class MassiveServeArguments(Arguments):
    """DR-Tulu's. `base_url` must be the configured one: a policy does not choose where requests go."""

    query: str = Field(min_length=1, description="Search query")
    n_docs: int = Field(default=10, ge=1, le=1000, description="Number of passages")
    domains: str = Field(default="dpr_wiki_contriever_ivfpq", description="Collection to search in")
    base_url: str | None = Field(default=None, description="Leave out")
    nprobe: int | None = Field(default=None, ge=1, description="Clusters to probe; leave out for the server's own")


class MassiveServe:
    """`massive_serve`: passages of Wikipedia or another collection."""

    def __init__(self, name: str, options: ServiceOptions) -> None:
        if options.base_url is None:
            raise NotConfigured(
                f"the tool {name} needs the address of a server: set base_url, such as http://host:30888"
            )
        self.spec = spec_of(name, "Search a large collection of passages.", MassiveServeArguments)
        self._service = Service(name, options.base_url, options)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, MassiveServeArguments, arguments)
        check_configured(self.spec.name, "base_url", asked.base_url, self._service.base_url)
        body = {"query": asked.query, "n_docs": asked.n_docs, "domains": asked.domains}
        probes = {} if asked.nprobe is None else {"nprobe": asked.nprobe}
        answer = await self._service.post("/search", {**body, **probes})
        found = self._passages(answer)[: asked.n_docs]
        return result_of(found, call_id(self.spec.name, arguments), self._service.cost())

    async def close(self) -> None:
        await self._service.close()

    def _passages(self, answer: Any) -> list[Document]:
        """Three lists, each with one list per query."""
        ids, passages, scores = (self._first(answer, key) for key in ("IDs", "passages", "scores"))
        if not len(ids) == len(passages) == len(scores):
            raise self._service.fail(f"{len(ids)} ids, {len(passages)} passages and {len(scores)} scores")
        rows = zip(ids, passages, scores, strict=True)
        return [document("", text, doc_id=number, score=score) for number, text, score in rows if text is not None]

    def _first(self, answer: Any, key: str) -> list[Any]:
        lists = field(answer, "results", key)
        if lists == []:
            return []
        if not (isinstance(lists, list) and isinstance(lists[0], list)):
            raise self._service.fail(f"expected a list of lists at results.{key}")
        return lists[0]


def check_configured(tool: str, name: str, given: str | None, configured: str) -> None:
    """Raises ToolError where a call names another server than the configuration."""
    if given is not None and given.removeprefix("http://").rstrip("/") != configured.removeprefix("http://"):
        message = f"{tool}: {name} is set by the configuration; leave it out"
        raise ToolError(CallStatus.BAD_ARGUMENTS, message)
