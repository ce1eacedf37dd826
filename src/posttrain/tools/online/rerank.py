"""A reranker behind vLLM: `POST /rerank` (Cohere's and Jina's JSON) or, where a server has only that, `POST /score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from posttrain.boundary.foreign_json import read_json
from posttrain.tools.online.arguments import Arguments, parse, spec_of
from posttrain.tools.online.massive_serve import check_configured
from posttrain.tools.online.render import call_id, document, result_of
from posttrain.tools.online.service import Key, NotConfigured, Service, ServiceOptions, items, read_key
from posttrain.tools.protocol import ToolResult

Endpoint = Literal["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"]


class RerankOptions(ServiceOptions):
    """`base_url` is that of the vLLM server."""

    model: str | None = None  # as the server names it; None lets the call say it
    endpoint: Endpoint = "/rerank"


class RerankArguments(Arguments):
    """DR-Tulu's. `api_url` must be the configured one."""

    query: str = Field(min_length=1, description="What the documents should answer")
    documents: list[str] = Field(min_length=1, max_length=1000, description="Texts to rank")
    top_n: int = Field(default=-1, ge=-1, description="How many of the best to return; -1 for all")
    model_name: str | None = Field(default=None, description="Leave out for the configured model")
    api_url: str | None = Field(default=None, description="Leave out")

    @field_validator("documents", mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        """Calls written as tags carry the list as JSON text."""
        return read_json(given) if isinstance(given, str) and given.lstrip().startswith("[") else given


class Reranker:
    """`vllm_hosted_reranker`: the given documents, best first. `scores` is for other code of the run."""

    def __init__(self, name: str, options: RerankOptions) -> None:
        if options.base_url is None:
            raise NotConfigured(
                f"the tool {name} needs the address of a server: set base_url, such as http://host:30002"
            )
        self.spec = spec_of(name, "Order documents by how well they answer a query.", RerankArguments)
        key = read_key(name, options.key_env) if options.key_env else Key("", None)
        self._service = Service(name, options.base_url, options, (key,))
        self._headers = {"authorization": f"Bearer {key.value}"} if key.value else {}
        self._options = options

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        asked = parse(self.spec.name, RerankArguments, arguments)
        check_configured(self.spec.name, "api_url", asked.api_url, self._service.base_url)
        scores = await self.scores(asked.query, asked.documents, asked.model_name)
        order = sorted(range(len(scores)), key=lambda position: -scores[position])
        best = order if asked.top_n < 0 else order[: asked.top_n]
        ranked = [document("", asked.documents[at], score=scores[at], index=at) for at in best]
        return result_of(ranked, call_id(self.spec.name, arguments), self._service.cost())

    async def scores(self, query: str, documents: Sequence[str], model: str | None = None) -> list[float]:
        """One relevance score per document, in their order. Raises ToolError."""
        named = {} if (chosen := model or self._options.model) is None else {"model": chosen}
        if self._options.endpoint.endswith("/score"):
            body = {**named, "text_1": query, "text_2": list(documents)}
            found = items(self._service, await self._service.post(self._options.endpoint, body, self._headers), "data")
            pairs = [(entry.get("index", position), entry.get("score")) for position, entry in enumerate(found)]
        else:
            body = {**named, "query": query, "documents": list(documents)}
            answer = await self._service.post(self._options.endpoint, body, self._headers)
            pairs = [
                (entry.get("index"), entry.get("relevance_score")) for entry in items(self._service, answer, "results")
            ]
        return self._aligned(pairs, len(documents))

    async def close(self) -> None:
        await self._service.close()

    def _aligned(self, pairs: list[tuple[Any, Any]], count: int) -> list[float]:
        scores = {index: score for index, score in pairs if isinstance(score, int | float)}
        if len(pairs) != count or set(scores) != set(range(count)):
            raise self._service.fail(f"expected one score for each of {count} documents, got {len(scores)}")
        return [float(scores[index]) for index in range(count)]
